"""Estimates against torch's profiler, which sees every allocation of a real step, and saved_tensors_hooks."""

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Muon
from torch.profiler import ProfilerActivity, profile

from flambeau.recipes.memory.memory_budget import (
    activations_by_module,
    estimate_memory,
    top_modules,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.convs(x))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(Block(8) for _ in range(4)),
        nn.Flatten(),
        nn.Linear(2048, 3),
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


BATCHES = {conv_net: torch.ones(4, 3, 16, 16), transformer: torch.ones(4, 16, 16)}


def muon_and_adamw(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = [p for p in parameters if p.ndim == 2]
    return [Muon(matrices), AdamW([p for p in parameters if p.ndim != 2])]


def momentum(parameters: list[nn.Parameter]) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9)


def real_peak(model: nn.Module, x: Tensor, make: Callable[..., Any], **autocast: Any) -> int:
    """Every allocation of the second step, in order, on top of what lives between steps."""
    made = make(list(model.parameters()))
    optimizers = made if isinstance(made, list) else [made]

    def step() -> None:
        with torch.autocast("cpu", enabled=bool(autocast), **autocast):
            output = model(x)
            loss = output.float().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step()
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    states = [t for optimizer in optimizers for s in optimizer.state.values() for t in s.values()]
    held = [*model.parameters(), *model.buffers(), x, *(t for t in states if isinstance(t, Tensor))]
    return sum(t.nbytes for t in held) + max(itertools.accumulate(sizes))


@pytest.mark.parametrize(
    ("make", "optimizer", "autocast"),
    [
        (conv_net, AdamW, {}),
        (conv_net, muon_and_adamw, {}),
        (transformer, SGD, {}),
        (transformer, Adam, {"dtype": torch.bfloat16}),
    ],
)
def test_peak_is_that_of_a_real_step(make: Any, optimizer: Any, autocast: dict[str, Any]) -> None:
    x = BATCHES[make]
    model = make()
    estimate = estimate_memory(model, (x,), optimizer=optimizer, autocast=autocast.get("dtype"))
    assert estimate.peak == pytest.approx(real_peak(model, x, optimizer, **autocast), rel=0.1)


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """What the graph holds: every storage once, without parameters, buffers and input."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    saved[output.untyped_storage().data_ptr()] = output.detach()
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in known)


@pytest.mark.parametrize("make", [conv_net, transformer])
def test_categories_are_counted_exactly(make: Any) -> None:
    x = BATCHES[make]
    model = make()
    next(model.parameters()).requires_grad_(False)
    estimate = estimate_memory(model, (x,), optimizer=momentum)
    trainable = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert estimate.parameters == sum(p.nbytes for p in model.parameters())
    assert estimate.buffers == sum(b.nbytes for b in model.buffers())
    assert estimate.gradients == estimate.optimizer == trainable
    assert estimate.batch == x.nbytes
    scalars = 8  # the loss, and the stack of the default loss
    assert 0 <= estimate.activations - saved_bytes(model, x) <= scalars


def test_meta_and_half_precision_and_ties() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    x = torch.ones(4, 8)
    plain = estimate_memory(model, (x,), optimizer=Adam)
    assert plain.parameters == plain.gradients == 8 * 8 * 4
    assert plain.optimizer == 2 * plain.parameters + 4  # two averages, one step count
    on_meta = copy.deepcopy(model).to("meta")
    on_meta[2].weight = on_meta[0].weight  # `to("meta")` unties
    assert estimate_memory(on_meta, (x.to("meta"),), optimizer=Adam) == plain
    half = estimate_memory(model.bfloat16(), (x.bfloat16(),), optimizer=SGD)
    assert half.parameters == plain.parameters // 2


def test_nothing_is_allocated_and_nothing_changed() -> None:
    """A model of 4 TB on this machine; and a real one keeps statistics, gradients, random numbers."""
    with torch.device("meta"):
        huge = nn.Linear(1_000_000, 1_000_000, bias=False)
    estimate = estimate_memory(huge, (torch.empty(1, 1_000_000, device="meta"),), optimizer=SGD)
    assert estimate.peak > 8e12
    model = conv_net()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    estimate_memory(model, (BATCHES[conv_net],))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_loss_with_real_targets() -> None:
    """Cross entropy keeps the log-probabilities; the logits live as the output."""
    model, targets = nn.Linear(4, 100, bias=False), torch.randint(100, (32,))
    estimate = estimate_memory(
        model, (torch.ones(32, 4),), loss=lambda output: F.cross_entropy(output, targets)
    )
    both = 2 * 32 * 100 * 4
    assert both <= estimate.activations <= both + targets.nbytes + 8


def test_table() -> None:
    estimate = estimate_memory(nn.Linear(1024, 1024, bias=False), (torch.ones(1, 1024),))
    lines = str(estimate).splitlines()
    assert lines[0].split() == ["parameters", "4.00", "MiB"]
    assert [line.split()[0] for line in lines][-1] == "peak"


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * x.sum().item())


def test_refused() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match="no parameter of the model needs a gradient"):
        estimate_memory(nn.ReLU(), (x,))
    with pytest.raises(ValueError, match=r"must be a scalar, got the shape \(2, 2\)"):
        estimate_memory(nn.Linear(2, 2), (x,), loss=lambda output: output)
    with pytest.raises(ValueError, match="reads values of a tensor"):
        estimate_memory(Reads(2, 2), (x,))


@pytest.mark.gpu
@needs_cuda
def test_cuda_peak() -> None:
    model, x = conv_net().cuda(), torch.ones(4096, 3, 16, 16, device="cuda")
    estimate = estimate_memory(model, (x,))
    optimizer = AdamW(model.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        output = model(x)
        output.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    del model, optimizer, x, output
    gc.collect()
    kept = torch.cuda.memory_allocated()  # of other tests, and cuBLAS's workspace
    assert estimate.peak == pytest.approx(peak - kept, rel=0.1)


# ---------------------------------------------------------------- by module


def tanh_block(inputs: int, outputs: int) -> nn.Module:
    """Keeps its output alone: what Tanh gives; the input of its Linear is kept by whoever made it."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


class Twice(nn.Module):
    """A list of blocks, of which the second runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([tanh_block(64, 32), tanh_block(32, 32), tanh_block(32, 16)])

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return third(second(second(first(x.sin()))))


def test_each_module_keeps_what_its_formula_says() -> None:
    kept = activations_by_module(Twice(), (torch.empty(1000, 64),))
    expected = {"": 64, "blocks.0": 32, "blocks.1": 2 * 32, "blocks.2": 16}
    assert kept.keys() == expected.keys()
    for name, features in expected.items():
        assert abs(kept[name] - features * 1000 * 4) < 64, name  # the loss is a number or two


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_the_modules_together_are_the_estimate(autocast: torch.dtype | None) -> None:
    model, batch = (
        nn.Sequential(Block(8), Block(8), nn.Conv2d(8, 4, 1)),
        (torch.empty(4, 8, 16, 16),),
    )
    kept = activations_by_module(model, batch, autocast=autocast)
    assert sum(kept.values()) == estimate_memory(model, batch, autocast=autocast).activations
    assert all(p.grad is None for p in model.parameters())


def test_the_outermost_modules_that_run() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.ReLU()]), nn.Sequential(nn.ReLU()))
    assert top_modules(inner) == ["0", "1.0", "2"]
    assert top_modules(nn.Sequential(nn.Sequential(inner))) == ["0.0.0", "0.0.1.0", "0.0.2"]
    assert top_modules(nn.Linear(2, 2)) == []


def test_a_model_that_trains_nothing_has_no_step() -> None:
    with pytest.raises(ValueError, match="no parameter of the model needs a gradient"):
        activations_by_module(nn.ReLU(), (torch.empty(2, 2),))
