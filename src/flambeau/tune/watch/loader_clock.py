"""Clocks around every DataLoader of a process, and the changes that trials make to loaders."""

import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import Any

from torch import is_grad_enabled
from torch.utils.data import DataLoader, IterableDataset

from flambeau.data.loading.batch_samples import tensors_in_batch
from flambeau.data.loading.workers.transport import map_tensors
from flambeau.tune.watch.plan import write_whole
from flambeau.tune.watch.stack_phases import CodeLocation, user_lines
from flambeau.tune.watch.worker_shares import WorkerShares, may_change_workers, name_of

_Change = Mapping[str, Any]
_Way = tuple[CodeLocation, ...]
_MOST_EVALUATIONS = 100  # ways to a loader that are kept; chosen
_ALONE_AFTER = 10  # batches, so that prefetched ones are used up; chosen


def _way_to(frame: FrameType | None) -> _Way:
    return tuple(reversed(user_lines(frame)))


@dataclass(slots=True)
class LoaderClock:
    """Of all loaders of a process.

    Attributes:
        waited_s: for batches, except for the first of an epoch with workers.
        started_s: until workers have given their first batch, and until they have ended.
        ways: lines that led to where each loader was made, the outermost first.
        is_inside: in a loader; those that it uses do not count.
        evaluates: the last batch was requested without gradients.
        pause: batches that do not count, before `after_pause`.
        after_pause: takes whether a loader has ended, perhaps without a further batch.
        shares: data sets that split their samples among workers, if watched.
        read: ways to loaders that were iterated.
        made_again: those on which another loader was made after the first step.
        evaluations: lines to a loader without gradients, the outermost first.
    """

    thread: int = field(default_factory=lambda: threading.main_thread().ident or 0)
    waited_s: float = 0.0
    started_s: float = 0.0
    batches: int = 0
    last: DataLoader[Any] | None = None
    ways: "weakref.WeakKeyDictionary[Any, _Way]" = field(default_factory=weakref.WeakKeyDictionary)
    is_inside: bool = False
    evaluates: bool = False
    pause: int = 0
    after_pause: Callable[[bool], None] = lambda is_end: None
    shares: WorkerShares | None = None
    read: set[_Way] = field(default_factory=set)
    made_again: set[_Way] = field(default_factory=set)
    evaluations: set[_Way] = field(default_factory=set)

    def note_made(self, loader: "DataLoader[Any]", frame: FrameType | None) -> None:
        """A helper may make loaders for both training and evaluation, so its line is not enough."""
        way = _way_to(frame)
        if way:
            self.ways[loader] = way
        if way in self.read:
            self.made_again.add(way)

    def note_evaluation(self, frame: FrameType | None) -> None:
        """Keep the lines that lead to a loader without gradients."""
        if len(self.evaluations) < _MOST_EVALUATIONS:
            self.evaluations.add(_way_to(frame))

    def loader_facts(self) -> dict[str, Any]:
        """Of the loader that gave the last batch; empty if there was none."""
        loader = self.last
        if loader is None:
            return {}
        repeats = self.shares is not None and not self.shares.is_split(loader)
        is_shared = isinstance(loader.dataset, IterableDataset) and not repeats
        return {
            "num_workers": loader.num_workers,
            "pin_memory": bool(loader.pin_memory),
            "persistent_workers": bool(loader.persistent_workers),
            "place": self.ways[loader][-1] if loader in self.ways else None,
            "is_made_anew": self.ways.get(loader) in self.made_again,
            "repeats": repeats,  # more workers would give samples more than once
            "shared": [name_of(loader.dataset)] if is_shared else [],
        }


class _TimedBatches:
    """Times the iterator of a DataLoader; all other attributes are that iterator's."""

    # Slots for speed; with a __dict__ and weak references, as the original iterator has.
    __slots__ = ("__dict__", "__weakref__", "_batches", "_clock", "_loader", "_next", "_start_s")

    def __init__(
        self, batches: Iterator[Any], loader: DataLoader[Any], clock: LoaderClock, start_s: float
    ) -> None:
        self._batches, self._loader, self._clock = batches, loader, clock
        self._next = batches.__next__
        self._start_s: float | None = start_s if loader.num_workers else None

    def __iter__(self) -> "_TimedBatches":
        return self

    # Runs once per step with cold caches: the fewer objects it touches, the better.
    def __next__(self) -> Any:
        clock = self._clock
        if clock.pause:
            clock.pause -= 1
            if not clock.pause:
                clock.after_pause(False)
            try:
                return self._next()
            except StopIteration:
                clock.after_pause(True)
                raise
        if clock.is_inside or get_ident() != clock.thread:
            return self._next()
        if not is_grad_enabled():
            clock.evaluates = True
            return self._next()
        clock.is_inside, clock.evaluates = True, False
        began = perf_counter()
        try:
            batch = self._next()
        except BaseException:
            if self._loader.num_workers:  # they end with their epoch
                clock.started_s += perf_counter() - began
            raise
        finally:
            clock.is_inside = False
        if self._start_s is None:
            clock.waited_s += perf_counter() - began
        else:
            clock.started_s += perf_counter() - began + self._start_s
            self._start_s = None
        clock.batches += 1
        clock.last = self._loader
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def watch_loaders(change: _Change, folder: Path) -> LoaderClock:
    """Put the clocks around DataLoader, once per process, and make a trial's change."""
    shares = WorkerShares(folder)
    shares.watch()
    clock = LoaderClock(shares=shares)
    make, iterate = DataLoader.__init__, DataLoader.__iter__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.arguments.update(_changed(given.arguments, change))
        make(*given.args, **given.kwargs)
        clock.note_made(self, sys._getframe(1))

    batches_of = _batches_of(change, iterate, folder, clock.ways)

    @functools.wraps(iterate)
    def iterate_timed(self: Any) -> Any:
        if clock.is_inside or get_ident() != clock.thread:
            return iterate(self)
        if not is_grad_enabled():
            clock.note_evaluation(sys._getframe(1))
        if (way := clock.ways.get(self)) is not None:
            clock.read.add(way)
        clock.is_inside = True
        began = perf_counter()
        try:
            batches = batches_of(self)
        finally:
            clock.is_inside = False
        return _TimedBatches(batches, self, clock, perf_counter() - began)

    DataLoader.__init__ = init  # type: ignore[method-assign]
    DataLoader.__iter__ = iterate_timed  # type: ignore[method-assign]
    return clock


def _changed(given: Mapping[str, Any], change: _Change) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    workers = now = given.get("num_workers", 0)
    if may_change_workers(given["dataset"], change):
        workers = change.get("workers", now)
    if workers != now:
        changed["num_workers"] = workers
        if workers == 0:
            changed |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
            changed["multiprocessing_context"] = None
    if change.get("persistent") and workers:
        changed["persistent_workers"] = True
    if "prefetch" in change and workers:
        changed["prefetch_factor"] = change["prefetch"]
    if change.get("pin"):
        changed["pin_memory"] = True
    return changed


def _batches_of(
    change: _Change,
    iterate: Callable[[Any], Iterator[Any]],
    folder: Path,
    ways: Mapping[Any, _Way],
) -> Callable[[Any], Iterator[Any]]:
    if change.get("once"):
        kept: dict[Any, Any] = {}
        return lambda loader: iterate(kept.setdefault(_same(loader, ways), loader))
    if "cached" in change:
        same = functools.partial(_same, ways=ways)
        return CachedBatches(iterate, change["cached"], same).batches
    if "alone" in change:
        return lambda loader: _then_alone(loader, iterate, change["alone"], folder)
    if change.get("fast"):
        from flambeau.data.fast import fast

        made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

        def fast_batches(loader: Any) -> Iterator[Any]:
            if loader not in made:
                made[loader] = fast(loader)
            return iter(made[loader])

        return fast_batches
    return iterate


def _same(loader: Any, ways: Mapping[Any, _Way]) -> Any:
    """What loaders have in common that are one, made anew; the loader itself if nothing says so."""
    if loader not in ways:
        return loader
    data = loader.dataset
    return ways[loader], name_of(data), len(data) if isinstance(data, Sized) else None


def _then_alone(
    loader: Any, iterate: Callable[[Any], Iterator[Any]], seconds: float, folder: Path
) -> Iterator[Any]:
    """Some batches for the script, then only reading for some seconds, then an epoch for the script."""
    yield from itertools.islice(iterate(loader), _ALONE_AFTER)
    read = 0
    began = perf_counter()
    batches = iterate(loader)
    while (elapsed := perf_counter() - began) < seconds:
        try:
            next(batches)
            read += 1
        except StopIteration:
            batches = iterate(loader)
    write_whole(folder / "alone.json", {"batches_per_s": read / elapsed})
    yield from iterate(loader)


class CachedBatches:
    """Iterates loaders from `count` batches in memory: the speed with free data.

    Args:
        same: what loaders that share their batches have in common.
    """

    def __init__(
        self,
        iterate: Callable[[Any], Iterator[Any]],
        count: int,
        same: Callable[[Any], Any] = lambda loader: loader,
    ) -> None:
        self._iterate, self._count, self._same = iterate, count, same
        self._kept: dict[Any, list[Any]] = {}
        self._are_changed: weakref.WeakSet[Any] = weakref.WeakSet()

    def batches(self, loader: Any) -> Iterator[Any]:
        """An epoch with as many batches as the loader has; endless if it has no length."""
        kept = self._kept.setdefault(self._same(loader), [])
        try:
            length = len(loader)
        except TypeError:
            length = -1
        number = 0
        if len(kept) < self._count:
            for batch in self._iterate(loader):
                if len(kept) < self._count:
                    kept.append(_copy(batch))
                yield batch
                number += 1
                if len(kept) == self._count:
                    break
        while number != length and kept:
            batch = kept[number % len(kept)]
            yield self._unchanged(loader, batch)
            number += 1

    def _unchanged(self, loader: Any, batch: Any) -> Any:
        """The batch itself, or a copy if the script has modified a batch in place."""
        if loader not in self._are_changed and any(
            leaf._version for leaf in tensors_in_batch(batch)
        ):
            self._are_changed.add(loader)
        return _copy(batch) if loader in self._are_changed else batch


def _copy(batch: Any) -> Any:
    """New tensors; everything else is shared."""
    return map_tensors(batch, lambda tensor: tensor.detach().clone())
