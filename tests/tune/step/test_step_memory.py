"""Memory at the peak of a step: against what can be counted, and against the estimate without data."""

import pytest
import timm
import torch
from torch import nn
from torch.optim import AdamW

from flambeau.recipes.memory.memory_budget import estimate_memory
from flambeau.tune.step.step_memory import StepMemory, chrome_trace, memory_of
from flambeau.tune.step.step_profile import traced
from flambeau.tune.step.training_steps import Part, Steps, no_part, steps_of_model

CPU = torch.device("cpu")


def memory(steps: Steps) -> StepMemory:
    steps.step(no_part)
    found = memory_of(chrome_trace(traced(steps, 1)), steps)
    assert found is not None
    return found


def test_bytes_that_can_be_counted() -> None:
    """The gradients live at the peak, in which the optimizer makes its own numbers of their size."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 8))
    found = memory(steps_of_model(model, (torch.ones(64, 256),), {}, device=CPU))
    assert found.there_before == sum(4 * p.numel() for p in model.parameters())
    owned = {owner.name: owner.size_bytes for owner in found.owners}
    assert owned["backward: AddmmBackward0"] == found.there_before
    assert found.owners[0].size_bytes == max(owned.values())
    assert sum(owned.values()) == found.peak_bytes


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_the_peak_is_the_estimated_one(name: str) -> None:
    model = timm.create_model(name, **({"img_size": 64} if name.startswith("vit") else {}))
    image = torch.zeros(4, 3, 64, 64)
    found = memory(steps_of_model(model, (image,), {}, device=CPU))
    estimate = estimate_memory(model.train(), (image,), optimizer=AdamW)
    above = (
        estimate.peak - estimate.parameters - estimate.buffers - estimate.optimizer - estimate.batch
    )
    assert found.peak_bytes == pytest.approx(above, rel=0.1)


def test_modules_own_what_they_keep() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(nn.Sigmoid() for _ in range(4)))
    found = memory(steps_of_model(model, (torch.ones(4, 3, 64, 64),), {}, device=CPU))
    owned = {owner.name: owner.size_bytes for owner in found.owners}
    result = 4 * 8 * 64 * 64 * 4  # of each layer; the sigmoids keep theirs
    assert owned["1"] == owned["2"] == owned["3"] == result


def test_a_step_without_memory() -> None:
    def step(part: Part) -> None:
        with part("forward"):
            pass

    steps = Steps(step, nn.Identity(), CPU, "nothing")
    assert memory_of(chrome_trace(traced(steps, 1)), steps) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(nn.Sigmoid() for _ in range(4)))
    steps = steps_of_model(model, (torch.ones(4, 3, 64, 64),), {}, device=device)
    found = memory(steps)
    owned = {owner.name: owner.size_bytes for owner in found.owners}
    assert owned["1"] == owned["2"] == 4 * 8 * 64 * 64 * 4
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    steps.step(no_part)
    assert found.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.1)
