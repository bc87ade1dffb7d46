"""Samples read with the process's generators seeded before each."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset, Subset, get_worker_info

from flambeau.data.drop_in.batch_memory import BatchMemory
from flambeau.data.drop_in.interception import install
from flambeau.data.drop_in.sample_context import SAMPLES, FindStored, Sample, making
from flambeau.recipes.data.sample_order import mix
from flambeau.recipes.setup.seeding import seed_cpu

Batch = list[tuple[Any, int]]
"""Indices of the data set, and seeds."""


class SeededSamples(Dataset[Any]):
    """The user's data set, read by index and seed; some images may be stored elsewhere."""

    def __init__(self, dataset: Dataset[Any], stored: FindStored | None) -> None:
        self.dataset, self._stored = dataset, stored

    def __getitems__(self, batch: Batch) -> tuple[Any, Counter[str]]:
        """Torch calls this in a worker process, and `Collate` with the result."""
        install()  # a worker that was not forked has not done it
        counts = Counter[str]()
        samples = self.read(batch, counts)
        seed_cpu(seed_of_collating(batch))
        return samples, counts

    def read(self, batch: Batch, counts: Counter[str], memory: BatchMemory | None = None) -> Any:
        """The samples, with images in the batch's memory, if any."""
        if batch and reads_whole_batches(self.dataset):
            counts[SAMPLES] += len(batch) - 1
            with self._making(batch[0][1], None, memory, counts):
                return whole_batch(self.dataset, batch)
        samples = []
        for number, (index, seed) in enumerate(batch):
            with self._making(seed, number, memory, counts):
                samples.append(self.dataset[index])
        return samples

    @contextmanager
    def _making(
        self, seed: int, number: int | None, memory: BatchMemory | None, counts: Counter[str]
    ) -> Iterator[None]:
        seed_cpu(seed)
        with making(
            Sample(seed, number, memory, stored=self._stored, is_seeded=True, counts=counts)
        ):
            yield


class Collate:
    """The user's `collate_fn` in a worker, with what was counted there."""

    def __init__(self, user: Callable[[Any], Any]) -> None:
        self._user = user

    def __call__(self, read: tuple[Any, Counter[str]]) -> tuple[Any, Counter[str]]:
        samples, counts = read
        return self._user(samples), counts


def reads_whole_batches(dataset: Any) -> bool:
    """Whether torch reads all samples of a batch in one call."""
    if type(dataset) is Subset:
        return reads_whole_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def whole_batch(dataset: Any, batch: Batch) -> Any:
    return dataset.__getitems__([index for index, _ in batch])


def seed_of_collating(batch: Batch) -> int:
    return mix(batch[0][1] + 1) if batch else 0


class StartWorker:
    """Calls the user's `worker_init_fn`, which sees the user's data set."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo refuses setattr
        if self._user is not None:
            self._user(worker)
