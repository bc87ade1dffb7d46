import torch
import torch.nn as nn

bce = nn.BCEWithLogitsLoss()

def step(G, D, optG, optD, real, nz=100):
    z = torch.randn(real.size(0), nz, device=real.device)
    fake = G(z)
    ones = torch.ones(real.size(0), 1, device=real.device)
    zeros = torch.zeros_like(ones)
    optD.zero_grad()
    lossD = bce(D(real), ones) + bce(D(fake), zeros)
    lossD.backward()
    optD.step()
    optG.zero_grad()
    lossG = bce(D(G(z)), ones)
    lossG.backward()
    optG.step()
