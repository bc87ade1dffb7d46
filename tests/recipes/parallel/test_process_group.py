import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flambeau.recipes.parallel.process_group import (
    ProcessInfo,
    process_from_environment,
    process_group,
)

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
}  # fmt: skip


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without a launcher."""
    for name in [*TORCHRUN, "MASTER_ADDR", "MASTER_PORT", *SRUN]:
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------- which process this is


@pytest.mark.parametrize(
    ("environ", "process"),
    [
        ({}, ProcessInfo(0, 1, 0, 1)),
        (TORCHRUN, ProcessInfo(5, 8, 1, 4)),
        (SRUN, ProcessInfo(5, 9, 1, 4)),
        (
            SRUN | {"SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"},
            ProcessInfo(8, 9, 0, 1),
        ),
        # A batch script, or torchrun in a step with one task a machine.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "9", "SLURM_NODEID": "0"}, ProcessInfo(0, 1, 0, 1)),
        (SRUN | TORCHRUN, ProcessInfo(5, 8, 1, 4)),
    ],
)
def test_process_info(environ: dict[str, str], process: ProcessInfo) -> None:
    assert process_from_environment(environ) == process


@pytest.mark.parametrize("missing", TORCHRUN)
def test_half_an_environment_is_refused(missing: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ValueError, match=rf"{', '.join(environ)} set, but not {missing}: start"):
        process_from_environment(environ)


def test_a_lonely_world_size_is_refused() -> None:
    with pytest.raises(
        ValueError, match="WORLD_SIZE set, but not RANK, LOCAL_RANK, LOCAL_WORLD_SIZE"
    ):
        process_from_environment({"WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "8"}, {"RANK": "-1"}, {"LOCAL_RANK": "4"}, {"LOCAL_RANK": "-1"},
        {"LOCAL_WORLD_SIZE": "9"}, {"WORLD_SIZE": "0"},
    ],
)  # fmt: skip
def test_contradictions_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="ranks count from 0"):
        process_from_environment(TORCHRUN | change)


def test_text_for_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="'one'"):
        process_from_environment(TORCHRUN | {"RANK": "one"})


# ---------------------------------------------------------------- the group


def join_and_sum() -> object:
    with process_group(device="cpu") as (process, device):
        total = torch.tensor([process.rank + 1.0], device=device)
        dist.all_reduce(total)
        inside = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    return process, device, total, inside, dist.is_initialized()


def test_ranks_join_and_leave(start_ranks) -> None:
    for rank, found in enumerate(start_ranks(3, join_and_sum).results()):
        process, device, total, inside, is_there = found
        assert process == ProcessInfo(rank, 3, rank, 3)
        assert device == torch.device("cpu")
        torch.testing.assert_close(total, torch.tensor([6.0]), rtol=0, atol=0)
        assert inside == (rank, 3, "gloo")
        assert not is_there


def stay_away(until: Path) -> None:
    """Be alive, and take part in nothing."""
    deadline = time.monotonic() + 300
    while not until.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def wait_in_vain(done: Path) -> float:
    with process_group(device="cpu", timeout_s=1) as (process, _):
        start = time.monotonic()
        if process.rank == 1:
            stay_away(done)
        else:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.zeros(1))
            done.touch()
        return time.monotonic() - start


def test_timeout(start_ranks, tmp_path: Path) -> None:
    waited, _ = start_ranks(2, wait_in_vain, tmp_path / "done").results()
    assert 0.5 < waited < 5


def fail_beside_a_collective(done: Path) -> tuple[float, bool]:
    start, joined = time.monotonic(), done.with_name("joined")
    try:
        with process_group(device="cpu", timeout_s=60) as (process, _):
            if process.rank == 1:
                joined.touch()
                stay_away(done)
            else:
                stay_away(joined)  # if this rank left earlier, the other could not join
                start = time.monotonic()
                work = dist.all_reduce(torch.zeros(1), async_op=True)
                raise KeyError(str(work.is_completed()))
    except KeyError as error:
        assert error.args == ("False",)
        done.touch()
    return time.monotonic() - start, dist.is_initialized()


def test_error_leaves_without_waiting_for_peers(start_ranks, tmp_path: Path) -> None:
    """A plain destroy_process_group() waits here until the timeout."""
    (took, is_there), _ = start_ranks(2, fail_beside_a_collective, tmp_path / "done").results()
    assert took < 10
    assert not is_there


def use_twice() -> tuple[bool, int]:
    with process_group(device="cpu") as (process, _):
        pass
    return dist.is_initialized(), process.rank


def test_a_group_that_is_there_is_left_alone(start_ranks) -> None:
    assert start_ranks(2, use_twice, group=True).results() == [(True, 0), (True, 1)]


def contradict() -> str:
    os.environ["RANK"] = f"{1 - int(os.environ['RANK'])}"
    with pytest.raises(ValueError) as refusal, process_group(device="cpu"):
        pass
    assert dist.is_initialized()
    return str(refusal.value)


def test_a_group_that_contradicts_the_environment_is_refused(start_ranks) -> None:
    first, second = start_ranks(2, contradict, group=True).results()
    assert (
        "rank 0 of 2 in the group that it has joined, but the environment says ProcessInfo(rank=1"
        in first
    )
    assert "rank 1 of 2" in second


@pytest.mark.usefixtures("alone")
def test_one_process_needs_no_launcher() -> None:
    weight = torch.full((1, 1), 3.0)
    for _ in range(2):
        with process_group(device="cpu") as (process, _):
            assert process == ProcessInfo()
            with process_group(device="cpu") as (again, _):
                assert again == ProcessInfo()
            model = nn.Linear(1, 1, bias=False)
            model.weight.data.copy_(weight)
            out = DistributedDataParallel(model)(torch.ones(1, 1))
            torch.testing.assert_close(out, weight, rtol=0, atol=0)
        assert not dist.is_initialized()


def test_after_an_error_the_next_group_is_new(start_ranks: Callable[..., Any]) -> None:
    def work() -> None:
        with pytest.raises(KeyError), process_group(device="cpu"):
            raise KeyError
        assert not dist.is_initialized()
        with process_group(device="cpu"):
            dist.barrier()

    start_ranks(1, work).results()


@pytest.mark.usefixtures("alone")
def test_a_group_destroyed_inside_is_no_error() -> None:
    with process_group(device="cpu"):
        dist.destroy_process_group()
    with pytest.raises(KeyError), process_group(device="cpu"):
        dist.destroy_process_group()
        raise KeyError


def test_missing_address_is_named(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="MASTER_ADDR"), process_group(device="cpu"):
        pass
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("timeout_s", [0, -1])
def test_timeout_must_be_positive(timeout_s: float) -> None:
    with (
        pytest.raises(ValueError, match=f"timeout_s must be above 0, got {timeout_s}"),
        process_group(device="cpu", timeout_s=timeout_s),
    ):
        pass


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("mps", "device must be 'cpu' or 'cuda', got 'mps'"),
        ("cuda", "cuda:1 is requested, but this process sees 1 CUDA devices: start fewer"),
        ("cuda:7", "cuda:7 is requested"),
    ],
)
def test_device_is_refused(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message), process_group(device=device):
        pass


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_and_cpu_tensors_in_one_group() -> None:
    with process_group() as (_, device):
        assert device == torch.device("cuda:0")
        for place in (device, "cpu"):
            total = torch.ones(3, device=place)
            dist.all_reduce(total)
            torch.testing.assert_close(total.cpu(), torch.ones(3), rtol=0, atol=0)
        dist.barrier()
    with pytest.raises(KeyError), process_group():
        raise KeyError
    assert not dist.is_initialized()


def test_variables_that_are_no_numbers_or_missing_are_named() -> None:
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(ValueError, match="LOCAL_RANK must be a whole number, got ''"):
        process_from_environment(one)
    with pytest.raises(ValueError, match="not SLURM_PROCID, SLURM_LOCALID"):
        process_from_environment({"SLURM_STEP_NUM_TASKS": "2"})
