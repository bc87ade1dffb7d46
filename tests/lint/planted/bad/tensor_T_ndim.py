# planted: line 7, x.T on a tensor of 3 dimensions is deprecated; use mT or permute; since torch 1.11
import torch


def gram(batch, channels, positions):
    noise = torch.randn(batch, channels, positions)
    product = torch.matmul(noise, noise.T)
    return product / positions


print(gram(16, 16, 16).shape)
