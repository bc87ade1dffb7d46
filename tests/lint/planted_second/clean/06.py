import torch
import torch.nn as nn

def gan_step(G, D, opt_g, opt_d, real, nz):
    bce = nn.BCEWithLogitsLoss()
    b = real.size(0)
    ones = torch.ones(b, 1, device=real.device)
    zeros = torch.zeros(b, 1, device=real.device)
    fake = G(torch.randn(b, nz, device=real.device))
    opt_d.zero_grad()
    (bce(D(real), ones) + bce(D(fake.detach()), zeros)).backward()
    opt_d.step()
    opt_g.zero_grad()
    bce(D(fake), ones).backward()
    opt_g.step()
