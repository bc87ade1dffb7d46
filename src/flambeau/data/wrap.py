"""Any dataset as batches in an exact order that can be resumed, without a `Run`.

让任何人的数据集按精确、可恢复的顺序给出批次，而不需要 `Run`。

Source: own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, default_collate

from flambeau.data.loading.batch_layout import BatchLayout
from flambeau.data.loading.batch_plan import Order
from flambeau.data.loading.loader import Loader, ReadOptions, is_dataset
from flambeau.errors import InputError


def wrap(
    dataset: Dataset[Any],
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
) -> "Batches":
    """Batches of a map-style data set.

    The samples of a batch, and their random augmentation, depend on (seed, epoch) and the sample's index
    alone: not on the number of workers or processes, nor on where training was resumed. The global generators
    of torch, NumPy and random are seeded before each sample, so this holds for ordinary transforms.

    Args:
        dataset: has `len()` and `[i]`.
        batch_size: samples per batch, of all processes together; each process gets its share.
        seed: of order and augmentation.
        workers: processes that read; 0 reads in this one.
        shuffle: False reads the samples in the order of the data set.
        sampler: one of flambeau.recipes.data.samplers, or anything with `len()` and `order(epoch)`.
        drop_last: leave out the last batch of an epoch if it is smaller. One that has fewer samples than
            there are processes is always left out, so that all of them get as many batches.
        collate: makes a batch of a list of samples.
        pin_memory: batches in page-locked memory.
        stall_timeout: seconds after which a worker that still reads the same sample is lost; 0 is never.

    Raises:
        InputError: the data set is empty or too small for the processes, has no length or no index, or a
            setting is out of range.
    """
    if isinstance(dataset, str):
        raise InputError(
            "a text is no data set\nGive a Dataset with len() and [i]; `flambeau train` reads images of a "
            "path or an address"
        )
    if isinstance(dataset, IterableDataset) or not is_dataset(dataset):
        raise InputError(
            f"{type(dataset).__name__} has no samples by index, so a resume could not return to a "
            "position in it; give a Dataset with len() and [i]"
        )
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if workers < 0:
        raise InputError(f"workers must be at least 0, got {workers}")
    joined = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if joined else 1
    loader = Loader(
        dataset,
        BatchLayout(
            batch_size,
            rank=dist.get_rank() if joined else 0,
            world=world,
            keeps_empty=False,
            takes_singles=True,
        ),
        seed=seed,
        shuffle=shuffle,
        sampler=sampler,
        reading=ReadOptions(
            workers=workers, collate=collate, pin_memory=pin_memory, stall_timeout=stall_timeout
        ),
    )
    if loader.length < world:
        raise InputError(f"{loader.length} samples cannot be shared by {world} processes")
    return Batches(loader, batch_size if drop_last else world)


class Batches:
    """What `wrap` returns: each pass over it is an epoch.

    A pass that has given all of its batches is over, whether or not it is asked for one more, as it is not in
    `zip(range(n), batches)`. After one that was left before, the next one begins the epoch again, unless
    `load_state_dict` was called.

    Attributes:
        epoch: number of the epoch, from 0: of the current pass, and after its end of the next one.
    """

    def __init__(self, loader: Loader, least: int) -> None:
        self._loader, self._least = loader, least
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
        """The position after the last batch that was yielded."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there in the next pass; the numbers of workers and processes may have changed."""
        self.epoch = state["epoch"]
        self._given = None
        self._start = self._position = state["position"]
