"""An autoencoder with a probe beside it: the probe sees detached codes and must not change them."""

import torch
from torch import nn


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 24))
        self.probe = nn.Linear(6, 4)

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code), self.probe(code.detach())


def main():
    torch.manual_seed(0)
    model = AutoEncoder()
    optimizer = torch.optim.Adam(
        [
            {"params": [*model.encoder.parameters(), *model.decoder.parameters()]},
            {"params": model.probe.parameters(), "lr": 1e-2},
        ],
        lr=4e-3,
    )
    centers = torch.randn(4, 24)
    for step in range(120):
        y = torch.randint(4, (64,))
        x = centers[y] + 0.3 * torch.randn(64, 24)
        reconstruction, logits = model(x)
        reconstruction_loss = nn.functional.mse_loss(reconstruction, x)
        probe_loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        (reconstruction_loss + probe_loss).backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"probe {probe_loss.item():.4f}")
            print(f"step {step} loss {reconstruction_loss.item():.4f}")


if __name__ == "__main__":
    main()
