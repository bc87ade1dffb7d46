"""Images a second per core of a DataLoader before and after `fast(loader)`, in one process and in turn.

    taskset -c 1 python bench/fast_loader.py --data FOLDER_OF_CLASS_FOLDERS [--rounds N] [--record]

Each contender reads all images once a round, in batches of 64 of the network's own floats, with one thread of
this process; the first round does not count. CPU time of the process, so that a busy neighbour counts less.
Cases: torchvision's transforms v1 and v2 with bilinear and bicubic crops, timm's `create_transform`, the crop
of evaluations, PNG and progressive JPEG (made of the same images). One JSON line for each case: medians, and
the median and the range of the ratios within a round.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from flambeau.data.fast import fast
from provenance import commit, cpu_model  # beside this script

RESULTS = Path(__file__).parent / "results" / "fast_loader.jsonl"
MEAN_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def cases() -> dict[str, tuple[str, Any]]:
    """The images and the transforms of each."""
    numbers = [v1.ToTensor(), v1.Normalize(*MEAN_STD)]
    cubic = InterpolationMode.BICUBIC
    flip = v1.RandomHorizontalFlip()
    bilinear = v1.Compose([v1.RandomResizedCrop(224), flip, *numbers])
    return {
        "v1 bilinear": ("jpeg", bilinear),
        "v1 bicubic": ("jpeg", v1.Compose([v1.RandomResizedCrop(224, interpolation=cubic), flip, *numbers])),
        "v2 bilinear": (
            "jpeg",
            v2.Compose([
                v2.ToImage(), v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True), v2.Normalize(*MEAN_STD),
            ]),
        ),
        "v1 evaluation": ("jpeg", v1.Compose([v1.Resize(256), v1.CenterCrop(224), *numbers])),
        "v1 color jitter, erasing": (
            "jpeg",
            v1.Compose([
                v1.RandomResizedCrop(224), flip, v1.ColorJitter(0.4, 0.4, 0.4), *numbers, v1.RandomErasing(),
            ]),
        ),
        "timm, no color jitter": (
            "jpeg", timm.data.create_transform(224, is_training=True, color_jitter=None)
        ),
        "timm, its defaults": ("jpeg", timm.data.create_transform(224, is_training=True)),
        "png, v1 bilinear": ("png", bilinear),
        "progressive jpeg, v1 bilinear": ("progressive", bilinear),
    }  # fmt: skip


def copies(data: Path, place: Path) -> dict[str, Path]:
    """The same images as PNG and as progressive JPEG."""
    for path in sorted(data.glob("*/*")):
        image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
        for kind, ending, settings in (
            ("png", "png", {}), ("progressive", "jpg", {"progressive": True, "quality": 90}),
        ):  # fmt: skip
            to = place / kind / path.parent.name / f"{path.stem}.{ending}"
            to.parent.mkdir(parents=True, exist_ok=True)
            image.save(to, **settings)
    return {"jpeg": data, "png": place / "png", "progressive": place / "progressive"}


def images_per_second(loader: Iterable[Any]) -> float:
    start, count = time.process_time(), 0
    for images, _ in loader:
        count += len(images)
    return count / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    told = parser.parse_args()
    at = commit()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folders = copies(told.data, Path(place))
        for name, (kind, transform) in cases().items():
            loader = DataLoader(ImageFolder(folders[kind], transform), batch_size=64, shuffle=True)
            contenders = {"before": loader, "after": fast(loader, threads=1)}
            found: dict[str, list[float]] = {one: [] for one in contenders}
            for _ in range(told.rounds + 1):
                for one, own in contenders.items():
                    found[one].append(images_per_second(own))
            ratios = [b / a for a, b in zip(found["before"][1:], found["after"][1:], strict=True)]
            row = {
                "case": name, **{one: round(statistics.median(v[1:]), 1) for one, v in found.items()},
                "times": round(statistics.median(ratios), 2),
                "range": [round(min(ratios), 2), round(max(ratios), 2)], "n": told.rounds,
                "images": len(loader.dataset), "torch": torch.__version__,  # type: ignore[arg-type]
                "torchvision": torchvision.__version__, "timm": timm.__version__, "cpu": cpu_model(),
                "commit": at,
                "command": f"taskset -c 1 python bench/fast_loader.py --data DIR --rounds {told.rounds}",
            }  # fmt: skip
            print(json.dumps(row))
            if told.record:
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
