"""Pictures as SVG text: shapes and words, no scripts, nothing loaded from elsewhere."""

from collections.abc import Sequence
from html import escape

from rich.cells import cell_len

FONT = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
SIZE = 11.0  # of the letters, pixels
LINE = 15.0  # from one line of text to the next
_LETTER = 0.61  # width of a letter by its size: 0.602 of DejaVu Sans Mono, 0.6 of the others


class Picture:
    """Collects shapes; `text` is the file.

    Args:
        width: pixels.
        height: likewise.
        title: what a screen reader says first, and a browser shows.
        description: one or two sentences about what is to be seen.
    """

    def __init__(self, width: float, height: float, *, title: str, description: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-labelledby="title description" '
            f'font-family="{FONT}" font-size="{SIZE:g}">\n'
            f'<title id="title">{_clean(title)}</title>\n'
            f'<desc id="description">{_clean(description)}</desc>\n'
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 8 4 0 8z" fill="#777"/></marker></defs>\n'
            '<rect width="100%" height="100%" fill="#fff"/>'
        )
        self._parts: list[str] = []

    def box(
        self, place: tuple[float, float, float, float], *, fill: str, line: str, round_: float = 3
    ) -> None:
        """A rectangle of (left, top, width, height)."""
        x, y, width, height = place
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{round_:g}" '
            f'fill="{fill}" stroke="{line}"/>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        bold: bool = False,
        color: str = "#000",
        anchor: str = "start",
        size: float = SIZE,
    ) -> None:
        """A line of text whose letters stand on y."""
        weight = ' font-weight="bold"' if bold else ""
        letters = "" if size == SIZE else f' font-size="{size:g}"'
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{weight}{letters}>'
            f"{_clean(text)}</text>"
        )

    def curve(self, points: Sequence[tuple[float, float]], *, color: str, arrow: bool) -> None:
        """A smooth line from point to point, upright in each."""
        (x, y), *rest = points
        way = f"M{x:.1f} {y:.1f}"
        for to_x, to_y in rest:
            middle = (y + to_y) / 2
            straight = abs(x - to_x) < 0.5
            bent = f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
            way += f"L{to_x:.1f} {to_y:.1f}" if straight else bent
            x, y = to_x, to_y
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self._parts.append(f'<path d="{way}" fill="none" stroke="{color}"{end}/>')

    def line(self, start: tuple[float, float], end: tuple[float, float], *, color: str) -> None:
        """A straight line."""
        (x, y), (to_x, to_y) = start, end
        self._parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{color}"/>'
        )

    def begin(self, note: str) -> None:
        """What follows, up to `end`, belongs together; a browser shows the note under the pointer."""
        self._parts.append(f"<g><title>{_clean(note)}</title>")

    def end(self) -> None:
        """Of what belongs together."""
        self._parts.append("</g>")

    def text(self) -> str:
        """The file."""
        return "\n".join([self._head, *self._parts, "</svg>\n"])


def width_of(text: str) -> float:
    """Of a line of text, pixels; wide letters, such as Chinese ones, count twice."""
    return cell_len(text) * SIZE * _LETTER


def _clean(text: str) -> str:
    """Escaped, and without what XML cannot hold: control characters and halves of surrogates."""
    kept = "".join(
        c
        if c in "\n\t"
        or (ord(c) >= 32 and not 0xD800 <= ord(c) <= 0xDFFF and ord(c) < 0xFFFE)
        or ord(c) > 0xFFFF
        else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )
    return escape(kept)
