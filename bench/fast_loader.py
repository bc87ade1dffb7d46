"""Images a second per core of a DataLoader before and after `fast(loader)`, in one process and in turn.

    taskset -c 1 python bench/fast_loader.py --data CLASS_FOLDERS [--only WORD] [--rounds N] [--record]

Each contender reads all images once a round, in batches of 64 of the network's own floats, with one thread of
this process; the first round does not count. CPU time of the process, so that a busy neighbour counts less.
Cases: torchvision's transforms v1 and v2 with bilinear and bicubic crops, timm's `create_transform`, the crop
of evaluations, a Hugging Face data set (extra `hf`), PNG and progressive JPEG made of the same images, and
`packed=`: what `flambeau pack` makes of the images, compared with their files before the line. One JSON line
for each case: medians, and the median and the range of the ratios within a round. --only takes the cases with
this word in their names. Other projects' loaders are in image_loader.py, a training in fast_end_to_end.py.
"""

import argparse
import io
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
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

from flambeau.data.drop_in.fast_loader import FastLoader
from flambeau.data.fast import fast
from provenance import commit, cpu_model, record  # beside this script

MEAN_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NUMBERS = [v1.ToTensor(), v1.Normalize(*MEAN_STD)]
BILINEAR = v1.Compose([v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), *NUMBERS])
COPIES: dict[str, tuple[str, dict[str, Any]]] = {  # ending of the files, and what Pillow is told
    "png": ("png", {}),
    "progressive jpeg": ("jpg", {"progressive": True, "quality": 90}),
}
PACKED = {  # file, and options of `flambeau pack`
    "as they are": ("kept.rec", ""),
    "segments": ("segments.rec", "--segments"),
    "segments of 256 pixels": ("smaller.rec", "--segments --resize 256"),
    "BMP": ("bmp.rec", "--encode bmp"),
}
Loaders = tuple[DataLoader[Any], FastLoader]  # before and after the line


def cases(data: Path, place: Path) -> dict[str, Callable[[], Loaders]]:
    """What makes the loaders of each; copies of the images are made in `place`."""
    return {
        **{
            name: partial(loaders, ImageFolder(data, transform))
            for name, transform in transforms().items()
        },
        "Hugging Face": partial(of_hugging_face, data),
        "Hugging Face, threads=1": partial(of_hugging_face, data, threads=1),
        **{
            f"{name}, v1 bilinear": partial(of_copies, data, place / name, *how)
            for name, how in COPIES.items()
        },
        **{
            f"packed, {name}": partial(of_packed, data, place / file, options)
            for name, (file, options) in PACKED.items()
        },
        "packed, pixels of 256 x 256": partial(of_pixels, data, place),
    }


def transforms() -> dict[str, Any]:
    cubic, flip = InterpolationMode.BICUBIC, v1.RandomHorizontalFlip()
    return {
        "v1 bilinear": BILINEAR,
        "v1 bicubic": v1.Compose([v1.RandomResizedCrop(224, interpolation=cubic), flip, *NUMBERS]),
        "v2 bilinear": v2.Compose([
            v2.ToImage(), v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True), v2.Normalize(*MEAN_STD),
        ]),
        "v1 evaluation": v1.Compose([v1.Resize(256), v1.CenterCrop(224), *NUMBERS]),
        "v1 color jitter, erasing": v1.Compose([
            v1.RandomResizedCrop(224), flip, v1.ColorJitter(0.4, 0.4, 0.4), *NUMBERS, v1.RandomErasing(),
        ]),
        "timm, no color jitter": timm.data.create_transform(224, is_training=True, color_jitter=None),
        "timm, its defaults": timm.data.create_transform(224, is_training=True),
    }  # fmt: skip


def loaders(dataset: Any, *, threads: int | None = 1, packed: Path | None = None) -> Loaders:
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    return loader, fast(loader, threads=threads, packed=packed)


def of_hugging_face(data: Path, *, threads: int | None = None) -> Loaders:
    """Files in the table itself, as data sets of the Hub have them. Its code is not known to be safe in
    threads, so without `threads` the training process reads."""
    import datasets

    paths = sorted(data.glob("*/*"))
    names = sorted({path.parent.name for path in paths})
    files = {
        "image": [path.read_bytes() for path in paths],
        "label": [names.index(path.parent.name) for path in paths],
    }

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        images = [BILINEAR(image.convert("RGB")) for image in rows["image"]]
        return {"pixel_values": images, "label": rows["label"]}

    table = datasets.Dataset.from_dict(files).cast_column("image", datasets.Image())
    return loaders(table.with_transform(transform), threads=threads)


def of_copies(data: Path, place: Path, ending: str, settings: dict[str, Any]) -> Loaders:
    """The same images as files of another kind."""
    for path in sorted(data.glob("*/*")):
        to = place / path.parent.name / f"{path.stem}.{ending}"
        to.parent.mkdir(parents=True, exist_ok=True)
        Image.open(io.BytesIO(path.read_bytes())).convert("RGB").save(to, **settings)
    return loaders(ImageFolder(place, BILINEAR))


def of_packed(data: Path, packed: Path, options: str) -> Loaders:
    command = [sys.executable, "-m", "flambeau", "pack", str(data), str(packed), *options.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return loaders(ImageFolder(data, BILINEAR), packed=packed)


def of_pixels(data: Path, place: Path) -> Loaders:
    """An array holds images of one size, so those with a shorter side are left out, before as well."""
    large = place / "large"
    for path in sorted(data.glob("*/*")):
        if min(Image.open(path).size) >= 256:
            (large / path.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, large / path.parent.name)
    return of_packed(large, place / "pixels.npy", "--encode raw --resize 256 --center-crop")


def images_per_second(loader: Iterable[Any]) -> float:
    start, count = time.process_time(), 0
    for batch in loader:
        count += len(batch["label"] if isinstance(batch, dict) else batch[1])
    return count / (time.process_time() - start)


def row_of(before: DataLoader[Any], after: FastLoader, rounds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(rounds + 1):
        found["before"].append(images_per_second(before))
        found["after"].append(images_per_second(after))
    ratios = [b / a for a, b in zip(found["before"][1:], found["after"][1:], strict=True)]
    return {
        **{one: round(statistics.median(v[1:]), 1) for one, v in found.items()},
        "times": round(statistics.median(ratios), 2),
        "range": [round(min(ratios), 2), round(max(ratios), 2)], "n": rounds,
        "images": len(before.dataset),  # type: ignore[arg-type]
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    told = parser.parse_args()
    facts = {
        "torch": torch.__version__, "torchvision": torchvision.__version__,
        "timm": timm.__version__, "cpu": cpu_model(), "commit": commit(),
        "command": " ".join(
            ["taskset -c 1 python bench/fast_loader.py", *(Path(word).name for word in sys.argv[1:])]
        ),
    }  # fmt: skip
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        found = cases(told.data, Path(place))
        chosen = [name for name in found if told.only in name]
        if not chosen:
            parser.error(f"no case has {told.only} in its name: {'; '.join(found)}")
        for name in chosen:
            row = {"case": name, **row_of(*found[name](), told.rounds), **facts}
            record(row, __file__, keep=told.record)


if __name__ == "__main__":
    main()
