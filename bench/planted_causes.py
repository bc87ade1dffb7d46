"""Plants one cause at a time into the second of two trainings, and asks `flambeau diff --replay` for it.

    python bench/planted_causes.py [--only WORD] [--record]

A cause is named if the words of the verdict hold it, and found if the step is the one at which it acts first:
that of the replay, or where only files can tell, one within the steps that the checkpoints leave open.
Two causes (a library, a processor) cannot be had twice on one machine: an edited environment.json stands for
them, and the words alone are tested. Two more are computed in processes of their own (threads, kernels).

Prints a JSON line per cause and one in all; the exit code is 1 if a cause was not named at its step.
tests/compare/test_planted_causes.py runs the same code.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import contextlib
import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from flambeau.cli.command import main
from flambeau.recipes.data.sample_order import sample_order
from flambeau.run.loop.training_step import TrainingStep
from provenance import commit, cpu_model, record  # beside this script

LIMIT_S = 120.0
NUM_TRAIN, SIZE, BATCH, ODD_STEP = 48, 16, 8, 5
WORDS = (
    "--duration 12st --batch-size 8 --checkpoint-every 4st --keep 9 --device cpu --precision fp32 --lr 0.05 "
    "--warmup 0st --seed 3"
)
MODEL = """
from torch import nn

def make(num_classes, channels, momentum=0.1, dropout=0.1):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU(), nn.Dropout(dropout),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )

def more_momentum(num_classes, channels):
    return make(num_classes, channels, momentum=0.2)

def more_dropout(num_classes, channels):
    return make(num_classes, channels, dropout=0.2)
"""


@dataclass
class Cause:
    """Something that makes two runs differ.

    Attributes:
        name: of the cause.
        step: at which it acts first; 0 for what the training starts from, None where nothing differs.
        words: that the verdict must hold, each of them.
        left, right: flags of the two runs.
        data: of both, or of each, below the root.
        around: around the second training.
        after: changes the folder of the second run.
        environ: (first, second): each trains in a process of its own, with this environment.
        replays: whether the replay is to find the step; else the files alone.
    """

    name: str
    step: int | None
    words: list[str]
    left: str = ""
    right: str = ""
    data: tuple[str, str] = ("images", "images")
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    after: Callable[[Path], None] = lambda folder: None
    environ: tuple[dict[str, str], dict[str, str]] | None = None
    replays: bool = True


@dataclass
class Outcome:
    """What was found of a cause."""

    name: str
    named: bool
    step_planted: int | None
    step_found: int | list[int] | None
    right_step: bool
    seconds: float
    verdict: str = field(repr=False, default="")


# ---------------------------------------------------------------- data


def write_data(root: Path) -> None:
    """images/ and its variants: pixel/, missing/, more/; and listings whose labels differ."""
    noise = np.random.default_rng(0)
    for part, count in (("train", NUM_TRAIN), ("val", 16)):
        for number in range(count):
            name = "ab"[number % 2]
            path = root / "images" / part / name / f"{number // 2:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = noise.integers(60 * (number % 2), 200, (SIZE, SIZE), dtype=np.uint8)
            Image.fromarray(pixels).save(path, compress_level=0)
    for variant in ("pixel", "missing", "more"):
        shutil.copytree(root / "images", root / variant)
    path = root / "pixel" / odd_image()
    pixels = np.array(Image.open(path))
    pixels[7, 3] += 1
    Image.fromarray(pixels).save(path, compress_level=0)
    (root / "missing/train/a/07.png").unlink()
    shutil.copy(root / "images/train/a/00.png", root / "more/train/a/99.png")
    relabel: dict[str, dict[str, str]] = {
        "listed": {},
        "label": {f"images/{odd_image()}": "a"},
        "classes": {},
    }
    for name, changed in relabel.items():
        with (root / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["path", "label", "split"])
            for image in sorted(root.glob("images/*/*/*.png")):
                place = image.relative_to(root)
                label = changed.get(str(place), place.parts[2])
                label = {"a": "z"}.get(label, label) if name == "classes" else label
                writer.writerow([place, label, place.parts[1]])
    (root / "model.py").write_text(MODEL)


def odd_image() -> str:
    """An image of class b, the second half, that is seen first at ODD_STEP."""
    order = sample_order(NUM_TRAIN, seed=3, epoch=0).tolist()
    batch = order[(ODD_STEP - 1) * BATCH : ODD_STEP * BATCH]
    number = next(index for index in batch if index >= NUM_TRAIN // 2)
    return f"train/b/{number - NUM_TRAIN // 2:02}.png"


# ---------------------------------------------------------------- causes


@contextlib.contextmanager
def flipped_bit(step: int) -> Iterator[None]:
    """A bit of a weight changes in memory when a step is done."""
    own = TrainingStep._finish

    def finish(self: TrainingStep, losses: Any) -> None:
        own(self, losses)
        if self.state.step == step:
            weight = next(self.state.model.parameters())
            weight.data.view(torch.int32).view(-1)[2] ^= 1 << 21

    with mock.patch.object(TrainingStep, "_finish", finish):
        yield


@contextlib.contextmanager
def not_finite(step: int) -> Iterator[None]:
    """The loss of a step is not finite, once."""
    own, done = TrainingStep.__call__, [False]

    def call(self: TrainingStep, loss: Any, micro: Any) -> bool:
        if self.state.step == step - 1 and not done[0]:
            done[0], loss = True, loss * float("inf")
        return own(self, loss, micro)

    with mock.patch.object(TrainingStep, "__call__", call):
        yield


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """environment.json with a change."""

    def edit(folder: Path) -> None:
        path = folder / "environment.json"
        report = json.loads(path.read_text())
        change(report)
        path.write_text(json.dumps(report))

    return edit


def flip_on_disk(folder: Path) -> None:
    path = folder / "checkpoints/step-00000008/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-40] ^= 4
    path.write_bytes(data)


KILLED = """
import os, pathlib, sys, time
from flambeau.run.loop.training_step import TrainingStep
own = TrainingStep._finish
def finish(self, losses):
    own(self, losses)
    if self.state.step == 6:
        while not (saved / "manifest.json").exists():
            time.sleep(0.01)
        os._exit(9)
saved = pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "checkpoints", "step-00000004")
TrainingStep._finish = finish
from flambeau.cli.command import main
main(sys.argv[1:])
"""


def causes(root: Path) -> list[Cause]:
    """All that are planted."""
    model = f"--model {root / 'model.py'}"
    odd = odd_image()
    library, processor = {"torch": "2.14.1"}, {"cpu": "Another Processor", "cpu_features": ["avx2"]}
    return [
        Cause("seed", 0, ["seed (3 and 4)"], right="--seed 4"),
        Cause("one pixel", ODD_STEP, ["1 pixel", odd, "row 7, column 3"], data=("images", "pixel")),
        Cause("one label", ODD_STEP, ["the label of", odd], data=("listed.csv", "label.csv")),
        Cause("learning rate", 1, ["lr (0.05 and 0.04)"], right="--lr 0.04"),
        Cause("weight decay", 1, ["weight_decay (0.0005 and 0.001)"], right="--weight-decay 0.001"),
        Cause("momentum", 1, ["momentum (0.9 and 0.8)"], right="--momentum 0.8"),
        Cause("label smoothing", 1, ["label_smoothing (0.1 and 0.2)"], right="--label-smoothing 0.2"),
        Cause("mixup", 1, ["mixup (0.2 and 0.4)", "the input of the model"], "--mixup 0.2", "--mixup 0.4"),
        Cause("augmentation", 1, ["augment (none and trivialaugment)"], right="--augment trivialaugment"),
        Cause("crop and padding", 1, ["padding (2 and 1)"], right="--padding 1"),
        Cause("batch size", 1, ["batch_size (8 and 6)"], right="--batch-size 6"),
        Cause("accumulation", 1, ["accumulate (1 and 2)"], right="--accumulate 2"),
        Cause("precision", 1, ["precision (fp32 and bf16)", "the output of"], right="--precision bf16"),
        Cause("schedule", 2, ["schedule (cosine and linear)"], right="--schedule linear"),
        Cause("warm-up", 1, ["warmup (2st and 3st)"], "--warmup 2st", "--warmup 3st"),
        Cause("duration", 2, ["duration (12st and 14st)"], right="--duration 14st"),
        Cause("average of weights", 4, ["ema (0.3 and 0.9)", "average"], "--ema 0.3", "--ema 0.9"),
        Cause("clipping", 1, ["clip_norm (0.0 and 0.01)"], right="--clip-norm 0.01"),
        Cause("BatchNorm momentum", 1, ["running_mean"], f"{model}:make", f"{model}:more_momentum"),
        Cause("dropout", 1, ["'3' (Dropout)"], f"{model}:make", f"{model}:more_dropout"),
        Cause("another model", 0, ["model (tiny_convnet and small_convnet)"], right="--model small_convnet"),
        Cause("initial weights", 0, ["weights (not given and"], right=f"--weights {root / 'other'}"),
        Cause("order of classes", 1, ["class 'a'", "the label of"], data=("listed.csv", "classes.csv")),
        Cause("image size", 1, ["image_size (16 and 12)"], right="--image-size 12"),
        Cause("a sample missing", 1, ["a/07.png is in the first alone"], data=("images", "missing")),
        Cause("a sample more", 1, ["a/99.png is in the second alone"], data=("images", "more")),
        Cause("library", None, ["and 2.14.1)"], after=edited(lambda r: r["exactness"].update(library))),
        Cause("processor", None, ["Another Processor"], after=edited(lambda r: r.update(processor))),
        Cause(
            "threads", 1, ["threads (1 and 2)"], "--batch-size 24", "--batch-size 24",
            environ=({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}),
        ),
        Cause(
            "kernels of the CPU", 0, ["cpu kernels (", "and DEFAULT)", "then, "],
            environ=({}, {"ATEN_CPU_CAPABILITY": "default"}), replays=False,
        ),
        Cause("a bit in memory", 7, ["memory"], around=lambda: flipped_bit(7), replays=False),
        Cause("a bit on the disk", 8, ["bit 2 of byte", "on the disk"], after=flip_on_disk, replays=False),
        Cause(
            "a rollback", 5, ["rollbacks (0 and 1", "step 6 of", "was not finite"],
            "--on-nan rollback", "--on-nan rollback", around=lambda: not_finite(6),
        ),
        Cause("a resume on two processes", 5, ["resumed with processes (1 and 2"], replays=False),
    ]  # fmt: skip


# ---------------------------------------------------------------- trainings


def train(
    root: Path, out: str, data: str, flags: str, environ: dict[str, str] | None = None
) -> None:
    """Train in this process, or in one of its own."""
    model = "" if "--model" in flags else "--model tiny_convnet"
    words = ["train", str(root / data), "--out", str(root / out), *WORDS.split(), *model.split()]
    words += flags.split()
    if environ is None:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = main(words)
        assert code == 0, said.getvalue()
        return
    command = [sys.executable, "-m", "flambeau", *words]
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def resumed_on_two(root: Path, out: str) -> None:
    """Killed after step 6, and continued from step 4 by two processes."""
    words = ["train", str(root / "images"), "--out", str(root / out), *WORDS.split()]
    words += ["--model", "tiny_convnet"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *words], capture_output=True, check=False
    )
    assert killed.returncode == 9, killed.stderr
    launch = [sys.executable, "-m", "flambeau", "launch", "--procs", "2", "--", *words]
    done = subprocess.run(launch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def ask(root: Path, cause: Cause, left: str, right: str) -> Outcome:
    """What `flambeau diff` finds of a cause."""
    out = io.StringIO()
    start = time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(["diff", str(root / left), str(root / right), "--replay", "--json"])
    seconds = time.perf_counter() - start
    assert code in (0, 1), said.getvalue()
    found = json.loads(out.getvalue())
    step, parts = found["replay"]["step"], found["parts_in_steps"]
    named = all(word in found["verdict"] for word in cause.words)
    if cause.name == "a bit on the disk":
        (damaged,) = found["damaged_checkpoints"]
        step = int(damaged["name"].removeprefix("step-"))
    if cause.step is None:
        right_step = parts is None and step is None
    elif cause.replays or cause.name == "a bit on the disk":
        right_step = step == cause.step
    else:
        right_step = parts is not None and parts[0] <= cause.step <= parts[1]
    return Outcome(
        cause.name, named, cause.step, parts if step is None else step, right_step,
        round(seconds, 2), found["verdict"],
    )  # fmt: skip


def tried(root: Path, cause: Cause, known: dict[str, str]) -> Outcome:
    """Train both runs of a cause, unless the first is there already, and compare them."""
    left = known.get(f"{cause.data[0]} {cause.left} {cause.environ}")
    place = cause.name.replace(" ", "-")
    if left is None:
        left = known[f"{cause.data[0]} {cause.left} {cause.environ}"] = f"{place}-1"
        environ = None if cause.environ is None else cause.environ[0]
        train(root, left, cause.data[0], cause.left, environ)
    right = f"{place}-2"
    if cause.name == "a resume on two processes":
        resumed_on_two(root, right)
    else:
        with cause.around():
            environ = None if cause.environ is None else cause.environ[1]
            train(root, right, cause.data[1], cause.right, environ)
    cause.after(root / right)
    return ask(root, cause, left, right)


def run_all(root: Path, *, only: str = "") -> Iterator[Outcome]:
    """Try every cause, or those whose name has a word."""
    write_data(root)
    train(root, "other", "images", "--seed 9")
    known: dict[str, str] = {}
    for cause in causes(root):
        if only in cause.name:
            yield tried(root, cause, known)


def is_good(outcome: Outcome) -> bool:
    """Named, at the right step, in time."""
    return outcome.named and outcome.right_step and outcome.seconds <= LIMIT_S


def main_of_bench() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="causes whose name has this word")
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    arguments = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as root:
        for outcome in run_all(Path(root), only=arguments.only):
            outcomes.append(outcome)
            line = {
                k: v for k, v in vars(outcome).items() if k != "verdict" or not is_good(outcome)
            }
            print(json.dumps(line), flush=True)
    seconds = sorted(outcome.seconds for outcome in outcomes)
    row = {
        "bench": "planted_causes", "causes": len(outcomes),
        "named_at_the_right_step": sum(map(is_good, outcomes)),
        "limit_s": LIMIT_S, "median_s": seconds[len(seconds) // 2], "longest_s": seconds[-1],
        "steps": {o.name: [o.step_planted, o.step_found] for o in outcomes},
        "seconds": {o.name: o.seconds for o in outcomes},
        "missed": [o.name for o in outcomes if not is_good(o)],
        "torch": torch.__version__, "hardware": cpu_model(), "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    record(row, __file__, keep=arguments.record)
    return int(row["missed"] != [])


if __name__ == "__main__":
    sys.exit(main_of_bench())
