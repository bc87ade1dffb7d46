import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def main(model, dataset, epochs=3):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, pin_memory=True)
    ddp = DDP(model.to(local_rank), device_ids=[local_rank])
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x in loader:
            ddp(x.to(local_rank, non_blocking=True)).sum().backward()
    dist.destroy_process_group()
