"""Compares two runs by what is in their folders, causes before effects."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flambeau.compare.line_difference import MetricLines, compare_lines
from flambeau.compare.recorded_facts import (
    Difference,
    RecordedFacts,
    fact_differences,
    history_differences,
    read_facts,
)
from flambeau.compare.sample_difference import (
    SampleDifference,
    open_training_data,
    sample_difference,
)
from flambeau.compare.saved_states import (
    Damaged,
    StateDifference,
    first_loss_difference,
    pairs,
    state_difference,
    step_losses,
)
from flambeau.errors import InputError
from flambeau.run.folder.checkpointer import Restored

_ORDER = {"seed", "batch_size", "accumulate", "balance", "image_size"}


@dataclass
class RunComparison:
    """How two run folders compare, causes before effects.

    Attributes:
        why_no_sample: why that is unknown although the data differ.
        equal_steps: checkpoints equal to the bit, before the first that is not.
        num_tensors: of such a checkpoint.
        loss: the first common step with different losses, and these.
        equal_losses: steps with equal losses, as far as checkpoints hold them.
    """

    runs: tuple[RecordedFacts, RecordedFacts]
    facts: list[Difference]
    lines: MetricLines
    sample: SampleDifference | None = None
    why_no_sample: str | None = None
    equal_steps: list[int] = field(default_factory=list)
    num_tensors: int = 0
    state: StateDifference | None = None
    loss: tuple[int, tuple[float, float]] | None = None
    equal_losses: set[int] = field(default_factory=set)
    damaged: list[Damaged] = field(default_factory=list)

    @property
    def divergence(self) -> tuple[int, int] | None:
        """The range of steps in which they may first differ; None if equal."""
        steps = [
            None if self.state is None else self.state.step,
            None if self.loss is None else self.loss[0],
            None if self.lines.first is None else self.lines.first.step,
        ]
        end = min((step for step in steps if step is not None), default=None)
        low = self.equal_steps[-1] + 1 if self.equal_steps else 1
        return None if end is None else (min(low, end), end)

    @property
    def is_evaluation_only(self) -> bool:
        """A figure differs, but the training before and after it does not."""
        first = self.lines.first
        equal = self.equal_steps
        is_trained_alike = self.state is None and self.loss is None and bool(equal)
        return first is not None and is_trained_alike and equal[-1] >= first.step

    @property
    def is_same(self) -> bool:
        """No fact that can change a number differs, nor any common number, nor their length."""
        that_matter = [fact for fact in self.facts if fact.matters and fact.kind != "environment"]
        return (
            not that_matter and not self.damaged and self.divergence is None and self.lines.is_same
        )

    @property
    def has_evidence(self) -> bool:
        """Both have a common figure or checkpoint."""
        return self.has_numbers or bool(self.damaged)

    @property
    def has_numbers(self) -> bool:
        """Both have a common figure or readable checkpoint."""
        return bool(self.lines.num_figures or self.equal_steps or self.state)

    def as_json(self) -> dict[str, Any]:
        return {
            "runs": [str(run.folder.path) for run in self.runs],
            "identical": self.is_same,
            "parts_in_steps": None if self.divergence is None else list(self.divergence),
            "differences": list(map(asdict, self.facts)),
            "sample": None if self.sample is None else asdict(self.sample),
            "loss": self.lines.as_json(),
            "first_loss_of_a_step": None
            if self.loss is None
            else {"step": self.loss[0], "values": list(self.loss[1])},
            "equal_checkpoints": self.equal_steps,
            "first_different_checkpoint": None if self.state is None else self.state.as_json(),
            "damaged_checkpoints": [
                {"run": one.run, "name": one.name, "why": one.why} for one in self.damaged
            ],
        }


def compare_runs(left: Path, right: Path) -> RunComparison:
    """Compare two different run folders; nothing is written, and no user code is run."""
    runs = read_facts(left), read_facts(right)
    if left.resolve() == right.resolve():
        raise InputError(f"{left} and {right} are the same folder; name two runs")
    facts = fact_differences(*runs)
    lines = compare_lines(runs[0].folder.metrics, runs[1].folder.metrics)
    comparison = RunComparison(runs, facts, lines)
    _compare_data(comparison)
    _compare_checkpoints(comparison)
    return comparison


def _compare_data(comparison: RunComparison) -> None:
    """Find the first sample that differs, if the data differ or lie in two folders."""
    runs = comparison.runs
    different = {fact.name for fact in comparison.facts if fact.kind in ("data", "setting")}
    differ = bool(different & {"train_fingerprint", "train_content", "classes", "train_samples"})
    if not all(run.is_command and run.data for run in runs) or not (differ or "data" in different):
        return
    try:
        sources = [open_training_data(run) for run in runs]
        comparison.sample = sample_difference(
            sources[0],
            sources[1],
            batch=0 if different & _ORDER else _samples_per_step(runs[0]),
            seed=_whole(runs[0].settings.get("seed")),
        )
        if comparison.sample is None and differ:
            comparison.why_no_sample = "every sample that was looked at is the same"
    except InputError as error:
        comparison.why_no_sample = str(error).splitlines()[0]


def _samples_per_step(run: RecordedFacts) -> int:
    """0 if the order of the samples does not follow from (seed, epoch) alone."""
    if run.settings.get("balance", "none") != "none" or run.settings.get("shuffle_window"):
        return 0
    sizes = [_whole(run.settings.get(name, 1)) for name in ("batch_size", "accumulate")]
    return sizes[0] * sizes[1]


def _compare_checkpoints(comparison: RunComparison) -> None:
    accumulate = [_whole(run.settings.get("accumulate", 1)) for run in comparison.runs]
    logged = [run.settings.get("log_every") for run in comparison.runs]
    folders = [run.folder.path for run in comparison.runs]
    for step, left, right in pairs(folders[0], folders[1], comparison.damaged):
        comparison.facts += history_differences(step, left.meta, right.meta, comparison.facts)
        if accumulate[0] == accumulate[1] and logged[0] == logged[1]:
            _note_losses(comparison, left, right, accumulate[0])
        state = state_difference(step, left, right)
        if state is not None and not state.is_options_only:
            comparison.state = state
            return
        comparison.equal_steps.append(step)
        comparison.num_tensors = len(left.model)


def _note_losses(
    comparison: RunComparison, left: Restored, right: Restored, accumulate: int
) -> None:
    losses = [step_losses(state, accumulate=accumulate) for state in (left, right)]
    first = first_loss_difference(*losses)
    if first is not None and comparison.loss is None:
        comparison.loss = first
    end = first[0] if first is not None else max(losses[0], default=0) + 1
    comparison.equal_losses |= {step for step in losses[0].keys() & losses[1].keys() if step < end}


def _whole(value: object) -> int:
    """A setting that is a whole number; 0 if it is not."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64
    return value if is_count else 0  # type: ignore[return-value]
