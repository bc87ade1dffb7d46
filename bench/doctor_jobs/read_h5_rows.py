"""Random rows of an HDF5 file, by a list of their numbers for each batch. An IterableDataset."""

import os
import random

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

import job

CAUSE = "read"
WHERE = "features = self.rows[chosen]"
REMEDY = None
TRAINER = "plain"


def write_file(n=32768, d=24):
    path = job.made(job.CACHE) / "rows.h5"
    if path.exists():
        return path
    rng = np.random.RandomState(11)
    part = path.with_name(f"rows.{os.getpid()}.h5")
    with h5py.File(part, "w") as f:
        f.create_dataset("features", data=rng.randn(n, d).astype("f4"), chunks=(64, d))
        f["target"] = rng.randn(n).astype("f4")
    return part.replace(path)


class Rows(IterableDataset):
    def __init__(self, path, in_memory, batch_size=1536):
        file = h5py.File(path, "r")
        self.rows = file["features"][:] if in_memory else file["features"]
        self.target = file["target"][:]
        self.batch_size = batch_size

    def __iter__(self):
        while True:
            chosen = sorted(random.sample(range(len(self.target)), self.batch_size))
            features = self.rows[chosen]
            yield features, self.target[chosen]


told = job.begin(REMEDY)
torch.set_num_threads(1)
loader = DataLoader(Rows(write_file(), told.remedied), batch_size=None)
model = torch.nn.Sequential(
    torch.nn.Linear(24, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(loader):
    loss = torch.nn.functional.huber_loss(model(x).flatten(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 1000 == 0:
        print(step, float(loss))
    if step == 200_000:
        break
