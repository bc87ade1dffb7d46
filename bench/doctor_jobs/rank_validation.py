"""Every 25 steps all pairs of embeddings are compared by NumPy, to find the nearest. Own callbacks."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = ("evaluation", "python")
WHERE = "nearest = np.argsort(distances, axis=1)[:, 1]"
REMEDY = None
TRAINER = "plain"


class Engine:
    def __init__(self, update):
        self.update, self.handlers = update, []

    def on(self, every):
        def add(handler):
            self.handlers.append((every, handler))
            return handler

        return add

    def run(self, data, max_epochs):
        step = 0
        for _ in range(max_epochs):
            for batch in data:
                self.update(batch)
                step += 1
                for every, handler in self.handlers:
                    if step % every == 0:
                        handler(step)


def main():
    told = job.begin(REMEDY, every=25)
    embed = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16))
    head = nn.Linear(16, 5)
    optimizer = torch.optim.Adam([*embed.parameters(), *head.parameters()])
    x_val, y_val = torch.randn(2400, 32), torch.randint(0, 5, (2400,))
    loader = DataLoader(
        TensorDataset(torch.randn(6400, 32), torch.randint(0, 5, (6400,))), 32, shuffle=True
    )

    def update(batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head(embed(batch[0])), batch[1])
        loss.backward()
        optimizer.step()

    engine = Engine(update)

    @engine.on(every=25)
    def recall_at_1(step):
        if told.remedied:
            return
        embed.eval()
        with torch.no_grad():
            z = embed(x_val)
        distances = torch.cdist(z, z).numpy()
        nearest = np.argsort(distances, axis=1)[:, 1]
        print(step, (y_val[nearest] == y_val).float().mean().item())
        embed.train()

    engine.run(loader, 1000)


if __name__ == "__main__":
    main()
