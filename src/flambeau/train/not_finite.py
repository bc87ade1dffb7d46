"""A step whose loss or gradient was not finite: written down so that it can be run again."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from flambeau.data.errors import InputError
from flambeau.data.loader import Loader
from flambeau.data.ready_batches import ReadyBatches
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file


class NotFinite(InputError):
    """A loss or gradient became NaN or infinite; the weights are those from before that step.

    Attributes:
        path: of the file that says which samples it was; None in a replay.
    """

    def __init__(self, message: str, *, path: Path | None) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class BadStep:
    """Where it happened.

    Attributes:
        step: number of the step, from 1, as in metrics.jsonl.
        epoch: from 0.
        indices: the samples of its global batch, in order.
        samples: what the data set calls them.
        checkpoint: the last one before it, from which a replay starts.
    """

    step: int
    epoch: int
    indices: Sequence[int]
    samples: Sequence[str]
    checkpoint: str | None

    def write(self, folder: Path) -> Path:
        """Write it into the run folder as not-finite-step-N.json."""
        path = folder / f"not-finite-step-{self.step:08d}.json"
        write_file(path, json.dumps(asdict(self), indent=2).encode() + b"\n")
        return path

    @classmethod
    def read(cls, path: Path) -> "BadStep":
        """What `write` wrote.

        Raises:
            InputError: no such file, or another kind of file.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"{path} is not a file that a stopped run has written (not-finite-step-N.json): {error}"
            ) from error


def stop_not_finite(
    steps_before: int, *, loader: Loader | ReadyBatches, checkpoint: str | None, folder: Path | None
) -> NoReturn:
    """Write down which samples the bad step had, and stop the run.

    Args:
        steps_before: steps of the run before the bad one.
        loader: of the training data.
        checkpoint: the last whole one.
        folder: of the run; None writes nothing.

    Raises:
        NotFinite: always.
    """
    epoch, batch = divmod(steps_before, loader.batches_per_epoch)
    message = (
        f"step {steps_before + 1} (epoch {epoch + 1}): the loss or a gradient is NaN or infinite"
    )
    if folder is None:
        raise NotFinite(message, path=None)
    indices = loader.batch_indices(epoch=epoch, batch=batch)
    names = [loader.describe(index) for index in indices]
    path = BadStep(steps_before + 1, epoch, indices, names, checkpoint).write(folder)
    raise NotFinite(
        f"{message}; the weights are those from before it.\nIts samples are listed in {path}",
        path=path,
    )
