"""Lines and bars for a user on standard error, in colors if the terminal has them.

Bars are shown only on a terminal or in a notebook. No thread draws them, because workers are forked.
"""

import os
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

REFRESH_S = 0.25
"""Seconds between two refreshes, each of which takes half a millisecond."""

# All but line feeds and tabs; and the marks that turn the direction of a text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

_lines: "list[LiveLine]" = []  # those on the screen; `say` prints above the last one


def in_notebook() -> bool:
    """Whether this is a notebook, whose cells can show more than text."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


def shows_bars() -> bool:
    """Whether bars can be shown: on a terminal that can redraw a line, or in a notebook."""
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return in_notebook() or (_is_terminal(sys.stderr) and not is_dumb)


def print_text(text: str = "", *, end: str = "\n", has_colors: bool = False) -> None:
    """Print on standard output, flushed: what a command was asked for.

    This and `say` are the only ways out. Control characters, as in a file's name, and what the stream cannot
    encode are escaped.

    Args:
        has_colors: the control characters are those of colors.
    """
    if _is_open(sys.stdout):
        print(_shown(text, sys.stdout, has_colors), end=end, flush=True)


def is_shown_as_it_is(text: str) -> bool:
    """Whether `print_text` escapes nothing in a text."""
    return not _is_open(sys.stdout) or _shown(text, sys.stdout) == text


def say(text: str, *, green: str = "") -> None:
    """Print a line on standard error, above a bar if there is one; in a notebook on standard output."""
    if in_notebook():
        print_text(text)
    elif not _is_open(sys.stderr):
        return
    elif _lines or (green and _is_terminal(sys.stderr)):
        from rich.text import Text

        shown = Text(_shown(text, sys.stderr))
        if green:
            shown.highlight_words([green], "bold green")
        (_lines[-1].console if _lines else error_console()).print(shown, soft_wrap=True)
    else:
        try:
            print(_shown(text, sys.stderr), file=sys.stderr, flush=True)
        except BrokenPipeError:  # nobody reads it any more, which ends no training
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _is_open(stream: TextIO | None) -> bool:
    """Whether there is a stream: pythonw and `2>&-` leave none."""
    return stream is not None and not stream.closed


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _shown(text: str, stream: TextIO, has_colors: bool = False) -> str:
    """The text with escapes for control characters, and for what the stream cannot encode."""
    if not has_colors and not text.isprintable():  # lines, if nothing else
        text = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def printable(text: str, *, longest: int | None = None) -> str:
    """Text from a file, made safe for a terminal: control characters are escaped, and it is shortened."""
    if longest is not None and len(text) > longest:
        text = text[: longest - 3] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def text_width(text: str) -> int:
    """How many columns a text takes: a Chinese character two, a combining mark none."""
    return sum(
        0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "WF")
        for letter in text
    )


def columns() -> int:
    """Columns of the terminal; 80 without one."""
    return error_console().width if _is_terminal(sys.stderr) else 80


def error_console() -> "Console":
    """Standard error for rich, as plain text except for requested styles."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False, force_jupyter=False)


class LiveLine:
    """A line drawn repeatedly: a terminal's last, or a notebook cell's output."""

    def __init__(self, draw: "Callable[[int], Table]", *, is_kept: bool) -> None:
        from rich.live import Live

        self._draw, self._is_kept = draw, is_kept
        self._handle: Any = None
        self.console = error_console()
        self._live: Live | None = None
        if in_notebook():
            from IPython.display import display

            self._handle = display(draw(_NOTEBOOK_COLUMNS), display_id=True)
            return
        self._live = Live(
            console=self.console,
            auto_refresh=False,
            transient=not is_kept,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=lambda: draw(self.console.width - 1),
        )
        self._live.start(refresh=True)
        self.console.show_cursor()  # rich hides it, and a killed process would leave it so
        _lines.append(self)

    def refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()
        elif self._handle is not None:
            self._handle.update(self._draw(_NOTEBOOK_COLUMNS))

    def stop(self) -> None:
        """Draw it for the last time, or remove it."""
        if self in _lines:
            _lines.remove(self)
        if self._live is not None:
            self._live.stop()
        elif self._is_kept:
            self.refresh()
        else:
            self._handle.update({}, raw=True)
        self._live = self._handle = None


_NOTEBOOK_COLUMNS = 110  # chosen: fits the cell of a notebook on a common screen
_LEAST_BAR, _LONGEST_BAR = 8, 30  # columns; chosen


class CountBar:
    """A bar that counts to a total, on a terminal or in a notebook; thread-safe."""

    def __init__(self, total: int, *, unit: str, shown: bool = True, is_kept: bool = False) -> None:
        self._total, self._unit = total, unit
        self._shown = shown and shows_bars()
        self._is_kept = is_kept
        self._lock = threading.Lock()
        self._line: LiveLine | None = None
        self._done = 0
        self._start = self._due = 0.0

    def __enter__(self) -> "CountBar":
        self._start = self._due = time.perf_counter()
        if self._shown:
            self._line = LiveLine(self._draw, is_kept=self._is_kept)
        return self

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.stop()
            self._line = None

    def update(self, num: int = 1) -> None:
        with self._lock:
            self._done += num
            if self._line is not None and time.perf_counter() >= self._due:
                self._line.refresh()
                self._due = time.perf_counter() + REFRESH_S

    def _draw(self, columns: int) -> "Table":
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rate = self._done / seconds
        fields = {f"{self._done}/{self._total} {self._unit}": 4}
        if self._done:
            fields[f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"] = 2
            fields[f"{clock((self._total - self._done) / rate)} left"] = 3
        return bar_line(columns, self._done, self._total, before={}, after=fields)


def bar_line(
    columns: int, done: float, total: float, *, before: Mapping[str, int], after: Mapping[str, int]
) -> "Table":
    """A bar between texts with priorities, as many of them as fit."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    room = columns - _LEAST_BAR - 2
    shown = set[str]()
    for text, _ in sorted({**before, **after}.items(), key=lambda pair: -pair[1]):
        if len(text) + 2 <= room:
            room -= len(text) + 2
            shown.add(text)
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    bar = ProgressBar(
        total=max(total, 1), completed=done, width=min(_LEAST_BAR + room, _LONGEST_BAR)
    )
    row: list[RenderableType] = [
        *(Text(text, "bold") for text in before if text in shown),
        bar,
        *(Text(text) for text in after if text in shown),
    ]
    for _ in row:
        table.add_column(no_wrap=True, overflow="crop")
    table.add_row(*row)
    return table


def clock(seconds: float) -> str:
    """83 as 1:23, 3683 as 1:01:23."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
