"""What a watched process does so that another one, the doctor's, can read its stacks."""

import ctypes
import json
import time
from contextlib import suppress
from pathlib import Path

ANSWER = ".outside"
"""Ending of the doctor's file for a process: why it cannot be read; '' if it can."""
STACKS_READ = ".sampled"
"""Ending of the doctor's file for a process whose stacks have been read."""
SHORT = "short steps"
"""In the file of a window that is longer, for steps that much watching would slow down."""
WAIT = "wait_for"
_MOST_S = 10.0  # chosen
_SET_PTRACER = 0x59616D61  # PR_SET_PTRACER of Linux
_ANY = ctypes.c_ulong(-1)  # PR_SET_PTRACER_ANY


def allow_reading() -> None:
    """Let any process of this user read this one: Yama, Ubuntu's default, else lets only parents."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PTRACER, _ANY, 0, 0, 0)


def wait_for(file: Path) -> bool:
    """Wait until a file of the doctor is there; False if none comes."""
    end = time.monotonic() + _MOST_S
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def is_read_from_outside(folder: Path, process: int) -> bool:
    """Whether the doctor says that it can read the stacks of this process."""
    file = folder / f"{process}{ANSWER}"
    return wait_for(file) and json.loads(file.read_text(encoding="utf-8")) == ""
