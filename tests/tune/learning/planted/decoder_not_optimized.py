"""Compress signals with an encoder and a decoder."""

import torch
from torch import nn

torch.manual_seed(0)
basis = torch.randn(3, 20)
encoder = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 20))
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-2)


def train_step():
    x = torch.randn(64, 3) @ basis
    code = encoder(x)
    loss = nn.functional.mse_loss(decoder(code), x)
    encoder.zero_grad()
    decoder.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


for step in range(120):
    loss = train_step()
    if step % 5 == 0:
        print(f"step {step} loss {loss:.4f}")
