"""Losses that take logits and are given something else."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Program, once
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Check, Finding, Rule


@dataclass(frozen=True)
class Activation:
    """How an activation is written: as a function, a layer or a method."""

    functions: frozenset[str]
    layer: str
    method: str


_SOFTMAX = Activation(
    frozenset({"torch.nn.functional.softmax", "torch.softmax"}), "torch.nn.Softmax", "softmax"
)
_SIGMOID = Activation(
    frozenset({"torch.nn.functional.sigmoid", "torch.sigmoid", "torch.special.expit"}),
    "torch.nn.Sigmoid",
    "sigmoid",
)


_LINEAR = Activation(frozenset({"torch.nn.functional.linear"}), "torch.nn.Linear", "")
_SHAPES = ("squeeze", "unsqueeze", "view", "reshape", "flatten", "float", "contiguous")


def _call_of(program: Program, node: Optional[ast.expr]) -> Optional[ast.Call]:
    """A call, or the only one that is ever assigned to a name."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        values = program.values_of(node)
        node = values[0] if len(values) == 1 else None
    return node if isinstance(node, ast.Call) else None


def _applied(program: Program, node: Optional[ast.expr], kind: Activation) -> Optional[ast.AST]:
    """The activation that an expression is, whatever its shape is made into."""
    call = _call_of(program, node)
    while isinstance(call, ast.Call) and getattr(call.func, "attr", "") in _SHAPES:
        if program.dotted(call.func):
            return None
        call = _call_of(program, call.func.value)  # type: ignore[attr-defined]
    if call is None:
        return None
    dotted = program.dotted(call.func)
    if dotted in kind.functions or program.made_by(call.func) == {kind.layer}:
        return call
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr == kind.method
    return call if is_method and not dotted else None


def _ends_with(program: Program, node: Optional[ast.expr], kind: Activation) -> Optional[ast.AST]:
    """The activation at the end of the model whose output an expression is."""
    call = _call_of(program, node)
    made = _call_of(program, call.func) if call is not None else None
    if made is None:
        return None
    if program.dotted(made.func) == "torch.nn.Sequential":
        last = made.args[-1] if made.args else None
        is_layer = isinstance(last, ast.Call) and program.dotted(last.func) == kind.layer
        return last if is_layer else None
    found = program.bindings(made.func.id, made.func) if isinstance(made.func, ast.Name) else []
    if len(found) != 1 or not isinstance(found[0], ast.ClassDef) or not program.is_module(found[0]):
        return None
    return _returned(program, found[0], kind)


@once
def _returned(program: Program, owner: ast.ClassDef, kind: Activation) -> Optional[ast.AST]:
    """The one `return` of forward(), if it returns the activation."""
    for method in owner.body:
        if isinstance(method, ast.FunctionDef) and method.name == "forward":
            returns = [one for one in ast.walk(method) if isinstance(one, ast.Return)]
            if len(returns) == 1 and _applied(program, returns[0].value, kind):
                return returns[0]
    return None


def _loss_of(function: str, layer: str, kind: Activation) -> Check:
    """A loss whose first argument an activation has passed."""

    def check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
        data = program.source.data
        if function.encode() not in data and layer.encode() not in data:
            return
        for call in program.calls:
            is_loss = program.dotted(call.func) == f"torch.nn.functional.{function}"
            if not is_loss and program.made_by(call.func) != {f"torch.nn.{layer}"}:
                continue
            first = edits.argument(call, 0, "input")
            if first is not None and _applied(program, first, kind) is not None:
                yield finding(program, rule, first)
                continue
            last = _ends_with(program, first, kind)
            if last is not None:
                yield finding(program, rule, last)

    return check


def _log_of_softmax(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.log(F.softmax(x, 1)) and F.softmax(x, 1).log()."""
    for attribute in program.attributes.get("log", ()):
        call = program.is_called(attribute)
        if call is None:
            continue
        is_function = program.dotted(attribute) == "torch.log"
        first = edits.argument(call, 0, "input") if is_function else attribute.value
        if _applied(program, first, _SOFTMAX) is not None:
            yield finding(program, rule, call)


_NET = "import torch\nimport torch.nn.functional as F\n\nnet = torch.nn.Sequential(%s)\n\n\n"
_LINEAR_NET = _NET % "torch.nn.ReLU(), torch.nn.Linear(2, 2)"
_LOGITS = "import torch\nimport torch.nn.functional as F\n\nx = torch.tensor([[300.0, 0.0]])\n"

RULES: list[Rule] = [
    Rule(
        "FLB404", "softmax-before-cross-entropy",
        "cross-entropy takes logits: of a softmax it is the loss of a model that can never be sure",
        "交叉熵接收 logits：先做 softmax 会使损失永远降不到 0",
        f"{_LOGITS}y = torch.tensor([0])\nout = F.cross_entropy(F.softmax(x, dim=1), y)\n",
        f"{_LOGITS}y = torch.tensor([0])\nout = F.cross_entropy(x, y)\n",
        whole=True, check=_loss_of("cross_entropy", "CrossEntropyLoss", _SOFTMAX),
    ),
    Rule(
        "FLB431", "sigmoid-before-bce-with-logits",
        "binary cross-entropy with logits takes logits: of a sigmoid it is the loss of a model that can never be sure",
        "带 logits 的二元交叉熵接收 logits：先做 sigmoid 会使损失永远降不到 0",
        f"{_LOGITS}out = F.binary_cross_entropy_with_logits(torch.sigmoid(x), torch.ones(1, 2))\n",
        f"{_LOGITS}out = F.binary_cross_entropy_with_logits(x, torch.ones(1, 2))\n",
        whole=True, check=_loss_of("binary_cross_entropy_with_logits", "BCEWithLogitsLoss", _SIGMOID),
    ),
    Rule(
        "FLB432", "log-of-softmax",
        "the logarithm of a softmax is -inf where the softmax is rounded to 0: write `log_softmax`",
        "softmax 舍入为 0 时其对数为 -inf：改用 `log_softmax`",
        f"{_LOGITS}out = torch.log(F.softmax(x, dim=1))\n",
        f"{_LOGITS}out = F.log_softmax(x, dim=1)\n",
        whole=True, check=_log_of_softmax,
    ),
    Rule(
        "FLB433", "softmax-before-nll",
        "`nll_loss` takes logarithms: of a softmax it is no likelihood; write `log_softmax`, or `cross_entropy`",
        "`nll_loss` 接收对数概率：传入 softmax 不是似然；改用 `log_softmax` 或 `cross_entropy`",
        f"{_LOGITS}out = F.nll_loss(F.softmax(x, dim=1), torch.tensor([0]))\n",
        f"{_LOGITS}out = F.nll_loss(F.log_softmax(x, dim=1), torch.tensor([0]))\n",
        whole=True, check=_loss_of("nll_loss", "NLLLoss", _SOFTMAX),
    ),
    Rule(
        "FLB457", "logits-before-nll",
        "`nll_loss` takes logarithms of probabilities: of a linear layer it falls without an end; write `cross_entropy`",
        "`nll_loss` 接收对数概率：直接传入线性层的输出，损失会无限下降；改用 `cross_entropy`",
        f"{_LINEAR_NET}def loss(x, y):\n    return F.nll_loss(net(x), y)\n",
        f"{_LINEAR_NET}def loss(x, y):\n    return F.cross_entropy(net(x), y)\n",
        whole=True, check=_loss_of("nll_loss", "NLLLoss", _LINEAR),
    ),
    Rule(
        "FLB458", "logits-before-bce",
        "`binary_cross_entropy` takes probabilities, and raises outside of 0 to 1: of a linear layer write"
        " `binary_cross_entropy_with_logits`",
        "`binary_cross_entropy` 接收概率，超出 0 到 1 会报错：线性层的输出应改用 `binary_cross_entropy_with_logits`",
        f"{_LINEAR_NET}def loss(x, y):\n    return F.binary_cross_entropy(net(x), y)\n",
        f"{_LINEAR_NET}def loss(x, y):\n    return F.binary_cross_entropy_with_logits(net(x), y)\n",
        runs="RuntimeError", whole=True, check=_loss_of("binary_cross_entropy", "BCELoss", _LINEAR),
    ),
]  # fmt: skip
"""One rule per pair of a loss and what it is given."""
