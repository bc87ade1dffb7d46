"""bench/speedrun.py: runs of `flambeau train` against a clock, resumable, with views at the end."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.recipes.models.speedrun_convnet import SpeedrunConvNet
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.settings.stored_settings import with_preset
from load_script import load_script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def speedrun() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))  # what lies beside the script
        return load_script(ROOT / "bench" / "speedrun.py")


def test_the_views_of_an_image_are_itself_mirrored_and_shifted(speedrun: ModuleType) -> None:
    images = torch.arange(16.0).view(1, 1, 4, 4)
    views = list(speedrun.views_of(images, "flip and shift"))
    assert sum(weight for weight, _ in views) == 1
    assert len(views) == 6
    assert torch.equal(views[1][1], images.flip(-1))
    weight, shifted = views[2]
    assert weight == 0.125
    assert torch.equal(shifted[..., 1:, 1:], images[..., :-1, :-1])
    assert [w for w, _ in speedrun.views_of(images, "flip")] == [0.5, 0.5]
    assert torch.equal(next(speedrun.views_of(images, "plain"))[1], images)


def test_a_grid_is_all_combinations(speedrun: ModuleType) -> None:
    assert list(speedrun.combinations("lr=0.1,0.2;optimizer=sgd")) == [
        {"lr": 0.1, "optimizer": "sgd"},
        {"lr": 0.2, "optimizer": "sgd"},
    ]
    assert list(speedrun.combinations("")) == [{}]
    with pytest.raises(SystemExit, match="no setting"):
        list(speedrun.combinations("learning=1"))


def test_the_runs_of_a_peer_are_read_from_its_table_and_it_is_ended(
    speedrun: ModuleType, tmp_path: Path
) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import itertools, pathlib\n"
        "assert pathlib.Path('cifar10').is_dir()\n"
        "print('| run | epoch | train_acc | val_acc | tta_val_acc | time_seconds |')\n"
        "for run in itertools.count():\n"
        "    print(f'|  {run}  |  0  |  0.5  |  0.5  |    |    |')\n"
        "    print(f'x|   |   eval  |     0.98  |   0.93  |       0.94{run}  |        2.{run}  |')\n",
        encoding="utf-8",
    )
    folder = tmp_path / "work"
    (folder / "cifar10").mkdir(parents=True)
    rows = speedrun.peer_rows(script, folder)
    assert [next(rows), next(rows)] == [(0.93, 0.941, 2.1), (0.93, 0.942, 2.2)]
    rows.close()  # it would print on for ever


def test_each_ablation_is_a_training_and_differs_by_its_ingredient(speedrun: ModuleType) -> None:
    preset = with_preset({"preset": "speedrun"})
    for without in speedrun.ABLATIONS:
        changed = {name for name, value in without.items() if preset.get(name) != value}
        assert changed == without.keys() or without == {"flip": False, "alternate_flip": False}
        Settings(**{**preset, **without})
    variants = load_script(ROOT / "bench" / "speedrun_variants.py")
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    whole = SpeedrunConvNet(3, 4)
    for name in ("without_whitening", "without_identities", "with_learned_scales"):
        model = getattr(variants, name)(num_classes=4, channels=3)
        model.init_from_images(images)
        assert model(images).shape == (8, 4)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        more = trained - sum(p.numel() for p in whole.parameters() if p.requires_grad)
        assert more == {"without_whitening": 288, "with_learned_scales": 1152}.get(name, 0)
    plain = variants.without_identities(num_classes=4, channels=3)
    assert plain.groups[0].conv1.weight[0, 0, 1, 1].item() != 1


@pytest.mark.slow
def test_runs_are_lines_and_are_not_done_twice(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for part in ("train", "val"):
        for name, level in (("dark", 60), ("light", 190)):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(16):
                pixels = draw.normal(level, 20, (16, 16, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{index}.png")

    def lines(runs: int, *words: str) -> list[dict[str, Any]]:
        command = [
            sys.executable, str(ROOT / "bench" / "speedrun.py"), "--data", str(tmp_path), "--device", "cpu",
            "--runs", str(runs), "--out", str(tmp_path / "out.jsonl"), "--threads", "1",
            "--set", "batch_size=16", "--set", "duration=3ep", "--set", "precision=fp32", "--set", "lr=0.01",
            *words,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    first = lines(1)
    assert [line["seed"] for line in first] == [0]
    assert (first[0]["steps"], first[0]["threads"]) == (6, 1)
    assert first[0]["accuracy"] == first[0]["accuracies"]["flip and shift"] > 0.8
    again = lines(2)
    assert [line.get("seed") for line in again] == [1, None]
    assert (again[1]["n"], again[1]["devices"]) == (2, [first[0]["device"]])
    assert again[0]["processor_s"] > 0
    mean = (first[0]["accuracy"] + again[0]["accuracy"]) / 2
    assert again[1]["mean_accuracy"] == pytest.approx(mean, abs=1e-5)

    out = tmp_path / "out.jsonl"
    elsewhere = [line | {"device": "another", "commit": "older"} for line in (first[0], again[0])]
    out.write_text("".join(json.dumps(line) + "\n" for line in elsewhere), encoding="utf-8")
    whole = lines(2, "--campaign")
    assert [(line.get("seed"), line["n"], line["devices"]) for line in whole] == [
        (None, 2, ["another"])
    ]
