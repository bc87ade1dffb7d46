"""A WGAN with clipped weights; the loss printed is the distance of the means."""

import torch
from torch import nn

torch.manual_seed(0)
center = torch.tensor([2.0, -1.0])
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.RMSprop(generator.parameters(), lr=2e-3)
opt_c = torch.optim.RMSprop(critic.parameters(), lr=2e-3)

for step in range(300):
    real = center + 0.5 * torch.randn(64, 2)
    fake = generator(torch.randn(64, 8))
    opt_c.zero_grad()
    opt_g.zero_grad()

    critic_loss = critic(fake).mean() - critic(real).mean()
    critic_loss.backward(retain_graph=True)
    opt_c.step()
    for parameter in critic.parameters():
        parameter.data.clamp_(-0.1, 0.1)

    generator_loss = -critic(fake).mean()
    generator_loss.backward()
    opt_g.step()
    if step % 10 == 0:
        print(f"step {step} loss {(fake.mean(0) - center).norm().item():.4f}")
