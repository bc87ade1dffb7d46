"""Samples read with the process's generators seeded before each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset, Subset, get_worker_info

from flambeau.data.drop_in.batch_memory import BatchMemory
from flambeau.data.drop_in.interception import install
from flambeau.data.drop_in.sample_context import FindStored, Sample, making
from flambeau.recipes.data.sample_order import mix
from flambeau.recipes.setup.seeding import seed_cpu

Batch = list[tuple[Any, int]]
"""Indices of the data set, and seeds."""


class SeededSamples(Dataset[Any]):
    """The user's data set, read by index and seed; some images may be stored elsewhere."""

    def __init__(self, dataset: Dataset[Any], stored: FindStored | None) -> None:
        self.dataset, self._stored = dataset, stored

    def __getitems__(self, batch: Batch) -> list[Any]:
        """Torch calls this in a worker process."""
        install()  # a worker that was not forked has not done it
        samples: list[Any] = self.read(batch)
        seed_cpu(seed_of_collating(batch))
        return samples

    def read(self, batch: Batch, memory: BatchMemory | None = None) -> Any:
        """The samples; their images lie in the memory of the batch, if there is one."""
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
    """Whether torch reads all samples of a batch in one call."""
    if type(dataset) is Subset:
        return reads_whole_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def whole_batch(dataset: Any, batch: Batch) -> Any:
    """The result of its `__getitems__`."""
    return dataset.__getitems__([index for index, _ in batch])


def seed_of_collating(batch: Batch) -> int:
    """The seed for the `collate_fn` of this batch."""
    return mix(batch[0][1] + 1) if batch else 0


class StartWorker:
    """Calls the user's `worker_init_fn`, which sees the user's data set as that of the worker."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo refuses setattr
        if self._user is not None:
            self._user(worker)
