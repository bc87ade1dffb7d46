# planted: line 18, F.softmax without dim: implicit dimension, deprecated; since torch 0.3
import gym
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super(Policy, self).__init__()
        self.affine1 = nn.Linear(4, 128)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, x):
        x = F.relu(self.affine1(x))
        action_scores = self.affine2(x)
        return F.softmax(action_scores)


def select_action(policy, state):
    state = torch.from_numpy(state).float().unsqueeze(0)
    m = Categorical(policy(state))
    return m.sample().item()
