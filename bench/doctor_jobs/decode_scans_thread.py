"""Whole scans are decoded to be shrunk to 48 pixels, in a prefetching thread of the script's own."""

import queue
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import job

CAUSE = "decode"
WHERE = "image.load()  # of which the decoder could have left out seven eighths"
REMEDY = None
TRAINER = "plain"


def opened(path: Path, is_reduced: bool) -> Image.Image:
    image = Image.open(path)
    if is_reduced:
        image.draft("RGB", (96, 96))
    image.load()  # of which the decoder could have left out seven eighths
    return image.resize((48, 48), Image.Resampling.BOX)


class Prefetcher:
    """Gives batches that a thread has prepared, at most four in advance."""

    def __init__(self, paths: list[Path], batch_size: int, is_reduced: bool) -> None:
        self.paths = paths
        self.batch_size = batch_size
        self.is_reduced = is_reduced
        self.ready: queue.Queue[tuple[Tensor, Tensor]] = queue.Queue(4)
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        while True:
            chosen = random.sample(self.paths, self.batch_size)
            arrays = [np.asarray(opened(path, self.is_reduced)) for path in chosen]
            images = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2) / 255
            labels = torch.tensor([int(path.parent.name[-1]) for path in chosen])
            self.ready.put((images, labels))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.ready.get()


def main() -> None:
    told = job.begin(REMEDY, batches=(Prefetcher, "batches"))
    torch.set_num_threads(1)  # the other core is for the thread
    paths = sorted(job.photos(1600, 1200, count=20).rglob("*.jpg"))
    prefetcher = Prefetcher(paths, 8, told.remedied)
    model = job.small_convnet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(prefetcher.batches()):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(f"step {step}: {loss.item():.3f}")
        if step == 100_000:
            break


if __name__ == "__main__":
    main()
