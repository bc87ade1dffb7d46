import torch
import torch.distributed as dist


def exchange(model, rank):
    path = "/tmp/model.checkpoint"  # here: left, fixed names in /tmp are ruff's S108
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path, map_location={"cuda:0": f"cuda:{rank}"}))
