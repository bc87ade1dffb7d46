"""Any dataset, or images of a path or address, as batches in an exact order that can be resumed.

让任何人的数据集、路径或地址上的图像按精确、可恢复的顺序给出批次，而不需要 `Run`。

Source: own.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, default_collate

from flambeau.data.drop_in.labelled_images import PARTS, LabelledImages, Part
from flambeau.data.loading.batch_layout import BatchLayout
from flambeau.data.loading.batch_plan import Order
from flambeau.data.loading.loader import Loader, ReadOptions, is_dataset
from flambeau.data.loading.read_ahead import own_order
from flambeau.data.loading.stream_order import STREAMS
from flambeau.data.sources.data_names import data_text
from flambeau.data.sources.open_data import open_parts, open_sources
from flambeau.data.stores.address import is_address
from flambeau.data.stores.block_cache import CacheOptions, parse_bytes
from flambeau.errors import InputError
from flambeau.user_code import is_function


def wrap(
    dataset: Dataset[Any] | str | os.PathLike[str],
    transform: Callable[[Any], Any] | None = None,
    *,
    batch_size: int,
    seed: int = 0,
    workers: int = 0,
    shuffle: bool = True,
    sampler: Order | None = None,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Any] = default_collate,
    pin_memory: bool = False,
    stall_timeout: float = 60.0,
    part: Part | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_size: str | None = None,
    shuffle_window: int | None = None,
) -> "Batches":
    """Batches of a map-style data set, or of the labelled images of a path or address.

    Samples and their augmentation depend on (seed, epoch) and index alone: not on workers, processes or where
    training was resumed. The global generators of torch, NumPy and random are seeded before each sample, so
    this holds for ordinary transforms.

    Args:
        dataset: has `len()` and `[i]`; or what `flambeau train` reads: a folder, packed images, or an address
            such as s3://bucket/pets.tar, with samples (transform(image), target), or transform(image, mask).
        transform: of a path or address: from an RGB image of PIL to a tensor, or from it and its mask,
            torchvision's `tv_tensors.Mask`, to two tensors.
        batch_size: samples per batch, of all processes together.
        seed: of order and augmentation.
        workers: processes that read; 0 reads in this one.
        shuffle: False keeps the order of the data set.
        sampler: one of flambeau.recipes.data.samplers, or anything with `len()` and `order(epoch)`.
        drop_last: leave out a smaller last batch of an epoch. One with fewer samples than processes is always
            left out, so that all get as many batches.
        collate: makes a batch of a list of samples.
        pin_memory: batches in page-locked memory.
        stall_timeout: seconds a worker may read one sample before it counts as lost; 0 is never.
        part: of a path or address: "train" or "val", as `flambeau train` divides it; None: all, of data that
            are not divided.
        cache, cache_size: of an address: the folder of blocks, and its limit, such as "200GB".
        shuffle_window: of a path or address: the images among which the next is drawn; 0 is all (None: 16384
            of more than 32768 in a store, else all).

    Raises:
        InputError: the data set is empty, too small for the processes, without length or index, or cannot be
            opened; a setting is out of range.
    """
    opening = {
        "transform": transform,
        "part": part,
        "cache": cache,
        "cache_size": cache_size,
        "shuffle_window": shuffle_window,
    }
    has_own_order = shuffle and sampler is None
    data = _dataset(dataset, opening, shuffles=has_own_order)
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if workers < 0:
        raise InputError(f"workers must be at least 0, got {workers}")
    joined = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if joined else 1
    loader = Loader(
        data,
        BatchLayout(
            batch_size,
            rank=dist.get_rank() if joined else 0,
            world=world,
            keeps_empty=False,
            takes_singles=True,
        ),
        seed=seed,
        shuffle=shuffle,
        sampler=own_order(data, seed) if has_own_order else sampler,
        reading=ReadOptions(
            workers=workers, collate=collate, pin_memory=pin_memory, stall_timeout=stall_timeout
        ),
    )
    if loader.length < world:
        raise InputError(f"{loader.length} samples cannot be shared by {world} processes")
    window = data.window if has_own_order and isinstance(data, LabelledImages) else None
    return Batches(loader, batch_size if drop_last else world, data, window)


def _dataset(data: Any, opening: Mapping[str, Any], *, shuffles: bool) -> Dataset[Any]:
    """The data set, opened if it is a path or an address.

    Args:
        opening: the arguments of `wrap` that say how.
        shuffles: whether the order is not given otherwise.
    """
    if isinstance(data, str | os.PathLike):
        if opening["shuffle_window"] is not None and not shuffles:
            raise InputError(
                "shuffle_window has no effect with a sampler or shuffle=False: leave it out"
            )
        return _opened(Path(data), **opening)
    if isinstance(data, IterableDataset) or not is_dataset(data):
        raise InputError(
            f"{type(data).__name__} has no samples by index, so a resume could not return to a "
            "position in it; give a Dataset with len() and [i]"
        )
    given = next((name for name, value in opening.items() if value is not None), None)
    if given is not None:
        raise InputError(
            f"{given} is for a path or an address, and the data are a {type(data).__name__}, which has its "
            "own way of reading: leave it out"
        )
    return data


def _opened(
    path: Path,
    *,
    transform: Callable[[Any], Any] | None,
    part: Part | None,
    cache: str | os.PathLike[str] | None,
    cache_size: str | None,
    shuffle_window: int | None,
) -> LabelledImages:
    name = data_text(path)
    if not callable(transform):
        raise InputError(
            f"wrap({name!r}) needs a function that makes a tensor of an image: wrap({name!r}, transform, ...)"
        )
    if part is not None and part not in PARTS:
        raise InputError(f"part must be 'train' or 'val', got {part!r}")
    if shuffle_window is not None and shuffle_window < 0:
        raise InputError(f"shuffle_window must be at least 0, got {shuffle_window}")
    if is_function(path):
        raise InputError(f"{name} is a function in a file: import it, and give wrap the Dataset")
    options = CacheOptions()
    for setting, value in (("cache", cache), ("cache_size", cache_size)):
        if value is not None and not is_address(path):
            raise InputError(
                f"{setting} = {value!r} is for data in a store (s3://..., https://...), and has no effect "
                f"with {name}: leave it out"
            )
    if cache is not None:
        options = CacheOptions(Path(cache))
    if cache_size is not None:
        options = CacheOptions(options.folder, parse_bytes(cache_size, name="cache_size"))
    if part is not None:
        source = open_sources(path, cache=options)[PARTS.index(part)]
        return LabelledImages(source, transform, window=shuffle_window)
    source, val = open_parts(path, cache=options)
    if val is not None:
        raise InputError(
            f"{name} has images to train on and others to validate on: say which, part='train' or part='val'"
        )
    return LabelledImages(source, transform, window=shuffle_window)


class Batches:
    """What `wrap` returns: each pass over it is an epoch.

    A pass is over with its last batch, even if not asked for one more (`zip(range(n), batches)`). After one
    that was left earlier, the next begins the epoch again, unless `load_state_dict` was called.

    Attributes:
        epoch: from 0: of the current pass, and after its end of the next.
        dataset: what is read; of a path or address `wrap`'s own, with `classes` and `targets`, which `Run`
            takes, too.
    """

    def __init__(
        self, loader: Loader, least: int, dataset: Dataset[Any], window: int | None = None
    ) -> None:
        self._loader, self._least = loader, least
        self.dataset: Any = dataset
        self._window = window
        self.epoch = 0
        self._start = self._position = 0
        self._given: int | None = None  # the epoch of which all batches were given

    def __len__(self) -> int:
        whole = self._loader.batches_per_epoch
        return whole - (self._loader.last_batch_size < self._least)

    def __iter__(self) -> Iterator[Any]:
        """One epoch, or the rest of one.

        Raises:
            WorkerLost: a data worker died, or read the same sample for too long.
        """
        if self._given == self.epoch:
            self.epoch += 1
        epoch = self.epoch
        self._position, self._start = self._start, 0
        num_left = len(self) - self._position // self._loader.layout.global_batch_size
        for batch in self._loader.stream(epoch=epoch, position=self._position, epochs=1):
            if batch.total >= self._least:
                self._position = batch.position
                num_left -= 1
                if not num_left:
                    self._given = epoch
                yield batch.data
        self.epoch = epoch + 1
        self._position = 0

    def state_dict(self) -> dict[str, int]:
        """The position after the last batch that was yielded; of a path or an address with its window."""
        order = {} if self._window is None else {"shuffle_window": self._window}
        if self._window:
            order["shuffle_streams"] = STREAMS
        return {"epoch": self.epoch, "position": self._position, **order}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there in the next pass, with any number of workers and processes.

        Raises:
            InputError: the state is of an order with another window, or of an earlier version.
        """
        window = state.get("shuffle_window", self._window)
        if window != self._window:
            raise InputError(
                f"this position is one in an order with shuffle_window = {window}, and here it is "
                f"{self._window}: give shuffle_window={window}"
            )
        if window and state["position"] and state.get("shuffle_streams") != STREAMS:
            raise InputError(
                f"this position in epoch {state['epoch']} is one in an order of another version of flambeau\n"
                "Continue with that version, or begin an epoch: set its position to 0"
            )
        self.epoch = state["epoch"]
        self._given = None
        self._start = self._position = state["position"]
