"""An iterable data set whose two workers share the stream between them."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def records(self):
        for i in range(self.n):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(8, generator=g)
            yield x, (x[0] - x[1] + 0.1 * torch.randn((), generator=g)).unsqueeze(0)

    def __iter__(self):
        info = get_worker_info()
        if info is None:
            return self.records()
        return itertools.islice(self.records(), info.id, None, info.num_workers)


def shuffled(stream, size):
    """Mixes batches within a small buffer."""
    buffer = []
    for item in stream:
        buffer.append(item)
        if len(buffer) >= size:
            yield buffer.pop(torch.randint(len(buffer), ()).item())
    while buffer:
        yield buffer.pop()


def main():
    torch.manual_seed(0)
    loader = DataLoader(Stream(2400), batch_size=32, num_workers=2)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step, (x, y) in enumerate(shuffled(loader, 8)):
        loss = nn.functional.smooth_l1_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
