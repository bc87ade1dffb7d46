"""What runs and is wrong, or slow: mistakes that are read off the program itself.

Rules that would have to guess at the flow of a program are preview: they are off unless asked for.
"""

import ast
import re
from collections.abc import Iterator
from typing import Optional, Union

from flambeau_lint import edits
from flambeau_lint.program import Program, once
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Check, Edit, Finding, Fix, Rule
from flambeau_lint.rules.argument_rows import constant
from flambeau_lint.rules.training_steps import loops_of

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CLIPS = (
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_",
    "torch.nn.utils.clip_grad_norm",
)
SCALERS = {
    "torch.cuda.amp.GradScaler",
    "torch.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler",
}


@once
def _method_calls(program: Program, name: str) -> dict[Optional[ast.AST], list[ast.Call]]:
    """Calls of `.name()` by the function that they stand in, in the order of lines."""
    found: dict[Optional[ast.AST], list[ast.Call]] = {}
    for attribute in program.attributes.get(name, ()):
        call = program.is_called(attribute)
        if call is not None:
            found.setdefault(program.function_of(call), []).append(call)
    return {block: sorted(calls, key=lambda call: call.lineno) for block, calls in found.items()}


@once
def _scaled(program: Program, block: Optional[ast.AST]) -> list[ast.Call]:
    """scaler.scale(loss) of scaler.scale(loss).backward() within a function."""
    found = []
    for call in _method_calls(program, "scale").get(block, ()):
        made = program.made_by(call.func.value)  # type: ignore[attr-defined]
        parent = program.parents.get(call)
        is_made = isinstance(parent, ast.Attribute) and parent.attr == "backward"
        if made and made <= SCALERS and is_made:
            found.append(call)
    return found


def _clip_scaled(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """scaler.scale(loss).backward(), then a clip, and no unscale_ in the file."""
    assert isinstance(node, ast.Call)
    block = program.function_of(node)
    steps = _method_calls(program, "step").get(block, ())
    if "unscale_" in program.attributes or not steps or steps[-1].lineno <= node.lineno:
        return
    for call in _scaled(program, block):
        if call.lineno >= node.lineno:
            return
        if not program.are_alternatives(call, node):
            yield finding(program, rule, node)
            return


def _module_prefix(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """k.replace('module.', '')."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    if call is None or len(call.args) != 2 or call.keywords:
        return
    if isinstance(node.value, ast.Constant):
        return  # a text that stands there is no key of a state
    if constant(call.args[0]) == "module." and constant(call.args[1]) == "":
        start = program.source.end_of(node) - len("replace")
        text = "removeprefix('module.')"
        fix = Fix((Edit(start, program.source.end_of(call), text),), is_safe=False)
        yield finding(program, rule, call, None if edits.is_in_fstring(program, call) else fix)


def _set_epoch(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """A DistributedSampler that is made, epochs, and no set_epoch in the file."""
    assert isinstance(node, ast.Call)
    shuffle = edits.keyword(node, "shuffle")
    is_off = shuffle is not None and constant(shuffle.value) is False
    if not is_off and "set_epoch" not in program.attributes and _has_epochs(program):
        yield finding(program, rule, node.func)


@once
def _has_epochs(program: Program) -> bool:
    names = (one.id for one in ast.walk(program.tree) if isinstance(one, ast.Name))
    return any("epoch" in name for name in names)


_STARTS = [
    "torch.cuda.current_device",
    "torch.cuda.get_device_name",
    "torch.cuda.get_device_properties",
    "torch.cuda.set_device",
    "torch.cuda.synchronize",
    "torch.cuda.empty_cache",
    "torch.cuda.mem_get_info",
    "torch.cuda.memory_allocated",
    "torch.cuda.init",
    "torch.cuda.Stream",
    "torch.cuda.Event",
]


def _visible_devices(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """os.environ['CUDA_VISIBLE_DEVICES'] = ... behind a statement of the same list that starts CUDA."""
    for body in [program.tree.body]:
        started: Optional[ast.AST] = None
        for statement in body:
            if started is not None and _sets_variable(program, statement, "CUDA_VISIBLE_DEVICES"):
                yield finding(program, rule, statement)
            if not isinstance(
                statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.If)
            ):
                started = started or _cuda_call(program, statement)


def _sets_variable(program: Program, statement: ast.stmt, name: str) -> bool:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0]
    if not isinstance(target, ast.Subscript) or program.dotted(target.value) != "os.environ":
        return False
    inner = target.slice
    return (
        constant(getattr(inner, "value", inner) if type(inner).__name__ == "Index" else inner)
        == name
    )


def _cuda_call(program: Program, statement: ast.stmt) -> Optional[ast.AST]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            is_method = isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
            if program.dotted(node.func) in _STARTS or (is_method and not node.args):
                return node
    return None


def _environment(name: str) -> Check:
    def check(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
        for attribute in program.attributes.get("environ", ()):
            subscript = program.parents.get(attribute)
            statement = program.parents.get(subscript) if subscript is not None else None
            if isinstance(statement, ast.Assign) and _sets_variable(program, statement, name):
                yield finding(program, rule, statement)

    return check


def _benchmark(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """cudnn.benchmark = True and cudnn.deterministic = True in one list of statements."""
    assert isinstance(node, ast.Attribute)
    statement = program.parents.get(node)
    if not isinstance(statement, ast.Assign) or constant(statement.value) is not True:
        return
    if program.dotted(node) != "torch.backends.cudnn.benchmark":
        return
    if program.parents.get(statement) in _around_deterministic(program):
        fix = Fix((edits.replace(program, statement.value, "False"),), is_safe=False)
        yield finding(program, rule, statement, fix)


@once
def _around_deterministic(program: Program) -> set[Optional[ast.AST]]:
    """In what cudnn.deterministic = True stands."""
    found = set()
    for one in program.attributes.get("deterministic", ()):
        assign = program.parents.get(one)
        is_set = isinstance(assign, ast.Assign) and constant(assign.value) is True
        if is_set and program.dotted(one) == "torch.backends.cudnn.deterministic":
            found.add(program.parents.get(assign))  # type: ignore[arg-type]
    return found


def _plain_list(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """self.layers = [nn.Linear(...), ...] in a Module, and never handed to a ModuleList."""
    for owner in program.classes:
        if not program.is_module(owner):
            continue
        for method in owner.body:
            if isinstance(method, _FUNCTIONS) and method.name == "__init__":
                yield from _lists_in(program, rule, owner, method)


def _lists_in(
    program: Program,
    rule: Rule,
    owner: ast.ClassDef,
    method: Union[ast.FunctionDef, ast.AsyncFunctionDef],
) -> Iterator[Finding]:
    for statement in method.body:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        target = statement.targets[0]
        if not isinstance(target, ast.Attribute) or getattr(target.value, "id", "") != "self":
            continue
        is_empty = isinstance(statement.value, ast.List) and not statement.value.elts
        if not is_empty and not _is_list_of_layers(program, statement.value):
            continue
        if _stays_plain(program, owner, target, is_empty=is_empty):
            yield finding(program, rule, statement.value, _as_modules(program, statement))


def _stays_plain(
    program: Program, owner: ast.ClassDef, target: ast.Attribute, *, is_empty: bool
) -> bool:
    """Whether the layers are only read; of an empty list: and only layers are appended."""
    if "add_module" in program.attributes or "register_module" in program.attributes:
        return False
    has_layers = not is_empty
    for one in program.attributes_by_class(target.attr).get(owner, ()):
        if one is target or _is_only_read(program, one):
            continue
        added = _appended(program, one)
        if added is None or not _makes_layer(program, added):
            return False
        has_layers = True
    return has_layers


def _as_modules(program: Program, statement: ast.Assign) -> Optional[Fix]:
    is_dict = isinstance(statement.value, (ast.Dict, ast.DictComp))
    for key in statement.value.keys if isinstance(statement.value, ast.Dict) else ():
        if not isinstance(constant(key), str):
            return None  # a ModuleDict takes nothing else
    name = "torch.nn.ModuleDict" if is_dict else "torch.nn.ModuleList"
    found = edits.name_for(program, name, statement)
    if found is None:
        return None
    start = program.source.start_of(statement.value)
    end = program.source.end_of(statement.value)
    return Fix((Edit(start, start, f"{found[0]}("), Edit(end, end, ")"), *found[1]), is_safe=False)


def _is_list_of_layers(program: Program, node: ast.expr) -> bool:
    parts = (
        [node.elt]
        if isinstance(node, ast.ListComp)
        else [node.value]
        if isinstance(node, ast.DictComp)
        else node.elts
        if isinstance(node, ast.List)
        else node.values
        if isinstance(node, ast.Dict)
        else []
    )
    return bool(parts) and all(_makes_layer(program, part) for part in parts)


def _makes_layer(program: Program, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _is_layer(program.dotted(node.func))


def _appended(program: Program, node: ast.Attribute) -> Optional[ast.expr]:
    """What `self.layers.append(...)` appends."""
    method = program.parents.get(node)
    is_append = isinstance(method, ast.Attribute) and method.attr == "append"
    call = program.is_called(method) if is_append and method is not None else None
    return call.args[0] if call is not None and len(call.args) == 1 else None


_WITH_WEIGHTS = (
    "Linear",
    "Bilinear",
    "Embedding",
    "Conv",
    "BatchNorm",
    "LayerNorm",
    "GroupNorm",
    "LSTM",
    "GRU",
    "RNN",
)


def _is_layer(dotted: str) -> bool:
    name = dotted.rpartition(".")[2]
    return (
        dotted.startswith("torch.nn.") and dotted.count(".") == 2 and name.startswith(_WITH_WEIGHTS)
    )


def _is_only_read(program: Program, node: ast.Attribute) -> bool:
    """Whether it is iterated over or indexed; anything else may register the layers."""
    parent = program.parents.get(node)
    if isinstance(parent, (ast.For, ast.comprehension)):
        return parent.iter is node
    if isinstance(parent, ast.Subscript):
        return parent.value is node and isinstance(parent.ctx, ast.Load)
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("items", "values", "keys") and program.is_called(parent) is not None
    return isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in (
        "enumerate",
        "zip",
        "len",
        "reversed",
    )


def _dropout(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """F.dropout(x) in a Module without training=, which is always on."""
    assert isinstance(node, ast.Call)
    if edits.has_argument(node, 2, "training"):
        return
    owner = program.class_of(node)
    function = program.function_of(node)
    if owner is None or not program.is_module(owner) or getattr(function, "name", "") != "forward":
        return
    for parent in program.parents_of(node):
        if isinstance(parent, (ast.If, ast.IfExp)) and "training" in program.source.text_of(
            parent.test
        ):
            return
    if re.search(r"#.*(always|dropout|inference|eval)", program.source.line(node.lineno), re.I):
        return  # somebody has thought of it
    edit = edits.append_argument(program, node, "training=self.training")
    yield finding(program, rule, node.func, None if edit is None else Fix((edit,), is_safe=False))


def _kl_div(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    if any(
        edits.keyword(node, name) for name in ("reduction", "size_average", "reduce")
    ) or edits.is_open(node):
        return
    if len(node.args) <= 2:
        yield finding(program, rule, node.func)


def _require_grad(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """x.require_grad = False sets a new attribute, and nothing else."""
    assert isinstance(node, ast.Attribute)
    if not isinstance(node.ctx, ast.Store):
        return
    end = program.source.end_of(node)
    yield finding(
        program, rule, node, Fix((Edit(end - len("require_grad"), end, "requires_grad"),))
    )


def _no_init(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """A Module whose __init__ makes layers and does not call that of Module."""
    for owner in program.classes:
        if not program.is_module(owner) or len(owner.bases) != 1:
            continue
        for method in owner.body:
            if not isinstance(method, ast.FunctionDef) or method.name != "__init__":
                continue
            text = program.source.text_of(method)
            makes = [
                one
                for one in method.body
                if isinstance(one, ast.Assign)
                and isinstance(one.value, ast.Call)
                and _is_layer(program.dotted(one.value.func))
                and isinstance(one.targets[0], ast.Attribute)
            ]
            if makes and text.count("__init__") == 1 and "super" not in text:
                yield finding(program, rule, makes[0])


def _not_called(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """`optimizer.step` as a statement, without parentheses."""
    assert isinstance(node, ast.Attribute)
    statement = program.parents.get(node)
    if isinstance(statement, ast.Expr) and not isinstance(node.value, ast.Constant):
        end = program.source.end_of(node)
        yield finding(program, rule, node, Fix((Edit(end, end, "()"),), is_safe=False))


def _many_devices(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """.cuda('cuda:0,1')."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    text = constant(call.args[0]) if call is not None and call.args else None
    if (
        isinstance(text, str)
        and "," in text
        and text.replace("cuda:", "").replace(",", "").strip().isdigit()
    ):
        yield finding(program, rule, node)


def _set_devices(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    yield from (
        _many_devices(program, rule, node.func) if isinstance(node.func, ast.Attribute) else ()
    )


def _is_one(node: ast.expr) -> bool:
    value = constant(node)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 1


def _log1p(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    inner = node.args[0] if len(node.args) == 1 and not node.keywords else None
    is_sum = isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Add)
    if is_sum and (_is_one(inner.left) or _is_one(inner.right)):  # type: ignore[union-attr]
        yield finding(program, rule, node)


def _expm1(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    parent = program.parents.get(node)
    is_difference = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Sub)
    if is_difference and parent.left is node and _is_one(parent.right):  # type: ignore[union-attr]
        yield finding(program, rule, parent or node)


def _logsumexp(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.log(torch.sum(torch.exp(x), ...)), which overflows."""
    assert isinstance(node, ast.Call)
    inner = node.args[0] if len(node.args) == 1 else None
    if not isinstance(inner, ast.Call):
        return
    is_method = isinstance(inner.func, ast.Attribute) and inner.func.attr == "sum"
    if program.dotted(inner.func) == "torch.sum":
        summed: Optional[ast.expr] = inner.args[0] if inner.args else None
    else:
        summed = inner.func.value if is_method else None  # type: ignore[attr-defined]
    is_exp = isinstance(summed, ast.Call) and program.dotted(summed.func) == "torch.exp"
    # exp(x - m), of m the maximum, does not overflow.
    if is_exp and not isinstance(edits.argument(summed, 0, "input"), ast.BinOp):  # type: ignore[arg-type]
        yield finding(program, rule, node)


def _accumulated(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """`total += loss` of a loss that backward() is called on keeps every graph."""
    for loop in ast.walk(program.tree):
        made = loops_of(program, "backward").get(loop, ())
        losses = {one.value.id for one in made if isinstance(one.value, ast.Name)}
        for statement in ast.walk(loop) if losses else ():
            if _keeps_one_of(statement, losses) and program.loop_of(statement) is loop:
                yield finding(program, rule, statement)


def _keeps_one_of(statement: ast.AST, losses: "set[str]") -> bool:
    """`total += loss`, or `losses.append(loss)`."""
    if isinstance(statement, ast.AugAssign):
        value: ast.expr = statement.value
        target = getattr(statement.target, "id", None)
        is_kept = target is not None and target not in losses
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        is_kept = getattr(call.func, "attr", "") == "append" and len(call.args) == 1
        value = call.args[0] if is_kept else call
    else:
        return False
    return is_kept and isinstance(value, ast.Name) and value.id in losses


def _undivided(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """backward() in each turn, step() in every n-th, and the loss divided by nothing."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    test = program.parents.get(program.parents.get(call, call)) if call is not None else None
    if call is None or not isinstance(test, ast.If):
        return
    made = program.made_by(node.value)
    name = getattr(node.value, "attr", getattr(node.value, "id", ""))
    is_called_so = not made and (name.startswith("optim") or name == "opt")
    if not is_called_so and not (
        made and all(one.startswith("torch.optim.") and "lr_scheduler" not in one for one in made)
    ):
        return
    has_modulo = any(isinstance(one, ast.Mod) for one in ast.walk(test.test))
    loop = program.loop_of(call)
    whole = _whole_loss(program, loop) if has_modulo and loop is not None else None
    if whole is not None:
        yield finding(program, rule, whole)


@once
def _whole_loss(program: Program, loop: ast.AST) -> Optional[ast.Call]:
    """The first backward() of a loop that divides nothing."""
    text = program.source.text_of(loop)
    if "/" in text or "reduction='sum'" in text or "scaler" in text:
        return None
    calls = (program.is_called(one) for one in loops_of(program, "backward").get(loop, ()))
    return next((one for one in calls if one is not None), None)


def _scheduler_first(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """scheduler.step() in a loop of epochs before the optimizer's of the same list of statements."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    statement = program.parents.get(call) if call is not None else None
    loop = program.parents.get(statement) if statement is not None else None
    made = program.made_by(node.value)
    is_scheduler = bool(made) and all(name.startswith("torch.optim.lr_scheduler.") for name in made)
    if not is_scheduler or statement is None or not isinstance(loop, (ast.For, ast.While)):
        return
    body, index = program.index_of(statement)
    steps = _steps_of(program, loop) if body is loop.body else []
    if steps and index < steps[-1] and not steps[0] < index:
        yield finding(program, rule, call or node)


@once
def _steps_of(program: Program, loop: Union[ast.For, ast.While]) -> list[int]:
    """Which statements of a loop step an optimizer."""
    around = _around_steps(program)
    return [index for index, statement in enumerate(loop.body) if statement in around]


@once
def _around_steps(program: Program) -> set[ast.AST]:
    """All that stands around the steps of optimizers."""
    found: set[ast.AST] = set()
    for node in program.attributes.get("step", ()):
        made = program.made_by(node.value)
        if made and all(
            one.startswith("torch.optim.") and "lr_scheduler" not in one for one in made
        ):
            found.update(program.parents_of(node))
    return found


def _anomaly(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    is_statement = isinstance(program.parents.get(node), ast.Expr)
    if is_statement and node.args and constant(node.args[0]) is True:
        yield finding(program, rule, node)


_MADE = tuple(
    f"torch.{name}" for name in ["zeros", "ones", "empty", "full", "eye", "arange", "linspace"]
)


def _then_moved(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.zeros(3).cuda() is made on the CPU first."""
    assert isinstance(node, ast.Call)
    attribute = program.parents.get(node)
    if not isinstance(attribute, ast.Attribute) or attribute.attr not in ("cuda", "to"):
        return
    call = program.is_called(attribute)
    if (
        call is None
        or edits.is_open(node)
        or any(one.arg not in ("dtype", "step") for one in node.keywords)
    ):
        return
    text = ""
    if attribute.attr == "cuda" and not call.args and not call.keywords:
        text = "'cuda'"
    elif attribute.attr == "to" and len(call.args) == 1 and not call.keywords:
        value = call.args[0]
        name = program.source.text_of(value)
        is_device = isinstance(constant(value), str) or name.rpartition(".")[2] in ("device", "dev")
        text = name if is_device and "\n" not in name else ""
    if not text:
        return
    added = edits.append_argument(program, node, f"device={text}")
    end = program.source.end_of(node)
    fix = None
    if added is not None and not edits.is_in_fstring(program, node):
        fix = Fix(
            (added, Edit(end, program.source.end_of(call), "")), is_safe=attribute.attr == "cuda"
        )
    yield finding(program, rule, call, fix)


def _text_version(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.__version__.split(...) compared as text, or float(torch.__version__[:3])."""
    assert isinstance(node, ast.Attribute)
    if program.dotted(node) != "torch.__version__":
        return
    subscript = program.parents.get(node)
    call = program.parents.get(subscript) if isinstance(subscript, ast.Subscript) else None
    is_float = isinstance(call, ast.Call) and getattr(call.func, "id", "") == "float"
    if is_float and isinstance(subscript, ast.Subscript) and isinstance(subscript.slice, ast.Slice):
        yield finding(program, rule, call or node)


def _local_rank(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """add_argument('--local_rank'): torch.distributed.launch passes --local-rank."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    names = [constant(one) for one in call.args] if call is not None else []
    if call is None or "--local_rank" not in names or "--local-rank" in names:
        return
    if not program.says(b"torch.distributed"):
        return
    end = program.source.end_of(call.args[-1])
    fix = None if edits.is_in_fstring(program, call) else Fix((Edit(end, end, ", '--local-rank'"),))
    yield finding(program, rule, call.args[0], fix)


_NN = "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
_SUPER = "        super().__init__()\n"
_LAYERS = (
    f"{_NN}{_SUPER}        self.layers = %s\n\n    def forward(self, x):\n        for layer in self.layers:\n"
    "            x = layer(x)\n        return x\n\n\nout = len(list(Net().parameters()))\n"
)
_LOOP = """import torch

net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
{before}for step in range(4):
{body}"""
_CLIP = """import torch

net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
scaler = torch.amp.GradScaler('cpu')
scaler.scale(net(torch.ones(2)).sum()).backward()
{unscale}torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
scaler.step(optimizer)
out = None
"""
_DROP = """import torch
import torch.nn.functional as F


class Net(torch.nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.9{more})


out = bool((Net().eval()(torch.ones(100)) == 0).any())
"""

RULES: list[Rule] = [
    Rule(
        "FLB403", "replace-module-prefix",
        "`replace('module.', '')` also changes inner names: `removeprefix`, or"
        " `torch.nn.modules.utils.consume_prefix_in_state_dict_if_present`",
        "`replace('module.', '')` 也会改动中间的名字：用 `removeprefix`，或"
        " `torch.nn.modules.utils.consume_prefix_in_state_dict_if_present`",
        "import torch\n\nstate = {'module.sub_module.weight': torch.ones(1)}\n"
        "out = [key.replace('module.', '') for key in state]\n",
        "import torch\n\nstate = {'module.sub_module.weight': torch.ones(1)}\n"
        "out = [key.removeprefix('module.') for key in state]\n",
        "'module.sub_module.weight' becomes 'sub_weight', which no model has.",
        fix="unsafe", attributes=("replace",), check=_module_prefix,
    ),
    Rule(
        "FLB405", "clip-of-scaled-gradients",
        "gradients are clipped while they are scaled: call `scaler.unscale_(optimizer)` before",
        "梯度在仍被放大时就被裁剪：先调用 `scaler.unscale_(optimizer)`",
        _CLIP.format(unscale=""), _CLIP.format(unscale="scaler.unscale_(optimizer)\n"),
        "With a scale of 65,536 a norm of 1 becomes one of 0.00002: the model hardly learns, and nothing says so.",
        calls=_CLIPS, check=_clip_scaled,
    ),
    Rule(
        "FLB406", "no-set-epoch",
        "a DistributedSampler without `set_epoch(epoch)` gives the same order in each epoch",
        "DistributedSampler 不调用 `set_epoch(epoch)` 时每个 epoch 的顺序都相同",
        "from torch.utils.data import DistributedSampler\n\nsampler = DistributedSampler([1, 2, 3], 1, 0)\nout = []\n"
        "for epoch in range(2):\n    out += list(sampler)\n",
        "from torch.utils.data import DistributedSampler\n\nsampler = DistributedSampler([1, 2, 3], 1, 0)\nout = []\n"
        "for epoch in range(2):\n    sampler.set_epoch(epoch)\n    out += list(sampler)\n",
        sure="likely", preview=True,
        calls=("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"),
        check=_set_epoch,
    ),
    Rule(
        "FLB407", "visible-devices-too-late",
        "`CUDA_VISIBLE_DEVICES` is set after CUDA has started, and changes nothing: set it first",
        "`CUDA_VISIBLE_DEVICES` 在 CUDA 启动之后才设置，不起作用：请放在最前面",
        "import os\n\nimport torch\n\ntorch.cuda.set_device(0)\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\n",
        "import os\n\nimport torch\n\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\ntorch.cuda.set_device(0)\n",
        whole=True, check=_visible_devices,
    ),
    Rule(
        "FLB408", "layers-in-a-list",
        "layers in a plain list or dict are no part of the module: not trained, saved or moved; write `nn.ModuleList`",
        "放在普通列表或字典里的层不属于模块：不会被训练、保存或移动；改用 `nn.ModuleList`",
        _LAYERS % "[nn.Linear(2, 2), nn.Linear(2, 2)]",
        _LAYERS % "nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])",
        fix="unsafe", whole=True, check=_plain_list,
    ),
    Rule(
        "FLB409", "dropout-always-on",
        "`F.dropout` without `training=` also drops in evaluation: write `training=self.training`",
        "`F.dropout` 不写 `training=` 时评估中也会丢弃：改为 `training=self.training`",
        _DROP.format(more=""), _DROP.format(more=", training=self.training"),
        fix="unsafe",
        calls=("torch.nn.functional.dropout", "torch.nn.functional.dropout2d", "torch.nn.functional.alpha_dropout"),
        check=_dropout,
    ),
    Rule(
        "FLB410", "kl-div-mean",
        "the default reduction of a KL divergence divides by the number of elements: `reduction='batchmean'` is the"
        " divergence",
        "KL 散度的默认 reduction 除以元素个数：`reduction='batchmean'` 才是散度的定义",
        "import torch\nimport torch.nn.functional as F\n\nout = F.kl_div(torch.zeros(2, 3), torch.ones(2, 3))\n",
        "import torch\nimport torch.nn.functional as F\n\n"
        "out = F.kl_div(torch.zeros(2, 3), torch.ones(2, 3), reduction='batchmean')\n",
        runs="UserWarning", calls=("torch.nn.functional.kl_div",), check=_kl_div,
    ),
    Rule(
        "FLB411", "require-grad",
        "`require_grad` is a new attribute that nobody reads: write `requires_grad`",
        "`require_grad` 只是一个没有人读取的新属性：应为 `requires_grad`",
        "import torch\n\nx = torch.nn.Linear(2, 2).weight\nx.require_grad = False\nout = x.requires_grad\n",
        "import torch\n\nx = torch.nn.Linear(2, 2).weight\nx.requires_grad = False\nout = x.requires_grad\n",
        fix="safe", attributes=("require_grad",), check=_require_grad,
    ),
    Rule(
        "FLB412", "module-without-init",
        "a Module's `__init__` makes layers before `super().__init__()`: AttributeError",
        "Module 的 `__init__` 未先调用 `super().__init__()` 就创建层：AttributeError",
        f"{_NN}        self.layer = nn.Linear(2, 2)\n\n\nout = Net()\n",
        f"{_NN}{_SUPER}        self.layer = nn.Linear(2, 2)\n\n\nout = Net()\n",
        runs="AttributeError", whole=True, check=_no_init,
    ),
    Rule(
        "FLB413", "not-called",
        "the method is named and not called: parentheses are missing",
        "只写了方法名而没有调用：缺少括号",
        "import torch\n\nnet = torch.nn.Linear(2, 2)\nnet.eval\nout = net.training\n",
        "import torch\n\nnet = torch.nn.Linear(2, 2)\nnet.eval()\nout = net.training\n",
        fix="unsafe", attributes=("zero_grad", "backward", "eval", "step", "train"), check=_not_called,
    ),
    Rule(
        "FLB414", "several-devices",
        "a device is one: 'cuda:0,1' raises; CUDA_VISIBLE_DEVICES and DistributedDataParallel use several",
        "设备只能是一个：'cuda:0,1' 会报错；多卡请用 CUDA_VISIBLE_DEVICES 与 DistributedDataParallel",
        "import torch\n\nout = torch.ones(1).cuda('cuda:0,1')\n", "import torch\n\nout = torch.ones(1)\n",
        runs="RuntimeError", attributes=("cuda", "set_device"), check=_many_devices,
    ),
    Rule(
        "FLB415", "log-of-one-plus",
        "`torch.log(1 + x)` loses small x: write `torch.log1p(x)`",
        "`torch.log(1 + x)` 会丢失很小的 x：改用 `torch.log1p(x)`",
        "import torch\n\nout = torch.log(1 + torch.tensor(1e-9))\n", "import torch\n\nout = torch.log1p(torch.tensor(1e-9))\n",
        calls=("torch.log",), preview=True, check=_log1p,
    ),
    Rule(
        "FLB416", "exp-minus-one",
        "`torch.exp(x) - 1` loses small x: write `torch.expm1(x)`",
        "`torch.exp(x) - 1` 会丢失很小的 x：改用 `torch.expm1(x)`",
        "import torch\n\nout = torch.exp(torch.tensor(1e-9)) - 1\n", "import torch\n\nout = torch.expm1(torch.tensor(1e-9))\n",
        calls=("torch.exp",), preview=True, check=_expm1,
    ),
    Rule(
        "FLB417", "log-sum-exp",
        "the logarithm of a sum of exponentials overflows: write `torch.logsumexp(x, dim)`",
        "指数之和的对数会溢出：改用 `torch.logsumexp(x, dim)`",
        "import torch\n\nout = torch.log(torch.sum(torch.exp(torch.tensor([999.0])), dim=0))\n",
        "import torch\n\nout = torch.logsumexp(torch.tensor([999.0]), dim=0)\n",
        calls=("torch.log",), check=_logsumexp,
    ),
    Rule(
        "FLB418", "sum-of-losses-keeps-graphs",
        "`total += loss` and `losses.append(loss)` keep the graph of every step: `loss.item()` or `loss.detach()`",
        "`total += loss` 与 `losses.append(loss)` 会保留每一步的计算图：改用 `loss.item()` 或 `loss.detach()`",
        _LOOP.format(before="total = 0\n", body="    loss = net(torch.ones(2)).sum()\n    loss.backward()\n    total += loss\n"),
        _LOOP.format(before="total = 0\n", body="    loss = net(torch.ones(2)).sum()\n    loss.backward()\n    total += loss.item()\n"),
        sure="likely", preview=True, whole=True, check=_accumulated,
    ),
    Rule(
        "FLB419", "accumulation-without-division",
        "gradients of several steps are added and the loss is not divided by their number",
        "累加了多步的梯度，而损失没有除以步数",
        _LOOP.format(before="", body="    net(torch.ones(2)).sum().backward()\n    if step % 2 == 1:\n        optimizer.step()\n"),
        _LOOP.format(before="", body="    (net(torch.ones(2)).sum() / 2).backward()\n    if step % 2 == 1:\n        optimizer.step()\n"),
        "The gradient is that of a loss as many times larger, so that the same learning rate is too.",
        sure="likely", preview=True, attributes=("step",), check=_undivided,
    ),
    Rule(
        "FLB420", "scheduler-before-optimizer",
        "`scheduler.step()` comes before `optimizer.step()`: the first learning rate is never used",
        "`scheduler.step()` 在 `optimizer.step()` 之前：第一个学习率不会被用到",
        _LOOP.format(before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)\n",
                     body="    scheduler.step()\n    optimizer.step()\n"),
        _LOOP.format(before="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)\n",
                     body="    optimizer.step()\n    scheduler.step()\n"),
        deprecated="1.1", sure="likely", runs="UserWarning", attributes=("step",), check=_scheduler_first,
    ),
    Rule(
        "FLB421", "hash-seed-too-late",
        "`PYTHONHASHSEED` set by the program changes nothing in it: Python reads it when it starts",
        "程序自己设置 `PYTHONHASHSEED` 对本进程无效：Python 只在启动时读取",
        "import os\n\nimport torch\n\nos.environ['PYTHONHASHSEED'] = '0'\ntorch.manual_seed(0)\n",
        "import torch\n\ntorch.manual_seed(0)\n",
        "Processes that it starts anew do read it.", preview=True, whole=True,
        check=_environment("PYTHONHASHSEED"),
    ),
    Rule(
        "FLB422", "version-as-float",
        "`float(torch.__version__[:3])` takes 2.10 for 2.1: compare `torch.__version__ >= (2, 10)`",
        "`float(torch.__version__[:3])` 会把 2.10 当成 2.1：改为比较 `torch.__version__ >= (2, 10)`",
        "import torch\n\nout = float(torch.__version__[:3]) >= 2.2\n", "import torch\n\nout = torch.__version__ >= (2, 2)\n",
        attributes=("__version__",), check=_text_version,
    ),
    Rule(
        "FLB423", "local-rank-flag",
        "`torch.distributed.launch` passes `--local-rank` since torch 2.0: a script that takes `--local_rank` alone"
        " ends with 'unrecognized arguments'",
        "`torch.distributed.launch` 自 torch 2.0 起传入 `--local-rank`：只接受 `--local_rank` 的脚本会因“无法识别的参数”而结束",
        "import argparse\n\nimport torch.distributed\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int)\nout = parser.parse_known_args(['--local-rank', '1'])[0].local_rank\n",
        "import argparse\n\nimport torch.distributed\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', '--local-rank', type=int)\n"
        "out = parser.parse_known_args(['--local-rank', '1'])[0].local_rank\n",
        "torchrun passes no flag: it sets LOCAL_RANK.",
        deprecated="2.0", fix="safe", attributes=("add_argument",), check=_local_rank,
    ),
    Rule(
        "FLB601", "benchmark-with-deterministic",
        "`cudnn.benchmark` looks for the fastest algorithm, which `cudnn.deterministic` does not allow: choose one",
        "`cudnn.benchmark` 会寻找最快的算法，而 `cudnn.deterministic` 不允许：请二选一",
        "import torch\n\ntorch.backends.cudnn.benchmark = True\ntorch.backends.cudnn.deterministic = True\n",
        "import torch\n\ntorch.backends.cudnn.benchmark = False\ntorch.backends.cudnn.deterministic = True\n",
        fix="unsafe", attributes=("benchmark",), check=_benchmark,
    ),
    Rule(
        "FLB602", "anomaly-left-on",
        "`set_detect_anomaly(True)` for the whole program makes each step slower: write"
        " `with torch.autograd.detect_anomaly():` around what is looked for",
        "对整个程序开启 `set_detect_anomaly(True)` 会使每一步变慢：只在要找的地方用 `with torch.autograd.detect_anomaly():`",
        "import torch\n\ntorch.autograd.set_detect_anomaly(True)\ntorch.autograd.set_detect_anomaly(False)\n",
        "import torch\n\ntorch.autograd.set_detect_anomaly(False)\n",
        calls=("torch.autograd.set_detect_anomaly",), check=_anomaly,
    ),
    Rule(
        "FLB603", "made-then-moved",
        "the tensor is made on the CPU and copied: give `device=` where it is made",
        "张量先在 CPU 上创建再复制：创建时就写 `device=`",
        "import torch\n\nout = torch.zeros(2).to('cpu')\n", "import torch\n\nout = torch.zeros(2, device='cpu')\n",
        fix="unsafe", calls=_MADE, check=_then_moved,
    ),
    Rule(
        "FLB604", "launch-blocking",
        "`CUDA_LAUNCH_BLOCKING` makes each operation on the GPU wait: for debugging only",
        "`CUDA_LAUNCH_BLOCKING` 会让 GPU 上的每个操作都等待：只用于调试",
        "import os\n\nimport torch\n\nos.environ['CUDA_LAUNCH_BLOCKING'] = '1'\ntorch.manual_seed(0)\n",
        "import torch\n\ntorch.manual_seed(0)\n",
        whole=True, check=_environment("CUDA_LAUNCH_BLOCKING"),
    ),
]  # fmt: skip
"""One rule per mistake."""
