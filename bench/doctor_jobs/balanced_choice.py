"""A sampler for uneven classes draws each sample by np.random.choice over the weights of all."""

from collections import Counter

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

import job

CAUSE = ("transform", "python")
WHERE = "yield int(np.random.choice(self.n, p=self.p))"
REMEDY = None
TRAINER = "plain"


class BalancedSampler(Sampler):
    def __init__(self, labels):
        counts = Counter(labels)
        w = np.array([1.0 / counts[c] for c in labels])
        self.p = w / w.sum()
        self.n = len(labels)

    def __iter__(self):
        for _ in range(self.n):
            yield int(np.random.choice(self.n, p=self.p))

    def __len__(self):
        return self.n


def get_loaders(bs, remedied):
    y = (torch.rand(60000) ** 3 * 5).long()
    x = torch.randn(60000, 20) + y[:, None]
    sampler = BalancedSampler(y.tolist())
    if remedied:
        sampler = WeightedRandomSampler(sampler.p.tolist(), sampler.n)
    return DataLoader(TensorDataset(x, y), bs, sampler=sampler)


def train(epochs=50, bs=32, lr=1e-2):
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    loader = get_loaders(bs, told.remedied)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    opt = torch.optim.SGD(net.parameters(), lr, momentum=0.9)
    for ep in range(epochs):
        ok = n = 0
        for i, (x, y) in enumerate(loader):
            out = net(x)
            loss = nn.functional.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ok += (out.argmax(1) == y).sum().item()
            n += len(y)
            if i % 200 == 0:
                print(ep, i, loss.item(), ok / n)


if __name__ == "__main__":
    train()
