# planted: line 4, apex.parallel.DistributedDataParallel was removed; use torch's; since apex 2024/2025
import torch
import torch.distributed as dist
from apex.parallel import DistributedDataParallel as DDP


def wrap(model, local_rank):
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    return DDP(model.cuda(), delay_allreduce=True)
