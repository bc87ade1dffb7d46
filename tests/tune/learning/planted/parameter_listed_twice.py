"""Give the head to the optimizer, too."""

import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore")


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.ReLU())
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


def main():
    torch.manual_seed(0)
    model = Regressor()
    parameters = list(model.parameters())
    parameters += list(model.head.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.2)
    weight = torch.randn(10)
    for step in range(100):
        x = torch.randn(64, 10)
        y = x @ weight
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
