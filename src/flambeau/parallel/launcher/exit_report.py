"""What is said of a rank that has ended, in one line. No torch here."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path

_CAUSE_CHARS = 300


def name_of(rank: int, world: int, host: str, process: int) -> str:
    """A rank for people; `flambeau.parallel.watchdog.failure_detector` uses the same words."""
    return f"rank {rank} of {world} (host {host}, process {process})"


def line_of(name: str, code: int, cause: str, *, lost_peer: int) -> str:
    """How a rank has ended, and why, as far as that is known.

    Args:
        name: of the rank, see `name_of`.
        code: its exit code, negative for a signal.
        cause: what it has left, see `cause_of`; a rank's watch may have said it all there already.
        lost_peer: the code of those who only say that they have lost another one.
    """
    cause = cause.removeprefix(f"{name} failed: ")
    if cause.startswith(f"{name} ") or (code == lost_peer and cause.startswith("rank")):
        return cause
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return f"{name} {how}: {cause}" if cause else f"{name} {how}"


def explained(line: str, causes: Sequence[str]) -> str:
    """The line of a killed rank, or what others have left if their watch has ended it."""
    name = line.partition(" was killed by ")[0]
    for cause in causes:
        if cause.startswith(f"{name} ") and not cause.endswith(" was killed"):
            return cause
    return line


def cause_of(error_file: Path) -> str:
    """The first line of what a rank has left in torch's format; nothing if it had no time to."""
    try:
        message = json.loads(error_file.read_bytes())["message"]
        text = message if isinstance(message, str) else message["message"]
        first = str(text).strip().splitlines()[0]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""
    return first if len(first) <= _CAUSE_CHARS else first[:_CAUSE_CHARS] + "..."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
