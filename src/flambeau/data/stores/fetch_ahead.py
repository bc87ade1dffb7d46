"""Threads that fetch the blocks that come next, while those before them are used."""

import queue
import threading
from collections.abc import Callable

from flambeau.errors import InputError

AT_ONCE = 8  # requests to a store at the same moment: what a latency of 50 ms needs for 1 GB/s
_MOST = 2 * AT_ONCE  # blocks that are asked for and not there yet


class FetchAhead:
    """Calls that are made in the order in which they are given, some at the same time.

    A failed call raises nothing: the reader that needs the block fetches it again.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        self._num_threads = 0

    def submit(self, key: str, fetch: Callable[[], object]) -> None:
        """Call `fetch` soon, unless a call for this key is waiting or in progress."""
        with self._lock:
            if key in self._waiting:
                return
            self._waiting.add(key)
            starts = self._num_threads < min(AT_ONCE, len(self._waiting))
            self._num_threads += starts
        self._queue.put((key, fetch))
        if starts:
            # Daemons: a process that ends does not wait for what it no longer needs.
            threading.Thread(target=self._work, name="fetch-ahead", daemon=True).start()

    @property
    def is_full(self) -> bool:
        """Whether enough calls wait or are in progress."""
        return len(self._waiting) >= _MOST

    def _work(self) -> None:
        while True:
            key, fetch = self._queue.get()
            try:
                fetch()
            except (InputError, OSError):
                pass  # met again by who needs the block
            finally:
                with self._lock:
                    self._waiting.discard(key)
