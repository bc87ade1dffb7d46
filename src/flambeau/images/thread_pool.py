"""Threads that share the images of a batch.

Decoders and torch's resizing release the GIL: threads are as fast as processes, without pickling or copies.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.utils.data import get_worker_info

from flambeau.recipes.setup.environment import usable_cpus


class DecodePool:
    """Runs a function for the numbers 0 to N - 1, on threads that start when first needed, also after a fork.

    Args:
        threads: this one included; None for this process's share of the CPUs, or one in a DataLoader's
            worker.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self._threads = threads
        self._started_in: tuple[int, int, ThreadPoolExecutor | None] | None = None  # by process

    def each(self, count: int, work: Callable[[int], None]) -> None:
        """Call work(0), ..., work(count - 1), in this order, several at once.

        Of several exceptions the smallest number's is raised; later calls do not start.
        """
        numbers = itertools.count()
        failures: list[tuple[int, Exception]] = []  # appending is atomic
        stopped: list[BaseException] = []

        def share() -> None:
            # Handed out in order, so all numbers before a failed one have been started.
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
        except BaseException as error:  # an interrupt: the helpers stop, and then it is raised
            stopped.append(error)
            raise
        finally:
            for helper in helpers:
                helper.result()
        if failures:
            raise min(failures, key=lambda failure: failure[0])[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"_threads": self._threads, "_started_in": None}

    def _started(self) -> tuple[int, ThreadPoolExecutor | None]:
        """The threads of this process; a forked child does not have those of its parent."""
        if self._started_in is None or self._started_in[0] != os.getpid():
            threads = self._threads or _share_of_cpus()
            # At worst two threads make two executors, of which one is dropped.
            executor = ThreadPoolExecutor(threads - 1, "decode") if threads > 1 else None
            self._started_in = os.getpid(), threads, executor
        return self._started_in[1:]


def _share_of_cpus() -> int:
    if get_worker_info() is not None:
        return 1
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    return max(1, usable_cpus() // max(1, ranks_here))
