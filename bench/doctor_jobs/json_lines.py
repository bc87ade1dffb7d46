"""Samples are lines of JSON that hold far more than is used. An IterableDataset, shared by two workers."""

import json
import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import job

CAUSE = ("transform", "decode")
WHERE = "record = json.loads(line)"
REMEDY = None
TRAINER = "plain"


def write_lines(path: Path, short: bool) -> None:
    draws = random.Random(0)
    with path.open("w") as file:
        for number in range(400):
            record = {"x": [draws.random() for _ in range(32)], "y": number % 2}
            if not short:
                record["tokens"] = [draws.randrange(50_000) for _ in range(20_000)]
            file.write(json.dumps(record) + "\n")


class Lines(IterableDataset):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self):
        info = get_worker_info()
        while True:
            with self.path.open() as file:
                for number, line in enumerate(file):
                    if number % info.num_workers != info.id:
                        continue
                    record = json.loads(line)
                    yield torch.tensor(record["x"]), torch.tensor(record["y"])


def main() -> None:
    told = job.begin(REMEDY)
    path = job.made(job.CACHE) / ("short.jsonl" if told.remedied else "long.jsonl")
    write_lines(path, told.remedied)
    loader = DataLoader(Lines(path), batch_size=16, num_workers=2)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
