"""What `flambeau check` costs with many images: each stage, its peak memory, the comparison of 1.2 million.

    python bench/check_scale.py --data PHOTOS [--images 200000] [--compared 1200000] [--blocks 2] [--record]

N JPEG files of 64 x 64 pixels are made, each a mean of two random parts of different photographs of the
folder PHOTOS, so that none is a copy. They are read, compared and listed as the command does it; a JSON line
has seconds, images per second and the peak memory of the process after each stage. Another line is of the
comparison of 1.2 million small pictures that are made in the same way. Of a comparison all of the index is
made, and of the search, block by block of 8,192 images, a few blocks: all take the same. How many candidates
an image has is told beside how many the photographs themselves have.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image

from flambeau.data.check import near_copies
from flambeau.data.check.clean_listing import write_listing
from flambeau.data.check.copy_findings import same_pictures
from flambeau.data.check.image_facts import SIDE, measure_images
from flambeau.data.check.near_copies import near_pairs
from flambeau.data.sources.folder import FolderSource
from provenance import commit, cpu_model, record  # beside this script

JUDGED, INDEX = near_copies._judged, near_copies._Index
TILES = 64  # of each photograph


class Enough(Exception):
    """So many blocks have been timed."""


def tiles(photos: list[Path], side: int, draw: np.random.Generator) -> NDArray[np.uint8]:
    """(N, TILES, side, side, 3) random parts of photographs, of a quarter of their sides or more."""
    found = np.zeros((len(photos), TILES, side, side, 3), np.uint8)
    for number, path in enumerate(photos):
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        for place in range(TILES):
            edge = int(min(image.size) * draw.uniform(0.25, 0.9))
            x, y = (int(draw.integers(0, size - edge + 1)) for size in image.size)
            part = image.resize((side, side), Image.Resampling.BOX, (x, y, x + edge, y + edge))
            found[number, place] = np.asarray(part)
    return found


def mixed(parts: NDArray[np.uint8], count: int, draw: np.random.Generator) -> NDArray[np.uint8]:
    """(count, side, side, 3) means of parts of two photographs, mirrored or not."""
    first, second = (draw.integers(0, len(parts), count) for _ in range(2))
    second = np.where(second == first, (second + 1) % len(parts), second)
    places = draw.integers(0, TILES, (2, count))
    one, other = parts[first, places[0]], parts[second, places[1]]
    other = np.where(draw.integers(0, 2, (count, 1, 1, 1)) == 1, other[:, :, ::-1], other)
    return ((one.astype(np.uint16) + other) // 2).astype(np.uint8)


def compared(work: Callable[[Callable[[int], object]], Any], num_blocks: int) -> dict[str, Any]:
    """What a comparison takes: of wall time and of processors, all of the index and some blocks.

    Args:
        work: compares; it takes a function that takes how many images more have been compared.
        num_blocks: to be timed.
    """
    clocks = (time.perf_counter, time.process_time)
    marks, sizes, candidates = list[list[float]](), list[int](), 0

    class Index(near_copies._Index):
        def __init__(self, *given: Any) -> None:
            marks.append([clock() for clock in clocks])
            super().__init__(*given)
            marks.append([clock() for clock in clocks])

    def judged(pictures: Any, colors: Any, found: Any) -> Any:
        nonlocal candidates
        candidates += len(found.query)
        return JUDGED(pictures, colors, found)

    def advance(number: int) -> None:
        if len(marks) > 1:
            marks.append([clock() for clock in clocks])
            sizes.append(number)
        if len(sizes) == num_blocks:
            raise Enough

    near_copies._judged, near_copies._Index = judged, Index  # type: ignore[misc]
    before = peak_mib()
    try:
        work(advance)
    except Enough:
        pass
    finally:
        near_copies._judged, near_copies._Index = JUDGED, INDEX  # type: ignore[misc]
    passed = np.diff(np.array(marks), axis=0).round(2)
    ms = passed[1:] / np.array(sizes)[:, None] * 1000
    return {
        "index_s": passed[0, 0], "index_cpu_s": passed[0, 1],
        "search_ms_per_image": ms[:, 0].round(3).tolist(),
        "search_cpu_ms_per_image": ms[:, 1].round(3).tolist(),
        "candidates_per_image": round(candidates / sum(sizes), 3),
        "peak_mib_before": before, "peak_mib": peak_mib(),
    }  # fmt: skip


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def stages(folder: Path, parts: NDArray[np.uint8], count: int, num_blocks: int) -> dict[str, Any]:
    """Each stage of the command on files."""
    draw = np.random.default_rng(1)
    for at in range(0, count, 1000):
        place = folder / "images" / f"class{at // 1000 % 10}"
        place.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(mixed(parts, min(1000, count - at), draw), start=at):
            (place / f"{number}.jpg").write_bytes(simplejpeg.encode_jpeg(picture, quality=85))
    line: dict[str, Any] = {"images": count, "peak_mib_before": peak_mib()}
    found: list[Any] = []

    def timed(name: str, work: Callable[[], Any]) -> None:
        start = time.perf_counter()
        found.append(work())
        seconds = time.perf_counter() - start
        line[name] = {
            "seconds": round(seconds, 1), "images_per_s": round(count / seconds),
            "peak_mib": peak_mib(),
        }  # fmt: skip
        print(name, line[name], flush=True)

    timed("open", lambda: FolderSource(folder / "images"))
    source = found[-1]
    timed("read", lambda: measure_images(source))
    facts, is_val = found[-1], np.arange(count) % 10 == 0
    line["compare"] = compared(
        lambda advance: same_pictures(facts, is_val, advance=advance), num_blocks
    )
    print("compare", line["compare"], flush=True)
    drop = frozenset(range(0, count, 7))
    timed("list", lambda: write_listing(folder / "clean.csv", source, is_val, drop))
    return line


def of_photographs(photos: list[Path]) -> float:
    """Candidates per photograph."""
    pictures = [Image.open(path).convert("YCbCr").resize((SIDE, SIDE)) for path in photos]
    parts = np.stack([np.asarray(picture) for picture in pictures])
    small = np.ascontiguousarray(parts[:, :, :, 0])
    chroma = parts[:, :, :, 1:].mean((1, 2)).astype(np.float32)
    told = compared(lambda advance: near_pairs(small, chroma, advance=advance), 1)
    return float(told["candidates_per_image"])


def comparison(parts: NDArray[np.uint8], count: int, num_blocks: int) -> dict[str, Any]:
    """The index of all, and a few blocks of the search."""
    draw = np.random.default_rng(2)
    small, chroma = np.empty((count, SIDE, SIDE), np.uint8), np.empty((count, 2), np.float32)
    weights = np.array([0.299, 0.587, 0.114], np.float32)
    for at in range(0, count, 10_000):
        pictures = mixed(parts, min(10_000, count - at), draw).astype(np.float32)
        grey = pictures @ weights
        small[at : at + len(grey)] = grey
        color = (pictures[..., [2, 0]].mean((1, 2)) - grey.mean((1, 2))[:, None]) * (0.564, 0.713)
        chroma[at : at + len(grey)] = color
    told = compared(lambda advance: near_pairs(small, chroma, advance=advance), num_blocks)
    return {"pictures": count, **told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=200_000, help="0 for none")
    parser.add_argument("--compared", type=int, default=1_200_000, help="0 for none")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    arguments = parser.parse_args()
    photos = sorted(p for p in arguments.data.rglob("*") if p.suffix.lower() in (".jpeg", ".jpg"))
    facts = {
        "photographs": len(photos), "candidates_per_photograph": of_photographs(photos),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "cpu": cpu_model(),
        "commit": commit(),
    }  # fmt: skip

    def told(line: dict[str, Any]) -> None:
        record(line | facts, __file__, keep=arguments.record)

    if arguments.compared:
        parts = tiles(photos, SIDE, np.random.default_rng(0))
        told(comparison(parts, arguments.compared, arguments.blocks))
    if arguments.images:
        with tempfile.TemporaryDirectory() as folder:
            parts = tiles(photos, 64, np.random.default_rng(0))
            told(stages(Path(folder), parts, arguments.images, arguments.blocks))


if __name__ == "__main__":
    main()
