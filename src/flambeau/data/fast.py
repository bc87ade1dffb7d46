"""Any DataLoader over images, several times faster: `loader = fast(loader)`."""

import os
from copy import copy as copy_of
from typing import Any, overload

import torch
from torch.utils.data import DataLoader

from flambeau.data.drop_in.fast_loader import FastLoader, FastOptions
from flambeau.data.drop_in.packed_copy import copy_for
from flambeau.data.drop_in.transform_kinds import is_from_timm
from flambeau.errors import InputError


@overload
def fast(
    loader: DataLoader[Any],
    *,
    threads: int | None = None,
    workers: int | None = None,
    channels_last: bool = False,
    device: str | torch.device | None = None,
    packed: str | os.PathLike[str] | None = None,
) -> FastLoader: ...


@overload
def fast(
    loader: Any,
    *,
    threads: int | None = None,
    workers: int | None = None,
    packed: str | os.PathLike[str] | None = None,
) -> Any: ...


def fast(
    loader: Any,
    *,
    threads: int | None = None,
    workers: int | None = None,
    channels_last: bool = False,
    device: str | torch.device | None = None,
    packed: str | os.PathLike[str] | None = None,
) -> Any:
    """Read the images of a DataLoader faster; all else stays the same.

    Data set and transforms are used as they are: while a sample is read, `PIL.Image.open` decodes later, and
    torchvision's `Compose` runs known transforms in faster code. Batches keep types, shapes, order and
    distributions; evaluation pixels are within one level. Random numbers belong to the sample, from torch's
    generator, whatever the workers.

    Args:
        loader: a DataLoader of batches over a data set with indices, also inside one that Accelerate prepared
            or timm's PrefetchLoader; any other is iterated unchanged.
        threads: that read; None for the number of CPUs, if all transforms are known.
        workers: processes that read instead; None for the loader's `num_workers`, if a transform or data set
            is unknown, so that threads are unsafe.
        channels_last: batches of images in this memory format.
        device: where batches go, to be normalized there from 8-bit levels.
        packed: the result of `flambeau pack` for the data set's folder (`dataset.root`), to read instead of
            its files.

    Returns:
        Iterable with the loader's length and attributes; `report()` says what was taken over.

    Raises:
        InputError: no DataLoader; both threads and workers, or no whole numbers; a packed file of other
            images; `device` or `channels_last` for timm's PrefetchLoader.
    """
    if is_from_timm(loader, "PrefetchLoader"):
        if device is not None or channels_last:
            raise InputError(
                "timm's PrefetchLoader places batches itself: give create_loader(device=...), and "
                "leave device and channels_last out here"
            )
        return _prefetching(
            loader, fast(loader.loader, threads=threads, workers=workers, packed=packed)
        )
    if isinstance(loader, FastLoader):
        raise InputError("fast(loader) has been called on this loader already")
    if not isinstance(loader, DataLoader):
        raise InputError(f"fast takes a torch.utils.data.DataLoader, got {type(loader).__name__}")
    if threads is not None and workers:
        raise InputError("threads and workers contradict each other: give one of them")
    for name, value in (("threads", threads), ("workers", workers)):
        if value is not None and (not isinstance(value, int) or value < (name == "threads")):
            raise InputError(f"{name} must be at least {int(name == 'threads')}, got {value!r}")
    where = None if device is None else torch.device(device)
    copy = None if packed is None else copy_for(packed, loader.dataset)
    return FastLoader(loader, FastOptions(threads, workers, channels_last, where, copy))


def _prefetching(prefetcher: Any, inner: FastLoader) -> Any:
    """A copy of timm's PrefetchLoader around another loader, with that loader's report."""
    around = copy_of(prefetcher)
    around.loader = inner
    around.report = inner.report
    return around
