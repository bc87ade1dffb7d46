import torch
from torch import nn


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def real_points(n):
    angle = torch.rand(n) * 6.28
    return torch.stack([torch.cos(angle), torch.sin(angle)], 1) + 0.05 * torch.randn(n, 2)


class GAN:
    def __init__(self, latent=4):
        self.latent = latent
        self.generator = mlp(latent, 32, 32, 2)
        self.critic = mlp(2, 32, 32, 1)
        self.opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
        self.opt_c = torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
        self.bce = nn.BCEWithLogitsLoss()

    def generator_step(self, n):
        self.opt_g.zero_grad()
        fake = self.generator(torch.randn(n, self.latent))
        loss = self.bce(self.critic(fake), torch.ones(n, 1))
        loss.backward()
        self.opt_g.step()
        return loss

    def critic_step(self, real):
        n = len(real)
        fake = self.generator(torch.randn(n, self.latent)).detach()
        loss_real = self.bce(self.critic(real), torch.ones(n, 1))
        loss_fake = self.bce(self.critic(fake), torch.zeros(n, 1))
        loss = loss_real + loss_fake
        loss.backward()
        self.opt_c.step()
        self.opt_c.zero_grad()
        return loss


torch.manual_seed(0)
gan = GAN()
for step in range(80):
    g_loss = gan.generator_step(32)
    c_loss = gan.critic_step(real_points(32))
    print(f"step {step} loss {c_loss.item():.4f} generator {g_loss.item():.4f}")
