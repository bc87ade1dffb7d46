"""Names are resolved or nothing is said; fixes keep every other byte."""

import codecs
import sys
import textwrap

import pytest
import torch

from flambeau_lint.checked_file import check, fixed
from flambeau_lint.engine import RuleSet, fix, lint
from flambeau_lint.rules.catalog import RULES
from flambeau_lint.source import Source, Unreadable, decode, parse

ALL = RuleSet([rule for rule in RULES if not rule.preview and not rule.is_journey])


def found(text: str) -> list[str]:
    return [one.code for one in lint(textwrap.dedent(text).encode(), ALL)]


def after(text: str, *, unsafe: bool = False) -> str:
    return fix(textwrap.dedent(text).encode(), ALL, unsafe=unsafe)[0].decode()


@pytest.mark.parametrize(
    "text",
    [
        "import torch as t\nt.ger(a, b)",
        "from torch import ger\nger(a, b)",
        "from torch import ger as outer_product\nouter_product(a, b)",
        "from torch import *\nger(a, b)",
        "import torch\nthing = torch\nthing.ger(a, b)",
        "import torch\ndef f():\n    return torch.ger(a, b)",
        "def f():\n    import torch\n    return torch.ger(a, b)",
        "import torch.nn\ntorch.ger(a, b)",
        "import torch\n[torch.ger(a, b) for a in c]",
        "import torch\nlambda a: torch.ger(a, b)",
        "import torch\n@torch.ger\ndef torch_free(): pass",
    ],
)
def test_a_name_is_found(text: str) -> None:
    assert found(text) == ["FLB206"]


@pytest.mark.parametrize(
    "text",
    [
        "torch.ger(a, b)",  # never imported
        "import torch\ntorch = other\ntorch.ger(a, b)",
        "import torch\ndef f(torch):\n    return torch.ger(a, b)",
        "import torch\nfor torch in x:\n    torch.ger(a, b)",
        "from mine import torch\ntorch.ger(a, b)",
        "from .torch import ger\nger(a, b)",
        "from torch import *\nfrom mine import *\nger(a, b)",
        "from torch import *\ndef ger(a, b): pass\nger(a, b)",
        "import torch\nif hasattr(torch, 'ger'):\n    torch.ger(a, b)",
        "import torch\nif torch.__version__ < '1.8':\n    torch.ger(a, b)",
        "import torch\nx = 1 if _TORCH_GREATER_EQUAL_2_4 else torch.ger(a, b)",
        "import torch\nif HAS_OUTER:\n    pass\nelse:\n    torch.ger(a, b)",
        "import torch\ntry:\n    torch.ger(a, b)\nexcept AttributeError:\n    pass",
        "try:\n    from torch import outer\nexcept ImportError:\n    from torch import ger as outer",
        "try:\n    f(torch.outer)\nexcept TypeError:\n    import torch\n    torch.ger(a, b)",
        "import torch\nif TORCH_MAJOR == 1:\n    torch.ger(a, b)",
        "import torch\nif 'outer' not in dir(torch):\n    torch.outer = torch.ger",
        "import torch.distributed\nif TORCH_MAJOR == 1:\n    parser.add_argument('--local_rank')",
        "import torch\ntry:\n    import new\n    IS_NEW = True\nexcept ImportError:\n"
        "    IS_NEW = False\ndef f():\n    if not IS_NEW:\n        from torch import ger",
        "import torch\n'torch.ger(a, b)'",
        "import torch\nx.ger(a, b)",
        "import torch\nclass A:\n    torch = None\n    y = torch.ger",
    ],
)
def test_what_is_not_sure_is_not_said(text: str) -> None:
    assert found(text) == []


def test_a_class_does_not_hide_a_name_from_its_methods() -> None:
    text = "import torch\nclass A:\n    torch = 1\n    def f(self):\n        return torch.ger(a, b)"
    assert found(text) == ["FLB206"]


_HOLDER = """
import torch
class A{bases}:
    {body}
    def __init__(self):
        self.other = 1
        {init}
    def f(self, x):
        return {use}
{more}
"""


def held(*, bases: str = "", body: str = "pass", init: str = "pass", use: str = "", more: str = ""):
    """A class that keeps a module, or a name of one, in an attribute."""
    use = use or "self.lib.ger(x, x)"
    return _HOLDER.format(bases=bases, body=body, init=init, use=use, more=more)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (held(init="self.lib = torch"), ["FLB206"]),
        (held(init="self.lib: object = torch"), ["FLB206"]),
        (held(body="lib = torch"), ["FLB206"]),
        (held(body="import torch as lib"), ["FLB206"]),
        (held(body="lib: object", init="self.lib = torch"), ["FLB206"]),
        (held(body="@classmethod\n    def g(cls, x):\n        return cls.lib.ger(x, x)\n    lib = torch"),
         ["FLB206", "FLB206"]),
        (held(init="self.lib = torch", use="[self.lib.ger(y, y) for y in x]"), ["FLB206"]),
        (held(init="self.all = torch; self.lib = self.all.nn", use="self.lib.functional.upsample(x)"),
         ["FLB217"]),
        (held(init="self.F = torch.nn.functional", use="self.F.softmax(x)"), ["FLB2135"]),
        (held(init="self.softmax = torch.nn.functional.softmax", use="self.softmax(x)"), ["FLB2135"]),
        (held(init="self.lib = torch", use="None", more="class B(A):\n    def g(self):\n"
              "        return self.lib.ger(1, 2)"), ["FLB206"]),
        (held(init="self.lib = torch", more="class B:\n    def g(self):\n        self.lib = numpy"),
         ["FLB206"]),
        # Of its own class: that of the function whose argument `self` is.
        (held(init="self.lib = torch", use="None", more="class B:\n    def g(self):\n"
              "        class C:\n            lib = torch\n        return self.lib.ger(1, 2)"), []),
    ],
)  # fmt: skip
def test_a_module_in_an_attribute_is_found(text: str, expected: list[str]) -> None:
    assert found(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        held(init="self.lib = lib"),
        held(init="self.lib = torch if x else numpy"),
        held(init="self.lib = torch; self.lib = numpy"),
        held(init="self.lib = torch; self.lib = torch"),  # twice: something is meant by it
        held(init="self.lib = torch; self.lib += 1"),
        held(init="self.lib = torch; del self.lib"),
        held(init="self.lib, self.np = torch, numpy"),
        held(init="for self.lib in (torch, numpy): pass"),
        held(body="lib = torch", init="self.lib = numpy"),
        held(body="lib: object = torch", more="class B:\n    lib = torch"),  # a default, of a data class
        held(body="lib = torch\n    def lib(self): pass"),
        held(body="@staticmethod\n    def g(self):\n        return self.lib.ger(1, 2)\n    lib = torch",
             use="None"),
        held(init="self = x; self.lib = torch"),
        held(init="self.lib = torch; setattr(self, x, numpy)"),
        held(init="self.lib = torch; self.__dict__.update(x)"),
        held(init="self.lib = torch; vars(self).update(x)"),
        held(init="self.lib = torch", more="a.lib = numpy"),
        held(init="self.lib = torch", more="setattr(a, 'lib', numpy)"),
        held(init="self.lib = torch", more="class B(A):\n    lib = numpy"),
        held(init="self.lib = torch", more="class B(A):\n    def lib(self): pass"),
        held(init="self.lib = torch", bases="(B)", more="class B:\n    lib = numpy"),
        held(init="self.lib = torch", more="class B:\n    lib = numpy\nclass C(B, A[int]): pass"),
        held(init="self.lib = torch", bases="(meta(M, B))", more="class B:\n    lib = numpy"),
        held(use="self.lib.ger(x, x)", more="class B(A):\n    lib = torch"),  # others may derive, too
        held(init="if hasattr(torch, 'ger'): self.lib = torch"),
        held(init="self.lib = torch", use="x.lib.ger(x, x)"),
        held(body="softmax = torch.nn.functional.softmax", use="self.softmax(x)"),  # x is its `dim`
        "import torch\nself.lib = torch\nself.lib.ger(a, b)",
        "import torch\ndef f(self):\n    self.lib = torch\n    self.lib.ger(a, b)",
        "import torch\nclass A:\n    f = lambda self: self.lib.ger(a, b)\n    lib = torch",
    ],
)  # fmt: skip
def test_an_attribute_that_may_hold_another_is_not_resolved(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (held(init="self.lib = torch"), held(init="self.lib = torch", use="self.lib.outer(x, x)")),
        (
            held(init="self.lib = torch", use="self.lib.qr(x)"),
            held(init="self.lib = torch", use="self.lib.linalg.qr(x)"),
        ),
        (
            held(init="self.F = torch.nn.functional", use="self.F.upsample(x)"),
            held(init="self.F = torch.nn.functional", use="self.F.interpolate(x)"),
        ),
        (
            held(init="self.amp = torch.cuda.amp", use="self.amp.autocast()"),
            held(init="self.amp = torch.cuda.amp", use="torch.amp.autocast('cuda')"),
        ),
        # A function is called by the attribute's name, not by its own.
        (
            held(init="import numpy as np; self.make = np.array", use="self.make(x, copy=False)"),
            held(init="import numpy as np; self.make = np.array", use="self.make(x, copy=False)"),
        ),
    ],
)
def test_a_fix_keeps_the_attribute(before: str, expected: str) -> None:
    assert found(before)
    assert after(before, unsafe=True) == textwrap.dedent(expected)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_other_byte_stays(end: str) -> None:
    lines = [
        "# -*- 注释 -*-",
        "import torch",
        "\tx = 1" if False else "if True:",
        "\tfür = 'ä€𝄞'; y = torch.ger(für,\tb)  # Ünder  ",
        "\f",
        "z = [",
        "  torch.ger(a , b),   ",
        "]",
        "last = torch.ger(c, d)",  # no end of line
    ]
    text = end.join(lines)
    assert fix(text.encode(), ALL, unsafe=False)[0].decode() == text.replace(
        "torch.ger", "torch.outer"
    )


def test_byte_order_mark_and_encoding_stay() -> None:
    text = "# coding: latin-1\nimport torch\nx = 'é'; torch.ger(x, x)\n"
    raw = text.encode("latin-1")
    assert fixed("a.py", raw, ALL, unsafe=False)[0] == raw.replace(b"ger", b"outer")
    raw = codecs.BOM_UTF8 + b"import torch\ntorch.ger(a, b)\n"
    assert fixed("a.py", raw, ALL, unsafe=False)[0] == raw.replace(b"ger", b"outer")


def test_a_file_without_findings_is_the_same_object() -> None:
    raw = b"import torch\r\nx = 1\n"
    assert fixed("a.py", raw, ALL, unsafe=True) == (raw, 0)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (
            "from torch.cuda.amp import autocast, GradScaler\nwith autocast():\n    s = GradScaler()\n",
            "from torch.amp import GradScaler\nfrom torch.amp import autocast\n"
            "with autocast('cuda'):\n    s = GradScaler('cuda')\n",
        ),
        (
            "from torch.cuda import amp\nwith amp.autocast(enabled=True):\n    pass\n",
            "import torch\nfrom torch.cuda import amp\n"
            "with torch.amp.autocast('cuda', enabled=True):\n    pass\n",
        ),
        (
            "from torch.cuda.amp import autocast as ac\nwith ac(False):\n    pass\n",
            "from torch.amp import autocast as ac\nwith ac('cuda', enabled=False):\n    pass\n",
        ),
        (
            "from torch.nn.init import (xavier_uniform,\n    normal_)\nxavier_uniform(w)\nnormal_(w)\n",
            "from torch.nn.init import (xavier_uniform_,\n    normal_)\nxavier_uniform_(w)\nnormal_(w)\n",
        ),
        (
            "from timm.models.layers import DropPath, trunc_normal_\n",
            "from timm.layers import DropPath, trunc_normal_\n",
        ),
        (
            "from timm.models.helpers import load_checkpoint\n",
            "from timm.models import load_checkpoint\n",
        ),
        (
            "import timm.models.layers as L\nL.DropPath()\n",
            "import timm.layers as L\nL.DropPath()\n",
        ),
        (
            "import torch.nn.utils.stateless as S\nS.functional_call(n, p, x)\n",
            "import torch\nimport torch.nn.utils.stateless as S\ntorch.func.functional_call(n, p, x)\n",
        ),
    ],
)
def test_imports_follow(before: str, expected: str) -> None:
    assert after(before) == expected


@pytest.mark.parametrize(
    "text",
    [
        # Handed on as a value: what is called with is not seen.
        "from torch.cuda.amp import autocast\nf(autocast)\n",
        "from torch.cuda.amp import autocast\nwith autocast(*a):\n    pass\n",
        # Others may import it from here, or look it up.
        "from torch.nn.init import normal\n",
        "from torch.nn.init import normal\n__all__ = ['normal']\nnormal(w)\n",
        # Not in the new module.
        "from timm.models.helpers import load_checkpoint, set_layer\n",
        "import timm\ntimm.models.helpers.set_layer(m)\n",
        "from torch.distributed._composable.fsdp.fully_shard import fully_shard\n",
        "from torch.distributed._tensor.api import DTensor\n",
        # A leaf would be another tensor.
        "import torch\nx = torch.zeros(2, requires_grad=True).cuda()\ntorch.gels\n",
        # A comment would have to move.
        "from torch.nn.init import (  # first\n    normal,  # second\n)\nnormal(w)\n",
    ],
)
def test_what_is_not_understood_stays(text: str) -> None:
    assert found(text)
    assert after(text, unsafe=True) == text


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("nn.MSELoss(size_average=False)", "nn.MSELoss(reduction='sum')"),
        ("nn.MSELoss(size_average=True, reduce=False)", "nn.MSELoss(reduction='none')"),
        ("nn.MSELoss(reduce=True,)", "nn.MSELoss(reduction='mean',)"),
        ("nn.MSELoss(size_average=flag)", "nn.MSELoss(size_average=flag)"),
        (
            "nn.MSELoss(None, size_average=flag, reduce=False)",
            "nn.MSELoss(None, size_average=flag, reduce=False)",
        ),
    ],
)
def test_reductions(call: str, expected: str) -> None:
    assert after(f"from torch import nn\nx = {call}\n") == f"from torch import nn\nx = {expected}\n"


def test_an_argument_is_taken_out_with_its_comma() -> None:
    head = "from torch.optim.lr_scheduler import StepLR\n"
    for call, expected in {
        "StepLR(o, 3, verbose=True)": "StepLR(o, 3)",
        "StepLR(o, verbose=True, step_size=3)": "StepLR(o, step_size=3)",
        "StepLR(\n    o,\n    3,\n    verbose=True,\n)": "StepLR(\n    o,\n    3,\n)",
    }.items():
        assert after(f"{head}s = {call}\n") == f"{head}s = {expected}\n"
    commented = f"{head}s = StepLR(o, 3,  # three\n    verbose=True)\n"
    assert after(commented) == commented


def test_positions_in_f_strings_are_not_trusted() -> None:
    text = "import torch\nx = f'''\n{torch.ger(a, b)}'''\n"
    assert found(text) == ["FLB206"]
    assert after(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nprint 'loss', loss\n",
        "import torch\ntry:\n    pass\nexcept ValueError, e:\n    pass\n",
        "import torch\nx = 0777\n",
    ],
)
def test_python_2_is_named(text: str) -> None:
    assert "is Python 2" in check("a.py", text.encode(), ALL).problem


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="it is read there")
@pytest.mark.parametrize(
    "text",
    [
        "try:\n    pass\nexcept ValueError, OSError:\n    pass\n",
        "try:\n    pass\nexcept KeyError, socket.timeout, http.ClientError:\n    pass\n",
        "try:\n    pass\nexcept* ValueError, OSError:\n    pass\n",
        "x = t'{torch.ger(a, b)}'\n",
    ],
)
def test_python_3_14_is_not_taken_for_python_2(text: str) -> None:
    problem = check("a.py", f"import torch\n{text}".encode(), ALL).problem
    assert "cannot be parsed by Python 3." in problem


def test_what_cannot_be_read_is_no_crash() -> None:
    problem = check("a.py", b"import torch\nx = = 1\n", ALL).problem
    assert problem.startswith("line 2 cannot be parsed by Python 3."), "perhaps a newer one could"
    assert "not UTF-8" in check("a.py", b"import torch\n'\xff'\n", ALL).problem
    assert "encoding" in check("a.py", b"# coding: nothing\nimport torch\n", ALL).problem
    assert check("a.py", b"import torch\0", ALL).problem
    deep = b"import torch\nx = " + b"(" * 5000 + b")" * 5000
    assert check("a.py", deep, ALL).problem
    chain = b"import torch\nx = " + b"+".join([b"torch.ger(a, b)"] * 900)
    assert len(check("a.py", chain, ALL).places) == 900


def test_places_count_code_points() -> None:
    source = Source("x = '𝄞é'; torch\r\ny\n".encode())
    assert source.place_of(len("x = '𝄞é'; ".encode())) == (1, 11)
    assert source.place_of(len("x = '𝄞é'; torch\r\n".encode())) == (2, 1)
    with pytest.raises(Unreadable):
        parse(b"(")
    assert decode(b"x") == (b"x", "utf-8", b"")


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nm.weight.data.normal_().fmod_(2).mul_(3).add_(4)",
        "import torch\ndataset.data.numpy()",  # a field of its own
        "import torch\npacked.data.cpu().numpy()",
        "import torch\nbucket.add(0.5, other)",  # a method of something else
        "import torch\nx.add_(y, alpha=2)",
        "import torch\ntorch.addcmul(x, y, z)",
        "import torch\nhashlib.new('md5').update(b'')",
        "import torch\nx.masked_fill(mask.bool(), 0)",
        "import torch\nx = [1]\ntorch.tensor(x)\ntorch.tensor(torch.initial_seed())",
        "import torch\nimport numpy as np\nnp.bool, np.float32, np.inf",
    ],
)
def test_methods_that_look_alike(text: str) -> None:
    assert found(text) == []


def test_numbers_go_behind_the_tensors() -> None:
    text = """
    import torch
    p.data.add_(-group["lr"] * 2, d_p)
    dist.addmm_(1, -2, x, y.t())
    p.add_( (1 - beta), grad )  # parentheses: found, and not written
    """
    changed = after(text)
    assert 'p.data.add_(d_p, alpha=-group["lr"] * 2)' in changed
    assert "dist.addmm_(x, y.t(), beta=1, alpha=-2)" in changed
    assert "p.add_( (1 - beta), grad )" in changed
    assert found(text) == ["FLB2160"] * 3


HEAD = "import torch\nfrom torch import nn\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"


@pytest.mark.parametrize(
    "text",
    [
        # Another loss makes the gradients between zero_grad() and step().
        "d.backward()\nopt.zero_grad()\ng.backward()\nopt.step()",
        "d.backward()\nopt.zero_grad()\ntrain_once(net)\nopt.step()",
        "d.backward()\nopt.zero_grad()\nopt.step(closure)",
        # It is switched back, by whatever way.
        "net.train()\nfor e in x:\n    net(e).backward()\n    net.eval().cpu()\n    net.to(d).train()",
        "net.train()\nfor e in x:\n    net(e).backward()\n    net.eval()\n    test(net)",
        "net.train()\nfor e in x:\n    net(e).backward()\n    teacher.eval()",
        "for e in x:\n    net(e).backward()\n    opt.step()\n    for p in q:\n        p.grad = None",
        # Not the keys of a state, or looked at before.
        "for line in file:\n    x = line[7:]",
        "for k in state.keys():\n    if k.startswith('module.'):\n        k = k[7:]",
        "new = {k[7:] if 'module' in k else k: v for k, v in state.items()}",
        "x.cpu.amp\nx.item\nnp.float.x",
        "loader = torch.utils.data.DataLoader(d, shuffle=True, sampler=None)",
        "torch.save(state, 'a.pt')\ntorch.save({'net': nn.Linear(1, 1)}, 'a.pt')",
        "for x in y:\n    test(x)\n    torch.cuda.empty_cache()",
        "torch.tensor([1.0, 2.0])\ntorch.tensor([f(x) for x in y])",
        "torch.log(torch.softmax(x, 1) + 1e-8)",
        "nn.CrossEntropyLoss()(net(x), torch.softmax(y, 1))",
        "p = nn.parallel.DistributedDataParallel(net)\np.module.fc, p.device_ids, p.device_mesh",
        "p = nn.parallel.DistributedDataParallel(net)\np.best = 1\nprint(p.best)",
        "p = make()\nif many:\n    p = nn.parallel.DistributedDataParallel(p)\np.fc",
        "mask = x > 0\n1 - mask",  # may be an array
        "mask = (x > 0).float()\n1 - mask",
        "1 - torch.sum(x)",
        "torch.optim.lr_scheduler.LambdaLR(opt, lambda t: min(1, t / 10))",
        "torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.95**t)",
        "torch.from_numpy(x[::2]), torch.from_numpy(x[::-1].copy())",
        "with torch.autograd.profiler.profile() as prof:\n    print(x)\nprint(prof)",
    ],
)
def test_steps_that_are_right(text: str) -> None:
    assert found(HEAD + text) == []


def test_a_layer_that_is_kept_is_made_once() -> None:
    text = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def forward(self, x):
            if self.first is None:
                self.first = nn.Linear(2, 2)
            self.second = nn.Linear(2, 2)
            y = nn.ReLU()(nn.LayerNorm(x.shape[1:])(x))
            return nn.Linear(2, 2)(y)
    """
    assert found(text) == ["FLB439"]


def test_the_softmax_at_the_end_of_a_model() -> None:
    text = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def forward(self, x):
            return torch.softmax(x, dim=1)

    class Logits(nn.Module):
        def forward(self, x):
            return x

    net = Net()
    other = Logits()
    last = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=1))
    loss = nn.CrossEntropyLoss()
    loss(net(x), y)
    loss(other(x), y)
    z = last(x)
    loss(z, y)
    """
    assert found(text) == ["FLB404", "FLB404"]


def test_layers_in_plain_containers() -> None:
    text = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = []
            self.b = []
            self.c = []
            self.d = []
            self.e = {"x": nn.Linear(2, 2)}
            self.f = {1: nn.Linear(2, 2)}
            for _ in range(3):
                self.a.append(nn.Linear(2, 2))
                self.b.append(nn.Linear(2, 2))
                self.c.append(3)
            self.body = nn.Sequential(*self.b)  # they are registered here

        def forward(self, x):
            return sum(layer(x) for layer in self.a) + self.e["x"](x) + sum(self.f.values())
    """
    assert found(text) == ["FLB408"] * 3
    fixed = after(text, unsafe=True)
    assert "self.a = nn.ModuleList([])" in fixed
    assert 'self.e = nn.ModuleDict({"x": nn.Linear(2, 2)})' in fixed
    assert "self.f = {1: nn.Linear(2, 2)}" in fixed


def test_what_the_wrappers_have_is_known() -> None:
    """Of the class here: nothing of DistributedDataParallel is reported as missing in it."""
    own = [name for name in dir(torch.nn.parallel.DistributedDataParallel) if name[0] != "_"]
    text = f"{HEAD}p = nn.parallel.DistributedDataParallel(net)\n"
    assert found(text + "".join(f"print(p.{name})\n" for name in own)) == []


_BRANCHES = """
import torch
scaler = torch.amp.GradScaler()
def step():
    if use_amp:
        scaler.scale(loss).backward()
        {clip_scaled}
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
"""
_TURNS = """
import torch
{before}
for net in nets:
    net(x).backward()
    {inside}
    optimizer.step()
"""
_ALWAYS = """
import torch
import torch.nn.functional as F
class Prenet(torch.nn.Module):
    def forward(self, x):
        return F.dropout(x){comment}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_BRANCHES.format(clip_scaled="pass"), []),
        (
            _BRANCHES.format(clip_scaled="torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)"),
            ["FLB405"],
        ),
        (_ALWAYS.format(comment="  # always on, also in inference"), []),
        (_ALWAYS.format(comment="  # half of them"), ["FLB409"]),
        ("import torch\ntorch.hub.load('pytorch/vision', 'resnet18')", []),
        ("import torch\ntorch.hub.load('someone/vision', 'resnet18')", ["FLB2143"]),
        ("import torch\ntorch.ByteTensor(torch.ByteStorage.from_buffer(raw))", []),
        ("import torch\nx = torch.autograd.Variable(y)", ["FLB2110"]),
        (_TURNS.format(before="", inside="optimizer = torch.optim.SGD(net.parameters(), 1)"), []),
        (
            _TURNS.format(before="optimizer = torch.optim.SGD(net.parameters(), 1)", inside=""),
            ["FLB437"],
        ),
    ],
)
def test_what_public_code_has_taught(text: str, expected: list[str]) -> None:
    assert found(text) == expected


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (
            "from torch import nn\nup = nn.UpsamplingBilinear2d(scale_factor=2)\n",
            "from torch import nn\n"
            "up = nn.Upsample(scale_factor=2, mode='bilinear', align_corners=True)\n",
        ),
        (
            "import torch.nn.functional as F\ny = F.upsample_bilinear(x, (4, 4))\n",
            "import torch.nn.functional as F\n"
            "y = F.interpolate(x, (4, 4), mode='bilinear', align_corners=True)\n",
        ),
        (
            "from torch import nn\nup = nn.UpsamplingBilinear2d\n",  # called somewhere else
            "from torch import nn\nup = nn.UpsamplingBilinear2d\n",
        ),
    ],
)
def test_the_corners_of_an_old_upsampling_stay(before: str, expected: str) -> None:
    assert after(before) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from torch import nn\nisinstance(net, nn.DataParallel)", []),
        ("from torch import nn\nnet = nn.DataParallel(net)", ["FLB224"]),
        ("from torch.distributed.fsdp import FullyShardedDataParallel as F\nisinstance(x, F)", []),
        ("from torch.distributed.fsdp import FullyShardedDataParallel as F\nF(net)", ["FLB257"]),
    ],
)
def test_wrappers_are_named_where_they_wrap(text: str, expected: list[str]) -> None:
    assert [one.code for one in lint(text.encode(), RuleSet(RULES))] == expected


@pytest.mark.parametrize(
    ("rest", "is_fixed"), [("", True), ("nn.utils.remove_weight_norm(layer)\n", False)]
)
def test_a_norm_that_is_removed_again_is_not_rewritten(rest: str, is_fixed: bool) -> None:
    text = f"from torch import nn\nlayer = nn.utils.weight_norm(layer)\n{rest}"
    assert found(text) == ["FLB226"]
    new = text.replace("utils.weight_norm", "utils.parametrizations.weight_norm")
    assert after(text, unsafe=True) == (new if is_fixed else text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("F.interpolate(x, scale_factor=0.7, recompute_scale_factor=True)", []),
        ("F.interpolate(x, scale_factor=0.7)", ["FLB324"]),
        ("F.interpolate(x, scale_factor=1 / 3)", ["FLB324"]),
        ("F.interpolate(x, scale_factor=2.0)", []),
        ("F.interpolate(x, scale_factor=factor)", []),
        ("F.interpolate(x, (4, 4), mode='bilinear')", ["FLB310"]),
        ("F.interpolate(x, (4, 4), mode='bicubic')", []),
        ("torch.full((2,), 0)", ["FLB323"]),
        ("torch.full((2,), True)", []),
    ],
)
def test_what_has_silently_changed(text: str, expected: list[str]) -> None:
    program = f"import torch\nimport torch.nn.functional as F\ny = {text}\n"
    journey = RuleSet([rule for rule in RULES if rule.is_journey])
    assert [one.code for one in lint(program.encode(), journey)] == expected


_LOOPED = """
import torch
net = torch.nn.Linear(2, 2)
scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(9):
    for x, y in loader:
        optimizer.zero_grad()
        net(x).sum().backward()
        {line}
"""
_CLIP = "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)"
_SAVING = """
import torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group()
net = DistributedDataParallel(net)
if {test}:
    torch.save(net.module.state_dict(), "net.pt")
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_LOOPED.format(line=f"optimizer.step(); {_CLIP}"), ["FLB450"]),
        (_LOOPED.format(line=f"{_CLIP}; optimizer.step()"), []),
        (_LOOPED.format(line=f"other.step(); {_CLIP}; optimizer.step()"), []),
        (_LOOPED.format(line="scaler.step(optimizer)"), ["FLB451"]),
        (_LOOPED.format(line="scaler.step(optimizer); scaler.update()"), []),
        (_LOOPED.format(line="x.to('cuda'); optimizer.step()"), ["FLB454"]),
        (_LOOPED.format(line="x = x.to('cuda'); optimizer.step()"), []),
        (_LOOPED.format(line="net.to('cuda'); optimizer.step()"), []),
        ("import torch\nfor name, part in net.named_modules():\n    part.to('cuda')", []),
        ("import torch\nfor net, loader in zip(nets, loaders):\n    net.to('cuda')", []),
        (_SAVING.format(test="epoch > 3"), ["FLB456"]),
        (_SAVING.format(test="torch.distributed.get_rank() == 0"), []),
        (_SAVING.format(test="not rank"), []),
        (_SAVING.format(test="self.gpu_id == 0"), []),
        (_SAVING.format(test="is_main_process()"), []),
    ],
)
def test_work_that_is_lost_and_what_looks_alike(text: str, expected: list[str]) -> None:
    assert [
        one.code for one in lint(text.encode(), RuleSet(RULES)) if "FLB449" < one.code < "FLB457"
    ] == expected


_AFTER = "import torch\noptimizer = torch.optim.SGD({given}, 0.1)\nnet.fc = torch.nn.Linear(2, 2)\n{more}"
_BEST = """
import copy
import torch
for epoch in range(9):
    if accuracy > best:
        weights = {kept}
{read}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_AFTER.format(given="net.parameters()", more=""), ["FLB453"]),
        (_AFTER.format(given="other.parameters()", more=""), []),
        (_AFTER.format(given="net.parameters()", more="optimizer.add_param_group({})"), []),
        (
            _AFTER.format(
                given="net.parameters()", more="optimizer = torch.optim.SGD(net.parameters(), 1)"
            ),
            [],
        ),
        (_BEST.format(kept="net.state_dict()", read="net.load_state_dict(weights)"), ["FLB452"]),
        (
            _BEST.format(
                kept="copy.deepcopy(net.state_dict())", read="net.load_state_dict(weights)"
            ),
            [],
        ),
        (_BEST.format(kept="net.state_dict()", read="torch.save(weights, 'last.pt')"), []),
        (_BEST.format(kept="net.state_dict()", read="        other.load_state_dict(weights)"), []),
    ],
)
def test_weights_that_are_left_behind(text: str, expected: list[str]) -> None:
    assert [
        one.code for one in lint(text.encode(), RuleSet(RULES)) if "FLB449" < one.code < "FLB457"
    ] == expected


_SPAWN = """
import os
import torch.distributed as dist
import torch.multiprocessing as mp
def work(gpu, args):
    {line}
mp.spawn(work, nprocs=2)
"""
_NAMES = "import torch\nfor {target} in net.{of}():\n    {line}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_SPAWN.format(line="dist.init_process_group('nccl')"), ["FLB459"]),
        (_SPAWN.format(line="dist.init_process_group('nccl', 'env://', world_size=2)"), ["FLB459"]),
        (_SPAWN.format(line="print(gpu); dist.init_process_group()"), ["FLB459"]),
        (_SPAWN.format(line="dist.init_process_group('nccl', rank=gpu, world_size=2)"), []),
        (_SPAWN.format(line="dist.init_process_group('nccl', 'tcp://host:1?rank=0')"), []),
        (_SPAWN.format(line="dist.init_process_group('nccl', **args)"), []),
        (_SPAWN.format(line="os.environ['RANK'] = gpu; dist.init_process_group()"), []),
        (_SPAWN.format(line="prepare(gpu)\n    dist.init_process_group()"), []),
        (
            "import helpers"
            + _SPAWN.format(line="helpers.set(gpu)\n    dist.init_process_group()"),
            [],
        ),
        ("import torch.distributed as dist\ndist.init_process_group('nccl')", []),
        (_NAMES.format(target="n, m", of="named_modules", line="o.add_module(n, m)"), ["FLB460"]),
        (
            _NAMES.format(target="x", of="named_modules", line="o.add_module(x[0], x[1])"),
            ["FLB460"],
        ),
        (_NAMES.format(target="n, m", of="named_children", line="o.add_module(n, m)"), []),
        (_NAMES.format(target="n, m", of="named_modules", line="o.add_module(str(m), m)"), []),
        (
            _NAMES.format(target="n, m", of="named_modules", line="'.' in n or o.add_module(n, m)"),
            [],
        ),
        ("import torch\ny = torch.reshape(a, b, c)", ["FLB461"]),
        ("import torch\ny = torch.flip(x, 0, 1)", ["FLB461"]),
        ("import torch\ny = torch.reshape(a, (b, c))", []),
        ("import torch\ny = torch.reshape(*a)", []),
        ("import torch\ny = x.reshape(a, b, c)", []),
    ],
)
def test_what_torch_refuses(text: str, expected: list[str]) -> None:
    assert found(text) == expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [("groups = [{'parameters': p}]", ["FLB402"]), ("groups = [{'parameters': p}] + more", [])],
)
def test_groups_that_have_a_name(head: str, expected: list[str]) -> None:
    text = f"import torch\n{head}\ntorch.optim.SGD(groups, 0.1)\n"
    assert found(text) == expected
    assert after(text) == (text.replace("parameters", "params") if expected else text)
    read = text + "print(groups[0]['parameters'])\n"
    assert after(read) == read


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("net = torch.load('net.pt', weights_only=True)", ["FLB507"]),
        ("net = None", ["FLB507"]),
        ("", ["FLB507"]),
    ],
)
def test_what_a_model_becomes_later(line: str, expected: list[str]) -> None:
    text = f"import torch\n{{}}\ntorch.save(net, 'net.pt')\n{line}\n"
    assert found(text.format("net = torch.nn.Linear(2, 2)")) == expected
    assert found(text.format("net = read()")) == []


_STEP = "optimizer.zero_grad()\nloss = criterion(model(x), y)\nloss.backward()\n"
_MADE = "criterion = nn.CrossEntropyLoss()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
_CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
# What tutorials, notebooks and generated tests repeat, of the same names.
REPEATED = {
    "other names": "y# = torch.ger(a, b)\n",
    "the same name": "y = torch.ger(y, b)\n",
    "a loss": "loss = f(x)\nprint(loss.data[0])\n",
    "of itself": "loss = loss / 2\nloss = other + loss\nother = loss\nprint(loss.data[0])\n",
    "a softmax": "y = F.softmax(x, 1)\nF.cross_entropy(y, t)\n",
    "a step": f"{_STEP}optimizer.step()\n",
    "all made anew": f"{_MADE}{_STEP}optimizer.step()\nloss.data[0]\n",
    "a clip": f"{_STEP}{_CLIP}optimizer.step()\n",
    "a clip too early": f"optimizer.zero_grad()\n{_CLIP}loss = criterion(model(x), y)\n",
    "loops": f"for x, y in loader:\n{textwrap.indent(_STEP, '    ')}    total += loss\nx.cuda()\n",
    "models": "net = nn.Linear(2, 2)\ntorch.save(net, path)\n",
    "switches": "model.eval()\nfor x in loader:\n    model(x)\nmodel.train()\n",
    "classes": "class Net(nn.Module):\n    def __init__(self):\n        self.layers = [nn.Linear(2, 2)]\n"
    "        self.loss = nn.MSELoss()\n    def f(self):\n        self.loss(1, 2).data[0]\n",
    "globals": "def f():\n    global loss\n    loss = f(loss)\n",
}


def repeated(name: str, times: int, *, in_function: bool) -> str:
    head = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
    body = "".join(REPEATED[name].replace("#", f"{i}") for i in range(times))
    if in_function:
        return f"{head}def train(model, loader, optimizer):\n{textwrap.indent(body, '    ')}"
    return head + body


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("in_function", [False, True])
def test_the_work_grows_with_the_file(name: str, in_function: bool) -> None:
    """What many lines ask alike is answered once, and not for each of them among all."""
    counts = []
    for times in (100, 300):
        program = repeated(name, times, in_function=in_function).encode()
        steps = [0]

        def count(frame: object, event: str, argument: object, steps: list[int] = steps) -> None:
            steps[0] += 1

        sys.setprofile(count)
        try:
            check("a.py", program, RuleSet(RULES))
        finally:
            sys.setprofile(None)
        counts.append(steps[0])
    assert counts[1] < 3.5 * counts[0]


@pytest.mark.parametrize("name", ["a loss", "a softmax", "a step", "all made anew", "a clip"])
def test_the_same_lines_2000_times(name: str) -> None:
    """It ends, and finds in each of them what it finds in one, and what stands behind them."""
    rules = RuleSet(RULES)
    once, often = (
        lint(f"{repeated(name, times, in_function=True)}torch.ger(a, b)\n".encode(), rules)
        for times in (2, 2000)
    )
    *codes, last = [one.code for one in once]
    assert last == "FLB206"
    assert [one.code for one in often] == [*codes * 1000, last]
