"""The ceiling of a model: the first batches again and again, at no cost."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from flambeau.data.loading.batch_samples import tensors_in_batch
from flambeau.data.loading.workers.transport import over_tensors


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
        if loader not in self._are_changed and any(
            leaf._version for leaf in tensors_in_batch(batch)
        ):
            self._are_changed.add(loader)
        return _copy(batch) if loader in self._are_changed else batch


def _copy(batch: Any) -> Any:
    """Tensors are new ones; what else is in it is the same."""
    return over_tensors(batch, lambda tensor: tensor.detach().clone())
