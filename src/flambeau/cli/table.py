"""Tables on a terminal, or in a pipe: there aligned text, whole cells, one line per row."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TextIO

from flambeau.terminal import is_shown_as_it_is, print_text, printable, text_width

_LONG_WORD = 24  # columns; longer words may be broken; chosen
_LONGEST = 200  # characters of a cell: names in files may be of any length
_short = partial(printable, longest=_LONGEST)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | None]],
    *,
    right: Sequence[str] = (),
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print rows below their headings; on a narrow terminal each row as several lines.

    None, for unknown, is a dash. `right`: columns of numbers; `styles`: colors of cells on a terminal, by
    first word.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False, force_jupyter=False)
    if not console.is_terminal:
        console.width = 100_000  # more than all columns together
    cells = [["-" if cell is None else _short(cell) for cell in row] for row in rows]
    widths = _widths([columns, *cells], console.width)
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
        show_header=widths is not None,
    )
    for column, width in zip(columns, widths, strict=True) if widths else ():
        justify: Literal["right", "left"] = "right" if column in right else "left"
        table.add_column(column, width=width, justify=justify, overflow="fold")
    for number, row in enumerate(cells):
        texts = [
            Text(cell, (styles or {}).get(cell.partition(" ")[0].rstrip(","), "")) for cell in row
        ]
        if widths is not None:
            table.add_row(*texts)
            continue
        if number:
            table.add_row()
        for column, text in zip(columns, texts, strict=True):
            text.overflow = "fold"
            table.add_row(Text(column, "bold"), text)
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    # flushed here, where `| head` is handled by the command
    print_text("\n".join(lines), has_colors=True)


def _widths(rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Column widths of a table that fits without breaking words; None if there is no room for that."""
    columns = list(zip(*rows, strict=True))
    widest = [max(map(text_width, column)) for column in columns]
    widths = [
        max(min(text_width(word), _LONG_WORD) for cell in column for word in cell.split() or [""])
        for column in columns
    ]
    spare = room - 2 * (len(columns) - 1) - sum(widths)
    if spare < 0:
        return None
    order = sorted(range(len(columns)), key=lambda k: widest[k] - widths[k])
    for done, k in enumerate(order):
        more = min(widest[k] - widths[k], spare // (len(columns) - done))
        widths[k] += more
        spare -= more
    return widths


def print_json(
    rows: Iterable[Mapping[str, Any]], *, file: TextIO | None = None, readable: bool = False
) -> None:
    """Print one JSON object per line.

    `readable`: with letters of all languages where standard output has them, not JSON escapes.
    """
    for row in rows:
        facts = json_facts(row)
        line = json.dumps(facts)
        if file is not None:
            print(line, file=file, flush=True)
            continue
        if readable and is_shown_as_it_is(text := json.dumps(facts, ensure_ascii=False)):
            line = text
        print_text(line)


def count_text(count: int | None) -> str | None:
    """11,689,512 as 11.7 M."""
    if count is None:
        return None
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def json_facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it is printed: null for NaN and infinity, which JSON cannot express, and text for paths."""
    facts: dict[str, Any] = _json_value(row)
    return facts


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _json_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, float):
        return None if value - value != 0 else float(value)
    return value if value is None or isinstance(value, str | int) else str(value)
