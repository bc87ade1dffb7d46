"""A GAN of two dimensions with two optimizers; the last figure is the distance of the means."""

import torch
from torch import nn

torch.manual_seed(0)
LATENT = 8
CENTER = torch.tensor([2.0, -1.0])


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def main():
    generator = Generator()
    discriminator = Discriminator()
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=4e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=4e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    for step in range(300):
        real = CENTER + 0.5 * torch.randn(64, 2)
        fake = generator(torch.randn(64, LATENT))

        d_optimizer.zero_grad()
        d_loss = criterion(discriminator(real), torch.ones(64))
        d_loss = d_loss + criterion(discriminator(fake.detach()), torch.zeros(64))
        d_loss.backward()
        d_optimizer.step()

        # This also fills the discriminator's gradients; they are cleared above before its step.
        g_optimizer.zero_grad()
        g_loss = criterion(discriminator(fake), torch.ones(64))
        g_loss.backward()
        g_optimizer.step()
        if step % 10 == 0:
            distance = (fake.mean(0) - CENTER).norm().item()
            print(f"step {step} loss {g_loss.item():.4f} distance {distance:.4f}")


if __name__ == "__main__":
    main()
