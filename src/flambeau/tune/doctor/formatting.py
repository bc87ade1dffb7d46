"""A cause of lost time, and how shares and lines of code are written in sentences."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.terminal import printable
from flambeau.tune.watch.code_origin import in_package

_CELL = 200  # characters of a cell that a table shows
_LONGEST_REASON = 4000  # characters, some fifty lines; chosen


@dataclass(frozen=True)
class Cause:
    """Something that takes time.

    Attributes:
        kind: read, decode, transform, collate, send, few workers, many workers, worker start, copy, model,
            small steps, sync, python, optimizer, compile, threads, slow rank, communication, checkpoint,
            evaluation, debug mode, quota, memory, page faults.
        share: of the training's time.
        where: FILE:LINE to look at; '' if none.
    """

    kind: str
    share: float
    where: str
    text: str


def shown(where: str) -> str:
    """FILE:LINE as short as it opens from here; in a package from its own folder on."""
    if package := in_package(where):
        return package
    relative = os.path.relpath(where)
    return where if relative.startswith("..") else relative


def reasons_in_full(failures: Iterable[tuple[str, str]]) -> list[str]:
    """Distinct reasons of several lines, for below a table of their first."""
    names: dict[str, list[str]] = {}
    for name, reason in failures:
        if "\n" in reason or len(reason) > _CELL:
            names.setdefault(reason, []).append(name)
    return [_in_full(", ".join(alike), reason) for reason, alike in names.items()]


def _in_full(name: str, reason: str) -> str:
    """'NAME: REASON', without the middle of a very long reason."""
    left_out = len(reason) - _LONGEST_REASON
    if left_out > 0:
        half = _LONGEST_REASON // 2
        middle = f"\n... {left_out} characters are left out here; --json has them ...\n"
        reason = f"{reason[:half]}{middle}{reason[-half:]}"
    lines = [printable(line) for line in reason.splitlines()]
    return "\n".join([f"{name}: {lines[0]}", *(f"  {line}" for line in lines[1:])])


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def at_line(where: str) -> str:
    """', at FILE:LINE'; '' if `where` is ''."""
    return f", at {shown(where)}" if where else ""


def _source(where: str) -> str:
    """The source line itself in parentheses; '' if it cannot be read."""
    file, _, line = where.rpartition(":")
    try:
        text = Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""
    return f" ({text[:60]})" if text else ""


def line_with_source(where: str) -> str:
    """', at FILE:LINE (the code of that line)'."""
    return f"{at_line(where)}{_source(where)}"


def compiled_anew(trainer: dict[str, Any]) -> str:
    """' (3 graphs in 20 steps)': what was compiled while the steps were timed; '' if nothing was."""
    graphs = trainer.get("graphs_in_window", 0)
    if not graphs:
        return ""
    return f" ({graphs} graph{'s' * (graphs > 1)} in {trainer['steps']} steps)"


def graph_breaks_line(trainer: dict[str, Any]) -> str:
    """How often torch.compile broke a graph, and the most frequent reason; '' if never.

    Only a trial without torch.compile would show the cost.
    """
    breaks = trainer.get("graph_breaks", {})
    if not breaks:
        return ""
    most = max(breaks, key=breaks.__getitem__)
    return (
        f"torch.compile has made {trainer['graphs']} graphs; graph breaks: {sum(breaks.values())}, most "
        f"often for: {most} (TORCH_LOGS=graph_breaks says where)."
    )
