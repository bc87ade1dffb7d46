"""Samples made with the generators of the process seeded for each, whoever makes them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset, Subset, get_worker_info

from flambeau.data.drop_in.batch_memory import BatchMemory
from flambeau.data.drop_in.interception import install
from flambeau.data.drop_in.sample_context import Sample, making
from flambeau.images.decode import Stored
from flambeau.recipes.data.sample_order import mix
from flambeau.recipes.setup.seeding import seed_cpu

Batch = list[tuple[Any, int]]
"""Indices of the data set, and seeds."""
FindStored = Callable[[Any], Stored | None]
"""Gives the image of a path, where it is in another place."""


class SeededSamples(Dataset[Any]):
    """The samples of a batch, by index and seed.

    Args:
        dataset: the user's.
        stored: where images are read instead of their own files.
    """

    def __init__(self, dataset: Dataset[Any], stored: FindStored | None) -> None:
        self.dataset, self._stored = dataset, stored

    def __getitems__(self, batch: Batch) -> list[Any]:
        """In a worker process."""
        install()  # where it was not forked it is not there yet
        samples: list[Any] = self.read(batch)
        seed_cpu(seed_of_collating(batch))
        return samples

    def read(self, batch: Batch, memory: BatchMemory | None = None) -> Any:
        """The samples, their images in the memory of the batch where there is one."""
        if batch and reads_whole_batches(self.dataset):
            with self._making(batch[0][1], None, memory):
                return whole_batch(self.dataset, batch)
        samples = []
        for number, (index, seed) in enumerate(batch):
            with self._making(seed, number, memory):
                samples.append(self.dataset[index])
        return samples

    @contextmanager
    def _making(self, seed: int, number: int | None, memory: BatchMemory | None) -> Iterator[None]:
        seed_cpu(seed)
        with making(Sample(seed, number, memory, stored=self._stored, is_seeded=True)):
            yield


def reads_whole_batches(dataset: Any) -> bool:
    """Whether torch asks the data set for the samples of a batch at once."""
    if type(dataset) is Subset:
        return reads_whole_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def whole_batch(dataset: Any, batch: Batch) -> Any:
    """What its `__getitems__` gives."""
    return dataset.__getitems__([index for index, _ in batch])


def seed_of_collating(batch: Batch) -> int:
    """For the random numbers of the `collate_fn` of this batch."""
    return mix(batch[0][1] + 1) if batch else 0


class StartWorker:
    """The user's `worker_init_fn`, to which the data set of the worker is the user's own.

    Args:
        user: the function; None for none.
    """

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses to be changed
        if self._user is not None:
            self._user(worker)
