"""Findings of names alone: where they are used or imported, and the name that takes their place."""

import ast
from collections.abc import Collection, Iterator
from typing import Callable, Optional

from flambeau_lint import edits
from flambeau_lint.program import Program
from flambeau_lint.rule import Check, Edit, Finding, Fix, Rule

Call = Callable[[Program, ast.AST], Optional[tuple[Edit, ...]]]
"""Gives the edits of one use of a name besides the name itself; None if that use cannot be changed."""


def finding(program: Program, rule: Rule, node: ast.AST, fix: Optional[Fix] = None) -> Finding:
    start, end = span(program, node)
    return Finding(rule.code, start, end, rule.en, fix)


def span(program: Program, node: ast.AST) -> tuple[int, int]:
    """Where a finding is shown: the last word of a chain is enough, an import shows the name."""
    source = program.source
    if isinstance(node, ast.alias) and not hasattr(node, "lineno"):  # before Python 3.10
        statement = program.parents[node]
        assert isinstance(statement, (ast.Import, ast.ImportFrom))
        places = edits.alias_places(program, statement)
        if places is not None:
            return places[statement.names.index(node)]
        node = statement
    return source.start_of(node), source.end_of(node)


def check_name(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """A name, with a fix that renames it where the rule names another that is called alike."""
    yield finding(program, rule, node, name_fix(program, rule, node))


def renamed_with(*arguments: str) -> Check:
    """A function of another name that needs more arguments to do the same, such as `mode='bilinear'`."""

    def call(program: Program, node: ast.AST) -> Optional[tuple[Edit, ...]]:
        found = program.is_called(node)
        edit = edits.append_argument(program, found, ", ".join(arguments)) if found else None
        return (edit,) if edit and found and not edits.is_open(found) else None

    def check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
        yield finding(program, rule, node, name_fix(program, rule, node, call))

    return check


def name_fix(
    program: Program, rule: Rule, node: ast.AST, call: Optional[Call] = None
) -> Optional[Fix]:
    """Rename one use, or an import with all that is imported by it."""
    if rule.fix == "none" or not rule.use:
        return None
    is_safe = rule.fix == "safe"
    if isinstance(node, ast.alias):
        return edits.as_fix(_import_edits(program, node, rule.use, call), is_safe=is_safe)
    if isinstance(node, ast.ImportFrom):
        return None
    renamed = edits.rename_chain(program, node, rule.use)
    more = call(program, node) if call else ()
    if renamed is None or more is None:
        return None
    return Fix((*renamed, *more), is_safe)


def _import_edits(
    program: Program, alias: ast.alias, dotted: str, call: Optional[Call]
) -> Optional[tuple[Edit, ...]]:
    uses = edits.uses_of(program, alias)
    if uses is None:
        return None
    if not uses and not alias.asname and dotted.rpartition(".")[2] != alias.name:
        return None  # others may import the name from here
    changed: list[Edit] = []
    name = dotted.rpartition(".")[2]
    for use in uses:
        if edits.is_in_fstring(program, use):
            return None
        if not alias.asname and use.id != name:
            changed.append(edits.replace(program, use, name))
        more = call(program, use) if call else ()
        if more is None:
            return None
        changed.extend(more)
    if not alias.asname and name != alias.name and program.is_bound(name):
        is_same = program.module_imports.get(name) == dotted
        removed = edits.remove_alias(program, alias) if is_same else None
        return None if removed is None else (*removed, *changed)
    return edits.move_import(program, alias, dotted, tuple(changed))


def moved_module(lacks: Collection[str] = ()) -> Check:
    """A module that has moved with what it holds, but for the names in `lacks`, whose place is elsewhere."""

    def check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
        is_kept = _uses_any(program, node, lacks)
        yield finding(program, rule, node, None if is_kept else _moved_fix(program, rule, node))

    return check


def _uses_any(program: Program, node: ast.AST, names: Collection[str]) -> bool:
    """Whether what is imported or looked up may be one of the names."""
    if not names:
        return False
    if isinstance(node, ast.ImportFrom):
        return any(alias.name in names or alias.name == "*" for alias in node.names)
    parent = program.parents.get(node)
    return not isinstance(parent, ast.Attribute) or parent.attr in names


def _moved_fix(program: Program, rule: Rule, node: ast.AST) -> Optional[Fix]:
    old = rule.names[0]
    is_safe = rule.fix == "safe"
    if not rule.use or rule.fix == "none":
        return None
    if isinstance(node, ast.ImportFrom):
        place = edits.module_place(program, node)
        if place is None or node.module is None:
            return None
        # What is deeper may be called otherwise there; private modules are.
        is_same = node.module == old
        if not is_same and "._" in old:
            return None
        return Fix((Edit(*place, rule.use + node.module[len(old) :]),), is_safe and is_same)
    if isinstance(node, ast.alias):
        return edits.as_fix(_moved_alias(program, node, old, rule.use), is_safe=is_safe)
    return edits.as_fix(edits.rename_chain(program, node, rule.use), is_safe=is_safe)


def _moved_alias(
    program: Program, alias: ast.alias, old: str, new: str
) -> Optional[tuple[Edit, ...]]:
    statement = program.parents[alias]
    assert isinstance(statement, (ast.Import, ast.ImportFrom))
    places = edits.alias_places(program, statement)
    if places is None:
        return None
    start, end = places[statement.names.index(alias)]
    if isinstance(statement, ast.Import):
        text = new + alias.name[len(old) :]
        if alias.asname:
            return (Edit(start, end, f"{text} as {alias.asname}"),)
        return (Edit(start, end, text),)
    parent, _, name = new.rpartition(".")
    uses = edits.uses_of(program, alias)
    if uses is None or not parent:
        return None
    if name != alias.name and not alias.asname:
        if program.is_bound(name):
            return None
        renamed = tuple(edits.replace(program, use, name) for use in uses)
        return edits.move_import(program, alias, new, renamed)
    return edits.move_import(program, alias, new, ())
