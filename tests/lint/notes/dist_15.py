import torch
from torch.nn.parallel import DistributedDataParallel


def wrap(model, rank):
    n = torch.cuda.device_count() // 2
    device_ids = list(range(rank * n, (rank + 1) * n))
    return DistributedDataParallel(model.to(device_ids[0]), device_ids=device_ids)  # here: left, that there are more than one is not in the file
