import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup():
    store = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


def build_loader(x, y, batch_size):
    sampler = DistributedSampler(TensorDataset(x, y), shuffle=True, seed=11)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, sampler=sampler)


def train_epoch(model, loader, optimizer, first_step):
    for k, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {first_step + k} loss {loss.item():.4f}")
    return first_step + k + 1


def main():
    setup()
    torch.manual_seed(0)
    x = torch.randn(320, 10)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = build_loader(x, y, 32)
    step = 0
    for _epoch in range(8):
        step = train_epoch(model, loader, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
