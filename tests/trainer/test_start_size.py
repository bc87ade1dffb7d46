"""`--start-size`: which sizes the model gets in which step, the same after a stop, and what is refused."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flambeau.data.sources.open_data import open_sources
from flambeau.recipes.training.progressive_resizing import image_side
from flambeau.trainer.dry_run import dry_run
from flambeau.trainer.fit import Training, fit, set_up
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import Prepared
from flambeau.trainer.settings.settings import FIELDS, Settings


def prepared(photos: Path, **given: Any) -> Prepared:
    train, val = open_sources(photos, seed=0)
    usual: dict[str, Any] = {
        "data": str(photos), "model": "small_convnet", "image_size": 96, "start_size": 32,
        "batch_size": 4, "duration": "10st", "precision": "fp32", "device": "cpu", "checkpoint_every": "1st",
    }  # fmt: skip
    resolved, facts = resolve(Settings(**{**usual, **given}), train, val)
    return Prepared(resolved, facts, train, val)


def recorded_sides(training: Training) -> list[int]:
    """The sides of the images that the model gets in training, once it is trained."""
    sides: list[int] = []

    def record(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if model.training:
            assert inputs[0].shape[2] == inputs[0].shape[3]
            sides.append(inputs[0].shape[2])

    training.model.register_forward_pre_hook(record)
    return sides


def test_the_model_gets_small_images_first(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training = set_up(prepared(photos), folder=tmp_path / "run", bar=False)
    sides = recorded_sides(training)
    fit(training)
    assert sides == [96, 32, 32, 32, 64, 64, 64, 96, 96, 96]
    said = capfd.readouterr()
    assert "on images of 32 px in the first 30 % of the steps, and of 96 px" in said.out + said.err


def test_a_stopped_training_ends_with_the_same_weights(photos: Path, tmp_path: Path) -> None:
    whole = set_up(prepared(photos), folder=tmp_path / "whole", bar=False)
    fit(whole)

    stopped = set_up(prepared(photos), folder=tmp_path / "stopped", bar=False)
    steps = 0

    def stop(*_: Any) -> None:
        nonlocal steps
        steps += stopped.model.training
        if steps == 6:
            raise RuntimeError("stop here")

    stopped.model.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(stopped)
    stopped.run.close()
    again = set_up(prepared(photos), folder=tmp_path / "stopped", bar=False)
    sides = recorded_sides(again)
    fit(again)
    assert sides == [64, 64, 96, 96, 96]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_a_dry_run_measures_the_full_size(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps would promise a time and a memory that the run does not keep."""
    shapes = []
    plain = torch.nn.functional.interpolate
    monkeypatch.setattr(
        torch.nn.functional, "interpolate", lambda *a, **k: (shapes.append(a[1]), plain(*a, **k))[1]
    )
    said: list[str] = []
    dry_run(prepared(photos, duration="20st"), say=said.append)
    assert not shapes
    full_size = "at full size: those of --start-size take less"
    assert full_size in "\n".join(said)
    dry_run(prepared(photos, duration="20st", start_size=None), say=said.append)
    assert "\n".join(said).count(full_size) == 1


def test_the_help_names_the_phases_of_the_recipe() -> None:
    phases = inspect.signature(image_side).parameters
    small, full = phases["small_until"].default, 1 - phases["full_from"].default
    for language in ("text", "chinese"):
        shares = re.findall(r"(\d+) %", FIELDS["start_size"].metadata[language])
        assert shares == [f"{100 * small:.0f}", f"{100 * full:.0f}"], language


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--start-size 7", "start_size must be from 8 to 16384, got 7"),
        ("--image-size 32 --start-size 64", "start_size = 64 is above the image size, 32: choose"),
        ("--start-size 16 --compile", "start_size = 16 and compile = 'default' do not go together"),
        ("--start-size 16 --early-stop 3", "start_size = 16 and early_stop = 3 do not go together"),
        ("--start-size 16 --schedule plateau", "and schedule = 'plateau' do not go together, as"),
        ("--start-size 16 --portable-bits 2", "with start_size = 16 the bits depend on"),
        (
            "--image-size 32 --start-size 16 --model {fixed}:make",
            "make cannot take start_size = 16: the model fails on 1 x 3 x 16 x 16",
        ),
    ],
)
def test_what_does_not_go_with_it(
    flambeau: Any, photos: Path, tmp_path: Path, flags: str, message: str
) -> None:
    fixed = tmp_path / "fixed.py"
    fixed.write_text(
        "from torch import nn\n\n\ndef make(num_classes, channels, image_size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))\n"
    )
    answer = flambeau("train", photos, flags.format(fixed=fixed), "--out", tmp_path / "run")
    assert answer.code == 2
    assert message in answer.err
    assert not (tmp_path / "run").exists()
