import os

import torch.distributed as dist


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"  # here: left, a fixed port is right where nobody else uses it
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
