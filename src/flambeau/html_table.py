"""A value as a small table in a notebook, with escaped text."""

import html
from collections.abc import Mapping


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """HTML of a title and a row per name; None is left out, and floats have four decimals."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(_text(value))}</td></tr>"
        for name, value in rows.items()
        if value is not None
    )
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"


def _text(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
