"""A flag that signals set to ask a run to stop; the run checks it between steps. No torch here."""

import os
import re
import signal
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any, Final

from flambeau.errors import InputError

EXIT_CODE: Final = 75
"""EX_TEMPFAIL of sysexits.h: the same command, started again, resumes."""

OUT_OF_MEMORY: Final = 71
"""EX_OSERR of sysexits.h: all ranks, started again, train in smaller micro-batches."""

FAULTY_MACHINE: Final = 70
"""EX_SOFTWARE of sysexits.h, which nothing else here uses: this machine computes something wrong."""

INTERRUPTED: Final = 130
"""The exit code that shells show for a process ended by SIGINT."""

PAUSE_AFTER: Final = "FLAMBEAU_PAUSE_AFTER"
"""Environment variable: epochs after which a run stops as if it had got SIGTERM, unless it ends there."""

_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGXCPU", "SIGINT")
    if hasattr(signal, name)
]


def pause_after() -> int | None:
    """The epochs of PAUSE_AFTER, if set; InputError: no number above 0."""
    text = os.environ.get(PAUSE_AFTER, "")
    if text and not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise InputError(f"{PAUSE_AFTER} must be a number of epochs above 0, got {text!r:.50}")
    return int(text) if text else None


class Preempted(SystemExit):
    """The run was asked to stop and has saved itself; leaves the process with exit code 75."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class MicroBatchHalved(SystemExit):
    """Memory ran out in one of several ranks; leaves the process with exit code 71."""

    def __init__(self) -> None:
        super().__init__(OUT_OF_MEMORY)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at a prompt or in a notebook has stopped a run, which has saved itself."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback, which would be useless."""
        return ["interrupted"]


class StopFlag:
    """Set by SIGTERM, SIGUSR1, SIGXCPU or SIGINT; a second SIGINT stops at once.

    In the command `flambeau` that ends the process, as files being written survive a kill; elsewhere (a
    notebook) KeyboardInterrupt is raised, which could get lost in a `__del__`.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ending = False
        self._is_command = False
        self._pid = os.getpid()

    def install(self, owner: object, *, is_command: bool = False) -> bool:
        """Install the handlers, if in the main thread. Whether signals stop a run of this thread.

        `owner` calls `restore` later. `is_command`: the command `flambeau`, which ends with its run.
        """
        if os.getpid() != self._pid:
            StopFlag.__init__(self)  # drop the state of the parent process
        self._owners.add(owner)
        self._is_command = self._is_command or is_command
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._previous:
            self._ending = False
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return is_main

    def restore(self, owner: object) -> None:
        """Restore the previous handlers once the last owner is done.

        In another thread than the main one, the next signal does it.
        """
        self._owners.discard(owner)
        if self._owners or threading.current_thread() is not threading.main_thread():
            return
        self._is_command = False
        if self.signal == "SIGINT":  # for a run that an error has ended, not for the next one
            self.signal = None
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, signal.SIG_IGN if self._ending else handler)

    def answer(self) -> BaseException:
        """The exception with which a run that has saved itself leaves.

        That is Preempted, or after Ctrl-C at a prompt KeyboardInterrupt, which keeps the session. The command
        ignores later signals, which would change its exit code.
        """
        is_at_prompt = self.signal == "SIGINT" and hasattr(sys, "ps1") and not self._is_command
        self.signal = None
        self._ending = self._is_command
        return Interrupted() if is_at_prompt else Preempted()

    @property
    def seconds(self) -> float:
        """Seconds since the run was asked to stop; 0 if it was not."""
        return 0.0 if self.signal is None else time.monotonic() - self._since

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ending or os.getpid() != self._pid:
            return  # a forked child ends in its own way
        if not self._owners:  # the last was dropped in another thread
            self.restore(self)
            signal.raise_signal(number)
            return
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
    """Write from a signal handler, where print is not safe."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{line}\n".encode())


FLAG = StopFlag()
"""The only one of this process, as signals are per process."""
