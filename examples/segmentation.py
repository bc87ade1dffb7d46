"""Segmentation: a class for each pixel, a small U-Net, mean IoU, and BatchNorm over all processes.

    python examples/segmentation.py                               # on shapes that it draws itself
    python examples/segmentation.py --images photos/ --masks masks/ --classes 21
    flambeau launch --procs 2 -- examples/segmentation.py         # or torchrun --nproc-per-node 2

Kill it and start it again: it continues to the same bits.

SyncBatchNorm makes two processes one batch: with few images per process, as usual in segmentation, the
statistics of each process alone would be noise. Pixels of class 255, such as borders, count nowhere.
"""

import argparse
import os
from itertools import pairwise, starmap
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import Dataset, Subset, TensorDataset

from flambeau import Run
from flambeau.recipes.parallel.sync_batchnorm import convert_sync_batchnorm
from flambeau.recipes.training.confusion_matrix import ConfusionMatrix

IGNORED = 255  # the class of what does not count, as in PASCAL VOC


def draw_shapes(num_images: int, size: int) -> TensorDataset:
    """Discs (1), squares (2) and diamonds (3) on a plain background (0); borders do not count."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(num_images, *shape, generator=generator)

    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    images = random(3, 1, 1).expand(-1, 3, size, size)
    masks = torch.zeros(num_images, size, size, dtype=torch.int64)
    for _ in range(3):
        kind = (1 + 3 * random(1, 1)).long()
        radius = size * (0.15 + 0.15 * random(1, 1))
        dx = (x - size * random(1, 1)).abs()
        dy = (y - size * random(1, 1)).abs()
        disc = dx.hypot(dy)
        square = 1.15 * torch.maximum(dx, dy)
        diamond = 0.8 * (dx + dy)
        away = torch.where(kind == 1, disc, torch.where(kind == 2, square, diamond)) - radius
        images = torch.where(away[:, None] < 0, random(3, 1, 1), images)
        masks = torch.where(away < 0.5, IGNORED, masks).where(away > -0.5, kind)
    return TensorDataset(images + 0.1 * torch.randn(images.shape, generator=generator), masks)


class Files(Dataset):
    """Images of a folder, and masks of the same names in another: PNG whose pixels are the classes."""

    def __init__(self, images: str, masks: str, size: int) -> None:
        self.paths = sorted(path for path in Path(images).iterdir() if path.is_file())
        self.masks = Path(masks)
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path = self.paths[index]
        shape = (self.size, self.size)
        image = Image.open(path).convert("RGB").resize(shape, Image.Resampling.BILINEAR)
        mask = Image.open(self.masks / f"{path.stem}.png").resize(shape, Image.Resampling.NEAREST)
        pixels, classes = (torch.from_numpy(np.array(each)) for each in (image, mask))
        return pixels.permute(2, 0, 1) / 255, classes.long()


def convolutions(channels: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (channels, out):
        conv = nn.Conv2d(before, out, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Ronneberger et al., "U-Net", 2015: down by halves, then up, each level with what it was before."""

    def __init__(self, num_classes: int, widths: tuple[int, ...] = (8, 16, 32, 64)) -> None:
        super().__init__()
        self.down = nn.ModuleList(starmap(convolutions, pairwise((3, *widths))))
        self.up = nn.ModuleList(convolutions(own + below, own) for own, below in pairwise(widths))
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:  # (N, 3, H, W) to (N, num_classes, H, W)
        levels = []
        for level in self.down:
            x = level(nn.functional.max_pool2d(x, 2) if levels else x)
            levels.append(x)
        for own, level in zip(levels[-2::-1], self.up[::-1], strict=True):
            x = level(torch.cat([interpolate(x, size=own.shape[-2:]), own], 1))
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", help="a folder of images of your own")
    parser.add_argument("--masks", help="the folder of their masks, NAME.png for each image")
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--size", type=int, default=48, help="side of the images, 8 or more")
    parser.add_argument("--samples", type=int, default=1500, help="images that it draws itself")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images")
    parser.add_argument("--duration", default="8ep")
    parser.add_argument("--checkpoint-every", default="1ep")
    parser.add_argument("--out", default="runs/segmentation")
    told = parser.parse_args()
    if (told.images is None) != (told.masks is None):
        parser.error("--images and --masks go together")

    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)

    if told.images:
        data = Files(told.images, told.masks, told.size)
    else:
        data = draw_shapes(told.samples, told.size)
    train = Subset(data, [i for i in range(len(data)) if i % 5])
    test = Subset(data, range(0, len(data), 5))

    torch.manual_seed(0)  # of the initial weights
    model = convert_sync_batchnorm(UNet(told.classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01, fused=True)
    metrics = {"val": ConfusionMatrix(told.classes, ignore_index=IGNORED, device=device)}
    run = Run(
        told.out,
        model,
        optimizer,
        train,
        duration=told.duration,
        checkpoint_every=told.checkpoint_every,
        batch_size=16,
        workers=told.workers,
        schedule="cosine",
        warmup="5%",
        metrics=metrics,
        best="val_mean_iou",
        config={"images": told.images or "shapes", "size": told.size, "samples": len(data)},
    )
    for _ in run.epochs():
        for images, masks in run.batches():
            with run.autocast():
                losses = cross_entropy(model(images), masks, ignore_index=IGNORED, reduction="none")
            # 0 where a pixel is ignored. The mean over all pixels is that of the processes' shares; one over
            # those that count would not be, because a share may have more of them than another.
            run.step(losses.mean())
        for images, masks in run.evaluate(test):
            run.log(val=(model(images), masks))
    if os.environ.get("RANK", "0") == "0":
        print(f"mean IoU {run.result.metrics['val_mean_iou']:.4f}")


if __name__ == "__main__":
    main()
