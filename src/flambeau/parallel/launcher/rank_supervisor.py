"""Starts one rank, reports how it ends, and kills it if the launcher is gone.

Torch's agent starts one for each rank: by path, isolated and without site-packages, so that it takes 20 ms
and a few megabytes. It therefore imports the standard library alone.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SAVED = 75  # flambeau.parallel.preemption.EXIT_CODE
# The launcher forwards them to the rank; some schedulers send them to every process.
_IGNORED = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGXCPU", "SIGHUP")


def supervise(arguments: Sequence[str]) -> int:
    """Run the rank's program until the launcher releases this process.

    Arguments: process id of the launcher, its folder for these ranks, the program, its arguments.
    """
    launcher = int(arguments[0])
    folder = Path(arguments[1])
    command = arguments[2:]
    if (folder / "released").exists():  # torch's agent starts ranks that are no longer needed
        return 1
    for name in _IGNORED:
        signal.signal(getattr(signal, name), lambda *_: None)
    number = os.environ["LOCAL_RANK"]
    variables = json.loads((folder / "environment").read_text())
    variables["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{number}.error")
    variables["FLAMBEAU_RUN_FILE"] = str(folder / f"{number}.run")
    rank = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        start_new_session=True,
        preexec_fn=_die_with_parent(),  # noqa: PLW1509 - there are no threads here
    )
    names = "RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"
    started = [int(os.environ[name]) for name in names]
    _write(folder / f"{number}.started", json.dumps([*started, rank.pid, os.getpid()]))
    has_ended = False
    while os.getppid() == launcher and folder.is_dir():
        if not has_ended and (code := rank.poll()) is not None:
            has_ended = True
            if code not in (0, _SAVED):
                _kill_group(rank.pid)  # at once: the kernel may soon reuse its number
            _write(folder / f"{number}.ended", str(code))
        if has_ended and (folder / "released").exists():
            return int((folder / "released").read_text())
        time.sleep(_POLL_S)
    _kill_group(rank.pid)
    return 1


def _die_with_parent() -> Callable[[], object] | None:
    """For Popen's preexec_fn: on Linux the rank gets SIGKILL when this process ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM if all are gone
        os.killpg(pid, signal.SIGKILL)


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(f"{path.suffix}.part")
    with contextlib.suppress(FileNotFoundError):  # the launcher has given up
        part.write_text(text)
        part.rename(path)
