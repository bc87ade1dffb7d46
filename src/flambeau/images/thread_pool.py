"""Threads that share the images of a batch.

The decoders and torch's resizing hold no lock of Python, so threads do what processes would,
without copies of the data, pickling or shared memory.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.utils.data import get_worker_info

from flambeau.recipes.setup.environment import usable_cpus


class DecodePool:
    """Runs a function for the numbers 0 to N - 1, on threads that are started when first needed.

    It may be pickled, and used after a fork and in several threads at once; a process that is forked or
    spawned starts threads of its own.

    Args:
        threads: how many, this one included; None for this process's share of the CPUs it may use, and for
            one in a worker of a DataLoader, which is itself one of many.

    Raises:
        ValueError: less than one thread.

    Example:
        >>> squares = [0] * 4
        >>> DecodePool(2).each(4, lambda number: squares.__setitem__(number, number**2))
        >>> squares
        [0, 1, 4, 9]
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self._threads = threads
        self._of_process: tuple[int, int, ThreadPoolExecutor | None] | None = None

    def each(self, count: int, work: Callable[[int], None]) -> None:
        """Call work(0), ..., work(count - 1).

        Args:
            count: at least 0.
            work: may be called in several threads at once, in the order of the numbers.

        Raises:
            Exception: what `work` raises, for the smallest number if for several; later ones are not begun.
        """
        numbers = itertools.count()
        failures: list[tuple[int, Exception]] = []  # appending is atomic
        stopped: list[BaseException] = []

        def share() -> None:
            # Handed out in order, so all before a failed one have been begun
            for number in numbers:
                if number >= count or failures or stopped:
                    return
                try:
                    work(number)
                except Exception as error:
                    failures.append((number, error))

        threads, executor = self._started()
        helpers: list[Future[None]] = []
        if executor is not None:
            helpers = [executor.submit(share) for _ in range(min(threads, count) - 1)]
        try:
            share()
        except BaseException as error:  # an interrupt: the helpers stop, and then it goes on
            stopped.append(error)
            raise
        finally:
            for helper in helpers:
                helper.result()
        if failures:
            raise min(failures, key=lambda failure: failure[0])[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"_threads": self._threads, "_of_process": None}

    def _started(self) -> tuple[int, ThreadPoolExecutor | None]:
        """The threads of this process; those of a parent are not in a forked child."""
        if self._of_process is None or self._of_process[0] != os.getpid():
            threads = self._threads or _share_of_cpus()
            # At worst two threads make two executors, of which one is dropped.
            executor = ThreadPoolExecutor(threads - 1, "decode") if threads > 1 else None
            self._of_process = os.getpid(), threads, executor
        return self._of_process[1:]


def _share_of_cpus() -> int:
    if get_worker_info() is not None:
        return 1
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's
    return max(1, usable_cpus() // max(1, ranks_here))
