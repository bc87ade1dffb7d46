"""What was seen of a training: one row for each kind and line of the user, with how often and figures."""

import sys
from typing import Any

from flambeau.tune.watch.code_origin import origin_of_file
from flambeau.tune.watch.stack_phases import CodeLocation, user_line


class Notes:
    """Rows by kind and line; a row keeps the figures of its first and its last time."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, CodeLocation | None], dict[str, Any]] = {}

    def add(self, kind: str, where: CodeLocation | None = None, **figures: Any) -> None:
        row = self._rows.setdefault((kind, where), {"count": 0, "first": figures})
        row["count"] += 1
        row["last"] = figures

    def as_rows(self) -> list[dict[str, Any]]:
        return [
            {"kind": kind, "file": where.file if where else "", "line": where.line if where else 0}
            | row
            for (kind, where), row in self._rows.items()
        ]


def line_here(depth: int = 2) -> CodeLocation | None:
    """The innermost line of the user that led to the caller of the caller."""
    return user_line(sys._getframe(depth))


def last_line(function: Any) -> CodeLocation | None:
    """That of the last statement of a function of the user: what is returned."""
    code = getattr(function, "__code__", None)
    if code is None or origin_of_file(code.co_filename).owner != "user":
        return None
    line = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
    return CodeLocation(code.co_filename, line, code.co_name)


def as_pair(where: CodeLocation | None) -> list[Any]:
    return ["", 0] if where is None else [where.file, where.line]
