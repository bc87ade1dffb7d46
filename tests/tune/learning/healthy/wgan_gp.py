"""A WGAN with a gradient penalty: its losses may be negative, the last figure is a distance."""

import torch
from torch import nn

torch.manual_seed(0)
mixing = torch.tensor([[1.0, 0.4], [0.0, 0.6]])


def real_samples(num):
    return torch.randn(num, 2) @ mixing + 2.0


generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
g_opt = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
c_opt = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))


def penalty(real, fake):
    share = torch.rand(len(real), 1)
    mixed = (share * real + (1 - share) * fake).requires_grad_(True)
    (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return ((gradient.norm(2, dim=1) - 1) ** 2).mean()


for step in range(200):
    for _ in range(3):
        real = real_samples(64)
        with torch.no_grad():
            fake = generator(torch.randn(64, 4))
        c_loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
        c_opt.zero_grad()
        c_loss.backward()
        c_opt.step()

    for parameter in critic.parameters():
        parameter.requires_grad_(False)
    fake = generator(torch.randn(64, 4))
    g_loss = -critic(fake).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
    for parameter in critic.parameters():
        parameter.requires_grad_(True)
    if step % 10 == 0:
        distance = (fake.mean(0) - 2.0).norm().item()
        print(f"step {step} loss {g_loss.item():.4f} distance {distance:.4f}")
