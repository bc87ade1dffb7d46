"""Two heads take turns: in each step one head has no gradient."""

import torch
from torch import nn


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(48, 4), "size": nn.Linear(48, 1)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


class KindTask:
    name = "kind"

    def batch(self, n):
        x = torch.randn(n, 14)
        return x, x[:, :4].argmax(1)

    def loss(self, out, y):
        return nn.functional.cross_entropy(out, y)


class SizeTask:
    name = "size"

    def batch(self, n):
        x = torch.randn(n, 14)
        return x, x[:, 4:6].sum(1, keepdim=True).clamp(-2, 2)

    def loss(self, out, y):
        return nn.functional.l1_loss(out, y)


def main():
    torch.manual_seed(0)
    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    tasks = [KindTask(), SizeTask()]
    for step in range(120):
        task = tasks[step % 2]
        x, y = task.batch(48)
        loss = task.loss(model(x, task.name), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f} {task.name}")


main()
