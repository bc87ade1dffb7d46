"""How batches are read for training and evaluation, reach the device, and seed the generators."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from flambeau.data.loading.batch_layout import Layout, layout_of
from flambeau.data.loading.batch_plan import Order
from flambeau.data.loading.loader import Loader, ReadOptions, is_dataset
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.data.loading.read_ahead import evaluation_order
from flambeau.data.loading.user_dataloader import UserDataLoader
from flambeau.data.loading.workers.processes import Restarts
from flambeau.data.wrap import Batches
from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.data.device_prefetch import are_on, prefetch_to_device
from flambeau.recipes.data.sample_order import mix
from flambeau.run.folder.micro_batches_file import MicroBatches
from flambeau.run.loop.rank_checks import BadReports
from flambeau.run.options.run_options import OnBad, RunOptions


class BatchDraws:
    """Seeds the generators by (seed, epoch, batch).

    Args:
        device: its default generator is seeded beside the CPU's.
        also_python: seed Python's and NumPy's, too: a part's draws must not depend on which others its
            process has computed.
    """

    def __init__(self, seed: int, device: torch.device, *, also_python: bool = False) -> None:
        self._also_python = also_python
        self._seed = mix(seed)
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._epoch = -1
        self._epoch_seed = 0

    def seed(self, epoch: int, micro: MicroBatch) -> None:
        self._set(mix(self._of_epoch(epoch) + micro.draw))

    def seed_after_parts(self, epoch: int, position: int) -> None:
        """After a step in parts: later draws must not depend on the number of processes."""
        self._set(mix(mix(self._of_epoch(epoch)) + position))

    def _of_epoch(self, epoch: int) -> int:
        if epoch != self._epoch:
            self._epoch = epoch
            self._epoch_seed = mix(self._seed + epoch + 1)
        return self._epoch_seed

    def _set(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)
        if self._also_python:
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)

    def keep(self) -> Callable[[], None]:
        """Save the states of the generators; the returned function restores them."""
        states = [generator.get_state() for generator in self._generators]
        of_python = (random.getstate(), np.random.get_state()) if self._also_python else None

        def put_back() -> None:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            if of_python is not None:
                random.setstate(of_python[0])
                np.random.set_state(of_python[1])

        return put_back

    def seed_evaluation(self, epoch: int) -> None:
        self._set(mix(self._seed + epoch))


class BatchReader:
    """Makes the loaders of a run."""

    def __init__(
        self,
        device: torch.device,
        options: RunOptions,
        *,
        ranks: Ranks,
        bad: BadReports,
        sharded: bool,
        micro_batches: MicroBatches,
        say: Callable[[str], None],
    ) -> None:
        self._device, self._bad, self._sharded = device, bad, sharded
        self.micro_batches = micro_batches
        self._seed = options.seed
        self._batch_size = options.batch_size
        self._ranks = ranks
        self._parts = options.parts
        self._say = say
        self._reading = ReadOptions(
            workers=options.workers,
            collate=options.collate or default_collate,
            pin_memory=device.type == "cuda",
            stall_timeout=options.stall_timeout,
            restarts=Restarts(options.retry_workers, say),
        )

    def loader(
        self,
        data: Dataset[Any] | Iterable[Any],
        *,
        accumulate: int = 1,
        evaluates: bool = False,
        on_bad: OnBad | None,
        sampler: Order | None = None,
    ) -> Loader | UserDataLoader:
        """The loader of a Dataset, or of a ready-made loader; InputError: data that have no batches."""
        if (why := _why_not(data)) is not None:
            raise InputError(
                f"{'run.evaluate' if evaluates else 'Run'} cannot read its data: {why}"
            )
        # An evaluation exchanges no gradients: a rank without samples can skip the batch.
        keeps_empty = not evaluates or self._sharded
        if is_dataset(data):
            if evaluates and (self._parts is not None or self._ranks.world > 1):
                sampler = evaluation_order(data)
            layout = layout_of(
                self._batch_size,
                accumulate=accumulate,
                parts=self._parts,
                rank=self._ranks.rank,
                world=self._ranks.world,
                keeps_empty=keeps_empty,
            )
            return Loader(
                data,
                self._fitted_layout(layout, evaluates=evaluates),
                seed=self._seed,
                shuffle=not evaluates,
                sampler=sampler,
                reading=self._reading,
                on_bad=self._bad.callback(on_bad),
            )
        return UserDataLoader(
            data,
            accumulate=accumulate,
            seed=self._seed,
            rank=self._ranks.rank,
            world=self._ranks.world,
            keeps_empty=keeps_empty,
            gather=self._ranks.gather,
            say=self._say,
        )

    def _fitted_layout(self, layout: Layout, *, evaluates: bool) -> Layout:
        """Use the sizes that have fitted; an evaluation has no steps to keep whole."""
        size = self.micro_batches.training
        if size is None or size >= layout.micro_batch_size:
            return layout
        return layout.in_batches_of(size) if evaluates else layout.with_micro_batches(size)

    def to_device(
        self, stream: Iterator[MicroBatch], *, ahead: bool = True
    ) -> Iterator[MicroBatch]:
        """Move the data to the device, copying while the device computes.

        `ahead` reads the next batch meanwhile; False where a checkpoint asks the loader for its state.
        """
        if self._device.type == "cpu":
            return stream
        return self._moved(stream) if ahead else self._moved_one_by_one(stream)

    def _moved_one_by_one(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for micro in stream:
            [data] = prefetch_to_device([micro.data], self._device)
            yield micro._replace(data=data)

    def _moved(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for micro in stream:
            if not are_on(micro.data, self._device):
                rest = itertools.chain([micro], stream)
                del micro  # else its data stay for the whole epoch
                yield from self._prefetched(rest)
                return
            yield micro  # nothing to copy ahead, which would cost in a small step

    def _prefetched(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        # The data alone: the prefetcher searches everything that it gets for tensors.
        ahead: deque[MicroBatch] = deque()

        def data() -> Iterator[Any]:
            for micro in stream:
                ahead.append(micro._replace(data=None))
                yield micro.data

        for batch in prefetch_to_device(data(), self._device):
            yield ahead.popleft()._replace(data=batch)

    def again(
        self, loader: Loader | UserDataLoader, steps_before: int
    ) -> Iterator[tuple[int, MicroBatch]]:
        """Read the step after `steps_before` steps again: its epoch and micro-batches.

        Nothing from a ready-made loader, which may not repeat batches.
        """
        if isinstance(loader, UserDataLoader):
            return
        epoch, batch = divmod(steps_before, loader.batches_per_epoch)
        position = batch * len(loader.batch_indices(epoch=epoch, batch=0))
        stream = loader.stream(epoch=epoch, position=position, epochs=1)
        for micro in self.to_device(stream):
            yield epoch, micro
            if micro.ends_batch:
                return


def _why_not(data: object) -> str | None:
    """Why this is neither a Dataset nor a loader; None if it is one."""
    kind = type(data).__name__
    instead = "give a Dataset, or a DataLoader"
    if isinstance(data, (str, bytes, PurePath)):
        return (
            f"{data!r:.100} is a name; wrap(NAME, transform, ...).dataset opens it, else {instead}"
        )
    if isinstance(data, Mapping):
        return f"a {kind} has no samples 0, 1, 2 ...: {instead}; perhaps it is one of its values"
    if isinstance(data, (tuple, list)) and _is_columns(data):
        return f"a {kind} of {len(data)} whole tensors is no Dataset: TensorDataset(X, Y) makes one"
    if isinstance(data, Batches):
        return "what wrap makes counts its epochs itself: give the Dataset that was wrapped, its .dataset"
    if isinstance(data, IterableDataset):
        return f"{kind} has no samples by index: give it a __len__, and DataLoader(it, batch_size=...) to Run"
    if isinstance(data, Iterator):
        return f"a {kind} can be read only once, and each epoch begins anew: {instead}"
    if isinstance(data, type) or not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
        return f"{data!r:.100} has neither [i] nor batches to iterate over: {instead}"
    try:
        len(data)  # type: ignore[arg-type]
    except TypeError as error:
        return f"{error}; it says how long an epoch is: write a __len__"
    return None


def _is_columns(data: Sequence[Any]) -> bool:
    """Whether these look like whole tensors of inputs and targets, rather than samples."""
    if not data or not all(isinstance(value, (Tensor, np.ndarray)) for value in data):
        return False
    shapes = {tuple(value.shape) for value in data}
    return isinstance(data, tuple) or (
        len(shapes) > 1 and len({shape[:1] for shape in shapes}) == 1
    )
