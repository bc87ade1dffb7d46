"""The order of a training step, and modules, files and loaders that are used wrongly."""

import ast
import bisect
import math
import re
from collections.abc import Iterator
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Function, Loop, Place, Program, once
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Edit, Finding, Fix, Rule
from flambeau_lint.rules.argument_rows import constant, row

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


@once
def places_of_calls(program: Program, first: ast.stmt, name: str) -> list[int]:
    """Which ones of a list of statements call a method of this name, in whatever object."""
    body = program.index_of(first)[0]
    return [index for index, one in enumerate(body) if name in program.methods_in(one)]


def calls_around(program: Program, statement: ast.stmt, name: str) -> tuple[int, int]:
    """Where the list of a statement calls a method the last time before it, and the first time behind it.

    Places where there is none: -1 before it, and the length of the list behind it.
    """
    body, index = program.index_of(statement)
    if not body:
        return -1, 0
    places = places_of_calls(program, body[0], name)
    before = bisect.bisect_left(places, index)
    behind = bisect.bisect_right(places, index)
    return (places[before - 1] if before else -1), [*places[behind : behind + 1], len(body)][0]


def _zeroed_before_step(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """loss.backward(), opt.zero_grad(), opt.step(): nothing is left to step by."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    statement = statement_of(program, call) if call is not None else None
    if statement is None:
        return
    body, index = program.index_of(statement)
    is_made = calls_around(program, statement, "backward")[0] >= max(index - 3, 0)
    owner = program.source.text_of(node.value)
    for place in range(index + 1, len(body)):
        one = body[place]
        step = program.methods_in(one).get("step")
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
    zeroed = calls_around(program, statement, "zero_grad")[0]
    made, made_later = calls_around(program, statement, "backward")
    if made < zeroed and made_later < calls_around(program, statement, "step")[1]:
        yield finding(program, rule, statement)


def _stays_in_eval(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """net.train() once before the epochs, and net.eval() in each of them."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    loop = program.loop_of(node)
    if call is None or loop is None or not isinstance(node.value, (ast.Name, ast.Attribute)):
        return
    owner = program.source.text_of(node.value)
    switch = _lines_of_train(program).get((program.function_of(node), owner), math.inf)
    if switch < loop.lineno:  # type: ignore[attr-defined]
        names, given = _inside(program, loop)
        # What takes the model may be a function that switches it back.
        if "backward" in names and names.isdisjoint(("train", "mode(")) and owner not in given:
            yield finding(program, rule, call)


@once
def _lines_of_train(program: Program) -> dict[tuple[Optional[ast.AST], str], int]:
    """The line of the first `net.train`, by the function and by 'net'."""
    found: dict[tuple[Optional[ast.AST], str], int] = {}
    for one in program.attributes.get("train", ()):
        key = (program.function_of(one), program.source.text_of(one.value))
        found[key] = min(one.lineno, found.get(key, one.lineno))
    return found


@once
def _inside(program: Program, loop: ast.AST) -> tuple[set[str], set[str]]:
    """The names of the attributes within a loop, 'mode(' if it says that; and what its calls are given."""
    names = {"mode("} if "mode(" in program.source.text_of(loop) else set()
    given: set[str] = set()
    for one in ast.walk(loop):
        if isinstance(one, ast.Attribute):
            names.add(one.attr)
        elif isinstance(one, ast.Call):
            values = [*one.args, *(key.value for key in one.keywords)]
            given.update(program.source.text_of(value) for value in values)
    return names, given


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
    loop = program.loop_of(node)
    if loop is None or not places_of_calls(program, loop.body[0], "backward"):  # type: ignore[attr-defined]
        return
    if loop not in _around_makers(program, program.place_of(node.value)):
        yield finding(program, rule, call)  # else each turn may have a model of its own


@once
def _around_makers(program: Program, place: Optional[Place]) -> set[ast.AST]:
    """All that stands around what is ever assigned to a variable."""
    makers = program.values_at(place) if place else []
    return {parent for one in makers for parent in program.parents_of(one)}


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
    if function is not None and _has_loop(program, function):
        yield finding(program, rule, node)


@once
def _has_loop(program: Program, function: ast.AST) -> bool:
    return any(isinstance(one, (ast.For, ast.comprehension)) for one in ast.walk(function))


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
        if place is None or _says_prefix(program, place):
            continue
        tests = [p.test for p in program.parents_of(one) if isinstance(p, (ast.If, ast.IfExp))]
        if any(re.search("module|prefix", program.source.text_of(test)) for test in tests):
            continue
        start = program.source.end_of(one.value)
        edit = Edit(start, program.source.end_of(one), ".removeprefix('module.')")
        is_text = edits.is_in_fstring(program, one)
        yield finding(program, rule, one, None if is_text else Fix((edit,), is_safe=False))


@once
def _says_prefix(program: Program, place: ast.AST) -> bool:
    return bool(re.search(r"startswith|module|prefix", program.source.text_of(place)))


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
    place = program.place_of(first)
    if place is not None and _holds_model(program, place, node):
        end = program.source.end_of(first)
        yield finding(program, rule, first, Fix((Edit(end, end, ".state_dict()"),), is_safe=False))


def _holds_model(program: Program, place: Place, node: ast.Call) -> bool:
    """Whether all that is assigned before a node in its function is a model; if nothing is: all that ever is."""
    first, first_other = _lines_of_models(program, place).get(
        program.function_of(node), (math.inf, math.inf)
    )
    if first < node.lineno:
        return first_other >= node.lineno
    return program.of_all(_is_model, place)


@once
def _lines_of_models(
    program: Program, place: Place
) -> dict[Optional[ast.AST], tuple[float, float]]:
    """By function: the first line that assigns a variable, and the first that assigns something but a model."""
    found: dict[Optional[ast.AST], tuple[float, float]] = {}
    for one in program.values_at(place):
        function = program.function_of(one)
        first, first_other = found.get(function, (math.inf, math.inf))
        other = first_other if _is_model(program, one) else min(first_other, one.lineno)
        found[function] = (min(first, one.lineno), other)
    return found


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
    if statement is None or not isinstance(loop, Loop):
        return
    is_in_body = program.index_of(statement)[0] is loop.body
    if is_in_body and loop in loops_of(program, "backward"):
        yield finding(program, rule, node)


@once
def loops_of(program: Program, name: str) -> dict[Optional[ast.AST], list[ast.Attribute]]:
    """The attributes of a name, by the innermost loop around them."""
    found: dict[Optional[ast.AST], list[ast.Attribute]] = {}
    for one in program.attributes.get(name, ()):
        found.setdefault(program.loop_of(one), []).append(one)
    return found


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
    if call is None or function is None or is_said or program.says(b"volatile="):
        return
    if not isinstance(node.value, (ast.Name, ast.Attribute)):
        return
    use = _calls_in_loops(program, function).get(program.source.text_of(node.value))
    if use is not None:
        yield finding(program, rule, use)


@once
def _calls_in_loops(program: Program, function: ast.AST) -> dict[str, ast.Call]:
    """The first call of each thing in a loop, by its text; none of a function that trains."""
    inside = list(ast.walk(function))
    if any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in inside):
        return {}
    found: dict[str, ast.Call] = {}
    for one in inside:
        if isinstance(one, ast.Call) and program.loop_of(one) is not None:
            found.setdefault(program.source.text_of(one.func), one)
    return found


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
            if made and made <= _PARALLEL and not _is_set(program, name):
                yield finding(program, rule, one)


@once
def _is_set(program: Program, name: str) -> bool:
    """Whether the program sets such an attribute of a wrapper itself."""
    return any(isinstance(one.ctx, ast.Store) for one in program.attributes[name])


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
            if program.of_all(_is_mask, program.place_of(one)):
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
    for call in _shown(program, name).get(block, ()) if block is not None else ():
        yield finding(program, rule, call)


@once
def _shown(program: Program, name: str) -> dict[Optional[ast.AST], list[ast.Call]]:
    """The calls that print a name, by each `with` around them."""
    found: dict[Optional[ast.AST], list[ast.Call]] = {}
    for one in program.loads.get(name, ()):
        call = program.parents.get(one)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("print", "str"):
            for parent in program.parents_of(call):
                if isinstance(parent, (ast.With, ast.AsyncWith)):
                    found.setdefault(parent, []).append(call)
    return found


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
