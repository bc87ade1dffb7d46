# planted: line 11, nn.utils.spectral_norm is superseded by nn.utils.parametrizations.spectral_norm; since torch 1.9
import torch
import torch.nn as nn
import torch.nn.utils as utils


class Discriminator(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.main = nn.Sequential(
            utils.spectral_norm(nn.Conv2d(3, width, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 1, 4, 1, 0),
        )

    def forward(self, x):
        return self.main(x).flatten(1)
