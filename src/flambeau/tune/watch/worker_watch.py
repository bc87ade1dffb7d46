"""What the processes of a DataLoader do while their training's window is open."""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from torch.utils.data import get_worker_info

from flambeau.tune.watch.plan import write_whole
from flambeau.tune.watch.stack_sampler import StackSampler
from flambeau.tune.watch.step_watch import as_rows
from flambeau.tune.watch.thread_state import (
    OWN_THREADS,
    forget_files,
    run_times,
    threads_of_process,
)

_WRITTEN_EVERY_S = 0.5
_BUSY = (
    0.01  # share of the time that a thread has a CPU from which on it is one that computes; chosen
)
_KNOWN_AFTER_S = 10.0  # a process that is no worker by then will be none


def watch_worker(folder: Path, parent: int) -> None:
    """Look at this process if it turns out to be a worker; its results are written all the time.

    Args:
        folder: of the trial.
        parent: process number of the training that it reads for.
    """
    forget_files()
    main = threading.main_thread()
    threading.Thread(
        target=_watch, args=(folder, parent, main), name=OWN_THREADS, daemon=True
    ).start()


def _watch(folder: Path, parent: int, main: threading.Thread) -> None:
    began = time.monotonic()
    while get_worker_info() is None:
        if time.monotonic() - began > _KNOWN_AFTER_S:
            return
        time.sleep(0.02)
    window, file = folder / f"{parent}.window", folder / f"{os.getpid()}.worker.json"
    is_open = False

    def threads() -> dict[str, tuple[int, int]]:
        found = {
            thread.name: (thread.ident or 0, thread.native_id or 0)
            for thread in threading.enumerate()
            if thread.name.startswith("QueueFeederThread")
        }
        return {"main": (main.ident or 0, main.native_id or 0), **found}

    sampler = StackSampler(threads, lambda: is_open)
    sampler.start()
    opened, times_then = 0.0, run_times()
    while sampler.is_alive():
        was_open, is_open = is_open, window.exists()
        if is_open and not was_open:
            opened, times_then = time.monotonic(), run_times()
        if is_open or was_open:
            told = {
                "seen": as_rows(dict(sampler.seconds)),
                "process_threads": threads_of_process(),
                "busy_threads": busy_threads(times_then, run_times(), time.monotonic() - opened),
            }  # fmt: skip
            write_whole(file, told)
        time.sleep(_WRITTEN_EVERY_S if is_open else 0.1)


def busy_threads(then: Mapping[int, float], now: Mapping[int, float], elapsed_s: float) -> int:
    """How many threads have computed in a time; pools that libraries have made and nobody uses do not count.

    Args:
        then, now: seconds of CPU by thread, see `run_times`.
        elapsed_s: between them.
    """
    used = (seconds - then.get(thread, 0.0) for thread, seconds in now.items())
    return sum(seconds > _BUSY * elapsed_s for seconds in used)
