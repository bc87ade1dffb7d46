"""The ceiling of a model: the first batches again and again, at no cost."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


class CachedBatches:
    """Iterates loaders from memory once their first batches were read.

    Args:
        iterate: reads a loader.
        count: of batches that are kept of each.
    """

    def __init__(self, iterate: Callable[[Any], Iterator[Any]], count: int) -> None:
        self._iterate, self._count = iterate, count
        self._kept: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._are_changed: weakref.WeakSet[Any] = weakref.WeakSet()

    def batches(self, loader: Any) -> Iterator[Any]:
        """An epoch of as many batches as the loader has; without end where it does not know."""
        kept = self._kept.setdefault(loader, [])
        try:
            length = len(loader)
        except TypeError:
            length = -1
        number = 0
        if len(kept) < self._count:
            for batch in self._iterate(loader):
                if len(kept) < self._count:
                    kept.append(_copy(batch))
                yield batch
                number += 1
                if len(kept) == self._count:
                    break
        while number != length and kept:
            batch = kept[number % len(kept)]
            yield self._handed_out(loader, batch)
            number += 1

    def _handed_out(self, loader: Any, batch: Any) -> Any:
        """The batch itself, or a copy for a script that changes its batches."""
        if loader not in self._are_changed and any(leaf._version for leaf in _leaves(batch)):
            self._are_changed.add(loader)
        return _copy(batch) if loader in self._are_changed else batch


def _leaves(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _leaves(value)


def _copy(batch: Any) -> Any:
    """Tensors are new ones; what else is in it is the same."""
    if isinstance(batch, Tensor):
        return batch.detach().clone()
    if isinstance(batch, dict):
        return type(batch)({key: _copy(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_copy(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_copy(value) for value in batch)
    return batch
