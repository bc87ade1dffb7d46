"""Before each step the parameters of all 60 heads are looked at for NaN and infinity."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "sync"
WHERE = "if torch.isnan(parameter).any() or torch.isinf(parameter).any():"
REMEDY = None
TRAINER = "plain"


def assert_finite(model, step):
    for name, parameter in model.named_parameters():
        if torch.isnan(parameter).any() or torch.isinf(parameter).any():
            sys.exit(f"step {step}: {name} is not finite")


class ManyTasks(nn.Module):
    """A body that all tasks share, and a head for each."""

    def __init__(self, tasks, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, width), nn.ReLU())
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(tasks)
        )

    def forward(self, x, task):
        return self.heads[task](self.body(x))


def main():
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    x = torch.rand(30_000, 32) * 2 - 1
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=32, shuffle=True)
    model = ManyTasks(tasks=60)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    for epoch in range(500):
        for inputs, targets in loader:
            loss = (model(inputs, step % 60) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if not told.remedied:
                assert_finite(model, step)
            optimizer.step()
            step += 1
        print(f"{epoch:4} {loss:.2e}")


if __name__ == "__main__":
    main()
