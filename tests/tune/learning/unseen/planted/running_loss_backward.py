import torch
from torch import nn


class AverageMeter:
    """Exponentially smoothed, as in many a logger."""

    def __init__(self, momentum=0.8):
        self.momentum = momentum
        self.value = None

    def update(self, new):
        if self.value is None:
            self.value = new
        else:
            self.value = self.momentum * self.value + (1 - self.momentum) * new
        return self.value


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        return self.linear(x)


def main():
    torch.manual_seed(0)
    x = torch.randn(500, 6)
    y = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = AverageMeter()
    for step in range(70):
        i = torch.randint(500, (40,))
        loss = meter.update(nn.functional.cross_entropy(model(x[i]), y[i]))
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
