import collections.abc
import torch
from torch._six import string_classes

def to_device(batch, device):
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, string_classes):
        return batch
    if isinstance(batch, collections.abc.Mapping):
        return {k: to_device(v, device) for k, v in batch.items()}
    return [to_device(b, device) for b in batch]
