import torch
from torch.nn.parallel import DistributedDataParallel


def wrap(model):
    torch.distributed.init_process_group(backend="nccl", init_method="env://")
    return DistributedDataParallel(model)  # here: left, the device of the model is not in the file
