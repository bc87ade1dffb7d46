"""A Wasserstein GAN: losses of both signs, the critic five times per step, weights clipped."""

import torch
from torch import nn


def real(n):
    centers = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0]])
    return centers[torch.randint(3, (n,))] + 0.1 * torch.randn(n, 2)


class Generator(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.latent = latent
        self.net = nn.Sequential(nn.Linear(latent, 48), nn.ReLU(), nn.Linear(48, 2))

    def sample(self, n):
        return self.net(torch.randn(n, self.latent))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def critic_step(critic, generator, optimizer, batch=64, bound=0.1):
    with torch.no_grad():
        fake = generator.sample(batch)
    loss = critic(fake).mean() - critic(real(batch)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p in critic.parameters():
            p.clamp_(-bound, bound)
    return loss


def generator_step(critic, generator, optimizer, batch=64):
    critic.requires_grad_(False)
    loss = -critic(generator.sample(batch)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    critic.requires_grad_(True)
    return loss


def main():
    torch.manual_seed(0)
    critic, generator = Critic(), Generator()
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=2e-3)
    opt_g = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    for step in range(70):
        for _ in range(5):
            c = critic_step(critic, generator, opt_c)
        g = generator_step(critic, generator, opt_g)
        print(f"step {step} loss {g.item():.4f} critic {c.item():.4f}")


main()
