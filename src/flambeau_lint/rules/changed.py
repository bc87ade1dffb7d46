"""What still runs, and gives something else since a version: reported with --from an older version."""

import ast
from collections.abc import Iterator

from flambeau_lint import edits
from flambeau_lint.program import Program
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Finding, Fix, Rule
from flambeau_lint.rules.argument_rows import constant


def _zero_grad(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    if call is None or edits.has_argument(call, 0, "set_to_none"):
        return
    made = program.made_by(node.value)
    if made and all(name.startswith(("torch.optim.", "torch.nn.")) for name in made):
        yield finding(program, rule, node)


def _full(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    value = edits.argument(node, 1, "fill_value")
    values = program.values_of(value) if isinstance(value, ast.Name) else [value]
    numbers = [constant(one) for one in values]
    is_whole = bool(numbers) and all(type(one) is int for one in numbers)
    if is_whole and not edits.has_argument(node, 99, "dtype") and not edits.is_open(node):
        edit = edits.append_argument(program, node, "dtype=torch.float32")
        has_torch = program.module_imports.get("torch") == "torch"
        fix = Fix((edit,), is_safe=False) if edit is not None and has_torch else None
        yield finding(program, rule, node.func, fix)


def _scale_factor(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    found = edits.keyword(node, "scale_factor")
    is_told = edits.has_argument(node, 99, "recompute_scale_factor")
    if found is not None and not is_told and _is_fraction(found.value):
        yield finding(program, rule, found)


def _is_fraction(node: ast.expr) -> bool:
    """0.7, or 1 / 2; of a name it is not known."""
    value = constant(node)
    is_ratio = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return is_ratio or (isinstance(value, float) and not value.is_integer())


def _called(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    yield finding(program, rule, node.func)


RULES: list[Rule] = [
    Rule(
        "FLB321", "zero-grad-sets-none",
        "`zero_grad()` sets gradients to None since torch 2.0, where they were zeros: `set_to_none=False` is the old"
        " way",
        "`zero_grad()` 自 torch 2.0 起把梯度设为 None，此前是零：`set_to_none=False` 为旧行为",
        "import torch\n\nnet = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "optimizer.zero_grad()\n",
        "import torch\n\nnet = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "optimizer.zero_grad(set_to_none=True)\n",
        "Momentum and weight decay no longer move a parameter that got no gradient; `p.grad.norm()` raises.",
        changed="2.0", attributes=("zero_grad",), check=_zero_grad,
    ),
    Rule(
        "FLB322", "floor-divide",
        "`torch.floor_divide` rounds down since torch 1.13, and toward zero before: name `rounding_mode` of"
        " `torch.div`",
        "`torch.floor_divide` 自 torch 1.13 起向下取整，此前向零取整：请用 `torch.div` 并写明 `rounding_mode`",
        "import torch\n\nout = torch.floor_divide(torch.tensor(-3), 2)\n",
        "import torch\n\nout = torch.div(torch.tensor(-3), 2, rounding_mode='floor')\n",
        changed="1.13", calls=("torch.floor_divide",), check=_called,
    ),
    Rule(
        "FLB323", "full-of-a-whole-number",
        "`torch.full` of a whole number gives int64 since torch 1.7, and float32 before: name `dtype`",
        "`torch.full` 填充整数时自 torch 1.7 起得到 int64，此前是 float32：请写明 `dtype`",
        "import torch\n\nout = torch.full((2,), 1).dtype\n",
        "import torch\n\nout = torch.full((2,), 1, dtype=torch.float32).dtype\n",
        changed="1.7", fix="unsafe", calls=("torch.full",), check=_full,
    ),
    Rule(
        "FLB324", "interpolate-by-a-fraction",
        "`interpolate` uses a fractional `scale_factor` itself since torch 1.6, and that of the two sizes before:"
        " `recompute_scale_factor=True` is the old way",
        "`interpolate` 自 torch 1.6 起直接使用小数 `scale_factor`，此前由尺寸重新计算：`recompute_scale_factor=True` 为旧行为",
        "import torch\nimport torch.nn.functional as F\n\n"
        "out = F.interpolate(torch.ones(1, 1, 5, 5), scale_factor=0.7, mode='bilinear', align_corners=False)\n",
        "import torch\nimport torch.nn.functional as F\n\n"
        "out = F.interpolate(torch.ones(1, 1, 5, 5), scale_factor=0.7, mode='bilinear', align_corners=False,\n"
        "                    recompute_scale_factor=True)\n",
        changed="1.6", calls=("torch.nn.functional.interpolate",), check=_scale_factor,
    ),
]  # fmt: skip
"""One rule per change."""
