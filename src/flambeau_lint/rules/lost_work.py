"""What a training loop does and then loses: a step too late, a copy that is dropped, weights that move on."""

import ast
import re
from collections.abc import Iterator
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Place, Program, once
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Edit, Finding, Fix, Rule
from flambeau_lint.rules.mistakes import SCALERS
from flambeau_lint.rules.training import OPTIMIZERS
from flambeau_lint.rules.training_steps import (
    CLIPS,
    calls_around,
    loops_of,
    places_of_calls,
    statement_of,
)

_ONE_CYCLE = "torch.optim.lr_scheduler.OneCycleLR"
_MOVES = ("to", "cuda", "cpu", "half", "float", "double", "long", "detach", "contiguous")
_MAKERS = ("tensor", "rand", "randn", "randint", "zeros", "ones", "full", "arange", "from_numpy")
_TRAINED = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "LSTM", "GRU", "Sequential")
_LOADER = re.compile(r"loader|\bdl\b|_dl\b|batches|dataset")
_ASKS_RANK = re.compile(
    rb"(?:rank|gpu_?id)\w*(\(\w*\))?\]? *(==|!=|<|>|in\b|else\b|:)|not \w*\.?\w*rank|main|master|is_zero"
)


def _clipped_after_step(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """loss.backward(), opt.step(), clip_grad_norm_(...): the step was made with all of them."""
    statement = statement_of(program, node)
    if statement is None:
        return
    made = calls_around(program, statement, "backward")[0]
    step, next_step = calls_around(program, statement, "step")
    if 0 <= made < step and next_step == len(program.index_of(statement)[0]):
        yield finding(program, rule, node)


def _no_update(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """scaler.step(optimizer), and no update() in the file."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    made = program.made_by(node.value)
    if call is not None and made and made <= SCALERS and "update" not in program.attributes:
        yield finding(program, rule, call)


def _kept_not_copied(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """if acc > best: best_wts = net.state_dict(), and load_state_dict(best_wts) at the end."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    assign = program.parents.get(call) if call is not None else None
    if not isinstance(assign, ast.Assign) or len(assign.targets) != 1:
        return
    around = list(program.parents_of(assign))
    loop = program.loop_of(assign)
    if loop is None or not any(isinstance(one, ast.If) for one in around[: around.index(loop)]):
        return
    kept = (program.function_of(node), program.source.text_of(assign.targets[0]))
    for other in reversed(_loaded(program).get(kept, ())):
        if other.lineno <= assign.lineno:
            return
        if not any(parent is loop for parent in program.parents_of(other)):
            yield finding(program, rule, assign.value)
            return


@once
def _loaded(program: Program) -> dict[tuple[Optional[ast.AST], str], list[ast.Attribute]]:
    """Each load_state_dict, in the order of lines, by its function and by what it is given."""
    found: dict[tuple[Optional[ast.AST], str], list[ast.Attribute]] = {}
    for one in sorted(program.attributes.get("load_state_dict", ()), key=lambda one: one.lineno):
        call = program.is_called(one)
        given = program.source.text_of(call.args[0]) if call and call.args else ""
        found.setdefault((program.function_of(one), given), []).append(one)
    return found


def _layer_too_late(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """optimizer = SGD(net.parameters()), and net.fc = nn.Linear(...) behind it."""
    assert isinstance(node, ast.Call)
    statement = program.parents.get(node)
    owner = _whose_parameters(program, node)
    if not isinstance(statement, ast.Assign) or not owner:
        return
    if "add_param_group" in program.attributes or len(program.values_of(statement.targets[0])) > 1:
        return
    body, index = program.index_of(statement)
    for place in range(index + 1, len(body)):
        one = body[place]
        if not isinstance(one, ast.Assign) or not isinstance(one.value, ast.Call):
            continue
        dotted = program.dotted(one.value.func)
        target = program.source.text_of(one.targets[0])
        if target == owner or dotted in OPTIMIZERS:
            return
        is_layer = dotted.startswith("torch.nn.") and dotted.rpartition(".")[2] in _TRAINED
        if is_layer and target.startswith(f"{owner}."):
            yield finding(program, rule, one)


def _whose_parameters(program: Program, node: ast.Call) -> str:
    """'net' of SGD(net.parameters(), ...)."""
    first = edits.argument(node, 0, "params")
    func = first.func if isinstance(first, ast.Call) else None
    is_all = isinstance(func, ast.Attribute) and func.attr == "parameters"
    return program.source.text_of(func.value) if is_all else ""  # type: ignore[union-attr]


def _moved_in_vain(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """x.to(device) as a statement, where x is a tensor."""
    for name in _MOVES:
        for method in program.attributes.get(name, ()):
            call = program.is_called(method)
            statement = statement_of(program, call) if call is not None else None
            owner = method.value
            place = program.place_of(owner) if isinstance(owner, ast.Name) else None
            if statement is None or place is None or not _is_tensor(program, place):
                continue
            start = program.source.start_of(statement)
            fix = Fix((Edit(start, start, f"{place[0]} = "),), is_safe=False)
            yield finding(program, rule, call or method, fix)


@once
def _is_tensor(program: Program, place: Place) -> bool:
    """Whether it is made by torch, or one of the pair that a loader gives."""
    made = program.made_at(place)
    if made:
        return all(one in {f"torch.{name}" for name in _MAKERS} for one in made)
    found = program.stores_at(place)
    return bool(found) and all(_is_of_loader(program, one) for one in found)


def _is_of_loader(program: Program, node: ast.AST) -> bool:
    """x of `for x, y in loader`, and of `for i, (x, y) in enumerate(loader)`."""
    pair = program.parents.get(node)
    above = program.parents.get(pair) if pair is not None else None
    loop = program.parents.get(above) if isinstance(above, ast.Tuple) else above
    if not isinstance(pair, ast.Tuple) or not isinstance(loop, ast.For):
        return False
    text = program.source.text_of(loop.iter)
    is_counted = text.startswith("enumerate(")
    is_made = bool(places_of_calls(program, loop.body[0], "backward"))
    return is_made and is_counted == (pair is not loop.target) and bool(_LOADER.search(text))


def _cycle_by_epoch(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """OneCycleLR(steps_per_epoch=len(loader)), stepped behind the loop over the loader."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    if call is None or program.made_by(node.value) != {_ONE_CYCLE}:
        return
    place = program.place_of(node.value)
    is_by_batch = place is None or program.of_all(_has_steps_per_epoch, place)
    if is_by_batch and program.loop_of(call) in _around_training(program):
        yield finding(program, rule, call)


def _has_steps_per_epoch(program: Program, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and edits.keyword(node, "steps_per_epoch") is not None


@once
def _around_training(program: Program) -> set[ast.AST]:
    """All that stands around the loops that call backward()."""
    inner = [loop for loop in loops_of(program, "backward") if loop is not None]
    return {parent for loop in inner for parent in program.parents_of(loop)}


def _each_rank_saves(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.save(...) in a program of several processes that never asks for its rank."""
    if _never_asks_rank(program) and "rank" not in program.source.text_of(node):
        yield finding(program, rule, node)


@once
def _never_asks_rank(program: Program) -> bool:
    """Whether a program of several processes does the same in each."""
    data = program.source.data
    if b"init_process_group" not in data or b"DistributedDataParallel" not in data:
        return False
    # Not `if __name__ == '__main__'` and `def main`, which most scripts have.
    return _ASKS_RANK.search(re.sub(rb"__main__|\bmain\(", b"", data)) is None


_NET = "import torch\n\nnet = torch.nn.Linear(2, 2)\n"
_LOOP = (
    f"{_NET}optimizer = torch.optim.SGD(net.parameters(), 0.1)\n\n\ndef train(loader):\n    for x, y in loader:\n"
    "        optimizer.zero_grad()\n%s"
)
_CLIP = "        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
_DONE = "        optimizer.step()\n"
_BACK = "        (net(x) - y).square().mean().backward()\n"
_SCALED = (
    f"{_NET}scaler = torch.amp.GradScaler('cuda')\n\n\ndef step(loss, optimizer):\n"
    "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n%s"
)
_BEST = (
    "import copy\n\nimport torch  # noqa: F401\n\n\ndef fit(net, train):\n    best = 0.0\n    for epoch in range(9):\n"
    "        accuracy = train(net)\n        if accuracy > best:\n            best = accuracy\n"
    "            weights = %s\n    net.load_state_dict(weights)\n"
)
_HEAD = "net.head = torch.nn.Linear(2, 3)\n"
_MADE = "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
_CYCLE = (
    f"{_NET}{_MADE}cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=2, steps_per_epoch=3)\n"
    "for epoch in range(2):\n    for step in range(3):\n        net(torch.ones(2)).sum().backward()\n"
    "        optimizer.step()\n%scycle.step()\n"
)
_SAVED = (
    "import torch\nfrom torch.nn.parallel import DistributedDataParallel\n\n\ndef fit(net, train):\n"
    "    torch.distributed.init_process_group()\n    net = DistributedDataParallel(net)\n    train(net)\n"
    "%storch.save(net.module.state_dict(), 'net.pt')\n"
)

RULES: list[Rule] = [
    Rule(
        "FLB450", "clip-after-step",
        "gradients are clipped behind `optimizer.step()`, which has used them as they were: clip before",
        "梯度在 `optimizer.step()` 之后才裁剪，这一步已用了未裁剪的梯度：应在之前裁剪",
        _LOOP % (_BACK + _DONE + _CLIP), _LOOP % (_BACK + _CLIP + _DONE),
        calls=CLIPS, check=_clipped_after_step,
    ),
    Rule(
        "FLB451", "scaler-without-update",
        "without `scaler.update()` the scale stays what it is: after an overflow each further step is skipped",
        "没有 `scaler.update()`，缩放系数永远不变：溢出之后每一步都会被跳过",
        _SCALED % "", _SCALED % "    scaler.update()\n",
        attributes=("step",), check=_no_update,
    ),
    Rule(
        "FLB452", "best-weights-not-copied",
        "`state_dict()` gives the weights themselves, which train on: `copy.deepcopy(net.state_dict())` keeps the best",
        "`state_dict()` 给出的是权重本身，会继续被训练：用 `copy.deepcopy(net.state_dict())` 保留最好的",
        _BEST % "net.state_dict()", _BEST % "copy.deepcopy(net.state_dict())",
        attributes=("state_dict",), check=_kept_not_copied,
    ),
    Rule(
        "FLB453", "layer-behind-optimizer",
        "a layer that is set behind the optimizer is not among its parameters, and never trained: set it before",
        "在优化器之后才设置的层不在其参数之中，永远不会被训练：应在之前设置",
        _NET + _MADE + _HEAD, _NET + _HEAD + _MADE,
        calls=OPTIMIZERS, check=_layer_too_late,
    ),
    Rule(
        "FLB454", "moved-in-vain",
        "`x.to(device)` gives a new tensor and leaves x where it is: `x = x.to(device)`",
        "`x.to(device)` 返回新的张量，x 本身不变：应写 `x = x.to(device)`",
        "import torch\n\nx = torch.ones(2)\nx.double()\nout = x.dtype\n",
        "import torch\n\nx = torch.ones(2)\nx = x.double()\nout = x.dtype\n",
        fix="unsafe", whole=True, check=_moved_in_vain,
    ),
    Rule(
        "FLB455", "one-cycle-by-epoch",
        "OneCycleLR counts batches, and is stepped once per epoch: the rate never leaves its warm-up",
        "OneCycleLR 按批次计数，却每个 epoch 只调用一次：学习率始终停在预热阶段",
        _CYCLE % "    ", _CYCLE % "        ",
        attributes=("step",), check=_cycle_by_epoch,
    ),
    Rule(
        "FLB456", "each-rank-saves",
        "each process writes the same file at once: save on rank 0 alone",
        "每个进程同时写同一个文件：应只在 rank 0 上保存",
        _SAVED % "    ", _SAVED % "    if torch.distributed.get_rank() == 0:\n        ",
        sure="likely", preview=True, calls=("torch.save",), check=_each_rank_saves,
    ),
]  # fmt: skip
"""One rule per mistake."""
