"""Whatever a model is made of: it resumes to the same bits, or is refused before the first step."""

from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, quantize_dynamic
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset

from flambeau import InputError, Run

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Named = namedtuple("Named", "calls")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(deprecated|beta state|WeightNorm|torch.ao.quantization|ComplexHalf)"
)


class Stop(Exception):
    pass


class WithBuffer(nn.Module):
    """A layer, and a buffer that each step of the training changes."""

    def __init__(self, buffer: Tensor | None, *, persistent: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("more", buffer, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.more, Tensor) and self.more.dtype in (torch.float32, torch.int64):
            self.more = self.more + 1
            return self.layer(x) * (1 + self.more.float().sum() / 100)
        return self.layer(x)


class WithExtra(nn.Module):
    """A layer whose extra state, made of the number of its calls, scales the output."""

    def __init__(self, pack: Callable[[int], Any], unpack: Callable[[Any], int]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.calls, self.pack, self.unpack = 0, pack, unpack

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + self.calls / 100)

    def get_extra_state(self) -> Any:
        return self.pack(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self.calls = self.unpack(state)


class WithParameter(nn.Module):
    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.layer, self.more = nn.Linear(4, 2), parameter

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.more.abs().float().sum()


class WithHooks(nn.Module):
    """Its state_dict has an entry that is neither a tensor nor extra state."""

    def __init__(self, *, leaves_out: str = "") -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 2), 0
        self.leaves_out = leaves_out
        self.register_state_dict_post_hook(lambda *given: self._give(given[1]))
        self.register_load_state_dict_pre_hook(lambda *given: self._take(given[1]))

    def _give(self, state: dict[str, Any]) -> None:
        state["calls"] = self.calls
        state.pop(self.leaves_out, None)

    def _take(self, state: dict[str, Any]) -> None:
        self.calls = state.pop("calls")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + self.calls / 100)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x)))


class SharedStorage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        memory = torch.zeros(6)
        self.register_buffer("one", memory[:4])
        self.register_buffer("two", memory[2:])

    def forward(self, x: Tensor) -> Tensor:
        self.one += 1
        self.two += 2
        return self.layer(x) * (1 + self.two.sum() / 1000)


class Collections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 2)) for _ in range(2)])
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(2))})

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0] + x @ self.weights[1] + self.named["bias"]


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.fixed = quantize_dynamic(nn.Sequential(nn.Linear(4, 2)), {nn.Linear})

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.fixed(x)


class Embedded(nn.Module):
    """Row 0 of a table for each sample, with gradients that are sparse by its layer or by the function."""

    def __init__(self, *, by_layer: bool) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 2), nn.Embedding(3, 2, sparse=by_layer)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.zeros(len(x), dtype=torch.int64)
        return self.layer(x) + nn.functional.embedding(rows, self.table.weight, sparse=True)


class Subclass(Tensor):
    pass


def with_head(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Linear(4, 2))


def called(model: nn.Module) -> nn.Module:
    model(INPUTS[:2])
    return model


def pruned() -> nn.Module:
    return with_head(prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5))


def extra(pack: Callable[[int], Any], unpack: Callable[[Any], int]) -> Callable[[], nn.Module]:
    return lambda: WithExtra(pack, unpack)


def buffer(make: Callable[[], Tensor | None], **settings: bool) -> Callable[[], nn.Module]:
    return lambda: WithBuffer(make(), **settings)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e8m0fnu, torch.complex64, torch.complex128),
]
KEPT: Mapping[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: with_head(parametrizations.weight_norm(nn.Linear(4, 4))),
    "weight_norm by hooks": lambda: with_head(nn.utils.weight_norm(nn.Linear(4, 4))),
    "spectral_norm": lambda: with_head(parametrizations.spectral_norm(nn.Linear(4, 4))),
    "spectral_norm by hooks": lambda: with_head(nn.utils.spectral_norm(nn.Linear(4, 4))),
    "orthogonal": lambda: with_head(parametrizations.orthogonal(nn.Linear(4, 4))),
    "pruned": pruned,
    "tied weights": Tied,
    "shared module": lambda: with_head(*[nn.Linear(4, 4)] * 2),
    "lazy, called": lambda: called(with_head(nn.LazyLinear(4), nn.LazyBatchNorm1d())),
    "parameter list and dict": Collections,
    "quantized": Quantized,
    "fake quantization": lambda: with_head(FakeQuantize()),
    "entry of a hook": WithHooks,
    "buffer None": buffer(lambda: None),
    "buffer of 0 dimensions": buffer(lambda: torch.zeros(())),
    "buffer of a step": buffer(lambda: torch.zeros(4)[::2]),
    "buffer that is transposed": buffer(lambda: torch.zeros(2, 3).t()),
    "buffer of integers": buffer(lambda: torch.zeros(2, dtype=torch.int64)),
    "buffer without elements": buffer(lambda: torch.zeros(0, 3)),
    "buffer that is conjugated": buffer(lambda: torch.full((2,), 1j).conj()),
    "buffer that is quantized": buffer(
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    ),
    "buffer that is not persistent": buffer(
        lambda: torch.ones(2, dtype=torch.float64), persistent=False
    ),
    "buffers of shared storage": SharedStorage,
    "buffer of a subclass": buffer(lambda: torch.zeros(2).as_subclass(Subclass)),
    "parameter of a subclass": lambda: WithParameter(
        nn.Parameter(torch.ones(2).as_subclass(Subclass))
    ),
    "parameter in bfloat16": lambda: WithParameter(nn.Parameter(torch.ones(2).bfloat16())),
    "complex parameter, frozen": lambda: WithParameter(
        nn.Parameter(torch.full((2,), 1j), requires_grad=False)
    ),
    "extra dict": extra(lambda n: {"calls": n}, lambda state: state["calls"]),
    "extra int": extra(int, int),
    "extra float": extra(float, int),
    "extra str": extra(str, int),
    "extra list": extra(lambda n: [n, None], lambda state: state[0]),
    "extra tuple": extra(lambda n: (n,), lambda state: state[0]),
    "extra tensor": extra(torch.tensor, int),
    "extra tensor that grows": extra(torch.zeros, len),
    "extra nest": extra(lambda n: {"a": [torch.tensor(n)]}, lambda state: int(state["a"][0])),
    **{f"buffer of {d}": buffer(lambda d=d: torch.ones(3).to(d)) for d in DTYPES},
}
REFUSED: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: with_head(nn.LazyLinear(4)), "'0.weight' .* no shape yet: call the model"),
    "buffer without a shape": (buffer(nn.UninitializedBuffer), "'more' .* no shape yet"),
    "buffer that is expanded": (
        buffer(lambda: torch.ones(1).expand(5)),
        "'more' of the model is expanded",
    ),
    "buffer that is sparse": (
        buffer(lambda: torch.eye(3).to_sparse()),
        "'more' .*WithBuffer.* a torch.sparse_coo",
    ),
    "buffer of CSR": (
        buffer(lambda: torch.eye(3).to_sparse_csr()),
        "'more' .*WithBuffer.* a torch.sparse_csr",
    ),
    "buffer on meta": (buffer(lambda: torch.ones(2, device="meta")), "'more' .* meta device"),
    "parameter that is expanded": (
        lambda: WithParameter(nn.Parameter(torch.ones(1).expand(2))),
        "'more' of the model is expanded",
    ),
    "complex parameter": (
        lambda: WithParameter(nn.Parameter(torch.full((2,), 1j))),
        "'more' of the model is trained and torch.complex64: train its torch.view_as_real",
    ),
    "sparse layer": (lambda: Embedded(by_layer=True), "'table' of the model has sparse=True"),
    "sparse gradient": (lambda: Embedded(by_layer=False), "a gradient is sparse"),
    "hook that leaves out": (lambda: WithHooks(leaves_out="layer.bias"), 'Missing .* "layer.bias"'),
    "extra set": (extra(lambda n: {n}, len), "'_extra_state' .*WithExtra.* builtins.set"),
    "extra object": (
        extra(Stop, lambda n: 0),
        "'_extra_state' .*WithExtra.*Stop",
    ),
    "extra namedtuple": (extra(Named, len), "'_extra_state' .*WithExtra.*Named"),
    "extra array": (extra(np.zeros, len), "'_extra_state' .*WithExtra.* numpy.ndarray"),
}


def train(
    folder: Path,
    make: Callable[[], nn.Module],
    *,
    stop: int = -1,
    kind: type[torch.optim.SGD] = torch.optim.SGD,
    **settings: Any,
) -> Run:
    torch.manual_seed(0)
    model = make()
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())
    settings = {"batch_size": 16, "checkpoint_every": "2st", "bar": False, **settings}
    run = Run(folder, model, optimizer, data, duration="2ep", **settings)
    for _ in run.epochs():
        for inputs, targets in run.batches():
            run.step(nn.functional.cross_entropy(model(inputs), targets))
            if run.state.step == stop:
                raise Stop
    return run


def plain(value: Any) -> Any:
    """Of a tensor, what assert_close compares: bytes where torch cannot compare the type."""
    if isinstance(value, Tensor) and value.is_quantized:
        return value.dequantize()
    if isinstance(value, Tensor) and value.itemsize == 1 and value.is_floating_point():
        return value.view(torch.uint8)
    return value


@pytest.mark.parametrize("kind", KEPT)
def test_kept(tmp_path: Path, kind: str) -> None:
    whole = train(tmp_path / "whole", KEPT[kind])
    with pytest.raises(Stop):
        train(tmp_path / "stopped", KEPT[kind], stop=3)
    resumed = train(tmp_path / "stopped", KEPT[kind])

    assert resumed.state.step == 4
    expected = whole.model.state_dict()
    assert resumed.model.state_dict().keys() == expected.keys()
    for name, value in resumed.model.state_dict().items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(
                plain(value), plain(expected[name]), rtol=0, atol=0, check_stride=False
            )
        elif kind != "quantized" and "nest" not in kind:
            assert value == expected[name]
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(tmp_path: Path, kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(InputError, match=message):
        train(tmp_path / "run", make)
    assert not list(tmp_path.glob("run/checkpoints/step-*[1-9]"))


def test_what_the_published_file_lacks_is_said(tmp_path: Path, capfd: Any) -> None:
    train(tmp_path, KEPT["extra dict"])
    assert "'_extra_state' of the model" in capfd.readouterr().err
    assert load_file(tmp_path / "model.safetensors").keys() == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize("kind", ["extra int", f"buffer of {torch.float8_e5m2}", "quantized"])
def test_an_average_of_it_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InputError, match="ema averages plain parameters and buffers"):
        train(tmp_path, KEPT[kind], ema=0.9)


@pytest.mark.parametrize(
    ("there", "now"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_another_dtype_is_refused(tmp_path: Path, there: torch.dtype, now: torch.dtype) -> None:
    def make(dtype: torch.dtype) -> Callable[[], nn.Module]:
        return lambda: WithParameter(nn.Parameter(torch.ones(2, dtype=dtype)))

    with pytest.raises(Stop):
        train(tmp_path, make(there), stop=3)
    with pytest.raises(InputError, match=f"'more' is {there}, the model's {now}"):
        train(tmp_path, make(now))
    assert train(tmp_path, make(there)).state.step == 4


class WideMomentum(torch.optim.SGD):
    """Keeps its momentum in float64, as optimizers for half precision keep theirs in float32."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            before = state.get("momentum", torch.zeros_like(parameter, dtype=torch.float64))
            state["momentum"] = 0.9 * before + parameter.grad.double()
            parameter.data -= (0.1 * state["momentum"]).float()


def test_an_optimizer_keeps_the_dtypes_of_its_state(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", Tied, kind=WideMomentum)
    with pytest.raises(Stop):
        train(tmp_path / "stopped", Tied, stop=3, kind=WideMomentum)
    resumed = train(tmp_path / "stopped", Tied, kind=WideMomentum)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
        momentum = resumed.optimizer.state[other]["momentum"]
        assert torch.equal(momentum, whole.optimizer.state[one]["momentum"])
        assert momentum.dtype is torch.float64


class Holder:
    """An object in `state=`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("value", [Named(1), {1}, np.zeros(1)], ids=["namedtuple", "set", "array"])
def test_state_that_no_checkpoint_holds_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InputError, match=r"state\['mine'\].value is of type"):
        train(tmp_path, KEPT["tied weights"], state={"mine": Holder(value)})
