"""A thread that reads the next batches while the current one is computed.

Decoders and torch's resizing release the GIL, so the training continues meanwhile. Not for a dataset that
draws from the global generators, from which the training draws at the same time.
"""

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

P = TypeVar("P")
R = TypeVar("R")

_SETTLE_S = (
    5.0  # how long a fork waits for a batch in progress; chosen: hundreds of photos take less
)


def prefetch(
    parts: Iterable[P],
    read: Callable[[P], R],
    *,
    depth: int = 2,
    start: Callable[[], object] = lambda: None,
) -> Iterator[R]:
    """`map(read, parts)`, in order, with `read` called in one thread, at most `depth` results ahead.

    An exception of `read` is raised in place of its result. The thread calls `start` first, and ends with
    this iterator, which waits for the call in progress; the consumer's thread iterates `parts`.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    return _results(iter(parts), read, depth, start)


def _results(
    parts: Iterator[P], read: Callable[[P], R], depth: int, start: Callable[[], object]
) -> Iterator[R]:
    pending: deque[Future[R]] = deque()
    threads: list[int] = []

    def begin() -> None:
        threads.append(threading.get_ident())
        start()

    # An executor ends with the interpreter even if it was not closed, and its thread waits for work only,
    # never for space in a queue.
    executor = ThreadPoolExecutor(1, "read-ahead", initializer=begin)
    _settle_at_forks()
    _pending[id(pending)] = pending
    try:
        while True:
            while len(pending) <= depth:
                try:
                    pending.append(executor.submit(read, next(parts)))
                except StopIteration:
                    break
                except Exception as error:
                    pending.append(Future())  # raised after the results before it
                    pending[-1].set_exception(error)
            if not pending:
                return
            pending[0].result()  # a fork waits for it meanwhile
            yield pending.popleft().result()
    finally:
        _pending.pop(id(pending), None)
        # Garbage collection may close a dropped iterator in the reading thread itself.
        executor.shutdown(wait=threading.get_ident() not in threads, cancel_futures=True)


_pending: dict[int, deque[Future[Any]]] = {}  # of the iterators in use


@functools.cache
def _settle_at_forks() -> None:
    """From now on a fork waits until no thread is in the middle of a batch, where it might hold a lock."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_settle, after_in_child=_pending.clear)


def _settle() -> None:
    for pending in list(_pending.values()):
        wait(list(pending), timeout=_SETTLE_S)
