"""Q-learning with a target network that is copied now and then; the last figure is an error."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
NUM_STATES = 8
GAMMA = 0.8


def move(state, action):
    """A ring of states: action 1 goes on, action 0 stays; state 0 pays."""
    after = torch.where(action == 1, (state + 1) % NUM_STATES, state)
    return after, (after == 0).float()


def true_values():
    q = torch.zeros(NUM_STATES, 2)
    states = torch.arange(NUM_STATES)
    for _ in range(100):
        for action in (0, 1):
            after, reward = move(states, torch.full_like(states, action))
            q[:, action] = reward + GAMMA * q[after].max(1).values
    return q


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(NUM_STATES, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, state):
        return self.net(state)


q_net = QNet()
target_net = copy.deepcopy(q_net)
for parameter in target_net.parameters():
    parameter.requires_grad = False
optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-2)
wanted = true_values()
for step in range(400):
    state = torch.randint(NUM_STATES, (64,))
    action = torch.randint(2, (64,))
    after, reward = move(state, action)
    with torch.no_grad():
        target = reward + GAMMA * target_net(after).max(1).values
    value = q_net(state).gather(1, action[:, None]).squeeze(1)
    loss = nn.functional.smooth_l1_loss(value, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        target_net.load_state_dict(q_net.state_dict())
        with torch.no_grad():
            error = (q_net(torch.arange(NUM_STATES)) - wanted).abs().mean().item()
        print(f"step {step} loss {loss.item():.4f} error {error:.4f}")
