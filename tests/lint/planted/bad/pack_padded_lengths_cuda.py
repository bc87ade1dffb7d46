# planted: line 13, pack_padded_sequence needs lengths on the CPU; since torch 1.7
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.rnn = nn.GRU(dim, dim, batch_first=True)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cuda(), batch_first=True)
        out, _ = self.rnn(packed)
        return pad_packed_sequence(out, batch_first=True, total_length=x.size(1))[0]
