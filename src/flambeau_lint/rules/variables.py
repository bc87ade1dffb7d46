"""What tensors were before torch 0.4: Variable, volatile, `.data[0]`, `async`, and constructors by type."""

import ast
from collections.abc import Iterator
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Program, once
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Edit, Finding, Fix, Rule
from flambeau_lint.rules.argument_rows import constant
from flambeau_lint.source import OLD_ASYNC

_VARIABLE = ("torch.autograd.Variable", "torch.autograd.variable.Variable")
_TO_ONE_NUMBER = {"torch.mean", "torch.sum"}
_EACH_NUMBER = {"torch.abs", "torch.exp", "torch.log", "torch.sqrt"}
_NEW = {
    f"torch.{name}"
    for name in [
        "arange",
        "empty",
        "eye",
        "from_numpy",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tensor",
        "zeros",
        "Tensor",
        "FloatTensor",
        "LongTensor",
    ]
}
_TYPES = {
    "FloatTensor": "float32",
    "DoubleTensor": "float64",
    "HalfTensor": "float16",
    "BFloat16Tensor": "bfloat16",
    "LongTensor": "int64",
    "IntTensor": "int32",
    "ShortTensor": "int16",
    "CharTensor": "int8",
    "ByteTensor": "uint8",
    "BoolTensor": "bool",
}


def _variable(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """An import of it; one that nothing uses any more goes."""
    if isinstance(node, ast.alias):
        uses = edits.uses_of(program, node)
        removed = edits.remove_alias(program, node) if uses == [] else None
        yield finding(program, rule, node, edits.as_fix(removed, is_safe=False))


def _variable_call(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    if edits.keyword(node, "volatile") is None:
        yield finding(program, rule, node.func, _unwrapped(program, node))


def _unwrapped(program: Program, call: ast.Call) -> Optional[Fix]:
    """`Variable(x)` as x, `Variable(x, requires_grad=True)` as x.requires_grad_().

    Variable(x) still cuts x off its graph, so that this is safe only of tensors that are new.
    """
    if len(call.args) != 1 or edits.is_open(call) or edits.is_in_fstring(program, call):
        return None
    source = program.source
    inner = call.args[0]
    place = edits.after_paren(program, call)
    text = source.text_of(inner)
    if place is None or place != source.start_of(inner) or "#" in source.text_of(call):
        return None
    keywords = {one.arg: one.value for one in call.keywords}
    grad = constant(keywords.pop("requires_grad", None))
    is_new = isinstance(inner, ast.Call) and program.dotted(inner.func) in _NEW
    if keywords or (call.keywords and not isinstance(grad, bool)):
        return None
    if grad:
        edit = edits.replace(program, call, f"{text}.requires_grad_()")
        return Fix((edit,), is_safe=True) if is_new else None
    is_plain = isinstance(inner, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    wrapped = text if is_plain or _stands_alone(program, call) else f"({text})"
    return Fix((edits.replace(program, call, wrapped),), is_safe=is_new)


def _stands_alone(program: Program, node: ast.AST) -> bool:
    """Whether parentheses around it would change nothing."""
    parent = program.parents.get(node)
    if isinstance(parent, ast.Call):
        return parent.func is not node
    return isinstance(parent, (ast.Assign, ast.Return, ast.Expr, ast.keyword))


def _volatile(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    found = edits.keyword(node, "volatile")
    if found is not None:
        yield finding(program, rule, found)


def _data_item(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """`loss.data[0]`, of what is named or made as a loss."""
    assert isinstance(node, ast.Attribute)
    parent = program.parents.get(node)
    if (
        not isinstance(parent, ast.Subscript)
        or parent.value is not node
        or not _is_zero(parent.slice)
    ):
        return
    if not isinstance(parent.ctx, ast.Load) or not _is_scalar(program, node.value):
        return
    start = program.source.end_of(node) - len("data")
    end = program.source.end_of(parent)
    fix = None if edits.is_in_fstring(program, node) else Fix((Edit(start, end, "item()"),))
    yield finding(program, rule, parent, fix)


def _is_zero(node: ast.AST) -> bool:
    inner = getattr(node, "value", None)
    return constant(node) == 0 or (type(node).__name__ == "Index" and constant(inner) == 0)


def _is_scalar(program: Program, node: ast.expr) -> bool:
    """Whether it is the result of a loss, or something that backward() is called on."""
    key = (program.scope_of(node), program.source.text_of(node))
    return key in _propagated(program) or _is_scalar_value(program, node, 4)


@once
def _propagated(program: Program) -> set[tuple[ast.AST, str]]:
    """Of what backward() is called: the scope and the text."""
    return {
        (program.scope_of(one), program.source.text_of(one.value))
        for one in program.attributes.get("backward", ())
    }


def _is_scalar_value(program: Program, node: ast.expr, depth: int) -> bool:
    """Whether an expression is one number of a tensor: a loss, a mean, a sum, or made of such alone.

    Args:
        program: the names.
        node: the expression.
        depth: how many names to look behind.
    """
    if isinstance(node, ast.UnaryOp):
        return _is_scalar_value(program, node.operand, depth)
    if isinstance(node, ast.BinOp):
        sides = [one for one in (node.left, node.right) if not isinstance(one, ast.Constant)]
        return bool(sides) and all(_is_scalar_value(program, one, depth) for one in sides)
    if isinstance(node, ast.Call):
        dotted = program.dotted(node.func)
        is_alone = len(node.args) == 1 and not node.keywords and not edits.is_open(node)
        if dotted in _EACH_NUMBER and is_alone:
            return _is_scalar_value(program, node.args[0], depth)
        is_method = getattr(node.func, "attr", "") in ("mean", "sum") and not dotted
        is_whole = is_method and not node.args and not node.keywords
        return _is_loss_call(program, node) or is_whole or (dotted in _TO_ONE_NUMBER and is_alone)
    return depth > 0 and program.of_all(_is_scalar_value, program.place_of(node), depth - 1)


def _is_loss_call(program: Program, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = program.dotted(node.func)
    if name.startswith("torch.nn.functional.") and name.endswith(("loss", "cross_entropy")):
        return not edits.keyword(node, "reduction") and not edits.keyword(node, "reduce")
    makers = program.made_by(node.func)
    return bool(makers) and all(m.startswith("torch.nn.") and m.endswith("Loss") for m in makers)


def _next(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """`.next()` of iter(a DataLoader)."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    if call is None or call.args or call.keywords or not _is_loader_iterator(program, node.value):
        return
    text = program.source.text_of(node.value)
    fix = (
        None
        if edits.is_in_fstring(program, node)
        else Fix((edits.replace(program, call, f"next({text})"),))
    )
    yield finding(program, rule, node, fix)


def _is_loader_iterator(program: Program, node: ast.expr) -> bool:
    """iter(a DataLoader), or what is such an iterator wherever it is assigned."""
    if not isinstance(node, ast.Call):
        return program.of_all(_is_loader_call, program.place_of(node))
    return _is_loader_call(program, node)


def _is_loader_call(program: Program, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "iter":
        return False
    loader = program.made_by(node.args[0]) if len(node.args) == 1 else frozenset()
    names = {"torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"}
    return bool(loader) and loader <= names and not program.is_bound("iter")


def _async(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """`x.cuda(async=True)`: the tree has another word there, since the file does not parse."""
    for call in program.calls:
        found = edits.keyword(call, OLD_ASYNC)
        name = getattr(call.func, "attr", "")
        if found is not None and name in ("cuda", "to", "copy_", "type"):
            fix = Fix((edits.rename_keyword(program, found, "non_blocking"),))
            yield finding(program, rule, found, fix)


def _retain_variables(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    found = edits.keyword(call, "retain_variables") if call is not None else None
    # Modules of that time have a backward() of their own that takes it.
    if found is not None and not program.is_bound("retain_variables"):
        yield finding(
            program, rule, found, Fix((edits.rename_keyword(program, found, "retain_graph"),))
        )


def _numbers(node: ast.AST) -> bool:
    """Whether it is a list of literals, or of lists of them."""
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    if isinstance(node, (ast.List, ast.Tuple)):
        return all(_numbers(part) for part in node.elts)
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float, bool))


def _sizes(call: ast.Call) -> bool:
    parts = call.args
    return bool(parts) and all(isinstance(constant(part), int) for part in parts)


def _typed(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """A constructor by type, where it is called: as a type of isinstance it is right."""
    assert isinstance(node, ast.Call)
    if any("Storage" in program.source.text_of(one) for one in node.args):
        return  # neither sizes nor values
    dotted = program.dotted(node.func)
    dtype = _TYPES[dotted.rpartition(".")[2]]
    yield finding(program, rule, node.func, _typed_fix(program, node, dtype))


def _typed_fix(program: Program, call: ast.Call, dtype: str) -> Optional[Fix]:
    if call.keywords or edits.is_in_fstring(program, call) or edits.is_open(call):
        return None
    if (
        len(call.args) == 1
        and isinstance(call.args[0], (ast.List, ast.Tuple))
        and _numbers(call.args[0])
    ):
        return _as(program, call, "torch.tensor", dtype)
    return _as(program, call, "torch.empty", dtype) if _sizes(call) else None


def _as(program: Program, call: ast.Call, function: str, dtype: str) -> Optional[Fix]:
    found = edits.name_for(program, function, call)
    kind = edits.name_for(program, f"torch.{dtype}", call)
    if found is None or kind is None:
        return None
    # Both may bring the same import.
    text = edits.append_argument(program, call, f"dtype={kind[0]}") if dtype else None
    if dtype and text is None:
        return None
    renamed = edits.replace(program, call.func, found[0])
    return Fix((renamed, *((text,) if text else ()), *found[1]))


def _tensor(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """`torch.Tensor(...)`, called: sizes, or numbers."""
    assert isinstance(node, ast.Call)
    fix = None
    if not call_is_open(node) and not edits.is_in_fstring(program, node):
        if _sizes(node):
            fix = _as(program, node, "torch.empty", "")
        elif (
            len(node.args) == 1
            and isinstance(node.args[0], (ast.List, ast.Tuple))
            and _numbers(node.args[0])
        ):
            fix = _as(program, node, "torch.tensor", "float32")
    yield finding(
        program, rule, node.func, fix if fix is None else Fix(fix.edits, is_safe=_sizes(node))
    )


def call_is_open(node: ast.Call) -> bool:
    return bool(node.keywords) or edits.is_open(node)


_CPU: tuple[str, ...] = tuple(f"torch.{name}" for name in _TYPES)
_CUDA: tuple[str, ...] = tuple(f"torch.cuda.{name}" for name in _TYPES)


def _cuda_typed(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    yield finding(program, rule, node.func if isinstance(node, ast.Call) else node)


RULES: list[Rule] = [
    Rule(
        "FLB2110", "variable",
        "`Variable(x)` is `x.detach()` since torch 0.4: a tensor is its own variable, and `x.requires_grad_()` says"
        " `requires_grad=True`",
        "`Variable(x)` 自 torch 0.4 起即 `x.detach()`：张量本身即可求导，`requires_grad=True` 写作 `x.requires_grad_()`",
        "import torch\nfrom torch.autograd import Variable\n\nout = Variable(torch.ones(2))\n",
        "import torch\n\nout = torch.ones(2)\n",
        "The import goes only with --unsafe-fixes, and only when nothing uses it any more.",
        deprecated="0.4", fix="unsafe", calls=_VARIABLE, names=(), check=_variable_call,
    ),
    Rule(
        "FLB2111", "variable-import",
        "`Variable` is imported, which no program needs since torch 0.4",
        "导入了自 torch 0.4 起不再需要的 `Variable`",
        "import torch\nfrom torch.autograd import Variable\n\nout = torch.ones(2)\n",
        "import torch\n\nout = torch.ones(2)\n",
        "isinstance(x, Variable) is true of every tensor: torch.is_tensor(x) says the same.",
        deprecated="0.4", fix="unsafe", names=_VARIABLE, check=_variable,
    ),
    Rule(
        "FLB301", "volatile",
        "`volatile=True` has no effect since torch 0.4: the graph is kept; write `with torch.no_grad():`",
        "`volatile=True` 自 torch 0.4 起无效，计算图仍被保留：改用 `with torch.no_grad():`",
        "import torch\nfrom torch.autograd import Variable  # noqa: FLB2111\n\n"
        "out = Variable(torch.ones(2), volatile=True)\n",
        "import torch\n\nwith torch.no_grad():\n    out = torch.ones(2)\n",
        "Evaluation needs the memory of training then.",
        deprecated="0.4", runs="UserWarning", calls=_VARIABLE, check=_volatile,
    ),
    Rule(
        "FLB184", "data-item",
        "`.data[0]` of a loss raises since torch 0.5: write `.item()`",
        "对损失取 `.data[0]` 自 torch 0.5 起报错：改用 `.item()`",
        "import torch\nimport torch.nn.functional as F\n\nloss = F.mse_loss(torch.ones(2), torch.zeros(2))\n"
        "out = loss.data[0]\n",
        "import torch\nimport torch.nn.functional as F\n\nloss = F.mse_loss(torch.ones(2), torch.zeros(2))\n"
        "out = loss.item()\n",
        deprecated="0.4", removed="0.5", fix="safe", runs="IndexError", attributes=("data",), check=_data_item,
    ),
    Rule(
        "FLB185", "loader-next",
        "the iterator of a DataLoader has no `.next()` since torch 1.13: write `next(iterator)`",
        "DataLoader 的迭代器自 torch 1.13 起没有 `.next()`：改用 `next(iterator)`",
        "import torch\nfrom torch.utils.data import DataLoader\n\nbatches = iter(DataLoader(torch.ones(2, 1)))\n"
        "out = batches.next()\n",
        "import torch\nfrom torch.utils.data import DataLoader\n\nbatches = iter(DataLoader(torch.ones(2, 1)))\n"
        "out = next(batches)\n",
        removed="1.13", fix="safe", runs="AttributeError", attributes=("next",), check=_next,
    ),
    Rule(
        "FLB186", "async-argument",
        "`async` is a word of Python since 3.7, and the file does not parse: write `non_blocking=`",
        "`async` 自 Python 3.7 起是关键字，文件无法解析：改用 `non_blocking=`",
        "import torch\n\nout = torch.ones(2).to('cpu', async=True)\n",
        "import torch\n\nout = torch.ones(2).to('cpu', non_blocking=True)\n",
        deprecated="0.4", removed="0.4.1", fix="safe", runs="SyntaxError", whole=True, check=_async,
    ),
    Rule(
        "FLB1201", "retain-variables",
        "`retain_variables=` of `backward` is gone since torch 0.4: write `retain_graph=`",
        "`backward` 的 `retain_variables=` 自 torch 0.4 起已移除：改用 `retain_graph=`",
        "import torch\n\nx = torch.ones(2, requires_grad=True)\nx.sum().backward(retain_variables=True)\nout = x.grad\n",
        "import torch\n\nx = torch.ones(2, requires_grad=True)\nx.sum().backward(retain_graph=True)\nout = x.grad\n",
        deprecated="0.2", removed="0.4", fix="safe", runs="TypeError", attributes=("backward",),
        check=_retain_variables,
    ),
    Rule(
        "FLB2112", "tensor-by-type",
        "`torch.FloatTensor(...)` and its kin are legacy: write `torch.tensor(..., dtype=)`, or `torch.empty`"
        " for sizes",
        "`torch.FloatTensor(...)` 一类构造函数已过时：改用 `torch.tensor(..., dtype=)`；给出尺寸时用 `torch.empty`",
        "import torch\n\nout = torch.FloatTensor([1, 2])\n",
        "import torch\n\nout = torch.tensor([1, 2], dtype=torch.float32)\n",
        "Numbers are sizes and lists are values: FloatTensor(3) is three numbers of whatever was in memory.",
        deprecated="0.4", fix="safe", calls=_CPU, check=_typed,
    ),
    Rule(
        "FLB2113", "tensor-constructor",
        "`torch.Tensor(...)` is legacy: `torch.empty` for sizes, which are not zeros, `torch.tensor` for values",
        "`torch.Tensor(...)` 已过时：给出尺寸（内容未初始化）用 `torch.empty`，给出数值用 `torch.tensor`",
        "import torch\n\nout = torch.Tensor(2, 3).shape\n",
        "import torch\n\nout = torch.empty(2, 3).shape\n",
        "Numbers are sizes and lists are values, and all becomes the default dtype.",
        deprecated="0.4", fix="safe", calls=("torch.Tensor",), check=_tensor,
    ),
    Rule(
        "FLB2114", "cuda-tensor-by-type",
        "`torch.cuda.FloatTensor(...)` and its kin are legacy: write `torch.tensor(..., device='cuda')`, or `torch.empty`"
        " for sizes",
        "`torch.cuda.FloatTensor(...)` 一类已过时：改用 `torch.tensor(..., device='cuda')`；给出尺寸时用 `torch.empty`",
        "import torch\n\nout = torch.cuda.FloatTensor([1, 2])\n",
        "import torch\n\nout = torch.tensor([1.0, 2.0], device='cuda')\n",
        deprecated="0.4", runs="UserWarning", calls=_CUDA, check=_cuda_typed,
    ),
]  # fmt: skip
"""One rule for each of them."""
