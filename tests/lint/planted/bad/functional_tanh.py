# planted: line 14, F.tanh is deprecated; use torch.tanh; since torch 1.0
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, hidden):
        super(Attention, self).__init__()
        self.attn = nn.Linear(hidden * 2, hidden)
        self.v = nn.Parameter(torch.rand(hidden))

    def score(self, hidden, encoder_outputs):
        energy = F.tanh(self.attn(torch.cat([hidden, encoder_outputs], 2)))
        energy = energy.transpose(2, 1)
        v = self.v.repeat(encoder_outputs.size(0), 1).unsqueeze(1)
        return torch.bmm(v, energy).squeeze(1)
