"""The weights of the last layer are written to a log as text, in each step."""

import io
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = ("python", "sync")
WHERE = 'log.write(f"{step}: {head.weight}\\n")'
REMEDY = None
TRAINER = "plain"


def main(log: io.TextIOBase) -> None:
    told = job.begin(REMEDY)
    torch.set_printoptions(threshold=100_000)
    body = nn.Sequential(nn.Linear(40, 400), nn.ReLU(), nn.Linear(400, 64), nn.ReLU())
    head = nn.Linear(64, 8)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
    criterion = nn.CrossEntropyLoss()
    data = TensorDataset(torch.randn(5000, 40), torch.randint(0, 8, (5000,)))
    step = 0
    for epoch in range(1000):
        for x, y in DataLoader(data, batch_size=50, shuffle=True):
            loss = criterion(head(body(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if not told.remedied:
                log.write(f"{step}: {head.weight}\n")
        log.truncate(0)
        print(epoch, loss.item(), file=sys.stderr)


if __name__ == "__main__":
    main(io.StringIO())
