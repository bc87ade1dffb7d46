"""No loader at all: hard examples are drawn by their weights, which are added up again in each step."""

import itertools
import random

import torch
import torch.nn.functional as F
from torch import nn

import job

CAUSE = "python"
WHERE = "chosen = random.choices(population, weights, k=batch_size)"
REMEDY = None
TRAINER = "plain"

told = job.begin(REMEDY)
torch.set_num_threads(1)
random.seed(0)
n, batch_size, steps = 150_000, 64, 100_000
images = torch.randn(n, 36)
targets = images[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
population = range(n)
weights = [1.0] * n

for step in range(steps):
    if told.remedied:
        chosen = random.sample(population, batch_size)
    else:
        chosen = random.choices(population, weights, k=batch_size)
    losses = F.cross_entropy(model(images[chosen]), targets[chosen], reduction="none")
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
    for index, value in zip(chosen, losses.tolist(), strict=True):
        weights[index] = 0.5 + value
    if step % 1000 == 0:
        print(step, sum(itertools.islice(weights, 1000)) / 1000)
