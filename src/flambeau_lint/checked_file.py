"""One file: what is found in it, and what it becomes."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flambeau_lint import virtual as pieces_of
from flambeau_lint.engine import RuleSet, fix, lint
from flambeau_lint.rule import Finding
from flambeau_lint.source import Source, Unreadable, decode, encode
from flambeau_lint.suppressions import without_silenced


@dataclass(frozen=True)
class Replacement:
    """One edit as lines and columns, from 1; columns count code points."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Place:
    """A finding as it is shown."""

    code: str
    line: int
    column: int
    end_line: int
    end_column: int
    message: str
    fix: str = ""  # 'safe', 'unsafe'
    cell: int = 0  # of a notebook, from 1
    text: str = ""  # the line
    edits: tuple[Replacement, ...] = ()  # only of a file that is Python as a whole


@dataclass(frozen=True)
class Checked:
    """What one file has."""

    path: str
    places: tuple[Place, ...] = ()
    problem: str = ""  # why nothing is said of it
    is_lost: bool = False  # the file could not be read at all

    def as_json(self) -> str:
        return json.dumps(asdict(self))  # ASCII: a name of a file may be no text


def from_json(text: str) -> Checked:
    """What as_json has written."""
    fields: dict[str, Any] = json.loads(text)
    places = []
    for row in fields["places"]:
        changed = tuple(
            Replacement(tuple(one["start"]), tuple(one["end"]), one["text"]) for one in row["edits"]
        )
        places.append(Place(**{**row, "edits": changed}))
    return Checked(fields["path"], tuple(places), fields["problem"])


def check(path: str, raw: bytes, rules: RuleSet) -> Checked:
    """What the rules find in the bytes of a file."""
    try:
        suffix = Path(path).suffix.lower()
        if suffix in pieces_of.NOTEBOOKS or suffix in pieces_of.PAGES:
            return _check_pieces(path, raw, rules, suffix)
        data, _, _ = decode(raw)
        found = without_silenced(data, lint(data, rules))
        source = Source(data)
        return Checked(path, tuple(_place(source, one) for one in found))
    except Unreadable as error:
        return Checked(path, problem=str(error))


def _place(source: Source, one: Finding) -> Place:
    line, column = source.place_of(one.start)
    end_line, end_column = source.place_of(one.end)
    made = "" if one.fix is None else ("safe" if one.fix.is_safe else "unsafe")
    edits = one.fix.edits if one.fix else ()
    changed = tuple(
        Replacement(source.place_of(edit.start), source.place_of(edit.end), edit.text)
        for edit in edits
    )
    shown = source.line(line)
    return Place(one.code, line, column, end_line, end_column, one.message, made, 0, shown, changed)


def _pieces(raw: bytes, suffix: str) -> pieces_of.Virtual:
    if suffix in pieces_of.NOTEBOOKS:
        return pieces_of.virtual(pieces_of.notebook_cells(raw)[1], has_magics=True)
    data, _, _ = decode(raw)
    return pieces_of.virtual(pieces_of.page_blocks(data.decode("utf-8"), suffix), has_magics=False)


def _check_pieces(path: str, raw: bytes, rules: RuleSet, suffix: str) -> Checked:
    whole = _pieces(raw, suffix)
    found = without_silenced(whole.data, lint(whole.data, rules))
    source = Source(whole.data)
    indents = {piece.number: len(piece.indent) for piece in whole.pieces}
    shown = []
    for one in found:
        place = _place(source, one)
        number, line = whole.places[place.line - 1]
        end = whole.places[min(place.end_line, len(whole.places)) - 1][1]
        indent = indents[number]
        cell = number if suffix in pieces_of.NOTEBOOKS else 0
        shown.append(
            replace(
                place,
                line=line,
                column=place.column + indent,
                end_line=max(end, line),
                end_column=place.end_column + indent,
                cell=cell,
                edits=(),
            )
        )
    return Checked(path, tuple(shown))


def fixed(path: str, raw: bytes, rules: RuleSet, *, unsafe: bool) -> tuple[bytes, int]:
    """The bytes of a file after its fixes, and how many were made.

    Raises:
        Unreadable: if it cannot be read.
    """
    suffix = Path(path).suffix.lower()
    if suffix in pieces_of.NOTEBOOKS or suffix in pieces_of.PAGES:
        return _fixed_pieces(raw, rules, suffix, unsafe)
    data, encoding, mark = decode(raw)
    new, count = fix(data, rules, unsafe=unsafe, keep=without_silenced)
    return (encode(new, encoding, mark), count) if count else (raw, 0)


def _fixed_pieces(raw: bytes, rules: RuleSet, suffix: str, unsafe: bool) -> tuple[bytes, int]:
    whole = _pieces(raw, suffix)
    new, count = fix(whole.data, rules, unsafe=unsafe, keep=without_silenced)
    texts = whole.new_texts(new) if count else None
    same = whole.new_texts(whole.data)
    if texts is None or same != {piece.number: piece.text for piece in whole.pieces}:
        return raw, 0
    if suffix in pieces_of.NOTEBOOKS:
        changed = {
            piece.number: texts[piece.number]
            for piece in whole.pieces
            if texts[piece.number] != piece.text
        }
        return pieces_of.write_notebook(raw, changed), count
    data, encoding, mark = decode(raw)
    page = pieces_of.write_page(data.decode("utf-8"), whole.pieces, texts)
    return encode(page.encode("utf-8"), encoding, mark), count
