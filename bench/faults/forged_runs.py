"""Forged runs of `flambeau train`, and honest ones, before `flambeau verify --replay`: what is seen.

    python bench/faults/forged_runs.py [--few] [--record]

A forger has repaired every checksum: manifests, the CRC of metrics.jsonl, dataset.json, result.json. Two
kinds of forgeries: a file of an honest run was edited (weights, optimizer, figures, published weights, a
checkpoint of another run), or the training was another one than the folder claims (other settings or seed,
one image changed, relabelled or left out, validation images among those trained on). Each is audited with
every interval replayed; `missed` are those of which the audit says that nothing differs. `elsewhere`:
intervals named that an edited checkpoint does not touch; 0 is right.

Honest runs with other settings: `accused` are their intervals that were not equal to the bit.

Cost: seconds of an audit per interval over those of the training's share for it, and over the training.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
sys.path.insert(0, str(Path(__file__).parents[1]))

import hashlib
import re
import zlib

import numpy as np
import safetensors.torch
import torch
from PIL import Image

from flambeau.cli.command import main as flambeau
from flambeau.compare.audit import Audit, AuditOptions, audit
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    from_bytes,
    read_checkpoint,
    save_checkpoint,
    to_bytes,
)
from provenance import commit, cpu_model, record

NUM_TRAIN, SIZE, STEPS, EVERY = 48, 16, 12, 2
WORDS = (
    f"--duration {STEPS}st --batch-size 8 --checkpoint-every {EVERY}st --keep 9 --device cpu "
    "--precision fp32 --lr 0.05 --warmup 0st --seed 3 --log-every 1 --model tiny_convnet"
)
ENDS = range(EVERY, STEPS + 1, EVERY)
OTHER_SETTINGS = (
    "--lr 0.0501", "--weight-decay 0.001", "--momentum 0.89", "--label-smoothing 0.2", "--mixup 0.2",
    "--augment trivialaugment", "--padding 1", "--schedule linear", "--clip-norm 0.01", "--cutmix 0.5",
    "--random-erasing 0.25", "--seed 4", "--seed 5", "--seed 6", "--seed 7", "--balance sqrt",
)  # fmt: skip
HONEST = (
    "", "--ema 0.3", "--mixup 0.2 --augment trivialaugment", "--accumulate 2", "--optimizer adamw --lr 0.001",
    "--precision bf16", "--early-stop 1 --random-erasing 0.25", "--workers 1 --log-every 3", "--parts 2",
)  # fmt: skip


@dataclass(frozen=True)
class Forgery:
    """`make` gets the folder of a new run; `touches`: the step of the edited checkpoint, if one."""

    kind: str
    name: str
    make: Callable[[Path], None]
    touches: int | None = None


def quiet(*words: str) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return flambeau([word for one in words for word in one.split()])


def write_images(root: Path, num_train: int = NUM_TRAIN) -> None:
    noise = np.random.default_rng(0)
    for part, count in (("train", num_train), ("val", 16)):
        for number in range(count):
            path = root / part / "ab"[number % 2] / f"{number // 2:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = noise.integers(60 * (number % 2), 200, (SIZE, SIZE), dtype=np.uint8)
            Image.fromarray(pixels).save(path, compress_level=0)


def train(folder: Path, data: Path, flags: str = "", words: str = WORDS) -> None:
    if quiet("train", str(data), "--out", str(folder), words, flags):
        raise RuntimeError(f"training with {flags} has failed")


# ---------------------------------------------------------------- edited files


def rewrite(
    run: Path, step: int, change: Callable[[dict[str, bytes], dict[str, Any]], None]
) -> None:
    """A checkpoint with other content, and checksums to match."""
    folder = run / "checkpoints" / f"step-{step:08}"
    old = read_checkpoint(folder)
    files, meta = dict(old.files), dict(old.meta)
    change(files, meta)
    shutil.rmtree(folder)
    save_checkpoint(folder, files, meta=meta)


def edit_weight(files: dict[str, bytes], _: dict[str, Any]) -> None:
    tensors = safetensors.torch.load(files["model.safetensors"])
    name = min(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[0] += 1e-3
    files["model.safetensors"] = safetensors.torch.save(tensors)


def edit_optimizer(files: dict[str, bytes], _: dict[str, Any]) -> None:
    state = from_bytes(files["training_state.pt"])
    state["optimizer"]["state"][0]["momentum_buffer"].view(-1)[0] += 1e-3
    files["training_state.pt"] = to_bytes(state)


def edit_figure(run: Path, line: int) -> None:
    """The eighth decimal of a line's first figure, and the CRC in all checkpoints."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    name = "val_loss" if "val_loss" in lines[line] else "train_loss"
    found = re.search(rf'"{name}": [0-9]+[.][0-9]{{7}}([0-9])', lines[line])
    assert found is not None
    digit = "2" if found[1] != "2" else "7"
    lines[line] = lines[line][: found.start(1)] + digit + lines[line][found.end(1) :]
    path.write_text("".join(lines))
    content = path.read_bytes()
    for step in (0, *ENDS):

        def repair(_: dict[str, bytes], meta: dict[str, Any]) -> None:
            meta["metrics_crc32"] = zlib.crc32(content[: meta["metrics_bytes"]])

        rewrite(run, step, repair)


def edit_published(run: Path, source: Path) -> None:
    """Other weights, with the SHA-256 that result.json has to say."""
    content = source.read_bytes()
    (run / "model.safetensors").write_bytes(content)
    result = json.loads((run / "result.json").read_text())
    result["sha256"] = hashlib.sha256(content).hexdigest()
    (run / "result.json").write_text(json.dumps(result))


def remove_published_checkpoint(run: Path, source: Path) -> None:
    """Other weights, and nothing left that they could be compared with."""
    edit_published(run, source)
    step = json.loads((run / "result.json").read_text())["step"]
    shutil.rmtree(run / "checkpoints" / f"step-{step:08}")


# ---------------------------------------------------------------- forgeries


def forgeries(root: Path, *, few: bool) -> Iterator[Forgery]:
    """All, or one of each kind."""
    honest, other = root / "honest", root / "other"

    def of(
        kind: str, name: str, edit: Callable[[Path], None], touches: int | None = None
    ) -> Forgery:
        def make(run: Path) -> None:
            shutil.copytree(honest, run)
            edit(run)

        return Forgery(kind, name, make, touches)

    def claim(
        kind: str, name: str, flags: str = "", data: Callable[[Path], None] | None = None
    ) -> Forgery:
        """Another training, whose folder says what the honest one says."""

        def make(run: Path) -> None:
            images = root / "images"
            if data is not None:
                images = Path(f"{run}-images")
                shutil.copytree(root / "images", images)
                data(images)
            train(run, images, flags)
            for file in ("config.toml", "dataset.json"):
                shutil.copy(honest / file, run / file)

        return Forgery(kind, name, make)

    steps = list(ENDS)[2:3] if few else list(ENDS)
    for step in steps:
        yield of("edited weight", str(step), lambda run, s=step: rewrite(run, s, edit_weight), step)
        yield of(
            "edited optimizer", str(step), lambda run, s=step: rewrite(run, s, edit_optimizer), step
        )
        place = f"checkpoints/step-{step:08}"

        def swap(run: Path, place: str = place) -> None:
            shutil.rmtree(run / place)
            shutil.copytree(other / place, run / place)

        yield of("checkpoint of another run", str(step), swap, step)

        def rename(run: Path, place: str = place) -> None:
            shutil.rmtree(run / place)
            shutil.copytree(honest / "checkpoints/step-00000000", run / place)

        yield of("checkpoint of another step", str(step), rename, step)
    for line in (6,) if few else (0, 1, 3, 4, 6, 7, 9, 11, 13):
        yield of("edited figure", str(line), lambda run, n=line: edit_figure(run, n))
    for source in ("model.safetensors", "checkpoints/step-00000002/model.safetensors"):
        yield of("published weights", source, lambda run, s=source: edit_published(run, other / s))
        yield of(
            "published weights", f"{source}, their checkpoint removed",
            lambda run, s=source: remove_published_checkpoint(run, other / s),
        )  # fmt: skip
    for flags in ("--lr 0.0501", "--seed 4") if few else OTHER_SETTINGS:
        kind = "order of batches" if "seed" in flags or "balance" in flags else "other settings"
        yield claim(kind, flags, flags)
    yield from _of_data(claim, few=few)


def _of_data(claim: Callable[..., Forgery], *, few: bool) -> Iterator[Forgery]:
    for number in (7,) if few else (0, 5, 11, 17, 23):
        name = f"{number:02}.png"

        def left_out(images: Path, name: str = name) -> None:
            (images / "train/a" / name).unlink()

        def changed(images: Path, name: str = name) -> None:
            path = images / "train/b" / name
            pixels = np.array(Image.open(path))
            pixels[7, 3] ^= 1
            Image.fromarray(pixels).save(path, compress_level=0)

        def relabelled(images: Path, name: str = name) -> None:
            (images / "train/a" / name).rename(images / "train/b" / f"9{name}")

        yield claim("image left out", name, data=left_out)
        yield claim("pixel changed", name, data=changed)
        yield claim("image relabelled", name, data=relabelled)
    for count in (1,) if few else (1, 4, 8):

        def leaked(images: Path, count: int = count) -> None:
            for path in sorted((images / "val/a").iterdir())[:count]:
                shutil.copy(path, images / "train/a" / f"8{path.name}")

        yield claim("trained on validation images", str(count), data=leaked)


def audited(run: Path, replays: int = 99) -> Audit:
    with contextlib.redirect_stderr(io.StringIO()):
        return audit(run, AuditOptions(replays=replays, seed=0, trust=True), say=lambda text: None)


def elsewhere(forgery: Forgery, result: Audit) -> int:
    """Intervals named that the edited checkpoint does not touch."""
    if forgery.touches is None:
        return 0
    wrong = [one.interval for one in result.outcomes if not one.is_equal]
    return sum(forgery.touches not in (one.start, one.end) for one in wrong)


def prepare(root: Path) -> None:
    write_images(root / "images")
    train(root / "honest", root / "images")
    train(root / "other", root / "images", "--seed 9")


def check_forgeries(root: Path, *, few: bool) -> dict[str, Any]:
    made: Counter[str] = Counter()
    missed: list[str] = []
    stray = 0
    for number, forgery in enumerate(forgeries(root, few=few)):
        run = root / f"forged-{number}"
        forgery.make(run)
        result = audited(run)
        made[forgery.kind] += 1
        print(
            number, forgery.kind, forgery.name, "missed" if result.good else "seen", file=sys.stderr
        )
        if result.good:
            missed.append(f"{forgery.kind}: {forgery.name}")
        stray += elsewhere(forgery, result)
        shutil.rmtree(run)
    return {"forgeries": dict(made), "num": made.total(), "missed": missed, "elsewhere": stray}


def check_honest(root: Path, *, few: bool) -> dict[str, Any]:
    num, accused = 0, []
    for number, flags in enumerate(HONEST[:2] if few else HONEST):
        run = root / f"honest-{number}"
        train(run, root / "images", flags)
        result = audited(run)
        num += len(result.outcomes)
        wrong = [one for one in result.outcomes if not one.is_equal]
        accused += [f"{flags}: {one.interval}: {one.differences or one.why_not}" for one in wrong]
        if not result.good and not wrong:
            accused.append(f"{flags}: {result.lines}")
    return {"honest_intervals": num, "accused": accused}


def cost(root: Path) -> dict[str, Any]:
    """Of one interval, an epoch, of ten; seconds of the processor, as others may use the machine."""
    write_images(root / "more", num_train=4800)
    words = (
        "--epochs 10 --batch-size 32 --keep 99 --device cpu --precision fp32 --model small_convnet"
    )
    began = time.process_time()
    train(root / "long", root / "more", words=f"{words} --seed 3")
    seconds = time.process_time() - began
    began = time.process_time()
    result = audited(root / "long", replays=3)
    each = (time.process_time() - began) / len(result.outcomes)
    return {
        "cost_good": result.good,
        "cost_intervals": result.intervals,
        "training_s": round(seconds, 1),
        "audit_s_per_interval": round(each, 2),
        "beside_its_share": round(each / (seconds / result.intervals), 2),
        "beside_the_training": round(each / seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--few", action="store_true", help="one forgery of each kind, no cost")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        prepare(root)
        row: dict[str, Any] = {"bench": "forged_runs"}
        row |= check_forgeries(root, few=arguments.few)
        row |= check_honest(root, few=arguments.few)
        if not arguments.few:
            row |= cost(root)
    row |= {"torch": torch.__version__, "cpu": cpu_model(), "commit": commit()}
    record(row, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
