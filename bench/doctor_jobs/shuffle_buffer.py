"""A reader of tar files shuffles its whole buffer before each sample that it takes out of it."""

import io
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import job

CAUSE = ("transform", "python")
WHERE = "random.shuffle(buffer)"
REMEDY = None
TRAINER = "plain"


def write_shards(folder: Path, shards: int = 3, samples: int = 1000) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [job.made(folder) / f"shard-{shard:03}.tar" for shard in range(shards)]
    for path in paths:
        with tarfile.open(path, "w") as archive:
            for number in range(samples):
                content = rng.integers(0, 256, 192, dtype=np.uint8).tobytes()
                info = tarfile.TarInfo(f"{number:05}.{number % 4}.rgb")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return paths


class Shards(IterableDataset):
    def __init__(self, paths: list[Path], buffer_size: int = 800, *, swap: bool = False) -> None:
        self.paths = paths
        self.buffer_size = buffer_size
        self.swap = swap

    def samples(self) -> Iterator[tuple[torch.Tensor, int]]:
        for path in random.sample(self.paths, len(self.paths)):
            with tarfile.open(path, "r|") as archive:
                for member in archive:
                    content = bytearray(archive.extractfile(member).read())
                    pixels = torch.frombuffer(content, dtype=torch.uint8)
                    yield pixels.float() / 255, int(member.name.split(".")[1])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        buffer: list[tuple[torch.Tensor, int]] = []
        for sample in self.samples():
            buffer.append(sample)
            if len(buffer) < self.buffer_size:
                continue
            if self.swap:
                chosen = random.randrange(len(buffer))
                buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
            else:
                random.shuffle(buffer)
            yield buffer.pop()
        yield from buffer


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    data = Shards(write_shards(job.CACHE / "rgb-shards"), swap=told.remedied)
    net = nn.Sequential(nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.Adam(net.parameters())
    batches = iter(())
    step = 0
    while step < 50_000:
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(DataLoader(data, batch_size=32))
            continue
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 250 == 0:
            print(f"step {step:>6}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
