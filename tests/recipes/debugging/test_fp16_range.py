"""Overflow and underflow in float16, against what float16 itself does to the same values."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.debugging.fp16_range import LARGEST, SMALLEST, Fp16Range, fp16_range


def by_place(found: list[Fp16Range]) -> dict[tuple[str, str], Fp16Range]:
    return {(r.module, r.operation): r for r in found}


def test_the_limits_are_those_of_float16() -> None:
    assert torch.finfo(torch.float16).max == LARGEST
    assert torch.tensor(SMALLEST).half() > 0
    assert torch.tensor(SMALLEST / 2 * 0.999).half() == 0


class Reduce(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + x.mean()


def test_the_sum_overflows_and_the_mean_survives() -> None:
    ones = torch.ones(70_000)
    for dtype, overflowed in ((torch.float32, 0), (torch.float16, 1)):
        values = ones.to(dtype)
        found = by_place(fp16_range(Reduce(), functools.partial(Reduce(), values)))
        total, mean = found["", "aten.sum"], found["", "aten.mean"]
        assert (total.overflows, total.overflowed) == (True, overflowed)
        assert not mean.overflows
        assert mean.largest == 1.0
    assert ones.half().sum().isinf()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2))
    )


def test_the_places_of_float32_are_those_that_overflow_in_half() -> None:
    model, x = network(), torch.randn(16, 8) * 3e3
    with torch.no_grad():
        model[0].weight.mul_(100)
    in_float32 = {
        (r.module, r.operation) for r in fp16_range(model, lambda: model(x)) if r.overflows
    }
    assert in_float32 == {("0", "aten.addmm")}
    x = x.half()  # which still fits
    half = fp16_range(model.half(), lambda: model(x))
    assert {(r.module, r.operation) for r in half if r.overflowed} == in_float32
    # What takes in infinities is not to blame for its own.
    later = by_place(half)["1", "aten.native_batch_norm"]
    assert later.overflowed == 0
    assert str(half[0]).startswith("aten.addmm (float16) in '0': up to ")
    assert half[0].overflowed == int(model[0](x).isinf().sum())
    assert f"{half[0].overflowed} values overflowed" in str(half[0])


def test_autocast_is_seen_as_it_runs() -> None:
    model, x = network(), torch.randn(16, 8)

    def work() -> None:
        with torch.autocast("cpu", torch.float16):
            model(x)

    dtypes = {(r.module, r.operation): r.dtype for r in fp16_range(model, work)}
    assert dtypes["0", "aten.addmm"] is torch.float16
    assert dtypes["2.0", "aten.relu"] is torch.float16


def backward(model: nn.Module, x: Tensor, scale: float) -> None:
    (model(x).sum() * scale).backward()


def test_gradients_that_a_loss_scale_would_save() -> None:
    model, x = network().eval(), torch.randn(16, 8)
    scale = 1e-8

    def lost(scale: float) -> tuple[int, int]:
        found = fp16_range(model, functools.partial(backward, model, x, scale))
        steps = [r for r in found if r.module == "backward"]
        assert steps
        return sum(r.num_lost for r in steps), sum(r.num_values for r in steps)

    tiny, total = lost(scale)
    assert tiny > total / 2
    assert lost(scale * 65536)[0] == 0
    # Against float16 itself, for one of the gradients.
    model.zero_grad()
    backward(model, x, scale)
    gradient = model[2][1].bias.grad
    found = by_place(fp16_range(model, gradient.clone))["", "aten.clone"]
    assert found.num_lost == int(((gradient != 0) & (gradient.half() == 0)).sum())


@pytest.mark.parametrize(
    "fill",
    [
        lambda x, mask: x.masked_fill(mask, -torch.inf),
        lambda x, mask: x + torch.full_like(x, -torch.inf).triu(1),
        lambda x, mask: torch.where(mask, -torch.inf, x),
        lambda x, mask: x.clone().index_put_((mask,), torch.tensor(-torch.inf)),
        lambda x, mask: x.clone().fill_(torch.nan),
    ],
)
def test_a_mask_of_infinity_is_no_overflow_and_a_true_one_stays(fill: Any) -> None:
    x, mask = torch.randn(4, 4), torch.eye(4, dtype=torch.bool)
    found = fp16_range(nn.Identity(), lambda: fill(x, mask).softmax(-1))
    assert [r for r in found if r.overflows] == []
    large = torch.full((4, 4), 300.0).half()
    found = fp16_range(nn.Identity(), lambda: fill(large * large, mask))
    assert [r.operation for r in found if r.overflows] == ["aten.mul"]


def test_the_lowest_number_as_a_mask() -> None:
    x, mask = torch.full((4, 4), -20.0), torch.eye(4, dtype=torch.bool)
    (first, *_) = fp16_range(
        x_model := nn.Identity(), lambda: x.masked_fill(mask, torch.finfo(x.dtype).min)
    )
    assert first.overflows and first.largest == torch.finfo(torch.float32).max
    half = x.half()
    lowest = torch.finfo(half.dtype).min
    assert not any(r.overflows for r in fp16_range(x_model, lambda: half.masked_fill(mask, lowest)))
    (first, *_) = fp16_range(
        x_model, lambda: half + torch.zeros_like(half).masked_fill(mask, lowest)
    )
    assert (first.operation, first.overflowed) == ("aten.add", 4)


def test_nothing_stays_behind_also_after_an_error() -> None:
    model, x = network().eval(), torch.randn(4, 8)
    expected = model(x)

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fp16_range(both := nn.Sequential(model, Fails()), lambda: both(x))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in both.modules())
    assert torch.equal(model(x), expected)
    assert fp16_range(model, lambda: None) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_backward_on_a_gpu_is_seen() -> None:
    model, x = network().cuda(), torch.randn(16, 8, device="cuda")
    found = fp16_range(model, functools.partial(backward, model, x, 1e-9))
    assert any(r.module == "backward" and r.num_lost for r in found)
