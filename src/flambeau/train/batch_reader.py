"""What a run reads its batches with, for training and for evaluation, and how they reach the device."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from flambeau.data.errors import InputError
from flambeau.data.loader import Loader, Order, is_dataset
from flambeau.data.micro_batch import MicroBatch
from flambeau.data.ready_batches import ReadyBatches
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.data.device_prefetch import prefetch_to_device
from flambeau.train.agreement import BadReports

OnBad = Callable[[Sequence[int]], None]


class BatchReader:
    """Makes the loaders of a run.

    Args:
        device: of the model.
        seed: of sample order and augmentation.
        ranks: the processes that read together.
        bad: takes what could not be read.
        sharded: the model needs all ranks for each forward pass, also in an evaluation.
        batch_size, workers, collate, stall_timeout: as `Run` has them.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        seed: int,
        ranks: Ranks,
        bad: BadReports,
        sharded: bool,
        batch_size: int,
        workers: int,
        collate: Callable[[list[Any]], Any],
        stall_timeout: float,
    ) -> None:
        self._device, self._bad, self._sharded = device, bad, sharded
        self._everywhere = {"seed": seed, "rank": ranks.rank, "world": ranks.world}
        self._reading: dict[str, Any] = {
            "micro_batch_size": batch_size, "workers": workers, "collate": collate,
            "pin_memory": device.type == "cuda", "stall_timeout": stall_timeout,
        }  # fmt: skip

    def loader(
        self,
        data: Dataset[Any] | Iterable[Any],
        *,
        accumulate: int = 1,
        evaluates: bool = False,
        on_bad: OnBad | None,
        sampler: Order | None = None,
    ) -> Loader | ReadyBatches:
        """The loader of a Dataset, or of what makes ready batches.

        Raises:
            InputError: a sampler for ready batches, or data that cannot be read in batches.
        """
        common: dict[str, Any] = {
            "accumulate": accumulate, "keeps_empty": not evaluates or self._sharded,
            **self._everywhere,
        }  # fmt: skip
        if is_dataset(data):
            on_bad = self._bad.taker(on_bad)
            return Loader(
                data, shuffle=not evaluates, on_bad=on_bad, sampler=sampler,
                **self._reading, **common,
            )  # fmt: skip
        if sampler is not None:
            raise InputError("a sampler needs a Dataset to choose from: give it to your own loader")
        return ReadyBatches(data, **common)

    def to_device(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The same micro-batches with their data on the device, copied beside the computation."""
        if self._device.type == "cpu":
            return stream
        # Without its data: the prefetcher moves whatever tensors it finds in a tuple.
        pairs = ((micro._replace(data=None), micro.data) for micro in stream)
        moved = prefetch_to_device(pairs, self._device)
        return (micro._replace(data=data) for micro, data in moved)
