# planted: line 8, layers in a list comprehension are not registered; use nn.ModuleList; in all versions
from torch import nn


class MultiHead(nn.Module):
    def __init__(self, dim, heads):
        super(MultiHead, self).__init__()
        self.heads = [nn.Linear(dim, dim) for _ in range(heads)]

    def forward(self, x):
        return sum(h(x) for h in self.heads)
