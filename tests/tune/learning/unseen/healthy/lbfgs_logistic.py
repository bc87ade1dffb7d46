"""Full-batch LBFGS: the same data in each step, many gradients per step."""

import torch
from torch import nn


def study(n):
    x = torch.randn(n, 15)
    w = torch.zeros(15)
    w[:4] = torch.tensor([1.5, -2.0, 1.0, 0.5])
    y = torch.bernoulli(torch.sigmoid(x @ w - 0.3))
    return x, y


class Logistic(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(d))
        self.b = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x @ self.w + self.b


def fit(model, x, y, penalty=1e-2, steps=60):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    criterion = nn.BCEWithLogitsLoss()

    def closure():
        optimizer.zero_grad()
        loss = criterion(model(x), y) + penalty * model.w.square().sum()
        loss.backward()
        return loss

    for step in range(steps):
        loss = optimizer.step(closure)
        print(f"step {step} loss {loss.item():.6f}")


torch.manual_seed(0)
x, y = study(500)
model = Logistic(15)
fit(model, x, y)
print("weights", [round(v, 2) for v in model.w.tolist()])
