"""What a user gets wrong, and what a disk or a number does: one message, exit code 2, nothing lost."""

import errno
import gc
import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image

from flambeau.cli.command import check, say_if_little_address_space
from flambeau.errors import InputError, disk_failure
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    Disk,
    checkpoint_folders,
    from_bytes,
    read_checkpoint,
    verify_checkpoint,
)
from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack
from flambeau.recipes.data.sample_order import sample_order
from flambeau.trainer import start
from flambeau.trainer.fit import Training
from refused import refused

LINEAR = """
from torch import nn

def make(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""
SHORT = "--duration 4st --batch-size 4 --precision fp32 --model linear.py:make"


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linear.py").write_text(LINEAR, encoding="utf-8")


def hashes(folder: Path | str) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name != ".lock"
    }


METRICS = "run/metrics.jsonl"


def without_clock(run: str) -> list[dict[str, Any]]:
    lines = Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    clock = {"images_per_s", "data_wait"}
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


# ---------------------------------------------------------------- data that are none


def no_data(tmp_path: Path, make_images: Callable[..., Path]) -> dict[str, tuple[str, ...]]:
    """Wrong DATA, and what the message must name."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts" / "a").mkdir(parents=True)
    (tmp_path / "texts" / "b").mkdir()
    (tmp_path / "texts" / "a" / "1.txt").touch()
    make_images(tmp_path / "one", classes="a")
    (tmp_path / "lone" / "a").mkdir(parents=True)
    make_images(tmp_path / "loose")
    shutil.copy(tmp_path / "loose" / "a" / "00.png", tmp_path / "loose" / "00.png")
    make_images(tmp_path / "gap")
    (tmp_path / "gap" / "c").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty.rec").touch()
    (tmp_path / "noise.rec").write_bytes(bytes(range(256)))
    make_images(tmp_path / "single", per_class=1)
    make_images(tmp_path / "strangers" / "train")
    make_images(tmp_path / "strangers" / "val", classes="ax")
    return {
        "empty": ("empty has no sub-folders", "CLASS"),
        "texts": ("texts has 2 sub-folders, but no image in them", "1 .txt"),
        "lone": ("lone has 1 sub-folder, but no image in it",),
        "one": ("one holds one class only, 'a'", "two or more"),
        "loose": ("loose holds images outside any class folder", "00.png"),
        "gap": ("gap has class folders without any image: c",),
        "gone": ("gone does not exist",),
        "on": ("on does not exist; did you mean", "/one?"),
        "notes.txt": ("notes.txt is neither a folder nor a file of packed images",),
        "empty.rec": ("empty.rec",),
        "noise.rec": ("noise.rec", "damaged"),
        "single": ("no class has two images",),
        "strangers": ("class 'x', which", "lacks"),
        '""': ("DATA is empty",),
    }


def test_data_that_are_none(
    flambeau: Any, tmp_path: Path, make_images: Callable[..., Path]
) -> None:
    for data, parts in no_data(tmp_path, make_images).items():
        refused(flambeau("train --out run", SHORT, data), *parts)
    assert not Path("run").exists()


def test_a_truncated_record_file(flambeau: Any, images: Path) -> None:
    files = sorted((images / "train").rglob("*.png"))
    with RecordWriter("birds.rec") as writer:
        for index, path in enumerate(files):
            header = IRHeader(0, float(path.parent.name == "b"), index, 0)
            writer.write(pack(header, path.read_bytes()), index)
    assert flambeau("train birds.rec --out whole", SHORT).code == 0
    Path("birds.rec").write_bytes(Path("birds.rec").read_bytes()[:-20])
    for index in (True, False):
        refused(flambeau("train birds.rec --out run", SHORT), "birds.rec", "damaged")
        if index:
            Path("birds.idx").unlink()
    assert not Path("run").exists()


# ---------------------------------------------------------------- images that cannot be read


def test_a_corrupt_small_image_is_named_before_anything_is_made(
    flambeau: Any, images: Path
) -> None:
    bad = images / "train" / "b" / "03.png"
    bad.write_bytes(bad.read_bytes()[:60])
    refused(flambeau("train", images, "--out run", SHORT), f"{bad}: ", "--skip-bad-images N")
    assert not Path("run").exists()


@pytest.fixture
def bad_photos(photos: Path, tmp_path: Path) -> tuple[Path, list[Path]]:
    """train/ and val/ of photos, and the bad ones: cut short, empty, of noise, and one in val/."""
    data = tmp_path / "data"
    data.mkdir()
    shutil.copytree(photos, data / "val")
    photos.rename(data / "train")
    bad = [data / "train" / name for name in ("ant/4.jpg", "bee/0.jpg", "cat/5.jpg")]
    bad.append(data / "val" / "bee" / "3.jpg")
    bad[0].write_bytes(bad[0].read_bytes()[:400])
    bad[1].write_bytes(b"")
    bad[2].write_bytes(b"noise" * 100)
    bad[3].write_bytes(bad[3].read_bytes()[:-100])
    return data, bad


PHOTOS = "--image-size 16 --batch-size 4 --epochs 2 --precision fp32 --model linear.py:make"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_photo_stops_the_run_with_its_path(
    workers: int, flambeau: Any, bad_photos: tuple[Path, list[Path]]
) -> None:
    data, bad = bad_photos
    order = sample_order(18, seed=0, epoch=0).tolist()
    files = sorted((data / "train").rglob("*.jpg"))
    first = next(files[index] for index in order if files[index] in bad)
    handler = signal.getsignal(signal.SIGTERM)
    answer = flambeau("train", data, "--out run", PHOTOS, f"--workers {workers}")
    refused(answer, f"flambeau: {first}: ", "Repair or remove it", "--skip-bad-images N")
    # Workers that are still there would keep the program from ending, for half a minute.
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGTERM) is handler
    (checkpoint,) = checkpoint_folders(Path("run/checkpoints"))
    assert verify_checkpoint(checkpoint)["step"] == 0


def test_bad_photos_are_listed_and_replaced_alike_on_every_run(
    flambeau: Any, bad_photos: tuple[Path, list[Path]]
) -> None:
    data, bad = bad_photos
    command = ("train", data, PHOTOS, "--skip-bad-images 4")
    for name, more in (("one", ""), ("two", "--workers 2"), ("three", "--workers 1")):
        assert flambeau(*command, f"--out {name}", more).code == 0
        listed = Path(name, "bad_images.txt").read_text(encoding="utf-8").splitlines()
        assert sorted(listed) == sorted(map(str, bad))
    weights = [Path(name, "model.safetensors").read_bytes() for name in ("one", "two", "three")]
    assert weights[0] == weights[1] == weights[2]
    # The figures are those of the images that can be read: 17 of 18.
    rows = [json.loads(line) for line in Path("one/metrics.jsonl").read_text().splitlines()]
    shares = [row["val_accuracy"] * 17 for row in rows if "val_accuracy" in row]
    assert shares == [pytest.approx(round(share)) for share in shares]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_bad_photo_too_many(
    workers: int, flambeau: Any, bad_photos: tuple[Path, list[Path]]
) -> None:
    data, bad = bad_photos
    command = ("train", data, "--out run", PHOTOS, f"--workers {workers}")
    answer = flambeau(*command, "--skip-bad-images 2")
    message = refused(answer, "and --skip-bad-images 2 is used up: ", "--skip-bad")
    named = [path for path in bad if str(path) in message]
    assert len(named) == 3
    listed = Path("run/bad_images.txt").read_text(encoding="utf-8").splitlines()
    assert len(listed) == 2
    assert set(listed) < set(map(str, named))
    # What the message advises can be done: the run goes on, to the bits of one that never stopped.
    assert flambeau(*command, "--skip-bad-images 4").code == 0
    assert flambeau("train", data, "--out other", PHOTOS, "--skip-bad-images 9").code == 0
    assert (
        Path("run/model.safetensors").read_bytes() == Path("other/model.safetensors").read_bytes()
    )
    assert len(Path("run/bad_images.txt").read_text(encoding="utf-8").splitlines()) == 4


@pytest.mark.parametrize("size", [16, 80])  # with and without a look at the images at the start
def test_all_images_of_one_side_are_bad(
    size: int, flambeau: Any, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos, tmp_path / "data" / "val")
    photos.rename(tmp_path / "data" / "train")
    command = f"train data {PHOTOS} --image-size {size} --skip-bad-images 99"
    for side in ("val", "train"):
        for path in (tmp_path / "data" / side).rglob("*.jpg"):
            path.write_bytes(b"")
        refused(flambeau(command, f"--out {side}"), "no image", f"data/{side}")
    assert not Path("train").exists()


def test_a_photo_that_vanishes_is_named(
    flambeau: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = start.set_up

    def set_up(*args: Any, **settings: Any) -> Training:
        training = original(*args, **settings)
        shutil.rmtree(photos / "bee")
        return training

    monkeypatch.setattr(start, "set_up", set_up)
    refused(flambeau("train", photos, "--out run", PHOTOS), f"{photos}/bee/", "no such file")


# ---------------------------------------------------------------- settings and files


def test_wrong_settings_name_themselves(flambeau: Any, images: Path) -> None:
    for flags, *parts in (
        ("--epochs 0", "epochs must be at least 1, got 0"),
        ("--epochs 2 --duration 2ep", "epochs = 2 and duration = '2ep' contradict each other"),
        ("--lr nan", "lr must be a finite number, got nan"),
        ("--mixup -0.1", "mixup must be 0 or from 1e-06 to 1e+06, got -0.1"),
        ("--seed 18446744073709551616", "seed must be at least 0 and below 2**64"),
        ("--schedule cosin", "did you mean 'cosine'?"),
        ("--workers 1000000", "workers must be from 0 to 1024, got 1000000"),
        ("--procs 1000000", "1000000 processes are too many for this machine, which has"),
        ("--procs 0", "--procs must be a number above 0, or auto; got '0'"),
        ("--image-size 1000000000", "image_size must be from 8 to 16384"),
        ("--duration 1" + "0" * 30 + "ep", "is too long: at most 1e+24ep"),
        ("--epochs 1" + "0" * 40, "epochs is a number of 133 bits; that is too large"),
        (
            "--epochs 1.5",
            "--epochs: must be a whole number, got '1.5'; part of one is --duration",
        ),
        (
            "--batch-size many",
            "--batch-size: must be a whole number, 'auto', or 'auto:N' for steps of N",
        ),
        ("--lr high", "--lr: must be a number, got 'high'"),
        ("--optimizer AdamW", "did you mean 'adamw'?"),
        ("--freeze backbon", "freeze = 'backbon': did you mean 'backbone'? 'backbon' matches"),
        ("--freeze zzz", "its parts are 'stem', 'stages', 'dropout', 'head'"),
        ("--download", "download has no effect with ", "only with torchvision:NAME or hf:NAME"),
        ("--model efficientnet", "did you mean 'efficientnet_b0'?"),
        ("--precision float16", "precision must be one of auto, fp32, tf32, bf16, fp16"),
        ("--duration 5", "duration must be a duration such as '10ep'"),
        ("--warmup 2ep --duration 4st --batch-size 4", "warmup = '2ep' is 8 of the 4 steps"),
        ("--model resnet199", "unknown model 'resnet199'; did you mean"),
        ("--model torchvision:resnet19", "did you mean 'torchvision:resnet"),
        ("--model gone.py:make", "gone.py is not a file"),
        ("--model linear.py:build", "linear.py has no function 'build'"),
        ("--model resnet18 --image-size 8 --batch-size 1", "batch_size = 1", "--batch-size 2"),
        ("--pretrained --model small_convnet", "no published weights of small_convnet"),
        ("--device cudda", "device = 'cudda' is not available here"),
        ("--device meta", "device = 'meta' is not available here"),
        ('--out ""', "--out is empty"),
        ("--out images", "images is not a run folder", "choose another folder"),
        ("--out linear.py", "linear.py is not a folder"),
        ("--out /dev/null/x", "/dev/null is not a folder"),
        ("--out /proc/x", "/proc/x: No such file or directory"),
        ("--config gone.toml", "gone.toml: no such file"),
        ("--config linear.py", "linear.py cannot be read as TOML"),
    ):
        refused(flambeau("train", images, "--out run", flags), *parts)
    assert not Path("run").exists()
    assert sorted(p.name for p in images.iterdir()) == ["train", "val"]


HOSTILE = {
    "deep arrays": ("lr = " + "[" * 5000 + "]" * 5000, "it is nested too deeply"),
    "deep tables": ("lr = " + "{a=" * 5000 + "1" + "}" * 5000, "it is nested too deeply"),
    "a deep key": (".".join("a" * 20_000) + " = 1", "a key in it has more than 64 parts"),
    "a deep key of quotes": (r""" "a \" b".'c d'.""" * 4500 + "e = 1", "more than 64 parts"),
    "a deep header": ("[" + " . ".join('"a"' for _ in range(9000)) + "]", "more than 64 parts"),
    "a large file": ("# a remark\n" * 100_000, "it has more than 262144 bytes"),
    "a long number": ("seed = 1" + "0" * 5000, "TOML: a number in it has thousands of digits"),
    "a long number of 16": ("seed = 0x1" + "0" * 5000, "seed is a number of 20001 bits"),
    "a large number": ("lr = 1" + "0" * 400, "lr is a number of"),
    "an escape": ('model = "\\u001b[31mred"', r"model holds control characters: '\x1b[31mred'"),
    "an escape in a key": ('"\\u001b[31mred" = 1', r"unknown key '\x1b[31mred'"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_one_message(
    flambeau: Any, images: Path, kind: str, tmp_path: Path
) -> None:
    text, part = HOSTILE[kind]
    Path("my.toml").write_text(text, encoding="utf-8")
    message = refused(flambeau("train", images, "--config my.toml --out run"), part)
    assert "\x1b" not in message
    assert not Path("run").exists()
    Path("run").mkdir()
    shutil.copy("my.toml", "run/config.toml")
    assert "\x1b" not in refused(flambeau("train", images, "--out run"))
    refused(flambeau("predict run images/train/a/00.png"))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("verify", ""), "RUN|FILE is empty: is a variable of the shell not set?"),
        (("predict", "run", ""), "WHAT is empty"),
        (("predict", "", "x.png"), "RUN is empty"),
        (("evaluate", "run", ""), "DATA is empty"),
        (("train", ""), "DATA is empty"),
        (("pack", "", "a.rec"), "SRC is empty"),
        (("pack", "images", ""), "DST is empty"),
        (("convert", "", "a.pth"), "IN is empty"),
        (("runs", ""), "DIR is empty"),
    ],
)
def test_an_empty_argument_is_not_the_current_folder(words: tuple[str, ...], part: str) -> None:
    with pytest.raises(InputError, match=re.escape(part)):
        check(words)


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(flambeau: Any, images: Path) -> None:
    os.mkfifo("a.rec")
    for words in (
        "verify a.rec", "train a.rec", "evaluate a.rec images", "predict a.rec x.png", "pack a.rec b.rec",
        "convert a.rec b.pth", "predict run images a.rec",
    ):  # fmt: skip
        refused(flambeau(words), "a.rec is a pipe, and no file")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ftp://example.com/x.tar", "is an address of a kind that is not read"),
        ("hdfs://x/y", "is an address of a kind that is not read"),
        ("file:///x/y", "file:///x/y/: the store gives no list of what lies there (is not there)"),
        ("file:///x/y.tar", "file:///x/y.tar is not there"),
        ("file:///x/y.7z", "is not of a format that is read from a store: .rec .tfrecord .tar"),
    ],
)
def test_an_address_in_the_place_of_data(flambeau: Any, address: str, why: str) -> None:
    for words in (f"train {address} --out run", f"pack {address} a.rec"):
        refused(flambeau(words), why)


def test_folders_in_the_place_of_files(flambeau: Any, images: Path) -> None:
    refused(flambeau("train", images, "--config images"), "images cannot be read: is a directory")
    message = refused(flambeau("convert images a.pth"), "images is neither the folder of a run")
    assert "choose another" not in message
    (Path("odd") / "config.toml").mkdir(parents=True)
    for words in ("verify odd", "evaluate odd images", "train images --out odd"):
        assert "Errno" not in refused(flambeau(words), "odd/config.toml cannot be read: is a dir")


def test_a_dataset_file_that_is_nested_deeply(
    flambeau: Any, stopped: tuple[str | Path, ...]
) -> None:
    Path("run/dataset.json").write_text("[" * 100_000, encoding="utf-8")
    message = refused(flambeau(*stopped), "run/dataset.json cannot be read: it is nested too")
    assert "recursion" not in message
    answer = flambeau("verify run")
    assert (answer.code, "dataset.json cannot be read" in answer.out) == (1, True)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"step": ' + "9" * 5000 + "}", "it has a number of thousands of digits"),
        ("[1]", "it is not what a run writes"),
        ('{"weights": 3, "step": "x", "metrics": []}', "it is not what a run writes"),
    ],
    ids=["deep", "digits", "list", "types"],
)
def test_a_result_file_that_cannot_be_read(
    content: str, why: str, flambeau: Any, images: Path
) -> None:
    assert flambeau("train", images, "--out run", SHORT).code == 0
    Path("run/result.json").write_text(content, encoding="utf-8")
    for words in ("verify run", "evaluate run images", "predict run images"):
        message = refused(flambeau(words), f"run/result.json cannot be read: {why}")
        assert not {"recursion", "sys.set_int", "mapping"} & set(message.split())


def test_numbers_of_thousands_of_digits(flambeau: Any, images: Path) -> None:
    digits = "9" * 5000
    for flag in ("--seed", "--epochs", "--workers"):
        part = f"{flag}: a number of 5000 digits is too large"
        refused(flambeau("train", images, flag, digits), part)
    refused(flambeau("predict run x.png --top", digits), "a number of 5000 digits is too large")
    refused(flambeau("launch --nnodes", digits, "train"), "--nnodes must be a number")
    refused(flambeau("launch --max-restarts x train"), "must be a whole number, got 'x'")
    Path("my.toml").write_text(f"seed = {digits}\n", encoding="utf-8")
    refused(flambeau("train", images, "--config my.toml"), "a number in it has thousands of digits")


@pytest.mark.parametrize("facts", [None, "[" * 100_000, '{"classes": 3}'])
def test_a_finished_run_whose_dataset_file_cannot_be_read(
    facts: str | None, flambeau: Any, images: Path
) -> None:
    assert flambeau("train", images, "--out run", SHORT).code == 0
    assert flambeau("verify run").code == 0
    Path("run/dataset.json").unlink()
    if facts is not None:
        Path("run/dataset.json").write_text(facts, encoding="utf-8")
    answer = flambeau("verify run")
    assert (answer.code, "DAMAGED: dataset.json cannot be read" in answer.out) == (1, True)
    for verb in ("evaluate", "predict"):
        refused(flambeau(verb, "run", images), "run/dataset.json cannot be read")


def test_the_run_folder_does_not_become_a_class(
    flambeau: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(flambeau("train", photos, "--out photos/ant/run"), "would lie within the data", "--out")
    monkeypatch.chdir(photos)
    refused(flambeau("train ."), f"the run folder runs/photos would lie within the data {photos}")
    assert sorted(p.name for p in photos.iterdir()) == ["ant", "bee", "cat"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lr = ", ["my.toml cannot be read as TOML"]),
        ("learning_rat = 0.1", ["my.toml: unknown key 'learning_rat'"]),
        ("warm_up = '1ep'", ["unknown key 'warm_up'; did you mean 'warmup'?"]),
        ("[lr]\nmax = 1", ["lr must be a number, got {'max': 1}"]),
        ("epochs = 2.0", ["epochs must be a whole number, got 2.0"]),
        ("epochs = true", ["epochs must be a whole number, got True"]),
        ("flip = 1", ["flip must be true or false, got 1"]),
        ("epochs = 2\nduration = '2ep'", ["contradict each other"]),
        ("keep = 0", ["keep must be at least 1, got 0"]),
    ],
)
def test_wrong_config_files(text: str, parts: list[str], flambeau: Any, images: Path) -> None:
    Path("my.toml").write_text(text, encoding="utf-8")
    refused(flambeau("train", images, "--out run --config my.toml"), *parts)
    assert not Path("run").exists()


@pytest.mark.parametrize("size", [3, 1])
def test_a_batch_of_one_image_gets_advice_that_works(
    size: int, flambeau: Any, make_images: Callable[..., Path], tmp_path: Path
) -> None:
    """Of 7 images one is left with 3 a batch, and so it is with 2, the next smaller size."""
    make_images(tmp_path / "data" / "train", per_class=3)
    make_images(tmp_path / "data" / "val", per_class=2, seed=1)
    shutil.copy("data/train/a/00.png", "data/train/a/99.png")
    command = "train data --out run --duration 1st --precision fp32"
    message = refused(
        flambeau(command, f"--batch-size {size}"),
        f"batch_size = {size} leaves a batch of one image",
    )
    advice = message.rpartition("--batch-size ")[2]
    assert flambeau(command, f"--batch-size {advice}").code == 0


def test_a_model_that_cannot_do_it(flambeau: Any, images: Path) -> None:
    Path("net.py").write_text(
        LINEAR
        + "def wide(image_size): return nn.Sequential(nn.Flatten(), nn.Linear(image_size**2, 9))\n"
        "def blank(): return nn.Flatten()\n"
        "def fails(): return undefined\n"
        "class Two(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = nn.Linear(64, 2)\n"
        "    def forward(self, x):\n"
        "        y = self.head(x.flatten(1))\n"
        "        return (y, y) if self.training else y\n",
        encoding="utf-8",
    )
    for name, part in (
        ("wide", "must give logits of shape (N, 2); on 1 x 1 x 8 x 8 it gives (1, 9)"),
        ("blank", "no parameter that can be trained"),
        ("fails", "net.py, line 8: NameError: name 'undefined' is not defined"),
        ("Two", "in training on 2 x 1 x 8 x 8 it gives tuple"),
    ):
        refused(flambeau("train", images, f"--out run --model net.py:{name}"), part)
    assert not Path("run").exists()


# ---------------------------------------------------------------- a loss or gradient that is not finite

TRAPS = """
import torch
from torch import nn

class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, white):
        ctx.save_for_backward(white)
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        (white,) = ctx.saved_tensors
        return torch.where(white, gradient * float("inf"), gradient), None

class Trap(nn.Module):
    def __init__(self, num_classes, where, quiet):
        super().__init__()
        self.first, self.head = nn.Linear(64, 8), nn.Linear(8, num_classes)
        self.norm = nn.BatchNorm1d(8) if where == "norm" else nn.Identity()
        self.where, self.quiet = where, quiet
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        x = x.flatten(1)
        if self.quiet:
            self.passes += self.training
        white = (x.amin(1, keepdim=True) > 0.5) & (self.passes >= self.quiet) & self.training
        if self.where == "norm":
            x = x + torch.where(white, float("inf"), 0.0)
        y = self.head(torch.tanh(self.norm(self.first(x))))
        if self.where == "norm":
            return y
        if self.where == "loss":
            return y + torch.where(white, float("inf"), 0.0)
        return BadGradient.apply(y, white)

def norm(num_classes): return Trap(num_classes, "norm", 0)
def loss(num_classes): return Trap(num_classes, "loss", 0)
def gradient(num_classes): return Trap(num_classes, "gradient", 0)
def late_loss(num_classes): return Trap(num_classes, "loss", 6)
def late_gradient(num_classes): return Trap(num_classes, "gradient", 6)
"""
NUM_TRAIN, WHITE = 16, 5  # images, and which of them is white
BAD = "--batch-size 4 --epochs 3 --schedule constant --warmup 0st --precision fp32 --lr 0.1"


@pytest.fixture
def trapped(images: Path) -> Path:
    white = images / "train" / "a" / f"{WHITE:02}.png"
    size = white.stat().st_size
    Image.new("L", (8, 8), 255).save(white, compress_level=0)
    assert white.stat().st_size == size
    Path("traps.py").write_text(TRAPS, encoding="utf-8")
    return images


def expected_batch(epoch: int, *, seed: int, global_batch: int = 4) -> tuple[int, list[int]]:
    """The step, from 1, that meets the white image in this epoch, and the samples of its batch."""
    order = sample_order(NUM_TRAIN, seed=seed, epoch=epoch).tolist()
    batch = order.index(WHITE) // global_batch
    samples = order[batch * global_batch : (batch + 1) * global_batch]
    return epoch * (NUM_TRAIN // global_batch) + batch + 1, samples


def seed_for(batch: int, *, epoch: int = 0) -> int:
    """A seed with which the white image is in this batch of the epoch."""
    return next(s for s in range(999) if expected_batch(epoch, seed=s)[0] == epoch * 4 + batch + 1)


def names_of(images: Path, samples: list[int]) -> list[str]:
    files = sorted((images / "train").rglob("*.png"))
    return [str(files[index]) for index in samples]


def trainings(monkeypatch: pytest.MonkeyPatch) -> list[Training]:
    """The runs that the command sets up from here on, to look into their memory."""
    found: list[Training] = []
    original = start.set_up

    def set_up(*args: Any, **settings: Any) -> Training:
        found.append(original(*args, **settings))
        return found[-1]

    monkeypatch.setattr(start, "set_up", set_up)
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_no_weight(
    where: str, optimizer: str, flambeau: Any, trapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = seed_for(2)
    step, samples = expected_batch(0, seed=seed)
    assert step == 3
    command = ("train", trapped, BAD, f"--model traps.py:{where} --optimizer {optimizer}")
    command = (*command, f"--seed {seed}")
    # The run that stops just before: what the weights and the optimizer must be.
    before = (
        *command[:2],
        BAD.replace("--epochs 3", "--duration 2st"),
        *command[3:],
        "--out before",
    )
    assert flambeau(*before).code == 0
    checkpoint = read_checkpoint(Path("before/checkpoints/step-00000002"))
    weights = safetensors.torch.load(checkpoint.files["model.safetensors"])

    found = trainings(monkeypatch)
    file = "run/not-finite-step-00000003.json"
    refused(
        flambeau(*command, "--out run"),
        "step 3 (epoch 1): the loss or a gradient is NaN or infinite",
        f"flambeau train --replay-step {file}",
        "a smaller --lr, --clip-norm 1, --on-nan rollback",
    )
    # The flag is read late, at the end of the epoch: one more step has run since.
    (training,) = found
    assert training.run.state.step == 4
    for name, parameter in training.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=0, atol=0)
    state = from_bytes(checkpoint.files["training_state.pt"])["optimizer"]["state"]
    for now, then in zip(
        training.run.optimizer.state_dict()["state"].values(), state.values(), strict=True
    ):
        torch.testing.assert_close(now, then, rtol=0, atol=0)

    bad = json.loads(Path(file).read_text(encoding="utf-8"))
    assert (bad["step"], bad["epoch"], bad["indices"]) == (3, 0, samples)
    assert bad["samples"] == names_of(trapped, samples)
    assert bad["checkpoint"] == "step-00000000"
    rows = Path("run/metrics.jsonl").read_text(encoding="utf-8")
    assert rows == "", "a line with figures of the bad step"


@pytest.mark.parametrize("where", ["late_loss", "late_gradient"])
@pytest.mark.parametrize(
    "more", ["--checkpoint-every 1st", "--log-every 1", "--workers 2 --ema 0.5"]
)
def test_where_and_when_in_a_later_epoch(
    where: str, more: str, flambeau: Any, trapped: Path
) -> None:
    seed = seed_for(2, epoch=1)
    step, samples = expected_batch(1, seed=seed)
    assert step == 7
    command = ("train", trapped, "--out run", BAD, f"--model traps.py:{where} --seed {seed}", more)
    message = refused(flambeau(*command), "step 7 (epoch 2): ")
    bad = json.loads(Path("run/not-finite-step-00000007.json").read_text(encoding="utf-8"))
    assert (bad["step"], bad["epoch"], bad["indices"]) == (7, 1, samples)
    last = 6 if "1st" in more else 4
    assert bad["checkpoint"] == f"step-{last:08d}"
    folders = checkpoint_folders(Path("run/checkpoints"))
    assert folders[-1].name == bad["checkpoint"]
    assert all(verify_checkpoint(folder) for folder in folders)
    # The same command meets the same step again, and says the same.
    before, rows = hashes("run"), without_clock("run")
    assert refused(flambeau(*command)) == message
    timed = (METRICS, "run/events.jsonl", "run/report.html")
    assert {**hashes("run"), **dict.fromkeys(timed)} == {**before, **dict.fromkeys(timed)}
    assert without_clock("run") == rows


@pytest.mark.parametrize("where", ["loss", "late_gradient"])
def test_the_step_can_be_replayed(where: str, flambeau: Any, trapped: Path) -> None:
    epoch = int("late" in where)
    seed = seed_for(1, epoch=epoch)
    step, samples = expected_batch(epoch, seed=seed)
    command = ("train", trapped, "--out run", BAD, f"--model traps.py:{where} --seed {seed}")
    refused(flambeau(*command))
    file = Path(f"run/not-finite-step-{step:08d}.json")
    before = hashes(".")
    white = trapped / "train" / "a" / f"{WHITE:02}.png"
    code, out, err = flambeau("train --replay-step", file)
    assert (code, out) == (0, "")
    assert f"step {step} is bad again; its samples: " in err
    assert names_of(trapped, samples)[0] in err
    row = samples.index(WHITE)
    place = {
        "loss": "the output of the model (Trap)",
        "late_gradient": "the gradient of the output of 'head' (Linear)",
    }[where]
    assert f"{place}: 2 not finite, in sample {row} of its batch: {white}" in err
    assert err.count(" not finite") == 2  # and the loss, or the gradient of a parameter
    assert hashes(".") == before

    # The image is mended, in a way that the data do not show (the same length): not bad any more.
    shutil.copy(trapped / "train" / "a" / "00.png", white)
    code, _, err = flambeau("train --replay-step", file)
    assert code == 1
    assert f"step {step} is not bad this time" in err
    assert hashes("run") == {name: h for name, h in before.items() if name.startswith("run/")}
    # ... and the run goes on.
    assert flambeau(*command).code == 0


def test_the_first_bad_module_and_sample_are_named(flambeau: Any, trapped: Path) -> None:
    command = ("train", trapped, "--out run", BAD, "--model traps.py:gradient")
    message = refused(flambeau(*command))
    step, samples = expected_batch(0, seed=0)
    white = trapped / "train" / "a" / f"{WHITE:02}.png"
    first = f"in sample {samples.index(WHITE)} of its batch: {white}; the weights are those"
    assert f"the gradient of the output of 'head' (Linear): 2 not finite, {first}" in message
    bad = json.loads(Path(f"run/not-finite-step-{step:08d}.json").read_text(encoding="utf-8"))
    assert len(bad["findings"]) == 2


def test_rollback_lowers_the_rate_and_gives_up(flambeau: Any, trapped: Path) -> None:
    seed = seed_for(1, epoch=1)
    command = ("train", trapped, "--out run", BAD, "--model traps.py:late_loss --on-nan rollback")
    command = (*command, f"--seed {seed}")
    step, _ = expected_batch(1, seed=seed)
    code, _, err = flambeau(*command)
    assert code == 2
    for count, rate in ((1, "0.5"), (2, "0.25"), (3, "0.125")):
        says = f"rollback {count} of 3: going on from step 4 with {rate} of the learning rate"
        assert err.count(says) == 1
    assert f"step {step} (epoch 2): the loss or a gradient is NaN or infinite" in err
    assert "after 3 rollbacks" in err
    assert f"flambeau train --replay-step run/not-finite-step-{step:08d}.json" in err
    bad = json.loads(Path(f"run/not-finite-step-{step:08d}.json").read_text(encoding="utf-8"))
    assert bad["lr_scale"] == 0.125


def test_accumulation_names_the_whole_global_batch(flambeau: Any, trapped: Path) -> None:
    step, samples = expected_batch(0, seed=0, global_batch=8)
    command = ("train", trapped, "--out run", BAD, "--model traps.py:gradient --accumulate 2")
    refused(flambeau(*command), f"step {step} (epoch 1)")
    file = Path(f"run/not-finite-step-{step:08d}.json")
    assert json.loads(file.read_text(encoding="utf-8"))["indices"] == samples
    assert flambeau("train --replay-step", file).code == 0


@pytest.mark.parametrize(
    ("trap", "place", "procs"),
    [
        ("loss", "the output of the model (Trap): 2", 1),
        ("loss", "the output of the model (Trap): 2", 2),
        # In the layers that share their statistics the other part becomes bad, too.
        ("norm --sync-bn", "the input of 'first' (Linear): 64", 1),
        ("norm --sync-bn", "the input of 'first' (Linear): 64", 2),
    ],
)
def test_a_step_in_parts_is_replayed_on_one_process(
    trap: str, place: str, procs: int, flambeau: Any, trapped: Path, run_python: Any
) -> None:
    seeds = (seed for seed in range(999) if expected_batch(0, seed=seed)[0] == 2)
    seed = next(seed for seed in seeds if expected_batch(0, seed=seed)[1].index(WHITE) >= 2)
    step, samples = expected_batch(0, seed=seed)
    command = f"train {trapped} --out run {BAD} --model traps.py:{trap} --parts 2 --seed {seed}"
    launch = ["launch", "--procs", "2", "--"] if procs == 2 else []
    said = run_python("-m", "flambeau", *launch, *command.split())
    assert said.returncode == 2, said.stderr
    assert f"step {step} (epoch 1): the loss or a gradient is NaN or infinite" in said.stderr
    white = trapped / "train" / "a" / f"{WHITE:02}.png"
    row = samples.index(WHITE) % 2  # of its part
    first = f"{place} not finite, in sample {row} of its batch: {white}"
    assert (first in said.stderr) == (procs == 1)  # of several, none alone can look
    code, _, err = flambeau(f"train --replay-step run/not-finite-step-{step:08d}.json")
    assert code == 0
    assert first in err
    assert f"step {step} is bad again; its samples: {names_of(trapped, samples)[0]}" in err


def test_a_step_cannot_be_replayed_without_its_things(flambeau: Any, trapped: Path) -> None:
    refused(flambeau("train --replay-step gone.json"), "gone.json", "not-finite-step-N.json")
    refused(flambeau("train --replay-step traps.py"), "traps.py", "not-finite-step-N.json")
    refused(flambeau("train", trapped, "--out run", BAD, "--model traps.py:loss"))
    (file,) = Path("run").glob("not-finite-*.json")
    refused(flambeau("train --replay-step", file, "--lr 3"), "leave --lr out")
    refused(flambeau("train --fresh --replay-step", file), "leave --fresh out")
    shutil.copy(file, "elsewhere.json")
    refused(flambeau("train --replay-step elsewhere.json"), "config.toml")
    Path("other.json").write_text("{}", encoding="utf-8")
    refused(flambeau("train --replay-step other.json"), "it holds something else")

    (trapped / "train" / "a" / "00.png").unlink()
    refused(flambeau("train --replay-step", file), "training data have changed")
    shutil.rmtree("run/checkpoints")
    shutil.copy(trapped / "train" / "a" / "01.png", trapped / "train" / "a" / "00.png")
    refused(
        flambeau("train --replay-step", file), "step-00000000", "has been removed since (--keep)"
    )


# ---------------------------------------------------------------- a disk that fails


def test_a_full_disk_is_named_and_the_run_goes_on_later(
    flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", images, SHORT, "--checkpoint-every 1st")
    assert flambeau(*command, "--out whole").code == 0
    create = Disk.create

    def full(self: Disk, path: Path) -> int:
        if "step-00000003" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return create(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "create", full)
        refused(
            flambeau(*command, "--out run"),
            "checkpoint run/checkpoints/step-00000003 could not be written: No space left on device",
            "the last good one is step-00000002",
            "Free some space and run the same command again",
        )
    folders = checkpoint_folders(Path("run/checkpoints"))
    assert [verify_checkpoint(folder)["step"] for folder in folders] == [1, 2]
    assert [p.name for p in Path("run/checkpoints").iterdir() if p not in folders] == []
    assert flambeau(*command, "--out run").code == 0
    assert (
        Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    )


@pytest.mark.parametrize(("free", "file", "named"), [
    (0, None, "/dev/shm: no space left in shared memory"),
    (1 << 30, "/dev/shm/torch_1", "/dev/shm/torch_1: no space left in shared memory"),
    (1 << 30, None, "the disk: No space left on device"),
    (0, "run/a", "run/a: No space left on device"),
])  # fmt: skip
def test_full_shared_memory_is_not_the_disk(
    monkeypatch: pytest.MonkeyPatch, free: int, file: str | None, named: str
) -> None:
    """A semaphore that finds no room names no file."""
    usage = shutil.disk_usage(".")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    message = disk_failure(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file), errno.ENOSPC)
    assert message.startswith(named)
    assert ("--shm-size" in message) == ("shared" in named)


def test_a_file_in_a_folder_that_is_held_open_is_named_as_the_user_knows_it(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    error = OSError(errno.EIO, os.strerror(errno.EIO), f"/proc/self/fd/{folder}/a.svg")
    try:
        assert disk_failure(error, errno.EIO).startswith(f"{tmp_path}/a.svg: ")
    finally:
        os.close(folder)


@pytest.mark.parametrize("name", ["config.toml", "dataset.json", "model.safetensors"])
def test_a_disk_that_takes_no_file(
    name: str, flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Disk.create

    def failing(self: Disk, path: Path) -> int:
        if path.parent == Path("run") and name in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return create(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "create", failing)
        refused(flambeau("train", images, "--out run", SHORT), name, "No space left on device")
    assert flambeau("train", images, "--out run", SHORT).code == 0


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "fix that"),
        (errno.EIO, "fix that"),
        (errno.EBUSY, "fix that"),
        (errno.EMFILE, "raise the limit (`ulimit -n`) or use fewer workers"),
        (errno.EFBIG, "raise the limit (`ulimit -f`)"),
        (errno.ESTALE, "see that the server of that disk answers"),
    ],
)
def test_figures_that_cannot_be_written(
    number: int, remedy: str, flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(file: int, data: Any) -> int:
        if bytes(data).startswith(b'{"step"'):
            raise OSError(number, os.strerror(number))
        return write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        answer = flambeau("train", images, "--out run", SHORT)
        refused(
            answer, f"run/metrics.jsonl: {os.strerror(number)}; {remedy}", "run the command again"
        )
    assert flambeau("train", images, "--out run", SHORT).code == 0


DISK_ANSWERS = [
    "ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EIO", "ENOTDIR", "ENOENT", "EISDIR",
    "ENAMETOOLONG", "ESTALE", "ETIMEDOUT", "ENODEV", "ENXIO", "EMFILE", "ENFILE", "EBUSY", "EAGAIN",
    "ENOLCK", "ELOOP", "EXDEV", "ENOTEMPTY", "ENOMEM", "EHOSTDOWN", "EHOSTUNREACH", "ENETUNREACH",
    "ECONNRESET", "ECONNREFUSED", "ENOTCONN", "EREMOTEIO", "ENOMEDIUM", "EUCLEAN", "EBADMSG",
    "ETXTBSY", "EOPNOTSUPP",
]  # fmt: skip


@pytest.mark.parametrize("name", DISK_ANSWERS)
def test_no_answer_of_a_disk_is_a_bug(
    name: str, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = getattr(errno, name, errno.EIO)
    Path("weights.pt").write_bytes(b"PK")
    for error in (
        OSError(number, os.strerror(number), "weights.pt"),
        OSError(f"Unable to open weights.pt: {os.strerror(number)}"),  # as of HDF5
        RuntimeError(f"I/O error: weights.pt (os error {number})"),  # as of safetensors
    ):

        def failing(chosen: Any, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr("flambeau.cli.verify.run", failing)
        refused(flambeau("verify weights.pt"), "weights.pt", "run the command again")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "memory has run out; raise the limit (`ulimit -v`"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "memory has run out"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "memory has run"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "memory has run out"),
        (RuntimeError("can't start new thread"), "no further process or thread may be started; raise"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "(`ulimit -u`"),
        (
            RuntimeError("unable to allocate shared memory(shm) for file </t>: No space left on device (28)"),
            "no space left in shared memory, through which processes hand over batches; remove what lies in",
        ),
        (RuntimeError("received 0 items of ancdata"), "too many open files; raise the limit (`ulimit -n`)"),
        (RuntimeError("Too many open files. Communication with the workers"), "too many open files"),
    ],
)  # fmt: skip
def test_a_limit_of_the_system_is_no_bug(
    error: Exception, said: str, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of Python, torch and the loader of libraries."""
    Path("weights.pt").write_bytes(b"PK")

    def failing(chosen: Any) -> int:
        raise error

    monkeypatch.setattr("flambeau.cli.verify.run", failing)
    refused(flambeau("verify weights.pt"), said, "run the command again")


@pytest.mark.parametrize(("limit", "is_told"), [(3 * 2**30, True), (5 * 2**30, False), (-1, False)])
def test_too_little_for_torch_is_named_before_it_aborts(
    limit: int, is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, -1))
    say_if_little_address_space()
    assert ("3.0 GiB of memory addresses (`ulimit -v`)" in capsys.readouterr().err) is is_told


def test_a_mistake_of_a_program_keeps_its_traceback(
    flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (OSError(errno.EBADF, "Bad file descriptor"), RuntimeError("os error 5")):

        def failing(chosen: Any, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr("flambeau.cli.verify.run", failing)
        with pytest.raises(type(error)):
            flambeau("verify weights.pt")


def test_a_disk_that_stays_full_while_a_checkpoint_is_written(
    flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures fail first, then the save that was under way: one of them ends the run, both are told."""
    create, write = Disk.create, os.write
    failed = threading.Event()

    def full(self: Disk, path: Path) -> int:
        if "step-00000002" in str(path):
            failed.wait(60)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return create(self, path)

    def full_for_figures(file: int, data: Any) -> int:
        if bytes(data).startswith(b'{"step": 3,'):
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "create", full)
        patch.setattr(os, "write", full_for_figures)
        flags = "--out run --checkpoint-every 2st --log-every 1 --duration 4st --batch-size 4"
        answer = flambeau("train", images, flags)
    gc.collect()  # a generator that fails when it is closed is heard of here
    assert answer.code == 2
    assert "Traceback" not in answer.err
    said = answer.err.splitlines()
    assert said[-1].startswith("flambeau: run/metrics.jsonl: No space left on device; fix that")
    assert any("step-00000002 could not be written: No space left" in line for line in said)


def test_a_limit_on_the_size_of_files(images: Path, run_python: Any) -> None:
    """A real failing write, of the trial save: the weights are larger than the limit."""
    script = (
        "import resource, sys\n"
        "from flambeau.cli.command import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["train", str(images), "--out", "run", "--duration", "1st", "--batch-size", "4"]
    done = run_python("-W", "error", "-c", script, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "checkpoint run/checkpoints/step-00000000 could not be written: File too large"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert list(Path("run/checkpoints").iterdir()) == []


# ---------------------------------------------------------------- between two lives of a run


@pytest.fixture
def stopped(flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str | Path, ...]:
    """The command of a run that has checkpoints of steps 1 and 2, and then met a full disk."""
    command = ("train", images, "--out run", SHORT, "--checkpoint-every 1st")
    create = Disk.create

    def full(self: Disk, path: Path) -> int:
        if "step-00000003" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return create(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "create", full)
        assert flambeau(*command).code == 2
    return command


def test_changed_data_are_refused(
    flambeau: Any, stopped: tuple[str | Path, ...], images: Path
) -> None:
    before = hashes("run")
    for side, what in (("train", "training"), ("val", "validation")):
        extra = images / side / "a" / "extra.png"
        shutil.copy(images / side / "a" / "00.png", extra)
        refused(flambeau(*stopped), f"the {what} data have changed", "--fresh")
        extra.unlink()
    assert hashes("run") == before
    assert flambeau(*stopped).code == 0


def test_other_data_of_the_same_name_are_named(flambeau: Any, images: Path, tmp_path: Path) -> None:
    """They would share runs/images."""
    other = tmp_path / "b" / "images"
    shutil.copytree(images, other)
    shutil.copy(images / "train" / "a" / "00.png", other / "train" / "a" / "extra.png")
    assert flambeau("train", images, "--model linear.py:make").code == 0
    (run,) = Path("runs").iterdir()
    before = hashes(run)
    refused(
        flambeau("train", other, "--model linear.py:make"),
        f"the run in {run} is of {images}, and {other} is something else: its training data are others "
        "(16 images then, 17 now)",
        "--out",
    )
    assert hashes(run) == before
    refused(flambeau("train --out", run, "--seed 5"), "--fresh sets it aside")


def test_other_data_of_the_same_names_and_sizes_are_told_apart(
    flambeau: Any, images: Path, tmp_path: Path
) -> None:
    """Such as images without compression: 'this run is finished', with the figures of the others."""
    other = tmp_path / "b" / "images"
    shutil.copytree(images, other)
    for path in other.glob("val/*/*.png"):
        path.write_bytes(bytes(reversed(path.read_bytes())))
    command = ("train", "--model linear.py:make")
    assert flambeau(*command, images).code == 0
    (run,) = Path("runs").iterdir()
    refused(
        flambeau(*command, other),
        f"the run in {run} is of {images}, and {other} is something else: its validation data are others "
        "(of the same names and sizes, and of another content)",
        "--out",
    )
    images.rename("moved")
    answer = flambeau(*command, "moved --out", run)
    assert (answer.code, "finished" in answer.out + answer.err) == (0, True), answer

    facts = json.loads((run / "dataset.json").read_text(encoding="utf-8"))
    assert facts.pop("train_content") and facts.pop("val_content")
    (run / "dataset.json").write_text(
        json.dumps(facts), encoding="utf-8"
    )  # as version 0.1 wrote it
    assert flambeau(*command, "moved --out", run).code == 0
    facts["val_content"] = 7
    (run / "dataset.json").write_text(json.dumps(facts), encoding="utf-8")
    refused(flambeau(*command, "moved --out", run), "'val_content' in it is not what a run writes")


def test_moved_data_are_not_changed_data(
    flambeau: Any, stopped: tuple[str | Path, ...], images: Path
) -> None:
    images.rename("moved")
    refused(flambeau("train --out run"), "images does not exist")
    assert flambeau("train moved --out run").code == 0
    assert "moved" in Path("run/config.toml").read_text(encoding="utf-8")
    assert flambeau("verify run").code == 0


def test_a_changed_model_file_is_refused(flambeau: Any, stopped: tuple[str | Path, ...]) -> None:
    before = hashes("run")
    Path("linear.py").write_text(LINEAR + "# a remark", encoding="utf-8")
    refused(flambeau(*stopped), "linear.py has changed since the run was started", "--fresh")
    Path("linear.py").unlink()
    refused(flambeau(*stopped), "linear.py")
    assert hashes("run") == before


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_checkpoint_is_set_aside(
    name: str, damage: str, flambeau: Any, stopped: tuple[str | Path, ...]
) -> None:
    file = Path("run/checkpoints/step-00000002", name)
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 4
    file.write_bytes(content[: -1 if damage == "cut" else None])
    if damage == "gone":
        file.unlink()
    code, _, err = flambeau(*stopped)
    assert code == 0
    (line,) = [line for line in err.splitlines() if "set aside" in line]
    assert f"run/checkpoints/step-00000002 is damaged: {name} " in line
    assert line.endswith("going on from step-00000001")
    assert Path("run/checkpoints/step-00000002.damaged").is_dir()
    assert flambeau("train", stopped[1], "--out whole", SHORT, "--checkpoint-every 1st").code == 0
    assert (
        Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    )


def test_no_whole_checkpoint(flambeau: Any, stopped: tuple[str | Path, ...]) -> None:
    for path in Path("run/checkpoints").glob("*/training_state.pt"):
        path.write_bytes(b"x" + path.read_bytes())
    before = hashes("run")
    refused(flambeau(*stopped), "none of the 2 checkpoints in run/checkpoints is whole", "--fresh")
    assert hashes("run") == before
    assert flambeau(*stopped, "--fresh").code == 0
    aside = {name.replace("run/", "run.old-1/"): h for name, h in before.items()}
    assert hashes("run.old-1") == aside


@pytest.mark.parametrize("name", ["config.toml", "dataset.json", "result.json"])
def test_files_of_the_folder_edited_by_hand(
    name: str, flambeau: Any, stopped: tuple[str | Path, ...]
) -> None:
    Path("run", name).write_text("?", encoding="utf-8")
    refused(flambeau(*stopped), f"run/{name} cannot be read")


def test_a_stored_setting_of_another_version(
    flambeau: Any, stopped: tuple[str | Path, ...]
) -> None:
    with Path("run/config.toml").open("a", encoding="utf-8") as file:
        file.write("batchsize = 3\n")
    for command in ("train --out run", "verify run", "evaluate run images", "predict run x.png"):
        part = "config.toml: unknown key 'batchsize'; did you mean 'batch_size'?"
        refused(flambeau(command), part)


def test_a_second_process_in_the_same_folder_is_refused(
    flambeau: Any, stopped: tuple[str | Path, ...]
) -> None:
    script = (
        "import fcntl, os, sys\n"
        "handle = os.open('run/.lock', os.O_RDWR)\n"
        "fcntl.lockf(handle, fcntl.LOCK_EX)\n"
        "os.ftruncate(handle, 0)\n"
        "os.write(handle, b'%d' % os.getpid())\n"
        "print(flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    before = hashes("run")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for more in ("", "--fresh"):
            message = refused(flambeau(*stopped, more), "is training in run right now")
            assert f"process {other.pid} " in message
    assert hashes("run") == before
    assert flambeau(*stopped).code == 0
