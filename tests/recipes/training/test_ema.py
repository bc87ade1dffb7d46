import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flambeau.recipes.training.ema import EMA

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Net(nn.Module):
    """Tied weights, float, integer and bool buffers, one buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def train(model: nn.Module, steps: int, *, start: int = 0) -> Iterator[int]:
    """Real steps; yields after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(start, start + steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).to(
            next(model.parameters()).device
        )
        optimizer.zero_grad()
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
        if isinstance(model, Net):
            model.seen += 3
            model.mask.logical_not_()
        yield step


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def naive(history: list[dict[str, Tensor]], decay: float, *, warmup: bool) -> dict[str, Tensor]:
    """The definition, in double precision."""
    average = {name: value.double() for name, value in history[0].items()}
    for t, state in enumerate(history[1:]):
        d = min(decay, (1 + t) / (10 + t)) if warmup else decay
        for name, value in state.items():
            average[name] = d * average[name] + (1 - d) * value.double()
    return average


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_equals_the_naive_loop(decay: float, warmup: bool) -> None:
    model = make()
    history = [copies(model)]
    ema = EMA(model, decay=decay, warmup=warmup)
    for _ in train(model, 30):
        ema.update()
        history.append(copies(model))
    assert ema.num_updates == 30
    for name, value in naive(history, decay, warmup=warmup).items():
        got = ema.shadow[name]
        assert got.dtype == history[0][name].dtype
        if got.is_floating_point():
            torch.testing.assert_close(got.double(), value, rtol=1e-5, atol=1e-6)
        else:  # copied, not averaged
            torch.testing.assert_close(got, history[-1][name], rtol=0, atol=0)
    assert ema.shadow["seen"] == 90


def test_equals_torchs_averaged_model() -> None:
    model = make()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
    theirs.update_parameters(model)  # its first call copies
    ema = EMA(model, decay=0.9, warmup=False)
    for _ in train(model, 10):
        ema.update()
        theirs.update_parameters(model)
    for name, value in theirs.module.named_parameters():
        torch.testing.assert_close(ema.shadow[name], value.detach(), rtol=0, atol=0)


def test_shadow_loads_strictly_and_keeps_ties() -> None:
    model = make()
    ema = EMA(model, decay=0.9)
    for _ in train(model, 3):
        ema.update()
    assert list(ema.shadow) == list(model.state_dict())
    assert ema.shadow["first.weight"] is ema.shadow["last.weight"]
    assert not any(value.requires_grad for value in ema.shadow.values())
    other = Net()
    other.load_state_dict(ema.shadow, strict=True)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, ema.shadow[name], rtol=0, atol=0)


def test_tied_weights_move_once_an_update() -> None:
    model = make()
    before = model.first.weight.detach().clone()
    ema = EMA(model, decay=0.75, warmup=False)
    with torch.no_grad():
        model.first.weight += 1
    ema.update()
    torch.testing.assert_close(ema.shadow["last.weight"], before + 0.25, rtol=1e-6, atol=1e-6)


def test_a_module_under_two_names() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    ema = EMA(model, decay=0.9)
    ema.update()
    nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).load_state_dict(ema.shadow)


def test_updates_do_not_touch_the_model_nor_the_gradients() -> None:
    model = make()
    alone = copy.deepcopy(model)
    ema = EMA(model, decay=0.9)
    for _ in train(model, 5):
        ema.update()
    list(train(alone, 5))
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)


def test_a_buffer_that_is_replaced_is_followed() -> None:
    """`self.mean = ...` in a forward pass makes a new tensor; so does `model.to(dtype)`."""
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))
    ema = EMA(model, decay=0.5, warmup=False)
    model.mean = torch.ones(2)
    ema.update()
    torch.testing.assert_close(ema.shadow["mean"], torch.full((2,), 0.5), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_averaged_in_float32(dtype: torch.dtype) -> None:
    """From 1 to 2 in steps of 1/1000 of the way: bfloat16 would round each of them away."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    ema = EMA(model, decay=0.999, warmup=False)
    nn.init.constant_(model.weight, 2.0)
    for _ in range(1000):
        ema.update()
    expected = torch.full((1, 1), 2 - 0.999**1000)
    torch.testing.assert_close(ema.shadow["weight"], expected, rtol=1e-4, atol=0)
    with ema.applied():
        torch.testing.assert_close(model.weight.detach(), expected.to(dtype), rtol=0, atol=0)
    assert model.weight.item() == 2.0
    model.load_state_dict(ema.shadow)


def test_complex_parameters_are_averaged() -> None:
    model = nn.Module()
    model.wave = nn.Parameter(torch.tensor([1 + 1j]))
    ema = EMA(model, decay=0.5, warmup=False)
    with torch.no_grad():
        model.wave.zero_()
    ema.update()
    torch.testing.assert_close(ema.shadow["wave"], torch.tensor([0.5 + 0.5j]), rtol=0, atol=0)


# ---------------------------------------------------------------- applied()


def trained() -> tuple[Net, EMA]:
    model = make()
    ema = EMA(model, decay=0.9)
    for _ in train(model, 5):
        ema.update()
    return model, ema


def test_applied_swaps_in_place_and_back_to_the_bit() -> None:
    model, ema = trained()
    before, where = copies(model), [p.data_ptr() for p in model.parameters()]
    with ema.applied():
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, ema.shadow[name], rtol=0, atol=0)
        assert not torch.equal(model.first.weight, before["first.weight"])
        assert model.last.weight is model.first.weight
        assert [p.data_ptr() for p in model.parameters()] == where
    assert [p.data_ptr() for p in model.parameters()] == where
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_applied_restores_nan_and_signed_zero() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[float("nan"), -0.0]])
    ema = EMA(model, decay=0.9)
    with ema.applied():
        pass
    assert model.weight.view(torch.int32).tolist() == [[0x7FC00000, -(1 << 31)]]


def test_applied_undoes_whatever_happens_inside_even_an_exception() -> None:
    model, ema = trained()
    before, average = copies(model), {name: value.clone() for name, value in ema.shadow.items()}
    statistics = model.norm.running_mean
    with pytest.raises(KeyError), ema.applied():
        list(train(model, 2))
        model.norm.running_mean = torch.full((3,), 7.0)
        raise KeyError
    assert model.norm.running_mean is statistics
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    for name, value in ema.shadow.items():
        torch.testing.assert_close(value, average[name], rtol=0, atol=0)
    ema.update()  # free again


def test_update_and_applied_inside_of_applied_are_refused() -> None:
    _, ema = trained()
    with ema.applied():
        with pytest.raises(RuntimeError, match="would average the average"):
            ema.update()
        with pytest.raises(RuntimeError, match="applied\\(\\) is active already"), ema.applied():
            pass
    assert ema.num_updates == 5


# ---------------------------------------------------------------- state


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("warmup", [False, True])
def test_resumed_average_is_that_of_the_run_never_stopped(warmup: bool) -> None:
    model = make()
    ema = EMA(model, decay=0.9, warmup=warmup)
    for _ in train(model, 4):
        ema.update()
    state, weights = through_a_file(ema.state_dict()), copies(model)
    for _ in train(model, 4, start=4):
        ema.update()

    torch.manual_seed(1)  # another start
    other = Net()
    resumed = EMA(other, decay=0.9, warmup=warmup)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for _ in train(other, 4, start=4):
        resumed.update()
    assert resumed.num_updates == ema.num_updates == 8
    for name, value in ema.shadow.items():
        torch.testing.assert_close(resumed.shadow[name], value, rtol=0, atol=0)
    assert resumed.shadow["first.weight"] is resumed.shadow["last.weight"]


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 1.1, float("nan")])
def test_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\), got"):
        EMA(nn.Linear(1, 1), decay=decay)


def test_state_of_another_model_is_refused_and_changes_nothing() -> None:
    ema = EMA(nn.Linear(2, 2), decay=0.9)
    before = {name: value.clone() for name, value in ema.shadow.items()}
    with pytest.raises(ValueError, match=r"only one of the two has \['bias'\]"):
        ema.load_state_dict(EMA(nn.Linear(2, 2, bias=False), decay=0.9).state_dict())
    with pytest.raises(ValueError, match=r"bias has the shape \(3,\) in it, \(2,\) here"):
        ema.load_state_dict(
            {"num_updates": 1, "shadow": {"weight": torch.zeros(2, 2), "bias": torch.zeros(3)}}
        )
    for name, value in ema.shadow.items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_extra_state_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(ValueError, match="'_extra_state', which is neither a parameter nor"):
        EMA(Extra(1, 1), decay=0.9)


@pytest.mark.gpu
@needs_cuda
def test_cuda_equals_the_cpu_and_waits_for_nothing() -> None:
    cpu, gpu = make(), make().to("cuda")
    mine, theirs = EMA(gpu, decay=0.9), EMA(cpu, decay=0.9)
    for _ in zip(train(gpu, 5), train(cpu, 5), strict=True):
        torch.cuda.set_sync_debug_mode("error")
        try:
            mine.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        theirs.update()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with mine.applied():
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, value in theirs.shadow.items():
        assert mine.shadow[name].device.type == "cuda"
        torch.testing.assert_close(mine.shadow[name].cpu(), value, rtol=1e-4, atol=1e-5)
