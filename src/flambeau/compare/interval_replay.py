"""Trains a run again between two of its kept checkpoints, in a folder of its own, and compares the bits.

Nothing is written into the run. It is the training itself that goes on there, as after a kill, so that its
evaluations and its choice of the best weights are repeated, too. Its data and model are needed: their code is
run.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flambeau.compare.line_difference import NO_FIGURES
from flambeau.compare.recorded_facts import RecordedFacts
from flambeau.compare.saved_states import (
    checkpoint_of,
    first_loss_difference,
    read_state,
    state_difference,
    step_losses,
    steps_of,
)
from flambeau.errors import InputError
from flambeau.parallel.preemption import FLAG
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.checkpoints.atomic_checkpoint import MANIFEST, CheckpointDamaged, write_file
from flambeau.run.folder.checkpointer import Restored
from flambeau.run.folder.identity import changes, exactness_facts
from flambeau.run.folder.json_file import json_file, metrics_row, whole_number
from flambeau.run.folder.micro_batches_file import FILE as MICRO_BATCHES
from flambeau.run.options.option import values_of
from flambeau.run.options.toml_file import as_toml
from flambeau.trainer.fit import Training, fit, make_optimizer, new_model, set_up
from flambeau.trainer.parts.data import Prepared
from flambeau.trainer.parts.device import pick_device

_MAX = 5  # tensors or figures that are named
_NOT_COMPARED = {*NO_FIGURES} - {"step", "epoch"}  # they measure the machine
_BESIDE = ("best", "metrics", "data_length", "ema_updates", "stopped", "extend")
"""What a checkpoint decides with, besides tensors and position."""


@dataclass(frozen=True, order=True)
class Interval:
    """Steps after one kept checkpoint up to the next; `start` 0: from the beginning."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"steps {self.start} to {self.end}"


@dataclass
class Outcome:
    """What a replay of an interval has shown.

    Attributes:
        differences: in words; empty if all is equal to the bit.
        why_not: why it could not be replayed to its end.
    """

    interval: Interval
    differences: list[str] = field(default_factory=list)
    why_not: str | None = None
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not self.differences and self.why_not is None

    def as_json(self) -> dict[str, Any]:
        return {
            "start": self.interval.start,
            "end": self.interval.end,
            "equal": self.is_equal,
            "differences": self.differences,
            "why_not": self.why_not,
        }


class _Reached(Exception):
    """The training is about to take its first step after the interval."""


def intervals_of(run: Path, *, extend: str | None) -> tuple[list[Interval], list[str]]:
    """The intervals of a run between neighbouring checkpoints, and why other checkpoints end none.

    `extend`: of the run; steps before an extension had the schedule of a shorter run.
    """
    starts = [0] if extend is None else []
    ends = []
    left_out = []
    for step in steps_of(run):
        if step == 0:
            continue
        try:
            state = read_state(checkpoint_of(run, step)).state
        except CheckpointDamaged as error:
            left_out.append(f"step {step}: DAMAGED: {error.name} {error.what}")
            continue
        if state.get("extend") != extend:
            left_out.append(f"step {step}: the run was extended later, which changes its schedule")
        elif state.get("planned", step) != step:
            left_out.append(f"step {step}: a stop made this checkpoint, a replay makes none there")
        else:
            ends += [step] if starts else []
            starts.append(step)
    return [Interval(*pair) for pair in zip(starts, ends, strict=False)], left_out


def why_other_bits(facts: RecordedFacts, ends: list[int], settings: Any) -> list[str]:
    """What differs here from the machine of the training, so that bits would differ without a forgery.

    `ends`: of intervals, whose checkpoints are whole.
    """
    here = exactness_facts(pick_device(settings.device), compiled=settings.compile != "none")
    found: list[str] = []
    for end in ends:
        then = json_file(checkpoint_of(facts.folder.path, end) / MANIFEST)["meta"].get("exactness")
        then = dict(then) if isinstance(then, Mapping) else dict(facts.exactness)
        now = dict(here)
        now["threads"] = _threads(then)
        if "processes" in then:  # else a run in parts, whose bits do not depend on them
            now["processes"] = 1
        found += [text for text in changes(then, now) if text not in found]
    return found


def _threads(then: Mapping[str, Any]) -> int:
    threads = whole_number(then.get("threads"))
    return threads if threads and threads <= 256 else torch.get_num_threads()


def group_differences(prepared: Prepared, state: Restored) -> list[str]:
    """Options of the optimizer in a checkpoint that are not those of config.toml."""
    settings = prepared.settings
    ranks = Ranks(0, 1, None)
    no_weights = Path("checkpoint")  # a model that loads none: its values do not matter here
    model, _ = new_model(
        settings, prepared.facts, prepared.train, ranks, folder=no_weights, replay_from=no_weights
    )
    fresh = make_optimizer(settings, model).param_groups
    saved = state.state["optimizer"]["param_groups"]
    if len(fresh) != len(saved):
        return [f"{len(saved)} parameter groups in the checkpoint, {len(fresh)} by config.toml"]
    texts = []
    for number, (wanted, there) in enumerate(zip(fresh, saved, strict=True)):
        rated = {"initial_lr": wanted["lr"], **wanted}
        for name in sorted(rated.keys() & there.keys() - {"params", "lr"}):
            if _plain(rated[name]) != _plain(there[name]):
                texts.append(
                    f"{name} of parameter group {number} is {there[name]} in the checkpoint, and "
                    f"{rated[name]} by config.toml"
                )
    return texts


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def replay_interval(facts: RecordedFacts, prepared: Prepared, interval: Interval) -> Outcome:
    """Train the interval again from its first checkpoint, and compare with the second."""
    outcome = Outcome(interval)
    began = time.monotonic()
    run = facts.folder.path
    scratch = tempfile.TemporaryDirectory(prefix="flambeau-verify-", ignore_cleanup_errors=True)
    threads = torch.get_num_threads()
    try:
        with scratch as temporary:
            recorded = read_state(checkpoint_of(run, interval.end))
            folder = Path(temporary, "run")
            start = _lay_out(facts, prepared, interval, folder)
            outcome.differences += group_differences(prepared, recorded)
            _train(prepared, folder, interval, recorded)
            now = read_state(checkpoint_of(folder, interval.end))
            outcome.differences += _differences(recorded, now, prepared.settings.accumulate)
            outcome.differences += _line_differences(run, folder, start, (recorded, now))
    except (InputError, CheckpointDamaged, torch.OutOfMemoryError, OSError) as error:
        outcome.why_not = str(error).splitlines()[0]
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        outcome.why_not = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        torch.set_num_threads(threads)
    outcome.seconds = time.monotonic() - began
    return outcome


def _lay_out(
    facts: RecordedFacts, prepared: Prepared, interval: Interval, folder: Path
) -> Restored | None:
    """Make the folder as a kill at the first checkpoint would have left it; returns that checkpoint."""
    run = facts.folder.path
    kept = checkpoint_of(run, interval.start)
    if interval.start == 0 and not kept.is_dir():
        return None
    start = read_state(kept)
    if start.state.get("step") != interval.start:
        raise CheckpointDamaged(kept, "training_state.pt", f"is not of step {interval.start}")
    if interval.start == 0:
        return start  # the beginning is made again, and not taken over
    shutil.copytree(kept, checkpoint_of(folder, interval.start))
    size = whole_number(start.state.get("metrics_bytes")) or 0
    with facts.folder.metrics.open("rb") as file:
        write_file(folder / "metrics.jsonl", file.read(size))
    if (run / MICRO_BATCHES).is_file():
        shutil.copy(run / MICRO_BATCHES, folder / MICRO_BATCHES)
    write_file(folder / "dataset.json", prepared.facts.as_json())
    write_file(folder / "config.toml", as_toml(values_of(prepared.settings)))
    return start


def _train(prepared: Prepared, folder: Path, interval: Interval, recorded: Restored) -> None:
    """Let the training go on in the folder until the interval's last checkpoint is written."""
    # Of a run in parts the settings decide.
    in_parts = prepared.settings.parts is not None
    micro_batch = None if in_parts else whole_number(recorded.meta.get("micro_batch"))
    with _threads_of(recorded):
        training = set_up(prepared, folder=folder, bar=False, micro_batch=micro_batch)
    training.run.progress.silent = True
    FLAG.restore(training.run.folder)  # Ctrl-C ends a replay at once: nothing of it is kept
    with _ended_after(training, interval.end), contextlib.suppress(_Reached):
        fit(training)


@contextlib.contextmanager
def _threads_of(recorded: Restored) -> Iterator[None]:
    """Let what is set up within compute with as many threads as the training had."""
    name = "OMP_NUM_THREADS"  # which use_threads follows
    before = os.environ.get(name)
    os.environ[name] = str(_threads(recorded.meta.get("exactness") or {}))
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def _ended_after(training: Training, step: int) -> Iterator[None]:
    """Raise _Reached before the step that follows this one, and wait for the checkpoint being written."""

    def check(*_: object) -> None:
        if training.run.state.step >= step:
            raise _Reached

    hook = training.run.optimizer.register_step_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()
        training.run.close()


def _differences(then: Restored, now: Restored, accumulate: int) -> list[str]:
    """Of two checkpoints of one step: tensors, numbers, generators, and losses of single steps."""
    texts = []
    loss = first_loss_difference(
        step_losses(then, accumulate=accumulate), step_losses(now, accumulate=accumulate)
    )
    if loss is not None:
        step, (recorded, replayed) = loss
        texts.append(f"from step {step} on: its loss was {recorded!r} and is {replayed!r} here")
    state = state_difference(int(then.state["step"]), then, now, generators=True)
    if state is not None:
        if state.tensors:
            names = "; ".join(map(str, state.tensors[:_MAX]))
            texts.append(f"{len(state.tensors)} tensors differ: {names}")
        for name, (before, here) in list(state.values.items())[:_MAX]:
            texts.append(f"{name} was {before} and is {here} here")
    for name in _BESIDE:
        pair = then.state.get(name), now.state.get(name)
        if pair[0] != pair[1] and repr(pair[0]) != repr(pair[1]):  # NaN equals NaN
            texts.append(f"{name} was {pair[0]} and is {pair[1]} here")
    return texts


def _line_differences(
    run: Path, folder: Path, start: Restored | None, ends: tuple[Restored, Restored]
) -> list[str]:
    """The first line of metrics.jsonl in the interval with another figure."""
    first = 0 if start is None else whole_number(start.state.get("metrics_bytes")) or 0
    sides = []
    for path, end in zip((run, folder), ends, strict=True):
        last = whole_number(end.state.get("metrics_bytes")) or 0
        with (path / "metrics.jsonl").open("rb") as file:
            file.seek(first)
            lines = file.read(max(0, last - first)).splitlines()
        rows = [metrics_row(line) for line in lines]
        sides.append([_figures(row) for row in rows])
    if len(sides[0]) != len(sides[1]):
        return [f"metrics.jsonl has {len(sides[0])} lines there, and {len(sides[1])} here"]
    for then, now in zip(*sides, strict=True):
        if then != now:
            names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
            name = names[0]
            return [
                f"{name} at step {now.get('step')} in metrics.jsonl was {then.get(name)!r} and is "
                f"{now.get(name)!r} here"
            ]
    return []


def _figures(row: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (row or {}).items() if name not in _NOT_COMPARED}
