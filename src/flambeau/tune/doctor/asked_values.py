"""Whether a line that asks a tensor for its value also computes that tensor, by the line's text."""

import ast
import functools
from collections.abc import Iterator

from flambeau.tune.doctor.script_statements import lines_of, statements_of

_ASK = {"item", "tolist", "cpu", "numpy", "detach", "float", "int", "bool"}
"""Methods and functions that compute nothing themselves."""


@functools.cache
def computes_what_it_asks_for(where: str) -> bool:
    """`if torch.isnan(x).any():` does, `history = history + [loss.item()]` does not.

    The first takes as long as what it asks for; of the second only the call itself is to blame for waiting.

    Args:
        where: FILE:LINE.

    Returns:
        True also where the line shows no such call, as one of a library's function may hold it.
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
