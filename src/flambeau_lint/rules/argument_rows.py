"""What the tables of arguments are written with: a check of one argument of some functions."""

import ast
import re
from collections.abc import Iterator
from typing import Callable, Optional

from flambeau_lint import edits
from flambeau_lint.program import Program
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Check, Edit, Finding, Fix, Rule
from flambeau_lint.rules.rows import example

Value = Callable[[ast.expr], bool]


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def always(node: ast.expr) -> bool:
    return True


def drop(name: str, *, where: Value = always, is_safe: bool = True, fixes: bool = True) -> Check:
    """A keyword argument that is taken out."""

    def check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
        assert isinstance(node, ast.Call)
        found = edits.keyword(node, name)
        if found is not None and where(found.value):
            edit = edits.remove_argument(program, node, found) if fixes else None
            yield finding(program, rule, found, edits.as_fix((edit,), is_safe=is_safe))

    return check


def rename(name: str, new: str, *, is_safe: bool = True) -> Check:
    """A keyword argument of another name."""

    def check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
        assert isinstance(node, ast.Call)
        found = edits.keyword(node, name)
        if found is not None:
            is_free = edits.keyword(node, new) is None
            fix = Fix((edits.rename_keyword(program, found, new),), is_safe) if is_free else None
            yield finding(program, rule, found, fix)

    return check


def add(name: str, position: int, text: str, *, is_safe: bool = True, minimum: int = 0) -> Check:
    """A keyword argument that must be given; `text` is what it was so far."""

    def check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
        assert isinstance(node, ast.Call)
        if len(node.args) < minimum or edits.has_argument(node, position, name):
            return
        edit = edits.append_argument(program, node, f"{name}={text}") if text else None
        yield finding(program, rule, node.func, edits.as_fix((edit,), is_safe=is_safe))

    return check


def replace_value(name: str, where: Value, text: str, *, is_safe: bool = True) -> Check:
    """A keyword argument whose value is another now."""

    def check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
        assert isinstance(node, ast.Call)
        found = edits.keyword(node, name)
        if found is not None and where(found.value):
            fix = Fix((edits.replace(program, found.value, text),), is_safe) if text else None
            yield finding(program, rule, found, fix)

    return check


def row(
    code: str,
    name: str,
    calls: tuple[str, ...],
    check: Check,
    words: tuple[str, str],
    examples: tuple[str, str],
    **facts: str,
) -> Rule:
    """A rule of one argument.

    Args:
        code, name: of the rule.
        calls: the functions.
        check: what is looked at.
        words: the line in English and in Chinese.
        examples: a bad one and a good one.
        **facts: fields of Rule.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Rule(
        code=code,
        name=slug,
        en=words[0],
        zh=words[1],
        bad=example(examples[0]),
        good=example(examples[1]),
        calls=calls,
        check=check,
        **facts,  # type: ignore[arg-type]
    )


def constant(node: Optional[ast.AST]) -> object:
    """The value of a literal, else None."""
    return node.value if isinstance(node, ast.Constant) else None


def edit_of(edit: Optional[Edit]) -> Optional[Fix]:
    return None if edit is None else Fix((edit,))
