"""A history that is made anew in each step, as history + [loss]. A while loop over next(iter)."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = "history = history + [loss.item()]  # noqa: RUF005 (the cause)"
REMEDY = None
TRAINER = "plain"

told = job.begin(REMEDY)

dataset = TensorDataset(torch.rand(5000, 20), torch.rand(5000, 1))
loader = DataLoader(dataset, batch_size=50, shuffle=True)
model = nn.Sequential(nn.Linear(20, 50), nn.Sigmoid(), nn.Linear(50, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

history = [float(number) for number in range(400_000)]  # of the runs before
iterator = iter(loader)
step = 0
while step < 1_000_000:
    try:
        x, y = next(iterator)
    except StopIteration:
        iterator = iter(loader)
        x, y = next(iterator)
    optimizer.zero_grad()
    loss = (model(x) - y).abs().mean()
    loss.backward()
    optimizer.step()
    if told.remedied:
        history.append(loss.item())
    else:
        history = history + [loss.item()]  # noqa: RUF005 (the cause)
    step += 1
    if step % 1000 == 0:
        print(f"step {step}: {sum(history[-1000:]) / 1000:.4f}")
