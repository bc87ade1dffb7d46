"""What happens in a step, and what of it differs first."""

import pytest
import torch
from torch import nn

from flambeau.compare import step_events as module
from flambeau.compare.step_events import FirstDifference, StepEvents, batch_difference, first_event


def made(change: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    if change == "forward":
        with torch.no_grad():
            model[2].bias[1] += 1e-3
    elif change == "gradient":
        model[2].weight.register_hook(lambda gradient: gradient * 2)
    elif change == "backward":
        model[0].register_full_backward_hook(lambda m, inputs, outputs: None)
        model[2].register_forward_hook(
            lambda m, inputs, output: output.register_hook(lambda g: g * 2) and None
        )
    elif change == "module":
        model.insert(1, nn.Identity())
    return model


def events(model: nn.Module, *, factor: float = 1.0) -> StepEvents:
    x = torch.arange(12.0).view(3, 4) / 12
    watch = StepEvents(model, modules=True)
    watch.start()
    with watch.forward():
        loss = model(x).square().mean() * factor
    watch.add("loss", "", "", loss)
    loss.backward()
    watch.close()
    return watch


@pytest.mark.parametrize("kept", [0, 2**30])
@pytest.mark.parametrize(
    ("change", "phase", "name"),
    [("forward", "forward", "2"), ("gradient", "gradient", "2.weight"), ("module", "forward", "1")],
)
def test_the_first_difference(
    kept: int, change: str, phase: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_BYTES", kept)
    base = events(made()).events
    assert first_event(base, events(made()).events) is None
    found = first_event(base, events(made(change)).events)
    assert found is not None
    assert (found.phase, found.name) == (phase, name)
    if change == "forward" and kept:
        assert found.text.startswith(
            "the output of '2' (Linear), given equal inputs: 3 of 6 elements"
        )
    if change == "forward" and not kept:
        assert found.text.endswith("its bits differ")


def test_the_loss_alone() -> None:
    found = first_event(events(made()).events, events(made(), factor=2.0).events)
    assert found is not None
    assert found.phase == "loss"
    assert found.text.startswith("the loss, of equal outputs: ")


def test_hooks_go_and_change_nothing() -> None:
    model = made()
    watched = events(model)
    gradient = model[0].weight.grad.clone()
    assert watched.events
    count = len(watched.events)
    model(torch.ones(1, 4)).sum().backward()
    assert len(watched.events) == count
    plain = made()
    x = torch.arange(12.0).view(3, 4) / 12
    plain(x).square().mean().backward()
    assert torch.equal(plain[0].weight.grad, gradient)


def test_batches() -> None:
    def compared(**changed: object) -> FirstDifference | None:
        right = {
            "names": ["a.png", "b.png"], "images": torch.zeros(2, 1, 4, 4, dtype=torch.uint8),
            "targets": torch.tensor([0, 1]), "classes": ["cat", "dog"],
        }  # fmt: skip
        left = dict(right)
        right.update(changed)
        pairs = [(left[key], right[key]) for key in ("names", "images", "targets", "classes")]
        return batch_difference(*pairs)  # type: ignore[arg-type]

    assert compared() is None
    pixel = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    pixel[1, 0, 2, 2] = 9
    expected = {
        "order": {"names": ["a.png", "c.png"]},
        "label": {"targets": torch.tensor([0, 0])},
        "pixels": {"images": pixel},
        "size": {"images": torch.zeros(2, 1, 5, 5, dtype=torch.uint8)},
        "length": {
            "images": torch.zeros(1, 1, 4, 4),
            "targets": torch.tensor([0]),
            "names": ["a.png"],
        },
    }
    for phase, changed in expected.items():
        found = compared(**changed)
        assert found is not None
        assert found.phase == phase
    found = compared(images=pixel)
    assert found is not None
    assert found.text == "1 of 16 pixel values of b.png, as the model is to see it"
    found = compared(classes=["cow", "dog"])
    assert found is not None
    assert found.text == "the label of a.png: cat and cow"
