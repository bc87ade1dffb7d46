"""What DataLoader workers do while the window of their trainer is open."""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from torch.utils.data import get_worker_info

from flambeau.tune.watch.interrupt_sampler import sampler_of
from flambeau.tune.watch.plan import write_whole
from flambeau.tune.watch.step_watch import as_rows
from flambeau.tune.watch.thread_state import (
    WATCH_THREADS,
    forget_files,
    run_times,
    threads_of_process,
)

_WRITTEN_EVERY_S = 0.5
_BUSY = 0.01  # a thread with a larger share of CPU time counts as computing; chosen
_KNOWN_AFTER_S = 10.0  # a process that is no worker by then never becomes one


def watch_worker(folder: Path, parent: int, *, interrupts: bool = True) -> None:
    """Watch this process if it turns out to be a worker; its results are written twice per second."""
    forget_files()
    watch = _WorkerWatch(folder, parent, interrupts=interrupts)
    threading.Thread(target=watch.run, name=WATCH_THREADS, daemon=True).start()


class _WorkerWatch:
    """Made in the main thread, in which a worker reads; `run` in another one."""

    def __init__(self, folder: Path, parent: int, *, interrupts: bool) -> None:
        self._window = folder / f"{parent}.window"
        self._file = folder / f"{os.getpid()}.worker.json"
        self._is_open = False
        self._sampler = sampler_of(_threads_of_worker, lambda: self._is_open, interrupts=interrupts)

    def run(self) -> None:
        began = time.monotonic()
        while get_worker_info() is None:
            if time.monotonic() - began > _KNOWN_AFTER_S:
                return
            time.sleep(0.02)
        self._sampler.start()
        opened = 0.0
        times_then = run_times()
        while True:
            was_open, self._is_open = self._is_open, self._window.exists()
            if self._is_open and not was_open:
                opened = time.monotonic()
                times_then = run_times()
            if self._is_open or was_open:
                record = {
                    "process": os.getpid(),
                    "seen": as_rows(dict(self._sampler.seconds)),
                    "process_threads": threads_of_process(),
                    "busy_threads": busy_threads(
                        times_then, run_times(), time.monotonic() - opened
                    ),
                }
                write_whole(self._file, record)
            time.sleep(_WRITTEN_EVERY_S if self._is_open else 0.1)


def _threads_of_worker() -> dict[str, tuple[int, int]]:
    main = threading.main_thread()
    feeders = {
        thread.name: (thread.ident or 0, thread.native_id or 0)
        for thread in threading.enumerate()
        if thread.name.startswith("QueueFeederThread")
    }
    return {"main": (main.ident or 0, main.native_id or 0), **feeders}


def busy_threads(then: Mapping[int, float], now: Mapping[int, float], elapsed_s: float) -> int:
    """How many threads have computed, by `run_times` before and after, without idle ones."""
    used = (seconds - then.get(thread, 0.0) for thread, seconds in now.items())
    return sum(seconds > _BUSY * elapsed_s for seconds in used)
