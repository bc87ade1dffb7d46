import os
import torch
import torch.distributed as dist
from apex.parallel import DistributedDataParallel as DDP

def setup(model):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    model = model.cuda()
    return DDP(model, delay_allreduce=True)
