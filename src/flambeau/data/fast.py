"""Anyone's DataLoader over images, several times faster: `loader = fast(loader)`."""

import os
from copy import copy as copy_of
from typing import Any, overload

import torch
from torch.utils.data import DataLoader

from flambeau.data.drop_in.fast_loader import FastLoader, FastOptions
from flambeau.data.drop_in.packed_copy import copy_for
from flambeau.data.drop_in.transform_kinds import is_timms
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
    """Read the images of a loader faster; everything else stays.

    The data set and its transforms are used as they are. While a sample is read, `PIL.Image.open` gives an
    image that is not decoded yet, and a `Compose` of torchvision's crops it, changes it and makes numbers of
    it in our own code, as far as it knows the transforms in it. What comes out has the types, shapes, order
    and distributions of before; evaluation pixels are within one level. Random numbers belong to the sample:
    they come from torch's generator, and no longer depend on workers.

    Args:
        loader: over a data set with indices, in batches; others are iterated as they are. Of one that
            Accelerate has prepared, what it iterates is read faster, and so it is inside the PrefetchLoader
            that timm's `create_loader` gives.
        threads: that read; None for as many as there are CPUs, where all transforms are known.
        workers: processes that read instead; None for the loader's own `num_workers`, where threads will not
            do because a transform or data set is not known.
        channels_last: batches of images in this memory format.
        device: where batches go: 8-bit levels cross the bus, and are normalized there.
        packed: what `flambeau pack` has made of the folder that the data set reads (`dataset.root`); its
            images are read in the place of their files.

    Returns:
        Iterable with the length and the attributes of the loader; `report()` says what was taken over.

    Raises:
        InputError: no DataLoader; threads and workers at once, or no whole numbers; a packed file of other
            images; `device` or `channels_last` for timm's PrefetchLoader, which places batches itself.
    """
    if is_timms(loader, "PrefetchLoader"):
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
    """timm's PrefetchLoader of the same settings around another loader; with that one's report."""
    around = copy_of(prefetcher)
    around.loader = inner
    around.report = inner.report
    return around
