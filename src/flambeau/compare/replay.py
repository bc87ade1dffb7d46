"""Both runs once more from where they were equal, step by step beside each other, to what differs first.

Only for runs of `flambeau train` whose data and model are still there: these are run. Nothing is written into
either folder. Each computes with its own settings, its own data and as many threads as it had.
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
from flambeau.compare.step_events import Found, batch_difference, first_event, of_tensor
from flambeau.errors import InputError
from flambeau.recipes.checkpoints.atomic_checkpoint import CheckpointDamaged
from flambeau.run.loop.nan_guard import NotFinite

REPLAY_S = 80.0
"""Seconds of steps, of both runs together, to where they differ; chosen: all in all two minutes."""
_CHECK_S = 20.0
"""Seconds more for each run, to its own next checkpoint."""


@dataclass
class Reproduced:
    """How the replay of a run compares with what the run has recorded.

    Attributes:
        step: of the checkpoint that was reached and compared; None if there is none or it was not reached.
        state: how the two differ there; None where they are equal to the bit.
        loss: the first step whose loss is not the recorded one: (step, (recorded, replayed)).
        machine: what is other here than where the run was trained.
    """

    step: int | None = None
    state: StateDifference | None = None
    loss: tuple[int, tuple[float, float]] | None = None
    machine: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool | None:
        """Whether the replay is the run; None where nothing could be compared."""
        if self.step is None and self.loss is None:
            return None
        return self.state is None and self.loss is None


@dataclass
class Replay:
    """What a replay has shown.

    Attributes:
        start: the step from which both began; None if there was no replay.
        why_not: the reason.
        last: the last step that both have done beside each other.
        step: the first step that differs, from 1; 0 for what both began with.
        found: what differs first in it.
        options: of the optimizer that differ in that step, by name.
        reproduced: of both runs.
        is_out_of_time: the time was over before anything differed.
    """

    start: int | None = None
    why_not: str | None = None
    last: int = 0
    step: int | None = None
    found: Found | None = None
    options: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    reproduced: tuple[Reproduced, Reproduced] = field(
        default_factory=lambda: (Reproduced(), Reproduced())
    )
    is_out_of_time: bool = False

    def as_json(self) -> dict[str, Any]:
        """For `flambeau diff --json`."""
        found = self.found
        return {
            "start": self.start,
            "why_not": self.why_not,
            "last": self.last,
            "step": self.step,
            "phase": None if found is None else found.phase,
            "name": None if found is None else found.name,
            "text": None if found is None else found.text,
            "reproduced": [side.is_equal for side in self.reproduced],
            "out_of_time": self.is_out_of_time,
        }


def replay(
    found: RunComparison,
    *,
    trust: bool = False,
    say: Callable[[str], None],
    seconds: float = REPLAY_S,
) -> Replay:
    """Run both again, from the last checkpoint that is equal in both, or from their beginnings.

    Args:
        found: how they compare by their folders.
        trust: run the code that they name, also where nothing shows that this user has made them.
        say: takes lines for the user.
        seconds: for the steps; the one under way is finished.
    """
    result = Replay()
    if found.parts is None or found.is_of_evaluation:
        result.why_not = "nothing that both have recorded of their training differs"
        return result
    scratch = tempfile.TemporaryDirectory(prefix="flambeau-diff-", ignore_cleanup_errors=True)
    start = max((step for step in found.equal_steps if step < found.parts[1]), default=None)
    try:
        with scratch as temporary, contextlib.ExitStack() as resources:
            sides = []
            for number, facts in enumerate(found.runs):
                say(f"replaying {facts.folder.path} from step {start or 0}")
                folder = facts.folder
                permission = folder.permission(folder.read_existing(), trust=trust, say=say)
                side = ReplayedRun(facts, start, Path(temporary, str(number)), permission)
                resources.callback(side.close)
                sides.append(side)
            result.start = result.last = start or 0
            end = max(found.parts[1], *(_target(side) for side in sides))
            _beside_each_other((sides[0], sides[1]), result, end=end, seconds=seconds)
            for side, outcome in zip(sides, result.reproduced, strict=True):
                _to_own_checkpoint(side, outcome, has_found=result.found is not None)
    except (InputError, CheckpointDamaged, torch.OutOfMemoryError) as error:
        result.why_not = str(error).splitlines()[0]
    return result


def _target(side: ReplayedRun) -> int:
    """The step of its next checkpoint; 0 without one."""
    return 0 if side.own is None else int(side.own.state["step"])


def _beside_each_other(
    sides: tuple[ReplayedRun, ReplayedRun], result: Replay, *, end: int, seconds: float
) -> None:
    """Let both do the same step one after the other, to the first that differs."""
    for side, outcome in zip(sides, result.reproduced, strict=True):
        if side.own_beginning is not None:
            state = state_difference(0, side.own_beginning, side.state())
            if state is not None and state.tensors:
                outcome.step = 0
                outcome.state = state
    _compare_states(sides, result, step=result.last)
    if result.found is not None:
        result.step, result.found = 0, Found("start", result.found.text, result.found.name)
        return
    deadline = time.monotonic() + seconds
    targets = {side: _target(side) for side in sides}
    while result.found is None and sides[0].step < end:
        if time.monotonic() > deadline:
            result.is_out_of_time = True
            return
        a, b = (_passed(side) for side in sides)
        if not isinstance(a, Batch) or not isinstance(b, Batch):
            if a != b:
                which = 1 if isinstance(a, Batch) else 0
                side = sides[which]
                why = (a, b)[which]
                what = why or f"ends at step {side.step}"
                result.step = side.step + (why is None)
                result.found = Found("length", f"{side.facts.folder.path}: {what}")
            return
        _compare_pass(sides, (a, b), result)
        for side, outcome in zip(sides, result.reproduced, strict=True):
            if result.found is None and side.step == targets[side] and outcome.step is None:
                _compare_with_own(side, outcome)


def _passed(side: ReplayedRun) -> Batch | str | None:
    """One pass of a run; None at its end, and a sentence where it stops at what is not finite."""
    try:
        return side.advance(watched=True)
    except NotFinite as error:
        return str(error).splitlines()[0]


def _compare_pass(
    sides: tuple[ReplayedRun, ReplayedRun], batches: tuple[Batch, Batch], result: Replay
) -> None:
    a, b = batches
    result.step = a.step
    result.found = batch_difference(
        (a.names, b.names),
        (a.images, b.images),
        (a.targets, b.targets),
        (sides[0].classes, sides[1].classes),
    ) or first_event(sides[0].events.events, sides[1].events.events)
    if result.found is None and a.ends_step is not b.ends_step:
        result.found = Found("length", "the step has more forward passes in one than in the other")
    if result.found is None and a.ends_step:
        _compare_states(sides, result, step=a.step)
    if result.found is None:
        result.step = None
        result.last = a.step


def _compare_states(sides: tuple[ReplayedRun, ReplayedRun], result: Replay, *, step: int) -> None:
    """What the step has made of the weights, the optimizer's state, statistics and averages."""
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
        result.found = Found(of_tensor(first, buffers=sides[0].buffers), text, first.name)


def _named(text: str, side: ReplayedRun) -> str:
    """The same with the optimizer's parameters by their names."""
    prefix = "optimizer state of parameter "
    number, colon, rest = text.removeprefix(prefix).partition(":")
    if not text.startswith(prefix) or not number.isdecimal():
        return text
    names = side.parameters
    name = names[int(number)] if int(number) < len(names) else number
    return f"optimizer state of '{name}'{colon}{rest}"


def _to_own_checkpoint(side: ReplayedRun, outcome: Reproduced, *, has_found: bool) -> None:
    """Let a run go on alone, and see whether it comes to the checkpoint that it has written then."""
    deadline = time.monotonic() + _CHECK_S
    target = _target(side)
    try:
        while has_found and side.step < target and time.monotonic() < deadline:
            if side.advance(watched=False) is None:
                break
        if outcome.step is None and side.step == target and side.own is not None:
            _compare_with_own(side, outcome)
    except NotFinite:
        pass  # the run has gone back from here, or stopped: there is nothing to compare
    outcome.loss = side.unlike_loss()
    if outcome.is_equal is False:
        outcome.machine = side.machine_changes()


def _compare_with_own(side: ReplayedRun, outcome: Reproduced) -> None:
    assert side.own is not None
    outcome.step = side.step
    state = state_difference(side.step, side.own, side.state())
    # What the optimizer's groups hold besides the rate may be of another version of torch.
    outcome.state = None if state is None or not state.tensors else state
