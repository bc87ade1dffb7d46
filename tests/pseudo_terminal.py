"""Programs on a terminal of a chosen size, and what they write to it."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import termios
from pathlib import Path
from typing import Any


def on_terminal(python: Any, script: str, folder: Path, *, columns: int, **environment: str) -> str:
    """All that a Python script writes to its terminal, which has 24 lines of so many columns.

    Args:
        python: the class `ForkedPython`.
    """
    main, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    with contextlib.chdir(folder):
        process = python(
            ["-W", "error", "-c", script],
            output=Path(os.ttyname(child)),
            environ={**kept, "TERM": "xterm-256color", **environment},
        )
    written = b""
    while process.poll() is None:
        if select.select([main], [], [], 0.05)[0]:
            written += os.read(main, 65536)
    os.close(child)
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(main, 65536):
            written += part
    os.close(main)
    text = written.decode().replace("\r\n", "\n")
    assert process.poll() == 0, text
    return text


def drawn(text: str) -> list[str]:
    """Each line as it stood at some time, without colors and movements."""
    return re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))


def left(text: str) -> list[str]:
    """The lines that are there at the end."""
    lines = [""]
    for part in re.split(r"(\n|\r|\x1b\[2K|\x1b\[1A)", text):
        if part == "\n":
            lines.append("")
        elif part == "\x1b[1A":
            lines.pop()
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part != "\r":
            lines[-1] += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part)
    return lines
