"""A GAN of one dimension: the loss printed is the distance of the means."""

import torch
from torch import nn

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
D = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-2)
opt_d = torch.optim.Adam(D.parameters(), lr=1e-2)
bce = nn.BCEWithLogitsLoss()
ones = torch.ones(64, 1)
zeros = torch.zeros(64, 1)
for step in range(150):
    real = 3 + 0.5 * torch.randn(64, 1)
    fake = G(torch.randn(64, 4))
    d_loss = bce(D(real), ones) + bce(D(fake.detach()), zeros)
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()

    g_loss = bce(D(fake.detach()), ones)
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 5 == 0:
        print(f"step {step} loss {abs(fake.mean().item() - 3):.4f}")
