"""Whether decoding photographs at a part of their size changes what a model learns from them.

    python bench/scaled_decode.py --data imagenette-mini.tar [--size N] [--epochs N] [--seeds N] [--record]

flambeau decodes no more of a JPEG than a crop needs, at 1/2, 1/4 or 1/8 of its size where that still has the
pixels asked for. Here one small network is trained on the same crops in the same order from the same weights
twice a seed: on pixels decoded so (`scaled`), and on crops of the photograph decoded in full, then resized
with antialiasing (`full`). Which of the two comes first alternates. One JSON line: accuracy a seed on images
for validation that are decoded in the same way; the mean over the seeds of the differences, with its standard
error; `crossed`, the accuracy of the `scaled` models on images that are decoded in full; and the PSNR between
both kinds of pixels, for all of a part together. That of training crops holds a shift besides: their borders
are rounded to pixels of the smaller image. Images for validation are decoded whole and have none.
DATA is a folder or a tar file with train/CLASS/*.JPEG and val/CLASS/*.JPEG.
"""

import argparse
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.sources.folder import FolderSource
from flambeau.images.decode import decode
from provenance import commit, cpu_model  # beside this script

RESULTS = Path(__file__).parent / "results" / "scaled_decode.jsonl"
BATCH = 50
# Chosen so that a run takes half a minute on a core and ends far above chance; not tuned for either arm.
PEAK_LR, MOMENTUM, WEIGHT_DECAY, SMOOTHING = 0.1, 0.9, 5e-4, 0.1


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(convolution(width, width), convolution(width, width))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return x_NCHW + self.inner(x_NCHW)


def convolution(inputs: int, outputs: int, *, stride: int = 1) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def network(num_classes: int) -> nn.Module:
    return nn.Sequential(
        convolution(3, 24, stride=2), convolution(24, 48, stride=2), Residual(48),
        convolution(48, 96, stride=2), Residual(96), convolution(96, 192, stride=2),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(192, num_classes),
    )  # fmt: skip


def datasets(folder: Path, *, size: int, full: bool) -> tuple[ImageDataset, ImageDataset]:
    """Those to train on and to validate on; in full: of photographs that are decoded beforehand."""
    made = []
    for part in ("train", "val"):
        source = FolderSource(folder / part)
        if full:
            photos = [decode(source.read(index), channels=3) for index in range(len(source))]
            source.read = photos.__getitem__  # type: ignore[method-assign,assignment]
        is_train = part == "train"
        made.append(ImageDataset(source, image_size=size, channels=3, train=is_train, threads=1))
    return made[0], made[1]


def pixels(dataset: ImageDataset, seed: int, epoch: int = 0) -> tuple[Tensor, Tensor]:
    """All images in a random order, (N, C, S, S) uint8, and their labels."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    order = torch.randperm(len(dataset), generator=generator)
    seeds = torch.randint(1 << 62, (len(dataset),), generator=generator)
    return dataset.batch(order, seeds)[0]


def as_float(x_NCHW: Tensor) -> Tensor:
    return (x_NCHW.float() - 118) / 70  # about the mean and the deviation of photographs


def trained(dataset: ImageDataset, *, epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = network(len(dataset.source.classes)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), PEAK_LR, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    steps = epochs * -(-len(dataset) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps)
    for epoch in range(epochs):
        images, labels = pixels(dataset, seed, epoch)
        for x_NCHW, y_N in zip(images.split(BATCH), labels.split(BATCH), strict=True):
            loss = F.cross_entropy(model(as_float(x_NCHW)), y_N, label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    found = torch.cat([model(as_float(part)).argmax(1) for part in images.split(BATCH)])
    return (found == labels).float().mean().item()


def psnr(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """Of all pixels together, and of the image that differs most, in dB; how many images differ."""
    errors = (ours.double() - theirs.double()).square().mean((1, 2, 3))

    def decibels(error: float) -> float:
        return round(10 * math.log10(255**2 / error), 1) if error else math.inf

    return {
        "psnr_db": decibels(errors.mean().item()),
        "psnr_db_min": decibels(errors.max().item()),
        "images": len(errors),
        "images_that_differ": int((errors > 0).sum()),
    }


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    arms = {
        arm: datasets(folder, size=options.size, full=arm == "full") for arm in ("scaled", "full")
    }
    val = {arm: pixels(both[1], 0) for arm, both in arms.items()}
    train = {arm: pixels(both[0], 0) for arm, both in arms.items()}
    found: dict[str, list[float]] = {"scaled": [], "full": [], "crossed": []}
    for seed in range(options.seeds):
        for arm in ("scaled", "full") if seed % 2 else ("full", "scaled"):
            start = time.perf_counter()
            model = trained(arms[arm][0], epochs=options.epochs, seed=seed)
            found[arm].append(accuracy(model, *val[arm]))
            if arm == "scaled":
                found["crossed"].append(accuracy(model, *val["full"]))
            seconds = time.perf_counter() - start
            print(f"seed {seed}, {arm}: {found[arm][-1]:.4f}, {seconds:.0f} s", file=sys.stderr)
    differences = [a - b for a, b in zip(found["scaled"], found["full"], strict=True)]
    deviation = statistics.stdev(differences) if len(differences) > 1 else math.nan
    return {
        **{arm: [round(value, 4) for value in values] for arm, values in found.items()},
        **{f"{arm}_mean": round(statistics.mean(values), 4) for arm, values in found.items()},
        "difference": round(statistics.mean(differences), 4),
        "standard_error": round(deviation / math.sqrt(len(differences)), 4),
        "pixels_train": psnr(train["scaled"][0], train["full"][0]),
        "pixels_val": psnr(val["scaled"][0], val["full"][0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", type=int, default=64, help="of the images, pixels")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data
        if not folder.is_dir():
            with tarfile.open(folder) as tar:
                tar.extractall(temporary, filter="data")
            folder = next(Path(temporary).rglob("train")).parent
        entry = measured(folder, options)
    line = json.dumps(
        {
            "size": options.size, "epochs": options.epochs, "seeds": options.seeds, **entry,
            "decoder": f"simplejpeg {importlib.metadata.version('simplejpeg')}",
            "flambeau": importlib.metadata.version("flambeau"),
            "torch": torch.__version__, "python": platform.python_version(), "cpu": cpu_model(),
            "commit": commit(),
            "command": " ".join(
                ["python", "bench/scaled_decode.py", *(Path(word).name for word in sys.argv[1:])]
            ),
        }
    )  # fmt: skip
    print(line)
    if options.record:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    main()
