"""Pictures as SVG text: shapes and words, no scripts, nothing loaded from elsewhere."""

from collections.abc import Sequence
from html import escape

from flambeau.terminal import text_width

FONT = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
SIZE = 11.0  # of the letters, pixels
LINE = 15.0  # from one line of text to the next
_LETTER = 0.61  # width of a letter by its size: 0.602 of DejaVu Sans Mono, 0.6 of the others


def element(name: str, *content: str, **attributes: object) -> str:
    """An element of SVG, such as `<rect x="1.5"/>`.

    Args:
        name: of the element.
        content: elements and words inside it, already escaped.
        attributes: written with `-` for `_`, `class` as `class_`; None leaves one out. Lengths are pixels.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(content)}</{name}>" if content else f"<{name}{written}/>"


def titled(title: str, *content: str) -> str:
    """Elements that belong together; a browser shows the title under the pointer."""
    return element("g", element("title", clean(title)), *content)


def inline(kind: str, width: int, height: int, parts: Sequence[str], *, label: str) -> str:
    """A picture inside a page whose style sheet has rules for its class."""
    return element(
        "svg",
        *parts,
        class_=kind,
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=label,
    )


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(str(value))


class Picture:
    """Collects shapes of a picture file, whose content is `text`.

    Args:
        width, height: pixels.
        title: for screen readers and browsers.
        description: one or two sentences on what can be seen.
    """

    def __init__(self, width: float, height: float, *, title: str, description: str) -> None:
        self._size = round(width), round(height)
        arrow = element("path", d="M0 0 8 4 0 8z", fill="#777")
        marker = element(
            "marker",
            arrow,
            id="arrow",
            viewBox="0 0 8 8",
            refX=8,
            refY=4,
            markerWidth=7,
            markerHeight=7,
            orient="auto",
        )
        self._parts = [
            element("title", clean(title), id="title"),
            element("desc", clean(description), id="description"),
            element("defs", marker),
            element("rect", width="100%", height="100%", fill="#fff"),
        ]

    def add(self, part: str) -> None:
        """Draw an element over those before it."""
        self._parts.append(part)

    def label(self, x: float, y: float, text: str, **attributes: object) -> None:
        """A line of text whose letters stand on y."""
        self.add(label(x, y, text, **attributes))

    def line(self, start: tuple[float, float], end: tuple[float, float], *, color: str) -> None:
        """A straight line."""
        (x1, y1), (x2, y2) = start, end
        self.add(element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=color))

    def curve(self, points: Sequence[tuple[float, float]], *, color: str) -> None:
        """A smooth arrow from point to point, upright in each."""
        (x, y), *rest = points
        path = f"M{x:.1f} {y:.1f}"
        for to_x, to_y in rest:
            middle = (y + to_y) / 2
            straight = abs(x - to_x) < 0.5
            bent = f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
            path += f"L{to_x:.1f} {to_y:.1f}" if straight else bent
            x, y = to_x, to_y
        self.add(element("path", d=path, fill="none", stroke=color, marker_end="url(#arrow)"))

    def text(self) -> str:
        """The file."""
        width, height = self._size
        return element(
            "svg",
            *(f"\n{part}" for part in self._parts),
            "\n",
            xmlns="http://www.w3.org/2000/svg",
            width=width,
            height=height,
            viewBox=f"0 0 {width} {height}",
            role="img",
            aria_labelledby="title description",
            font_family=FONT,
            font_size=SIZE,
        )


def label(x: float, y: float, text: str, **attributes: object) -> str:
    """A line of text whose letters stand on y."""
    return element("text", clean(text), x=x, y=y, **attributes)


def width_of(text: str) -> float:
    """The width of a line of text, pixels; wide letters, such as Chinese ones, count twice."""
    return text_width(text) * SIZE * _LETTER


def clean(text: str) -> str:
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
