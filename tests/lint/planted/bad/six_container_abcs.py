# planted: line 3, torch._six was removed (container_abcs already in 1.9); since torch 1.9
import torch
from torch._six import container_abcs


def to_device(data, device):
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, container_abcs.Mapping):
        return {k: to_device(v, device) for k, v in data.items()}
    if isinstance(data, container_abcs.Sequence):
        return [to_device(v, device) for v in data]
    return data
