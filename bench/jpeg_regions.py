"""Random resized crops out of JPEGs a second: how much of each file is decoded, and by what.

    taskset -c 1 python bench/jpeg_regions.py --data DIR [--rounds N] [--record]

Up to 300 JPEGs of three colors found in DIR, held in memory, and for each round a new box in each: 8 to
100 % of the area, as torchvision's RandomResizedCrop takes it. Contenders decode the whole image, or what
the box needs, of the file as it is or packed (flambeau.images.jpeg.scan_segments, which needs the C
kernel); CPU time of one thread. All but Pillow must give the same pixels: who skips work is refused. Each
round runs every contender once over all images, in a new order; the ratio is to simplejpeg of the same
round. One JSON line per contender; `bytes` is what packing makes of the files, as a share of their size.
"""

import argparse
import io
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from flambeau.data.transforms.crops import random_resized_crop_box
from flambeau.images.jpeg import region_decode as jpeg
from flambeau.images.jpeg.headers import read_header
from flambeau.images.jpeg.scan_segments import CannotSegment, segment
from flambeau.images.native import kernel as native
from flambeau.images.pixels import Box, Pixels
from provenance import commit, cpu_model, record  # beside this script

MOST_IMAGES = 300
INTERVALS = (32, 64, 128)
KERNEL = native.kernel()


def cut(pixels: Pixels, box: Box) -> Pixels:
    top, left, height, width = box
    return pixels[top : top + height, left : left + width]


def by_pillow(data: bytes, box: Box) -> Pixels:
    with Image.open(io.BytesIO(data)) as image:
        return cut(np.asarray(image.convert("RGB")), box)


def by_simplejpeg(data: bytes, box: Box) -> Pixels:
    return cut(simplejpeg.decode_jpeg(data), box)


def region(data: bytes, box: Box) -> Pixels:
    header = read_header(data)
    assert header is not None
    pixels = jpeg.decode_region(data, header, box, scale_eighths=8, channels=3)
    assert pixels is not None
    return pixels


def contenders() -> dict[str, tuple[Callable[[bytes, Box], Pixels], str, bool]]:
    """What it calls, the files it takes, and whether it has the kernel."""
    made = {
        "pillow": (by_pillow, "plain", False),
        "simplejpeg": (by_simplejpeg, "plain", False),
        "plain": (region, "plain", False),
        "packed-64": (region, "64", False),
        "plain-kernel": (region, "plain", True),
    }
    return made | {f"packed-{k}-kernel": (region, str(k), True) for k in INTERVALS}


def load(folder: Path) -> dict[str, list[bytes]]:
    """The files as they are and packed; those that cannot be packed are left out."""
    files: dict[str, list[bytes]] = {"plain": [], **{str(k): [] for k in INTERVALS}}
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg")):
        data = path.read_bytes()
        header = read_header(data)
        if header is None or header.channels != 3:
            continue
        try:
            made = {str(k): segment(data, interval_px=k) for k in INTERVALS}
        except CannotSegment:
            continue
        for kind, content in {"plain": data, **made}.items():
            files[kind].append(content)
        if len(files["plain"]) == MOST_IMAGES:
            break
    if not files["plain"]:
        sys.exit(f"{folder}: no JPEG of three colors")
    return files


def boxes_of(files: list[bytes], seed: int) -> list[Box]:
    found = []
    for number, data in enumerate(files):
        height, width = simplejpeg.decode_jpeg_header(data)[:2]
        found.append(
            random_resized_crop_box(height, width, seed * len(files) + number, scale=(0.08, 1.0))
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--record", action="store_true", help="append to bench/results/jpeg_regions.jsonl"
    )
    arguments = parser.parse_args()
    files, made = load(arguments.data), contenders()
    seconds: dict[str, list[float]] = {name: [] for name in made}
    shuffle = random.Random(0)
    for number in range(arguments.rounds):
        boxes = boxes_of(files["plain"], number)
        pixels: dict[str, list[Pixels]] = {}
        for name in shuffle.sample(list(made), len(made)):
            work, kind, with_kernel = made[name]
            native.kernel = lambda found=with_kernel: KERNEL if found else None
            pairs = list(zip(files[kind], boxes, strict=True))
            start = time.process_time()
            done = [work(data, box)[-1, -1] for data, box in pairs]
            seconds[name].append(time.process_time() - start)
            if name != "pillow":
                pixels[name] = done
        for name, last in pixels.items():
            if not np.array_equal(last, pixels["simplejpeg"]):
                sys.exit(f"{name}: other pixels than simplejpeg's")
    results(arguments, files, seconds)


def results(
    arguments: argparse.Namespace, files: dict[str, list[bytes]], seconds: dict[str, list[float]]
) -> None:
    count, size = len(files["plain"]), sum(map(len, files["plain"]))
    common = {
        "images": count, "n": arguments.rounds, "simplejpeg": simplejpeg.__version__,
        "numpy": np.__version__, "python": platform.python_version(),
        "cpu": cpu_model(),
        "commit": commit(),
        "command": f"python bench/jpeg_regions.py --rounds {arguments.rounds}",
    }  # fmt: skip
    for name, taken in seconds.items():
        ratios = [base / own for base, own in zip(seconds["simplejpeg"], taken, strict=True)]
        kind = name.split("-")[1] if name.startswith("packed") else ""
        line = {
            "contender": name,
            "images_per_s": round(count / statistics.median(taken)),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
            **({"bytes": round(sum(map(len, files[kind])) / size, 4)} if kind else {}),
            **common,
        }
        record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
