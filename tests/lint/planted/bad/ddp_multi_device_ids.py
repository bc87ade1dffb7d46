# planted: line 11, DDP with several device_ids per process was removed; since torch 1.8
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


def demo(rank, world_size):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    model = nn.Linear(10, 10).cuda(rank * 2)
    ddp_model = DistributedDataParallel(model, device_ids=[rank * 2, rank * 2 + 1])
    out = ddp_model(torch.randn(20, 10))
    out.sum().backward()
    dist.destroy_process_group()
