"""An actor that climbs a critic: its loss leaves gradients in the critic, which clears them before its own."""

import torch
from torch import nn

torch.manual_seed(0)
goal = torch.randn(4, 2)
actor = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2), nn.Tanh())
critic = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
for step in range(200):
    state = torch.randn(128, 4)
    best = torch.tanh(state @ goal)
    action = (actor(state) + 0.3 * torch.randn(128, 2)).detach()
    cost = (action - best).square().sum(1)
    critic_loss = nn.functional.mse_loss(critic(torch.cat([state, action], 1)).squeeze(1), cost)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    actor_loss = critic(torch.cat([state, actor(state)], 1)).mean()
    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {(actor(state) - best).square().sum(1).mean().item():.4f}")
