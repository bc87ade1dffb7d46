"""The statements of a script, and the lines they take, to say more of a line than its text does."""

import ast
import functools
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
    """Whether a line is the head of a loop around a training step, or calls `next`.

    Args:
        trained: lines of the file that lead to a step of the optimizer.
    """
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
def is_in_producer(file: str, line: int) -> bool:
    """Whether a line is in a function that puts something into a queue."""
    functions = [one for one in statements_of(file) if isinstance(one, ast.FunctionDef)]
    around = [one for one in functions if line in lines_of(one)]
    called = [node.func for one in around for node in ast.walk(one) if isinstance(node, ast.Call)]
    return any(getattr(function, "attr", "") in ("put", "put_nowait") for function in called)
