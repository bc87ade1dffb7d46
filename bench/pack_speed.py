"""Packing photographs into RecordIO: `flambeau pack` on one and on several threads, against a loop of OpenCV.

    python bench/pack_speed.py --data DIR [--images N] [--resize N] [--threads N] [--rounds N] [--record]

All make a .rec of the photographs found in DIR, the shorter side resized to N and encoded as JPEG of quality
95. MXNet's im2rec, which is no longer installable, does the same with OpenCV: `opencv` is its loop in one
process, with its default interpolation, which is not antialiased, and colours at half the resolution;
flambeau antialiases (bicubic) and keeps the resolution of colours, to which `opencv-area` comes nearest.
Contenders take turns in a new order each round; each is a process of its own, on one core, or on as many as
it has threads. One JSON line a contender: images a second of wall time, its ratio to `opencv` and to
`flambeau-1` in the same round, and CPU time an image, which a busy neighbour changes less. `others_cores`
says how many cores the rest of the machine used meanwhile, by which to judge the wall time. What each takes
to start, measured in each round by packing a single photograph, is taken off, and told as `start_s`; few
photographs are repeated, up to --images.
"""

import argparse
import importlib.metadata
import itertools
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
from pathlib import Path
from typing import Any, NamedTuple

from provenance import commit, cpu_model  # beside this script

RESULTS = Path(__file__).parent / "results" / "pack_speed.jsonl"
QUALITY = 95
VERSIONS = {"opencv": "opencv-python-headless", "flambeau": "flambeau"}


class Run(NamedTuple):
    wall_s: float
    cpu_s: float
    others_cores: float
    size: int  # bytes of the .rec


def opencv(data: Path, target: Path, resize: int, *, like_ours: bool) -> None:
    """What im2rec does with one thread, in Python."""
    import cv2

    from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack

    cv2.setNumThreads(0)
    method = cv2.INTER_AREA if like_ours else cv2.INTER_LINEAR
    colour = (
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444 if like_ours else cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420
    )
    settings = (cv2.IMWRITE_JPEG_QUALITY, QUALITY, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, colour)
    classes = sorted(path.name for path in data.iterdir())
    with RecordWriter(target) as writer:
        for index, path in enumerate(sorted(data.rglob("*.jp*g"))):
            pixels = cv2.imread(str(path), cv2.IMREAD_COLOR)
            height, width = pixels.shape[:2]
            if min(height, width) > resize:
                share = resize / min(height, width)
                size = round(width * share), round(height * share)
                pixels = cv2.resize(pixels, size, interpolation=method)
            _, encoded = cv2.imencode(".jpg", pixels, settings)
            label = classes.index(path.parent.name)
            writer.write(pack(IRHeader(0, label, index, 0), encoded.tobytes()), key=index)


def command_of(name: str, data: Path, target: Path, resize: int) -> list[str]:
    if name.startswith("opencv"):
        like_ours = ["--like-ours"] if name == "opencv-area" else []
        return [sys.executable, __file__, "--data", str(data), "--opencv", str(target),
                "--resize", str(resize), *like_ours]  # fmt: skip
    return [
        sys.executable, "-m", "flambeau", "pack", str(data), str(target), "--resize", str(resize),
        "--quality", str(QUALITY), "--workers", name.partition("-")[2],
    ]  # fmt: skip


def run(command: list[str], target: Path, cores: set[int]) -> Run:
    """A process on these cores, from its start to its end."""
    own = os.sched_getaffinity(0)
    before, start, busy = (
        resource.getrusage(resource.RUSAGE_CHILDREN),
        time.perf_counter(),
        busy_s(),
    )
    os.sched_setaffinity(0, cores)
    try:
        subprocess.run(
            command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    finally:
        os.sched_setaffinity(0, own)
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    others = max(0.0, (busy_s() - busy - cpu_s) / wall_s)
    return Run(wall_s, cpu_s, others, target.stat().st_size if target.exists() else 0)


def busy_s() -> float:
    """Seconds that the CPUs of this machine have been at work or taken by its host, since it started."""
    with Path("/proc/stat").open(encoding="utf-8") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # idle, iowait


def copy_photos(data: Path, folder: Path, count: int) -> None:
    """Into ten sub-folders, one a class; again from the first one on where there are not enough."""
    found = [path for path in sorted(data.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    for number, path in zip(range(count), itertools.cycle(found), strict=False):
        (folder / str(number % 10)).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / str(number % 10) / f"{number:06}.jpg")


def measured(
    folders: list[Path], cores: list[int], names: list[str], options: argparse.Namespace
) -> dict[str, list[tuple[Run, Run]]]:
    """Of each contender, a round: its runs on one photograph and on all; the first round is not counted."""
    shuffle, runs = random.Random(0), {name: [] for name in names}
    for round_ in range(options.rounds + 1):
        for name in shuffle.sample(names, len(names)):
            threads, found = (options.threads if name == names[-1] else 1), []
            for folder in folders:
                with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                    target = Path(temporary) / "photos.rec"
                    command = command_of(name, folder, target, options.resize)
                    found.append(run(command, target, set(cores[-threads:])))
            if round_:
                runs[name].append((found[0], found[1]))
        print(f"round {round_} of {options.rounds}", file=sys.stderr)
    return runs


def line(name: str, num_images: int, runs: dict[str, list[tuple[Run, Run]]]) -> dict[str, Any]:
    def wall_s(other: str) -> list[float]:
        return [whole.wall_s - start.wall_s for start, whole in runs[other]]

    def ratio_to(other: str) -> float:
        pairs = zip(wall_s(other), wall_s(name), strict=True)
        return round(statistics.median(theirs / ours for theirs, ours in pairs), 3)

    cpu_s = [whole.cpu_s - start.cpu_s for start, whole in runs[name]]
    starts, own = zip(*runs[name], strict=True)
    distribution = VERSIONS[name.partition("-")[0]]
    return {
        "contender": name,
        "images_per_s": round(num_images / statistics.median(wall_s(name)), 1),
        "images_per_s_best": round(num_images / min(wall_s(name)), 1),
        "cpu_ms_per_image": round(1000 * statistics.median(cpu_s) / num_images, 3),
        "start_s": round(statistics.median(start.cpu_s for start in starts), 2),
        "ratio_to_opencv": ratio_to("opencv"),
        "ratio_to_flambeau-1": ratio_to("flambeau-1"),
        "others_cores": round(statistics.median(one.others_cores for one in own), 2),
        "mib": round(own[0].size / 2**20, 1),
        "n": len(own),
        "images": num_images,
        "version": f"{distribution} {importlib.metadata.version(distribution)}",
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "commit": commit(),
        "command": " ".join(
            ["python", "bench/pack_speed.py", *(Path(word).name for word in sys.argv[1:])]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder with JPEGs, at any depth"
    )
    parser.add_argument("--resize", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2, help="of the parallel contender")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    parser.add_argument("--opencv", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--like-ours", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.opencv:
        opencv(options.data, options.opencv, options.resize, like_ours=options.like_ours)
        return
    cores = sorted(os.sched_getaffinity(0))
    if options.threads > len(cores):
        parser.error(f"{options.threads} threads need as many cores; there are {len(cores)}")
    names = ["opencv", "opencv-area", "flambeau-1", f"flambeau-{options.threads}"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "photos"
        folders = [folder / "one", folder / "all"]
        copy_photos(options.data, folders[0], 1)
        copy_photos(options.data, folders[1], options.images + 1)
        runs = measured(folders, cores, names, options)
    lines = [json.dumps(line(name, options.images, runs)) for name in names]
    print("\n".join(lines))
    if options.record:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.writelines(f"{text}\n" for text in lines)


if __name__ == "__main__":
    main()
