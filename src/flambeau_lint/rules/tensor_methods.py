"""Methods and attributes of tensors, functions and data sets that old programs use: no import names them."""

import ast
import re
from collections.abc import Iterator
from typing import Optional

from flambeau_lint import edits
from flambeau_lint.program import Program, once
from flambeau_lint.renaming import finding
from flambeau_lint.rule import Edit, Finding, Fix, Rule
from flambeau_lint.rules.argument_rows import constant, rename, row
from flambeau_lint.rules.rows import gone

# Of each method: how many arguments its old form has, and what the numbers before the tensors are called now.
_NUMBERS = {
    "add_": (2, ("alpha",)),
    "sub_": (2, ("alpha",)),
    "addcmul": (3, ("value",)),
    "addcmul_": (3, ("value",)),
    "addcdiv": (3, ("value",)),
    "addcdiv_": (3, ("value",)),
    "addmm_": (4, ("beta", "alpha")),
    "addmm": (4, ("beta", "alpha")),
}
_MASKED = ("masked_fill", "masked_fill_", "masked_select", "masked_scatter", "masked_scatter_")
_FILLS = {"zero_", "fill_", "normal_", "uniform_", "random_", "copy_", "bernoulli_"}
# Objects with a field of their own called `data`: data sets, batches, packed sequences, loaders.
_HOLDERS = re.compile(r"set|data|pack|batch|train|test|val|load|mnist|cifar|graph|sample", re.I)
_OF_DATASETS = {
    "train_data": "data",
    "test_data": "data",
    "train_labels": "targets",
    "test_labels": "targets",
}
_NUMPY_BUILTINS = ("float", "int", "object", "str", "complex")
_NUMPY_NAMES = {
    "Inf": "inf",
    "Infinity": "inf",
    "infty": "inf",
    "PINF": "inf",
    "NaN": "nan",
    "NAN": "nan",
    "float_": "float64",
    "complex_": "complex128",
    "unicode_": "str_",
    "string_": "bytes_",
    "product": "prod",
    "cumproduct": "cumprod",
    "alltrue": "all",
    "sometrue": "any",
    "round_": "round",
}


def _numbers_first(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """x.add_(0.5, y), x.addcmul_(0.5, y, z), d.addmm_(1, -2, y, z)."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    if call is None or call.keywords or program.dotted(node):
        return
    length, names = _NUMBERS[node.attr]
    if len(call.args) == length and not edits.is_open(call):
        yield finding(program, rule, call, _numbers_last(program, call, names))


def _numbers_last(program: Program, call: ast.Call, names: tuple[str, ...]) -> Optional[Fix]:
    start = edits.after_paren(program, call)
    if start is None or edits.is_in_fstring(program, call):
        return None
    end = program.source.end_of(call) - 1
    texts = [program.source.text_of(one) for one in call.args]
    shape = rb"\s*" + rb"\s*,\s*".join(re.escape(one.encode()) for one in texts) + rb"\s*,?\s*"
    if re.fullmatch(shape, program.source.data[start:end]) is None:
        return None  # parentheses or comments between the arguments
    tensors = texts[len(names) :]
    numbers = [f"{name}={text}" for name, text in zip(names, texts)]
    first = program.source.start_of(call.args[0])
    last = program.source.end_of(call.args[-1])
    return Fix((Edit(first, last, ", ".join([*tensors, *numbers])),))


def _data_numpy(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """x.data.numpy(), x.data.cpu().numpy()."""
    assert isinstance(node, ast.Attribute)
    if program.dotted(node) or not isinstance(node.ctx, ast.Load):
        return
    owner = node.value
    if isinstance(owner, ast.Call):
        owner = owner.func
    if isinstance(owner, ast.Subscript):
        owner = owner.value
    name = getattr(owner, "attr", getattr(owner, "id", ""))
    if not name or name == "self" or _HOLDERS.search(name):
        return
    method = _next_method(program, node)
    for _ in range(3):
        if method is None or method.attr == "numpy":
            break
        call = program.is_called(method)
        method = _next_method(program, call) if call is not None else None
    if method is None or method.attr != "numpy" or program.is_called(method) is None:
        return
    end = program.source.end_of(node)
    fix = Fix((Edit(end - len("data"), end, "detach()"),), is_safe=False)
    yield finding(program, rule, node, None if edits.is_in_fstring(program, node) else fix)


def _next_method(program: Program, node: ast.AST) -> Optional[ast.Attribute]:
    parent = program.parents.get(node)
    return parent if isinstance(parent, ast.Attribute) else None


def _new(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """x.new(3, 4).zero_() and its kin."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    filled = _next_method(program, call) if call is not None else None
    last = program.is_called(filled) if filled is not None else None
    if call is None or filled is None or last is None or filled.attr not in _FILLS:
        return
    fix = None
    is_sized = bool(call.args) and not call.keywords and not isinstance(call.args[0], ast.List)
    if filled.attr == "zero_" and is_sized and not edits.is_in_fstring(program, node):
        name = program.source.end_of(node)
        rest = Edit(program.source.end_of(call), program.source.end_of(last), "")
        fix = Fix((Edit(name - len("new"), name, "new_zeros"), rest), is_safe=False)
    yield finding(program, rule, call, fix)


def _storage(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """x.storage().data_ptr()."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    method = _next_method(program, call) if call is not None else None
    if call is None or call.args or method is None or method.attr != "data_ptr":
        return
    end = program.source.end_of(node)
    fix = Fix((Edit(end - len("storage"), end, "untyped_storage"),))
    yield finding(program, rule, call, None if edits.is_in_fstring(program, node) else fix)


def _byte_mask(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """x.masked_fill(mask.byte(), 0)."""
    assert isinstance(node, ast.Attribute)
    call = program.is_called(node)
    mask = call.args[0] if call is not None and call.args else None
    if not isinstance(mask, ast.Call) or mask.args or not isinstance(mask.func, ast.Attribute):
        return
    if mask.func.attr == "byte":
        end = program.source.end_of(mask.func)
        fix = Fix((Edit(end - len("byte"), end, "bool"),))
        yield finding(program, rule, mask, None if edits.is_in_fstring(program, node) else fix)


def _saved_variables(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Attribute)
    end = program.source.end_of(node)
    fix = Fix((Edit(end - len("saved_variables"), end, "saved_tensors"),))
    yield finding(program, rule, node, None if edits.is_in_fstring(program, node) else fix)


def _legacy_function(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """A Function whose forward takes self."""
    for owner in program.classes:
        bases = [
            one
            for one in owner.bases
            if program.dotted(one)
            in ("torch.autograd.Function", "torch.autograd.function.Function")
        ]
        for method in owner.body if bases else ():
            if not isinstance(method, ast.FunctionDef) or method.name != "forward":
                continue
            names = [one.arg for one in method.args.args]
            if names[:1] == ["self"] and not method.decorator_list:
                yield finding(program, rule, bases[0])


def _of_dataset(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """MNIST(...).train_labels."""
    assert isinstance(node, ast.Attribute)
    made = program.made_by(node.value)
    names = ("MNIST", "FashionMNIST", "KMNIST", "EMNIST", "QMNIST")
    if made and all(
        one.startswith("torchvision.datasets.") and one.endswith(names) for one in made
    ):
        end = program.source.end_of(node)
        fix = Fix((Edit(end - len(node.attr), end, _OF_DATASETS[node.attr]),))
        yield finding(program, rule, node, None if edits.is_in_fstring(program, node) else fix)


def _several_ids(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    assert isinstance(node, ast.Call)
    ids = edits.argument(node, 1, "device_ids")
    if isinstance(ids, (ast.List, ast.Tuple)) and len(ids.elts) > 1:
        yield finding(program, rule, ids)


def _numpy_builtin(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """np.float is float."""
    fix = None
    if isinstance(node, ast.Attribute) and not edits.is_in_fstring(program, node):
        is_free = not program.is_bound(node.attr)
        fix = Fix((edits.replace(program, node, node.attr),)) if is_free else None
    yield finding(program, rule, node, fix)


def _copy_false(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """np.array(x, copy=False), which np.asarray(x) is in each version."""
    assert isinstance(node, ast.Call)
    given = edits.keyword(node, "copy")
    if given is None or constant(given.value) is not False:
        return
    edit = edits.remove_argument(program, node, given)
    is_plain = len(node.args) <= 2 and all(one.arg in ("copy", "dtype") for one in node.keywords)
    fix = None
    if edit is not None and is_plain and getattr(node.func, "attr", "") == "array":
        end = program.source.end_of(node.func)
        fix = Fix((Edit(end - len("array"), end, "asarray"), edit))
    yield finding(program, rule, given, fix)


def _numpy_name(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """np.Inf is np.inf."""
    made: Optional[tuple[Edit, ...]] = None
    if isinstance(node, ast.Attribute):
        made = edits.rename_chain(program, node, f"numpy.{_NUMPY_NAMES[node.attr]}")
    yield finding(program, rule, node, None if made is None else Fix(made))


# Functions of torch whose result is a tensor.
_MAKERS = re.compile(
    r"torch\.(zeros|ones|empty|full|rand|randn|randint|arange|linspace|eye|tensor|as_tensor|from_numpy|cat|stack"
    r"|where|exp|log|sqrt|abs|sum|mean|matmul|mm|bmm|sigmoid|softmax|tanh|relu|clamp|argmax|zeros_like|ones_like"
    r"|rand_like|randn_like|nn\.functional\.[a-z_]+)"
)


def _tensor_of_tensor(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """torch.tensor(x) of x = torch.stack(...)."""
    assert isinstance(node, ast.Call)
    first = node.args[0] if node.args else None
    made = program.made_by(first) if first is not None else frozenset()
    if first is None or not made or not all(_MAKERS.fullmatch(one) for one in made):
        return
    fix = None
    if len(node.args) == 1 and not node.keywords and not edits.is_in_fstring(program, node):
        text = program.source.text_of(first)
        fix = Fix((edits.replace(program, node, f"{text}.detach().clone()"),))
    yield finding(program, rule, node, fix)


def _lengths_on_gpu(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """pack_padded_sequence(x, lengths.cuda())."""
    assert isinstance(node, ast.Call)
    lengths = edits.argument(node, 1, "lengths")
    if isinstance(lengths, ast.Call) and getattr(lengths.func, "attr", "") == "cuda":
        yield finding(program, rule, lengths)


_FUNCTION = (
    "import torch\n\n\nclass Same(torch.autograd.Function):\n%s    def forward(%s, x):\n        return x\n\n"
    "%s    def backward(%s, grad):\n        return grad\n\n\nout = %s(torch.ones(2))\n"
)


def _correct_view(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """correct[:k].view(-1) of correct = pred.eq(...) and pred = pred.t()."""
    assert isinstance(node, ast.Attribute)
    part = node.value
    if not isinstance(part, ast.Subscript) or not isinstance(part.value, ast.Name):
        return
    values = program.values_of(part.value)
    made = values[0] if len(values) == 1 else None
    compared = made.func if isinstance(made, ast.Call) else None
    pred = compared.value if isinstance(compared, ast.Attribute) and compared.attr == "eq" else None
    call = program.is_called(node)
    if call is None or not isinstance(pred, ast.Name):
        return
    if (program.scope_of(node), pred.id) in _turned(program):
        end = program.source.end_of(node)
        yield finding(program, rule, node, Fix((Edit(end - len("view"), end, "reshape"),)))


@once
def _turned(program: Program) -> set[tuple[ast.AST, str]]:
    """The scope and the name of each `x = x.t()`."""
    found = set()
    for one in program.attributes.get("t", ()):
        call = program.parents.get(one)
        to = program.parents.get(call) if isinstance(call, ast.Call) else None
        targets = to.targets if isinstance(to, ast.Assign) else []
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(one.value, ast.Name) and one.value.id in names:
            found.add((program.scope_of(one), one.value.id))
    return found


def _tensor_keywords(program: Program, rule: Rule, node: ast.AST) -> Iterator[Finding]:
    """TensorDataset(data_tensor=x, target_tensor=y)."""
    assert isinstance(node, ast.Call)
    names = [one.arg for one in node.keywords]
    if names not in (["data_tensor"], ["data_tensor", "target_tensor"], ["target_tensor"]):
        return
    if len(node.args) != (names == ["target_tensor"]):
        return
    source = program.source
    found = [Edit(source.start_of(one), source.start_of(one.value), "") for one in node.keywords]
    yield finding(program, rule, node.keywords[0], Fix(tuple(found)))


_STATIC = "    @staticmethod\n"
_SAVED = (
    "import torch\n\n\nclass Twice(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
    "        ctx.save_for_backward(x)\n        return 2 * x\n\n    @staticmethod\n    def backward(ctx, grad):\n"
    "        (x,) = ctx.%s\n        return 2 * grad\n\n\nx = torch.ones(2, requires_grad=True)\n"
    "Twice.apply(x).sum().backward()\nout = x.grad\n"
)
_CORRECT = (
    "import torch\n\nscores = torch.eye(4)\n_, pred = scores.topk(2, 1, True, True)\npred = pred.t()\n"
    "correct = pred.eq(torch.arange(4).view(1, -1).expand_as(pred))\nout = correct[:2].%s(-1).sum()\n"
)
_ERR = "ModuleNotFoundError"

RULES: list[Rule] = [
    gone("FLB1180", "torch._six", "2.0", "str, int and collections.abc of Python",
         "from torch._six import string_classes", "string_classes = str", deprecated="1.9", runs=_ERR,
         why="string_classes is str, int_classes is int, inf is math.inf, container_abcs is collections.abc."),
    row("FLB1181", "fft called", ("torch.fft",), lambda program, rule, node: iter([finding(program, rule, node)]),
        ("`torch.fft` is a module since torch 1.8: write `torch.fft.fft`, and complex numbers for pairs of them",
         "`torch.fft` 自 torch 1.8 起是一个模块：改用 `torch.fft.fft`，并用复数代替成对的实数"),
        ("import torch\n\nout = torch.fft(torch.ones(4, 2), 1)\n",
         "import torch\n\nout = torch.fft.fft(torch.view_as_complex(torch.ones(4, 2)))\n"),
        deprecated="1.7", removed="1.8", runs="TypeError"),
    Rule(
        "FLB1198", "view-of-correct",
        "`correct[:k].view(-1)` raises since torch 1.7 where `pred.t()` was compared: write `.reshape(-1)`",
        "与 `pred.t()` 比较得到的 `correct[:k].view(-1)` 自 torch 1.7 起报错：改用 `.reshape(-1)`",
        _CORRECT % "view", _CORRECT % "reshape",
        "The result of a comparison has the strides of what is compared, and a turned matrix has no flat view.",
        removed="1.7", fix="safe", runs="RuntimeError", attributes=("view",), check=_correct_view,
    ),
    row("FLB1199", "tensors by keyword", ("torch.utils.data.TensorDataset", "torch.utils.data.dataset.TensorDataset"),
        _tensor_keywords,
        ("`data_tensor=` and `target_tensor=` of `TensorDataset` are gone since torch 0.4: name no argument",
         "`TensorDataset` 的 `data_tensor=` 与 `target_tensor=` 自 torch 0.4 起已移除：按位置传参"),
        ("import torch\nfrom torch.utils.data import TensorDataset\n\n"
         "out = TensorDataset(data_tensor=torch.ones(2), target_tensor=torch.ones(2))[0]\n",
         "import torch\nfrom torch.utils.data import TensorDataset\n\nout = TensorDataset(torch.ones(2), torch.ones(2))[0]\n"),
        removed="0.4", fix="safe", runs="TypeError"),
    gone("FLB1182", "torch.utils.data.dataloader._DataLoaderIter", "1.2", "iter(loader)",
         "from torch.utils.data.dataloader import _DataLoaderIter", "from torch.utils.data import DataLoader",
         runs="ImportError"),
    Rule(
        "FLB1184", "byte-mask",
        "a mask of uint8 raises in `masked_fill` and its kin (deprecated since torch 1.2): write `.bool()`",
        "`masked_fill` 等不再接受 uint8 掩码（自 torch 1.2 起已弃用）：改用 `.bool()`",
        "import torch\n\nx = torch.ones(2)\nout = x.masked_fill(x.byte(), 0.0)\n",
        "import torch\n\nx = torch.ones(2)\nout = x.masked_fill(x.bool(), 0.0)\n",
        deprecated="1.2", removed="2.11", fix="safe", runs="RuntimeError", attributes=_MASKED, check=_byte_mask,
    ),
    Rule(
        "FLB1185", "function-with-self",
        "an `autograd.Function` whose `forward` takes `self` raises since torch 1.5: static methods, `ctx` and"
        " `.apply()`",
        "`forward` 带 `self` 的 `autograd.Function` 自 torch 1.5 起报错：改用静态方法、`ctx` 与 `.apply()`",
        _FUNCTION % ("", "self", "", "self", "Same()"),
        _FUNCTION % (_STATIC, "ctx", _STATIC, "ctx", "Same.apply"),
        deprecated="1.3", removed="1.5", runs="RuntimeError", whole=True, check=_legacy_function,
    ),
    row("FLB1186", "several device_ids",
        ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel"),
        _several_ids,
        ("`device_ids=` of several devices raises since torch 1.8: one process per GPU",
         "`device_ids=` 含多个设备自 torch 1.8 起报错：每个 GPU 一个进程"),
        ("from torch.nn.parallel import DistributedDataParallel\n\n\ndef wrap(net):\n"
         "    return DistributedDataParallel(net, device_ids=[0, 1])\n",
         "from torch.nn.parallel import DistributedDataParallel\n\n\ndef wrap(net):\n"
         "    return DistributedDataParallel(net, device_ids=[0])\n"),
        removed="1.8", runs="ValueError"),
    row("FLB1187", "lengths on a GPU", ("torch.nn.utils.rnn.pack_padded_sequence",), _lengths_on_gpu,
        ("`lengths` of `pack_padded_sequence` on a GPU raise since torch 1.7: they stay on the CPU",
         "`pack_padded_sequence` 的 `lengths` 在 GPU 上自 torch 1.7 起报错：应留在 CPU 上"),
        ("from torch.nn.utils.rnn import pack_padded_sequence\n\n\ndef pack(x, lengths):\n"
         "    return pack_padded_sequence(x, lengths.cuda())\n",
         "from torch.nn.utils.rnn import pack_padded_sequence\n\n\ndef pack(x, lengths):\n"
         "    return pack_padded_sequence(x, lengths.cpu())\n"),
        removed="1.7", runs="RuntimeError"),
    Rule(
        "FLB1190", "numpy-builtins",
        "`np.float`, `np.int`, `np.object`, `np.str` and `np.complex` are gone since NumPy 1.24: write `float`",
        "`np.float`、`np.int`、`np.object`、`np.str` 与 `np.complex` 自 NumPy 1.24 起已移除：直接写 `float` 等",
        "import numpy as np\nimport torch\n\nout = torch.from_numpy(np.zeros(2, dtype=np.float))\n",
        "import numpy as np\nimport torch\n\nout = torch.from_numpy(np.zeros(2, dtype=float))\n",
        library="numpy", deprecated="1.20", removed="1.24", fix="safe", runs="AttributeError",
        names=tuple(f"numpy.{name}" for name in _NUMPY_BUILTINS), check=_numpy_builtin,
    ),
    Rule(
        "FLB1202", "numpy-array-copy-false",
        "`np.array(copy=False)` raises since NumPy 2.0 where a copy is needed: write `np.asarray`",
        "`np.array(copy=False)` 自 NumPy 2.0 起在需要复制时引发错误：改用 `np.asarray`",
        "import numpy as np\nimport torch\n\nout = torch.from_numpy(np.array([1.0, 2.0], copy=False))\n",
        "import numpy as np\nimport torch\n\nout = torch.from_numpy(np.asarray([1.0, 2.0]))\n",
        library="numpy", removed="2.0", fix="safe", runs="ValueError", calls=("numpy.array",), check=_copy_false,
    ),
    Rule(
        "FLB1191", "numpy-second-names",
        "`np.Inf`, `np.NaN`, `np.float_`, `np.product` and their kin are gone since NumPy 2.0: `np.inf`, `np.nan`,"
        " `np.float64`, `np.prod`",
        "`np.Inf`、`np.NaN`、`np.float_`、`np.product` 等自 NumPy 2.0 起已移除：改用 `np.inf`、`np.nan`、`np.float64`、`np.prod`",
        "import numpy as np\nimport torch\n\nout = torch.tensor([1.0, np.float_(2)])\n",
        "import numpy as np\nimport torch\n\nout = torch.tensor([1.0, np.float64(2)])\n",
        library="numpy", deprecated="1.25", removed="2.0", fix="safe", runs="AttributeError",
        names=tuple(f"numpy.{name}" for name in _NUMPY_NAMES), check=_numpy_name,
    ),
    Rule(
        "FLB2160", "number-before-tensors",
        "a number before the tensors is deprecated since torch 1.5: `x.add_(y, alpha=2)`,"
        " `x.addcmul_(y, z, value=2)`, `x.addmm_(y, z, beta=1, alpha=-2)`",
        "把系数写在张量之前自 torch 1.5 起已弃用：`x.add_(y, alpha=2)`、`x.addcmul_(y, z, value=2)`、"
        "`x.addmm_(y, z, beta=1, alpha=-2)`",
        "import torch\n\nx = torch.ones(2)\nout = torch.zeros(2).add_(0.5, x).addcmul_(2.0, x, x)\n",
        "import torch\n\nx = torch.ones(2)\nout = torch.zeros(2).add_(x, alpha=0.5).addcmul_(x, x, value=2.0)\n",
        deprecated="1.5", fix="safe", runs="UserWarning", attributes=tuple(_NUMBERS), check=_numbers_first,
    ),
    Rule(
        "FLB2161", "numpy-of-data",
        "`x.data.numpy()` hides from autograd what is done to the array: write `x.detach().numpy()`",
        "`x.data.numpy()` 会让 autograd 看不到对数组的改动：改用 `x.detach().numpy()`",
        "import torch\n\nx = torch.ones(2, requires_grad=True)\nout = float(x.data.numpy().sum())\n",
        "import torch\n\nx = torch.ones(2, requires_grad=True)\nout = float(x.detach().numpy().sum())\n",
        "Both share memory with the tensor; a change of what is detached is an error in backward(), of `.data` it is"
        " a wrong gradient.",
        deprecated="0.4", fix="unsafe", sure="likely", attributes=("data",), check=_data_numpy,
    ),
    Rule(
        "FLB2162", "tensor-new",
        "`x.new(...)` is legacy since torch 0.4: `x.new_zeros(...)`, `x.new_empty(...)`, `x.new_tensor(...)`",
        "`x.new(...)` 自 torch 0.4 起为旧式写法：改用 `x.new_zeros(...)`、`x.new_empty(...)`、`x.new_tensor(...)`",
        "import torch\n\nx = torch.ones(2)\nout = x.new(2, 3).zero_()\n",
        "import torch\n\nx = torch.ones(2)\nout = x.new_zeros(2, 3)\n",
        deprecated="0.4", fix="unsafe", attributes=("new",), check=_new,
    ),
    Rule(
        "FLB2163", "typed-storage",
        "`x.storage()` is deprecated since torch 2.0: write `x.untyped_storage()`",
        "`x.storage()` 自 torch 2.0 起已弃用：改用 `x.untyped_storage()`",
        "import torch\n\nx = torch.ones(2)\nout = x.storage().data_ptr() == x.data_ptr()\n",
        "import torch\n\nx = torch.ones(2)\nout = x.untyped_storage().data_ptr() == x.data_ptr()\n",
        deprecated="2.0", fix="safe", runs="UserWarning", attributes=("storage",), check=_storage,
    ),
    row("FLB2164", "grad_variables", ("torch.autograd.backward",), rename("grad_variables", "grad_tensors"),
        ("`grad_variables=` is deprecated since torch 0.4: write `grad_tensors=`",
         "`grad_variables=` 自 torch 0.4 起已弃用：改用 `grad_tensors=`"),
        ("import torch\n\nx = torch.ones(1, requires_grad=True)\n"
         "torch.autograd.backward([x * 2], grad_variables=[torch.ones(1)])\nout = x.grad\n",
         "import torch\n\nx = torch.ones(1, requires_grad=True)\n"
         "torch.autograd.backward([x * 2], grad_tensors=[torch.ones(1)])\nout = x.grad\n"),
        deprecated="0.4", fix="safe", runs="FutureWarning"),
    Rule(
        "FLB2165", "saved-variables",
        "`ctx.saved_variables` is deprecated since torch 0.4: write `ctx.saved_tensors`",
        "`ctx.saved_variables` 自 torch 0.4 起已弃用：改用 `ctx.saved_tensors`",
        _SAVED % "saved_variables", _SAVED % "saved_tensors",
        deprecated="0.4", fix="safe", runs="DeprecationWarning", attributes=("saved_variables",),
        check=_saved_variables,
    ),
    Rule(
        "FLB2167", "tensor-of-tensor",
        "`torch.tensor(x)` of a tensor warns since torch 1.0: `x.detach().clone()` says what it does",
        "对张量调用 `torch.tensor(x)` 自 torch 1.0 起会警告：改用含义明确的 `x.detach().clone()`",
        "import torch\n\nx = torch.ones(2)\nout = torch.tensor(x)\n",
        "import torch\n\nx = torch.ones(2)\nout = x.detach().clone()\n",
        deprecated="1.0", fix="safe", runs="UserWarning", calls=("torch.tensor",), check=_tensor_of_tensor,
    ),
    Rule(
        "FLB2166", "labels-of-mnist",
        "`train_data`, `train_labels`, `test_data` and `test_labels` of a dataset are deprecated since torchvision"
        " 0.2.2: `data` and `targets`",
        "数据集的 `train_data`、`train_labels`、`test_data`、`test_labels` 自 torchvision 0.2.2 起已弃用：改用 `data` 与"
        " `targets`",
        "from torchvision.datasets import MNIST\n\n\ndef labels(root):\n    return MNIST(root).train_labels\n",
        "from torchvision.datasets import MNIST\n\n\ndef labels(root):\n    return MNIST(root).targets\n",
        library="torchvision", deprecated="0.2.2", fix="safe", runs="UserWarning", attributes=tuple(_OF_DATASETS),
        check=_of_dataset,
    ),
]  # fmt: skip
"""One rule per idiom."""
