"""A data set that takes each sample from a data frame by iloc."""

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = ("transform", "few workers")
# pandas 3.1: a row takes 21 us, and its values, of several types, another 10.
WHERE = (
    "row = self.df.iloc[idx]",
    "return row.values[: len(self.columns)].astype(np.float32), np.float32(row.target)",
)
REMEDY = None
TRAINER = "plain"


class FrameDataset(Dataset):
    def __init__(self, df, in_memory):
        self.df = df
        self.columns = [c for c in df.columns if c.startswith("f")]
        self.values = df[self.columns].to_numpy(np.float32) if in_memory else None
        self.targets = df["target"].to_numpy(np.float32) if in_memory else None

    def __len__(self):
        return len(self.df)

    def __getitem__(self, idx):
        if self.values is not None:
            return self.values[idx], self.targets[idx]
        row = self.df.iloc[idx]
        return row.values[: len(self.columns)].astype(np.float32), np.float32(row.target)


def make_frame(rows=20_000):
    rng = np.random.default_rng(0)
    columns = {}
    for i in range(24):
        columns[f"f{i}"] = rng.integers(0, 9, rows) if i % 2 else rng.standard_normal(rows)
    columns["target"] = rng.standard_normal(rows)
    columns["name"] = [f"row{i}" for i in range(rows)]
    return pd.DataFrame(columns)


if __name__ == "__main__":
    told = job.begin(REMEDY)
    dl = DataLoader(FrameDataset(make_frame(), told.remedied), batch_size=64, shuffle=True)
    net = nn.Sequential(
        nn.Linear(24, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)
    )
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(1000):
        losses = []
        for xb, yb in dl:
            pred = net(xb).squeeze(-1)
            loss = nn.functional.smooth_l1_loss(pred, yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        print(epoch, np.mean(losses))
