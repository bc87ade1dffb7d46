import torch.nn as nn

class MLP(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.inp = nn.Linear(784, dim)
        self.layers = [nn.Linear(dim, dim) for _ in range(depth)]
        self.out = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.inp(x).relu()
        for layer in self.layers:
            x = layer(x).relu()
        return self.out(x)
