import torch
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, state):
        return torch.softmax(self.fc(state), dim=-1)


def act(policy, state):
    dist = Categorical(policy(state))
    action = dist.sample()
    return action.item(), dist.log_prob(action)
