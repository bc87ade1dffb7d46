# planted: line 13, torch.jit.script is deprecated; use torch.compile or torch.export; since torch 2.11
import torch
from torch import nn


class Gate(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


scripted = torch.jit.script(Gate())
scripted.save("gate.pt")
print(scripted(torch.ones(2)))
