"""A step whose loss or gradient was not finite: the run records it for a replay, and stops or rolls back.

flambeau.recipes.training.amp_step detects it on the device and skips the step; `Lifecycle` reads the flag
when a line of metrics or a checkpoint is due.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError, why_no_json
from flambeau.parallel.ranks import Ranks
from flambeau.parallel.watchdog.heartbeat import SAVING
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.recipes.debugging.first_not_finite import first_not_finite
from flambeau.run.folder.checkpointer import Checkpointer, Restored
from flambeau.run.loop.batch_reader import BatchDraws
from flambeau.run.loop.recorder import Recorder
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.state import ResumableState
from flambeau.run.loop.training_step import TrainingStep
from flambeau.run.options.advice import Advice
from flambeau.run.options.run_options import RunOptions

ROLLBACKS = 3
"""After this many rollbacks, with an eighth of the learning rate, the run stops. Chosen."""
LR_FACTOR = 0.5
"""What a rollback multiplies the learning rate by. Chosen."""


class NotFinite(InputError):
    """A loss or gradient became NaN or infinite; the weights are from before that step.

    Attributes:
        path: the file that names the samples of the step; None in a replay.
    """

    def __init__(self, message: str, *, path: Path | None) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class BadStep:
    """A step that was not finite.

    Attributes:
        samples: the data set's names of them.
        checkpoint: before the step, from which a replay starts.
        findings: what was not finite first, with `explain`.
        lr_scale: factor of the learning rate after earlier rollbacks.
    """

    step: int
    epoch: int
    indices: Sequence[int]
    samples: Sequence[str]
    checkpoint: str | None
    findings: Sequence[str] = ()
    lr_scale: float = 1.0

    def __str__(self) -> str:
        first = f": {self.findings[0]}" if self.findings else ""
        return f"step {self.step} (epoch {self.epoch + 1}): the loss or a gradient is NaN or infinite{first}"

    def write(self, folder: Path) -> Path:
        """Write it into the run folder as not-finite-step-N.json."""
        path = folder / f"not-finite-step-{self.step:08d}.json"
        write_file(path, json.dumps(asdict(self), indent=2).encode() + b"\n")
        return path

    @classmethod
    def read(cls, path: Path) -> "BadStep":
        """Read what `write` wrote; InputError: no such file, or another kind of file."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            why = "it holds something else" if isinstance(error, TypeError) else why_no_json(error)
            raise InputError(
                f"{path} is not a file that a stopped run has written (not-finite-step-N.json): {why}"
            ) from error


class NanGuard:
    """Stops the run after a step that was not finite, or rolls back; all ranks together."""

    def __init__(
        self,
        folder: Path | None,
        state: ResumableState,
        parts: RunParts,
        draws: BatchDraws,
        ranks: Ranks,
        step: TrainingStep,
        options: RunOptions,
    ) -> None:
        self._folder = folder
        self._state = state
        self._loader = parts.loader
        self._reader = parts.reader
        self._draws = draws
        self._ranks = ranks
        self._step = step
        self._rolls_back = options.on_nan == "rollback" and folder is not None
        self._explain = options.explain
        self._advice = options.advice or Advice()
        self._lines: list[dict[str, float]] = []
        self._unwritten: list[dict[str, float]] = []

    def roll_back(
        self, steps_before: int, recorder: Recorder, load: Callable[[Restored], None]
    ) -> str:
        """Record a bad step, then load the newest planned checkpoint with a lower rate, or stop by NotFinite.

        `steps_before`: before the bad one. Returns what happened, for the user.
        """
        findings = self.explain(steps_before)
        try:
            why = self._ranks.first(lambda: self._record(steps_before, recorder.saver, findings))
        except NotFinite as error:
            recorder.fail(str(error), step=steps_before + 1)
            raise
        self._ranks.beat(SAVING)  # reading takes as long
        recorder.saver.wait()
        restored = recorder.newest(upto=self._state.planned)
        assert restored is not None  # there is at least that of step 0
        state = self._state
        rollbacks = state.rollbacks + 1
        lr_scale = state.lr_scale * LR_FACTOR
        load(restored)
        state.rollbacks, state.lr_scale = rollbacks, lr_scale
        self._lines.append(
            {"rollback": rollbacks, "bad_step": steps_before + 1, "lr_scale": lr_scale}
        )
        recorder.cut_metrics(restored)
        written = restored.state.get("rollbacks", 0)  # the lines of later rollbacks were cut off
        self._unwritten = [line for line in self._lines if line["rollback"] > written]
        # Otherwise the evaluations of that epoch are repeated, and their lines come first.
        if state.position < state.data_length:
            self.write_rollbacks(recorder)
        return (
            f"{why}\nrollback {rollbacks} of {ROLLBACKS}: going on from step {state.step} with {lr_scale:g} "
            "of the learning rate"
        )

    def write_rollbacks(self, recorder: Recorder) -> None:
        """Write the lines of rollbacks that wait for the end of an epoch, if any."""
        for line in self._unwritten:
            recorder.write(line)
        self._unwritten = []

    def _record(self, steps_before: int, saver: Checkpointer, findings: Sequence[str]) -> str:
        saver.wait()
        epoch, batch = divmod(steps_before, self._loader.batches_per_epoch)
        indices = self._loader.batch_indices(epoch=epoch, batch=batch)
        names = [self._loader.describe(index) for index in indices]
        lr_scale = self._state.lr_scale
        bad = BadStep(steps_before + 1, epoch, indices, names, saver.last_good, findings, lr_scale)
        path = None if self._folder is None else bad.write(self._folder)
        if self._rolls_back and self._state.rollbacks < ROLLBACKS:
            return str(bad)
        again = f", after {ROLLBACKS} rollbacks" if self._rolls_back else ""
        listed = (
            ""
            if path is None
            else f".\n{self._advice.stay_finite}; its samples are listed in {path}"
        )
        message = f"{bad}{again}; the weights are those from before it{listed}"
        raise NotFinite(message, path=path)

    def explain(self, steps_before: int) -> list[str]:
        """Compute the step again with its weights, to see what is not finite first."""
        if self._explain is None or self._ranks.world > 1:
            return []  # a forward pass may need all ranks, and may fail on one of them alone
        explain = self._explain
        findings = dict[int, list[str]]()

        def examine(micro: MicroBatch) -> None:
            names = [self._loader.describe(int(index)) for index in micro.indices[micro.local]]
            findings[micro.part] = list(map(str, explain(micro.data, names, steps_before)))

        def batches() -> Iterator[MicroBatch]:
            for epoch, micro in self._reader.again(self._loader, steps_before):
                self._draws.seed(epoch, micro)
                yield micro

        # Hooks see nothing inside a compiled model.
        with torch.compiler.set_stance("force_eager"):
            origins = self._step.examine(batches(), examine, findings=findings)
        return next((findings[part] for part in [*origins, *findings] if findings.get(part)), [])


def explain(model: nn.Module, loss_of: Callable[[], Tensor], names: Sequence[str]) -> list[str]:
    """What in a batch is not finite first, with the samples' names."""
    lines = []
    for finding in first_not_finite(model, loss_of, batch_size=len(names)):
        samples = ", ".join(names[row] for row in finding.samples[:3])
        more = " ..." if len(finding.samples) > 3 else ""
        lines.append(f"{finding} of its batch: {samples}{more}" if samples else str(finding))
    return lines
