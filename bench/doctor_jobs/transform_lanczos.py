"""Large images in memory are shrunk by Lanczos one by one in the main process, by a generator of batches."""

import random

import numpy as np
import torch
import torch.nn as nn
from PIL import Image

import job

CAUSE = "transform"
WHERE = "return image.resize((32, 32), Image.Resampling.LANCZOS)"
REMEDY = None
TRAINER = "plain"


class Gallery:
    images: list[Image.Image]

    def __init__(self, prepared):
        rng = np.random.default_rng(0)
        shape = (450, 600, 3)
        arrays = [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(40)]
        self.images = [Image.fromarray(array) for array in arrays]
        self.small = [image.reduce(15).resize((32, 32)) for image in self.images]
        self.prepared = prepared

    def shrink(self, image):
        return image.resize((32, 32), Image.Resampling.LANCZOS)

    def batches(self, size=12):
        while True:
            picks = random.choices(range(len(self.images)), k=size)
            if self.prepared:
                pictures = [self.small[pick] for pick in picks]
            else:
                pictures = [self.shrink(self.images[pick]) for pick in picks]
            stacked = np.stack([np.asarray(picture) for picture in pictures])
            yield torch.from_numpy(stacked).permute(0, 3, 1, 2) / 255, torch.tensor(picks) % 4


def get_model():
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 48, 3, 2, 1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 4),
    )  # fmt: skip


if __name__ == "__main__":
    told = job.begin(REMEDY, batches=(Gallery, "batches"))
    torch.set_num_threads(1)
    gallery = Gallery(told.remedied)
    model, criterion = get_model(), nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters())
    batches = iter(gallery.batches())
    step = 0
    while True:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print("step", step, "loss", loss.item())
        if step >= 50_000:
            break
