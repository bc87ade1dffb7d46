"""A table on a terminal, or in a pipe: there aligned text, whole cells, one line per row."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

_LONGEST = 200  # characters of a cell: a name in a file may have any number


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | None]],
    *,
    right: Sequence[str] = (),
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print rows below their headings.

    Args:
        columns: the headings.
        rows: a cell for each of them; None is what is not known, a dash.
        right: the columns of numbers.
        styles: for a cell that begins with this word, its color on a terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        cells = ["-" if cell is None else shown(cell) for cell in row]
        table.add_row(
            *(
                Text(cell, (styles or {}).get(cell.partition(" ")[0].rstrip(","), ""))
                for cell in cells
            )
        )
    if not console.is_terminal:
        console.width = 100_000  # more than all columns together
    with console.capture() as text:
        console.print(table)
    lines = [line.rstrip() for line in text.get().splitlines()]
    # flushed here, where `| head` is handled by the command
    print("\n".join(lines), file=sys.stdout, flush=True)


def print_json(rows: Iterable[Mapping[str, Any]], *, file: TextIO | None = None) -> None:
    """Print one JSON object per line, on standard output unless another file is named."""
    for row in rows:
        print(json.dumps(_finite(row), default=str), file=file)
    (file or sys.stdout).flush()


def shown(text: str) -> str:
    """Text out of a file, fit for a cell: what is not printable is escaped, and it is not too long."""
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def count_text(count: int | None) -> str | None:
    """11,689,512 as 11.7 M."""
    if count is None:
        return None
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON cannot express."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value
