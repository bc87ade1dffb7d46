# planted: line 8, dist.reduce_op is deprecated; use dist.ReduceOp; since torch 1.0
import torch
import torch.distributed as dist


def reduce_tensor(tensor, world_size):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.reduce_op.SUM)
    rt /= world_size
    return rt


def average_metrics(metrics, world_size):
    return {k: reduce_tensor(v, world_size) for k, v in metrics.items()}
