"""One file against all rules, and the fixes of what was found."""

import ast
import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable, Optional

from flambeau_lint.program import ROOTS, Program
from flambeau_lint.renaming import check_name
from flambeau_lint.rule import Edit, Finding, Fix, Rule
from flambeau_lint.source import Source, Unreadable, parse

_WORDS = tuple(word.encode() for word in ROOTS)
_PASSES = 30


@dataclass
class RuleSet:
    """The rules that are on, by what they look at."""

    rules: Sequence[Rule]
    names: dict[str, list[Rule]] = field(default_factory=dict)
    calls: dict[str, list[Rule]] = field(default_factory=dict)
    attributes: dict[str, list[Rule]] = field(default_factory=dict)
    whole: list[Rule] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rule in self.rules:
            for words, table in (
                (rule.names, self.names),
                (rule.calls, self.calls),
                (rule.attributes, self.attributes),
            ):
                for word in words:
                    table.setdefault(word, []).append(rule)
            if rule.whole:
                self.whole.append(rule)
        self.star: set[str] = {*self.names, *self.calls}


def choose(
    rules: Iterable[Rule], versions: Mapping[str, str], *, since: str = "", preview: bool = False
) -> list[Rule]:
    """The rules that are true of some versions.

    Args:
        rules: all of them.
        versions: of each library.
        since: the torch that the files were written for: rules of silent changes since then speak, too.
        preview: also those that are not proved yet.
    """
    return [
        rule
        for rule in rules
        if rule.holds(versions[rule.library], since) and (preview or not rule.preview)
    ]


def lint(data: bytes, rules: RuleSet) -> list[Finding]:
    """What the rules find in a source, in the order of the source.

    Raises:
        Unreadable: if it is not Python 3.
    """
    if not any(word in data for word in _WORDS):
        return []
    program = Program(Source(data), parse(data), rules.star)
    found = {(one.start, one.code): one for one in _findings(program, rules)}
    return [found[key] for key in sorted(found)]


def _findings(program: Program, rules: RuleSet) -> Iterator[Finding]:
    imported = list(_imported(program))
    if not imported and not rules.whole:
        return
    for rule, node in _named(program, rules, imported):
        if not program.is_guarded(node):
            yield from (rule.check or check_name)(program, rule, node)
    for call in program.calls:
        dotted = program.dotted(call.func)
        for rule in rules.calls.get(dotted, ()) if dotted else ():
            if rule.check is not None and not program.is_guarded(call):
                yield from rule.check(program, rule, call)
    for word, listening in rules.attributes.items():
        for attribute in program.attributes.get(word, ()):
            for rule in listening:
                found = list(rule.check(program, rule, attribute)) if rule.check else []
                if found and not _is_decided(program, rule, attribute):
                    yield from found
    for rule in rules.whole:
        if rule.check is not None:
            yield from rule.check(program, rule, program.tree)


def _is_decided(program: Program, rule: Rule, node: ast.AST) -> bool:
    """Whether the program itself chooses by the version that a rule speaks of."""
    return bool(rule.deprecated or rule.removed) and program.is_guarded(node)


def _imported(program: Program) -> Iterator[tuple[str, ast.AST]]:
    """(dotted name, node) of what is imported: the module of `from`, and each name."""
    for statement in program.imports:
        if isinstance(statement, ast.ImportFrom):
            if statement.level or not statement.module:
                continue
            for prefix in _prefixes(statement.module):
                yield prefix, statement
            for alias in statement.names:
                yield f"{statement.module}.{alias.name}", alias
        else:
            for alias in statement.names:
                for prefix in _prefixes(alias.name):
                    yield prefix, alias


def _prefixes(dotted: str) -> Iterator[str]:
    parts = dotted.split(".")
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])


def _named(
    program: Program, rules: RuleSet, imported: Sequence[tuple[str, ast.AST]]
) -> Iterator[tuple[Rule, ast.AST]]:
    names = rules.names
    for dotted, node in imported:
        for rule in names.get(dotted, ()):
            yield rule, node
    for dotted, use in program.uses():
        for rule in names.get(dotted, ()):
            # A name that an import has bound is reported at the import.
            if not isinstance(use, ast.Name) or not program.is_bound(use.id):
                yield rule, use


# ---------------------------------------------------------------- fixing


Keep = Callable[[bytes, Sequence[Finding]], list[Finding]]
"""Which findings of a source are not silenced."""


def fix(
    data: bytes, rules: RuleSet, *, unsafe: bool, keep: Optional[Keep] = None
) -> tuple[bytes, int]:
    """Apply fixes until nothing changes; what would not parse is left.

    Args:
        data: the source.
        rules: those that are on.
        unsafe: also make fixes that may change what the program does.
        keep: leaves out what comments silence.

    Returns:
        The new source, and how many fixes were made.

    Raises:
        Unreadable: if it is not Python 3.
    """
    count = 0
    for _ in range(_PASSES):
        found = lint(data, rules)
        kept = found if keep is None else keep(data, found)
        fixes = [one.fix for one in kept if one.fix and (unsafe or one.fix.is_safe)]
        data, made = _apply_all(data, fixes)
        count += made
        if not made:
            break
    return data, count


def _apply_all(data: bytes, fixes: Sequence[Fix]) -> tuple[bytes, int]:
    chosen = without_overlaps(fixes)
    if not chosen:
        return data, 0
    changed = apply(data, [edit for one in chosen for edit in one.edits])
    if parses(changed):
        return (changed, len(chosen)) if changed != data else (data, 0)
    for one in chosen:  # one of them breaks the file: each alone, the first that does not
        changed = apply(data, one.edits)
        if changed != data and parses(changed):
            return changed, 1
    return data, 0


def without_overlaps(fixes: Sequence[Fix]) -> list[Fix]:
    """Fixes that touch different places, the first ones first; the others wait for the next pass."""
    taken: list[tuple[int, int]] = []  # sorted, apart from each other
    chosen = []
    for one in sorted(fixes, key=lambda fix: min(edit.start for edit in fix.edits)):
        spans = sorted((edit.start, edit.end) for edit in one.edits)
        is_apart = all(left[1] <= right[0] for left, right in zip(spans, spans[1:]))
        if is_apart and all(_is_free(span, taken) for span in spans):
            chosen.append(one)
            for span in spans:
                bisect.insort(taken, span)
    return chosen


def _is_free(span: tuple[int, int], taken: Sequence[tuple[int, int]]) -> bool:
    """Whether a span touches none of those that are taken."""
    place = bisect.bisect_left(taken, span)
    before = taken[place - 1] if place else (-1, -1)
    after = taken[place : place + 1]
    return before[1] < span[0] and not (after and after[0][0] <= span[1])


def apply(data: bytes, edits: Iterable[Edit]) -> bytes:
    """The source with edits that do not overlap; two at one place are made in their order."""
    out = []
    place = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        out.append(data[place : edit.start])
        out.append(edit.text.encode("utf-8"))
        place = edit.end
    out.append(data[place:])
    return b"".join(out)


def parses(data: bytes) -> bool:
    try:
        parse(data)
    except Unreadable:
        return False
    return True
