"""DDP of one process with gloo, and set_epoch."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rings(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        self.y = torch.randint(3, (n,), generator=g)
        angle = torch.rand(n, generator=g) * 6.28
        r = 1 + self.y + 0.2 * torch.randn(n, generator=g)
        self.x = torch.stack([r * angle.cos(), r * angle.sin()], 1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main():
    path = os.path.join(tempfile.mkdtemp(), "rendezvous")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    torch.manual_seed(0 + dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    model = DDP(model)
    dataset = Rings(640)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = loss.detach().clone()
            dist.all_reduce(value)
            if dist.get_rank() == 0:
                print(f"step {step} loss {value.item() / dist.get_world_size():.4f}")
            step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
