"""A training that leaves nothing, for dry runs, range tests and replays."""

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
    """A silent training, perhaps from a checkpoint, ready to start, in a temporary folder."""
    ranks = join_ranks()
    folder = ranks.first(lambda: tempfile.mkdtemp(prefix="flambeau-trial-"))
    if replay_from is None:
        prepared = prepared.but(
            extend=None, track="none", mirror=None
        )  # these belong to the real run folder
    try:
        training = set_up(
            prepared,
            folder=Path(folder) / "run",
            bar=False,
            replay_from=replay_from,
            micro_batch=micro_batch,
        )
        if replay_from is None:
            training.loss_of.side_of_step = None  # time and memory are those of the full size
        # Silent from here: after Ctrl-C there is nothing to continue.
        training.run.progress.silent = True
        try:
            yield training
        finally:
            training.run.close()
    finally:
        if ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)
