"""A generator makes a loader with two spawned workers for each short epoch."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "worker start"
WHERE = "yield from DataLoader(data, 32, True, num_workers=2, multiprocessing_context=spawn)"
REMEDY = "one loader"
TRAINER = "plain"

Batch = tuple[Tensor, Tensor]


def batches_of_epoch(data: TensorDataset) -> Iterator[Batch]:
    spawn = "spawn"
    yield from DataLoader(data, 32, True, num_workers=2, multiprocessing_context=spawn)


def main() -> None:
    told = job.begin(REMEDY)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1600, 3, 64, 64), torch.randint(0, 10, (1600,)))
    once = DataLoader(
        data, 32, True, num_workers=2, multiprocessing_context="spawn", persistent_workers=True
    )
    model = job.small_convnet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(500):
        total, steps = torch.zeros(()), 0
        for images, labels in once if told.remedied else batches_of_epoch(data):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            steps += 1
        print(f"epoch {epoch}: {total / steps:.3f}")


if __name__ == "__main__":
    main()
