import torch
from torch import nn

bce = nn.BCEWithLogitsLoss()


def gan_step(gen, disc, opt_g, opt_d, real, noise):
    fake = gen(noise)
    opt_d.zero_grad()
    loss_real = bce(disc(real), torch.ones(len(real), 1))
    loss_fake = bce(disc(fake.detach()), torch.zeros(len(real), 1))
    (loss_real + loss_fake).backward()
    opt_d.step()
    opt_g.zero_grad()
    loss_g = bce(disc(fake), torch.ones(len(real), 1))
    loss_g.backward()
    opt_g.step()
    return loss_g.item()
