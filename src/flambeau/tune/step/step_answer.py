"""`flambeau doctor` of a run or a model: what a step costs here, and what the common advice gives."""

import contextlib
import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from flambeau.errors import InputError, WorkerLost
from flambeau.inspection.graphs.picture import size_text
from flambeau.tune.doctor.answer import Answer, Table
from flambeau.tune.doctor.formatting import percent, shown
from flambeau.tune.step.checklist import ChecklistItem, checklist
from flambeau.tune.step.step_profile import ModuleTime, StepProfile, profile_steps
from flambeau.tune.step.training_steps import Steps, no_part
from flambeau.user_code import first_line

_OPERATIONS = 10  # rows of the tables; --json has all
_KINDS = 5
_MODULES = 8
_FUNCTIONS = 6
_OWNERS = 5
_WAITS = 0.1  # a step that waits for data for a larger share gets a hint; chosen
_RECORDED = 3  # steps whose memory is recorded


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How much is measured and written.

    Attributes:
        trace: file for a time line, which ui.perfetto.dev opens.
        memory: file for all blocks of a CUDA device's memory, for pytorch.org/memory_viz.
    """

    rounds: int = 15
    budget_s: float = 60.0
    trace: Path | None = None
    memory: Path | None = None


def answer_of_steps(steps: Steps, options: StepOptions, *, say: Callable[[str], None]) -> Answer:
    """Measure steps of a run or a model, and try the common advice.

    InputError: a step fails, or the device's memory cannot be recorded. WorkerLost: a process that reads data
    died.
    """
    if options.memory is not None and steps.device.type != "cuda":
        raise InputError(
            f"--memory records the memory of a CUDA device, and the steps run on {steps.device}\n"
            "Leave it out: the answer says what lives at the peak, on any device"
        )
    with _failing_as_input():
        say("measuring steps")
        profile = profile_steps(steps, trace=options.trace)
        if options.memory is not None:
            _record_memory(steps, options.memory)
        advice: tuple[ChecklistItem, ...] = ()
        if options.rounds:
            say("trying the usual advice, a minute or two")
            computes_s = profile.step.median_s - profile.waits_s
            advice = checklist(
                steps, computes_s=computes_s, rounds=options.rounds, enough_s=options.budget_s
            )
    about = f"{steps.about}; {profile.steps} steps on {_device_name(steps.device)}"
    data = {"about": steps.about, "device": _device_name(steps.device)}
    data |= dataclasses.asdict(profile) | {"advice": [dataclasses.asdict(one) for one in advice]}
    parts: tuple[Table | str, ...] = (*_lines(profile), *_tables(profile, advice))
    verdict = _verdict(profile, [one for one in advice if one.name not in steps.has])
    return Answer(about, verdict, parts, {"verdict": verdict, **data})


@contextlib.contextmanager
def _failing_as_input() -> Iterator[None]:
    """The model is the user's: its errors are reported in one line."""
    try:
        yield
    except (InputError, WorkerLost):
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"a training step fails: {type(error).__name__}: {first_line(error)}"
        ) from error


def _record_memory(steps: Steps, file: Path) -> None:
    torch.cuda.memory._record_memory_history(device=steps.device)
    try:
        for _ in range(_RECORDED):
            steps.step(no_part)
        torch.cuda.memory._dump_snapshot(os.fspath(file))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=steps.device)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return (
        f"{device}, {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else str(device)
    )


# ---------------------------------------------------------------- in words


def _verdict(profile: StepProfile, advice: Sequence[ChecklistItem]) -> str:
    step_s = profile.step.median_s
    longest = max(profile.parts, key=lambda part: part.median_s)
    text = (
        f"A step takes {_milliseconds(step_s)} ms, {percent(longest.median_s / step_s)} of it for "
        f"{longest.name.removeprefix('wait for ')}"
    )
    faster = [one for one in advice if one.gain is not None and one.gain.verdict == "faster"]
    if faster:
        best = max(faster, key=lambda one: one.gain.times if one.gain else 0.0)
        assert best.gain is not None
        text += f"; {best.name} makes it {best.gain.times:.2f} times as fast (measured)"
    return f"{text}."


def _lines(profile: StepProfile) -> Iterator[str]:
    step_s = profile.step.median_s
    waits_s = profile.waits_s
    if profile.memory is not None:
        yield (
            f"Memory: {size_text(profile.memory.peak_bytes)} at the peak of a step, above "
            f"{size_text(profile.memory.there_before)} of parameters and buffers and the optimizer's state."
        )
    if profile.read_s is not None:
        line = (
            f"Data: {_milliseconds(profile.read_s)} ms per batch alone; a step computes for "
            f"{_milliseconds(step_s - waits_s)} ms and waits for {_milliseconds(waits_s)} ms"
        )
        if waits_s > _WAITS * step_s:
            line += "; more --workers, smaller images or packed ones help"
        yield f"{line}."
    yield f"Python itself: {_milliseconds(profile.python_s)} ms per step at most (cProfile makes it slower)."


def _tables(profile: StepProfile, advice: tuple[ChecklistItem, ...]) -> list[Table]:
    tables = []
    if advice:
        rows = tuple(map(_advice_row, advice))
        tables.append(Table(("change", "ms", "measured", "", "how"), rows))
    step_s = profile.step.median_s
    parts = [
        (
            part.name,
            _milliseconds(part.median_s),
            f"{_milliseconds(part.low_s)} to {_milliseconds(part.high_s)}",
            percent(part.median_s / step_s),
        )
        for part in (*profile.parts, profile.step)
    ]
    tables.append(Table(("of a step", "ms", "half of the steps", "share"), tuple(parts), 3))
    operations = [
        (
            one.name.removeprefix("aten::"),
            _milliseconds(one.self_s),
            percent(one.share),
            f"{one.calls:.0f}",
        )
        for one in profile.operations[:_OPERATIONS]
    ]
    of_operations = ("operation", "own ms per step", "share", "calls per step")
    tables.append(Table(of_operations, tuple(operations), 3))
    tables.append(_table_of_modules(profile))
    if profile.memory is not None:
        owners = [(one.name, size_text(one.size_bytes)) for one in profile.memory.owners[:_OWNERS]]
        tables.append(Table(("allocated what lives at the peak", "size"), tuple(owners), 1))
    functions = [
        (one.name, shown(f"{one.file}:{one.line}"), _milliseconds(one.self_s), f"{one.calls:.0f}")
        for one in profile.functions[:_FUNCTIONS]
    ]
    of_functions = ("Python function", "where", "own ms per step", "calls per step")
    return [*tables, Table(of_functions, tuple(functions), 2)]


def _advice_row(one: ChecklistItem) -> tuple[str | None, ...]:
    time = None if one.time_s is None else _milliseconds(one.time_s)
    return one.name, time, f"{one.gain.times:.2f}x" if one.gain else None, one.verdict, one.how


def _table_of_modules(profile: StepProfile) -> Table:
    """Sums over modules of the same type, then the slowest modules."""
    kinds: dict[str, list[ModuleTime]] = defaultdict(list)
    for one in profile.modules:
        kinds[one.kind].append(one)
    sums = [
        ModuleTime(
            f"all {len(ones)} {kind}",
            "",
            sum(one.forward_s for one in ones),
            sum(one.backward_s for one in ones),
        )
        for kind, ones in kinds.items()
        if len(ones) > 1
    ]
    sums.sort(key=lambda one: -one.total_s)
    all_s = sum(one.total_s for one in profile.modules) or 1.0
    rows = [
        (
            one.name or "(model)",
            one.kind or None,
            _milliseconds(one.forward_s),
            _milliseconds(one.backward_s),
            percent(one.total_s / all_s),
        )
        for one in (*sums[:_KINDS], *profile.modules[:_MODULES])
    ]
    return Table(("module", "kind", "forward ms", "backward ms", "share"), tuple(rows), 3)


def _milliseconds(seconds: float) -> str:
    """Three digits, or more if there are more before the point."""
    return f"{seconds * 1000:.3g}" if seconds < 0.9995 else f"{seconds * 1000:.0f}"
