"""A stack dump for when native code holds the GIL, so that no Python thread can print."""

import faulthandler
import os
import threading
from typing import Final


class StackDump:
    """Prints the stacks of all threads to standard error, unless postponed in time.

    It does not end the process: it cannot tell a hanging process from one that was suspended as long.
    """

    def __init__(self) -> None:
        self._is_armed = self._is_registered = False
        self._lock = threading.Lock()

    def arm(self, after_s: float) -> None:
        """Print after this time, unless `arm` or `disarm` is called before."""
        if not self._is_registered:
            self._is_registered = True
            release = self._lock.release
            os.register_at_fork(
                before=self._before_fork, after_in_parent=release, after_in_child=release
            )
        with self._lock:
            self._is_armed = True
            faulthandler.dump_traceback_later(after_s, file=2)

    def disarm(self) -> None:
        with self._lock:
            self._cancel()

    def _before_fork(self) -> None:
        """At its exit a forked child would wait for the timer's thread, which it does not have."""
        self._lock.acquire()
        self._cancel()

    def _cancel(self) -> None:
        if self._is_armed:
            self._is_armed = False
            faulthandler.cancel_dump_traceback_later()


STACK_DUMP: Final = StackDump()
"""The only one of this process: faulthandler has a single timer."""
