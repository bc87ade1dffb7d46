"""Text and tables as HTML; all text from a run is escaped here."""

import html
from collections.abc import Iterable, Sequence


def escaped(value: object) -> str:
    """A value as text without tags, also fit for an attribute."""
    return html.escape(str(value))


def heading(text: str, *, number: bool = False, sorts: bool = False) -> str:
    """The heading of a column; one that sorts is a button."""
    inner = f'<button type="button">{escaped(text)}</button>' if sorts else escaped(text)
    return f'<th scope="col"{_kind(number)}>{inner}</th>'


def row(name: object, values: Iterable[object], *, numbers: int = 0, differs: bool = False) -> str:
    """A row: its name, and cells of which the last `numbers` are numbers."""
    texts = list(values)
    left = len(texts) - numbers
    cells = (f"<td{_kind(k >= left)}>{escaped(text)}</td>" for k, text in enumerate(texts))
    marked = ' class="differs"' if differs else ""
    return f'<tr{marked}><th scope="row">{escaped(name)}</th>{"".join(cells)}</tr>'


def frame(
    head: Iterable[str], rows: Iterable[str], *, label: str, name: str = "", caption: str = ""
) -> str:
    """A table that scrolls by itself if it is too wide.

    Args:
        head: from `heading`.
        rows: from `row`, or other escaped HTML.
        label: for screen readers.
        name: id for scripts.
        caption: above the table.
    """
    known = f' id="{name}"' if name else ""
    said = f"<caption>{escaped(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escaped(label)}"><table{known}>{said}'
        f"<thead><tr>{''.join(head)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>\n"
    )


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: int, caption: str = ""
) -> str:
    """A table; the last `numbers` cells of each row are numbers."""
    left = len(heads) - numbers
    head = (heading(one, number=k >= left) for k, one in enumerate(heads))
    body = (row(name, values, numbers=numbers) for name, *values in rows)
    return frame(head, body, label=caption or heads[0], caption=caption)


def _kind(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def percent(part: int, whole: int) -> str:
    """A share as text; '-' of nothing."""
    return f"{part / whole:.1%}" if whole else "-"
