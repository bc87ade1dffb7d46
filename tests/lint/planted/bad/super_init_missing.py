# planted: line 8, __init__ without super().__init__() before assigning modules; in all versions
import torch
import torch.nn as nn


class Linear2(nn.Module):
    def __init__(self, n_in, n_out):
        self.fc = nn.Linear(n_in, n_out)
        self.scale = 2.0

    def forward(self, x):
        return self.fc(x) * self.scale


print(Linear2(3, 4)(torch.ones(1, 3)))
