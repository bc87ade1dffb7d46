"""One source as bytes of UTF-8, and where the nodes of its tree stand in them."""

import ast
import codecs
import io
import re
import sys
import tokenize
import warnings
from typing import Optional

_NEWLINE = re.compile(rb"\r\n|\n|\r")
_OLD_ASYNC = re.compile(rb"\basync(?=\s*=[^=])")
OLD_ASYNC = "asynk"
"""Stands for the argument `async`, a word of the language since Python 3.7: as long, and it parses."""


class Unreadable(ValueError):
    """A source that cannot be linted; the message says why."""


class Source:
    """The text of a file.

    Offsets count bytes of `data`, which is UTF-8 without a byte order mark whatever the file's encoding is.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._starts: Optional[list[int]] = None

    @property
    def starts(self) -> list[int]:
        """Where each line begins."""
        if self._starts is None:
            self._starts = [0, *(match.end() for match in _NEWLINE.finditer(self.data))]
        return self._starts

    def start_of(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + int(node.col_offset)  # type: ignore[attr-defined]

    def end_of(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + int(node.end_col_offset)  # type: ignore[attr-defined]

    def text_of(self, node: ast.AST) -> str:
        return self.data[self.start_of(node) : self.end_of(node)].decode("utf-8")

    def place_of(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, from 1; the column counts code points."""
        low = 0
        high = len(self.starts)
        while high - low > 1:
            middle = (low + high) // 2
            if self.starts[middle] <= offset:
                low = middle
            else:
                high = middle
        text = self.data[self.starts[low] : offset].decode("utf-8", errors="replace")
        return low + 1, len(text) + 1

    def line(self, number: int) -> str:
        """The text of a line, counted from 1, without its end."""
        start, *end = self.starts[number - 1 : number + 1]
        return self.data[start : end[0] if end else None].decode("utf-8").rstrip("\r\n")


def decode(raw: bytes) -> tuple[bytes, str, bytes]:
    """A file's bytes as UTF-8.

    Returns:
        The text as UTF-8; the file's encoding; its byte order mark, if it has one.

    Raises:
        Unreadable: if the encoding is unknown, or the bytes are none of it.
    """
    mark = codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b""
    body = raw[len(mark) :]
    head = b"".join(body.splitlines(True)[:2]) if b"coding" in body[:400] else b""
    if not head:
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Unreadable(f"byte {error.start} is not UTF-8, and no encoding is named") from None
        return body, "utf-8", mark
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(head).readline)
        return body.decode(encoding).encode("utf-8"), encoding, mark
    except (SyntaxError, LookupError, UnicodeDecodeError) as error:
        raise Unreadable(f"its encoding: {error}") from None


def encode(data: bytes, encoding: str, mark: bytes) -> bytes:
    """The bytes of the file again."""
    return mark + (data if encoding == "utf-8" else data.decode("utf-8").encode(encoding))


def parse(data: bytes) -> ast.Module:
    """The tree of a source; an argument called `async` is renamed to OLD_ASYNC in it.

    Raises:
        Unreadable: if it is not Python 3.
    """
    try:
        return _tree(data)
    except SyntaxError as error:
        replaced = _OLD_ASYNC.sub(OLD_ASYNC.encode(), data)
        if replaced != data:
            try:
                return _tree(replaced)
            except SyntaxError:
                pass
        line = error.lineno or 1
        if _is_python_2(error, data):
            raise Unreadable(
                f"line {line} is Python 2: convert the file to Python 3 first"
            ) from None
        version = ".".join(map(str, sys.version_info[:2]))
        raise Unreadable(f"line {line} cannot be parsed by Python {version}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"cannot be parsed: {error}") from None


def _tree(data: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes such as "\d", which are not our subject
        return ast.parse(data.decode("utf-8"))


_PYTHON_2 = re.compile(
    r"^\s*print\s+[^(=\s]|^\s*print\s*>>|^\s*except\s+[\w.()]+\s*,\s*\w+\s*:|^\s*exec\s+['\"\w]"
    r"|^\s*raise\s+\w+\s*,|\b0[0-7]+\b|\d[lL]\b|<>|`|\bur['\"]|\bprint\s+['\"]"
)
# `except ValueError, OSError:` of Python 3.14; Python 2 has the name of a variable there, such as `e`.
_PYTHON_3_14 = re.compile(
    r"^\s*except\*?\s+[\w.]+\s*,\s*([\w.]*\b[A-Z]\w+|[\w.]+(\s*,\s*[\w.]+)+)\s*:"
)


def _is_python_2(error: SyntaxError, data: bytes) -> bool:
    lines = data.decode("utf-8").splitlines()
    number = (error.lineno or 1) - 1
    message = error.msg or ""
    if any(_PYTHON_3_14.search(line) for line in lines[number : number + 1]):
        return False
    if "Missing parentheses in call to" in message or "multiple exception types" in message:
        return True
    return any(_PYTHON_2.search(line) for line in lines[number : number + 1])
