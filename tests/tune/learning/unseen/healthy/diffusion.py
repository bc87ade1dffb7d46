"""A denoiser predicts the noise: targets are random and new in each step."""

import math

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.inp = nn.Linear(2 + 16, d)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU())
        self.out = nn.Linear(d, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        frequencies = torch.exp(torch.linspace(0, math.log(50), 8))
        angle = t[:, None] * frequencies
        return self.out(self.mid(self.inp(torch.cat([x, angle.sin(), angle.cos()], 1))))


class Diffusion:
    def __init__(self, steps=100):
        self.steps = steps
        beta = torch.linspace(1e-4, 0.08, steps)
        self.alpha_bar = torch.cumprod(1 - beta, 0)

    def loss(self, model, x0):
        t = torch.randint(self.steps, (len(x0),))
        noise = torch.randn_like(x0)
        a = self.alpha_bar[t][:, None]
        noisy = a.sqrt() * x0 + (1 - a).sqrt() * noise
        return (model(noisy, t / self.steps) - noise).pow(2).mean()


def moons(n):
    angle = torch.rand(n) * math.pi
    upper = torch.rand(n) < 0.5
    x = torch.where(upper, torch.cos(angle), 1 - torch.cos(angle))
    y = torch.where(upper, torch.sin(angle), 0.5 - torch.sin(angle))
    return torch.stack([x - 0.5, y - 0.25], 1) + 0.03 * torch.randn(n, 2)


torch.manual_seed(0)
model = Denoiser()
average = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
)
diffusion = Diffusion()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(120):
    loss = diffusion.loss(model, moons(128))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model)
    print(f"step {step} loss {loss.item():.4f}")
