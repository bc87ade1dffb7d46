import copy
from collections.abc import Callable, Hashable, Sequence

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.training.amp_step import AmpStep
from flambeau.recipes.training.graph_replay import GraphReplay
from flambeau.recipes.training.muon import Muon

STEPS = 40


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(missing(test))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "adam, capturable": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, capturable=True),
    "muon": lambda m: Muon(m.parameters(), matrices=[m[0].weight], lr=0.01),  # type: ignore[index,list-item]
    "muon, fixed norm": lambda m: Muon(
        m.parameters(), matrices=[m[0].weight, m[2].weight], lr=0.01, fixed_norm=True  # type: ignore[index,list-item]
    ),
    "two groups": lambda m: torch.optim.SGD(
        [{"params": [p], "lr": lr} for p, lr in zip(m.parameters(), (0.1, 0.05, 0.1, 0.01), strict=True)],
        momentum=0.9,
        nesterov=True,
        fused=True,
    ),
}  # fmt: skip


def as_it_is(device: torch.device) -> Callable[..., None]:
    def run(work: Callable[[], object], tensors: Sequence[Tensor], settings: Hashable = ()) -> None:
        work()

    return run


def test_without_a_gpu_the_work_runs_each_time() -> None:
    x = torch.zeros(3)
    replay = GraphReplay(x.device)
    for _ in range(5):
        replay(lambda: x.add_(1), [x])
    assert x.tolist() == [5, 5, 5]
    assert replay.num_replays == 0


@on_gpu
def test_the_same_addresses_are_replayed_and_others_run() -> None:
    total = torch.zeros(3, device="cuda")
    inputs = [torch.full((3,), 10.0**power, device="cuda") for power in range(3)]
    replay = GraphReplay(total.device, max_graphs=2)
    for x in (*inputs, *inputs, *inputs):
        replay(lambda x=x: total.add_(x), [total, x])
    assert total.tolist() == [333, 333, 333]
    assert (
        replay.num_replays == 4
    )  # the first two, from the second time on; a third graph is not made


@on_gpu
def test_settings_are_part_of_what_is_the_same() -> None:
    total = torch.zeros((), device="cuda")
    replay = GraphReplay(total.device)
    for factor in (1.0, 1.0, 1.0, 2.0):
        replay(lambda factor=factor: total.add_(factor), [total], factor)
    assert (float(total), replay.num_replays) == (5, 2)


@on_gpu
def test_what_cannot_be_recorded_runs_as_it_is() -> None:
    x = torch.ones((), device="cuda")
    seen = []
    replay = GraphReplay(x.device)
    for _ in range(5):
        replay(lambda: seen.append(float(x.add_(1))), [x])
    assert seen == [2, 3, 4, 5, 6]
    assert replay.num_replays == 0
    torch.randn(3, device="cuda")  # the generator still draws
    other = torch.cuda.Stream()
    reserved = []
    for _ in range(6):  # and memory that another stream has used comes back
        with torch.cuda.stream(other):
            large = torch.ones(1 << 24, device="cuda")
        large.record_stream(torch.cuda.current_stream())
        del large
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1]


def trained(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    precision: str,
    replay: Callable[..., object] | None,
) -> tuple[list[Tensor], AmpStep]:
    """The weights after some steps, one of which is not finite, with a rate that falls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    optimizer = make(model)
    first = [group["lr"] for group in optimizer.param_groups]
    amp = AmpStep(optimizer, precision=precision, max_norm=0.5, replay=replay)  # type: ignore[arg-type]
    inputs = torch.randn(STEPS, 32, 8, device="cuda")
    for step in range(STEPS):
        for group, rate in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = rate * (1 - step / STEPS)
        with amp.autocast():
            loss = model(inputs[step]).square().mean() * (float("nan") if step == 25 else 1.0)
        amp.backward(loss)
        amp.step(watch=[loss.detach().float()])
        if step == 25:
            assert float(amp.skipped) == 1
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [rate * (1 - step / STEPS) for rate in first]  # numbers, as they were set
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *state)], amp


@on_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_replayed_step_has_the_bits_of_one_that_runs(
    make: Callable[[nn.Module], torch.optim.Optimizer], precision: str
) -> None:
    expected, _ = trained(make, precision, as_it_is)
    replays: list[GraphReplay] = []

    def counted(device: torch.device) -> GraphReplay:
        replays.append(GraphReplay(device))
        return replays[0]

    got, amp = trained(make, precision, counted)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert replays[0].num_replays > STEPS // 2
    plain, _ = trained(make, precision, None)  # the rate in double precision
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert float(amp.norm) > 0


@on_gpu
def test_a_hook_of_the_optimizer_is_called_in_each_step() -> None:
    layer = nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    amp = AmpStep(optimizer, replay=GraphReplay)
    before = copy.deepcopy(layer.state_dict())
    calls = []
    for step in range(12):
        if step == 6:
            optimizer.register_step_post_hook(lambda *_: calls.append(1))
        amp.backward(layer(torch.ones(2, 4, device="cuda")).mean())
        amp.step()
    assert len(calls) == 6
    assert not torch.equal(before["weight"], layer.weight)
