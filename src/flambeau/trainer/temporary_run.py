"""A training in a folder that is removed: what tries out a run leaves nothing of it."""

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from flambeau.data.sources.source import Source
from flambeau.parallel.ranks import join_ranks
from flambeau.trainer.fit import Training, set_up
from flambeau.trainer.parts.data import DataFacts
from flambeau.trainer.settings.resolved_settings import ResolvedSettings


@contextlib.contextmanager
def temporary_training(
    settings: ResolvedSettings,
    facts: DataFacts,
    train: Source,
    val: Source,
    *,
    micro_batch: int | Literal["auto"] | None = None,
) -> Iterator[Training]:
    """A training that is ready to go, and silent; closed at the end, its folder removed.

    Args:
        settings, facts, train, val, micro_batch: as for `set_up`.

    Raises:
        InputError: whatever would prevent the training.
    """
    ranks = join_ranks()
    folder = ranks.first(lambda: tempfile.mkdtemp(prefix="flambeau-trial-"))
    try:
        # `extend` is of the run that is in its folder.
        alone = dataclasses.replace(settings, extend=None, track="none")
        place = Path(folder) / "run"
        training = set_up(
            alone, facts, train, val, folder=place, bar=False, micro_batch=micro_batch
        )
        # Silent from here: Ctrl-C leaves nothing to go on.
        training.run.progress.silent = True
        try:
            yield training
        finally:
            training.run.close()
    finally:
        if ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)
