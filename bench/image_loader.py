"""Images a second on one core, from JPEG files to uint8 batches, against torchvision and other loaders.

    OMP_NUM_THREADS=1 python bench/image_loader.py --data DIR [--only NAME,NAME] [--rounds N] [--record]

Every contender reads the same photographs (up to 1,000 JPEGs found in DIR, copied into a temporary folder,
page cache warm) in a random order, and makes batches of 64 of random resized crops (8 to 100 % of the area)
of 224 x 224, mirrored in half of the cases, as uint8; `torchvision-v1-float` normalises on the CPU as well.
Each is a process of its own, all on one core, without worker processes; each round runs every contender
once over all photographs, in a new order, and takes CPU time, so that a busy neighbour does not count.
The ratio is to torchvision-v1 of the same round. One JSON line a contender. Peers run where they are
installed; what they need packed is packed into the temporary folder, uncounted. Every contender must make
as many images, of about the brightness, as torchvision-v1: who skips work is refused.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from image_contenders import CONTENDERS

MOST_IMAGES = 1000


def serve(name: str, folder: Path) -> None:
    """The process of a contender: for each line read it runs an epoch, and tells what that took."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no reply
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    with tempfile.TemporaryDirectory() as work:
        batches = CONTENDERS[name][0](folder, Path(work))
        replies.write("ready\n")
        for epoch in map(int, sys.stdin):
            images, sums, start = 0, [], time.process_time()
            for batch in batches(epoch):
                images += len(batch)
                if not epoch and batch.dtype in (torch.uint8, np.uint8):
                    sums.append(float(np.asarray(batch).mean()))
            seconds = time.process_time() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            replies.write(json.dumps([seconds, images, np.mean(sums or [0]), peak]) + "\n")
        replies.close()


class Contender:
    """The other end of `serve`."""

    def __init__(self, name: str, folder: Path, log: Path) -> None:
        self.name, self.log = name, log
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--data", str(folder), "--serve", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, bufsize=1,
        )  # fmt: skip

    def reply(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            reason = (self.log.read_text().strip().splitlines() or ["it ended"])[-1]
            raise RuntimeError(f"{self.name} is left out: {reason}")
        return line

    def run(self, epoch: int) -> tuple[float, int, float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{epoch}\n")
        return tuple(json.loads(self.reply()))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder with JPEGs, at any depth"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="names, separated by commas; torchvision-v1 always runs"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", action="store_true", help="append to bench/results/image_loader.jsonl"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.data)
        return
    only = {name.strip() for name in arguments.only.split(",")} - {""}
    if only - CONTENDERS.keys():
        parser.error(
            f"no contender {', '.join(sorted(only - CONTENDERS.keys()))}: {', '.join(CONTENDERS)}"
        )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "photos"
        found = [
            p for p in sorted(arguments.data.rglob("*")) if p.suffix.lower() in (".jpg", ".jpeg")
        ]
        for number, path in enumerate(found[:MOST_IMAGES]):
            (folder / str(number % 10)).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / str(number % 10) / f"{number:04}.jpg")
        num_images = min(len(found), MOST_IMAGES)
        contenders = start(
            [n for n in CONTENDERS if not only or n in only or n == "torchvision-v1"], folder
        )
        try:
            figures = measure(
                contenders,
                num_images,
                rounds=arguments.rounds,
                shuffle=random.Random(arguments.seed),
            )
        finally:
            for contender in contenders:
                contender.end()
    lines = [line(name, num_images, figures) for name in figures]
    for entry in lines:
        print(json.dumps(entry))
    if arguments.record:
        path = Path(__file__).parent / "results" / "image_loader.jsonl"
        with path.open("a") as results:
            results.writelines(json.dumps(entry) + "\n" for entry in lines)


def start(names: list[str], folder: Path) -> list[Contender]:
    started = []
    for name in names:
        module = CONTENDERS[name][1]
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            print(f"{name} is left out: {module} is not installed", file=sys.stderr)
            continue
        contender = Contender(name, folder, folder.parent / f"{name}.log")
        try:
            contender.reply()
            started.append(contender)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            contender.end()
    return started


def measure(
    contenders: list[Contender], num_images: int, *, rounds: int, shuffle: random.Random
) -> dict[str, list[tuple[float, float]]]:
    """Of each contender, a round: seconds of CPU time an image, and its peak of memory in MiB."""
    figures: dict[str, list[tuple[float, float]]] = {each.name: [] for each in contenders}
    brightness: dict[str, float] = {}
    for round_ in range(rounds + 1):
        for contender in shuffle.sample(contenders, len(contenders)):
            try:
                seconds, images, mean, peak = contender.run(round_)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                contenders.remove(contender)
                del figures[contender.name]
                continue
            assert images == num_images, f"{contender.name} made {images} of {num_images} images"
            if round_:
                figures[contender.name].append((seconds / images, peak))
            else:
                brightness[contender.name] = mean
        print(f"round {round_} of {rounds}", file=sys.stderr)
    expected = brightness["torchvision-v1"]
    for name, mean in brightness.items():
        # The limit makes no images of one size; floats are around zero.
        if name not in ("limit", "torchvision-v1-float"):
            assert abs(mean - expected) < 6, f"{name} is as bright as {mean}, not {expected}"
    return figures


def line(
    name: str, num_images: int, figures: dict[str, list[tuple[float, float]]]
) -> dict[str, Any]:
    pairs = zip(figures[name], figures["torchvision-v1"], strict=True)
    ratios = sorted(theirs / ours for (ours, _), (theirs, _) in pairs)
    rates = sorted(1 / seconds for seconds, _ in figures[name])
    return {
        "contender": name,
        "images_per_s": round(statistics.median(rates)),
        "images_per_s_min": round(rates[0]),
        "images_per_s_max": round(rates[-1]),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(ratios[0], 3),
        "ratio_max": round(ratios[-1], 3),
        "peak_mib": round(max(peak for _, peak in figures[name])),
        "n": len(rates),
        "images": num_images,
        "version": " ".join(versions(name)),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "commit": commit(),
        "command": " ".join(["python", "bench/image_loader.py", *sys.argv[1:]]),
    }


def versions(name: str) -> Iterator[str]:
    distribution = CONTENDERS[name][2]
    yield f"{distribution} {importlib.metadata.version(distribution)}"
    if distribution in ("torchvision", "timm"):
        yield f"pillow {importlib.metadata.version('pillow')}"
    if name in ("flambeau", "limit"):
        from flambeau.data.jpeg import jpeg_decoder

        yield jpeg_decoder()


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (
        " with changes" if git("status", "--porcelain") else ""
    )


if __name__ == "__main__":
    main()
