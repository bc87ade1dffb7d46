"""The model and its images are float64, since NumPy's numbers are. A class that does everything."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "model"
WHERE = None
REMEDY = None
TRAINER = "plain"


class Blobs(Dataset):
    def __init__(self, dtype):
        rng = np.random.default_rng(5)
        self.labels = rng.integers(0, 4, 600)
        images = rng.normal(self.labels[:, None, None, None] / 4, 1.0, (600, 3, 32, 32))
        self.images = images.astype(dtype)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class Experiment:
    def __init__(self, told, batch_size=16, lr=0.01):
        torch.set_num_threads(1)
        self.dtype = "float32" if told.remedied else "float64"
        data = job.Repeated(Blobs(self.dtype), 5)
        self.loader = DataLoader(data, batch_size, shuffle=True, drop_last=True)
        self.net = self.build().to(getattr(torch, self.dtype))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=lr)
        self.loss = nn.CrossEntropyLoss()

    def build(self):
        def block(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())

        stages = block(3, 24), block(24, 24), nn.MaxPool2d(2), block(24, 48), block(48, 48)
        return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 4))

    def run(self, epochs):
        for e in range(epochs):
            good = total = 0
            for x, y in self.loader:
                out = self.net(x)
                self.opt.zero_grad()
                self.loss(out, y).backward()
                self.opt.step()
                good += (out.argmax(1) == y).sum().item()
                total += len(y)
            print(f"epoch {e}: {good / total:.1%}")


if __name__ == "__main__":
    told = job.begin(REMEDY)
    Experiment(told).run(100)
