# planted: line 15, tensor.new(...) is a legacy constructor; use new_empty / new_zeros; since torch 0.4
import torch
import torch.nn as nn


class RNNModel(nn.Module):
    def __init__(self, ninp, nhid, nlayers):
        super().__init__()
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.nhid = nhid
        self.nlayers = nlayers

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new(self.nlayers, bsz, self.nhid).zero_()
