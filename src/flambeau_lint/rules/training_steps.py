"""The order of a training step, and modules, files and loaders that are used wrongly."""

import ast
import re
from collections.abc import Iterator
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Function, Program
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Edit, Finding, Fix, Rule
from flambeau_lint.rules.argument_rows import constant, row

LOOPS = (ast.For, ast.While, ast.AsyncFor)
CLIPS = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_")
_METHODS = ("detach", "cpu", "cuda", "clone", "contiguous", "item", "float", "long")
_NEXT = {*_METHODS, "numpy", "data", "view", "reshape", "to", "mean", "sum", "tolist", "squeeze"}
_ARRAYS = {"array", "asarray", "stack", "concatenate", "zeros", "ones", "load", "ascontiguousarray"}
_WEIGHTED = (
    *("Linear", "Bilinear", "Conv1d", "Conv2d", "Conv3d", "LSTM", "GRU", "RNN", "Embedding"),
    *("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "MultiheadAttention"),
    *("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
)


def statement_of(program: Program, node: ast.AST) -> Optional[ast.stmt]:
    """The statement that is this call and nothing else."""
    parent = program.parents.get(node)
    return parent if isinstance(parent, ast.Expr) else None


def siblings(program: Program, statement: ast.stmt) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The statements of the same list before and behind one."""
    parent = program.parents.get(statement)
    for name in ("body", "orelse", "finalbody"):
        part = getattr(parent, name, None)
        if isinstance(part, list) and statement in part:
            index = part.index(statement)
            return part[:index], part[index + 1 :]
    return [], []


def method_called(statement: ast.stmt, name: str) -> Optional[ast.Attribute]:
    """The method of this name that a statement calls, in whatever object."""
    for node in ast.walk(statement):
        method = node.func if isinstance(node, ast.Call) else None
        if isinstance(method, ast.Attribute) and method.attr == name:
            return method
    return None


def _zeroed_before_step(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """loss.backward(), opt.zero_grad(), opt.step(): nothing is left to step by."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    statement = statement_of(program, call) if call is not None else None
    if statement is None:
        return
    before, after = siblings(program, statement)
    is_made = any(method_called(one, "backward") for one in before[-3:])
    owner = program.source.text_of(node.value)
    for one in after:
        step = method_called(one, "step")
        if step is not None and isinstance(one, ast.Expr) and one.value is program.is_called(step):
            is_same = program.source.text_of(step.value) == owner and not one.value.args
            if is_same and is_made:
                yield finding(program, rule, statement)
            return
        if any(isinstance(part, ast.Call) for part in ast.walk(one)):
            return  # it may make gradients


def _clipped_before_backward(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """zero_grad(), clip_grad_norm_(...), loss.backward(): the clip sees no gradients."""
    statement = statement_of(program, node)
    if statement is None:
        return
    before, after = siblings(program, statement)
    zeroed = [index for index, one in enumerate(before) if method_called(one, "zero_grad")]
    if not zeroed or any(method_called(one, "backward") for one in before[zeroed[-1] :]):
        return
    for one in after:
        if method_called(one, "step"):
            return
        if method_called(one, "backward"):
            yield finding(program, rule, statement)
            return


def _stays_in_eval(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """net.train() once before the epochs, and net.eval() in each of them."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    loop = next((one for one in program.parents_of(node) if isinstance(one, LOOPS)), None)
    if call is None or loop is None or not isinstance(node.value, (ast.Name, ast.Attribute)):
        return
    owner = program.source.text_of(node.value)
    block = program.function_of(node)
    before = False
    for switch in program.attributes.get("train", ()):
        if any(parent is loop for parent in program.parents_of(switch)):
            return
        is_same = program.source.text_of(switch.value) == owner
        if is_same and program.function_of(switch) is block:
            before = before or switch.lineno < loop.lineno
    inside = list(ast.walk(loop))
    is_trained = any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in inside)
    for one in inside:
        given = (
            [*one.args, *(key.value for key in one.keywords)] if isinstance(one, ast.Call) else []
        )
        if any(program.source.text_of(value) == owner for value in given):
            return  # a function that may switch it back
    if before and is_trained and not program.source.text_of(loop).count("mode("):
        yield finding(program, rule, call)


def _no_zero_grad(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """backward() and step() in a loop, and gradients that nobody ever clears."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    if call is None or call.args or call.keywords or "zero_grad" in program.attributes:
        return
    made = program.made_by(node.value)
    is_optimizer = bool(made) and all(
        one.startswith("torch.optim.") and one.count(".") == 2 and not one.endswith("LBFGS")
        for one in made
    )
    if not is_optimizer or "grad" in program.attributes:
        return
    loop = next((one for one in program.parents_of(node) if isinstance(one, LOOPS)), None)
    if loop is None or not any(method_called(one, "backward") for one in loop.body):
        return
    makers = program.values_of(node.value)
    if not any(parent is loop for one in makers for parent in program.parents_of(one)):
        yield finding(program, rule, call)  # else each turn may have a model of its own


def _never_eval(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """A function of validation in a file without any eval()."""
    parent = program.parents.get(node)
    function = program.function_of(node)
    name = getattr(function, "name", "")
    if not isinstance(parent, (ast.withitem, *Function)):
        return
    if not re.match(r"_?(val|eval|test|infer|predict)", name):
        return
    if "eval" in program.attributes or "train" in program.attributes or "unittest" in name:
        return
    if function is not None and any(
        isinstance(one, (ast.For, ast.comprehension)) for one in ast.walk(function)
    ):
        yield finding(program, rule, node)


def _seven_letters(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """k[7:] of the keys of a state."""
    if b"[7:]" not in program.source.data:
        return
    for one in ast.walk(program.tree):
        if not isinstance(one, ast.Subscript) or not isinstance(one.slice, ast.Slice):
            continue
        part = one.slice
        if (
            constant(part.lower) != 7
            or part.upper
            or part.step
            or not isinstance(one.value, ast.Name)
        ):
            continue
        place = _loop_of_keys(program, one, one.value.id)
        if place is None or re.search(r"startswith|module|prefix", program.source.text_of(place)):
            continue
        tests = [p.test for p in program.parents_of(one) if isinstance(p, (ast.If, ast.IfExp))]
        if any(re.search("module|prefix", program.source.text_of(test)) for test in tests):
            continue
        start = program.source.end_of(one.value)
        edit = Edit(start, program.source.end_of(one), ".removeprefix('module.')")
        is_text = edits.is_in_fstring(program, one)
        yield finding(program, rule, one, None if is_text else Fix((edit,), is_safe=False))


def _loop_of_keys(program: Program, node: ast.AST, name: str) -> Optional[ast.AST]:
    """The loop over the items or keys of a mapping that gives a name."""
    for parent in program.parents_of(node):
        loops = getattr(parent, "generators", [parent])
        for loop in loops:
            if not isinstance(loop, (ast.For, ast.comprehension)):
                continue
            target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
            is_name = isinstance(target, ast.Name) and target.id == name
            text = program.source.text_of(loop.iter)
            if is_name and re.search(r"(items|keys)\(\)|state|dict|ckpt|checkpoint|weights", text):
                return parent
    return None


def _made_in_forward(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """nn.Linear(...) in forward()."""
    assert isinstance(node, ast.Call)
    owner = program.class_of(node)
    method = program.function_of(node)
    if owner is None or not program.is_module(owner) or getattr(method, "name", "") != "forward":
        return
    if any(edits.keyword(node, name) for name in ("affine", "elementwise_affine", "_weight")):
        return
    for parent in program.parents_of(node):
        if parent is method:
            break
        if isinstance(parent, (ast.If, ast.IfExp, ast.Try)):
            return  # made once
        targets = parent.targets if isinstance(parent, ast.Assign) else []
        if any(not isinstance(one, ast.Name) for one in targets):
            return  # kept, or handed on
    yield finding(program, rule, node.func)


def _bare_context(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """with torch.no_grad:"""
    parent = program.parents.get(node)
    if isinstance(parent, ast.withitem) and parent.context_expr is node:
        end = program.source.end_of(node)
        yield finding(program, rule, node, Fix((Edit(end, end, "()"),)))


def _chain_not_called(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """x.detach.clone()."""
    assert isinstance(node, ast.Attribute)
    parent = program.parents.get(node)
    if isinstance(parent, ast.Attribute) and parent.attr in _NEXT and not program.dotted(node):
        end = program.source.end_of(node)
        fix = None if edits.is_in_fstring(program, node) else Fix((Edit(end, end, "()"),))
        yield finding(program, rule, node, fix)


def _shuffled_sampler(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    shuffle = edits.keyword(node, "shuffle")
    sampler = edits.keyword(node, "sampler") or edits.keyword(node, "batch_sampler")
    is_on = shuffle is not None and constant(shuffle.value) is True
    if is_on and sampler is not None and program.made_by(sampler.value):
        values = program.values_of(sampler.value)
        if all(isinstance(one, ast.Call) for one in values):
            yield finding(program, rule, shuffle or node)


def _whole_model(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.save(net, path) of a Module."""
    assert isinstance(node, ast.Call)
    first = edits.argument(node, 0, "obj")
    if not isinstance(first, (ast.Name, ast.Attribute)):
        return
    values = program.values_of(first)
    here = program.function_of(node)
    before = [
        one for one in values if one.lineno < node.lineno and program.function_of(one) is here
    ]
    if values and all(_is_model(program, one) for one in before or values):
        end = program.source.end_of(first)
        yield finding(program, rule, first, Fix((Edit(end, end, ".state_dict()"),), is_safe=False))


def _is_model(program: Program, node: ast.expr) -> bool:
    """Whether it makes a module: of torch, of torchvision, or of a class of the file."""
    while isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("to", "cuda", "cpu"):
        node = node.func.value  # type: ignore[attr-defined]
    if not isinstance(node, ast.Call):
        return False
    dotted = program.dotted(node.func)
    if dotted.startswith("torchvision.models."):
        return True
    name = dotted.rpartition(".")[2]
    if dotted.startswith("torch.nn.") and dotted.count(".") == 2:
        return name[:1].isupper() and name not in ("Parameter", "Buffer")
    found = program.bindings(node.func.id, node) if isinstance(node.func, ast.Name) else []
    return len(found) == 1 and isinstance(found[0], ast.ClassDef) and program.is_module(found[0])


def _cache_in_loop(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.cuda.empty_cache() in each step of the training."""
    statement = statement_of(program, node)
    loop = program.parents.get(statement) if statement is not None else None
    if not isinstance(loop, LOOPS) or statement not in loop.body:
        return
    for other in program.attributes.get("backward", ()):
        inner = next((one for one in program.parents_of(other) if isinstance(one, LOOPS)), None)
        if inner is loop:
            yield finding(program, rule, node)
            return


def _list_of_arrays(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.tensor([np.array(x) for x in xs])."""
    assert isinstance(node, ast.Call)
    first = node.args[0] if node.args else None
    values = program.values_of(first) if isinstance(first, ast.Name) else [first]
    made = values[0] if len(values) == 1 else None
    parts = [made.elt] if isinstance(made, ast.ListComp) else getattr(made, "elts", [])
    funcs = [one.func if isinstance(one, ast.Call) else None for one in parts]
    names = [program.dotted(one) if one is not None else "" for one in funcs]
    is_all = bool(names) and all(
        one.startswith("numpy.") and one.partition(".")[2] in _ARRAYS for one in names
    )
    if first is None or not is_all or (len(names) == 1 and not isinstance(made, ast.ListComp)):
        return
    owner = getattr(funcs[0], "value", None)
    fix = None
    if owner is not None and not edits.is_in_fstring(program, node):
        start = program.source.start_of(first)
        end = program.source.end_of(first)
        text = f"{program.source.text_of(owner)}.stack("
        fix = Fix((Edit(start, start, text), Edit(end, end, ")")))
    yield finding(program, rule, first, fix)


def _forward_called(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """net.forward(x), but not that of super(), of self or of a class."""
    assert isinstance(node, ast.Attribute)
    owner = node.value
    name = getattr(owner, "attr", getattr(owner, "id", ""))
    if not name or name in ("self", "cls", "ctx") or name[:1].isupper() or program.dotted(node):
        return
    call = program.is_called(node)
    if call is None:
        return
    fix = None
    if not edits.is_in_fstring(program, node):
        fix = Fix((Edit(program.source.end_of(owner), program.source.end_of(node), ""),), False)
    yield finding(program, rule, node, fix)


def _graph_kept(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """net.eval() and a loop over net(x), in a file that never says no_grad."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    function = program.function_of(node)
    words = ("no_grad", "inference_mode", "set_grad_enabled", "requires_grad", "requires_grad_")
    is_said = any(word in program.attributes or program.is_bound(word) for word in words)
    if call is None or function is None or is_said or b"volatile=" in program.source.data:
        return
    if not isinstance(node.value, (ast.Name, ast.Attribute)):
        return
    if any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in ast.walk(function)):
        return
    owner = program.source.text_of(node.value)
    for one in ast.walk(function):
        is_use = isinstance(one, ast.Call) and program.source.text_of(one.func) == owner
        if is_use and any(isinstance(parent, LOOPS) for parent in program.parents_of(one)):
            yield finding(program, rule, one)
            return


_PARALLEL = {
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
    "torch.nn.parallel.DistributedDataParallel",
}
_OF_PARALLEL = re.compile(
    r"_.*|module|device(_ids?|_type|_mesh)?|output_device|dim|train|eval|training|T_destination"
    r"|(named_)?(parameters|buffers|modules|children)|(load_)?state_dict|call_super_init|dump_patches"
    r"|cuda|cpu|xpu|ipu|mtia|to(_empty|_kwargs)?|half|float|double|bfloat16|type|zero_grad|requires_grad_"
    r"|apply|forward|no_sync|join(_.*)?|compile|add_module|register_.*|share_memory|extra_repr|get_.*|set_.*"
    r"|reducer|logger|process_group|find_unused_parameters|gather|scatter|replicate|parallel_apply"
    r"|static_graph|.*buckets?.*|batched_grad_copy|(broadcast|forward_sync|modules|named_module)_buffers"
    r"|.*_hook|is_multi_device_module|mixed_precision|parameters_to_ignore|require_.*_sync"
    r"|skip_all_reduce.*|src_device_obj|use_side_stream.*|warn_imbalance|will_sync_module_buffers"
)
"""What the wrappers have themselves."""


def _of_wrapper(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """net.fc of net = nn.DataParallel(...)."""
    if b"DataParallel" not in program.source.data:
        return
    for name, places in program.attributes.items():
        if _OF_PARALLEL.fullmatch(name):
            continue
        for one in places:
            if not isinstance(one.ctx, ast.Load) or not isinstance(one.value, ast.Name):
                continue
            made = program.made_by(one.value)
            if made and made <= _PARALLEL and not _is_set(program, one):
                yield finding(program, rule, one)


def _is_set(program: Program, node: ast.Attribute) -> bool:
    """Whether the program sets such an attribute of a wrapper itself."""
    return any(isinstance(one.ctx, ast.Store) for one in program.attributes[node.attr])


_BOOLEAN = {"bool", "eq", "ne", "gt", "ge", "lt", "le", "isnan", "isinf", "logical_not"}
_ONE_MINUS = re.compile(rb"\b1(?:\.0?)? - ([a-z_]\w*)", re.I)


def _one_minus_mask(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """1 - mask, where mask = x > y.view(1)."""
    for name in sorted(set(_ONE_MINUS.findall(program.source.data))):
        for one in program.loads.get(name.decode(), ()):
            parent = program.parents.get(one)
            if not isinstance(parent, ast.BinOp) or not isinstance(parent.op, ast.Sub):
                continue
            if parent.right is not one or constant(parent.left) != 1:
                continue
            values = program.values_of(one)
            if values and all(_is_mask(program, value) for value in values):
                yield finding(program, rule, parent)


def _is_mask(program: Program, node: ast.expr) -> bool:
    """A tensor of bool: x.bool(), torch.isnan(x), or a comparison with what only a tensor has."""
    if isinstance(node, ast.Call):
        dotted = program.dotted(node.func)
        name = getattr(node.func, "attr", "")
        return name in _BOOLEAN and (dotted.startswith("torch.") or (not dotted and name == "bool"))
    if not isinstance(node, ast.Compare) or isinstance(node.ops[0], (ast.In, ast.NotIn, ast.Is)):
        return False
    for side in (node.left, *node.comparators):
        func = side.func if isinstance(side, ast.Call) else None
        if func is None:
            continue
        is_made = program.dotted(func).startswith("torch.")
        if is_made or getattr(func, "attr", "") in ("unsqueeze", "view", "expand", "detach"):
            return True
    return False


def _printed_inside(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """with profile() as prof: print(prof)."""
    item = program.parents.get(node)
    name = getattr(item.optional_vars, "id", "") if isinstance(item, ast.withitem) else ""
    block = program.parents.get(item) if item is not None and name else None
    for one in program.loads.get(name, ()) if block is not None else ():
        call = program.parents.get(one)
        is_shown = isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("print", "str")
        if is_shown and any(parent is block for parent in program.parents_of(one)):
            yield finding(program, rule, call or one)


def _rate_from_zero(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """LambdaLR(optimizer, lambda t: t / 10)."""
    assert isinstance(node, ast.Call)
    given = edits.argument(node, 1, "lr_lambda")
    if not isinstance(given, ast.Lambda) or len(given.args.args) != 1:
        return
    body = given.body
    is_ratio = isinstance(body, ast.BinOp) and isinstance(body.op, ast.Div)
    if is_ratio and getattr(body.left, "id", "") == given.args.args[0].arg:  # type: ignore[attr-defined]
        yield finding(program, rule, given)


_FLIPS = ("numpy.flip", "numpy.fliplr", "numpy.flipud", "numpy.rot90")


def _turned_array(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.from_numpy(image[:, ::-1])."""
    assert isinstance(node, ast.Call)
    first = node.args[0] if node.args else None
    is_turned = isinstance(first, ast.Call) and program.dotted(first.func) in _FLIPS
    if isinstance(first, ast.Subscript):
        parts = getattr(first.slice, "elts", [first.slice])
        steps = [one.step for one in parts if isinstance(one, ast.Slice)]
        is_turned = any(
            isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.USub) for one in steps
        )
    if first is None or not is_turned:
        return
    end = program.source.end_of(first)
    fix = None if edits.is_in_fstring(program, node) else Fix((Edit(end, end, ".copy()"),))
    yield finding(program, rule, first, fix)


_STEP = (
    "import torch\n\nnet = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
    "before = net.weight.detach().clone()\n"
)
_MOVED = "out = bool((net.weight == before).all())\n"
_EPOCHS = (
    "import torch\n\nnet = torch.nn.Dropout(0.5)\nx = torch.ones(2, requires_grad=True)\n%sfor epoch in range(2):\n"
    "%s    net(x).sum().backward()\n    out = net.training\n    net.eval()\n"
)
_KEYS = "import torch\n\nstate = {'layer.weight': torch.ones(1)}\nout = [%s for k, v in state.items()]\n"
_NET = (
    "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
    "        super().__init__()\n%s\n    def forward(self, x):\n        return %s(x)\n\n\n"
    "out = len(list(Net().parameters()))\n"
)
_LOADER = (
    "from torch.utils.data import DataLoader, RandomSampler\n\nsampler = RandomSampler([1, 2])\n"
    "out = len(DataLoader([1, 2], sampler=sampler%s))\n"
)
_SAVE = (
    "import io\n\nimport torch\n\nnet = torch.nn.Linear(2, 2)\ntorch.save(net%s, io.BytesIO())\n"
)
_TRAIN = (
    "import torch\n\n\ndef train(net, optimizer, loader):\n    for x in loader:\n        optimizer.zero_grad()\n"
    "        net(x).sum().backward()\n        optimizer.step()\n%s    torch.cuda.empty_cache()\n"
)
_VALIDATE = (
    "import torch\n\n\ndef validate(net, loader):\n%s    with torch.no_grad():\n"
    "        return [net(x) for x in loader]\n"
)

RULES: list[Rule] = [
    Rule(
        "FLB434", "zero-grad-before-step",
        "`zero_grad()` stands between `backward()` and `step()`: the step has no gradients, and changes nothing",
        "`zero_grad()` 位于 `backward()` 与 `step()` 之间：这一步没有梯度，什么也不会改变",
        f"{_STEP}net(torch.ones(2)).sum().backward()\noptimizer.zero_grad()\noptimizer.step()\n{_MOVED}",
        f"{_STEP}optimizer.zero_grad()\nnet(torch.ones(2)).sum().backward()\noptimizer.step()\n{_MOVED}",
        attributes=("zero_grad",), check=_zeroed_before_step,
    ),
    Rule(
        "FLB435", "clip-before-backward",
        "gradients are clipped before `backward()` makes them: clip between `backward()` and `step()`",
        "在 `backward()` 产生梯度之前就裁剪：应在 `backward()` 与 `step()` 之间裁剪",
        f"{_STEP}optimizer.zero_grad()\ntorch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)\n"
        "net(torch.ones(2)).sum().backward()\noptimizer.step()\nout = round((net.weight - before).norm().item(), 4)\n",
        f"{_STEP}optimizer.zero_grad()\nnet(torch.ones(2)).sum().backward()\n"
        "torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)\noptimizer.step()\n"
        "out = round((net.weight - before).norm().item(), 4)\n",
        calls=CLIPS, check=_clipped_before_backward,
    ),
    Rule(
        "FLB436", "train-mode-not-restored",
        "`eval()` in the loop and `train()` only before it: from the second epoch on the model is trained in"
        " evaluation mode",
        "循环内调用 `eval()`，而 `train()` 只在循环之前调用：从第二轮起模型在评估模式下训练",
        _EPOCHS % ("net.train()\n", ""), _EPOCHS % ("", "    net.train()\n"),
        "Dropout is off, and batch norm no longer learns its statistics.",
        attributes=("eval",), check=_stays_in_eval,
    ),
    Rule(
        "FLB437", "no-zero-grad",
        "the gradients are never cleared: each step adds to those of all steps before",
        "梯度从未清零：每一步都加在此前所有步的梯度上",
        f"{_STEP}for step in range(2):\n    net(torch.ones(2)).sum().backward()\n    optimizer.step()\n"
        "out = round((net.weight - before).norm().item(), 4)\n",
        f"{_STEP}for step in range(2):\n    optimizer.zero_grad()\n    net(torch.ones(2)).sum().backward()\n"
        "    optimizer.step()\nout = round((net.weight - before).norm().item(), 4)\n",
        sure="likely", attributes=("step",), check=_no_zero_grad,
    ),
    Rule(
        "FLB438", "module-prefix-by-length",
        "`k[7:]` also cuts keys that do not begin with 'module.': write `removeprefix`",
        "`k[7:]` 也会截断不以 'module.' 开头的键：改用 `removeprefix`",
        _KEYS % "k[7:]", _KEYS % "k.removeprefix('module.')",
        fix="unsafe", whole=True, check=_seven_letters,
    ),
    Rule(
        "FLB439", "layer-made-in-forward",
        "a layer that `forward()` makes has new random weights in each call, which nobody trains: make it in"
        " `__init__`",
        "在 `forward()` 中创建的层每次调用都有新的随机权重，且不会被训练：应在 `__init__` 中创建",
        _NET % ("", "nn.Linear(2, 2)"), _NET % ("        self.layer = nn.Linear(2, 2)\n", "self.layer"),
        calls=tuple(f"torch.nn.{name}" for name in _WEIGHTED), check=_made_in_forward,
    ),
    Rule(
        "FLB440", "no-grad-not-called",
        "`with torch.no_grad:` raises: parentheses are missing",
        "`with torch.no_grad:` 会报错：缺少括号",
        "import torch\n\nwith torch.no_grad:\n    out = 1\n", "import torch\n\nwith torch.no_grad():\n    out = 1\n",
        fix="safe", runs="TypeError", names=("torch.no_grad", "torch.enable_grad", "torch.inference_mode"),
        check=_bare_context,
    ),
    Rule(
        "FLB441", "method-not-called",
        "a method of a method, as in `x.detach.clone()`: parentheses are missing",
        "`x.detach.clone()` 取的是方法的方法：缺少括号",
        "import torch\n\nx = torch.ones(2)\nout = x.detach.clone()\n",
        "import torch\n\nx = torch.ones(2)\nout = x.detach().clone()\n",
        fix="safe", runs="AttributeError", attributes=_METHODS, check=_chain_not_called,
    ),
    row("FLB442", "shuffle with sampler", ("torch.utils.data.DataLoader",), _shuffled_sampler,
        ("`shuffle=True` beside a sampler raises: the sampler decides the order",
         "`shuffle=True` 与采样器同时使用会报错：顺序由采样器决定"),
        (_LOADER % ", shuffle=True", _LOADER % ""), runs="ValueError"),
    Rule(
        "FLB443", "evaluation-without-eval",
        "a model is evaluated and never switched by `eval()`: dropout and batch norm still train",
        "评估模型而从未调用 `eval()`：dropout 与 batch norm 仍处于训练模式",
        _VALIDATE % "", _VALIDATE % "    net.eval()\n",
        sure="likely", preview=True, calls=("torch.no_grad", "torch.inference_mode"),
        check=_never_eval,
    ),
    Rule(
        "FLB444", "forward-called",
        "`net.forward(x)` leaves out the hooks, those of DistributedDataParallel too: write `net(x)`",
        "`net.forward(x)` 会跳过 hook，包括 DistributedDataParallel 的：改用 `net(x)`",
        "import torch\n\nout = []\nnet = torch.nn.Linear(2, 2)\nhook = net.register_forward_hook(lambda *_: out.append(1))\n"
        "y = net.forward(torch.ones(2))\n",
        "import torch\n\nout = []\nnet = torch.nn.Linear(2, 2)\nhook = net.register_forward_hook(lambda *_: out.append(1))\n"
        "y = net(torch.ones(2))\n",
        fix="unsafe", sure="likely", preview=True, attributes=("forward",), check=_forward_called,
    ),
    Rule(
        "FLB445", "attribute-of-the-wrapper",
        "DataParallel and DistributedDataParallel have no attributes of the model: write `.module` before it",
        "DataParallel 与 DistributedDataParallel 没有模型的属性：在前面加 `.module`",
        "import torch\n\nnet = torch.nn.DataParallel(torch.nn.Linear(2, 3))\nout = net.out_features\n",
        "import torch\n\nnet = torch.nn.DataParallel(torch.nn.Linear(2, 3))\nout = net.module.out_features\n",
        runs="AttributeError", whole=True, check=_of_wrapper,
    ),
    Rule(
        "FLB446", "one-minus-mask",
        "`1 - mask` of a tensor of bool raises since torch 1.2: write `~mask`",
        "对布尔张量做 `1 - mask` 自 torch 1.2 起报错：改用 `~mask`",
        "import torch\n\n\ndef rest(x):\n    mask = torch.isnan(x)\n    return 1 - mask\n",
        "import torch\n\n\ndef rest(x):\n    mask = torch.isnan(x)\n    return ~mask\n",
        deprecated="1.2", runs="RuntimeError", whole=True, check=_one_minus_mask,
    ),
    Rule(
        "FLB607", "evaluation-with-graph",
        "a model is evaluated without `torch.no_grad()`: each batch keeps what backward() would need",
        "评估模型时没有 `torch.no_grad()`：每个批次都会保留 backward() 所需的内容",
        "import torch\n\n\ndef validate(net, loader):\n    net.eval()\n    for x in loader:\n        net(x)\n",
        "import torch\n\n\n@torch.no_grad()\ndef validate(net, loader):\n    net.eval()\n    for x in loader:\n        net(x)\n",
        sure="likely", preview=True, attributes=("eval",), check=_graph_kept,
    ),
    Rule(
        "FLB447", "profile-printed-inside",
        "a profile that is printed inside of its `with` block is not finished, and empty: print it behind",
        "在 `with` 块内打印的 profile 尚未完成，是空的：应在块之后打印",
        "import torch\n\nwith torch.autograd.profiler.profile() as prof:\n    torch.ones(2) + 1\n    out = str(prof)\n",
        "import torch\n\nwith torch.autograd.profiler.profile() as prof:\n    torch.ones(2) + 1\nout = str(prof)\n",
        calls=("torch.autograd.profiler.profile",), check=_printed_inside,
    ),
    Rule(
        "FLB448", "rate-from-zero",
        "`lambda t: t / n` starts with a rate of 0 for a whole epoch and grows without an end: `min(1, (t + 1) / n)`",
        "`lambda t: t / n` 第一个 epoch 的学习率为 0，之后无限增长：改用 `min(1, (t + 1) / n)`",
        f"{_STEP}scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: t / 10)\n"
        "out = scheduler.get_last_lr()\n",
        f"{_STEP}scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1, (t + 1) / 10))\n"
        "out = scheduler.get_last_lr()\n",
        calls=("torch.optim.lr_scheduler.LambdaLR",), check=_rate_from_zero,
    ),
    Rule(
        "FLB449", "turned-array",
        "`torch.from_numpy` takes no array that is read backwards (`[::-1]`, `np.flip`): write `.copy()`",
        "`torch.from_numpy` 不接受反向读取的数组（`[::-1]`、`np.flip`）：加 `.copy()`",
        "import numpy as np\nimport torch\n\nout = torch.from_numpy(np.ones((2, 2))[:, ::-1])\n",
        "import numpy as np\nimport torch\n\nout = torch.from_numpy(np.ones((2, 2))[:, ::-1].copy())\n",
        fix="safe", runs="ValueError", calls=("torch.from_numpy",), check=_turned_array,
    ),
    Rule(
        "FLB507", "whole-model-saved",
        "a saved model is a pickle of its classes: reading it needs `weights_only=False`, which runs code; save"
        " `state_dict()`",
        "保存整个模型即 pickle 它的类：读取时需要 `weights_only=False`，会运行代码；请保存 `state_dict()`",
        _SAVE % "", _SAVE % ".state_dict()",
        fix="unsafe", calls=("torch.save",), check=_whole_model,
    ),
    Rule(
        "FLB605", "empty-cache-in-each-step",
        "`empty_cache()` in each step gives memory back that the next step asks for again: drop it",
        "每一步都调用 `empty_cache()`，归还的显存下一步又要申请：删去",
        _TRAIN % "    ", _TRAIN % "",
        calls=("torch.cuda.empty_cache",), check=_cache_in_loop,
    ),
    Rule(
        "FLB606", "tensor-of-arrays",
        "a tensor of a list of arrays is made number by number: `np.stack` first",
        "由数组列表创建张量会逐个数字转换：先用 `np.stack`",
        "import numpy as np\nimport torch\n\nout = torch.tensor([np.ones(2) for _ in range(3)])\n",
        "import numpy as np\nimport torch\n\nout = torch.tensor(np.stack([np.ones(2) for _ in range(3)]))\n",
        fix="safe", runs="UserWarning",
        calls=("torch.tensor", "torch.FloatTensor", "torch.LongTensor", "torch.Tensor"), check=_list_of_arrays,
    ),
]  # fmt: skip
"""One rule per mistake."""
