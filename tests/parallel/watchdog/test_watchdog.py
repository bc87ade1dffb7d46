"""Ranks that are stopped, killed, stuck or wrong, each in a process of its own."""

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from flambeau.parallel.watchdog.failure_detector import FailureDetector, Member, Pace
from flambeau.parallel.watchdog.heartbeat import Heartbeat, ProgressTracker
from flambeau.parallel.watchdog.watchdog import LOST_PEER, Watchdog

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and /proc")

_PACE = Pace(poll_s=0.05, beat_s=0.2, grace_s=0.3, store_s=1.5)
_STALL_S = 0.8
_FOREVER_S = 50.0


class _Store:
    """A TCPStore in a process of its own, so that it can be killed."""

    def __init__(self) -> None:
        receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
        self.process = multiprocessing.get_context("fork").Process(
            target=self._serve, args=(sender,)
        )
        self.process.start()
        self.port = receiver.recv()

    @staticmethod
    def _serve(sender: Any) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        sender.send(store.port)
        time.sleep(_FOREVER_S)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@pytest.fixture
def store() -> Iterator[_Store]:
    store = _Store()
    yield store
    store.process.kill()
    store.process.join()


class _Rank:
    """What a test's ranks have: a watch, and a file to which everything that is said is appended."""

    def __init__(
        self,
        folder: Path,
        port: int,
        *,
        stall_timeout_s: float = 60,
        host: str = "a",
        store_rank: int | None = None,
    ) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder, self.asked = folder, None
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error-{self.rank}.json")
        sys.excepthook = lambda kind, error, trace: self.say(f"TRACEBACK of {self.rank} {error!r}")
        self.watch = Watchdog(
            Member(self.rank, self.world, host, store_rank),
            connect=lambda: TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5)),
            prefix="start-1",
            stall_timeout_s=stall_timeout_s,
            stop_signal=lambda: self.asked,
            say=self.say,
            pace=_PACE,
        )
        self.watch.start()

    def wait_for_all(self, port: int) -> None:
        """Until each rank's watchdog knows the others."""
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5))
        while not self.watch._detector._peers:
            time.sleep(0.01)
        store.add("ready", 1)
        while store.add("ready", 0) < self.world:
            time.sleep(0.01)

    def say(self, text: str) -> None:
        with (self.folder / "said").open("a") as file:
            file.write(f"{text}\n")

    def steps(
        self, number: int, *, before: Callable[[int], None] = lambda step: None
    ) -> str | None:
        """Steps with a collective each, until all stop."""
        for step in range(number):
            self.watch.beat("waiting for data")
            before(step)
            self.watch.beat("forward")
            dist.all_reduce(torch.ones(1))
            if signal_name := self.watch.reach_point():
                return f"{signal_name} at {step}"
        return None

    @contextlib.contextmanager
    def as_script(self) -> Iterator[None]:
        """Errors end this process as they end a script."""
        try:
            yield
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)


def _said(folder: Path) -> str:
    return (folder / "said").read_text() if (folder / "said").exists() else ""


def _error(folder: Path, rank: int) -> tuple[str, int]:
    message = json.loads((folder / f"error-{rank}.json").read_text())["message"]
    return message["message"], int(message["extraInfo"]["timestamp"])


# Where to stop.


@pytest.mark.parametrize("asked", [0, 2])
def test_asked_on_one_rank_all_stop_at_the_same_step(
    start_ranks: Any, store: _Store, tmp_path: Path, asked: int
) -> None:
    def work() -> tuple[str | None, int]:
        rank = _Rank(tmp_path, store.port)
        num_reduced = 0

        def before(step: int) -> None:
            nonlocal num_reduced
            num_reduced = step + 1
            time.sleep(random.Random(step * 3 + rank.rank).random() / 100)
            if rank.rank == asked and step == 20:
                rank.asked = "SIGTERM"

        stopped = rank.steps(1000, before=before)
        rank.watch.stop()
        return stopped, num_reduced

    results = start_ranks(3, work, group=True).results(30)
    assert results[0][0] is not None
    assert results[0][0].startswith("SIGTERM at ")
    assert results == [results[0]] * 3
    assert 20 < results[0][1] < 60
    assert _said(tmp_path) == ""


def test_an_evaluation_is_cut_short_on_all_ranks(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> tuple[str | None, bool]:
        rank = _Rank(tmp_path, store.port)
        rank.steps(3)
        rank.watch.beat("evaluating")
        start = time.monotonic()
        while not rank.watch.stops_next and time.monotonic() < start + 20:
            rank.watch.beat("evaluating")
            time.sleep(0.01)
            if rank.rank == 1 and time.monotonic() > start + 0.3:
                rank.asked = "SIGUSR1"
        dist.all_reduce(torch.ones(1))
        stopped = rank.watch.reach_point()
        rank.watch.stop()
        return stopped, time.monotonic() < start + 10

    assert start_ranks(3, work, group=True).results(30) == [("SIGUSR1", True)] * 3


def test_a_run_that_ends_is_not_stopped_by_those_that_have_left(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> list[str | None]:
        rank = _Rank(tmp_path, store.port)
        if rank.rank == 0:
            rank.watch.reach_point()
            rank.watch.stop()
            os._exit(0)  # gone, but not killed
        time.sleep(0.6)
        rank.asked = "SIGTERM"
        time.sleep(0.3)
        answers = [rank.watch.reach_point()]
        rank.watch.stop()
        return answers

    job = start_ranks(3, work)
    assert job.codes(30) == [0, 0, 0]
    assert _said(tmp_path) == ""


def test_one_rank_alone_needs_no_store(start_ranks: Any, tmp_path: Path) -> None:
    def work() -> list[Any]:
        rank = _Rank(tmp_path, 1)
        answers: list[Any] = [rank.watch.reach_point(), rank.watch.stops_next]
        rank.asked = "SIGINT"
        answers += [rank.watch.stops_next, rank.watch.reach_point()]
        rank.watch.stop()
        rank.watch.stop()
        return [*answers, threading.active_count()]

    assert start_ranks(1, work).results(20) == [[None, False, True, "SIGINT", 1]]


# Which rank has stalled.


def _sleep_in_main(rank: _Rank) -> None:
    time.sleep(_FOREVER_S)


def _deadlock(rank: _Rank) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _stuck_data(rank: _Rank) -> None:
    multiprocessing.get_context("fork").SimpleQueue().get()


@pytest.mark.parametrize("stuck", [_sleep_in_main, _deadlock, _stuck_data])
def test_a_stalled_rank_is_named_with_its_stack(
    start_ranks: Any, store: _Store, tmp_path: Path, stuck: Callable[[_Rank], None]
) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port, stall_timeout_s=_STALL_S)

        def before(step: int) -> None:
            if rank.rank == 1 and step == 5:
                stuck(rank)

        with rank.as_script():
            rank.steps(1000, before=before)

    job = start_ranks(3, work, group=True)
    assert job.codes(30) == [LOST_PEER, 1, LOST_PEER]
    said, pid = _said(tmp_path), job.processes[1].pid
    cause = (
        f"rank 1 of 3 (host a, process {pid}) has made no progress for 1 s while waiting for data"
    )
    assert said.startswith(f"flambeau: {cause}; where rank 1 is, newest call last:\n  File ")
    assert f"in {stuck.__name__}" in said
    assert said.count("flambeau:") == 1
    assert "TRACEBACK" not in said
    causes, times = zip(*(_error(tmp_path, rank) for rank in range(3)), strict=True)
    assert set(causes) == {cause}
    assert times[1] < times[0] == times[2]


@pytest.mark.parametrize("native", [False, True])
def test_a_process_that_cannot_run_is_named_with_its_last_stack_and_killed(
    start_ranks: Any, store: _Store, tmp_path: Path, native: bool
) -> None:
    def here_it_stops() -> None:
        time.sleep(0.5)  # a heartbeat is written meanwhile
        if native:
            ctypes.PyDLL(None).sleep(int(_FOREVER_S))  # with Python's lock
        else:
            os.kill(os.getpid(), signal.SIGSTOP)

    def work() -> None:
        rank = _Rank(tmp_path, store.port, stall_timeout_s=_STALL_S)

        def before(step: int) -> None:
            if rank.rank == 2 and step == 5:
                here_it_stops()

        with rank.as_script():
            rank.steps(1000, before=before)

    job = start_ranks(3, work, group=True)
    assert job.codes(30) == [LOST_PEER, LOST_PEER, -signal.SIGKILL]
    said = _said(tmp_path)
    assert said.startswith("flambeau: rank 2 of 3 (host a, process ")
    assert "has been silent for 1 s, last seen waiting for data; " in said
    assert "in here_it_stops" in said
    assert said.count("flambeau:") == 1


def test_a_silent_rank_is_told_by_how_far_the_others_are() -> None:
    """Between two heartbeats there may be many steps: the last one is not where the rank is."""
    progress = ProgressTracker(timeout_s=1, tick_s=1)
    detector = FailureDetector(Member(0, 2, "a"), progress, Pace())
    last = Heartbeat(1, 0, 0, "starting", 0.0, False)
    for point, told in [
        (5, "starting; rank 0, which waits for it, is 5 steps further (in the forward pass)"),
        (1, "starting; rank 0, which waits for it, is 1 step further (in the forward pass)"),
        (0, "starting"),
    ]:
        own = Heartbeat(9, point, 2, "in the forward pass", 9.0, True)
        assert detector._silence_text([1], last, own).endswith(f"for 4 s, last seen {told}")


def test_of_ranks_that_have_come_equally_far_the_odd_one_is_named(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def in_a_hook() -> None:
        time.sleep(_FOREVER_S)

    def work() -> None:
        rank = _Rank(tmp_path, store.port, stall_timeout_s=_STALL_S)
        with rank.as_script():
            rank.steps(3)
            rank.watch.beat("forward")
            if rank.rank == 0:
                in_a_hook()
            dist.all_reduce(torch.ones(1))

    assert start_ranks(3, work, group=True).codes(30) == [1, LOST_PEER, LOST_PEER]
    assert "rank 0 of 3" in _said(tmp_path)
    assert "in in_a_hook" in _said(tmp_path)


def test_what_is_slow_the_first_time_is_no_stall(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> str | None:
        rank = _Rank(tmp_path, store.port, stall_timeout_s=0.3)

        def before(step: int) -> None:
            if step == 0 and rank.rank == 0:
                time.sleep(1.5)

        stopped = rank.steps(4, before=before)
        rank.watch.stop()
        return stopped

    assert start_ranks(2, work, group=True).results(20) == [None, None]
    assert _said(tmp_path) == ""


def test_a_job_that_was_suspended_goes_on(start_ranks: Any, store: _Store, tmp_path: Path) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port, stall_timeout_s=_STALL_S)

        def before(step: int) -> None:
            time.sleep(0.02)

        rank.steps(60, before=before)
        rank.watch.stop()

    job = start_ranks(2, work, group=True)
    time.sleep(0.7)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in range(2):
            job.kill(rank, number)
        store.kill(number)
        time.sleep(2 * (number == signal.SIGSTOP))
    assert job.results(20) == [None, None]
    assert _said(tmp_path) == ""


def test_one_stalled_rank_alone_ends(start_ranks: Any, tmp_path: Path) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, 1, stall_timeout_s=0.3)
        for phase in ("forward", "backward", "forward"):
            rank.watch.beat(phase)
        _sleep_in_main(rank)

    assert start_ranks(1, work).codes(30) == [1]
    assert "rank 0 of 1" in _said(tmp_path)
    assert "in _sleep_in_main" in _said(tmp_path)


def test_without_a_timeout_nothing_is_a_stall(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port, stall_timeout_s=0)
        rank.watch.beat("forward")
        rank.watch.beat("forward")
        time.sleep(1.5)
        rank.watch.stop()

    assert start_ranks(2, work).results(15) == [None, None]
    assert _said(tmp_path) == ""


# Which rank is gone.


@pytest.mark.parametrize("collective", [True, False])
def test_a_killed_rank_is_named_by_its_neighbour(
    start_ranks: Any, store: _Store, tmp_path: Path, collective: bool
) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port)

        def before(step: int) -> None:
            time.sleep(0.01)
            if step == 60:
                if rank.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if not collective:
                    time.sleep(_FOREVER_S)

        with rank.as_script():
            rank.steps(1000, before=before)

    job = start_ranks(3, work, group=True)
    assert job.codes(30) == [LOST_PEER, -signal.SIGKILL, LOST_PEER]
    pid = job.processes[1].pid
    assert _said(tmp_path) == f"flambeau: rank 1 of 3 (host a, process {pid}) was killed\n"
    assert _error(tmp_path, 0)[0] == f"rank 1 of 3 (host a, process {pid}) was killed"


def test_one_rank_of_each_machine_says_it(start_ranks: Any, store: _Store, tmp_path: Path) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port, host="aabb"[int(os.environ["RANK"])])
        rank.wait_for_all(store.port)
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdout = (tmp_path / f"out-{rank.rank}").open("w")
        print("not written yet")
        time.sleep(_FOREVER_S)

    job = start_ranks(4, work)
    assert job.codes(30) == [LOST_PEER, -signal.SIGKILL, LOST_PEER, LOST_PEER]
    line = f"flambeau: rank 1 of 4 (host a, process {job.processes[1].pid}) was killed\n"
    assert _said(tmp_path) == line * 2
    assert (tmp_path / "out-3").read_text() == "not written yet\n"


def test_a_rank_that_nobody_sees_is_missed_by_those_that_it_was_connected_to(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port, host="ab"[int(os.environ["RANK"]) // 2])

        def before(step: int) -> None:
            if rank.rank == 2 and step == 60:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)

        with rank.as_script():
            rank.steps(1000, before=before)

    job = start_ranks(3, work, group=True)
    assert job.codes(30) == [LOST_PEER, LOST_PEER, -signal.SIGKILL]
    said = _said(tmp_path)
    assert said.startswith("flambeau: rank 2 of 3 (host b, process ")
    assert "has been silent for 1 s, last seen " in said
    assert said.count("flambeau:") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_the_store_ends_the_job(
    start_ranks: Any, store: _Store, tmp_path: Path, number: signal.Signals
) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port)
        rank.wait_for_all(store.port)
        (tmp_path / f"ready-{rank.rank}").touch()
        with rank.as_script():
            rank.steps(100000, before=lambda step: time.sleep(0.005))

    job = start_ranks(3, work, group=True)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("ready-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    store.kill(number)
    assert job.codes(30) == [LOST_PEER] * 3
    reason = "" if number == signal.SIGKILL else "no answer for 2 s"
    said = _said(tmp_path)
    assert said.startswith(
        f"flambeau: lost the rendezvous store at 127.0.0.1:{store.port}: {reason}"
    )
    assert said.count("flambeau:") == 1
    assert "TRACEBACK" not in said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_takes_the_store_with_it_is_named(
    start_ranks: Any, tmp_path: Path, number: signal.Signals
) -> None:
    def work() -> None:
        rank = _Rank(
            tmp_path, int(os.environ["MASTER_PORT"]), store_rank=0
        )  # torch's rank 0 serves it

        def here_it_ends(step: int) -> None:
            if rank.rank == 0 and step == 60:
                time.sleep(0.5)
                os.kill(os.getpid(), number)
            time.sleep(0.01)

        with rank.as_script():
            rank.steps(1000, before=here_it_ends)

    job = start_ranks(3, work, group=True)
    deadline = time.monotonic() + 60
    while any(process.is_alive() for process in job.processes[1:]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [process.exitcode for process in job.processes[1:]] == [LOST_PEER] * 2
    assert job.processes[0].exitcode in (-signal.SIGKILL, None)
    said, who = _said(tmp_path), f"flambeau: rank 0 of 3 (host a, process {job.processes[0].pid})"
    assert said.count("flambeau:") == 1
    if number == signal.SIGKILL:
        assert said == f"{who} was killed\n"
    else:
        assert said.startswith(
            f"{who}, which serves the store, is gone or stopped: lost the rendez"
        )
        assert "in here_it_ends" in said


# Which rank has an error.


def test_an_error_of_one_rank_has_one_traceback(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port)

        def before(step: int) -> None:
            if rank.rank == 1 and step == 5:
                raise ValueError("no such\nclass")

        with rank.as_script():
            rank.steps(1000, before=before)

    job = start_ranks(3, work, group=True)
    assert job.codes(30) == [LOST_PEER, 1, LOST_PEER]
    who = f"rank 1 of 3 (host a, process {job.processes[1].pid})"
    assert _said(tmp_path).splitlines() == [
        "TRACEBACK of 1 ValueError('no such\\nclass')",
        f"flambeau: {who} failed: ValueError: no such",
    ]
    causes, times = zip(*(_error(tmp_path, rank) for rank in range(3)), strict=True)
    assert set(causes) == {f"{who} failed: ValueError: no such"}
    assert times[1] < times[0]
    assert times[1] < times[2]


def test_the_same_error_of_all_ranks_has_one_traceback(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port)
        with rank.as_script():
            rank.steps(3)
            raise ValueError("wrong")

    assert start_ranks(3, work, group=True).codes(30) == [1, 1, 1]
    assert [line[:9] for line in _said(tmp_path).splitlines()] == ["TRACEBACK", "flambeau:"]


def test_different_errors_are_all_printed(start_ranks: Any, store: _Store, tmp_path: Path) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port)
        with rank.as_script():
            rank.steps(3)
            raise ValueError(f"wrong in its own way: {rank.rank}")

    assert start_ranks(2, work, group=True).codes(30) == [1, 1]
    assert _said(tmp_path).count("TRACEBACK") == 2


def test_an_error_of_torch_that_is_no_loss_is_the_ranks_own(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port)
        with rank.as_script():
            rank.steps(3)
            if rank.rank == 0:
                raise RuntimeError("[gloo/transport] nobody else has a problem")
            time.sleep(_FOREVER_S)

    assert start_ranks(2, work, group=True).codes(30) == [1, LOST_PEER]
    assert "TRACEBACK of 0" in _said(tmp_path)


def test_a_mistake_that_all_ranks_find_is_printed_once(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> bool:
        rank = _Rank(tmp_path, store.port)
        return rank.watch.fail("no images in this folder", 2)

    assert sorted(start_ranks(3, work).results(15)) == [False, False, True]
    assert _said(tmp_path) == ""
    assert "failed: no images in this folder" in _error(tmp_path, 0)[0]


def test_a_failed_rank_that_does_not_end_is_ended_with_its_code(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port)
        if rank.rank == 0:
            rank.watch.fail("no images in this folder", 2)
        time.sleep(_FOREVER_S)

    assert start_ranks(2, work).codes(30) == [2, LOST_PEER]


def test_a_script_that_ends_too_early_is_named(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, store.port)
        with rank.as_script():
            rank.steps(3)
            if rank.rank == 1:
                rank.watch._at_exit()  # what the interpreter calls; a forked rank has none
                os._exit(3)
            rank.steps(1000)

    assert start_ranks(2, work, group=True).codes(30) == [LOST_PEER, 3]
    assert _said(tmp_path).endswith(" failed: its script ended before the run did\n")
    assert _said(tmp_path).count("flambeau:") == 1


# What it must not disturb.


def test_a_forked_child_has_no_watch_and_ends(
    start_ranks: Any, store: _Store, tmp_path: Path
) -> None:
    def work() -> list[int]:
        rank = _Rank(tmp_path, store.port)
        codes = []
        for _ in range(25):  # at any moment of the watch
            rank.watch.beat("forward")
            child = os.fork()
            if not child:
                with rank.as_script():
                    rank.watch.beat("in the child")
                    rank.watch.reach_point()
                    rank.watch.fail("a worker's own business", 5)
                    rank.watch.stop()
                    faulthandler.cancel_dump_traceback_later()  # what Python does at its end
                    os._exit(7)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            time.sleep(0.01)
        rank.watch.stop()
        return codes

    assert start_ranks(2, work).results(120) == [[7] * 25] * 2  # 50 forks of a large process
    assert _said(tmp_path) == ""


def test_start_and_stop_leave_the_process_as_it_was(start_ranks: Any, tmp_path: Path) -> None:
    def work() -> tuple[bool, bool, int]:
        handlers = [signal.getsignal(number) for number in signal.Signals]
        rank = _Rank(tmp_path, 1)
        hook = rank.watch._hook
        rank.watch.stop()
        same = [signal.getsignal(number) for number in signal.Signals] == handlers
        return sys.excepthook is hook, same, threading.active_count()

    assert start_ranks(1, work).results(20) == [(True, True, 1)]


def test_nobody_is_waited_for_who_does_not_read_what_is_said(
    start_ranks: Any, tmp_path: Path
) -> None:
    def work() -> None:
        rank = _Rank(tmp_path, 1, stall_timeout_s=0.2)
        rank.watch._say = lambda text: time.sleep(_FOREVER_S)
        for phase in ("forward", "backward", "forward"):
            rank.watch.beat(phase)
        time.sleep(_FOREVER_S)

    assert start_ranks(1, work).codes(30) == [1]
