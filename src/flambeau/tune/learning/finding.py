"""One reason why a training may not learn, and how such a reason is made from what was seen."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SURE = ("certain", "likely", "look")
Seen = Mapping[str, Any]
"""What one process has written, see `watch/learning/watch.py`."""
Check = Callable[[Seen], "list[Finding]"]


@dataclass(frozen=True)
class Finding:
    """Something that keeps a training from learning.

    Attributes:
        sure: certain, likely, or look: worth a look, and right in some trainings.
        text: what was measured.
        change: what to change.
        where: FILE:LINE; '' if none.
        rule: the code of the lint rule about the same mistake; '' if none.
        harm: from 1, a little, to 3, nothing is learned.
    """

    kind: str
    sure: str
    text: str
    change: str
    where: str = ""
    rule: str = ""
    harm: int = 2
    page: str = "doctor#why-does-it-not-learn"


def place(where: Any) -> str:
    """FILE:LINE of a row with both, or of a pair."""
    file, line = (where["file"], where["line"]) if isinstance(where, Mapping) else where
    return f"{file}:{line}" if file else ""


def notes_of(seen: Seen, kind: str) -> list[Mapping[str, Any]]:
    return [note for note in seen["notes"] if note["kind"] == kind]


def of_parameters(count: int) -> str:
    return "1 parameter" if count == 1 else f"{count} parameters"
