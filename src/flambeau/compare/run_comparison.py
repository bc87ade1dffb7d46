"""Two runs compared from what is in their folders, in the order in which one thing causes another."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flambeau.compare.line_difference import MetricLines, compare_lines
from flambeau.compare.recorded_facts import (
    Difference,
    RunFacts,
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
    """What two run folders tell about each other.

    Attributes:
        runs: what each says of itself.
        facts: what of that differs, in the order of cause and effect.
        lines: metrics.jsonl of both.
        sample: the first sample in which their training data differ.
        why_no_sample: why that is not known, where the data differ.
        equal_steps: of checkpoints of both that are equal to the bit, before the first that is not.
        num_tensors: of such a checkpoint.
        state: the first checkpoint of both that differs.
        loss: the first step whose loss differs, among those whose losses both have, and the two losses.
        equal_losses: steps whose losses are equal, as far as checkpoints hold them.
        damaged: checkpoints that are not as they were saved.
    """

    runs: tuple[RunFacts, RunFacts]
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
    def parts(self) -> tuple[int, int] | None:
        """The first and the last step in which they may part for the first time; None where they do not."""
        steps = [
            None if self.state is None else self.state.step,
            None if self.loss is None else self.loss[0],
            None if self.lines.first is None else self.lines.first.step,
        ]
        end = min((step for step in steps if step is not None), default=None)
        low = self.equal_steps[-1] + 1 if self.equal_steps else 1
        return None if end is None else (min(low, end), end)

    @property
    def is_of_evaluation(self) -> bool:
        """A figure differs, and the training that came to it, and went on from it, does not."""
        first = self.lines.first
        equal = self.equal_steps
        is_trained_alike = self.state is None and self.loss is None and bool(equal)
        return first is not None and is_trained_alike and equal[-1] >= first.step

    @property
    def is_same(self) -> bool:
        """Nothing that can change a number differs, nor any number that both have, nor their length."""
        that_matter = [fact for fact in self.facts if fact.matters and fact.kind != "environment"]
        return not that_matter and not self.damaged and self.parts is None and self.lines.is_same

    @property
    def has_evidence(self) -> bool:
        """There is a figure or a checkpoint that both have."""
        return self.has_numbers or bool(self.damaged)

    @property
    def has_numbers(self) -> bool:
        """There is a figure or a readable checkpoint that both have."""
        return bool(self.lines.num_figures or self.equal_steps or self.state)

    def as_json(self) -> dict[str, Any]:
        """For `flambeau diff --json`."""
        return {
            "runs": [str(run.folder.path) for run in self.runs],
            "identical": self.is_same,
            "parts_in_steps": None if self.parts is None else list(self.parts),
            "differences": list(map(asdict, self.facts)),
            "sample": None if self.sample is None else asdict(self.sample),
            "loss": self.lines.as_json(),
            "first_loss_of_a_step": None
            if self.loss is None
            else {
                "step": self.loss[0],
                "values": list(self.loss[1]),
            },
            "equal_checkpoints": self.equal_steps,
            "first_different_checkpoint": None if self.state is None else self.state.as_json(),
            "damaged_checkpoints": [
                {"run": found.run, "name": found.name, "why": found.why} for found in self.damaged
            ],
        }


def compare_runs(left: Path, right: Path) -> RunComparison:
    """Compare two runs by what is in their folders; nothing is written, and no code of a user's is run.

    Raises:
        InputError: one of them is no folder of a run, or both are the same.
    """
    runs = read_facts(left), read_facts(right)
    if left.resolve() == right.resolve():
        raise InputError(f"{left} and {right} are the same folder; name two runs")
    facts = fact_differences(*runs)
    lines = compare_lines(runs[0].folder.metrics, runs[1].folder.metrics)
    found = RunComparison(runs, facts, lines)
    _compare_data(found)
    _compare_checkpoints(found)
    return found


def _compare_data(found: RunComparison) -> None:
    """Find the first sample that differs, where the data differ or lie at two places."""
    runs = found.runs
    different = {fact.name for fact in found.facts if fact.kind in ("data", "setting")}
    differ = bool(different & {"train_fingerprint", "train_content", "classes", "train_samples"})
    if not all(run.is_command and run.data for run in runs) or not (differ or "data" in different):
        return
    try:
        sources = [open_training_data(run) for run in runs]
        found.sample = sample_difference(
            sources[0],
            sources[1],
            batch=0 if different & _ORDER else _samples_per_step(runs[0]),
            seed=_whole(runs[0].settings.get("seed")),
        )
        if found.sample is None and differ:
            found.why_no_sample = "every sample that was looked at is the same"
    except InputError as error:
        found.why_no_sample = str(error).splitlines()[0]


def _samples_per_step(run: RunFacts) -> int:
    """0 where the samples are not drawn in an order of (seed, epoch) alone."""
    if run.settings.get("balance", "none") != "none":
        return 0
    sizes = [_whole(run.settings.get(name, 1)) for name in ("batch_size", "accumulate")]
    return sizes[0] * sizes[1]


def _compare_checkpoints(found: RunComparison) -> None:
    """Go through the checkpoints of both, to the first that differs."""
    accumulate = [_whole(run.settings.get("accumulate", 1)) for run in found.runs]
    logged = [run.settings.get("log_every") for run in found.runs]
    folders = [run.folder.path for run in found.runs]
    for step, left, right in pairs(folders[0], folders[1], found.damaged):
        found.facts += history_differences(step, left.meta, right.meta, found.facts)
        if accumulate[0] == accumulate[1] and logged[0] == logged[1]:
            _note_losses(found, left, right, accumulate[0])
        state = state_difference(step, left, right)
        if state is not None and not state.is_of_options:
            found.state = state
            return
        found.equal_steps.append(step)
        found.num_tensors = len(left.model)


def _note_losses(found: RunComparison, left: Restored, right: Restored, accumulate: int) -> None:
    losses = [step_losses(state, accumulate=accumulate) for state in (left, right)]
    first = first_loss_difference(*losses)
    if first is not None and found.loss is None:
        found.loss = first
    end = first[0] if first is not None else max(losses[0], default=0) + 1
    found.equal_losses |= {step for step in losses[0].keys() & losses[1].keys() if step < end}


def _whole(value: object) -> int:
    """A setting that is a whole number; 0 where it is none."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64
    return value if is_count else 0  # type: ignore[return-value]
