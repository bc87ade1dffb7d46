"""Which rank has stalled, judged from heartbeats that are written down here."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flambeau.parallel.watchdog.heartbeat import (
    LEFT,
    Heartbeat,
    Process,
    ProgressTracker,
    frames_of,
    outlier_ranks,
    silent_ranks,
    stack_text,
    straggler_ranks,
)


def _beat(
    number: int, point: int = 0, beats: int = 0, *, over: bool = True, phase: str = "x"
) -> Heartbeat:
    return Heartbeat(number, point, beats, phase, 60.0, over)


def test_silent_is_who_wrote_nothing_and_has_not_left() -> None:
    before = [_beat(4), _beat(4), _beat(9, phase=LEFT), None, None]
    after = [_beat(5), _beat(4), _beat(9, phase=LEFT), None, _beat(1)]
    assert silent_ranks(before, after) == [1, 3]


def test_behind_is_who_has_come_least_far_and_has_no_time_left() -> None:
    assert straggler_ranks([_beat(9, 3, 2), _beat(9, 3, 1), _beat(9, 2, 8)]) == [2]
    assert straggler_ranks([_beat(9, 3, 2), _beat(9, 3, 1), None]) == [1]
    assert straggler_ranks([_beat(9, 3, 2), _beat(9, 3, 1, over=False)]) == []
    assert straggler_ranks([_beat(9, 0, 0, phase=LEFT), _beat(9, 3, 1)]) == [1]
    assert straggler_ranks([_beat(9, 3, 1), _beat(9, 3, 1)]) == [0, 1]
    assert straggler_ranks([_beat(9, phase=LEFT)]) == []


def test_of_equals_the_one_at_another_place_is_odd() -> None:
    assert outlier_ranks({0: "a", 1: "a", 2: "b", 3: "a"}) == [2]
    assert outlier_ranks({0: "a", 3: "a"}) == [0, 3]


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_time_is_counted_while_the_main_thread_stalls() -> None:
    clock = _Clock()
    progress = ProgressTracker(timeout_s=5, tick_s=10, clock=clock)
    progress.beat("forward")
    progress.update()
    clock.now_s += 6
    progress.update()
    assert progress.stalled_s == 6
    assert not progress.heartbeat().is_overdue  # the first time it may take ten times as long
    progress.reach_point()
    progress.beat("forward")
    progress.update()
    assert progress.stalled_s == 0
    clock.now_s += 6
    progress.update()
    taken = progress.heartbeat()
    assert taken.is_overdue
    assert (taken.number, taken.point, taken.beats, taken.phase) == (2, 1, 1, "forward")


def test_a_suspended_process_has_not_stalled() -> None:
    clock = _Clock()
    progress = ProgressTracker(timeout_s=5, tick_s=1, clock=clock)
    progress.update()
    clock.now_s += 100  # nothing of this process runs, not even the thread that calls `update`
    progress.update()
    assert progress.stalled_s == 1


def test_no_timeout_is_never_over() -> None:
    clock = _Clock()
    progress = ProgressTracker(timeout_s=0, tick_s=10, clock=clock)
    progress.update()
    clock.now_s += 6
    progress.update()
    assert not progress.heartbeat().is_overdue
    assert progress.allowed_s == 0


def test_a_stack_has_the_innermost_frames_the_newest_last_with_their_source() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def deep(levels: int) -> None:
        deeper(levels)

    def deeper(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            reached.set()
            go_on.wait(20)

    thread = threading.Thread(target=deep, args=(30,), daemon=True)
    thread.start()
    assert reached.wait(20)
    assert thread.ident is not None
    time.sleep(0.05)
    lines = stack_text(frames_of(thread.ident)).splitlines()
    go_on.set()
    thread.join(20)
    assert sum(line.startswith("  File") for line in lines) == 20
    assert "in wait" in lines[-2]
    assert any(__file__ in line and "in deep" in line for line in lines)
    assert "    go_on.wait(20)" in lines
    assert stack_text(frames_of(0)) == ""  # no such thread


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_what_cannot_be_read_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog's thread would end, and nothing watch the rest of the run."""
    this = Process.this("host")

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", full)
        assert not this.is_gone
    assert not this.is_gone


def test_a_process_is_gone_when_it_is_dead_though_nobody_has_waited_for_it() -> None:
    child = subprocess.Popen(["/bin/sleep", "60"])
    this = Process.this("a")
    assert not this.is_gone
    assert this.pid == os.getpid()
    process = this._replace(pid=child.pid, started=Process.this("a").started)
    assert process.is_gone  # another process with that number: it has started at another time
    started = _started(child.pid)
    process = process._replace(started=started)
    assert not process.is_gone
    child.send_signal(signal.SIGSTOP)
    assert not process.is_gone
    child.kill()
    deadline = time.monotonic() + 20
    while not process.is_gone and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.is_gone  # a zombie
    child.wait()
    assert process.is_gone


def _started(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        return stat.read().rpartition(")")[2].split()[19]
