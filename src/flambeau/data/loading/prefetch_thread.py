"""A thread that reads the next batches while the current one is computed.

The decoders and torch's resizing hold no lock of Python, so that the training goes on meanwhile.

Not for a dataset that draws from the global generators, which the training draws from at the same time.
"""

import functools
import os
import threading
import weakref
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
    return _Reader(start).results(iter(parts), read, depth)


class _Reader:
    """The thread, and what it has been asked for.

    An executor, because it ends with the interpreter even if it was not closed, and because its thread
    waits for work only, never for space in a queue.
    """

    def __init__(self, start: Callable[[], object]) -> None:
        self._thread: int | None = None
        self.asked: deque[Future[Any]] = deque()
        self._executor = ThreadPoolExecutor(
            1, "read-ahead", initializer=self._begin, initargs=(start,)
        )
        _settle_at_forks()
        _readers.add(self)

    def results(self, parts: Iterator[P], read: Callable[[P], R], depth: int) -> Iterator[R]:
        try:
            while True:
                while len(self.asked) <= depth and self._ask(parts, read):
                    pass
                if not self.asked:
                    return
                yield self._take()
        finally:
            self._end()

    def _ask(self, parts: Iterator[P], read: Callable[[P], R]) -> bool:
        """Have the next part read; whether there was one."""
        try:
            part = next(parts)
        except StopIteration:
            return False
        except Exception as error:
            failed: Future[R] = Future()  # raised after the results before it
            failed.set_exception(error)
            self.asked.append(failed)
        else:
            self.asked.append(self._executor.submit(read, part))
        return True

    def _take(self) -> Any:
        result = self.asked[0].result()
        self.asked.popleft()
        return result

    def _begin(self, start: Callable[[], object]) -> None:
        self._thread = threading.get_ident()
        start()

    def _end(self) -> None:
        # A garbage collection in the thread itself may end an iterator that was dropped.
        is_other = threading.get_ident() != self._thread
        self._executor.shutdown(wait=is_other, cancel_futures=True)
        self.asked.clear()


_readers: "weakref.WeakSet[_Reader]" = weakref.WeakSet()


@functools.cache
def _settle_at_forks() -> None:
    """From now on a process is forked while no reader is in the middle of a batch, and holds no lock."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_settle, after_in_child=_readers.clear)


def _settle() -> None:
    for reader in list(_readers):
        wait(list(reader.asked), timeout=_SETTLE_S)
