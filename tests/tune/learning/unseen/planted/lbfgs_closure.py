import torch
from torch import nn


class PhysicsNet(nn.Module):
    """u(t) with u' = -2 u + sin t and u(0) = 1."""

    def __init__(self, width=20):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, t):
        return self.net(t)


def residual(model, t):
    u = model(t)
    (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
    return du + 2 * u - torch.sin(t)


def total_loss(model, t, t0):
    interior = residual(model, t).pow(2).mean()
    start = (model(t0) - 1.0).pow(2).mean()
    return interior + 10.0 * start


def main():
    torch.manual_seed(0)
    t = torch.linspace(0, 4, 60).unsqueeze(1).requires_grad_()
    t0 = torch.zeros(1, 1)
    model = PhysicsNet()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=10)

    def closure():
        loss = total_loss(model, t, t0)
        loss.backward()
        return loss

    for step in range(70):
        loss = optimizer.step(closure)
        print(f"step {step} loss {loss.item():.5f}")


main()
