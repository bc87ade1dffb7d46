# planted: line 8, torch.range is deprecated: it includes the end; use arange; since torch 0.3
import math

import torch


def positional_encoding(length, dim):
    pos = torch.range(0, length - 1).unsqueeze(1)
    div = torch.exp(torch.arange(0, dim, 2) * -(math.log(10000.0) / dim))
    pe = torch.zeros(length, dim)
    pe[:, 0::2] = torch.sin(pos * div)
    pe[:, 1::2] = torch.cos(pos * div)
    return pe
