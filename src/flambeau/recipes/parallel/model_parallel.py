"""Split the layers of a model that is too large for one device over several, and keep all of them busy.

把一台设备放不下的模型按层分到多台设备上，并让所有设备同时工作。

Source: the pipeline of Huang et al., "GPipe", 2019, section 2.3, in one process.

Not if the model fits on one device: DDP is faster. Not if single layers are too large, or if many devices
shall each hold a part of every layer: use FSDP2.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


def balanced_split(layer_bytes: Sequence[int], num_stages: int) -> list[int]:
    """Split consecutive layers into stages, so that the largest stage is as small as possible.

    Args:
        layer_bytes: of each layer, 0 or more.
        num_stages: at least 1, at most the number of layers.

    Returns:
        The number of layers in each stage, at least 1.

    Raises:
        ValueError: fewer layers than stages, or no stage.

    Example:
        >>> balanced_split([4, 1, 1, 6], 2)
        [3, 1]
    """
    if not 1 <= num_stages <= len(layer_bytes):
        raise ValueError(
            f"{len(layer_bytes)} layers cannot be cut into {num_stages} stages of at least one layer"
        )
    low = max(layer_bytes)
    high = sum(layer_bytes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(layer_bytes, middle, num_stages)) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return _filled(layer_bytes, low, num_stages)


class ModelParallel(nn.Module):
    """An `nn.Sequential` whose layers are on several devices; activations are sent from one to the next.

    Names of parameters and buffers are those of the model, so that checkpoints fit both. Each layer takes
    and returns one tensor. `devices` is the device of each layer; do not move the model afterwards.

    Args:
        model: its layers are moved, not copied. Make the optimizer afterwards.
        devices: of the stages, in order, such as ["cuda:0", "cuda:1"]; a device may occur several times.
        layers_per_device: number of layers of each stage; None minimizes the bytes of parameters and buffers
            on the fullest device, without counting activations.
        micro_batch_size: rows that are computed together, so that a device works on one micro-batch while the
            next device works on the one before; None does not split the batch: one device works at a time.

    Raises:
        TypeError: the model is not an `nn.Sequential`, or has another forward pass.
        ValueError: `layers_per_device` does not fit layers and devices; layers on different devices share
            a parameter; a micro-batch size below 1.

    Example:
        >>> layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)
        >>> model = ModelParallel(nn.Sequential(*layers), ["cpu", "cpu"], micro_batch_size=2)
        >>> model(torch.zeros(5, 4)).shape, list(model.state_dict())
        (torch.Size([5, 2]), ['0.weight', '0.bias', '2.weight', '2.bias'])
    """

    def __init__(
        self,
        model: nn.Sequential,
        devices: Sequence[str | torch.device],
        *,
        layers_per_device: Sequence[int] | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if getattr(type(model), "forward", None) is not nn.Sequential.forward:
            raise TypeError(
                f"the model must be an nn.Sequential, got {type(model).__name__}: write down its layers in "
                "the order of its forward pass, as in nn.Sequential(net.stem, *net.blocks, net.head)"
            )
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size}")
        # Not named_children(), which omits repeated layers, such as one shared nn.ReLU.
        layers: dict[str, Any] = dict(model._modules)
        counts = layers_per_device
        if counts is None:
            counts = balanced_split([*map(_num_bytes, layers.values())], len(devices))
        if len(counts) != len(devices) or sum(counts) != len(layers) or min(counts, default=0) < 1:
            raise ValueError(
                f"layers_per_device must be {len(devices)} numbers of at least 1 that add up to the "
                f"{len(layers)} layers, got {list(counts)}"
            )
        stages = zip(devices, counts, strict=True)
        self.devices = tuple(torch.device(name) for name, count in stages for _ in range(count))
        self.micro_batch_size = micro_batch_size
        self.training = model.training
        _refuse_shared(layers, self.devices)
        for (name, layer), device in zip(layers.items(), self.devices, strict=True):
            self.add_module(name, layer.to(device))

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers.

        Args:
            x: (N, ...), on any device.

        Returns:
            The output of the model, (N, ...), on the last device.
        """
        # CUDA kernels are queued: while the second device works on one part, the first one has the next in
        # its queue. The backward pass has a thread per device.
        parts = x.split(self.micro_batch_size) if self.micro_batch_size else [x]
        outputs = [self._run(part) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _run(self, x: Tensor) -> Tensor:
        for layer, device in zip(self._modules.values(), self.devices, strict=True):
            assert layer is not None
            x = layer(x.to(device))
        return x


def _filled(layer_bytes: Sequence[int], capacity: int, num_stages: int) -> list[int]:
    """The number of layers of each stage, if stages are filled one after another up to the capacity.

    Later stages keep at least one layer each. If the capacity is too small, there are more than `num_stages`.
    """
    counts = [0]
    used = 0
    for index, size in enumerate(layer_bytes):
        is_due = len(layer_bytes) - index == num_stages - len(counts)
        if counts[-1] and (is_due or used + size > capacity):
            counts.append(0)
            used = 0
        counts[-1] += 1
        used += size
    return counts


def _num_bytes(layer: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in chain(layer.parameters(), layer.buffers()))


def _refuse_shared(layers: Mapping[str, nn.Module], devices: Sequence[torch.device]) -> None:
    """A parameter shared by two devices would become two copies that diverge in training."""
    owners: dict[int, tuple[str, torch.device]] = {}
    for (name, layer), device in zip(layers.items(), devices, strict=True):
        for tensor in chain(layer.parameters(), layer.buffers()):
            owner, owner_device = owners.setdefault(id(tensor), (name, device))
            if owner_device != device:
                raise ValueError(
                    f"layers {owner!r} on {owner_device} and {name!r} on {device} share a tensor of shape "
                    f"{tuple(tensor.shape)}: choose layers_per_device so that one device holds both"
                )
