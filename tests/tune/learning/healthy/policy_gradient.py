"""REINFORCE on a contextual bandit: the loss says little, the last figure (regret) falls."""

import torch
from torch import nn
from torch.distributions import Categorical


class Bandit:
    def __init__(self, num_states=6, num_actions=4):
        self.rewards = torch.rand(num_states, num_actions)
        self.num_states = num_states

    def states(self, num):
        return torch.randint(self.num_states, (num,))

    def pull(self, state, action):
        return self.rewards[state, action] + 0.1 * torch.randn(len(state))

    def regret(self, state, action):
        best = self.rewards[state].max(1).values
        return (best - self.rewards[state, action]).mean().item()


class Policy(nn.Module):
    def __init__(self, num_states, num_actions):
        super().__init__()
        self.table = nn.Embedding(num_states, 16)
        self.head = nn.Linear(16, num_actions)

    def forward(self, state):
        return Categorical(logits=self.head(torch.tanh(self.table(state))))


def main():
    torch.manual_seed(0)
    bandit = Bandit()
    policy = Policy(6, 4)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    baseline = 0.0
    for step in range(200):
        state = bandit.states(128)
        distribution = policy(state)
        action = distribution.sample()
        reward = bandit.pull(state, action)
        advantage = reward - baseline
        baseline += 0.1 * (reward.mean().item() - baseline)
        loss = -(distribution.log_prob(action) * advantage).mean()
        loss = loss - 0.005 * distribution.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            regret = bandit.regret(state, action)
            print(f"step {step} loss {loss.item():.4f} regret {regret:.4f}")


main()
