"""A file is read whole and records are cut off its beginning, each time with a copy of all that is left."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import job

CAUSE = ("transform", "read", "few workers")
WHERE = "buffer = buffer[self.record_size :]"
REMEDY = None
TRAINER = "plain"


class RecordStream(IterableDataset):
    record_size = 1024

    def __init__(self, path, view: bool):
        super().__init__()
        self.path = path
        self.view = view

    def __iter__(self):
        buffer = self.path.read_bytes()
        if self.view:
            buffer = memoryview(buffer)
        while len(buffer) >= self.record_size:
            record = np.frombuffer(buffer[: self.record_size], dtype=np.float32)
            buffer = buffer[self.record_size :]
            yield torch.from_numpy(record.copy())


def fit(model, path, view, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for batch in DataLoader(RecordStream(path, view), batch_size=32):
            optimizer.zero_grad()
            reconstructed = model(batch)
            loss = torch.mean((reconstructed - batch) ** 2)
            loss.backward()
            optimizer.step()
        yield epoch, loss.item()


def main():
    told = job.begin(REMEDY)
    path = job.made(job.CACHE) / "records.bin"
    np.random.default_rng(0).standard_normal(4_000_000, dtype=np.float32).tofile(path)
    model = nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 256))
    for epoch, loss in fit(model, path, told.remedied, 1000):
        print("epoch", epoch, "loss", loss)


if __name__ == "__main__":
    main()
