"""Train an autoencoder with a cosine schedule."""

import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
torch.manual_seed(0)
basis = torch.randn(4, 32)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(32, 4)
        self.decoder = nn.Linear(4, 32)

    def forward(self, x):
        return self.decoder(self.encoder(x))


model = AutoEncoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
for step in range(100):
    x = torch.randn(64, 4) @ basis
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    scheduler.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
