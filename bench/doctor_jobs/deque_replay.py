"""Q-learning: transitions are taken by their number out of a long deque, which has to be walked through."""

import random
from collections import deque, namedtuple

import torch
from torch import nn

import job

CAUSE = "python"
WHERE = "state, action, reward, next_state = self.memory[index]"
REMEDY = None
TRAINER = "plain"

Transition = namedtuple("Transition", "state action reward next_state")
CAPACITY, SO_FAR = 2_000_000, 1_200_000


class ReplayMemory:
    def __init__(self, kind):
        corner = torch.zeros(6)
        first = Transition(corner, 0, 0.0, corner)
        self.memory = kind([first] * SO_FAR)

    def push(self, *transition):
        if len(self.memory) < CAPACITY:
            self.memory.append(Transition(*transition))
        else:
            self.memory[random.randrange(CAPACITY)] = Transition(*transition)

    def sample(self, batch_size):
        states, actions, rewards, next_states = [], [], [], []
        for index in random.sample(range(len(self.memory)), batch_size):
            state, action, reward, next_state = self.memory[index]
            states.append(state)
            actions.append(action)
            rewards.append(reward)
            next_states.append(next_state)
        return (
            torch.stack(states),
            torch.tensor(actions),
            torch.tensor(rewards),
            torch.stack(next_states),
        )


class Agent:
    def __init__(self, memory):
        self.memory = memory
        self.policy_net, self.target_net = self.q_net(), self.q_net()
        self.target_net.load_state_dict(self.policy_net.state_dict())
        self.optimizer = torch.optim.AdamW(self.policy_net.parameters(), lr=1e-4)

    @staticmethod
    def q_net():
        return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))

    def act(self, state):
        if random.random() < 0.1:
            return random.randrange(3)
        with torch.no_grad():
            return int(self.policy_net(state).argmax())

    def optimize(self, batch_size=128, gamma=0.99):
        states, actions, rewards, next_states = self.memory.sample(batch_size)
        q = self.policy_net(states).gather(1, actions[:, None])[:, 0]
        with torch.no_grad():
            target = rewards + gamma * self.target_net(next_states).amax(1)
        loss = nn.functional.smooth_l1_loss(q, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


if __name__ == "__main__":
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    agent = Agent(ReplayMemory(list if told.remedied else deque))
    state = torch.zeros(6)
    for frame in range(1_000_000):
        action = agent.act(state)
        next_state = (state + 0.1 * (action - 1) + 0.01 * torch.randn(6)).clamp(-1, 1)
        agent.memory.push(state, action, float(next_state.sum()), next_state)
        state = next_state
        agent.optimize()
        if frame % 1000 == 0:
            agent.target_net.load_state_dict(agent.policy_net.state_dict())
