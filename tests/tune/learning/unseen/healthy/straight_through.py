"""Weights of one bit with a gradient that passes through the sign."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return torch.where(w >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad * (w.abs() <= 1)


class BinaryLinear(nn.Linear):
    def forward(self, x):
        scale = self.weight.detach().abs().mean()
        return nn.functional.linear(x, Sign.apply(self.weight) * scale, self.bias)


class BinaryNet(nn.Module):
    def __init__(self, inputs, hidden, classes):
        super().__init__()
        self.a = BinaryLinear(inputs, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.b = BinaryLinear(hidden, hidden)
        self.norm2 = nn.BatchNorm1d(hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x):
        x = nn.functional.hardtanh(self.norm(self.a(x)))
        x = nn.functional.hardtanh(self.norm2(self.b(x)))
        return self.out(x)


def main():
    torch.manual_seed(0)
    x = torch.randn(1200, 20)
    y = (x[:, :5].sum(1) > 0).long() + (x[:, 5:8].sum(1) > 1).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
    model = BinaryNet(20, 64, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = 0
    for _ in range(4):
        for bx, by in loader:
            loss = nn.functional.cross_entropy(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
