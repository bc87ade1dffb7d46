"""The profile of a step: who is in it and how often; no test looks at a time but for its sign."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.errors import InputError
from flambeau.tune.step.step_profile import profile_steps
from flambeau.tune.step.training_steps import Part, Steps, steps_of_model

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm, self.never = nn.BatchNorm2d(8), nn.Linear(3, 3)
        self.inside = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.inside(self.norm(own_function(self.second(self.first(x)))))}


def own_function(x: Tensor) -> Tensor:
    return x * 2


@pytest.fixture(scope="module")
def steps() -> Steps:
    model = Net()
    model(torch.zeros(2, 3, 12, 12))
    return steps_of_model(model, (torch.empty(2, 3, 12, 12, device="meta"),), {}, device=CPU)


def test_everything_that_takes_part_is_there(steps: Steps, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    found = profile_steps(steps, trace=trace)
    assert [part.name for part in found.parts] == ["forward", "backward", "optimizer"]
    for part in (found.step, *found.parts):
        assert 0 < part.low_s <= part.median_s <= part.high_s
    calls = {one.name: one.calls for one in found.operations}
    assert calls["aten::convolution_backward"] == 2
    assert calls["aten::native_batch_norm"] == 1
    assert sum(one.share for one in found.operations) == pytest.approx(1)
    modules = {one.name: one for one in found.modules}
    called = {name for name, _ in steps.model.named_modules()} - {"never"}
    assert set(modules) == called
    assert modules["first"].kind == "Conv2d"
    assert modules["first"].backward_s > 0 and modules["first"].forward_s > 0
    assert modules["inside"].backward_s == 0  # all of it is in its parts
    (own,) = (one for one in found.functions if one.name == "own_function")
    assert (own.calls, own.file) == (1, __file__)
    assert found.read_s is None
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = Counter(event.get("name") for event in events)
    assert names["module first"] == names["forward"] == 3  # of three steps
    assert not any(module._forward_hooks for module in steps.model.modules())


def test_backward_time_belongs_to_the_module_whose_operation_it_is() -> None:
    """Nothing but one module has a gradient: all of the backward pass is its."""
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    found = profile_steps(steps_of_model(model, (torch.ones(2, 4),), {}, device=CPU))
    assert {one.name for one in found.modules if one.backward_s > 0} == {"1"}


def test_data_are_read_alone_too() -> None:
    read: list[int] = []

    def batches(workers: int | None) -> Any:
        assert workers is None
        while True:
            read.append(1)
            yield None

    def step(part: Part) -> None:
        with part("forward"):
            torch.ones(3).sum()

    found = profile_steps(Steps(step, nn.Identity(), CPU, "nothing", batches))
    assert found.read_s is not None and len(read) == 21
    assert found.steps == 20 and found.waits_s == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    """Time of kernels, none of it twice."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    steps = steps_of_model(model, (torch.ones(8, 3, 64, 64),), {}, device=torch.device("cuda"))
    found = profile_steps(steps)
    calls = {one.name: one.calls for one in found.operations}
    assert calls["aten::convolution_backward"] == 2
    expected = ("aten::", "autograd::", "Optimizer")
    others = [one for one in found.operations if not one.name.startswith(expected)]
    assert not others, others
    modules = {one.name: one for one in found.modules}
    assert all(modules[name].forward_s > 0 and modules[name].backward_s > 0 for name in "02")
    of_modules = sum(one.total_s for one in found.modules)
    assert 0 < of_modules <= sum(one.self_s for one in found.operations) * 1.01


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (nn.Linear(4, 4), (2, 5), r"a training step of Linear fails: RuntimeError: .*shapes"),
        (nn.Linear(4, 4).requires_grad_(False), (2, 4), "no parameter of the model needs a gradient"),
        (nn.BatchNorm1d(4), (1, 4), "Expected more than 1 value per channel when training"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained(model: nn.Module, given: tuple[int, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        steps_of_model(model, (torch.ones(given),), {}, device=CPU)
