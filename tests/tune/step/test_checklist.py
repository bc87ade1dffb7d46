"""The checklist: what is on it, what it needs, and how figures become words; no test looks at a time."""

from collections.abc import Generator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.setup.environment import usable_cpus
from flambeau.tune.step import checklist as module
from flambeau.tune.step.checklist import ChecklistItem, checklist, interleaved
from flambeau.tune.step.training_steps import Part, Steps

CPU = torch.device("cpu")


def no_step(part: Part) -> None:
    raise AssertionError("the step of a run itself is not needed")


def advised(model: nn.Module, image: Tensor, **more: Any) -> Mapping[str, ChecklistItem]:
    steps = Steps(
        no_step, model, more.pop("device", CPU), "a run", more.pop("read", None), (image,)
    )
    found = checklist(steps, computes_s=0.01, rounds=2, enough_s=60.0)
    assert found[0].name == module.BASE
    return {one.name: one for one in found[1:]}


def test_of_a_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        advice = advised(model, torch.empty(2, 3, 8, 8, device="meta"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    measured = ("channels_last", "bf16", "fused optimizer", "one thread")
    on_gpu = ("cudnn.benchmark", "pinned memory", "non_blocking")
    assert list(advice) == [*measured, *on_gpu, "del", "num_workers"]
    for name in measured:
        assert advice[name].time_s is not None and advice[name].gain is not None
        assert advice[name].verdict in ("faster", "slower", "no difference seen")
    for name in on_gpu:
        assert (advice[name].verdict, advice[name].time_s) == ("needs a GPU", None)
    assert advice["num_workers"].verdict.startswith("needs data")
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_what_convolutions_alone_need_is_not_on_the_list_of_others() -> None:
    assert "channels_last" not in advised(nn.Linear(4, 4), torch.ones(2, 4))


class Upscaled(nn.Module):
    """Its output is far larger than all that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).repeat(1, 100_000)


def test_del_is_worth_the_output_that_it_lets_go() -> None:
    size = 2 * 4 * 100_000 * 4
    large = advised(Upscaled(), torch.ones(2, 4))["del"]
    assert large.verdict.startswith(f"saves {size / 2**20:.2f} of ")
    small = advised(nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 1)), torch.ones(64, 4))
    assert small["del"].verdict.startswith("of no use: saves 0.0")


def test_workers_of_a_run() -> None:
    asked: list[int | None] = []

    def read(workers: int | None) -> Generator[Any]:
        asked.append(workers)
        while True:
            yield None

    advice = advised(nn.Linear(4, 4), torch.ones(2, 4), read=read)
    counts = {int(name.partition("=")[2]) for name in advice if name.startswith("num_workers")}
    assert counts == set(asked) and {0, 1} <= counts and max(counts) <= usable_cpus()
    step = "the step, which computes for 10 ms"
    assert advice["num_workers=0"].verdict == f"comes on top of {step}"
    assert advice["num_workers=1"].verdict == f"keeps up with {step}"


def test_what_slows_a_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds differ by much more than the two."""

    def measured(calls: Mapping[str, Any], **_: Any) -> dict[str, list[float]]:
        return {name: [2.0, 4.0, 8.0] if name == module.BASE else [1.0, 2.1, 3.9] for name in calls}

    monkeypatch.setattr(module, "interleaved", measured)
    bf16 = advised(nn.Linear(4, 4), torch.ones(2, 4))["bf16"]
    assert (bf16.verdict, bf16.time_s) == ("faster", 2.1)
    assert bf16.gain is not None and bf16.gain.times == pytest.approx(2, rel=0.01)


def test_calls_take_turns() -> None:
    seen: list[str] = []
    seconds = interleaved(
        {name: lambda name=name: seen.append(name) for name in "abc"},  # type: ignore[misc]
        device=CPU,
        rounds=4,
        enough_s=30.0,
    )
    assert [len(one) for one in seconds.values()] == [4, 4, 4] and list(seconds) == ["a", "b", "c"]
    rounds = [seen[k : k + 3] for k in range(0, len(seen), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds) and len(rounds) == 3 + 4
    assert len({tuple(one) for one in rounds}) > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2)).cuda()
    advice = advised(model, torch.ones(2, 3, 8, 8), device=torch.device("cuda"))
    for name in ("channels_last", "bf16", "cudnn.benchmark", "pinned memory", "non_blocking"):
        assert advice[name].time_s is not None
    assert not torch.backends.cudnn.benchmark
