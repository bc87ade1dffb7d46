"""The ranks on this machine, as their supervisors report them, and how to end them."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flambeau.parallel.watchdog.heartbeat import state_and_start

_POLL_S = 0.02


class Rank(NamedTuple):
    """A started rank: its number and machine in the job, and its `rank_supervisor` process."""

    rank: int
    world: int
    node: int
    num_nodes: int
    pid: int
    supervisor: int


class RankProcesses:
    """The ranks of one start, which report through `folder`.

    `started` and `codes` (exit codes, negative for a signal) are by number on this machine.
    """

    def __init__(self, folder: Path, num_ranks: int, environment: Mapping[str, str]) -> None:
        folder.mkdir()
        (folder / "environment").write_text(json.dumps(dict(environment)))
        self.folder = folder
        self.started: dict[int, Rank] = {}
        self.codes: dict[int, int] = {}
        self._num_ranks = num_ranks
        self._signals: list[signal.Signals] = []
        self._num_delivered = [0] * num_ranks

    @property
    def run(self) -> Path | None:
        """The ranks' run folder, if the first one is here and has reported it."""
        for number in self.started:
            with contextlib.suppress(FileNotFoundError):
                return Path(os.fsdecode((self.folder / f"{number}.run").read_bytes()))
        return None

    @property
    def is_running(self) -> bool:
        """Whether one of them had not ended, or not started, at the last `poll`."""
        return len(self.codes) < self._num_ranks

    def poll(self) -> None:
        for number in range(self._num_ranks):
            if number not in self.started and (text := self._read(f"{number}.started")):
                self.started[number] = Rank(*json.loads(text))
            if number in self.started and number not in self.codes:
                is_gone = _is_gone(self.started[number].supervisor)
                if (text := self._read(f"{number}.ended")) or is_gone:
                    self.codes[number] = int(text or -signal.SIGKILL)
        self._deliver()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each rank, without data workers; later ranks get it at their start."""
        self._signals.append(number)
        self._deliver()

    def kill(self) -> None:
        for number in self._alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.started[number].pid, signal.SIGKILL)
            if _is_stopped(self.started[number].supervisor):  # it would never report the end
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.started[number].supervisor, signal.SIGKILL)

    def end(self, grace_s: float) -> None:
        """SIGTERM, and after the grace time SIGKILL."""
        deadline = time.monotonic() + grace_s
        self.send(signal.SIGTERM)
        self._wait_until(deadline)
        self.kill()
        self._wait_until(time.monotonic() + 5)  # longer if stuck in the kernel

    def stopped(self) -> list[int]:
        """The ranks that SIGSTOP or the like has stopped, or their supervisors."""
        return [
            number
            for number in self._alive()
            if _is_stopped(self.started[number].pid) or _is_stopped(self.started[number].supervisor)
        ]

    def release(self, code: int) -> None:
        """Let the supervisors end, with an exit code for torch's agent."""
        part = self.folder / "released.part"
        part.write_text(str(code))
        part.rename(self.folder / "released")

    def _alive(self) -> list[int]:
        return [number for number in self.started if number not in self.codes]

    def _wait_until(self, deadline: float) -> None:
        self.poll()
        while self._alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self.poll()

    def _deliver(self) -> None:
        for number in self._alive():
            for sent in self._signals[self._num_delivered[number] :]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.started[number].pid, sent)
            self._num_delivered[number] = len(self._signals)

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return ""


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _is_stopped(pid: int) -> bool:
    """False where there is no /proc."""
    try:
        return state_and_start(pid)[0] == "T"  # not "t", which is that of a debugger
    except OSError:
        return False
