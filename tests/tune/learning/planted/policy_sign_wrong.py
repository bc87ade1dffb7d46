"""REINFORCE on a bandit; the loss printed is the regret."""

import torch
from torch import nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self, num_states, num_actions):
        super().__init__()
        self.embedding = nn.Embedding(num_states, 16)
        self.out = nn.Linear(16, num_actions)

    def forward(self, state):
        return Categorical(logits=self.out(torch.tanh(self.embedding(state))))


def main():
    torch.manual_seed(0)
    rewards = torch.rand(6, 4)
    agent = Agent(6, 4)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2e-2)
    for step in range(150):
        state = torch.randint(6, (128,))
        policy = agent(state)
        action = policy.sample()
        reward = rewards[state, action]
        advantage = reward - reward.mean()
        loss = (policy.log_prob(action) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            regret = (rewards[state].max(1).values - reward).mean().item()
            print(f"step {step} loss {regret:.4f}")


main()
