"""A thread that reads the next batches while the current one is computed.

The decoders and torch's resizing hold no lock of Python, so that the training goes on meanwhile.

Not for a dataset that draws from the global generators, which the training draws from at the same time.
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

_SETTLE_S = 5.0  # that a fork waits for a batch under way; chosen: hundreds of photos take less


def read_ahead(
    parts: Iterable[P],
    read: Callable[[P], R],
    *,
    depth: int = 2,
    start: Callable[[], object] = lambda: None,
) -> Iterator[R]:
    """`map(read, parts)`, in order, with `read` called in one thread, at most `depth` results ahead.

    An exception of `read` is raised where its result would have come. The thread ends with this iterator,
    which waits for the call under way. While no result is asked for, none beyond `depth` is made.

    Args:
        parts: what to read; iterated in the thread that asks for results.
        read: called in the other thread, for one part at a time.
        depth: results that are made ahead of the one in use, at least 1.
        start: called once in the other thread, before anything is read.

    Raises:
        ValueError: a depth below 1.

    Example:
        >>> list(read_ahead([3, 4, 5], float))
        [3.0, 4.0, 5.0]
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    return _results(iter(parts), read, depth, start)


def _results(
    parts: Iterator[P], read: Callable[[P], R], depth: int, start: Callable[[], object]
) -> Iterator[R]:
    asked: deque[Future[R]] = deque()
    threads: list[int] = []

    def begin() -> None:
        threads.append(threading.get_ident())
        start()

    # An executor, because it ends with the interpreter even if it was not closed, and because its thread
    # waits for work only, never for space in a queue.
    executor = ThreadPoolExecutor(1, "read-ahead", initializer=begin)
    _settle_at_forks()
    _asked[id(asked)] = asked
    try:
        while True:
            while len(asked) <= depth:
                try:
                    asked.append(executor.submit(read, next(parts)))
                except StopIteration:
                    break
                except Exception as error:
                    asked.append(Future())  # raised after the results before it
                    asked[-1].set_exception(error)
            if not asked:
                return
            asked[0].result()  # a fork waits for it meanwhile
            yield asked.popleft().result()
    finally:
        _asked.pop(id(asked), None)
        # A garbage collection in the thread itself may end an iterator that was dropped.
        executor.shutdown(wait=threading.get_ident() not in threads, cancel_futures=True)


_asked: dict[int, deque[Future[Any]]] = {}  # of the iterators in use


@functools.cache
def _settle_at_forks() -> None:
    """From now on a process is forked while no thread is in the middle of a batch, and holds no lock."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_settle, after_in_child=_asked.clear)


def _settle() -> None:
    for asked in list(_asked.values()):
        wait(list(asked), timeout=_SETTLE_S)
