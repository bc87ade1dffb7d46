"""The share of rank 0 of two, as DistributedSampler gives it; the epoch is set each time."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build_loader(dataset, rank, world_size):
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    return DataLoader(dataset, batch_size=32, sampler=sampler), sampler


def main(rank=0, world_size=2):
    torch.manual_seed(0)
    x = torch.randn(1280, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    loader, sampler = build_loader(TensorDataset(x, y), rank, world_size)
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    step = 0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 0:
                print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
