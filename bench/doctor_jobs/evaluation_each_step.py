"""The accuracy on all held-out data is computed after each step, for a smooth curve."""

import torch
from torch import nn, optim

import job

CAUSE = "evaluation"
WHERE = "guesses = net(held_inputs).argmax(dim=1)"
REMEDY = None
TRAINER = "plain"


def make_spirals(n):
    t = torch.rand(n) * 3
    k = torch.randint(0, 3, (n,))
    angle = 2 * t + k * 2.1
    points = torch.stack([t * angle.cos(), t * angle.sin()], dim=1)
    return points + 0.05 * torch.randn(n, 2), k


def accuracy_of(net, held_inputs, held_targets):
    net.eval()
    with torch.no_grad():
        guesses = net(held_inputs).argmax(dim=1)
    net.train()
    return (guesses == held_targets).float().mean()


def minibatches(inputs, targets, size):
    order = torch.randperm(len(inputs))
    for start in range(0, len(inputs), size):
        part = order[start : start + size]
        yield inputs[part], targets[part]


def train(told):
    torch.set_num_threads(1)
    inputs, targets = make_spirals(10_000)
    held_inputs, held_targets = make_spirals(6_000)
    net = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    net.append(nn.Dropout(0.1))
    net.append(nn.Linear(128, 3))
    opt = optim.Adam(net.parameters(), lr=1e-3)
    curve = []
    for epoch in range(3000):
        for x, y in minibatches(inputs, targets, 500):
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
            if not told.remedied:
                curve.append(accuracy_of(net, held_inputs, held_targets))
        print(epoch, f"{accuracy_of(net, held_inputs, held_targets):.3f}", len(curve))


if __name__ == "__main__":
    told = job.begin(REMEDY)
    train(told)
