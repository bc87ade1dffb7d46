"""Statistics against those of all outputs concatenated, and steps that may not ask the device for a value."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from flambeau.recipes.debugging.activation_watch import ActivationWatch, activation_table


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 5)
    )  # fmt: skip


def kept_outputs(model: nn.Sequential, batches: list[Tensor]) -> list[Tensor]:
    """What each module gives, concatenated; copied before the next changes it in place."""
    outputs: list[list[Tensor]] = [[] for _ in model]
    for batch in batches:
        x = batch
        for module, rows in zip(model, outputs, strict=True):
            x = module(x)
            rows.append(x.detach().clone())
    return [torch.cat(rows) for rows in outputs]


def batches_of(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 3, 8, 8, generator=generator) + 100 for size in sizes]


def test_the_statistics_of_several_batches_are_those_of_all_their_values() -> None:
    model, batches = net(), batches_of(4, 7, 1)
    with torch.no_grad():
        model[1].bias[2] = -9  # always below zero
        model[1].bias[5] = -2  # seldom above
    expected = kept_outputs(model, batches)
    with ActivationWatch(model) as watch:
        for x in batches:
            model(x)
    found = watch.read()
    assert [(a.name, a.kind, a.calls) for a in found] == [
        (str(i), type(m).__name__, 3) for i, m in enumerate(model)
    ]
    for activation, y in zip(found, expected, strict=True):
        assert activation.mean == pytest.approx(float(y.double().mean()), rel=1e-4, abs=1e-6)
        assert activation.std == pytest.approx(float(y.double().std(correction=0)), rel=1e-4)
        assert activation.zeros == pytest.approx(float(y.eq(0).double().mean()))
        dead = y.transpose(0, 1).flatten(1).eq(0).all(1)
        assert (activation.num_units, activation.dead) == (len(dead), int(dead.sum()))
    assert found[2].dead == 1
    assert watch.read() == []  # a new beginning


def test_each_read_begins_anew_and_the_hooks_go() -> None:
    model = nn.Sequential(nn.ReLU())
    with ActivationWatch(model) as watch:
        model(torch.tensor([[1.0, -1.0]]))
        assert watch.read()[0].dead == 1
        model(torch.tensor([[-1.0, 1.0]]))
        assert watch.read()[0].dead == 1
        model(torch.tensor([[1.0, -1.0]]))
        model(torch.tensor([[-1.0, 1.0]]))
        assert watch.read()[0].dead == 0
    assert not any(m._forward_hooks for m in model.modules())
    model(torch.ones(1, 2))
    assert watch.read() == []
    with pytest.raises(KeyError), watch:
        raise KeyError("mine")
    assert not any(m._forward_hooks for m in model.modules())


def test_nan_and_infinity_are_counted_and_do_not_stop_anything() -> None:
    model = nn.Sequential(nn.Identity())
    with ActivationWatch(model) as watch:
        model(torch.tensor([[1.0, math.nan], [math.inf, 0.0]]))
    (found,) = watch.read()
    assert (found.not_finite, found.zeros, found.dead) == (2, 0.25, 0)
    assert math.isnan(found.mean)
    assert "nan" in activation_table([found])


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_modes_may_change_between_two_batches(mode: type[AbstractContextManager[Any]]) -> None:
    model, (x,) = net(), batches_of(4)
    with ActivationWatch(model) as watch:
        with mode():
            model(x)
        model(x).sum().backward()
        with mode(), torch.autocast("cpu", torch.bfloat16):
            model(x)
    assert [a.calls for a in watch.read()] == [3] * 5
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.full((300, 300), 300.0, dtype=dtype)  # their sum is beyond float16
    x[:150] = 100
    with ActivationWatch(model) as watch:
        model(x)
    (found,) = watch.read()
    assert (found.mean, found.std) == (pytest.approx(200), pytest.approx(100))


def test_modules_called_twice_shared_or_with_several_outputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.lstm = nn.ReLU(), nn.LSTM(3, 4, batch_first=True)
            self.both, self.tokens = nn.Identity(), nn.Embedding(5, 3)

        def forward(self, indices: Tensor) -> Any:
            x = self.tokens(indices)
            x, _ = self.lstm(self.relu(x))
            return self.both({"count": indices, "values": self.relu(x)})

    model = Model()
    with ActivationWatch(model) as watch:
        model(torch.randint(5, (2, 7)))
        model(torch.randint(5, (0, 7)))  # nothing in it
    found = {a.name: a for a in watch.read()}
    assert {name: (a.calls, a.num_units) for name, a in found.items()} == {
        "tokens": (1, 3), "relu": (2, 0), "lstm": (1, 4), "both": (1, 4)
    }  # fmt: skip
    assert found["both"].mean >= 0


@pytest.mark.parametrize(
    ("shape", "module", "unit_dim", "num_units"),
    [
        ((2, 3), nn.Identity(), None, 3), ((2, 3, 4), nn.Identity(), None, 4),
        ((2, 3, 4), nn.Identity(), 1, 3), ((2, 3, 4), nn.Conv1d(3, 6, 1), None, 6),
        ((2, 3, 4, 5), nn.Identity(), None, 3), ((2, 3, 4, 5), nn.Identity(), -1, 5),
        ((2, 3), nn.Identity(), 3, 0), ((2,), nn.Identity(), None, 0), ((), nn.Identity(), None, 0),
    ],
)  # fmt: skip
def test_where_units_are(
    shape: tuple[int, ...], module: nn.Module, unit_dim: int | None, num_units: int
) -> None:
    with ActivationWatch(module, unit_dim=unit_dim) as watch:
        module(torch.zeros(shape))
    (found,) = watch.read()
    assert found.num_units == num_units
    if not isinstance(module, nn.Conv1d):
        assert (found.dead, found.zeros) == (num_units, 1)


def test_a_step_asks_the_device_for_no_value() -> None:
    """On the meta device, which has none, `.item()` and its like raise; and so does the read."""
    model, x = net().to("meta"), torch.zeros(4, 3, 8, 8, device="meta")
    with ActivationWatch(model) as watch:
        for _ in range(3):
            model(x).sum().backward()
    with pytest.raises(RuntimeError, match="meta"):
        watch.read()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_synchronisation_on_cuda() -> None:
    model, x = net().to("cuda"), batches_of(4)[0].to("cuda")
    with ActivationWatch(model) as watch:
        model(x).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [a.calls for a in watch.read()] == [2] * 5


def test_chosen_modules_and_refusals() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    with ActivationWatch(model, modules=["0", "1"]) as watch:
        model(torch.randn(3, 2))
    found = watch.read()
    assert [(a.name, a.kind) for a in found] == [("0", "Sequential"), ("1", "Linear")]
    assert len(activation_table(found).splitlines()) == 3
    with pytest.raises(ValueError, match=r"modules: 'head\*' matches none of \['', '0',"):
        ActivationWatch(model, modules=["head*"])
    with pytest.raises(TypeError, match="modules is a list of patterns, got the string '0'"):
        ActivationWatch(model, modules="0")


def test_the_training_is_the_same_with_and_without() -> None:
    model, (x,) = net(), batches_of(4)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    again = net()
    with ActivationWatch(again):
        again(x).sum().backward()
    assert_close([p.grad for p in again.parameters()], expected, rtol=0, atol=0)


@pytest.mark.parametrize("modules", [["second"], ["second", "first"], ["*"]])
def test_one_module_under_two_names(modules: list[str]) -> None:
    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"first": layer, "second": layer})
    with ActivationWatch(model, modules=modules) as watch:
        model["second"](torch.ones(1, 2))
    expected = ["second"] if modules == ["second"] else ["first"]
    assert [(a.name, a.calls) for a in watch.read()] == [(name, 1) for name in expected]
