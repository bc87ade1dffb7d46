"""A training that leaves nothing: dry runs, range tests and replays all train a bit in one of these."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from flambeau.parallel.ranks import join_ranks
from flambeau.trainer.fit import Training, set_up
from flambeau.trainer.parts.data import Prepared


@contextlib.contextmanager
def trial_training(
    prepared: Prepared,
    *,
    replay_from: Path | None = None,
    micro_batch: int | Literal["auto"] | None = None,
) -> Iterator[Training]:
    """A training that is ready to go, and silent; closed at the end, its folder removed.

    Args:
        prepared: as for `set_up`.
        replay_from: a checkpoint folder of the run to start from; None starts at its beginning.
        micro_batch: as for `set_up`.

    Raises:
        InputError: whatever would prevent the training.
    """
    ranks = join_ranks()
    folder = ranks.first(lambda: tempfile.mkdtemp(prefix="flambeau-trial-"))
    if replay_from is None:
        prepared = prepared.but(extend=None, track="none")  # both are of the run in its own folder
    try:
        training = set_up(
            prepared,
            folder=Path(folder) / "run",
            bar=False,
            replay_from=replay_from,
            micro_batch=micro_batch,
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
