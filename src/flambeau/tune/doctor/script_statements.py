"""The statements of a script, and the lines they take, to say more of a line than its text does."""

import ast
import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path


@functools.lru_cache(maxsize=64)
def statements_of(file: str) -> list[ast.stmt]:
    """All statements, inner ones too; none where the file cannot be read."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return [one for one in ast.walk(tree) if isinstance(one, ast.stmt)]


def lines_of(statement: ast.stmt) -> range:
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


@functools.cache
def asks_for_batch(file: str, line: int, trained: frozenset[int]) -> bool:
    """Whether a line heads a loop around a step (lines `trained` lead to one), or calls `next`."""
    for one in statements_of(file):
        if isinstance(one, ast.For):
            if one.lineno <= line < one.body[0].lineno and trained & set(lines_of(one)):
                return True
        elif isinstance(one, ast.Assign) and line in lines_of(one):
            calls = (node.func for node in ast.walk(one.value) if isinstance(node, ast.Call))
            if any(isinstance(name, ast.Name) and name.id == "next" for name in calls):
                return True
    return False


@functools.cache
def is_in_evaluation(file: str, line: int, trained: frozenset[int]) -> bool:
    """Whether a line is in a block without gradients, after `eval()` of a model.

    A function with both, and no training step, is an evaluation as a whole, with its figures.
    """
    around = [one for one in statements_of(file) if line in lines_of(one)]
    functions = [one for one in around if isinstance(one, ast.FunctionDef)]
    whole = max(functions, key=lambda one: one.lineno, default=None)
    if whole is None or not _has_eval(whole):
        return False
    if trained & set(lines_of(whole)):
        blocks = [one for one in around if _has_eval(one) or _has_eval(*_before(one, whole))]
        return any(map(_is_without_gradients, blocks))
    return any(_is_without_gradients(one) for one in ast.walk(whole))


def _has_eval(*statements: ast.stmt) -> bool:
    return any(".eval()" in ast.unparse(one) for one in statements)


def _before(statement: ast.stmt, function: ast.FunctionDef) -> list[ast.stmt]:
    """The statements before one in its block."""
    blocks = (getattr(node, "body", []) for node in ast.walk(function))
    return next(
        (b[: b.index(statement)] for b in blocks if isinstance(b, list) and statement in b), []
    )


def _is_without_gradients(node: ast.AST) -> bool:
    """Whether it is a `with` or a function under `no_grad` or `inference_mode`."""
    heads = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
    heads += node.decorator_list if isinstance(node, ast.FunctionDef) else []
    texts = map(ast.unparse, heads)
    return any("no_grad" in text or "inference_mode" in text for text in texts)


@functools.cache
def is_in_producer(file: str, line: int) -> bool:
    """Whether a line is in a function that puts something into a queue."""
    functions = [one for one in statements_of(file) if isinstance(one, ast.FunctionDef)]
    around = [one for one in functions if line in lines_of(one)]
    called = [node.func for one in around for node in ast.walk(one) if isinstance(node, ast.Call)]
    return any(getattr(function, "attr", "") in ("put", "put_nowait") for function in called)


_ASK = {"item", "tolist", "cpu", "numpy", "detach", "float", "int", "bool"}
"""Methods and functions that compute nothing themselves."""


@functools.cache
def computes_what_it_asks_for(where: str) -> bool:
    """`if torch.isnan(x).any():` does, `history = history + [loss.item()]` does not, in FILE:LINE.

    Of the second only the call itself is to blame for waiting. True also without such a call, which a
    library's function may hold.
    """
    file, _, line = where.rpartition(":")
    around = [one for one in statements_of(file) if int(line) in lines_of(one)]
    if not around:
        return True
    asked = list(_asked(min(around, key=lambda one: len(lines_of(one)))))
    return not asked or any(_computes(node) for value in asked for node in ast.walk(value))


def _asked(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions whose values a statement asks for."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and _name(node) in _ASK:
            yield from node.args
            if isinstance(node.func, ast.Attribute):
                yield node.func.value
        elif isinstance(node, ast.FormattedValue):
            yield node.value
        elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            yield node.test


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _computes(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _name(node) not in _ASK
    if isinstance(node, ast.Subscript):  # losses["mask"] is in a dictionary, x[0] may be a tensor
        return not isinstance(node.slice, ast.Constant) or not isinstance(node.slice.value, str)
    return isinstance(node, (ast.BinOp, ast.Compare))


def evaluation_lines(
    chains: Sequence[Sequence[Sequence[object]]], training: Sequence[Sequence[object]]
) -> Mapping[str, Collection[int]]:
    """Lines, by file, of the largest statements around an evaluation without a training step.

    Args:
        chains: lines (file, number) to a loader without gradients, the outermost first.
        training: likewise, to an optimizer step.
    """
    trained: dict[str, set[int]] = defaultdict(set)
    for file, line, *_ in training:
        trained[str(file)].add(int(str(line)))
    found: dict[str, set[int]] = defaultdict(set)
    for chain in chains:
        for file, line, *_ in chain:
            lines = _statement(str(file), int(str(line)), frozenset(trained[str(file)]))
            if lines:
                found[str(file)].update(lines)
                break
    return found


@functools.cache
def _statement(file: str, line: int, without: frozenset[int]) -> range | None:
    """The lines of the largest statement that holds one line and none of the others."""
    ranges = map(lines_of, statements_of(file))
    return max((r for r in ranges if line in r and not without & set(r)), key=len, default=None)
