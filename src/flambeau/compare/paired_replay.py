"""Runs both runs again from where they were equal, step by step, to the first difference.

Only for runs of `flambeau train` whose data and model are still there: their code is run. Nothing is written
into either folder. Each uses its own settings, data and number of threads.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flambeau.compare.replayed_run import Batch, ReplayedRun
from flambeau.compare.run_comparison import RunComparison
from flambeau.compare.saved_states import StateDifference, state_difference
from flambeau.compare.step_events import (
    FirstDifference,
    batch_difference,
    first_event,
    tensor_phase,
)
from flambeau.errors import InputError
from flambeau.recipes.checkpoints.atomic_checkpoint import CheckpointDamaged
from flambeau.run.loop.nan_guard import NotFinite

REPLAY_S = 80.0
"""Seconds of steps of both runs together; chosen: two minutes in total."""
_CHECK_S = 20.0
"""Further seconds for each run, to reach its next checkpoint."""


@dataclass
class Reproduced:
    """How a run's replay compares with its records.

    Attributes:
        state: how they differ; None if equal to the bit.
        loss: first step of another loss: (step, (recorded, replayed)).
        machine: how this one differs from the training's.
    """

    step: int | None = None
    state: StateDifference | None = None
    loss: tuple[int, tuple[float, float]] | None = None
    machine: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool | None:
        """Whether the replay equals the run; None if nothing could be compared."""
        if self.step is None and self.loss is None:
            return None
        return self.state is None and self.loss is None


@dataclass
class Replay:
    """The result of a replay.

    Attributes:
        last: the last equal step.
        step: the first that differs, from 1; 0 for the start.
        difference: what differs first in it.
        options: of the optimizer that differ in it, by name.
        is_out_of_time: the time ended before anything differed.
    """

    start: int | None = None
    why_not: str | None = None
    last: int = 0
    step: int | None = None
    difference: FirstDifference | None = None
    options: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    reproduced: tuple[Reproduced, Reproduced] = field(
        default_factory=lambda: (Reproduced(), Reproduced())
    )
    is_out_of_time: bool = False

    def as_json(self) -> dict[str, Any]:
        difference = self.difference
        return {
            "start": self.start,
            "why_not": self.why_not,
            "last": self.last,
            "step": self.step,
            "phase": None if difference is None else difference.phase,
            "name": None if difference is None else difference.name,
            "text": None if difference is None else difference.text,
            "reproduced": [side.is_equal for side in self.reproduced],
            "out_of_time": self.is_out_of_time,
        }


def replay(
    comparison: RunComparison,
    *,
    trust: bool = False,
    say: Callable[[str], None],
    seconds: float = REPLAY_S,
) -> Replay:
    """Run both again, from the last equal checkpoint, or from their beginnings.

    `trust`: as for `load_trained`. The last step may exceed `seconds`.
    """
    result = Replay()
    if comparison.divergence is None or comparison.is_evaluation_only:
        result.why_not = "nothing that both have recorded of their training differs"
        return result
    scratch = tempfile.TemporaryDirectory(prefix="flambeau-diff-", ignore_cleanup_errors=True)
    end = comparison.divergence[1]
    start = max((step for step in comparison.equal_steps if step < end), default=None)
    try:
        with scratch as temporary, contextlib.ExitStack() as resources:
            sides = []
            for number, facts in enumerate(comparison.runs):
                say(f"replaying {facts.folder.path} from step {start or 0}")
                folder = facts.folder
                permission = folder.permission(folder.read_existing(), trust=trust, say=say)
                side = ReplayedRun(facts, start, Path(temporary, str(number)), permission)
                resources.callback(side.close)
                sides.append(side)
            result.start = result.last = start or 0
            end = max(end, *(_target(side) for side in sides))
            _replay_together((sides[0], sides[1]), result, end=end, seconds=seconds)
            for side, outcome in zip(sides, result.reproduced, strict=True):
                _replay_to_checkpoint(side, outcome, is_different=result.difference is not None)
    except (InputError, CheckpointDamaged, torch.OutOfMemoryError) as error:
        result.why_not = str(error).splitlines()[0]
    return result


def _target(side: ReplayedRun) -> int:
    """The step of its next checkpoint; 0 without one."""
    return 0 if side.recorded is None else int(side.recorded.state["step"])


def _replay_together(
    sides: tuple[ReplayedRun, ReplayedRun], result: Replay, *, end: int, seconds: float
) -> None:
    """Let both do the same step one after the other, up to the first difference."""
    for side, outcome in zip(sides, result.reproduced, strict=True):
        if side.recorded_start is not None:
            state = state_difference(0, side.recorded_start, side.state())
            if state is not None and state.tensors:
                outcome.step = 0
                outcome.state = state
    _compare_states(sides, result, step=result.last)
    if (first := result.difference) is not None:
        result.step = 0
        result.difference = FirstDifference("start", first.text, first.name)
        return
    deadline = time.monotonic() + seconds
    targets = {side: _target(side) for side in sides}
    while result.difference is None and sides[0].step < end:
        if time.monotonic() > deadline:
            result.is_out_of_time = True
            return
        a, b = (_advance(side) for side in sides)
        if not isinstance(a, Batch) or not isinstance(b, Batch):
            if a != b:
                which = 1 if isinstance(a, Batch) else 0
                side = sides[which]
                why = (a, b)[which]
                what = why or f"ends at step {side.step}"
                result.step = side.step + (why is None)
                result.difference = FirstDifference("length", f"{side.facts.folder.path}: {what}")
            return
        _compare_pass(sides, (a, b), result)
        for side, outcome in zip(sides, result.reproduced, strict=True):
            if result.difference is None and side.step == targets[side] and outcome.step is None:
                _compare_with_checkpoint(side, outcome)


def _advance(side: ReplayedRun) -> Batch | str | None:
    """One pass of a run; None at its end, a sentence if it stops at a value that is not finite."""
    try:
        return side.advance(watched=True)
    except NotFinite as error:
        return str(error).splitlines()[0]


def _compare_pass(
    sides: tuple[ReplayedRun, ReplayedRun], batches: tuple[Batch, Batch], result: Replay
) -> None:
    a, b = batches
    result.step = a.step
    result.difference = batch_difference(
        (a.names, b.names),
        (a.images, b.images),
        (a.targets, b.targets),
        (sides[0].classes, sides[1].classes),
    ) or first_event(sides[0].events.events, sides[1].events.events)
    if result.difference is None and a.ends_step is not b.ends_step:
        result.difference = FirstDifference(
            "length", "the step has more forward passes in one than in the other"
        )
    if result.difference is None and a.ends_step:
        _compare_states(sides, result, step=a.step)
    if result.difference is None:
        result.step = None
        result.last = a.step


def _compare_states(sides: tuple[ReplayedRun, ReplayedRun], result: Replay, *, step: int) -> None:
    """Compare weights, the optimizer's state, statistics and averages after a step."""
    state = state_difference(step, *(side.state() for side in sides))
    if state is None:
        return
    result.options = {
        name: pair
        for name, pair in state.values.items()
        if name.startswith("parameter group") and not name.endswith(("initial_lr", "lr scale"))
    }
    if state.tensors:
        first = state.tensors[0]
        more = f"; {len(state.tensors)} of {state.num_tensors} tensors differ"
        text = f"{_named(str(first), sides[0])}{more}"
        result.difference = FirstDifference(
            tensor_phase(first, buffers=sides[0].buffers), text, first.name
        )


def _named(text: str, side: ReplayedRun) -> str:
    """The text with the names of the optimizer's parameters for their numbers."""
    prefix = "optimizer state of parameter "
    number, colon, rest = text.removeprefix(prefix).partition(":")
    if not text.startswith(prefix) or not number.isdecimal():
        return text
    names = side.parameters
    name = names[int(number)] if int(number) < len(names) else number
    return f"optimizer state of '{name}'{colon}{rest}"


def _replay_to_checkpoint(side: ReplayedRun, outcome: Reproduced, *, is_different: bool) -> None:
    """Let a run continue alone, and check whether it reaches the checkpoint that it wrote."""
    deadline = time.monotonic() + _CHECK_S
    target = _target(side)
    try:
        while is_different and side.step < target and time.monotonic() < deadline:
            if side.advance(watched=False) is None:
                break
        if outcome.step is None and side.step == target and side.recorded is not None:
            _compare_with_checkpoint(side, outcome)
    except NotFinite:
        pass  # the run was rolled back from here, or stopped: there is nothing to compare
    outcome.loss = side.loss_difference()
    if outcome.is_equal is False:
        outcome.machine = side.machine_changes()


def _compare_with_checkpoint(side: ReplayedRun, outcome: Reproduced) -> None:
    assert side.recorded is not None
    outcome.step = side.step
    state = state_difference(side.step, side.recorded, side.state())
    # Only tensors: options of the optimizer's groups depend on the version of torch.
    outcome.state = None if state is None or not state.tensors else state
