"""A VAE whose KL term has weight 0 at first and grows (KL warm-up)."""

import torch
from torch import nn


class VAE(nn.Module):
    def __init__(self, dim=30, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, dim))

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        return self.decoder(z), mean, log_var


def losses(x, reconstruction, mean, log_var):
    error = ((x - reconstruction) ** 2).sum(1).mean()
    kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
    return error, kl


torch.manual_seed(0)
basis = torch.randn(3, 30)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
WARMUP = 60
for step in range(180):
    x = torch.randn(128, 3) @ basis + 0.1 * torch.randn(128, 30)
    error, kl = losses(x, *model(x))
    beta = min(1.0, step / WARMUP)
    loss = error + beta * kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
