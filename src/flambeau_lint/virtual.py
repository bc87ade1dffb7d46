"""Python within other files: the cells of a notebook, the blocks of Markdown and reStructuredText pages.

The pieces of one file become one source, so that a name that the first imports is known in the last; a piece
that does not parse is left out. Each piece follows a comment that marks it, and goes back to its place.
"""

import ast
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Optional

from flambeau_lint.source import Unreadable, parse

_MARK = "# flambeau-lint piece "
_MAGIC = "# flambeau-lint magic "
_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})[ \t]*(?P<word>[^\s`]*)[^\n`]*$")
_DIRECTIVE = re.compile(
    r"^(?P<indent>[ \t]*)\.\. (?:code|code-block|sourcecode)::[ \t]*(?:python3?|py)\s*$"
)
_PYTHON = {"python", "py", "python3", "{python}", "{code-block}python"}
_LINE_MAGIC = re.compile(r"^(\s*)([%!]|[\w.,\[\] ]+=\s*[%!]|\?|[\w.]+\?{1,2}\s*$)")

_JSON = json.JSONDecoder()

NOTEBOOKS = (".ipynb",)
PAGES = (".md", ".markdown", ".rst")


@dataclass(frozen=True)
class Piece:
    """Lines of a file that are Python."""

    number: int  # of the cell or of the block, from 1
    line: int  # the first line, in the cell or in the page, from 1
    text: str
    indent: str = ""


@dataclass(frozen=True)
class Virtual:
    """The pieces of a file as one source."""

    data: bytes
    places: tuple[tuple[int, int], ...]  # of each line: (number of the piece, line)
    pieces: tuple[Piece, ...]
    magics: tuple[str, ...]

    def new_texts(self, data: bytes) -> Optional[dict[int, str]]:
        """The texts of the pieces after a change of the source; None if a mark was lost."""
        parts = re.split(rf"^{_MARK}(\d+)\n", data.decode("utf-8"), flags=re.MULTILINE)
        numbers = [int(number) for number in parts[1::2]]
        if numbers != [piece.number for piece in self.pieces]:
            return None
        found = {}
        for piece, text in zip(self.pieces, parts[2::2]):
            body = text[:-1] if text.endswith("\n") and not piece.text.endswith("\n") else text
            restored = re.sub(
                rf"^[ \t]*pass  {_MAGIC}(\d+)$", self._magic, body, flags=re.MULTILINE
            )
            found[piece.number] = restored
        return None if parts[0].strip() else found

    def _magic(self, match: "re.Match[str]") -> str:
        return self.magics[int(match[1])]


def virtual(pieces: Sequence[Piece], *, has_magics: bool) -> Virtual:
    """Put pieces together; what is no Python is left out."""
    lines: list[str] = []
    places: list[tuple[int, int]] = []
    kept = []
    magics: list[str] = []
    for piece in pieces:
        text = _without_magics(piece.text, magics) if has_magics else piece.text
        if text is None or not _parses(text):
            continue
        kept.append(piece)
        lines.append(f"{_MARK}{piece.number}\n")
        places.append((piece.number, 0))
        body = text.splitlines(keepends=True)
        if body and not body[-1].endswith("\n"):
            body[-1] += "\n"
        lines += body
        places += [(piece.number, piece.line + index) for index in range(len(body))]
    return Virtual("".join(lines).encode("utf-8"), tuple(places), tuple(kept), tuple(magics))


def _parses(text: str) -> bool:
    try:
        ast.dump(parse(text.encode("utf-8")))
    except (Unreadable, UnicodeEncodeError):  # JSON can hold half of a character
        return False
    return "\r" not in text and "\f" not in text and _MARK not in text


def _without_magics(text: str, magics: list[str]) -> Optional[str]:
    """A cell with `pass` for its magics; None for a cell of another language."""
    first = text.lstrip().split("\n", 1)[0]
    if first.startswith("%%") and not re.match(r"%%(time|timeit|capture)\b", first):
        return None
    out = []
    for line in text.split("\n"):
        match = _LINE_MAGIC.match(line)
        if match is None or (line.lstrip()[:1] not in "%!?" and _parses(textwrap.dedent(line))):
            out.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        out.append(f"{indent}pass  {_MAGIC}{len(magics)}")
        magics.append(line)
    return "\n".join(out)


# ---------------------------------------------------------------- notebooks


def notebook_cells(raw: bytes) -> tuple[Any, list[Piece]]:
    """The notebook, and its cells of Python.

    Raises:
        Unreadable: if it is no notebook of Jupyter's format 4.
    """
    try:
        notebook = json.loads(raw.decode("utf-8"))
        cells = notebook["cells"]
        kernel = notebook.get("metadata", {}).get("kernelspec", {})
        language = notebook.get("metadata", {}).get("language_info", {}).get("name") or kernel.get(
            "language"
        )
        pieces = [
            Piece(number, 1, "".join(cell["source"]))
            for number, cell in enumerate(cells, start=1)
            if cell.get("cell_type") == "code"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"no notebook of Jupyter's format 4: {error}") from None
    return notebook, pieces if language in (None, "python", "Python", "ipython") else []


def write_notebook(raw: bytes, texts: dict[int, str]) -> bytes:
    """The notebook with other sources of these cells, every other byte as it was."""
    text = raw.decode("utf-8")
    cells = _places(text, _places(text, _behind_space(text, 0))["cells"][0])
    for number in sorted(texts, reverse=True):  # so that the places before it stay right
        start, end = _places(text, cells[number - 1][0])["source"]
        text = text[:start] + _rewritten(text[start:end], texts[number]) + text[end:]
    return text.encode("utf-8")


def _places(text: str, start: int) -> dict[Any, tuple[int, int]]:
    """Where each value of a JSON object or array lies that begins at `start`, by its key or index."""
    found: dict[Any, tuple[int, int]] = {}
    is_object = text[start] == "{"
    position = _behind_space(text, start + 1)
    while text[position] not in "]}":
        key: Any = len(found)
        if is_object:
            key, position = _JSON.raw_decode(text, position)
            position = _behind_space(text, _behind_space(text, position) + 1)  # the colon
        _, end = _JSON.raw_decode(text, position)
        found[key] = (position, end)
        position = _behind_space(text, end)
        if text[position] == ",":
            position = _behind_space(text, position + 1)
    return found


def _behind_space(text: str, position: int) -> int:
    while text[position] in " \t\r\n":
        position += 1
    return position


def _rewritten(old: str, new: str) -> str:
    """A cell's source in JSON with another text: a string, or a list of lines laid out as before."""
    is_ascii = old.isascii()
    if old[0] != "[":
        return json.dumps(new, ensure_ascii=is_ascii)
    places = list(_places(old, 0).values())
    kept = {json.loads(old[start:end]): old[start:end] for start, end in places}
    lines = [
        kept.get(line) or json.dumps(line, ensure_ascii=is_ascii)
        for line in new.splitlines(keepends=True)
    ]
    before = old[: places[0][0]]
    between = old[places[0][1] : places[1][0]] if len(places) > 1 else "," + before[1:]
    return before + between.join(lines) + old[places[-1][1] :]


# ---------------------------------------------------------------- pages


def page_blocks(text: str, suffix: str) -> list[Piece]:
    """The blocks of Python of a page."""
    lines = text.split("\n")
    return _rst_blocks(lines) if suffix == ".rst" else _fenced_blocks(lines)


def _fenced_blocks(lines: Sequence[str]) -> list[Piece]:
    found: list[Piece] = []
    opened: Optional[tuple[int, re.Match[str]]] = None
    for index, line in enumerate(lines):
        if opened is None:
            match = _FENCE.match(line)
            if match is not None:
                opened = (index, match)
            continue
        start, match = opened
        stripped = line.strip()
        marks = match["marks"]
        if stripped and set(stripped) == {marks[0]} and len(stripped) >= len(marks):
            if match["word"].lower() in _PYTHON:
                found += _piece(
                    len(found) + 1, start + 1, lines[start + 1 : index], match["indent"]
                )
            opened = None
    return found


def _rst_blocks(lines: Sequence[str]) -> list[Piece]:
    found: list[Piece] = []
    index = 0
    while index < len(lines):
        match = _DIRECTIVE.match(lines[index])
        index += 1
        if match is None:
            continue
        while index < len(lines) and re.match(r"\s+:[\w-]+:", lines[index]):
            index += 1
        while index < len(lines) and not lines[index].strip():
            index += 1
        start = index
        outer = len(match["indent"])
        while index < len(lines) and (
            not lines[index].strip() or len(lines[index]) - len(lines[index].lstrip()) > outer
        ):
            index += 1
        body = list(lines[start:index])
        while body and not body[-1].strip():
            body.pop()
        if body:
            indent = body[0][: len(body[0]) - len(body[0].lstrip())]
            found += _piece(len(found) + 1, start, body, indent)
    return found


def _piece(number: int, start: int, body: Sequence[str], indent: str) -> list[Piece]:
    if not body or any(line.strip() and not line.startswith(indent) for line in body):
        return []
    text = "\n".join(line[len(indent) :] if line.strip() else line for line in body)
    return [Piece(number, start + 1, text, indent)]


def write_page(text: str, pieces: Sequence[Piece], texts: dict[int, str]) -> str:
    """The page with other blocks."""
    lines = text.split("\n")
    for piece in sorted(pieces, key=lambda one: -one.line):
        new = texts[piece.number]
        if new == piece.text:
            continue
        count = piece.text.count("\n") + 1
        body = [piece.indent + line if line.strip() else line for line in new.split("\n")]
        lines[piece.line - 1 : piece.line - 1 + count] = body
    return "\n".join(lines)


def is_python(path: PurePath) -> bool:
    return path.suffix.lower() not in (*NOTEBOOKS, *PAGES)
