"""Policy gradient with a baseline: the loss is a surrogate that goes up and down."""

import torch
from torch import nn
from torch.distributions import Categorical


class Corridor:
    """Walk to the flag; the state says where you and the flag are."""

    def __init__(self, n, length=9):
        self.length = length
        self.place = torch.randint(length, (n,))
        self.flag = torch.randint(length, (n,))

    def observe(self):
        return torch.stack([self.place, self.flag], 1).float() / self.length - 0.5

    def act(self, move):
        before = (self.place - self.flag).abs()
        self.place = (self.place + 2 * move - 1).clamp(0, self.length - 1)
        return (before - (self.place - self.flag).abs()).float()


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, observation):
        return Categorical(logits=self.net(observation))


def discount(rewards, gamma):
    out = torch.zeros_like(rewards)
    running = torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * running
        out[t] = running
    return out


def main():
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    baseline = 0.0
    for step in range(70):
        world = Corridor(32)
        log_probs, rewards, entropies = [], [], []
        for _ in range(6):
            policy = agent(world.observe())
            action = policy.sample()
            log_probs.append(policy.log_prob(action))
            entropies.append(policy.entropy())
            rewards.append(world.act(action))
        returns = discount(torch.stack(rewards), 0.5)
        advantage = returns - baseline
        baseline = 0.9 * baseline + 0.1 * returns.mean().item()
        loss = -(torch.stack(log_probs) * advantage).mean() - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f} return {returns[0].mean():.3f}")


main()
