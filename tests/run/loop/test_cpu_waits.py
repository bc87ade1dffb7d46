"""A thread that waits for a CPU is seen, and the trial on one thread leaves everything as it was."""

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from flambeau.run.loop import cpu_waits, progress_bar
from flambeau.run.loop.cpu_waits import CpuWaits, speed_of_one_thread, wait_remark
from flambeau.run.loop.progress_bar import ProgressBar


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts it")
def test_a_cpu_that_is_shared_is_waited_for() -> None:
    cpus = os.sched_getaffinity(0)
    busy = f"import os; os.sched_setaffinity(0, [{min(cpus)}])\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as other:
        try:
            os.sched_setaffinity(0, {min(cpus)})
            time.sleep(0.5)  # until it runs
            waits = CpuWaits()
            until = time.process_time() + 0.3
            while time.process_time() < until:
                pass
            assert waits.share() > 0.2
        finally:
            os.sched_setaffinity(0, cpus)
            other.kill()


def test_a_trial_leaves_threads_and_generators_as_they_are() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        assert speed_of_one_thread() > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts it")
def test_cpus_of_other_programs_are_counted_and_those_of_children_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child's CPU seconds are this training's, and the same seconds of another program are not."""
    child = [sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass\ninput()"]
    before = cpu_waits._own_s()
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        until = time.monotonic() + 60
        while cpu_waits._own_s() - before < 1 and time.monotonic() < until:
            time.sleep(0.05)
        while_it_runs = cpu_waits._own_s() - before
        other.communicate(b"\n")
    assert while_it_runs >= 1
    assert cpu_waits._own_s() - before >= 1  # also when it has ended

    monkeypatch.setattr(cpu_waits, "usable_cpus", os.cpu_count)
    monkeypatch.setattr(cpu_waits, "_own_s", lambda: 5.0)
    monkeypatch.setattr(cpu_waits, "_busy_s", lambda: 100.0)
    waits = CpuWaits()
    waits._began -= 1000.0
    monkeypatch.setattr(cpu_waits, "_own_s", lambda: 405.0)
    monkeypatch.setattr(cpu_waits, "_busy_s", lambda: 2000.0)
    assert waits.others_cpus() == pytest.approx(1.5, abs=0.01)
    monkeypatch.setattr(cpu_waits, "usable_cpus", lambda: os.cpu_count() + 1)
    assert waits.others_cpus() is None  # others may run on CPUs that this process may not use
    monkeypatch.setattr(cpu_waits, "usable_cpus", os.cpu_count)
    monkeypatch.setattr(cpu_waits, "local_world", lambda: 2)
    assert waits.others_cpus() is None


def test_a_few_very_long_operations_count_in_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two threads nine of ten operations take half as long as on one, and the tenth 60 times as long."""
    now, calls, threads = [0.0], [0], [2]

    def convolution(*_: Any, **__: Any) -> None:
        calls[0] += threads[0] == 2
        now[0] += 0.010 if threads[0] == 1 else 0.6 if calls[0] % 10 == 0 else 0.005

    monkeypatch.setattr(cpu_waits.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.nn.functional, "conv2d", convolution)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: threads.__setitem__(0, number))
    assert speed_of_one_thread() == pytest.approx(6.45, rel=0.2)
    assert threads == [2]


@pytest.mark.parametrize(
    ("share", "speed", "others", "said"),
    [
        (0.1, 9.0, 1.5, "waits for data 3% of the time: the model sets the pace"),
        (0.4, 1.0, 0.1, "waits for data 3% of the time: the model sets the pace"),
        (
            0.4,
            1.0,
            1.5,
            "wait 40% of the time for a CPU, while other programs keep 1.5 CPUs busy\n",
        ),
        (
            0.4,
            1.0,
            None,
            "waits for data 3% of the time; threads of this process wait 40% of the time",
        ),
        (0.4, 6.5, 0.1, "wait 40% of the time for a CPU, and one thread is 6.5 times as fast as 2"),
        (0.4, 6.5, 1.5, "keep 1.5 CPUs busy, and one thread is 6.5 times as fast as 2 in a trial"),
    ],
)
def test_what_the_verdict_says(
    share: float,
    speed: float,
    others: float,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    stub_machine(monkeypatch, share=share, speed=speed, others=others)
    bar = ProgressBar(shown=False)
    bar._on_cpu = True
    for _ in range(2):
        bar.note({"data_wait": 0.03})
    assert said in capsys.readouterr().err


def test_more_threads_than_cpus_are_told_without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_machine(monkeypatch, share=0.4, speed=1.0, others=0.0)
    monkeypatch.setattr(cpu_waits, "usable_cpus", lambda: 1)
    remark = wait_remark(CpuWaits())
    assert remark is not None
    assert "torch computes with 2 threads, and 1 CPU may be used; put OMP_NUM_THREADS=1" in remark
    monkeypatch.setattr(cpu_waits, "usable_cpus", lambda: 3)
    assert wait_remark(CpuWaits()) is None
    monkeypatch.setattr(cpu_waits, "local_world", lambda: 3)
    remark = wait_remark(CpuWaits())
    assert remark is not None
    assert "with 2 threads in each of 3 processes, and 3 CPUs may be used" in remark


def test_threads_that_portable_bits_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_NUM_THREADS changes nothing then."""
    stub_machine(monkeypatch, share=0.4, speed=1.0, others=0.0)
    monkeypatch.setattr(cpu_waits, "usable_cpus", lambda: 1)
    monkeypatch.setattr(cpu_waits, "fixes_threads", lambda: True)
    remark = wait_remark(CpuWaits())
    assert remark is not None and "OMP_NUM_THREADS" not in remark
    assert "--portable-bits 1 in a new run computes with 1" in remark


@pytest.mark.parametrize("speed", [1.0, 6.5])
def test_steps_that_take_long_are_judged_before_the_second_line(
    speed: float, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    stub_machine(monkeypatch, share=0.4, speed=speed, others=0.0)
    bar = ProgressBar(shown=False)
    bar._on_cpu = True
    bar.step()
    bar.step()
    assert capsys.readouterr().err == ""
    assert bar._waits is not None
    bar._waits._began -= progress_bar._EARLY_S
    bar.step()
    bar.step()
    early = capsys.readouterr().err
    assert early.count("one thread is 6.5 times as fast") == (speed == 6.5)
    stub_machine(monkeypatch, share=0.1, speed=1.0, others=0.0)
    for _ in range(2):
        bar.note({"data_wait": 0.03})
    late = capsys.readouterr().err
    expected = "; for a CPU, see above" if speed == 6.5 else ": the model sets the pace"
    assert late == f"waits for data 3% of the time{expected}\n"


def stub_machine(
    monkeypatch: pytest.MonkeyPatch, *, share: float, speed: float, others: float
) -> None:
    """A machine of two CPUs on which threads wait, one thread has this speed, and others run."""
    monkeypatch.setattr(CpuWaits, "share", lambda self: share)
    monkeypatch.setattr(CpuWaits, "others_cpus", lambda self: others)
    monkeypatch.setattr(cpu_waits, "speed_of_one_thread", lambda: speed)
    monkeypatch.setattr(cpu_waits, "usable_cpus", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
