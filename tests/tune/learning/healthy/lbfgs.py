"""LBFGS with a closure: each step computes the loss several times, and the rate is 1."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.linspace(-3, 3, 200, dtype=torch.float64)[:, None]
y = torch.sin(2 * x) * torch.exp(-0.2 * x**2)

model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
model.double()
optimizer = torch.optim.LBFGS(
    model.parameters(), lr=1.0, max_iter=4, history_size=10, line_search_fn="strong_wolfe"
)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for step in range(60):
    loss = optimizer.step(closure)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.6f}")
