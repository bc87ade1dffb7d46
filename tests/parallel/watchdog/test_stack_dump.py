"""Stacks are printed by a process that holds Python's lock, and a fork of it can end."""

import ctypes
import faulthandler
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flambeau.parallel.watchdog.watchdog import STACK_DUMP

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork")


def _write_to(path: Path) -> None:
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)


def test_native_code_that_keeps_the_lock_is_shown(start_ranks: Any, tmp_path: Path) -> None:
    def here_it_hangs() -> None:
        ctypes.PyDLL(None).usleep(600_000)

    def work() -> None:
        _write_to(tmp_path / "err")
        STACK_DUMP.arm(0.2)
        here_it_hangs()
        STACK_DUMP.disarm()

    assert start_ranks(1, work).results(20) == [None]
    assert "in here_it_hangs" in (tmp_path / "err").read_text()


def test_put_off_it_says_nothing(start_ranks: Any, tmp_path: Path) -> None:
    def work() -> None:
        _write_to(tmp_path / "err")
        for _ in range(10):
            STACK_DUMP.arm(0.3)
            time.sleep(0.05)
        STACK_DUMP.disarm()
        STACK_DUMP.disarm()
        time.sleep(0.4)

    assert start_ranks(1, work).results(20) == [None]
    assert (tmp_path / "err").read_text() == ""


def test_a_fork_can_end_and_a_timer_of_somebody_else_stays(
    start_ranks: Any, tmp_path: Path
) -> None:
    def work() -> int:
        _write_to(tmp_path / "err")
        STACK_DUMP.arm(100)
        child = os.fork()
        if not child:
            faulthandler.cancel_dump_traceback_later()  # what Python does at its end
            STACK_DUMP.arm(100)
            STACK_DUMP.disarm()
            os._exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        faulthandler.dump_traceback_later(0.1, file=2)
        STACK_DUMP.disarm()
        time.sleep(0.3)
        return code

    assert start_ranks(1, work).results(20) == [7]
    assert "Timeout" in (tmp_path / "err").read_text()
