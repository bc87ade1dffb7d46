"""The checklist: what is on it, what it needs, and how figures become words; no test looks at a time."""

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.inspection.timing import checklist as module
from flambeau.inspection.timing.checklist import Advice, checklist
from flambeau.inspection.timing.training_steps import Part, Steps
from flambeau.recipes.setup.environment import usable_cpus

CPU = torch.device("cpu")


def named(advice: tuple[Advice, ...]) -> dict[str, Advice]:
    return {one.name: one for one in advice}


def test_of_a_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    image = torch.empty(2, 3, 8, 8, device="meta")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = checklist(model, (image,), {}, device=CPU, rounds=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    advice = named(found.advice)
    assert list(advice) == [
        "channels_last", "bf16", "fused optimizer", "one thread",
        "cudnn.benchmark", "pinned memory", "non_blocking", "del", "num_workers",
    ]  # fmt: skip
    for name in ("channels_last", "bf16", "fused optimizer", "one thread"):
        assert advice[name].time is not None and advice[name].times is not None
        assert advice[name].verdict in ("faster", "slower", "no difference seen")
    for name in ("cudnn.benchmark", "pinned memory", "non_blocking"):
        assert (advice[name].verdict, advice[name].time) == ("needs a GPU", None)
    assert advice["num_workers"].verdict.startswith("needs data")
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_what_convolutions_alone_need_is_not_on_the_list_of_others() -> None:
    found = checklist(nn.Linear(4, 4), (torch.ones(2, 4),), {}, device=CPU, rounds=2)
    assert "channels_last" not in named(found.advice)


class Upscaled(nn.Module):
    """Its output is far larger than all that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).repeat(1, 100_000)


def test_del_is_worth_the_output_that_it_lets_go() -> None:
    found = checklist(Upscaled(), (torch.ones(2, 4),), {}, device=CPU, rounds=2)
    large = named(found.advice)["del"]
    size = 2 * 4 * 100_000 * 4
    assert large.times is not None and 0.4 < large.times < 0.8
    assert f"saves {size / 2**20:.2f} of " in large.verdict
    small = checklist(
        nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 1)), (torch.ones(64, 4),), {}, device=CPU, rounds=2
    )  # fmt: skip
    assert named(small.advice)["del"].verdict.startswith("of no use: saves 0.0")


def test_workers_of_a_run() -> None:
    asked: list[int | None] = []

    def read(workers: int | None) -> Generator[Any]:
        asked.append(workers)
        while True:
            yield None

    def step(part: Part) -> None:
        with part("wait for data"):
            pass
        with part("forward"):
            torch.ones(10).sum()

    run = Steps(step, nn.Linear(4, 4), CPU, "a run", read)
    advice = named(
        checklist(nn.Linear(4, 4), (torch.ones(2, 4),), {}, device=CPU, run=run, rounds=2).advice
    )
    counts = {int(name.partition("=")[2]) for name in advice if name.startswith("num_workers")}
    assert counts == set(asked) and {0, 1} <= counts and max(counts) <= usable_cpus()
    assert advice["num_workers=0"].verdict.startswith(
        "comes on top of the step, which computes for "
    )
    assert advice["num_workers=0"].times == 1


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ([1.0, 2.0, 4.0], "faster"),
        ([4.0, 8.0, 16.0], "slower"),
        ([2.0, 4.0, 8.0], "no difference seen"),
        ([1.0, 4.5, 20.0], "no difference seen"),
        ([1.99, 3.98, 7.96], "no difference seen"),
    ],
)
def test_verdicts(seconds: list[float], verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared round by round: rounds differ by much more than the two."""
    monkeypatch.setattr(
        module, "interleaved",
        lambda calls, **_: {name: [2.0, 4.0, 8.0] if name == module.BASE else seconds for name in calls},
    )  # fmt: skip
    found = checklist(nn.Linear(4, 4), (torch.ones(2, 4),), {}, device=CPU)
    assert named(found.advice)["bf16"].verdict == verdict


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    found = checklist(model, (torch.ones(2, 3, 8, 8),), {}, device=torch.device("cuda"), rounds=2)
    advice = named(found.advice)
    for name in ("channels_last", "bf16", "cudnn.benchmark", "pinned memory", "non_blocking"):
        assert advice[name].time is not None
    assert not torch.backends.cudnn.benchmark
