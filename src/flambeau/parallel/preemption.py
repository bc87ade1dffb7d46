"""A flag that signals set to ask a run to stop; the run checks it between steps. No torch here."""

import os
import signal
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any, Final

EXIT_CODE: Final = 75
"""EX_TEMPFAIL of sysexits.h: start the same command again and it resumes."""

OUT_OF_MEMORY: Final = 71
"""EX_OSERR of sysexits.h: start all ranks again, and they train in smaller micro-batches."""

INTERRUPTED: Final = 130
"""What shells give a process that SIGINT has ended."""

_SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
]


class Preempted(SystemExit):
    """The run was asked to stop and has saved itself; leaves the process with exit code 75."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class MicroBatchHalved(SystemExit):
    """Memory ran out in one of several ranks; leaves the process with exit code 71."""

    def __init__(self) -> None:
        super().__init__(OUT_OF_MEMORY)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at a prompt or in a notebook has stopped a run that has saved itself."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the place of a traceback, which would tell nothing."""
        return ["interrupted"]


class StopFlag:
    """Set by SIGTERM, SIGUSR1 or SIGINT; a second SIGINT stops at once.

    Under the command that is the end of the process: KeyboardInterrupt would be lost where Python happens to
    be in a `__del__`, and every file being written survives a kill at any moment. Elsewhere the process
    belongs to the user (a notebook), and KeyboardInterrupt is raised.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ending = False
        self._is_command = False
        self._pid = os.getpid()

    def install(self, owner: object, *, is_command: bool = False) -> None:
        """Take the signals over, in the main thread; elsewhere Python allows no handlers.

        Args:
            owner: whoever calls `restore` later.
            is_command: the process is the command `flambeau`, and ends with its run.
        """
        if os.getpid() != self._pid:
            StopFlag.__init__(self)  # what a parent has left says nothing about this process
        self._owners.add(owner)
        self._is_command = self._is_command or is_command
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        self._ending = False
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self, owner: object) -> None:
        """Give the signals back to whoever had them, when the last owner is done with them."""
        self._owners.discard(owner)
        if self._owners:
            return
        self._is_command = False
        if self.signal == "SIGINT":  # of a run that an error has ended: no business of the next one
            self.signal = None
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, signal.SIG_IGN if self._ending else handler)

    def answer(self) -> BaseException:
        """A run has saved itself, and leaves by raising what this returns.

        That is Preempted; after Ctrl-C at a prompt a KeyboardInterrupt, so that the session and its variables
        stay. Under the command the process ends now: no signal that comes late may change its exit code, so
        they are ignored from here on, and not given back by `restore`.
        """
        is_at_prompt = self.signal == "SIGINT" and hasattr(sys, "ps1") and not self._is_command
        self.signal = None
        self._ending = self._is_command
        return Interrupted() if is_at_prompt else Preempted()

    @property
    def seconds(self) -> float:
        """Since the run was asked to stop; 0 if it was not."""
        return 0.0 if self.signal is None else time.monotonic() - self._since

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ending or os.getpid() != self._pid:
            return  # a forked child has its own ways to end
        before, self.signal = self.signal, signal.Signals(number).name
        if before is None:
            self._since = time.monotonic()
        if number == signal.SIGINT:
            if before is None:
                if os.environ.get("RANK", "0") == "0":  # once for all ranks
                    _say("stopping after this step and a checkpoint; Ctrl-C again stops at once")
            elif self._is_command:
                _say("flambeau: interrupted")
                os._exit(INTERRUPTED)
            else:
                raise KeyboardInterrupt


def _say(line: str) -> None:
    """From a signal handler, where print is not safe."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{line}\n".encode())


FLAG = StopFlag()
"""The flag of this process: signals are per process, too."""
