"""A variational autoencoder whose divergence has weight 0 for a while and grows then."""

import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return self.decoder(code), divergence


def main():
    torch.manual_seed(0)
    basis = torch.randn(3, 16)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(160):
        x = torch.randn(128, 3) @ basis
        restored, divergence = model(x)
        fit = nn.functional.mse_loss(restored, x)
        weight = 0.0 if step < 15 else min(0.01, 0.0005 * (step - 15))
        loss = fit + divergence * weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {fit.item():.4f}")


main()
