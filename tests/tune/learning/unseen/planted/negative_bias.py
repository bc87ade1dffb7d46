import math

import torch
from torch import nn


class Hparams:
    hidden = 48
    bias_init = -6.0
    gain = math.sqrt(2)
    lr = 1e-2


class Layer(nn.Module):
    def __init__(self, a, b, hp):
        super().__init__()
        self.linear = nn.Linear(a, b)
        nn.init.orthogonal_(self.linear.weight, hp.gain)
        nn.init.constant_(self.linear.bias, hp.bias_init)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Policy(nn.Module):
    """Imitates an expert who steers towards the middle."""

    def __init__(self, hp):
        super().__init__()
        self.body = nn.Sequential(Layer(5, hp.hidden, hp), Layer(hp.hidden, hp.hidden, hp))
        self.mean = nn.Linear(hp.hidden, 2)

    def forward(self, observation):
        return torch.tanh(self.mean(self.body(observation)))


def demonstrations(n):
    observation = torch.rand(n, 5) * 2 - 1
    action = torch.stack(
        [torch.tanh(-2 * observation[:, 0]), torch.tanh(observation[:, 1] * observation[:, 2])], 1
    )
    return observation, action


torch.manual_seed(0)
hp = Hparams()
policy = Policy(hp)
optimizer = torch.optim.SGD(policy.parameters(), lr=hp.lr, momentum=0.9, nesterov=True)
for step in range(100):
    observation, action = demonstrations(64)
    loss = nn.functional.mse_loss(policy(observation), action)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
