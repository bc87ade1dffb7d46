"""Batches of DataLoaders and seeds: whether samples or random numbers come again."""

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from flambeau.tune.watch.learning.measures import row_hashes, tensors_in
from flambeau.tune.watch.learning.notes import Notes, as_pair, last_line, line_here
from flambeau.tune.watch.stack_phases import CodeLocation, is_torchs

_MOST_BATCHES = 400  # whose content is kept; chosen


class LoaderSeen:
    """What is known of one DataLoader."""

    def __init__(self, loader: "DataLoader[Any]", where: CodeLocation | None) -> None:
        self.loader, self.where = loader, where
        self.iterations = self.batches = self.trained = self.without_gradients = 0
        self.epochs: list[int] = []
        self.samples: list[list[int]] = []
        self.starts: list[tuple[int, ...]] = []  # the first batch of each iteration
        self.is_at_start = False
        self.first_epoch: list[int] = []
        self.one_class = self.labelled = 0
        self.classes: set[int] = set()
        self.same_rows = self.constant = self.not_finite = 0


class BatchWatch:
    """Looks at batches while `is_open`; `last` is the loader of the newest one."""

    def __init__(self, notes: Notes, is_open: Callable[[], bool]) -> None:
        self._notes, self._is_open = notes, is_open
        self.seen: dict[int, LoaderSeen] = {}
        self.last: LoaderSeen | None = None
        self.steps = 0
        self.made: dict[int, CodeLocation] = {}  # by id of the data set

    def install(self) -> None:
        iterate = DataLoader.__iter__
        watch = self

        @functools.wraps(iterate)
        def iterate_watched(self: Any) -> Any:
            seen = watch.seen.setdefault(id(self), LoaderSeen(self, line_here()))
            seen.iterations += 1
            seen.is_at_start = True
            sampler = getattr(self, "sampler", None)
            if isinstance(sampler, DistributedSampler) and sampler.shuffle:
                seen.epochs.append(int(sampler.epoch))
            return watch._batches(iterate(self), seen)

        DataLoader.__iter__ = iterate_watched  # type: ignore[method-assign]
        self._watch_randperm()
        self._watch_datasets()
        for owner, name in ((torch, "manual_seed"), (random, "seed"), (numpy.random, "seed")):
            self._watch_seed(owner, name)

    def _batches(self, batches: Any, seen: LoaderSeen) -> Any:
        return _Watched(batches, functools.partial(self._look, seen))

    def _watch_seed(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def seed(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], int) and self._is_open() and self.steps:
                where = line_here()
                value = args[0]
                if where is not None:
                    self._notes.add(
                        "seed", where, what=f"{owner.__name__}.{name}", seed=value, step=self.steps
                    )
            return function(*args, **kwargs)

        setattr(owner, name, seed)

    def _watch_datasets(self) -> None:
        """Lines at which data sets are made."""
        inherited = Dataset.__new__

        @functools.wraps(inherited)
        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            is_plain = inherited is object.__new__  # which takes no arguments
            one = inherited(cls) if is_plain else inherited(cls, *args, **kwargs)
            if (where := line_here()) is not None:
                self.made[id(one)] = where
            return one

        setattr(Dataset, "__new__", staticmethod(new))  # noqa: B010

    def _watch_randperm(self) -> None:
        function = torch.randperm

        @functools.wraps(function)
        def randperm(n: int, *args: Any, **kwargs: Any) -> Tensor:
            if self._is_open() and not is_torchs(sys._getframe(1)):  # a sampler's is torch's
                self._notes.add("permutation", line_here(), n=n)
            return function(n, *args, **kwargs)

        setattr(torch, "randperm", randperm)  # noqa: B010

    def _look(self, seen: LoaderSeen, batch: Any) -> None:
        self.last = seen
        seen.batches += 1
        seen.without_gradients += not torch.is_grad_enabled()
        if len(seen.samples) >= _MOST_BATCHES:
            return
        tensors = list(tensors_in(batch))
        if not tensors:
            return
        inputs = tensors[0]
        hashes = row_hashes(inputs)
        seen.samples.append(hashes)
        if seen.is_at_start and hashes:
            seen.starts.append(tuple(hashes))
            seen.is_at_start = False
        if seen.iterations == 1:
            seen.first_epoch += hashes
        if len(hashes) > 1:
            seen.same_rows += len(set(hashes)) == 1
        if torch.is_floating_point(inputs) and inputs.numel() > 1:
            seen.constant += bool((inputs == inputs.flatten()[0]).all())
            seen.not_finite += not bool(torch.isfinite(inputs).all())
        labels = tensors[-1]
        if len(tensors) > 1 and labels.ndim == 1 and labels.dtype == torch.int64:
            some = set(labels.tolist())
            seen.labelled += 1
            seen.one_class += len(some) == 1 and len(labels) > 3
            seen.classes |= some if len(seen.classes) < 10_000 else set()

    def note_training(self) -> None:
        if self.last is not None:
            self.last.trained += 1

    def as_rows(self) -> list[dict[str, Any]]:
        return [_row(one) for one in self.seen.values() if one.batches]


class _Watched:
    """An iterator of batches that shows each to a function; all other attributes are the iterator's."""

    def __init__(self, batches: Any, look: Callable[[Any], None]) -> None:
        self._batches, self._look = batches, look

    def __iter__(self) -> "_Watched":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._look(batch)
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _row(seen: LoaderSeen) -> dict[str, Any]:
    samples = [one for batch in seen.samples for one in batch]
    filled = [tuple(batch) for batch in seen.samples if batch]
    loader = seen.loader
    return {
        "item": as_pair(last_line(getattr(type(loader.dataset), "__getitem__", None))),
        "file": seen.where.file if seen.where else "",
        "line": seen.where.line if seen.where else 0,
        "iterations": seen.iterations,
        "batches": seen.batches,
        "trained": seen.trained,
        "epochs": seen.epochs,
        "starts": len(seen.starts),
        "different_starts": len(set(seen.starts)),
        "is_shuffled": isinstance(loader.sampler, RandomSampler),
        "different_batches": len(set(filled)),
        "hashed_batches": len(filled),
        "different_samples": len(set(samples)),
        "samples": len(samples),
        "same_rows": seen.same_rows,
        "constant": seen.constant,
        "not_finite": seen.not_finite,
        "one_class": seen.one_class,
        "labelled": seen.labelled,
        "classes": len(seen.classes),
        "workers": loader.num_workers,
        "is_iterable": isinstance(loader.dataset, IterableDataset),
        "first_epoch": seen.first_epoch[:20_000],
    }
