"""Checks the texts in a .pt2 file that `torch.export.load` would evaluate or compile.

Source: own; the forms are those that torch.export.save writes (PyTorch 2.8 to 2.15).
`plain_graph` needs none of them, but other readers of the file, such as its example.py, run them: sympy
evaluates shape expressions as text, names and guards become lines of Python, and a tree of inputs may name a
module to import.
"""

import ast
import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from flambeau.exports.formats.pt2_archive import NotPlain

# A list of names, not one per line.
_FUNCTIONS = frozenset(
    {
        "Symbol", "Integer", "Float", "Rational", "Mul", "Add", "Pow", "Mod", "Max", "Min", "Abs", "floor",
        "ceiling", "Piecewise", "ExprCondPair", "And", "Or", "Not", "GreaterThan", "LessThan",
        "StrictGreaterThan", "StrictLessThan", "Equality", "Unequality", "Ge", "Le", "Gt", "Lt", "Eq", "Ne",
        "true", "false", "oo", "int_oo", "FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv",
        "CeilToInt", "FloorToInt", "CeilDiv", "LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv",
        "IntTrueDiv", "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt", "RoundToInt",
        "RoundDecimal", "ToFloat", "Identity",
    }
)  # fmt: skip
_OF_TEXT = {
    "Symbol": re.compile(r"[A-Za-z_]\w{0,99}", re.ASCII),
    "Float": re.compile(r"[-+]?[0-9.]{1,400}(e[-+]?[0-9]{1,5})?"),
}
_IN_GUARDS = frozenset(
    {
        "L",
        "torch",
        "math",
        "size",
        "stride",
        "storage_offset",
        "sym_max",
        "sym_min",
        "sym_not",
        "sym_ite",
        "sym_int",
        "sym_float",
        "sym_sum",
        "trunc",
        "floor",
        "ceil",
        "sqrt",
    }
)
_ARITHMETIC = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
    ast.Constant,
    ast.IfExp,
    ast.Call,
    ast.Name,
)
_NAME = re.compile(r"[A-Za-z_]\w{0,999}", re.ASCII)
_PATH = re.compile(r"[\w.\- ]{1,1999}")
_TREES = {None, "builtins.tuple", "builtins.list", "builtins.dict"}
_NAMES = ("name", "as_name")
_PATHS = ("parameter_name", "buffer_name", "tensor_constant_name")


def check_words(program: dict[str, Any]) -> None:
    """NotPlain for a text in an exported program's JSON that is more than names and arithmetic."""
    for key, value in _texts(program):
        if key == "expr_str" and not _is_expression(value):
            raise NotPlain(f"a size in it is no arithmetic: {value[:80]!r}")
        if key in _NAMES and value and not _NAME.fullmatch(value):
            raise NotPlain(f"a name in it is no name: {value[:80]!r}")
        if key in _PATHS and not _PATH.fullmatch(value):
            raise NotPlain(f"a weight in it has an odd name: {value[:80]!r}")
        if key in ("in_spec", "out_spec") and not _is_tree(value):
            raise NotPlain(f"its {key} names more than tuples, lists and dicts: {value[:80]!r}")
        if key == "guards_code" and not _is_guard(value):
            raise NotPlain(f"a guard in it is no comparison of sizes: {value[:80]!r}")


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    """All texts, each with the key of it or of the list that holds it."""
    waiting = [("", value)]
    while waiting:
        key, one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.items()
        elif isinstance(one, list):
            waiting += [(key, inner) for inner in one]
        elif isinstance(one, str):
            yield key, one


def _tree_of(text: str) -> ast.AST | None:
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@functools.lru_cache(maxsize=10_000)
def _is_expression(text: str) -> bool:
    """Whether a text is what sympy's `srepr` writes for sizes: numbers, symbols, functions of them."""
    tree = _tree_of(text) if len(text) < 1 << 20 else None
    if tree is None:
        return False
    texts = set()  # the strings that are allowed
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
                return False
            form = _OF_TEXT.get(node.func.id)
            first = node.args[0] if node.args else None
            if form is not None and isinstance(first, ast.Constant):
                if isinstance(first.value, str) and not form.fullmatch(first.value):
                    return False
                texts.add(first)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            if node not in texts:
                return False
        else:
            is_unknown = isinstance(node, ast.Name) and node.id not in _FUNCTIONS
            if is_unknown or not isinstance(node, (*_ARITHMETIC, ast.keyword)):
                return False
    return True


def _is_guard(text: str) -> bool:
    """Whether a text compares sizes of inputs, such as L['x'].size()[1] <= 9."""
    tree = _tree_of(text) if len(text) < 1 << 20 else None
    if tree is None:
        return False
    for node in ast.walk(tree):
        word = getattr(node, "id", None) or getattr(node, "attr", None)
        if word is not None and word not in _IN_GUARDS:
            return False
        if not isinstance(node, (*_ARITHMETIC, ast.Attribute, ast.Subscript)):
            return False
    return True


def _is_tree(text: str) -> bool:
    """Whether a text is a tree of tuples, lists and dicts with texts as keys."""
    try:
        waiting = [json.loads(text)]
    except (ValueError, RecursionError):
        return False
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += [inner for inner in one if not isinstance(inner, int)]
        elif (
            not isinstance(one, dict)
            or not isinstance(one.get("type"), str | None)
            or one.get("type") not in _TREES
            or not _is_context(one.get("context"))
        ):
            return False
        else:
            waiting.append(one.get("children_spec"))
    return True


def _is_context(text: object) -> bool:
    try:
        keys = None if text is None else json.loads(str(text))
    except (ValueError, RecursionError):
        return False
    return keys is None or (isinstance(keys, list) and all(isinstance(key, str) for key in keys))
