"""The memory of a step over its time: against what can be counted, and against the estimate without data."""

import xml.etree.ElementTree as ElementTree

import pytest
import timm
import torch
from torch import nn
from torch.optim import AdamW

from flambeau.errors import InputError
from flambeau.inspection.timing.memory_picture import svg_of_memory
from flambeau.inspection.timing.memory_timeline import memory_timeline
from flambeau.inspection.timing.step_profile import no_part
from flambeau.inspection.timing.training_steps import Part, Steps, steps_of_model
from flambeau.recipes.memory.memory_budget import estimate_memory

CPU = torch.device("cpu")


def test_bytes_that_can_be_counted() -> None:
    """What ReLU and the first layer keep of the forward pass, and then the gradients."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 8))
    found = memory_timeline(steps_of_model(model, (torch.ones(64, 256),), {}, device=CPU))
    assert found.there_before == sum(4 * p.numel() for p in model.parameters())
    assert [part.name for part in found.parts] == ["forward", "backward", "optimizer"]
    forward, backward, optimizer = found.parts
    hidden = 64 * 1024 * 4
    kept = max(size for at, size in found.samples if at <= forward.end_s)
    assert 2 * hidden <= kept < 2 * hidden + 10_000
    after_backward = [size for at, size in found.samples if at <= optimizer.start_s][-1]
    assert found.there_before <= after_backward < found.there_before + 10_000
    assert abs(found.samples[-1][1]) < 10_000  # zero_grad has let go of the gradients
    assert found.peak_bytes == max(size for _, size in found.samples)
    assert sum(owner.size_bytes for owner in found.owners) == found.peak_bytes
    assert backward.start_s <= found.peak_s <= optimizer.end_s
    assert [at for at, _ in found.samples] == sorted(at for at, _ in found.samples)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_the_peak_is_the_estimated_one(name: str) -> None:
    model = timm.create_model(name, **({"img_size": 64} if name.startswith("vit") else {}))
    image = torch.zeros(4, 3, 64, 64)
    found = memory_timeline(steps_of_model(model, (image,), {}, device=CPU))
    estimate = estimate_memory(model.train(), (image,), optimizer=AdamW)
    above = (
        estimate.peak - estimate.parameters - estimate.buffers - estimate.optimizer - estimate.batch
    )
    assert found.peak_bytes == pytest.approx(above, rel=0.1)


def test_modules_own_what_they_keep() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(nn.Sigmoid() for _ in range(4)))
    found = memory_timeline(steps_of_model(model, (torch.ones(4, 3, 64, 64),), {}, device=CPU))
    owned = {owner.name: owner.size_bytes for owner in found.owners}
    result = 4 * 8 * 64 * 64 * 4  # of each layer; the sigmoids keep theirs
    assert owned["1"] == owned["2"] == owned["3"] == result


def test_a_step_without_memory() -> None:
    def step(part: Part) -> None:
        with part("forward"):
            pass

    with pytest.raises(InputError, match="reports no memory of the device cpu"):
        memory_timeline(Steps(step, nn.Identity(), CPU, "nothing"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(nn.Sigmoid() for _ in range(4)))
    steps = steps_of_model(model, (torch.ones(4, 3, 64, 64),), {}, device=device)
    found = memory_timeline(steps)
    owned = {owner.name: owner.size_bytes for owner in found.owners}
    assert owned["1"] == owned["2"] == 4 * 8 * 64 * 64 * 4
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    steps.step(no_part)
    assert found.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.1)


def test_two_steps_and_the_picture() -> None:
    steps = steps_of_model(nn.Sequential(nn.Linear(4, 4)), (torch.ones(2, 4),), {}, device=CPU)
    found = memory_timeline(steps, num_steps=2)
    assert [part.name for part in found.parts] == 2 * ["forward", "backward", "optimizer"]
    root = ElementTree.fromstring(svg_of_memory(found))
    text = "".join(root.itertext())
    assert "At the peak" in text and found.about in text
    (polygon,) = root.iter("{http://www.w3.org/2000/svg}polygon")
    points = [tuple(map(float, one.split(","))) for one in polygon.get("points", "").split()]
    assert min(y for _, y in points) == pytest.approx(70) and len(points) > 10
