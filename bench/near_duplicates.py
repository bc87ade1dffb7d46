"""How many planted near copies `flambeau check` finds among photographs, what it makes up, and its cost.

    python bench/near_duplicates.py --data photos.tar imagenette-mini.tar [--planted N] [--seed N] [--record]

A copy of each of N photographs is added: resized, compressed again (quality 30 to 95), cropped to 90 % of its
sides (in the middle or a corner), mirrored, or several of these. One JSON line: the recall for each of
these, what is missed, all pairs that were not planted (to be looked at: photographs are in such sets twice),
milliseconds per image of reading and of comparing, and per pair of comparing in full. imagededup's
perceptual hash and cleanvision are measured on the same files where they are installed (fastdup 2.54 is not:
it wants NumPy 1.26, Pillow 10.3).
DATA are tar files or folders of photographs.
"""

import argparse
import contextlib
import importlib.metadata
import io
import itertools
import platform
import random
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from flambeau.data.check.fine_detail import with_equal_detail
from flambeau.data.check.image_facts import measure_images
from flambeau.data.check.near_copies import near_pairs
from flambeau.data.sources.folder import FileSet
from provenance import commit, cpu_model, record  # beside this script

KINDS = (
    "resized",
    "compressed",
    "cropped",
    "mirrored",
    "cropped+mirrored",
    "cropped+resized",
    "all",
)


def changed(image: Image.Image, kind: str, draw: random.Random) -> bytes:
    """A near copy, as a JPEG."""
    steps = "cropped+resized+mirrored+compressed" if kind == "all" else kind
    if "cropped" in steps:
        width, height = round(image.width * 0.9), round(image.height * 0.9)
        across, down = draw.choice([(0.5, 0.5), (0, 0), (0, 1), (1, 0), (1, 1)])
        x, y = round(across * (image.width - width)), round(down * (image.height - height))
        image = image.crop((x, y, x + width, y + height))
    if "resized" in steps:
        share = max(draw.uniform(0.25, 1.5), 64 / min(image.size))
        how = draw.choice(
            [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS]
        )
        image = image.resize((round(image.width * share), round(image.height * share)), how)
    if "mirrored" in steps:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=draw.randint(30, 95) if "compressed" in steps else 90)
    return file.getvalue()


def planted(
    data: list[Path], folder: Path, count: int, seed: int
) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Names of all files in the folder; of each copy its original, and its kind."""
    draw = random.Random(seed)
    for number, path in enumerate(data):
        target = folder / f"{number}"
        if path.is_dir():
            target.symlink_to(path.absolute())
        else:
            with tarfile.open(path) as file:
                file.extractall(target, filter="data")
    originals = sorted(
        str(path.relative_to(folder))
        for number in range(len(data))
        for path in (folder / f"{number}").rglob("*")
        if path.suffix.lower() in (".jpg", ".jpeg")
    )
    origin: dict[str, str] = {}
    kinds: dict[str, str] = {}
    (folder / "copies").mkdir()
    for number, name in enumerate(draw.sample(originals, count)):
        kind = KINDS[number % len(KINDS)]
        with Image.open(folder / name) as image:
            content = changed(image.convert("RGB"), kind, draw)
        copy = f"copies/{number}.jpg"
        (folder / copy).write_bytes(content)
        origin[copy], kinds[copy] = name, kind
    return [*originals, *origin], origin, kinds


def ours(folder: Path, names: list[str]) -> tuple[set[frozenset[str]], dict[str, float]]:
    source = FileSet(folder, names, [0] * len(names), ["photograph"])
    start = time.perf_counter()
    facts = measure_images(source)
    middle = time.perf_counter()
    alike = near_pairs(facts.small, facts.chroma)
    compared = time.perf_counter()
    pairs = with_equal_detail(source, alike)
    end = time.perf_counter()
    cost = {
        "read": (middle - start) / len(names) * 1e3,
        "compare": (compared - middle) / len(names) * 1e3,
        "compare a pair in full": (end - compared) / max(1, len(alike)) * 1e3,
    }
    return {frozenset(names[number] for number in pair[:2]) for pair in pairs}, cost


def imagededup(folder: Path, names: list[str]) -> tuple[set[frozenset[str]], dict[str, float]]:
    """The perceptual hash with the distance of its documentation, 10 of 64 bits."""
    from imagededup.methods import PHash  # type: ignore[import-not-found]

    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        method = PHash(verbose=False)
        encodings = {name: method.encode_image(str(folder / name)) for name in names}
        found = method.find_duplicates(encoding_map=encodings, max_distance_threshold=10)
    cost = {"both": (time.perf_counter() - start) / len(names) * 1e3}
    return {frozenset((one, other)) for one, others in found.items() for other in others}, cost


def cleanvision(folder: Path, names: list[str]) -> tuple[set[frozenset[str]], dict[str, float]]:
    """Its exact and near duplicates, each in sets, of which every pair counts."""
    from cleanvision import Imagelab  # type: ignore[import-not-found]

    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        lab = Imagelab(filepaths=[str(folder / name) for name in names])
        lab.find_issues({"exact_duplicates": {}, "near_duplicates": {}}, n_jobs=1, verbose=False)
    cost = {"both": (time.perf_counter() - start) / len(names) * 1e3}
    sets = [one for kind in ("exact", "near") for one in lab.info[f"{kind}_duplicates"]["sets"]]
    return {
        frozenset(str(Path(path).relative_to(folder)) for path in pair)
        for one in sets
        for pair in itertools.combinations(one, 2)
    }, cost


def figures(
    pairs: set[frozenset[str]],
    origin: dict[str, str],
    kinds: dict[str, str],
    cost: dict[str, float],
    total: int,
) -> dict[str, Any]:
    missed = [copy for copy, name in origin.items() if frozenset((copy, name)) not in pairs]
    same = {name: name for name in origin.values()} | origin
    others = [sorted(pair) for pair in pairs if len({same.get(name, name) for name in pair}) == 2]
    by_kind = {
        kind: 1
        - sum(kinds[copy] == kind for copy in missed)
        / max(1, sum(k == kind for k in kinds.values()))
        for kind in KINDS
    }
    return {
        "recall": round(1 - len(missed) / len(origin), 4),
        "recall_by_kind": {kind: round(share, 4) for kind, share in by_kind.items()},
        "pairs_not_planted": len(others),
        "per_10000_images": round(len(others) / total * 10_000, 2),
        "examples": sorted(others)[:8],
        "ms_per_image": {name: round(ms, 3) for name, ms in cost.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--planted", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        names, origin, kinds = planted(told.data, folder, told.planted, told.seed)
        row: dict[str, Any] = {"images": len(names), "planted": len(origin), "seed": told.seed}
        row["flambeau check"] = figures(*_run(ours, folder, names, origin, kinds))
        for peer, find in (("imagededup PHash", imagededup), ("cleanvision", cleanvision)):
            try:
                row[peer] = figures(*_run(find, folder, names, origin, kinds))
            except ImportError as error:
                row[peer] = f"not measured: {error}"
    row |= {
        "threads": torch.get_num_threads(), "torch": torch.__version__,
        "flambeau": importlib.metadata.version("flambeau"), "python": platform.python_version(),
        "cpu": cpu_model(), "commit": commit(),
        "command": " ".join(
            ["python bench/near_duplicates.py --data", *(path.name for path in told.data), "--record"]
        ),
    }  # fmt: skip
    record(row, __file__, keep=told.record)


def _run(
    find: Any, folder: Path, names: list[str], origin: dict[str, str], kinds: dict[str, str]
) -> Any:
    pairs, cost = find(folder, names)
    return pairs, origin, kinds, cost, len(names)


if __name__ == "__main__":
    main()
