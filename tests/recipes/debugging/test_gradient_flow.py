"""Gradients and updates against what each step held, and steps that may not ask the device for a value."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.debugging.gradient_flow import (
    Gradient,
    GradientWatch,
    gradient_table,
    plot_gradients,
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_means_and_updates_of_several_steps(kind: Any) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=1e-2)
    gradients: list[Tensor] = []
    moved = weights = 0.0
    with GradientWatch(model, optimizer, updates=True) as watch:
        for _ in range(4):
            old = model[2].weight.detach().clone()
            step(model, optimizer, torch.randn(3, 4))
            gradients.append(model[2].weight.grad.clone())
            moved += float((model[2].weight.detach() - old).square().sum())
            weights += float(old.square().sum())
    found = watch.read()
    assert [g.name for g in found] == [name for name, _ in model.named_parameters()]
    seen = found[2]
    assert seen.steps == 4
    assert seen.mean == pytest.approx(float(torch.stack(gradients).abs().mean()), rel=1e-5)
    assert seen.largest == pytest.approx(float(torch.stack(gradients).abs().max()))
    assert seen.update_ratio == pytest.approx(math.sqrt(moved / weights), rel=1e-3)
    assert watch.read() == []


def test_hooks_go_and_the_training_is_the_same() -> None:
    weights = []
    for watched in (False, True):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        if watched:
            with GradientWatch(model, optimizer, updates=True) as watch:
                step(model, optimizer, torch.randn(3, 4))
            step(model, optimizer, torch.randn(3, 4))
            assert {g.steps for g in watch.read()} == {1}
        else:
            step(model, optimizer, torch.randn(3, 4))
            step(model, optimizer, torch.randn(3, 4))
        weights.append(model[0].weight)
    assert torch.equal(*weights)


def test_what_has_no_gradient_is_left_out() -> None:
    model = nn.ModuleDict({"sparse": nn.Embedding(5, 2, sparse=True), "head": nn.Linear(2, 1)})
    model["head"].bias.requires_grad_(False)
    with GradientWatch(model) as watch:
        model["head"](model["sparse"](torch.tensor([1, 3]))).sum().backward()
        watch.record()
        watch.record(scale=torch.tensor(2.0))
    (found,) = watch.read()
    assert (found.name, found.steps, found.update_ratio) == ("head.weight", 2, None)
    assert model["head"].weight.grad is not None
    assert found.mean == pytest.approx(float(model["head"].weight.grad.abs().mean()) * 0.75)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_loss_shows_the_gradients_that_are_used(fused: bool) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with GradientWatch(model, optimizer) as watch:
        scaler.scale(model(torch.tensor([[1.0, -3.0]])).sum()).backward()
        scaler.step(optimizer)
    (found,) = watch.read()
    assert (found.mean, found.largest) == (2.0, 3.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_shows_after_good_ones(bad: float) -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    with GradientWatch(model) as watch:
        for value in (1.0, bad, 1.0):
            model.bias.grad = torch.tensor([value, 1.0], dtype=torch.bfloat16)
            watch.record()
    (found,) = watch.read()
    assert not math.isfinite(found.mean)
    assert not math.isfinite(found.largest)


def test_weights_of_zero_have_no_ratio() -> None:
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientWatch(model, optimizer, updates=True) as watch:
        step(model, optimizer, torch.ones(1, 2))
    weight, bias = watch.read()
    assert weight.update_ratio is not None
    assert bias.update_ratio is None
    assert gradient_table([weight, bias]).splitlines()[2].endswith(" -")


def test_a_step_asks_the_device_for_no_value() -> None:
    model = net().to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientWatch(model, optimizer, updates=True) as watch:
        for _ in range(3):
            step(model, optimizer, torch.ones(3, 4, device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        watch.read()


def test_ranks_see_the_reduced_gradients(start_ranks: Any) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

    def work() -> list[Gradient]:
        model = nn.parallel.DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with GradientWatch(model.module, optimizer) as watch:
            mine = x[torch.distributed.get_rank() :: 2]
            model(mine).square().mean().backward()
            optimizer.step()
        return watch.read()

    whole = net()
    with GradientWatch(whole) as watch:
        whole(x).square().mean().backward()
        watch.record()
    expected = [(g.name, pytest.approx(g.mean), pytest.approx(g.largest)) for g in watch.read()]
    for found in start_ranks(2, work, group=True).results():
        assert [(g.name, g.mean, g.largest) for g in found] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_synchronisation_on_cuda() -> None:
    model, x = net().to("cuda"), torch.ones(3, 4, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with GradientWatch(model, optimizer, updates=True) as watch:
        step(model, optimizer, x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(model, optimizer, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert {g.steps for g in watch.read()} == {2}


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_picture(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientWatch(model, optimizer) as watch:
        step(model, optimizer, torch.ones(3, 4))
    found, path = watch.read(), tmp_path / f"flow.{ending}"
    plot_gradients(found, path)
    before = path.read_bytes()
    assert len(before) > 1000
    with pytest.raises(FileExistsError, match=r"flow.* exists; choose another name"):
        plot_gradients(found, path)
    assert path.read_bytes() == before


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="updates=True needs the optimizer"):
        GradientWatch(model, updates=True)
    with GradientWatch(model) as watch:
        model(torch.ones(1, 2)).sum().backward()
        watch.record()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match="the picture needs matplotlib: pip install matplotlib"):
        plot_gradients(watch.read(), tmp_path / "flow.png")


@pytest.mark.parametrize("size", [1e-5, 10.0])  # the squares of these norms are no float16
def test_update_ratio_of_a_float16_model(size: float) -> None:
    model = nn.Linear(64, 64, bias=False).half()
    nn.init.constant_(model.weight, size)
    before = model.weight.detach().double()
    model.weight.grad = torch.full_like(model.weight, size / 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with GradientWatch(model, optimizer, updates=True) as watch:
        optimizer.step()
    expected = (model.weight.detach().double() - before).norm() / before.norm()
    assert watch.read()[0].update_ratio == pytest.approx(float(expected), rel=1e-3)
