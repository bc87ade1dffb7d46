"""`flambeau train` from the first command to the weights that others load; twice, changed, and afresh."""

import hashlib
import itertools
import json
import re
import shutil
import signal
import struct
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision.models

from flambeau.recipes.checkpoints.atomic_checkpoint import from_bytes, read_checkpoint
from flambeau.recipes.models.small_convnet import SmallConvNet
from flambeau.run.run import Run
from flambeau.trainer.settings.default_folder import default_folder
from flambeau.trainer.settings.settings import FIELDS, Settings
from flambeau.trainer.settings.stored_settings import canonical

LINEAR = """
from torch import nn

def make(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""
SHORT = "--duration 4st --batch-size 4 --precision fp32"


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linear.py").write_text(LINEAR, encoding="utf-8")


def state_of(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file with its hash and the time when it was last written."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_clock(run: Path) -> list[dict[str, Any]]:
    clock = {"images_per_s", "data_wait"}
    return [{k: v for k, v in row.items() if k not in clock} for row in rows(run)]


def config_of(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM to this process while step `step` is under way."""
    original = Run.step

    def with_signal(self: Run, loss: torch.Tensor) -> None:
        if self.state.step == step - 1:
            signal.raise_signal(signal.SIGTERM)
        original(self, loss)

    monkeypatch.setattr(Run, "step", with_signal)


# ---------------------------------------------------------------- one run


def test_a_whole_run(flambeau: Any, images: Path) -> None:
    code, out, err = flambeau("train", images, "--out run --epochs 2 --batch-size 4 --log-every 2")
    assert code == 0
    run = Path("run")
    assert {p.name for p in run.iterdir() if p.name[0] != "."} == {
        "checkpoints", "config.toml", "dataset.json", "environment.json", "evaluation.json",
        "events.jsonl", "first_batch.jpg", "metrics.jsonl", "model.safetensors", "report.html",
        "result.json", "sample_losses.npz",
    }  # fmt: skip
    assert "16 images to train on, 8 to evaluate on\n" in err
    assert "the run is in run\n" in err
    result = json.loads((run / "result.json").read_text())
    assert out.startswith(f"finished: val_loss {result['metrics']['val_loss']:.4f}, val_accuracy ")
    for command in ("predict run IMAGE...", "evaluate run DATA", "verify run"):
        assert f"flambeau {command}" in out
    train_rows = [row for row in rows(run) if "train_loss" in row]
    val_rows = [row for row in rows(run) if "val_accuracy" in row]
    assert [(row["step"], row["epoch"]) for row in train_rows] == [(2, 0), (4, 0), (6, 1), (8, 1)]
    assert [(row["step"], row["epoch"]) for row in val_rows] == [(4, 0), (8, 1)]
    assert {"learning_rate", "images_per_s", "data_wait"} <= train_rows[0].keys()
    assert all(0 <= row["val_accuracy"] <= 1 for row in val_rows)
    best = max(val_rows, key=lambda row: row["val_accuracy"])
    assert result["weights"] == "best"
    assert result["metrics"]["val_accuracy"] == best["val_accuracy"]


def test_a_leak_is_said_at_the_end_and_in_the_report(flambeau: Any, images: Path) -> None:
    shutil.copy(images / "val" / "a" / "00.png", images / "train" / "b" / "07.png")
    code, _, err = flambeau("train", images, "--out run", SHORT)
    told = (
        "1 validation image (12.5%) can be seen in training, too; 1 picture has two labels or more"
    )
    assert code == 0
    assert f"{told}: the report names them\n" in err
    assert "val/a/00.png = train/b/07.png (the same file)" in Path("run/report.html").read_text()


@pytest.mark.parametrize(
    "flags", ["--model nosuch", "--weights nosuch.pt", "--schedule one-cycle --warmup 0st"]
)
def test_a_start_that_fails_names_and_leaves_no_folder(
    flambeau: Any, images: Path, flags: str
) -> None:
    code, _, err = flambeau("train", images, f"--out run --epochs 1 {flags}")
    assert code == 2
    assert "the run is in" not in err
    assert not Path("run").exists()


def test_every_resolved_setting_is_shown_and_written(flambeau: Any, images: Path) -> None:
    err = flambeau("train", images, "--out run", SHORT).err
    config = config_of(Path("run"))
    unused = {
        "epochs",
        "extend",
        "preset",
        "parts",
        "portable_bits",
        "stop_within",
        "shuffle_window",
        "mirror",
        "eval_size",
        "start_size",
        "weights",
        "teacher",
        "teacher_weight",
        "temperature",
        "head_lr",
    }
    unused |= {"crop_scale", "class_weights"}  # of photos, of uneven classes
    unused |= {
        "target",
        "label_separator",
        "group",
        "split",
        "fold",
        "subset",
        "test",
        "ignore_index",
    }  # of tables, folds, masks
    unused |= {"cache", "cache_size"}  # of a store
    # Of another schedule or optimizer.
    unused |= {"patience", "plateau_factor", "gamma", "milestones", "betas", "muon_others_lr"}
    assert set(config) == set(FIELDS) - unused
    assert config["data"] == str(images)
    assert "auto" not in config.values()
    for name, value in config.items():
        assert name == "data" or f"{name}={value}" in err
    assert Settings(**config) == canonical(Settings(**config))


def test_files_have_ordinary_permissions(flambeau: Any, images: Path) -> None:
    assert flambeau("train", images, "--out run", SHORT).code == 0
    for path in Path("run").rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o111 == 0, path


def test_the_weights_are_those_of_the_small_network(flambeau: Any, images: Path) -> None:
    assert flambeau("train", images, "--out run", SHORT).code == 0
    weights = safetensors.torch.load_file("run/model.safetensors")
    SmallConvNet(1, 2).load_state_dict(weights)
    result = json.loads(Path("run/result.json").read_text())
    checkpoint = read_checkpoint(Path(f"run/checkpoints/step-{result['step']:08d}"))
    assert checkpoint.files["model.safetensors"] == Path("run/model.safetensors").read_bytes()


def test_averaged_weights_are_published_where_they_are_on(flambeau: Any, images: Path) -> None:
    code, out, _ = flambeau("train", images, "--out run --ema 0.5 --model linear.py:make", SHORT)
    assert code == 0
    assert "averaged weights, step 4" in out
    files = read_checkpoint(Path("run/checkpoints/step-00000004")).files
    assert files["ema.safetensors"] == Path("run/model.safetensors").read_bytes()
    assert files["ema.safetensors"] != files["model.safetensors"]


def test_embedded_data_are_the_default(flambeau: Any) -> None:
    code, _, err = flambeau(
        "train --out run --duration 1st --batch-size 8 --model linear.py:make --precision fp32"
    )
    assert code == 0
    assert "6000 images to train on, 1000 to evaluate on" in err
    facts = json.loads(Path("run/dataset.json").read_text())
    assert len(facts["classes"]) == 10
    assert "data" not in config_of(Path("run"))


def test_photos_with_a_timm_model(flambeau: Any, photos: Path) -> None:
    command = ("train", photos, "--out run --model test_resnet --image-size 64", SHORT)
    assert flambeau(*command).code == 0
    model = timm.create_model("test_resnet", num_classes=3, checkpoint_path="run/model.safetensors")
    weights = safetensors.torch.load_file("run/model.safetensors")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)
    facts = json.loads(Path("run/dataset.json").read_text())
    assert (facts["classes"], facts["channels"]) == (["ant", "bee", "cat"], 3)
    assert facts["train_samples"] + facts["val_samples"] == 18


def test_photos_with_a_torchvision_model(flambeau: Any, photos: Path) -> None:
    command = ("train", photos, "--out run --model torchvision:squeezenet1_1 --image-size 64")
    assert flambeau(*command, SHORT, "--workers 2").code == 0
    weights = safetensors.torch.load_file("run/model.safetensors")
    torchvision.models.squeezenet1_1(num_classes=3).load_state_dict(weights)


def test_pretrained_starts_where_the_published_weights_end(
    flambeau: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torchvision.models.squeezenet1_1(num_classes=1000).state_dict()
    file = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.url.rpartition("/")[2]
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub_home"))
    (tmp_path / "hub_home" / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(weights, tmp_path / "hub_home" / "hub" / "checkpoints" / file)
    command = ("train", photos, "--out run --model torchvision:squeezenet1_1 --pretrained")
    assert flambeau(*command, "--image-size 64 --lr 1e-30 --weight-decay 0", SHORT).code == 0
    published = safetensors.torch.load_file("run/model.safetensors")
    for name in set(weights) - {"classifier.1.weight", "classifier.1.bias"}:
        torch.testing.assert_close(published[name], weights[name], rtol=0, atol=1e-20)
    assert json.loads(Path("run/dataset.json").read_text())["mean"] == [0.485, 0.456, 0.406]


def test_a_resume_needs_no_published_weights(
    flambeau: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of downloads, and the connection, may be gone by then."""
    weights = torchvision.models.squeezenet1_1(num_classes=1000).state_dict()
    command = ("train", photos, "--out run --model torchvision:squeezenet1_1 --pretrained")
    command = (*command, "--image-size 64", SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(
            "torchvision.models.SqueezeNet1_1_Weights.get_state_dict", lambda *_, **__: weights
        )
        stop_after(2, patch)
        assert flambeau(*command).code == 75
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr("torch.hub.urlopen", None)
    code, _, err = flambeau(*command)
    assert code == 0
    assert "going on from step 2 of 4" in err


# ---------------------------------------------------------------- the same command again


@pytest.mark.parametrize("more", ["", "--precision auto --device auto", "--epochs 1"])
def test_the_same_command_again_says_finished_and_changes_nothing(
    more: str, flambeau: Any, images: Path
) -> None:
    length = "" if "--epochs" in more else "--duration 4st"
    command = ("train", images, "--out run --model linear.py:make --batch-size 4", length, more)
    assert flambeau(*command).code == 0
    before = state_of(Path("run"))
    code, out, err = flambeau(*command)
    assert (code, err) == (0, "")
    assert out.startswith("this run is finished (val_loss ")
    assert "--fresh starts it again" in out
    assert state_of(Path("run")) == before


def test_what_is_not_said_again_is_as_it_was(flambeau: Any, images: Path) -> None:
    assert flambeau("train", images, "--out run --lr 0.03 --model linear.py:make", SHORT).code == 0
    before = state_of(Path("run"))
    assert "this run is finished" in flambeau("train --out run").out
    assert "this run is finished" in flambeau("train --out run --lr 3e-2").out
    assert state_of(Path("run")) == before


def test_what_a_power_cut_has_left_in_a_finished_run_is_removed(
    flambeau: Any, images: Path
) -> None:
    assert flambeau("train", images, "--out run", SHORT).code == 0
    left = Path("run/checkpoints/.step-00000000.0123456789abcdef.removed")
    left.mkdir()
    (left / "model.safetensors").touch()
    assert flambeau("train", images, "--out run", SHORT).code == 0
    assert not left.exists()


def test_a_stopped_run_goes_on_to_the_same_bits(
    flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (
        "train",
        images,
        "--epochs 3 --batch-size 4 --precision fp32 --log-every 2 --ema 0.9",
    )
    assert flambeau(*command, "--out whole").code == 0
    with monkeypatch.context() as patch:
        stop_after(6, patch)
        code, out, err = flambeau(*command, "--out run")
        assert (code, out) == (75, "")
        assert err.splitlines()[-1] == (
            "SIGTERM: saved at step 6 in run; the same command goes on from here"
        )
    code, out, err = flambeau(*command, "--out run --workers 2")
    assert code == 0
    assert "going on from step 6 of 12" in err
    assert (
        Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    )
    assert without_clock(Path("run")) == without_clock(Path("whole"))
    last = [Path(name, "checkpoints", "step-00000012") for name in ("run", "whole")]
    states = [from_bytes(read_checkpoint(path).files["training_state.pt"]) for path in last]
    assert states[0]["order_crc"] == states[1]["order_crc"]
    for one, other in zip(
        states[0]["optimizer"]["state"].values(),
        states[1]["optimizer"]["state"].values(),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    # What a resume may change is what the file says now.
    assert config_of(Path("run"))["workers"] == 2
    kept = [json.loads(Path(name, "evaluation.json").read_text()) for name in ("run", "whole")]
    assert kept[0] == kept[1]
    shown = kept[0]["mistakes"] + kept[0]["unsure"]
    assert len(shown) == 8 and all(one["picture"].startswith("data:image/jpeg") for one in shown)
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == [0, 6, 6, 12]
    told = [event["text"].partition(":")[0] for event in events]
    assert told == ["the run starts", "SIGTERM", "going on from step 6 of 12", "finished"]
    assert events[-1]["peak_memory_bytes"] > 2**20


# ---------------------------------------------------------------- another command


def test_another_configuration_in_the_same_folder_is_refused(flambeau: Any, images: Path) -> None:
    command = ("train", images, "--out run --model linear.py:make", SHORT)
    assert flambeau(*command).code == 0
    before = state_of(Path("run"))
    code, out, err = flambeau(*command, "--lr 0.5 --seed 3")
    assert (code, out) == (2, "")
    assert "run holds a run of another configuration" in err
    assert "seed: 0 there, 3 now" in err
    assert "0.5 now" in err
    assert len(err.splitlines()) == 2
    assert state_of(Path("run")) == before


def test_fresh_renames_the_old_run_and_deletes_nothing(flambeau: Any, images: Path) -> None:
    command = ("train", images, "--out run --model linear.py:make", SHORT)
    assert flambeau(*command).code == 0
    before = state_of(Path("run"))
    for number in (1, 2):
        code, out, err = flambeau(*command, "--fresh --seed", str(number))
        assert code == 0
        assert out.startswith("finished: ")
        assert f"the run that was in run is now in {Path.cwd()}/run.old-{number}" in err
        assert config_of(Path("run"))["seed"] == number
    before.pop(".lock")  # taken for the renaming
    kept = state_of(Path("run.old-1"))
    kept.pop(".lock")
    assert kept == before


def test_fresh_with_wrong_input_leaves_the_old_run(flambeau: Any, images: Path) -> None:
    command = ("train", images, "--out run --model linear.py:make", SHORT)
    assert flambeau(*command).code == 0
    before = state_of(Path("run"))
    for wrong in ("--fresh --device meta", "--fresh --lr -1", "--fresh --schedule none"):
        assert flambeau(*command, wrong).code == 2
    assert flambeau("train gone --out run --fresh", SHORT).code == 2
    assert state_of(Path("run")) == before
    assert not list(Path().glob("run.old*"))


def test_fresh_without_an_old_run_is_a_first_run(flambeau: Any, images: Path) -> None:
    code, _, err = flambeau("train", images, "--out run --fresh --model linear.py:make", SHORT)
    assert code == 0
    assert "is now in" not in err


def test_each_set_of_flags_has_its_folder() -> None:
    def folder(**told: Any) -> Path:
        settings = canonical(Settings(**told))
        return default_folder(settings, {k: getattr(settings, k) for k in told})

    assert folder() == Path("runs/fashion-mnist")
    assert folder(data="photos/") == Path("runs/photos")
    assert folder(data="x/birds.rec") == Path("runs/birds")
    assert folder(data="photos", workers=2, keep=9) == Path("runs/photos")
    assert folder(data="torchvision:cifar10") == Path("runs/torchvision-cifar10")
    assert folder(data="data.py:photos") == Path("runs/data-photos")
    for name in ("photos.v1", "photos.v2", "photos.zarr"):
        Path(name).mkdir()
    assert folder(data="photos.v1") == Path("runs/photos.v1")
    assert folder(data="photos.v2") == Path("runs/photos.v2")
    assert folder(data="photos.zarr") == Path("runs/photos")
    with_lr = folder(data="photos", lr=0.1)
    assert with_lr.name.startswith("photos-")
    assert len({with_lr, folder(data="photos"), folder(data="photos", lr=0.2)}) == 3
    assert folder(seed=3, lr=0.1) == folder(lr=0.1, seed=3)


def test_the_default_folder_is_found_again(flambeau: Any, images: Path) -> None:
    command = ("train", images, "--model linear.py:make", SHORT)
    assert flambeau(*command).code == 0
    (run,) = Path("runs").iterdir()
    assert run.name.startswith("images-")
    assert flambeau(*command, "--keep 5").out.startswith("this run is finished")
    assert flambeau(*command, "--seed 9").out.startswith("finished")
    assert len(list(Path("runs").iterdir())) == 2


# ---------------------------------------------------------------- settings from a file


@pytest.fixture
def configured(images: Path) -> Callable[[str], Path]:
    def write(more: str = "") -> Path:
        text = f'data = "{images}"\nmodel = "linear.py:make"\nbatch_size = 4\nprecision = "fp32"\n'
        path = Path("my.toml")
        path.write_text(text + more, encoding="utf-8")
        return path

    return write


def test_flags_win_over_the_file(flambeau: Any, configured: Callable[[str], Path]) -> None:
    path = configured('epochs = 1\nlr = 0.5\nseed = 7\nflip = false\nwarmup = "1st"\n')
    assert flambeau("train --out run --lr 0.25 --flip --config", path).code == 0
    config = config_of(Path("run"))
    assert (config["lr"], config["seed"], config["flip"]) == (0.25, 7, True)
    assert (config["duration"], config["warmup"]) == ("1ep", "1st")


@pytest.mark.parametrize(
    ("in_file", "flag"),
    [("epochs = 9", "--duration 2st"), ('duration = "9ep"', "--epochs 1"),
     ('duration = "9ep"', "--duration 2st")],
)  # fmt: skip
def test_a_length_in_a_flag_replaces_that_of_the_file(
    in_file: str, flag: str, flambeau: Any, configured: Callable[[str], Path]
) -> None:
    assert flambeau("train --out run --config", configured(in_file), flag).code == 0
    assert config_of(Path("run"))["duration"] == {"--d": "2st", "--e": "1ep"}[flag[:3]]


def test_the_file_of_a_run_makes_the_run_again(flambeau: Any, images: Path) -> None:
    command = ("train", images, "--out run --mixup 0.2 --seed 5 --model linear.py:make", SHORT)
    assert flambeau(*command).code == 0
    assert flambeau("train --config run/config.toml --out again").code == 0
    assert config_of(Path("again")) == config_of(Path("run"))
    assert (
        Path("again/model.safetensors").read_bytes() == Path("run/model.safetensors").read_bytes()
    )
    assert without_clock(Path("again")) == without_clock(Path("run"))
    # ... and it fits the run itself.
    assert "finished" in flambeau("train --config run/config.toml --out run").out


# ---------------------------------------------------------------- settings have their effect


def weights_with(flambeau: Any, images: Path, name: str, *flags: str) -> bytes:
    command = ("train", images, f"--out {name} --lr 0.1 --log-every 1", SHORT, *flags)
    if not any("--model" in flag for flag in flags):
        command = (*command, "--model linear.py:make")
    assert flambeau(*command).code == 0
    return read_checkpoint(Path(name, "checkpoints", "step-00000004")).files["model.safetensors"]


def test_settings_have_their_effect(flambeau: Any, images: Path) -> None:
    """Each gives other weights than the defaults, or is refused: none is ignored."""
    flags = [
        "--seed 1", "--no-flip", "--image-size 9", "--accumulate 2", "--optimizer adam",
        "--optimizer adamw", "--lr 0.2", "--weight-decay 0.1", "--schedule linear",
        "--schedule constant", "--schedule multistep", "--warmup 2st", "--clip-norm 0.01",
        "--label-smoothing 0.2", "--mixup 0.5", "--cutmix 0.5", "--precision bf16",
        "--batch-size 5", "--model small_convnet", "--augment randaugment",
        "--augment trivialaugment", "--color-jitter 0.4", "--random-erasing 0.9",
    ]  # fmt: skip
    plain = weights_with(flambeau, images, "plain")
    assert weights_with(flambeau, images, "again") == plain
    assert weights_with(flambeau, images, "more", "--keep 9 --workers 2 --log-every 3") == plain
    histograms = "--track csv,tensorboard:histograms"
    assert weights_with(flambeau, images, "tracked", histograms) == plain
    seen = {plain: "plain"}
    for number, flag in enumerate(flags):
        weights = weights_with(flambeau, images, f"run{number}", flag)
        assert weights not in seen, f"{flag} gives what {seen[weights]} gives"
        seen[weights] = flag
    rates = [row["learning_rate"] for row in rows(Path("plain")) if "learning_rate" in row]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] <= 0.1


def test_keep_keeps_as_many(flambeau: Any, images: Path) -> None:
    command = ("train", images, "--model linear.py:make --checkpoint-every 1st", SHORT)
    for keep in (1, 3):
        assert flambeau(*command, f"--out run{keep} --keep {keep}").code == 0
        names = {path.name for path in Path(f"run{keep}/checkpoints").iterdir()}
        newest = {f"step-{step:08d}" for step in range(5 - keep, 5)}
        best = json.loads(Path(f"run{keep}/result.json").read_text())["step"]
        assert names == newest | {f"step-{best:08d}"}


def test_a_data_set_by_name_is_packed_trained_on_and_measured(
    flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MNIST's own files, made here; --download has nothing to do."""
    raw = tmp_path / "home" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 24), ("t10k", 8)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), np.uint8)
        header = struct.pack(">iiii", 2051, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = bytes(k % 10 for k in range(count))
        labels_file = raw / f"{name}-labels-idx1-ubyte"
        labels_file.write_bytes(struct.pack(">ii", 2049, count) + labels)
    monkeypatch.setenv("FLAMBEAU_DATA", str(tmp_path / "home"))
    settings = "--duration 2st --batch-size 4 --workers 0"
    assert flambeau("train torchvision:mnist --download --out run", settings).code == 0
    assert config_of(Path("run"))["data"] == "torchvision:mnist"
    code, out, _ = flambeau("evaluate run torchvision:mnist --download --json")
    assert (code, json.loads(out)["images"]) == (0, 8)
    assert flambeau("pack torchvision:mnist digits.npz --download").code == 0
    assert flambeau("evaluate run digits_val.npz --json").out == out
    refused = flambeau("train mnist --out other")
    assert refused.code == 2
    assert "did you mean torchvision:mnist?" in refused.err


def test_settings_that_do_nothing_in_one_process_are_said_to(flambeau: Any, images: Path) -> None:
    flags = "--sync-bn --compression fp16 --retry-workers 2"
    err = flambeau("train", images, "--out run", flags, SHORT).err
    assert "retry_workers = 2 has no effect without workers: " in err
    assert "sync_bn has no effect in one process" in err
    assert "compression = 'fp16' has no effect in one process" in err


def test_early_stop_ends_a_run_that_gets_no_better(flambeau: Any, images: Path) -> None:
    flags = "--lr 1e-12 --epochs 9 --early-stop 2 --out run"
    answer = flambeau("train", images, flags, "--batch-size 4 --model small_convnet --workers 0")
    assert answer.code == 0
    assert re.search(r"no better val_accuracy in the last 2 epochs than \d", answer.err)
    evaluations = [row for row in rows(Path("run")) if "val_accuracy" in row]
    figures = [row["val_accuracy"] for row in evaluations]
    improved = [k for k, figure in enumerate(figures) if figure > max(figures[:k], default=-1)]
    assert len(figures) == improved[-1] + 3 < 9
    assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(improved))
    assert all("train_accuracy" in row for row in rows(Path("run")) if "train_loss" in row)
    assert flambeau("train", images, flags, "--batch-size 4 --model small_convnet").code == 0
    assert [row for row in rows(Path("run")) if "val_accuracy" in row] == evaluations


def test_a_dry_run_leaves_nothing(
    flambeau: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    answer = flambeau("train", images, "--dry-run --out run --epochs 30 --batch-size 4")
    assert answer.code == 0, answer.err
    assert "lr=" in answer.err
    assert re.search(r"first step [\d.]+ s, then \S+ s per step \(median of 5 steps", answer.err)
    assert "the run has 120 steps of 4 per epoch: about" in answer.err
    assert re.search(r"memory at most \d+ MiB", answer.err)
    assert "left run.epochs()" not in answer.err
    assert not Path("run").exists()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_dry_run_finds_what_would_prevent_the_run(flambeau: Any, images: Path) -> None:
    answer = flambeau("train", images, "--dry-run --optimizer adamw --momentum 0.5")
    assert (answer.code, "momentum has no effect" in answer.err) == (2, True)
    Path("bad.py").write_text(
        "import torch\n\n\ndef build(num_classes):\n    return torch.nn.Flatten()\n"
    )
    answer = flambeau("train", images, "--dry-run --model bad.py:build --out run")
    assert (answer.code, Path("run").exists()) == (2, False)
    assert "no parameter that can be trained" in answer.err
    flambeau("train", images, "--out run --epochs 1 --batch-size 4")
    before = sorted(p.name for p in Path("run").rglob("*"))
    answer = flambeau("train", images, "--out run --epochs 2 --batch-size 4 --dry-run")
    assert (answer.code, "another configuration" in answer.err) == (2, True)
    again = flambeau("train", images, "--out run --dry-run")  # of a finished run
    assert (again.code, again.out) == (0, "")
    assert "the run in run is finished, and stays as it is" in again.err
    assert "the run has 4 steps of 4 per epoch" in again.err
    assert flambeau("train", images, "--out run --fresh --dry-run --batch-size 4").code == 0
    assert sorted(p.name for p in Path("run").rglob("*")) == before


def test_a_dry_run_that_fails_promises_no_resume(flambeau: Any) -> None:
    Path("data.py").write_text(
        "import multiprocessing\nimport os\nimport torch\n\n\n"
        "class Images(torch.utils.data.Dataset):\n"
        "    targets = [k % 2 for k in range(16)]\n\n"
        "    def __len__(self):\n        return 16\n\n"
        "    def __getitem__(self, k):\n"
        "        if multiprocessing.current_process().name != 'MainProcess':\n            os._exit(3)\n"
        "        return torch.zeros(3, 80, 80), k % 2\n\n\n"
        "def images():\n    return Images()\n"
    )
    answer = flambeau(
        "train", "data.py:images", "--dry-run --workers 1 --batch-size 4 --image-size 16"
    )
    assert (answer.code, "data worker 0" in answer.err) == (1, True), answer.err
    assert "the next start" not in answer.err


def test_a_dry_run_tells_of_a_loss_that_is_not_finite(flambeau: Any, images: Path) -> None:
    flags = "--schedule constant --warmup 0st --label-smoothing 0 --batch-size 4 --precision fp32"
    answer = flambeau("train", images, "--dry-run --lr 1e30 --out run", flags)
    assert (answer.code, Path("run").exists()) == (2, False)
    assert "within 6 steps the loss or a gradient was NaN or infinite" in answer.err
    assert "a smaller --lr, --clip-norm 1" in answer.err
