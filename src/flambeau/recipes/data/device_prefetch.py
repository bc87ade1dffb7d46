"""Copy the next batches to the device while the current one is computed.

在计算当前批次的同时，把后续批次复制到设备上。

Source: original, with torch's CUDA streams; their rules are in torch's note "CUDA semantics", sections on
streams and on pinned memory buffers.

Not worth it if a batch takes microseconds to copy. Tensors that are on the device already are not copied.
"""

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def prefetch_to_device(
    batches: Iterable[T], device: torch.device | str, *, depth: int = 1
) -> Iterator[T]:
    """Yield the same batches in the same order, with their tensors on `device`.

    On the CPU batches pass unchanged. On CUDA, `depth` batches are copied ahead on a side stream; what is not
    pinned is pinned first, a copy that DataLoader(pin_memory=True) makes in a thread. An exception of the
    source comes after the good batches before it. Closing this iterator closes the source.

    Args:
        batches: CPU tensors, alone or in nested tuples, named tuples, lists and dicts; others pass unchanged.
        depth: batches on the device besides the one in use, at least 1.

    Returns:
        An iterator; its tensors are safe on the stream that is current when the batch is taken.

    Raises:
        ValueError: a depth below 1.

    Example:
        >>> batches = [(torch.ones(2), "a.jpg"), (torch.zeros(2), "b.jpg")]
        >>> [name for images, name in prefetch_to_device(batches, "cpu")]
        ['a.jpg', 'b.jpg']
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    device = torch.device(device)
    if device.type == "cpu":
        return _pass(batches)
    return _copy_ahead(batches, device, depth)


def _pass(batches: Iterable[T]) -> Iterator[T]:
    yield from batches


def _copy_ahead(batches: Iterable[T], device: torch.device, depth: int) -> Iterator[T]:
    upload = _CudaUpload(device) if device.type == "cuda" else _Upload(device)
    source = iter(batches)
    in_flight: deque[tuple[T, Any]] = deque()
    failure: Exception | None = None
    more = True
    try:
        while True:
            while more and len(in_flight) <= depth:
                try:
                    batch = next(source)
                except StopIteration:
                    more = False
                except Exception as error:  # raised below, after the earlier batches
                    failure = error
                    more = False
                else:
                    in_flight.append(upload.start(batch))
            if not in_flight:
                break
            yield upload.finish(*in_flight.popleft())
        if failure is not None:
            raise failure
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()


class _Upload:
    """Copies to a device without streams (MPS and others), where torch orders the copies itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, batch: T) -> tuple[T, Any]:
        return _map(batch, lambda t: t.to(self.device)), None

    def finish(self, batch: T, copied: Any) -> T:
        return batch


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One stream for all epochs, because the memory of a stream cannot be reused by others."""
    return torch.cuda.Stream(device)


class _CudaUpload(_Upload):
    """Copies on a side stream, with an event after each batch for which the computing stream waits."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device("cuda", index))
        self.stream = _side_stream(index)

    def start(self, batch: T) -> tuple[T, Any]:
        if are_on(batch, self.device):
            return batch, None
        copies: list[Tensor] = []
        with torch.cuda.stream(self.stream):
            moved = _map(batch, functools.partial(self._copy, copies))
        return moved, (copies, self.stream.record_event()) if copies else None

    def _copy(self, copies: list[Tensor], t: Tensor) -> Tensor:
        if t.device == self.device:
            return t
        # A copy from pageable memory would block the host. The allocator of pinned memory does not reuse
        # the source before the copy has read it.
        if t.device.type == "cpu" and not t.is_pinned():
            t = t.pin_memory()
        copies.append(t.to(self.device, non_blocking=True))
        return copies[-1]

    def finish(self, batch: T, copied: Any) -> T:
        if copied is not None:
            copies, event = copied
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(event)  # on the device; the host continues
            for copy_ in copies:
                # The memory belongs to the side stream's pool. Without this it could be given to a later
                # batch while the computing stream still reads it.
                copy_.record_stream(computing)
        return batch


def are_on(batch: Any, device: torch.device) -> bool:
    """Whether a batch is a tuple or list of tensors that need no copy.

    Args:
        device: with its index, as a tensor on a GPU has it.

    Example:
        >>> are_on([torch.ones(2), torch.zeros(2)], torch.device("cpu"))
        True
    """
    return type(batch) in (tuple, list) and all(
        isinstance(t, Tensor) and t.device == device for t in batch
    )


def _map(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """A copy of nested containers with `function` applied to their tensors."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map(value, function) for value in batch)
    if isinstance(batch, MutableMapping):  # last: isinstance of an abstract class is slowest
        new = copy.copy(batch)  # keeps the type, and the factory of a defaultdict
        new.update({key: _map(value, function) for key, value in batch.items()})
        return new
    return batch
