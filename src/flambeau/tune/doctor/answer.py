"""An answer of `flambeau doctor`, of a script as of a step: the same lines and tables in text and page."""

from dataclasses import dataclass
from typing import Any

from flambeau.report.markup import escaped, table
from flambeau.report.page import page_head


@dataclass(frozen=True)
class Table:
    """Cells of text.

    Attributes:
        heads: of the columns.
        rows: a cell per column; None is what is not known.
        numbers: how many columns, the last ones, hold numbers.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]
    numbers: int = 0


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
        about: what was watched, and where.
        verdict: one sentence: where the time goes, and what helps most.
        parts: tables and lines, what matters most first.
        data: all of it for programs.
    """

    about: str
    verdict: str
    parts: tuple[Table | str, ...]
    data: dict[str, Any]


def page_of(answer: Answer, command: str) -> str:
    """As one HTML file that needs nothing else.

    Args:
        answer: what to show.
        command: that was asked about, as the user typed it.
    """
    shown = "".join(f"<section>{_html(part)}</section>" for part in answer.parts)
    return f"""<!DOCTYPE html>
<html lang="en">
{page_head(f"doctor: {command}", [])}
<body>
<header><h1>{escaped(answer.verdict)}</h1><p><code>{escaped(command)}</code></p>
<p>{escaped(answer.about)}</p></header>
<main>{shown}</main>
</body>
</html>
"""


def _html(part: Table | str) -> str:
    if isinstance(part, str):
        return f"<p>{escaped(part)}</p>"
    rows = [["-" if cell is None else cell for cell in row] for row in part.rows]
    return table(part.heads, rows, numbers=part.numbers)
