"""An answer of `flambeau doctor`: the lines and tables that both the terminal and the HTML page show."""

from dataclasses import dataclass
from typing import Any

from flambeau.report.markup import escaped, table
from flambeau.report.page import page_head


@dataclass(frozen=True)
class Table:
    """Rows with a cell per column, None for unknown; the last `numbers` columns hold numbers."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]
    numbers: int = 0


@dataclass(frozen=True)
class Answer:
    """What `flambeau doctor` shows: the most important parts first; `data` is the object of `--json`."""

    about: str
    verdict: str
    parts: tuple[Table | str, ...]
    data: dict[str, Any]


def page_of(answer: Answer, command: str) -> str:
    """The answer as one self-contained HTML file; `command` is what the user typed."""
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
