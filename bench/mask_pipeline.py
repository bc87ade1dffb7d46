"""Images with masks a second on one core, from files to training batches, against torchvision's transforms.

    python bench/mask_pipeline.py [--images N] [--size S] [--rounds N] [--record]

Made photographs of 640 x 480 as JPEG, and masks of shapes of 21 classes as PNG. Each contender makes the same
work: a random resized crop (25 to 100 % of the area) of S x S pixels of image and mask together, mirrored in
half of the cases, batches of 16 of uint8 images and masks. One process on one core, one thread; in each round
every contender runs once over all images, in turn, and takes CPU time. The ratio is to that of the fastest
contender of torchvision in the same round. Each must make as many images, of about the same brightness and
share of each class.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from flambeau import fast
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.sources.open_data import open_parts
from flambeau.recipes.setup.freed_memory import keep_freed_memory
from made_photos import outline, scene  # beside this script
from provenance import commit, cpu_model, record  # beside this script

BATCH = 16
CLASSES = 21
Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


def make(folder: Path, count: int) -> None:
    """Images and masks."""
    draw = np.random.default_rng(0)
    for part in ("images", "masks"):
        (folder / part).mkdir()
    for k in range(count):
        scene(draw, 480, 640).save(folder / "images" / f"{k}.jpg", quality=90)
        mask = np.zeros((480, 640), np.uint8)
        for number in draw.integers(1, CLASSES, 6):
            mask[outline(draw, 480, 640)] = number
        Image.fromarray(mask).save(folder / "masks" / f"{k}.png")


def of_flambeau(folder: Path, size: int) -> Batches:
    source, _ = open_parts(folder)
    data = ImageDataset(source, image_size=size, channels=3, train=True, threads=1)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        seeds = torch.randint(2**62, (len(data),))
        order = torch.randperm(len(data))
        for indices in order.split(BATCH):
            yield data.batch(indices, seeds[indices])[0]

    return batches


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Images and masks through torchvision's v2 transforms, read by PIL or by torchvision."""

    def __init__(self, folder: Path, size: int, *, by_pil: bool) -> None:
        self._folder, self._by_pil = folder, by_pil
        self._names = sorted(path.stem for path in (folder / "images").iterdir())
        crop = v2.RandomResizedCrop(size, scale=(0.25, 1), antialias=True)
        self._transform = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.ToImage()])

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        name = self._names[index]
        image_file = self._folder / "images" / f"{name}.jpg"
        mask_file = self._folder / "masks" / f"{name}.png"
        if self._by_pil:
            with Image.open(image_file) as opened:
                image: Any = opened.convert("RGB")
            with Image.open(mask_file) as opened:
                mask = torch.from_numpy(np.array(opened))
        else:
            image = tv_tensors.Image(decode_image(str(image_file), ImageReadMode.RGB))
            mask = decode_image(str(mask_file), ImageReadMode.UNCHANGED)[0]
        image, mask = self._transform(image, tv_tensors.Mask(mask))
        return image, mask


def of_torchvision(folder: Path, size: int, *, by_pil: bool) -> Batches:
    loader = DataLoader(Pairs(folder, size, by_pil=by_pil), batch_size=BATCH, shuffle=True)
    return lambda: iter(loader)


def of_fast(folder: Path, size: int) -> Batches:
    """The loader over PIL of `of_torchvision`, read by `fast`."""
    data = Pairs(folder, size, by_pil=True)
    loader = fast(DataLoader(data, batch_size=BATCH, shuffle=True), threads=1)
    return lambda: iter(loader)


def seconds(batches: Batches) -> tuple[float, float, np.ndarray]:
    """CPU seconds of an epoch, mean brightness and shares of the classes."""
    start = time.process_time()
    sums, counts, images = 0.0, np.zeros(256), 0
    for x, y in batches():
        sums += float(x[:, :, ::16, ::16].float().mean()) * len(x)
        counts += np.bincount(y[:, ::16, ::16].numpy().ravel(), minlength=256)
        images += len(x)
    return time.process_time() - start, sums / images, counts / counts.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--record", action="store_true", help="append to bench/results/mask_pipeline.jsonl"
    )
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()  # for all contenders, as `flambeau train` does
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make(folder, arguments.images)
        contenders = {
            "flambeau": of_flambeau(folder, arguments.size),
            "fast": of_fast(folder, arguments.size),
            "torchvision v2, PIL": of_torchvision(folder, arguments.size, by_pil=True),
            "torchvision v2, torchvision.io": of_torchvision(folder, arguments.size, by_pil=False),
        }
        for batches in contenders.values():
            seconds(batches)  # page cache, imports
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(arguments.rounds):
            made = {name: seconds(batches) for name, batches in contenders.items()}
            for name, (taken, brightness, shares) in made.items():
                _, expected, of_classes = made["torchvision v2, PIL"]
                assert abs(brightness - expected) < 6, (name, brightness, expected)
                assert abs(shares - of_classes).max() < 0.05, name
                times[name].append(taken)
    for name, taken in times.items():
        best = [
            min(times[other][k] for other in times if other.startswith("torchvision"))
            for k in range(len(taken))
        ]
        ratios = [theirs / ours for theirs, ours in zip(best, taken, strict=True)]
        rates = [arguments.images / one for one in taken]
        row = {
            "contender": name,
            "size": arguments.size,
            "images_per_cpu_s": round(statistics.median(rates), 1),
            "ratio_to_torchvision": round(statistics.median(ratios), 3),
            "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
            "rounds": len(taken),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "cpu": cpu_model(),
            "commit": commit(),
        }
        record(row, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
