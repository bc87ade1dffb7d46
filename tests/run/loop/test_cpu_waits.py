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


@pytest.mark.parametrize(
    ("share", "speed", "said"),
    [
        (0.1, 9.0, "waits for data 3% of the time: the model sets the pace"),
        (0.4, 1.0, "waits for data 3% of the time: the model sets the pace"),
        (0.4, 6.5, "wait 40% of it for a CPU, which others use, and one thread is 6.5 times"),
    ],
)
def test_what_the_verdict_says(
    share: float, speed: float, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(CpuWaits, "share", lambda self: share)
    monkeypatch.setattr(cpu_waits, "speed_of_one_thread", lambda: speed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert (wait_remark(CpuWaits()) is None) == (share < 0.2 or speed < 1.3)
    bar = ProgressBar(shown=False)
    bar._on_cpu = True
    for _ in range(2):
        bar.note({"data_wait": 0.03})
    assert said in capsys.readouterr().err
    assert progress_bar.wait_remark is wait_remark
