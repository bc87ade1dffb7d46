"""'Stop soon' as a flag: signals set it, the run looks at it between steps. No torch here."""

import os
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Any, Final

EXIT_CODE: Final = 75
"""EX_TEMPFAIL of sysexits.h: start the same command again and it goes on."""

_SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
]


class Preempted(SystemExit):
    """The run was asked to stop and has saved itself; leaves the process with exit code 75."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class StopFlag:
    """Set by SIGTERM, SIGUSR1 or SIGINT; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ending = False
        self._pid = os.getpid()

    def install(self, owner: object) -> None:
        """Take the signals over, in the main thread; elsewhere Python allows no handlers."""
        self._owners.add(owner)
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        self._ending = False
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self, owner: object) -> None:
        """Give the signals back to whoever had them, when the last owner is done with them."""
        self._owners.discard(owner)
        while self._previous and not self._owners:
            number, handler = self._previous.popitem()
            signal.signal(number, signal.SIG_IGN if self._ending else handler)

    def answer(self) -> None:
        """A run has saved itself and leaves.

        Under the command, which is an owner besides the run, the process ends now: no signal that comes late
        may change its exit code, so they are ignored from `restore` on, not given back.
        """
        self.signal = None
        self._ending = len(self._owners) > 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has its own ways to end
        before, self.signal = self.signal, signal.Signals(number).name
        if number == signal.SIGINT:
            if before is not None:
                raise KeyboardInterrupt
            # os.write: print is not safe inside a signal handler.
            os.write(
                sys.__stderr__.fileno() if sys.__stderr__ else 2,
                b"\nstopping after this step and a checkpoint; Ctrl-C again stops at once\n",
            )


FLAG = StopFlag()
"""The flag of this process: signals are one a process, too."""
