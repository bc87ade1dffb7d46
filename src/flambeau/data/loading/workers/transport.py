"""How a batch gets from a worker to its parent if /dev/shm, which torch uses, is small."""

import os
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flambeau.data.loading.batch_samples import rebuilt, values_of
from flambeau.errors import SHARED_MEMORY


class Uncollated(NamedTuple):
    samples: list[Any]


class _Piped(NamedTuple):
    """A tensor sent by value, and the order of its dimensions in memory."""

    data: "np.ndarray[Any, np.dtype[np.uint8]]"
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Piped":
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        dense = tensor.permute(order).contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy()
        return cls(data, tensor.dtype, tuple(dense.shape), tuple(order))

    def tensor(self) -> Tensor:
        if not self.data.size:
            return torch.empty(self.shape, dtype=self.dtype)
        dense = torch.from_numpy(self.data).view(self.dtype).reshape(self.shape)
        return dense.permute([self.order.index(dim) for dim in range(len(self.order))])


def to_send(batch: Any, *, workers: int) -> Any:
    """The batch; by value, if shared memory has no room for one from each worker.

    Containers commonly have 64 MiB of /dev/shm, beyond which a worker dies of a bus error. A pipe costs two
    more copies.
    """
    return batch if has_room(batch, workers=workers) else map_tensors(batch, _Piped.of)


def has_room(batch: Any, *, workers: int) -> bool:
    """Whether shared memory has room for a batch from each worker."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except (OSError, AttributeError):  # not Linux
        return True
    sizes: list[int] = []
    _mapped(batch, lambda value: sizes.append(_bytes_of(value)))
    # Other workers may be writing at this moment.
    return bool(status.f_bavail * status.f_frsize >= sum(sizes) * (workers + 1))


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()  # sparse ones have no nbytes
    return value.nbytes if isinstance(value, np.ndarray) else 0


def received(batch: Any) -> Any:
    return _mapped(batch, lambda value: value.tensor() if isinstance(value, _Piped) else value)


def pinned(batch: Any) -> Any:
    """The batch in page-locked memory; pinned tensors are not copied.

    Torch reuses pinned memory: after the first batches nothing is allocated.
    """
    return map_tensors(batch, lambda t: t if t.is_pinned() else t.pin_memory())


def map_tensors(batch: Any, work: Callable[[Tensor], Any]) -> Any:
    return _mapped(batch, lambda value: work(value) if isinstance(value, Tensor) else value)


def _mapped(batch: Any, work: Callable[[Any], Any]) -> Any:
    """A copy of nested containers with `work` applied to their leaves."""
    if isinstance(batch, MutableMapping | list | tuple) and not isinstance(batch, _Piped):
        return rebuilt(batch, [_mapped(value, work) for value in values_of(batch)])
    return work(batch)
