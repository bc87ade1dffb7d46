"""The worker processes of a sweep, as the sweep sees them."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flambeau.experiments.job import Answer, Job

_WAIT_VARIABLES = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"


@dataclass(frozen=True)
class Event:
    """An answer of a worker, or its end.

    Attributes:
        exit_code: of a worker that has ended, negative for a signal; None otherwise.
    """

    worker: "WorkerProcess"
    answer: Answer | None
    exit_code: int | None = None


class WorkerProcess:
    """A process that trains one run at a time.

    Args:
        number: from 0; chooses the GPU.
        of: how many workers this machine has.
        events: gets an `Event` for each answer, and one for the end.
    """

    def __init__(self, number: int, of: int, events: "queue.Queue[Event]") -> None:
        self.number = number
        self.job: Job | None = None
        self.key: tuple[int, int] | None = None
        self._events = events
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from flambeau.experiments.worker_main import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches the sweep, which stops its workers in order
            env=worker_environment(os.environ, number, of=of),
        )
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._read, self._wait)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_idle(self) -> bool:
        return self.job is None and self._process.poll() is None

    def give(self, key: tuple[int, int], job: Job) -> None:
        """Let it train; its answer comes as an event."""
        self.key, self.job = key, job
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end comes as an event
            self._process.stdin.write(job.to_line() + "\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        """Ask it to save and to answer, or to end if it has nothing to do."""
        self._process.send_signal(signal.SIGTERM)

    def end(self, *, patience_s: float) -> None:
        """Close its input, and end it if it does not."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError, TypeError):  # what a library prints at its end
                    self._events.put(Event(self, Answer.of_line(line)))

    def _wait(self) -> None:
        self._events.put(Event(self, None, self._process.wait()))


def worker_environment(environment: Mapping[str, str], number: int, *, of: int) -> dict[str, str]:
    """Variables of worker `number`: one of the visible GPUs, and threads that sleep when they wait.

    Spinning threads would take the time of other trainings. No result depends on it.
    """
    made = dict(environment)
    if of > 1 and made.keys().isdisjoint(_WAIT_VARIABLES):
        made["OMP_WAIT_POLICY"] = "passive"
    gpus = visible_gpus(environment)
    if of > 1 and gpus:
        made["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    return made


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a training may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [one for one in chosen.split(",") if one]
    devices = Path("/dev").glob("nvidia[0-9]*")
    return [str(number) for number, _ in enumerate(devices)]


def out_of_memory_kills() -> int:
    """How many processes Linux has killed since its start because memory ran out."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return 0
