"""A cause of lost time, and how shares and lines are put into words."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.terminal import printable
from flambeau.tune.watch.code_origin import in_package

_CELL = 200  # characters that a table shows of a cell
_LONGEST_REASON = 4000  # characters, some fifty lines; chosen


@dataclass(frozen=True)
class Cause:
    """Something that takes time.

    Attributes:
        kind: read, decode, transform, collate, send, few workers, many workers, worker start, copy, model,
            small steps, sync, python, optimizer, compile, threads, slow rank, communication, checkpoint,
            evaluation, debug mode, quota, memory, page faults.
        share: of the time of training.
        where: FILE:LINE to look at; '' where there is none.
        text: in words.
    """

    kind: str
    share: float
    where: str
    text: str


def of_package(where: str) -> str:
    """FILE:LINE from the folder of its installed package on; '' of anything else."""
    return in_package(where)


def shown(where: str) -> str:
    """FILE:LINE as short as it can be opened from here; of a package from its own folder on."""
    if package := of_package(where):
        return package
    relative = os.path.relpath(where)
    return where if relative.startswith("..") else relative


def reasons_in_full(failures: Iterable[tuple[str, str]]) -> list[str]:
    """Lines below a table, which shows the first line of a reason only; what failed alike is listed once.

    Args:
        failures: what failed, and why, in lines, which may be of a script and hold anything.
    """
    names: dict[str, list[str]] = {}
    for name, reason in failures:
        if "\n" in reason or len(reason) > _CELL:
            names.setdefault(reason, []).append(name)
    return [_in_full(", ".join(alike), reason) for reason, alike in names.items()]


def _in_full(name: str, reason: str) -> str:
    """'NAME: REASON'; the middle of a very long one is left out."""
    left_out = len(reason) - _LONGEST_REASON
    if left_out > 0:
        half = _LONGEST_REASON // 2
        middle = f"\n... {left_out} characters are left out here; --json has them ...\n"
        reason = f"{reason[:half]}{middle}{reason[-half:]}"
    lines = [printable(line) for line in reason.splitlines()]
    return "\n".join([f"{name}: {lines[0]}", *(f"  {line}" for line in lines[1:])])


def percent(share: float) -> str:
    """'61 %'."""
    return f"{100 * share:.0f} %"


def at_line(where: str) -> str:
    """', at FILE:LINE'; '' where there is none."""
    return f", at {shown(where)}" if where else ""


def _source(where: str) -> str:
    """The line itself, in parentheses; '' if it cannot be read."""
    file, _, line = where.rpartition(":")
    try:
        text = Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""
    return f" ({text[:60]})" if text else ""


def line_with_source(where: str) -> str:
    """', at FILE:LINE (what stands there)'."""
    return f"{at_line(where)}{_source(where)}"


def compiled_anew(trainer: dict[str, Any]) -> str:
    """' (3 graphs in 20 steps)': what was compiled while the steps were timed; '' for nothing."""
    graphs = trainer.get("graphs_in_window", 0)
    if not graphs:
        return ""
    return f" ({graphs} graph{'s' * (graphs > 1)} in {trainer['steps']} steps)"


def graph_breaks_line(trainer: dict[str, Any]) -> str:
    """A sentence: how often torch.compile had to end a graph, and why most often; '' where it never had to.

    What that costs shows only in a trial without torch.compile, so it is no cause with a share.
    """
    breaks = trainer.get("graph_breaks", {})
    if not breaks:
        return ""
    most = max(breaks, key=lambda reason: breaks[reason])
    return (
        f"torch.compile has made {trainer['graphs']} graphs; graph breaks: {sum(breaks.values())}, most "
        f"often for: {most} (TORCH_LOGS=graph_breaks says where)."
    )
