import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from flambeau.recipes.parallel.local_ranks import run_ranks


def test_results_of_a_group() -> None:
    def work() -> tuple[int, int, torch.Tensor]:
        dist.init_process_group("gloo")
        total = torch.full((2,), dist.get_rank() + 1.0)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), total

    before = dict(os.environ)
    found = run_ranks(work, 3, start_method="fork")
    assert [(rank, world) for rank, world, _ in found] == [(0, 3), (1, 3), (2, 3)]
    for *_, total in found:
        torch.testing.assert_close(total, torch.full((2,), 6.0), rtol=0, atol=0)
    assert os.environ == before


@pytest.mark.parametrize(("variable", "expected"), [(None, 1), ("2", 2)])
def test_threads(variable: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    torch.set_num_threads(2)
    assert run_ranks(torch.get_num_threads, 1, start_method="fork") == [expected]


def test_a_large_result_passes() -> None:
    """More than a pipe holds."""
    (found,) = run_ranks(lambda: bytes(1_000_000), 1, start_method="fork")
    assert found == bytes(1_000_000)


def test_a_rank_that_raises_ends_the_others() -> None:
    def work() -> None:
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("only here")
        time.sleep(30)

    start = time.monotonic()
    with pytest.raises(ProcessRaisedException, match="ZeroDivisionError: only here") as found:
        run_ranks(work, 3, start_method="fork")
    assert found.value.error_index == 1
    assert time.monotonic() - start < 15


def test_a_killed_rank_is_named() -> None:
    def work() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ProcessExitedException, match="process 0 terminated with signal SIGKILL"):
        run_ranks(work, 1, start_method="fork")


def test_exit_without_a_result_is_refused() -> None:
    with pytest.raises(RuntimeError, match="rank 0 has called exit"):
        run_ranks(lambda: exit(0), 1, start_method="fork")


def test_a_result_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(ProcessRaisedException, match=r"(?i)pickle"):
        run_ranks(lambda: lambda: None, 1, start_method="fork")


def test_ranks_that_do_not_end_are_killed(tmp_path: Path) -> None:
    def work() -> None:
        Path(tmp_path, os.environ["RANK"]).write_text(f"{os.getpid()}")
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(30)

    with pytest.raises(TimeoutError, match=r"ranks \[1\] have not ended in 1.0 s"):
        run_ranks(work, 2, start_method="fork", timeout_s=1.0)
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"{rank}").read_text()), 0)


def test_spawn() -> None:
    (pid,) = run_ranks(os.getpid, 1)
    assert pid != os.getpid()


def test_spawn_needs_a_function_of_a_module() -> None:
    with pytest.raises((AttributeError, TypeError), match=r"(?i)pickle"):
        run_ranks(lambda: None, 1)


@pytest.mark.parametrize(
    ("world_size", "timeout_s", "start_method", "message"),
    [
        (0, 1.0, "fork", "world_size must be at least 1 and timeout_s above 0, got 0 and 1.0"),
        (1, 0.0, "fork", "got 1 and 0.0"),
        (1, float("nan"), "fork", "got 1 and nan"),  # it waited forever
        (1, 1.0, "thread", "cannot find context for 'thread'"),
    ],
)
def test_settings_are_checked(
    world_size: int, timeout_s: float, start_method: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(lambda: None, world_size, timeout_s=timeout_s, start_method=start_method)


def test_a_timeout_may_be_infinite() -> None:
    assert run_ranks(lambda: 3, 1, start_method="fork", timeout_s=float("inf")) == [3]
