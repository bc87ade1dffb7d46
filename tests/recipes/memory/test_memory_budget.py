"""Predicted peaks against torch's profiler, which sees every allocation of a real step."""

import copy
import gc
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

from flambeau.recipes.memory import memory_budget
from flambeau.recipes.memory.activation_checkpointing import checkpoint_modules, undo_checkpoints
from flambeau.recipes.memory.memory_budget import MemoryPlan

fit_memory_budget = partial(memory_budget.fit_memory_budget, recompute=checkpoint_modules)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def conv_block(channels: int) -> nn.Module:
    def layer() -> nn.Conv2d:
        return nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    norms = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
    return Residual(
        nn.Sequential(layer(), norms[0], nn.ReLU(inplace=True), layer(), norms[1], nn.ReLU())
    )


def mlp_block(width: int, factor: int) -> nn.Module:
    inner = factor * width
    body = (nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
    return Residual(nn.Sequential(*body))


def conv_net() -> nn.Module:
    blocks = [
        conv_block(8),
        conv_block(8),
        conv_block(8),
        nn.Conv2d(8, 16, 3, 2, 1),
        conv_block(16),
    ]
    stem = nn.Conv2d(3, 8, 3, padding=1)
    return nn.Sequential(stem, nn.Sequential(*blocks), nn.Flatten())


def transformer() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]
    return nn.Sequential(nn.Linear(16, 16), nn.Sequential(*layers))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16),
        nn.Sequential(*(mlp_block(16, f) for f in (1, 4, 2, 3))),
        nn.Linear(16, 2),
    )


BATCHES = {
    conv_net: torch.ones(4, 3, 16, 16),
    transformer: torch.ones(4, 16, 16),
    mlp: torch.ones(256, 16),
}


def momentum(parameters: list[nn.Parameter]) -> SGD:
    return SGD(parameters, momentum=0.9)


def real_peak(model: nn.Module, x: Tensor) -> int:
    """Every allocation of the second step, in order, on top of what lives between steps."""
    optimizer = momentum(list(model.parameters()))

    def step() -> None:
        output = model(x)
        output.float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    states = [s["momentum_buffer"] for s in optimizer.state.values()]
    held = [*model.parameters(), *model.buffers(), x, *states]
    return sum(t.nbytes for t in held) + max(itertools.accumulate(sizes))


@pytest.fixture(autouse=True)
def each_step_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several budgets of one model ask for the same steps on tensors without data."""
    count = memory_budget._simulate
    known: dict[Any, Any] = {}

    def remembering(model: nn.Module, *rest: Any, **more: Any) -> Any:
        names, recomputed = rest[-2:]
        key = (id(model), tuple(names), tuple(recomputed), rest[2], bool(more))
        if key not in known:
            known[key] = count(model, *rest, **more)
        return known[key]

    monkeypatch.setattr(memory_budget, "_simulate", remembering)


def fit(model: nn.Module, x: Tensor, budget: int, **settings: Any) -> MemoryPlan:
    settings = {"optimizer": momentum, **settings}
    undo_checkpoints(model)
    return fit_memory_budget(model, (x,), blocks=["1.*"], budget_bytes=budget, **settings)


def least_possible(model: nn.Module, x: Tensor, **settings: Any) -> int:
    with pytest.raises(ValueError, match="cannot be met: the least possible peak") as refused:
        fit(model, x, 1, **settings)
    return int(str(refused.value).partition("of a step is ")[2].split()[0])


@pytest.mark.parametrize("make", [conv_net, transformer, mlp])
def test_predicted_peak_is_real_and_within_the_budget(make: Any) -> None:
    model, x = make(), BATCHES[make]
    plain = fit(model, x, 10**12)
    assert plain.recomputed == ()
    assert plain.peak_bytes == plain.plain_peak_bytes == pytest.approx(real_peak(model, x), rel=0.1)
    least = least_possible(model, x)
    assert not any("forward" in module.__dict__ for module in model.modules())
    seen = [plain.peak_bytes]
    for share in (0.6, 0.25):
        budget = int(least + share * (plain.peak_bytes - least))
        plan = fit(model, x, budget)
        assert plan.peak_bytes <= budget
        assert plan.peak_bytes == pytest.approx(real_peak(model, x), rel=0.1)
        assert plan.extra_s == pytest.approx(sum(b.forward_s for b in plan.blocks if b.recomputed))
        seen.append(plan.peak_bytes)
    assert seen == sorted(set(seen), reverse=True)


def test_choice_is_the_best_of_all_subsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the 16 subsets is counted, and the cheapest that fits is what was chosen."""
    costs = {"": 1.0, "1.0": 3e-3, "1.1": 5e-3, "1.2": 2e-3, "1.3": 4e-3}
    monkeypatch.setattr(memory_budget, "_seconds", lambda *_: costs)
    model, x = mlp(), BATCHES[mlp]

    def forward(model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        output = model(*batch)
        return output, output.mean()

    names = ["1.0", "1.1", "1.2", "1.3"]
    subsets = [s for size in range(5) for s in itertools.combinations(names, size)]
    peaks = {}
    for s in subsets:
        phases = memory_budget._simulate(model, (x,), forward, SGD, checkpoint_modules, names, s)
        peaks[s] = memory_budget._peak(phases)
    assert least_possible(model, x, optimizer=SGD) == min(peaks.values())
    for budget in sorted(set(peaks.values()))[::3]:
        fitting = [s for s in subsets if peaks[s] <= budget]
        best = min(sum(costs[name] for name in s) for s in fitting)
        plan = fit(model, x, budget, optimizer=SGD)
        assert plan.extra_s == pytest.approx(best)
        assert plan.peak_bytes == peaks[plan.recomputed]


@pytest.mark.parametrize("kind", [SGD, partial(SGD, momentum=0.9), torch.optim.AdamW])
def test_the_optimizer_is_counted_once_for_all_choices(kind: Any) -> None:
    """A step with momentum to make, and one with it; every other choice takes the bytes of these."""
    num_steps = 0

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        def count(*_: object) -> None:
            nonlocal num_steps
            num_steps += 1

        made = kind(parameters, lr=0.1)
        made.register_step_post_hook(count)
        return made

    model, x = mlp(), BATCHES[mlp]
    least_possible(model, x, optimizer=optimizer)
    assert num_steps == 2
    plan = fit(model, x, 10**9, optimizer=optimizer)
    names = [block.name for block in plan.blocks]
    forward = partial(memory_budget._forward, lambda output: output.square().mean(), None)
    count = partial(memory_budget._simulate, model, (x,), forward, optimizer, checkpoint_modules)
    plain = count(names, ())
    for recomputed in (names[:1], names):
        undo_checkpoints(model)
        counted = memory_budget._peak(count(names, recomputed))
        assert memory_budget._peak(count(names, recomputed, known=plain)) == counted


def test_a_choice_that_turns_out_over_the_budget_is_replaced() -> None:
    class Choice:
        def within(self, limit: int, costs: object) -> list[str]:
            return ["a"] if limit >= 100 else ["a", "b"]

    def simulate(recomputed: list[str]) -> list[memory_budget._Phase]:
        return [memory_budget._Phase(("start", ""), 0, 110 if recomputed == ["a"] else 90)]

    fitted = memory_budget._fit(Choice(), simulate, [1.0, 1.0], 100, 200)  # type: ignore[arg-type]
    assert fitted == (["a", "b"], 90)


def test_training_equals_the_plain_model_and_statistics_count_once() -> None:
    torch.manual_seed(0)
    model, x = conv_net(), torch.randn(4, 3, 16, 16)
    plain, random = copy.deepcopy(model), torch.get_rng_state()
    plan = fit(model, x, least_possible(model, x))
    assert len(plan.recomputed) > 1
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert list(model.state_dict()) == list(plain.state_dict())
    for net in (model, plain):
        net(x).mean().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_frozen_blocks_stay_as_they_are_and_the_table_says_all() -> None:
    model, x = mlp(), BATCHES[mlp]
    model[0].requires_grad_(False)
    model[1][0].requires_grad_(False)
    plan = fit(model, x, 10**9, optimizer=SGD, autocast=torch.bfloat16)
    assert [block.name for block in plan.blocks] == ["1.1", "1.2", "1.3"]
    assert all(block.freed_bytes > 0 and block.forward_s > 0 for block in plan.blocks)
    lines = str(plan).splitlines()
    assert len(lines) == 1 + 3 + 2
    assert lines[1].split()[0] == "1.1"
    assert lines[-2].startswith("peak 0.")


def test_refused() -> None:
    model, x = mlp(), BATCHES[mlp]
    with pytest.raises(
        ValueError, match=r"'2\.\*' matches no module with a forward pass; the nearest"
    ):
        fit_memory_budget(model, (x,), blocks=["2.*"], budget_bytes=1)
    with pytest.raises(
        TypeError, match=r"blocks must be a list of patterns, got one string: \['1.*'\]"
    ):
        fit_memory_budget(model, (x,), blocks="1.*", budget_bytes=1)
    with pytest.raises(ValueError, match="no parameter of the model needs a gradient"):
        fit_memory_budget(
            copy.deepcopy(model).requires_grad_(False), (x,), blocks=["1"], budget_bytes=1
        )
    shared = nn.Linear(16, 16)
    with pytest.raises(ValueError, match="0 ran 2 times in a forward pass"):
        fit_memory_budget(nn.Sequential(shared, shared), (x,), blocks=["0"], budget_bytes=1)
    inplace = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.ReLU(True), nn.Linear(16, 16)))
    with pytest.raises(ValueError, match=r"^1 changes its input in place.* inplace=False"):
        fit_memory_budget(inplace, (x,), blocks=["1"], budget_bytes=10**9)
    assert "forward" not in inplace[1].__dict__
    model[1][2].forward = lambda x: x
    with pytest.raises(ValueError, match=r"1\.2: its forward has been replaced"):
        fit(model, x, 1)


def test_a_block_is_found_by_any_of_its_names() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = self.other = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)  # type: ignore[no-any-return]

    plan = fit_memory_budget(Named(), (BATCHES[mlp],), blocks=["other.1"], budget_bytes=10**9)
    assert [block.name for block in plan.blocks] == ["body.1"]


def test_an_exception_leaves_no_hooks() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():  # when the seconds are measured
                raise RuntimeError("out of memory")
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Failing(4, 4)))
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(model, torch.ones(2, 4), 1_000_000)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.gpu
@needs_cuda
def test_cuda_peak() -> None:
    """Of no convolutions: cuDNN takes memory of its own besides, twice as much in all with `conv_net`."""
    model, x = mlp().cuda(), torch.ones(1 << 18, 16, device="cuda")
    least = least_possible(model, x)
    plan = fit(model, x, least)
    optimizer = momentum(list(model.parameters()))
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
    assert plan.peak_bytes == pytest.approx(peak - kept, rel=0.1)
