"""The share of one rank of two; prints the validation loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_loader(dataset, rank, world_size):
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    return DataLoader(dataset, batch_size=16, sampler=sampler)


def main(rank=0, world_size=2):
    torch.manual_seed(0)
    rule = torch.randn(30, 4)
    x = torch.randn(640, 30)
    y = (x @ rule + torch.randn(640, 4)).argmax(1)
    x_val = torch.randn(1000, 30)
    y_val = (x_val @ rule + torch.randn(1000, 4)).argmax(1)
    loader = make_loader(TensorDataset(x, y), rank, world_size)
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = 0
    for epoch in range(10):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                with torch.no_grad():
                    val_loss = nn.functional.cross_entropy(model(x_val), y_val)
                print(f"step {step} loss {val_loss.item():.4f}")
            step += 1


main()
