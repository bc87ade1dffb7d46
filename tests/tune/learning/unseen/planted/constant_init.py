import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.a = nn.Linear(inputs, hidden)
        self.b = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, 1)
        self.apply(init_weights)

    def forward(self, state):
        return self.value(torch.tanh(self.b(torch.tanh(self.a(state)))))


def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.05)
        nn.init.zeros_(module.bias)


def rollout(n):
    """Random states of a pendulum, and the return that a known policy earns from them."""
    angle = (torch.rand(n) * 2 - 1) * 3.14
    speed = torch.randn(n)
    returns = torch.cos(angle) - 0.1 * speed**2 - 0.2 * torch.sin(2 * angle) * speed
    return torch.stack([torch.cos(angle), torch.sin(angle), speed], 1), returns


def main():
    torch.manual_seed(0)
    critic = Critic(3, 32)
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    for step in range(120):
        states, returns = rollout(64)
        advantage = returns - critic(states).squeeze(1)
        loss = advantage.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
