import itertools

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return self.net(x)


class Task:
    """A head with an optimizer of its own."""

    def __init__(self, encoder, head, lr):
        self.encoder = encoder
        self.head = head
        parameters = itertools.chain(encoder.parameters(), head.parameters())
        self.optimizer = torch.optim.Adam(parameters, lr=lr)

    def loss(self, x, target):
        raise NotImplementedError


class Classify(Task):
    def loss(self, x, target):
        return nn.functional.cross_entropy(self.head(self.encoder(x)), target)


class Regress(Task):
    def loss(self, x, target):
        return nn.functional.mse_loss(self.head(self.encoder(x)).squeeze(1), target)


def main():
    torch.manual_seed(0)
    x = torch.randn(800, 20)
    label = (x[:, :4].sum(1) > 0).long()
    value = x[:, 4] - 0.5 * x[:, 5]
    encoder = Encoder()
    tasks = [Classify(encoder, nn.Linear(16, 2), 1e-2), Regress(encoder, nn.Linear(16, 1), 1e-2)]
    for step in range(70):
        i = torch.randint(800, (32,))
        total = tasks[0].loss(x[i], label[i]) + tasks[1].loss(x[i], value[i])
        for task in tasks:
            task.optimizer.zero_grad()
        total.backward()
        for task in tasks:
            task.optimizer.step()
        print(f"step {step} loss {total.item():.4f}")


main()
