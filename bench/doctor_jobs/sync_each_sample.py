"""The loss of each sample is fetched by `.item()`, one after the other, to find hard ones. accelerate."""

import collections

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "sync"
WHERE = "hardest[int(keys[i])] = per_sample[i].item()"
REMEDY = None
TRAINER = "accelerate"


class Points(Dataset):
    def __init__(self, size):
        self.x = torch.randn(size, 32)
        self.y = torch.sin(self.x).sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        at = torch.tensor(indices)
        return self.x[at], self.y[at], at


def training_function(told):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    loader = DataLoader(Points(50_000), batch_size=512, shuffle=True, collate_fn=lambda b: b)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss_function = nn.SmoothL1Loss(reduction="none")
    for epoch in range(300):
        hardest = collections.Counter()
        for x, y, keys in loader:
            per_sample = loss_function(model(x), y).squeeze(1)
            accelerator.backward(per_sample.mean())
            optimizer.step()
            optimizer.zero_grad()
            if told.remedied:
                hardest.update(zip(keys.tolist(), per_sample.tolist(), strict=True))
                continue
            for i in range(len(keys)):
                hardest[int(keys[i])] = per_sample[i].item()
        accelerator.print(epoch, hardest.most_common(3))


if __name__ == "__main__":
    told = job.begin(REMEDY)
    training_function(told)
