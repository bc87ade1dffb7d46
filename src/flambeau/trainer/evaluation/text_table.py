"""Tables of text in the output of an evaluation."""

import io
import math
from collections.abc import Sequence
from typing import Literal

from flambeau.terminal import printable

LONGEST = 40  # characters of a name in a table


def text_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, longest: int = LONGEST
) -> str:
    """Aligned columns, the first `left` ones to the left, with Chinese characters by Rich."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(head))
    for number in range(len(rows[0])):
        title = Text(printable(head[number], longest=longest) if head else "")
        side: Literal["left", "right"] = "left" if number < left else "right"
        table.add_column(title, justify=side)
    for row in rows:
        table.add_row(*(Text(printable(cell, longest=longest)) for cell in row))
    text = io.StringIO()
    # As wide as needed: the terminal cuts lines, and a file has no width.
    # A notebook would show it, and not write it into the text.
    console = Console(
        file=text, width=100_000, color_system=None, force_terminal=False, force_jupyter=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def finite(value: float) -> float | None:
    """A number as JSON has it: None for NaN and infinity."""
    return value if math.isfinite(value) else None


def four_digits(value: float | None) -> str:
    """A figure from 0 to 1; '-' if it is not defined."""
    return "-" if value is None else f"{value:.4f}"
