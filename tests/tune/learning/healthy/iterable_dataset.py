"""A stream that two workers read in turns, each its own part."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, rule, num_samples):
        super().__init__()
        self.rule = rule
        self.num_samples = num_samples

    def __iter__(self):
        worker = get_worker_info()
        first = worker.id if worker else 0
        stride = worker.num_workers if worker else 1
        for index in range(first, self.num_samples, stride):
            generator = torch.Generator().manual_seed(index)
            x = torch.randn(self.rule.shape[0], generator=generator)
            yield x, (x @ self.rule).argmax()


def train(model, loader, lr):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    stream = Stream(torch.randn(12, 4), num_samples=32 * 80)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 4))
    train(model, DataLoader(stream, batch_size=32, num_workers=2), lr=3e-3)
