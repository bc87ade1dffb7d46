"""Values as small tables in a notebook, with escaped text."""

import html
from collections.abc import Mapping, Sequence


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """HTML of a title and a row per name without None; floats have four decimals."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(_text(value))}</td></tr>"
        for name, value in rows.items()
        if value is not None
    )
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"


def html_grid(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """HTML of a table with a head; a dash stands for None, and floats have four decimals."""
    head = "".join(f"<th style='text-align:left'>{html.escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>"
        + "".join(f"<td style='text-align:left'>{_cell(value)}</td>" for value in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    return "-" if value is None else html.escape(_text(value))


def _text(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
