"""Images a second on one core, from JPEG files to uint8 batches, against torchvision and other loaders.

    python bench/image_loader.py --data DIR [--only NAME,NAME] [--rounds N] [--threads N] [--record]

Every contender reads the same photographs (up to 1,000 JPEGs found in DIR, copied into a temporary folder,
page cache warm) in a random order, and makes batches of 64 of random resized crops (8 to 100 % of the area)
of 224 x 224, mirrored in half of the cases, as uint8; `torchvision-v1-float` normalises on the CPU as well.
Each is a process of its own, all on one core, without worker processes; each round runs every contender
once over all photographs, in a new order, and takes CPU time, so that a busy neighbour does not count.
What a contender prepares ahead is waited for and counted, or its next round would get it for nothing.
The ratio is to torchvision-v1 of the same round, and `fast_ratio` that of `fast` to this contender; the ones
that are not `antialiased` make other images. `peak_mib` is the most memory held in an epoch, packing not
counted. One JSON line a contender. Peers run where they are installed (pip install -e '.[bench]'); what they
need packed is packed into the temporary folder, uncounted. Every contender must make as many images, of
about the brightness, as torchvision-v1: who skips work is refused.

With --threads N, `flambeau` and `flambeau-packed` run on N threads and N cores as well, in pairs with one
thread on one core, by wall time. That needs a quiet machine: `others_cores` says how many cores the rest of
it used meanwhile, and pairs in which that was more than a twentieth of a core are left out, or, where there
is no other, all but the quietest quarter.
"""

import argparse
import contextlib
import importlib.metadata
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
from typing import Any, NamedTuple

import numpy as np

from image_contenders import CONTENDERS
from image_peers import PEERS
from provenance import commit, cpu_model, record  # beside this script

MOST_IMAGES = 1000
QUIET = 0.05  # cores that others may use in a pair that counts
ALL = CONTENDERS | PEERS
NOT_ANTIALIASED = ("opencv", "tf.data")  # a resize of four pixels each: less work, other images


class Epoch(NamedTuple):
    """What a contender tells of an epoch: seconds of CPU and of the clock, and the highest memory so far."""

    cpu_s: float
    wall_s: float
    images: int
    brightness: float
    peak_mib: float


def serve(name: str, folder: Path) -> None:
    """The process of a contender: for each line read it runs an epoch, and tells what that took."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no reply
    warnings.simplefilter("ignore")
    random.seed(0)
    with tempfile.TemporaryDirectory() as work:
        batches = ALL[name][0](folder, Path(work))
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
            torch.manual_seed(0)
        replies.write("ready\n")
        with contextlib.suppress(OSError):  # Linux: from here on the highest memory counts
            Path("/proc/self/clear_refs").write_text("5")
        used_s = settled()
        for epoch in map(int, sys.stdin):
            images, sums, start = 0, [], time.perf_counter()
            for batch in batches(epoch):
                images += len(batch)
                if not epoch and str(batch.dtype).endswith("uint8"):
                    sums.append(float(np.asarray(batch).mean()))
            wall_s, before_s, used_s = time.perf_counter() - start, used_s, settled()
            brightness = float(np.mean(sums or [0]))
            replies.write(
                json.dumps(Epoch(used_s - before_s, wall_s, images, brightness, peak_mib())) + "\n"
            )
        replies.close()


def settled() -> float:
    """CPU time of this process, once its threads have nothing more to do."""
    before, now = -1.0, time.process_time()
    while now - before > 0.002:
        time.sleep(0.05)
        before, now = now, time.process_time()
    return now


def peak_mib() -> float:
    with contextlib.suppress(OSError):
        for text in Path("/proc/self/status").read_text().splitlines():
            if text.startswith("VmHWM"):
                return int(text.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Contender:
    """The other end of `serve`; it runs on the cores of this process."""

    def __init__(self, name: str, folder: Path, log: Path) -> None:
        self.name, self.log = name, log
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--data", str(folder), "--serve", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, bufsize=1,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def reply(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            reason = (self.log.read_text().strip().splitlines() or ["it ended"])[-1]
            raise RuntimeError(f"{self.name} is left out: {reason}")
        return line

    def run(self, epoch: int) -> Epoch:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{epoch}\n")
        return Epoch(*json.loads(self.reply()))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    arguments = parse()
    if arguments.serve:
        serve(arguments.serve, arguments.data)
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-1:])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "photos"
        num_images = copy_photos(arguments.data, folder)
        contenders = start(arguments.only, folder)
        try:
            figures = measure(
                contenders,
                num_images,
                rounds=arguments.rounds,
                shuffle=random.Random(arguments.seed),
            )
            lines = [line(name, num_images, figures) for name in figures]
            for one in contenders if arguments.threads else []:
                if one.name in ("flambeau", "flambeau-packed"):
                    lines.append(threads_line(one, folder, cores, num_images, arguments))
        finally:
            for contender in contenders:
                contender.end()
    for entry in lines:
        record(entry, __file__, keep=arguments.record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder with JPEGs, at any depth"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="names, separated by commas; torchvision-v1 always runs"
    )
    parser.add_argument("--threads", type=int, default=0, help="flambeau on so many cores as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--record", action="store_true", help="append to bench/results/image_loader.jsonl"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    only = {name.strip() for name in arguments.only.split(",")} - {""}
    if only - ALL.keys():
        parser.error(f"no contender {', '.join(sorted(only - ALL.keys()))}: {', '.join(ALL)}")
    if arguments.threads > len(os.sched_getaffinity(0)):
        parser.error(f"{arguments.threads} threads need as many cores")
    arguments.only = [n for n in ALL if not only or n in only or n == "torchvision-v1"]
    return arguments


def copy_photos(data: Path, folder: Path) -> int:
    photos = [path for path in sorted(data.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    if not photos:
        sys.exit(f"{data} holds no .jpg and no .jpeg: name a folder of photographs with --data")
    for number, path in enumerate(photos[:MOST_IMAGES]):
        (folder / str(number % 10)).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / str(number % 10) / f"{number:04}.jpg")
    return min(len(photos), MOST_IMAGES)


def start(names: list[str], folder: Path) -> list[Contender]:
    started = []
    for name in names:
        distribution = ALL[name][1]
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} is left out: pip install {distribution}", file=sys.stderr)
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
) -> dict[str, list[Epoch]]:
    """The epochs of each contender, one a round, after one that is not counted."""
    figures: dict[str, list[Epoch]] = {each.name: [] for each in contenders}
    brightness: dict[str, float] = {}
    for round_ in range(rounds + 1):
        for contender in shuffle.sample(contenders, len(contenders)):
            try:
                epoch = contender.run(round_)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                contenders.remove(contender)
                del figures[contender.name]
                continue
            made = f"{contender.name} made {epoch.images} of {num_images} images"
            assert epoch.images == num_images, made
            if round_:
                figures[contender.name].append(epoch)
            else:
                brightness[contender.name] = epoch.brightness
        print(f"round {round_} of {rounds}", file=sys.stderr)
    expected = brightness["torchvision-v1"]
    for name, mean in brightness.items():
        # The limit makes no images of one size; floats are around zero.
        if name not in ("limit", "torchvision-v1-float"):
            assert abs(mean - expected) < 6, f"{name} is as bright as {mean}, not {expected}"
    return figures


def line(name: str, num_images: int, figures: dict[str, list[Epoch]]) -> dict[str, Any]:
    rates = sorted(num_images / epoch.cpu_s for epoch in figures[name])
    return {
        "contender": name,
        "images_per_s": round(statistics.median(rates)),
        "images_per_s_min": round(rates[0]),
        "images_per_s_max": round(rates[-1]),
        **ratio("ratio", figures[name], figures["torchvision-v1"]),
        **(ratio("fast_ratio", figures["fast"], figures[name]) if "fast" in figures else {}),
        "antialiased": name not in NOT_ANTIALIASED,
        "peak_mib": round(max(epoch.peak_mib for epoch in figures[name])),
        "n": len(rates),
        **facts(name, num_images),
    }


def ratio(name: str, faster: list[Epoch], slower: list[Epoch]) -> dict[str, float]:
    """How many times as fast, in the same rounds: median, least and most."""
    found = sorted(theirs.cpu_s / own.cpu_s for own, theirs in zip(faster, slower, strict=True))
    figures = {"": statistics.median(found), "_min": found[0], "_max": found[-1]}
    return {f"{name}{end}": round(figure, 3) for end, figure in figures.items()}


def threads_line(
    one: Contender, folder: Path, cores: list[int], num_images: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The contender `one`, which has one thread on one core, against the same on several."""
    name, num_threads = f"{one.name}-{arguments.threads}-threads", arguments.threads
    os.sched_setaffinity(0, cores[-num_threads:])  # which sets flambeau's number of threads
    many = Contender(one.name, folder, folder.parent / f"{name}.log")
    shuffle, pairs = random.Random(arguments.seed), []
    try:
        many.reply()
        many.run(0)
        for number in range(1, 4 * arguments.rounds + 1):
            before, cpu_s, seconds = busy_cpu_s(), 0.0, {}
            start = time.perf_counter()
            for contender in shuffle.sample((one, many), 2):
                epoch = contender.run(number)
                seconds[contender], cpu_s = epoch.wall_s, cpu_s + epoch.cpu_s
            others = (busy_cpu_s() - before - cpu_s) / (time.perf_counter() - start)
            pairs.append((others, seconds[one], seconds[many]))
    finally:
        many.end()
        os.sched_setaffinity(0, cores[-1:])
    pairs.sort()
    counted = [pair for pair in pairs if pair[0] < QUIET] or pairs[: arguments.rounds]
    ratios = sorted(alone / together for _, alone, together in counted)
    return {
        "contender": name,
        "images_per_s": round(num_images / min(together for _, _, together in counted)),
        "images_per_s_one_thread": round(num_images / min(alone for _, alone, _ in counted)),
        "ratio_to_one_thread": round(statistics.median(ratios), 3),
        "ratio_to_one_thread_min": round(ratios[0], 3),
        "ratio_to_one_thread_max": round(ratios[-1], 3),
        "others_cores": round(statistics.median(others for others, _, _ in counted), 3),
        "load_average": round(os.getloadavg()[0], 2),
        "n": len(counted),
        "n_disturbed": len(pairs) - len(counted),
        **facts(one.name, num_images),
    }


def busy_cpu_s() -> float:
    """Seconds that the CPUs of this machine have been at work or taken by its host, since it started."""
    with Path("/proc/stat").open() as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]  # idle, iowait
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")


def facts(name: str, num_images: int) -> dict[str, Any]:
    return {
        "images": num_images,
        "version": " ".join(versions(name)),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "commit": commit(),
        "command": " ".join(
            ["python", "bench/image_loader.py", *(Path(word).name for word in sys.argv[1:])]
        ),
    }


def versions(name: str) -> Iterator[str]:
    distribution = ALL[name][1]
    yield f"{distribution} {importlib.metadata.version(distribution)}"
    if distribution in ("torchvision", "timm"):
        yield f"pillow {importlib.metadata.version('pillow')}"


if __name__ == "__main__":
    main()
