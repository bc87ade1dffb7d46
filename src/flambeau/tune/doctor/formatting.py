"""A cause of lost time, and how shares and lines are told in words."""

import os
from dataclasses import dataclass
from pathlib import Path


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
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in where:
            return where.rpartition(folder)[2]
    return ""


def shown(where: str) -> str:
    """FILE:LINE as short as it can be opened from here; of a package from its own folder on."""
    if package := of_package(where):
        return package
    relative = os.path.relpath(where)
    return where if relative.startswith("..") else relative


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
