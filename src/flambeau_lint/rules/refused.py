"""Calls that torch refuses: a rank that nobody gives, a name with a dot, sizes that are not one tuple."""

import ast
import builtins
import math
from collections.abc import Iterator
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Program, once
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Finding, Rule
from flambeau_lint.rules.argument_rows import constant

_BUILTINS = frozenset(dir(builtins))
_SET_NO_RANK = ("torch", "numpy", "random", "time")


def _no_rank(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """init_process_group('nccl') in a function that mp.spawn starts, which gives its first argument alone."""
    assert isinstance(node, ast.Call)
    if edits.is_open(node) or len(node.args) > 2 or program.says(b"RANK"):
        return
    if any(edits.keyword(node, name) for name in ("rank", "store")):
        return
    method = edits.argument(node, 1, "init_method")
    if method is not None and constant(method) != "env://":
        return
    function = program.function_of(node)
    if function is None or function not in _spawned(program):
        return
    if node.lineno <= _first_unknown(program, function):
        yield finding(program, rule, node)


@once
def _spawned(program: Program) -> set[ast.AST]:
    """The functions that mp.spawn starts."""
    found: set[ast.AST] = set()
    for call in program.calls:
        if program.dotted(call.func) == "torch.multiprocessing.spawn":
            first = edits.argument(call, 0, "fn")
            bound = program.bindings(first.id, first) if isinstance(first, ast.Name) else []
            found.update(bound if len(bound) == 1 else ())
    return found


@once
def _first_unknown(program: Program, function: ast.AST) -> float:
    """The first line of a function that may set a rank."""
    calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
    lines = [one.lineno for one in calls if not _sets_no_rank(program, one.func)]
    return min(lines, default=math.inf)


def _sets_no_rank(program: Program, node: ast.expr) -> bool:
    """Whether it is known what is called: a helper of another file may set the variables."""
    if isinstance(node, ast.Name) and node.id in _BUILTINS and not program.is_bound(node.id):
        return True
    return program.dotted(node).partition(".")[0] in _SET_NO_RANK


def _dotted_name(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """for name, layer in net.named_modules(): other.add_module(name, layer)."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    name = edits.argument(call, 0, "name") if call is not None else None
    loop = _loop_of_name(program, name) if name is not None else None
    if loop is None or not isinstance(loop.iter, ast.Call) or name is None:
        return
    is_deep = getattr(loop.iter.func, "attr", "") == "named_modules"
    if is_deep and not _says_dot(program, loop):
        yield finding(program, rule, name)


@once
def _says_dot(program: Program, loop: ast.For) -> bool:
    inside = [one.value for one in ast.walk(loop) if isinstance(one, ast.Constant)]
    return any(isinstance(one, str) and "." in one for one in inside)


def _loop_of_name(program: Program, node: ast.expr) -> Optional[ast.For]:
    """The loop over pairs whose first one a name is: `name`, or `pair[0]`."""
    is_pair = isinstance(node, ast.Subscript) and constant(node.slice) == 0
    held = node.value if is_pair else node  # type: ignore[attr-defined]
    found = program.bindings(held.id, held) if isinstance(held, ast.Name) else []
    if len(found) != 1:
        return None
    target: ast.AST = found[0]
    if not is_pair:
        pair = program.parents.get(target)
        if not isinstance(pair, ast.Tuple) or len(pair.elts) != 2 or pair.elts[0] is not target:
            return None
        target = pair
    loop = program.parents.get(target)
    return loop if isinstance(loop, ast.For) and loop.target is target else None


def _sizes_apart(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.reshape(n, d, h * w), as the method of a tensor is called."""
    assert isinstance(node, ast.Call)
    if len(node.args) > 2 and not edits.is_open(node) and not node.keywords:
        yield finding(program, rule, node)


_SPAWNED = (
    "import torch.distributed as dist\nimport torch.multiprocessing as mp\n\n\n"
    "def work(gpu, count):\n    dist.init_process_group(%s)\n    dist.barrier()\n\n\n"
    "if __name__ == '__main__':\n    mp.spawn(work, args=(2,), nprocs=2)\n"
)
_CONVOLUTIONS = (
    "from torch import nn\n\nnet = nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1)), nn.ReLU())\n"
    "out = nn.Sequential()\nfor name, layer in net.named_modules():\n    if isinstance(layer, nn.Conv2d):\n"
    "        out.add_module(%s, layer)\n"
)

RULES: list[Rule] = [
    Rule(
        "FLB459", "spawned-without-rank",
        "`mp.spawn` sets no RANK: `init_process_group` in what it starts needs `rank=` and `world_size=`",
        "`mp.spawn` 不设置 RANK：它启动的函数里，`init_process_group` 需要 `rank=` 和 `world_size=`",
        _SPAWNED % "'gloo'", _SPAWNED % "'gloo', rank=gpu, world_size=count",
        "On several machines, `rank = node_rank * gpus_per_node + gpu`; torchrun sets RANK instead.",
        runs="ValueError", calls=("torch.distributed.init_process_group",), check=_no_rank,
    ),
    Rule(
        "FLB460", "module-by-dotted-name",
        "`named_modules()` gives nested layers names with dots, which `add_module` refuses: `name.replace('.', '_')`",
        "`named_modules()` 给出的嵌套层名称带点，`add_module` 会拒绝：用 `name.replace('.', '_')`",
        _CONVOLUTIONS % "name", _CONVOLUTIONS % "name.replace('.', '_')",
        runs="KeyError", attributes=("add_module", "register_module"), check=_dotted_name,
    ),
    Rule(
        "FLB461", "sizes-not-a-tuple",
        "torch's own `reshape`, `permute`, `flip`, `tile` and `broadcast_to` take the tensor and one tuple:"
        " numbers behind each other are for the methods of a tensor",
        "torch 的函数 `reshape`、`permute`、`flip`、`tile`、`broadcast_to` 接收张量和一个元组：逐个写出的数只用于张量的方法",
        "import torch\n\nx = torch.ones(2, 3, 4)\nout = torch.reshape(2, 3 * 4, 1)\n",
        "import torch\n\nx = torch.ones(2, 3, 4)\nout = torch.reshape(x, (2, 3 * 4, 1))\n",
        runs="TypeError", check=_sizes_apart,
        calls=tuple(f"torch.{name}" for name in ("reshape", "permute", "flip", "tile", "broadcast_to")),
    ),
]  # fmt: skip
"""One rule per call that is refused."""
