# planted: line 10, nn.utils.weight_norm is deprecated; use nn.utils.parametrizations.weight_norm; since torch 2.0
import torch.nn as nn
from torch.nn.utils import weight_norm


class TemporalBlock(nn.Module):
    def __init__(self, n_inputs, n_outputs, kernel_size, dilation):
        super(TemporalBlock, self).__init__()
        pad = (kernel_size - 1) * dilation
        self.conv1 = weight_norm(
            nn.Conv1d(n_inputs, n_outputs, kernel_size, padding=pad, dilation=dilation)
        )
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.conv1(x))
