try:
    from collections.abc import Mapping
except ImportError:
    from torch._six import container_abcs

    Mapping = container_abcs.Mapping

import torch


def move(data, device):
    if isinstance(data, Mapping):
        return {key: move(value, device) for key, value in data.items()}
    return data.to(device) if isinstance(data, torch.Tensor) else data
