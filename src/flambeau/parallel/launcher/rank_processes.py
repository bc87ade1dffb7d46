"""The ranks on this machine as processes: who has ended and how, and how to end the others."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping

from flambeau.parallel.preemption import EXIT_CODE


class RankProcesses:
    """The ranks of one start, each the head of a session of its own.

    Attributes:
        codes: exit codes of those who have ended, by their number on this machine; negative for a signal.
    """

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._is_starting = False
        self._late_signals: list[signal.Signals] = []

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Meanwhile signals are kept for the ranks that are not there yet."""
        self._is_starting = True
        try:
            yield
        finally:
            self._is_starting = False

    def adopt(self, processes: Mapping[int, "subprocess.Popen[bytes]"]) -> None:
        """Look after these from now on."""
        self.codes, self._processes = {}, dict(processes)
        self._is_starting = False
        while self._late_signals:
            self.pass_on(self._late_signals.pop(0))

    @property
    def local_ranks(self) -> list[int]:
        """Their numbers on this machine."""
        return list(self._processes)

    @property
    def is_running(self) -> bool:
        """Whether one of them had not ended when `reap` looked."""
        return len(self.codes) < len(self._processes)

    def reap(self) -> list[int]:
        """The numbers of those who have ended since the last look."""
        new = []
        for rank, process in self._processes.items():
            if rank not in self.codes and (code := process.poll()) is not None:
                self.codes[rank] = code
                new.append(rank)
                if code not in (0, EXIT_CODE):
                    _kill_group(process)  # at once: the kernel may soon give its number to others
        return new

    def pass_on(self, number: signal.Signals) -> bool:
        """Send a signal to each rank, not to its data workers; False if there are none."""
        if self._is_starting:
            self._late_signals.append(number)
            return True
        alive = [process for process in self._processes.values() if process.poll() is None]
        for process in alive:
            process.send_signal(number)
        return bool(alive)

    def kill(self) -> None:
        """End all ranks at once, and what they have started."""
        for process in self._processes.values():
            if process.poll() is None:
                _kill_group(process)

    def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL for those who still live after a while."""
        deadline = time.monotonic() + grace_s
        self.pass_on(signal.SIGTERM)
        self.reap()
        while self.is_running and time.monotonic() < deadline:
            time.sleep(0.01)
            self.reap()
        self.kill()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                process.wait(5)
        self.reap()


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL for a rank and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM if all are gone
        os.killpg(process.pid, signal.SIGKILL)
