"""Edits of a source: calls, names and imports; each function gives None where it is not sure."""

import ast
import re
from collections.abc import Iterator
from typing import Optional

from flambeau_lint.program import Place, Program, once
from flambeau_lint.rule import Edit, Fix

_BETWEEN = re.compile(rb"\s*,\s*")


def replace(program: Program, node: ast.AST, text: str) -> Edit:
    return Edit(program.source.start_of(node), program.source.end_of(node), text)


def is_in_fstring(program: Program, node: ast.AST) -> bool:
    """Positions inside of f-strings are wrong before Python 3.12."""
    return any(isinstance(parent, ast.JoinedStr) for parent in program.parents_of(node))


def arguments(call: ast.Call) -> list[ast.AST]:
    """Arguments in the order of the source."""
    parts: list[ast.AST] = [*call.args, *call.keywords]
    return sorted(parts, key=lambda part: (part.lineno, part.col_offset))  # type: ignore[attr-defined]


def keyword(call: ast.Call, name: str) -> Optional[ast.keyword]:
    return next((one for one in call.keywords if one.arg == name), None)


def is_open(call: ast.Call) -> bool:
    """Whether it passes arguments that are not seen: *args or **kwargs."""
    return any(isinstance(one, ast.Starred) for one in call.args) or any(
        one.arg is None for one in call.keywords
    )


def argument(call: ast.Call, position: int, name: str) -> Optional[ast.expr]:
    """An argument by position or by name; None if it is not given."""
    if position < len(call.args):
        return call.args[position]
    found = keyword(call, name)
    return found.value if found else None


def has_argument(call: ast.Call, position: int, name: str) -> bool:
    """Whether an argument is given, or may be."""
    return argument(call, position, name) is not None or is_open(call)


def remove_argument(program: Program, call: ast.Call, node: ast.AST) -> Optional[Edit]:
    """The edit that takes one argument out of a call."""
    source = program.source
    parts = arguments(call)
    index = parts.index(node)
    start = source.start_of(node)
    end = source.end_of(node)
    if index + 1 < len(parts):
        following = source.start_of(parts[index + 1])
        if _BETWEEN.fullmatch(source.data, end, following):
            return Edit(start, following, "")
        return None
    close = source.end_of(call) - 1
    if index:
        before = source.end_of(parts[index - 1])
        between = _BETWEEN.fullmatch(source.data, before, start)
        return Edit(before, end, "") if between else None
    if re.compile(rb"\s*,?\s*").fullmatch(source.data, end, close):
        return Edit(start, close, "")
    return None


def rename_keyword(program: Program, node: ast.keyword, name: str) -> Edit:
    """Another name for a keyword argument; the value stays."""
    start = program.source.start_of(node)
    old = node.arg or ""
    return Edit(start, start + len(old.encode()), name)


def after_paren(program: Program, call: ast.Call) -> Optional[int]:
    """The offset behind the opening parenthesis of a call."""
    source = program.source
    rest = source.data[source.end_of(call.func) : source.end_of(call)]
    found = re.match(rb"[\s)]*\(", rest)
    return source.end_of(call.func) + found.end() if found else None


def insert_first(program: Program, call: ast.Call, text: str) -> Optional[Edit]:
    """A new first argument."""
    place = after_paren(program, call)
    if place is None:
        return None
    return Edit(place, place, f"{text}, " if call.args or call.keywords else text)


def append_argument(program: Program, call: ast.Call, text: str) -> Optional[Edit]:
    """A new last argument, behind what stands there."""
    source = program.source
    parts = arguments(call)
    if not parts:
        return insert_first(program, call, text)
    end = source.end_of(parts[-1])
    close = source.end_of(call) - 1
    tail = source.data[end:close]
    if re.compile(rb"\s*").fullmatch(tail):
        return Edit(end, end, f", {text}")
    trailing = re.compile(rb"(\s*,)\s*").fullmatch(tail)
    if trailing:
        place = end + len(trailing[1])
        return Edit(place, place, f" {text}")
    return None


# ---------------------------------------------------------------- names


def name_for(
    program: Program, dotted: str, near: ast.AST
) -> Optional[tuple[str, tuple[Edit, ...]]]:
    """How to write a dotted name at a place, with the edits that this needs: maybe an import.

    Only names that an import at the top binds, and nothing else, are used.
    """
    best = ("", "")
    for name, meaning in program.module_imports.items():
        fits = dotted == meaning or dotted.startswith(f"{meaning}.")
        is_better = fits and len(meaning) > len(best[1])
        if is_better and program.bindings(name, near) == program.bindings(name, program.tree):
            best = (name, meaning)
    if best[0]:
        return best[0] + dotted[len(best[1]) :], ()
    root = dotted.partition(".")[0]
    if program.is_bound(root):
        return None
    line = import_line(program, f"import {root}")
    return None if line is None else (dotted, (line,))


def import_line(program: Program, text: str) -> Optional[Edit]:
    """A new import before the first one at the top of the file that is no __future__."""
    source = program.source
    for node in program.tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        start = source.start_of(node)
        if start != source.starts[node.lineno - 1]:
            return None
        return Edit(start, start, text + newline(program))
    return None


def newline(program: Program) -> str:
    """How the lines of the file end."""
    first = program.source.data.find(b"\n")
    if first > 0 and program.source.data[first - 1 : first] == b"\r":
        return "\r\n"
    return "\n" if first >= 0 or b"\r" not in program.source.data else "\r"


def rename_chain(program: Program, node: ast.AST, dotted: str) -> Optional[tuple[Edit, ...]]:
    """`torch.a.old` as another name of torch."""
    if is_in_fstring(program, node) or b"\n" in program.source.text_of(node).encode():
        return None
    kept = _kept_attribute(program, node, dotted)
    found = (kept, ()) if kept else name_for(program, dotted, node)
    if found is None:
        return None
    text, more = found
    return (replace(program, node, text), *more)


def _kept_attribute(program: Program, node: ast.AST, dotted: str) -> str:
    """`self.lib.new` for a name in what an attribute of self holds; empty if it is none of those."""
    while isinstance(node, ast.Attribute) and program.dotted(node.value):
        node = node.value
    held = program.dotted(node)
    is_kept = isinstance(node, ast.Attribute) and dotted.startswith(f"{held}.")
    return program.source.text_of(node) + dotted[len(held) :] if is_kept else ""


# ---------------------------------------------------------------- imports


def uses_of(program: Program, alias: ast.alias) -> Optional[list[ast.Name]]:
    """All uses of a name that an import binds; None if something else binds it, or a string may name it."""
    name = alias.asname or alias.name.partition(".")[0]
    if name in program.texts:
        return None  # __all__, getattr, a forward annotation
    return _uses_by_binding(program, name).get(alias, [])


@once
def _uses_by_binding(program: Program, name: str) -> dict[ast.AST, Optional[list[ast.Name]]]:
    """The uses of a name by what binds it; None if something else does, too."""
    by_place: dict[Optional[Place], list[ast.Name]] = {}
    for node in program.loads.get(name, ()):
        by_place.setdefault(program.place_of(node), []).append(node)
    found: dict[ast.AST, Optional[list[ast.Name]]] = {}
    for uses in by_place.values():
        bound = program.bindings(name, uses[0])
        found.update(dict.fromkeys(bound, uses if len(bound) == 1 else None))
    return found


def remove_alias(program: Program, alias: ast.alias) -> Optional[tuple[Edit, ...]]:
    """The import without one of its names; without the statement if it was the only one."""
    statement = program.parents[alias]
    assert isinstance(statement, (ast.Import, ast.ImportFrom))
    places = alias_places(program, statement)
    if places is None:
        return None
    source = program.source
    index = statement.names.index(alias)
    if len(places) > 1:
        if index + 1 < len(places):
            start = places[index][0]
            end = places[index + 1][0]
            between = source.data[places[index][1] : end]
        else:
            start = places[index - 1][1]
            end = places[index][1]
            between = source.data[start : places[index][0]]
        return (Edit(start, end, ""),) if _BETWEEN.fullmatch(between) else None
    parent = program.parents[statement]
    siblings = next(
        (part for part in _bodies(parent) if statement in part),
        [],
    )
    start = source.starts[statement.lineno - 1]
    stop = source.end_of(statement)
    ends = re.compile(rb"[ \t]*(\r\n|\n|\r|$)").match(source.data, stop)
    if len(siblings) < 2 or ends is None or source.data[start : source.start_of(statement)].strip():
        return None
    return (Edit(start, ends.end(), ""),)


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        part = getattr(node, field, None)
        if isinstance(part, list):
            yield part


def alias_places(
    program: Program, statement: "ast.Import | ast.ImportFrom"
) -> Optional[list[tuple[int, int]]]:
    """Where each name of an import stands: Python 3.9 does not say it of `ast.alias`."""
    source = program.source
    start = source.start_of(statement)
    text = source.data[start : source.end_of(statement)]
    head = re.match(
        rb"from\s+[\w.]+\s+import\s*\(?" if isinstance(statement, ast.ImportFrom) else rb"import\s",
        text,
    )
    if head is None or b"#" in text or b"\\" in text:
        return None
    place = head.end()
    places = []
    for alias in statement.names:
        pattern = re.escape(alias.name.encode())
        if alias.asname:
            pattern += rb"\s+as\s+" + re.escape(alias.asname.encode())
        found = re.compile(rb"[\s,]*(" + pattern + rb")\b").match(text, place)
        if found is None:
            return None
        places.append((start + found.start(1), start + found.end(1)))
        place = found.end()
    return places


def module_place(program: Program, statement: ast.ImportFrom) -> Optional[tuple[int, int]]:
    """Where `from module` names the module."""
    source = program.source
    start = source.start_of(statement)
    found = re.compile(rb"from\s+([\w.]+)\s").match(source.data, start)
    if found is None or found[1].decode() != statement.module:
        return None
    return found.start(1), found.end(1)


def move_import(
    program: Program, alias: ast.alias, dotted: str, uses: tuple[Edit, ...]
) -> Optional[tuple[Edit, ...]]:
    """`from old import name` as `from new import other`; `uses` rename what follows."""
    statement = program.parents[alias]
    if not isinstance(statement, ast.ImportFrom):
        return None
    places = alias_places(program, statement)
    place = module_place(program, statement)
    if places is None or place is None:
        return None
    module, _, name = dotted.rpartition(".")
    index = statement.names.index(alias)
    start, end = places[index]
    text = f"{name} as {alias.asname}" if alias.asname else name
    if module == statement.module:
        return (Edit(start, end, text), *uses)
    if len(places) == 1:
        edits = [Edit(*place, module)]
        if name != alias.name:
            edits.append(Edit(start, end, text))
        return (*edits, *uses)
    removed = remove_alias(program, alias)
    if removed is None:
        return None
    indent = program.source.data[
        program.source.starts[statement.lineno - 1] : program.source.start_of(statement)
    ]
    if indent.strip():
        return None
    stop = program.source.end_of(statement)
    line = f"{newline(program)}{indent.decode()}from {module} import {text}"
    return (*removed, Edit(stop, stop, line), *uses)


def as_fix(edits: Optional[tuple[Optional[Edit], ...]], *, is_safe: bool = True) -> Optional[Fix]:
    """A fix of edits that are all known."""
    if not edits or any(edit is None for edit in edits):
        return None
    return Fix(tuple(edit for edit in edits if edit is not None), is_safe)
