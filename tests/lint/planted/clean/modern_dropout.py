import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        x = F.dropout(torch.relu(self.fc(x)), p=0.1, training=self.training)
        return F.scaled_dot_product_attention(x, x, x)
