"""Put the layers of a model that is too large for one device on several, and keep all of them busy.

把一台设备放不下的模型按层分到多台设备上，并让所有设备同时工作。

Source: the pipeline is that of Huang et al., "GPipe", 2019, section 2.3, in one process.

Not where one device holds the model: DDP is faster. Not where single layers are too large, or where many
devices each hold a part of every layer: FSDP2 does that.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


def balanced_split(layer_bytes: Sequence[int], num_stages: int) -> list[int]:
    """Cut a row of layers into stages whose largest is as small as can be.

    Args:
        layer_bytes: of each layer, 0 or more.
        num_stages: at least 1, at most the number of layers.

    Returns:
        The number of layers of each stage, at least 1 each.

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
    """An `nn.Sequential` whose layers lie on several devices; activations travel between them.

    Names of parameters and buffers are those of the model, so that checkpoints fit both. Each layer takes
    and returns one tensor. `devices` is the device of each layer; do not move the model afterwards.

    Args:
        model: its layers are moved, not copied. Make the optimizer afterwards.
        devices: of the stages, in order, such as ["cuda:0", "cuda:1"]; one may come again.
        layers_per_device: how many layers each one holds; None makes the bytes of parameters and buffers
            on the fullest as few as can be. It does not count activations.
        micro_batch_size: rows that go through together, so that a device works on one part while the next
            one works on the part before; None sends the batch as a whole, and one device works at a time.

    Raises:
        TypeError: the model is not an `nn.Sequential` with the forward pass of one.
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
        # Not named_children(), which leaves out a layer that comes again, such as one nn.ReLU for all.
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
            What the model returns for it, (N, ...), on the last device.
        """
        # Kernels of CUDA are queued, not waited for: while the second device works on one part, the first
        # one has the next in its queue. The backward pass has a thread a device.
        parts = x.split(self.micro_batch_size) if self.micro_batch_size else [x]
        outputs = [self._run(part) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _run(self, x: Tensor) -> Tensor:
        for layer, device in zip(self._modules.values(), self.devices, strict=True):
            assert layer is not None
            x = layer(x.to(device))
        return x


def _filled(layer_bytes: Sequence[int], capacity: int, num_stages: int) -> list[int]:
    """The layers of each stage, if one is closed when it is full, or when each later one must have a layer.

    More than `num_stages` of them where the capacity is too small.
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


def _refuse_shared(layers: Mapping[str, nn.Module], places: Sequence[torch.device]) -> None:
    """A parameter that two devices share would be two after the move, and go apart in training."""
    owners: dict[int, tuple[str, torch.device]] = {}
    for (name, layer), device in zip(layers.items(), places, strict=True):
        for tensor in chain(layer.parameters(), layer.buffers()):
            owner, there = owners.setdefault(id(tensor), (name, device))
            if there != device:
                raise ValueError(
                    f"layers {owner!r} on {there} and {name!r} on {device} share a tensor of shape "
                    f"{tuple(tensor.shape)}: choose layers_per_device so that one device holds both"
                )
