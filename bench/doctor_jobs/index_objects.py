"""Rows of a NumPy table of objects, gathered anew for each sample. A loop at module level."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = ("transform", "few workers")
WHERE = "rows = self.table[self.order]"
REMEDY = None
TRAINER = "plain"

told = job.begin(REMEDY)


class Readings(Dataset):
    def __init__(self):
        self.table = np.array([float(i % 97) for i in range(60_000)], dtype=object)
        self.order = np.random.default_rng(0).permutation(60_000)
        self.sorted_rows = self.table[self.order] if told.remedied else None

    def __len__(self):
        return 29_000

    def __getitem__(self, index):
        if told.remedied:
            rows = self.sorted_rows
        else:
            rows = self.table[self.order]
        start = index * 2
        window = rows[start : start + 128].astype(np.float32)
        return torch.from_numpy(window), float(window.mean())


loader = DataLoader(Readings(), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(100):
    for x, y in loader:
        if x.shape[1] != 128:
            continue
        prediction = model(x).squeeze(1)
        loss = ((prediction - y.float()) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
