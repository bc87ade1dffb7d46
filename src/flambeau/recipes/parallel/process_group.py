"""Join torch's process group: rank, backend, device, timeout, and an end without a hang.

正确地加入 torch 的进程组：rank、后端、设备、超时，以及不会卡住的退出。

Source: original; the variables are those of torchrun (torch docs) and of srun (its man page).

Not for starting the processes; use `torchrun script.py` or `srun`.
"""

import atexit
import contextlib
import ctypes
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_TORCHRUN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
# Of the Slurm step; the job's (SLURM_NTASKS) are also set in a batch script, which is a single process.
_SLURM = ["PROCID", "STEP_NUM_TASKS", "LOCALID", "STEP_TASKS_PER_NODE", "NODEID"]
_TASKS = Path("/proc/self/task")  # of Linux


@dataclass(frozen=True)
class ProcessInfo:
    """Which process this is: `rank` of `world_size` in the job, `local_rank` of those on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size > self.rank >= 0:
            raise ValueError(
                "ranks count from 0 and end below their world size, and a machine has no more "
                f"processes than the job; got {self}"
            )


def process_from_environment(environ: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Read which process of the job this is; without a launcher it is the only one.

    Args:
        environ: with torchrun's RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, or srun's variables.

    Raises:
        ValueError: variables are missing, no numbers, or contradict each other.

    Example:
        >>> process_from_environment({})
        ProcessInfo(rank=0, world_size=1, local_rank=0, local_world_size=1)
    """
    given = [name for name in _TORCHRUN if name in environ]
    if not given:
        return _slurm_process(environ) if "SLURM_STEP_NUM_TASKS" in environ else ProcessInfo()
    if missing := [name for name in _TORCHRUN if name not in environ]:
        raise ValueError(
            f"{', '.join(given)} set, but not {', '.join(missing)}: start the script with torchrun, "
            "which sets them all, or unset them for a process on its own"
        )
    return ProcessInfo(*(_number(environ, name) for name in _TORCHRUN))


@contextlib.contextmanager
def process_group(
    *, timeout_s: float = 600.0, device: str | torch.device | None = None
) -> Iterator[tuple[ProcessInfo, torch.device]]:
    """Join the default process group for the block: gloo for tensors on the CPU, NCCL for those on CUDA.

    Without a launcher it is a group of one. An existing group is used with its timeout, and not destroyed at
    the end.

    Args:
        timeout_s: after it a collective that waits for other ranks fails; above 0.
        device: 'cuda' is the device of the local rank; None is 'cuda' if available, else 'cpu'. It becomes
            CUDA's current device.

    Yields:
        The process and its device.

    Raises:
        ValueError: a launcher's variable is missing or contradicts the existing group; no such CUDA device;
            timeout out of range.

    Example:
        >>> with process_group(device="cpu") as (process, device):
        ...     total = torch.ones(2, device=device)
        ...     dist.all_reduce(total)
        >>> process.world_size, total
        (1, tensor([1., 1.]))
    """
    process = process_from_environment()
    local_device = _device(process, device)
    if dist.is_initialized():
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        if (rank, world_size) != (process.rank, process.world_size):
            raise ValueError(
                f"this process is rank {rank} of {world_size} in the group that it has joined, but "
                f"the environment says {process}: set {', '.join(_TORCHRUN)} before joining"
            )
        yield process, local_device
        return
    _join(process, local_device, timeout_s)
    try:
        yield process, local_device
    except BaseException:
        _abandon()
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def awaited_at_exit() -> Iterator[None]:
    """Python's exit waits until the threads that start in this block sleep, at most 2 s. Linux.

    A thread of gloo may still hold a tensor of the last collective when that has returned. If Python is
    ending when it drops the tensor, the process aborts after all its work is done (pytorch#179291):
    "terminate called without an active exception". Within `process_group` this is done.

    Example:
        >>> with awaited_at_exit():
        ...     dist.init_process_group("gloo")  # doctest: +SKIP
    """
    before = _threads()
    yield
    atexit.register(_wait_until_asleep, _threads() - before)


def _threads() -> set[str]:
    return {task.name for task in _TASKS.iterdir()} if _TASKS.is_dir() else set()


def _wait_until_asleep(threads: set[str]) -> None:
    deadline = time.monotonic() + 2
    looks = 0
    while looks < 2 and time.monotonic() < deadline:  # at one look a thread may wait for Python
        looks = 0 if any(map(_runs, threads)) else looks + 1
        time.sleep(0.001)


def _runs(thread: str) -> bool:
    try:
        return (_TASKS / thread / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False  # it has ended, or this is a forked process, which has not got it


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise ValueError(f"{name} must be a whole number, got {environ[name]!r}") from error


def _slurm_process(environ: Mapping[str, str]) -> ProcessInfo:
    if missing := [f"SLURM_{name}" for name in _SLURM if f"SLURM_{name}" not in environ]:
        raise ValueError(
            f"SLURM_STEP_NUM_TASKS set, but not {', '.join(missing)}: start the script with srun, which sets "
            "them all, or unset it for a process on its own"
        )
    rank, world_size, local_rank, counts, node = (environ[f"SLURM_{name}"] for name in _SLURM)
    tasks: list[int] = []  # on each machine; Slurm writes '4(x2),1' for 4, 4, 1
    for part in counts.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        tasks += [int(count)] * int(times or 1)
    return ProcessInfo(int(rank), int(world_size), int(local_rank), tasks[int(node)])


def _device(process: ProcessInfo, device: str | torch.device | None) -> torch.device:
    """The device of this process, with its index."""
    result = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if result.type == "cpu":
        return result
    if result.type != "cuda":
        raise ValueError(f"device must be 'cpu' or 'cuda', got {str(result)!r}")
    if result.index is None:
        result = torch.device("cuda", process.local_rank)
    if result.index >= (count := torch.cuda.device_count()):
        raise ValueError(
            f"{result} is requested, but this process sees {count} CUDA devices: start fewer processes "
            "per machine, or pass device='cuda:0' if each process sees only its GPU, or device='cpu'"
        )
    return result


def _join(process: ProcessInfo, device: torch.device, timeout_s: float) -> None:
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
    cuda = device if device.type == "cuda" else None
    backend = "cpu:gloo,cuda:nccl" if cuda and dist.is_nccl_available() else "gloo"
    if cuda:
        torch.cuda.set_device(cuda)  # before other code makes a context on device 0
    # A single process uses a store in memory, others that at MASTER_ADDR:MASTER_PORT.
    store = dist.HashStore() if process.world_size == 1 else None  # type: ignore[attr-defined]
    with awaited_at_exit():
        dist.init_process_group(
            backend,
            store=store,
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=cuda,
        )


def _abandon() -> None:
    """Drop the group after an error, when a pending collective may wait for ranks that never join it.

    Destroying a gloo group, even at the exit of Python, waits for that collective until the timeout, while
    the other ranks wait for this process to die. So NCCL is aborted, and a reference to the group is leaked.
    """
    if dist.group.WORLD is not None:
        dist.group.WORLD.abort()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
        dist.destroy_process_group()
