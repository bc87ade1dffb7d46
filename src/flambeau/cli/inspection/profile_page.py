"""`flambeau inspect --profile`: where the time of a training step goes, on one page."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flambeau.cli.inspection.steps_here import Source, steps_here
from flambeau.cli.inspection.time_text import milliseconds
from flambeau.cli.table import print_json, print_table
from flambeau.sandbox.here import outside

if TYPE_CHECKING:
    from flambeau.inspection.timing.step_profile import StepProfile

_ROWS = {"operations": 10, "modules": 8, "kinds": 5, "functions": 6}
_WAITS = 0.1  # share of the time that a step may wait for data before a line says so; chosen


def print_profile(source: Source, *, trace: Path | None, as_json: bool) -> int:
    """Measure steps, and print the page; returns the exit code."""
    from flambeau.inspection.timing.step_profile import profile_steps
    from flambeau.recipes.checkpoints.atomic_checkpoint import write_file

    write = None if trace is None else functools.partial(write_file, outside(trace))
    with contextlib.redirect_stdout(sys.stderr), steps_here(source) as steps:
        found = profile_steps(steps, trace=write)
    return _print(found, trace, as_json=as_json)


def _print(found: "StepProfile", trace: Path | None, *, as_json: bool) -> int:
    if as_json:
        print_json([dataclasses.asdict(found) | {"trace": None if trace is None else str(trace)}])
        return 0
    print(f"{found.about}\non {found.device}; {found.steps} steps\n")
    rows = [(part.name, part) for part in found.parts] + [("whole step", found.step)]
    print_table(
        ("part", "ms", "half of the steps", "share"),
        [
            (
                name,
                milliseconds(part.median_s),
                f"{milliseconds(part.low_s)} to {milliseconds(part.high_s)}",
                _share(part.median_s, found.step.median_s),
            )
            for name, part in rows
        ],
        right=("ms", "half of the steps", "share"),
    )
    _print_operations(found)
    _print_modules(found)
    _print_functions(found)
    for line in _lines(found, trace):
        print(line)
    return 0


def _print_operations(found: "StepProfile") -> None:
    print()
    operations = found.operations[: _ROWS["operations"]]
    print_table(
        ("operation", "own ms per step", "share", "calls per step"),
        [
            (
                one.name.removeprefix("aten::"),
                milliseconds(one.self_s),
                f"{one.share:.0%}",
                f"{one.calls:.0f}",
            )
            for one in operations
        ],
        right=("own ms per step", "share", "calls per step"),
    )


def _print_modules(found: "StepProfile") -> None:
    from flambeau.inspection.timing.step_profile import ModuleTime

    kinds: dict[str, list[ModuleTime]] = defaultdict(list)
    for one in found.modules:
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
    all_s = sum(one.total_s for one in found.modules)
    print()
    chosen = [*sums[: _ROWS["kinds"]], *found.modules[: _ROWS["modules"]]]
    print_table(
        ("module", "kind", "forward ms", "backward ms", "share"),
        [
            (
                one.name or "(model)",
                one.kind or None,
                milliseconds(one.forward_s),
                milliseconds(one.backward_s),
                _share(one.total_s, all_s),
            )
            for one in chosen
        ],
        right=("forward ms", "backward ms", "share"),
    )


def _print_functions(found: "StepProfile") -> None:
    print()
    print_table(
        ("Python function", "where", "own ms per step", "calls per step"),
        [
            (
                one.name,
                f"{_near(one.file)}:{one.line}",
                milliseconds(one.self_s),
                f"{one.calls:.0f}",
            )
            for one in found.functions[: _ROWS["functions"]]
        ],
        right=("own ms per step", "calls per step"),
    )


def _lines(found: "StepProfile", trace: Path | None) -> list[str]:
    """What follows from the figures."""
    from flambeau.inspection.timing.training_steps import WAIT

    step_s = found.step.median_s
    lines = [
        "",
        f"Python itself: {milliseconds(found.python_s)} ms per step at most (cProfile makes it slower)",
    ]
    if found.read_s is None:
        lines.append(
            "no data were read; the folder of a run in the place of the model measures them, too"
        )
    else:
        waits_s = sum(part.median_s for part in found.parts if part.name == WAIT)
        lines.append(
            f"data alone: {milliseconds(found.read_s)} ms per batch; a step computes for "
            f"{milliseconds(step_s - waits_s)} ms and waits for data for {milliseconds(waits_s)} ms"
        )
        if waits_s > _WAITS * step_s:
            lines.append("the data hold it up: more --workers, smaller images, or packed ones")
    if trace is not None:
        lines.append(f"{trace}: open it at https://ui.perfetto.dev, which keeps it on this machine")
    return lines


def _share(part: float, whole: float) -> str | None:
    return f"{part / whole:.0%}" if whole else None


def _near(file: str, *, parts: Sequence[str] = ("site-packages", "lib")) -> str:
    """A path without the folder in which packages lie."""
    for part in parts:
        before, found, after = file.rpartition(f"{os.sep}{part}{os.sep}")
        if found and before:
            return after
    return file
