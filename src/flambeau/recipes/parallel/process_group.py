"""Join torch's process group the right way: rank, back end, device, timeout, and an end without a hang.

正确地加入 torch 的进程组：rank、后端、设备、超时，以及不会卡住的退出。

Source: own; the variables are those of torchrun (torch docs) and of srun (its man page).

Not for starting the processes: `torchrun script.py` or `srun` does that.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

_TORCHRUN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
# Of the step: those of the job (SLURM_NTASKS) are set in a batch script, too, which is one process.
_SLURM = ["PROCID", "STEP_NUM_TASKS", "LOCALID", "STEP_TASKS_PER_NODE", "NODEID"]


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
    """Read which process of the job this is; a process that no launcher has started is alone.

    Args:
        environ: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, as torchrun sets them, else those of a step
            of srun.

    Raises:
        ValueError: some of the four are set and others are not, or they contradict each other.

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
    return ProcessInfo(*(int(environ[name]) for name in _TORCHRUN))


@contextlib.contextmanager
def process_group(
    *, timeout_s: float = 600.0, device: str | torch.device | None = None
) -> Iterator[tuple[ProcessInfo, torch.device]]:
    """Be in the default process group: gloo for tensors on the CPU, NCCL for those on CUDA.

    A process on its own gets a group of one, so that the same script runs with and without a launcher.
    A group that is there already is used, with its own timeout, and left alone at the end.

    Args:
        timeout_s: seconds after which a collective that waits for its peers fails; above 0.
        device: of this process; 'cuda' is the one with the number of the local rank, None is 'cuda' where
            there is CUDA, else 'cpu'. CUDA's current device is set to it.

    Yields:
        Which process this is, and its device.

    Raises:
        ValueError: a variable of the launcher is missing or contradicts the group that is there; no such
            CUDA device; a timeout that is not above 0.

    Example:
        >>> with process_group(device="cpu") as (process, device):
        ...     total = torch.ones(2, device=device)
        ...     dist.all_reduce(total)
        >>> process.world_size, total
        (1, tensor([1., 1.]))
    """
    process = process_from_environment()
    here = _device(process, device)
    if dist.is_initialized():
        if (there := (dist.get_rank(), dist.get_world_size())) != (
            process.rank,
            process.world_size,
        ):
            raise ValueError(
                f"this process is rank {there[0]} of {there[1]} in the group that it has joined, but "
                f"the environment says {process}: set {', '.join(_TORCHRUN)} before joining"
            )
        yield process, here
        return
    _join(process, here, timeout_s)
    try:
        yield process, here
    except BaseException:
        _abandon()
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _slurm_process(environ: Mapping[str, str]) -> ProcessInfo:
    rank, world_size, local_rank, counts, node = (environ[f"SLURM_{name}"] for name in _SLURM)
    tasks: list[int] = []  # on each machine; Slurm writes '4(x2),1' for 4, 4, 1
    for part in counts.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        tasks += [int(count)] * int(times or 1)
    return ProcessInfo(int(rank), int(world_size), int(local_rank), tasks[int(node)])


def _device(process: ProcessInfo, device: str | torch.device | None) -> torch.device:
    """The device of this process, with its number."""
    here = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if here.type == "cpu":
        return here
    if here.type != "cuda":
        raise ValueError(f"device must be 'cpu' or 'cuda', got {str(here)!r}")
    if here.index is None:
        here = torch.device("cuda", process.local_rank)
    if here.index >= (count := torch.cuda.device_count()):
        raise ValueError(
            f"{here} is asked for, and this process sees {count} CUDA devices: start fewer processes a "
            "machine, or pass device='cuda:0' where each sees a GPU of its own, or device='cpu'"
        )
    return here


def _join(process: ProcessInfo, device: torch.device, timeout_s: float) -> None:
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
    cuda = device if device.type == "cuda" else None
    backend = "cpu:gloo,cuda:nccl" if cuda and dist.is_nccl_available() else "gloo"
    if cuda:
        torch.cuda.set_device(cuda)  # before anything else makes a context on device 0
    # Alone: a store in memory; else the one at MASTER_ADDR:MASTER_PORT, which torchrun keeps.
    store = dist.HashStore() if process.world_size == 1 else None  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=store,
        rank=process.rank,
        world_size=process.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=cuda,
    )


def _abandon() -> None:
    """Drop the group after an error: a collective under way may wait for peers that never come.

    Destroying a group of gloo, even at the exit of Python, waits for it until the timeout, while the peers
    wait for this process to die. So NCCL is aborted, and one reference to the group is never given back.
    """
    if dist.group.WORLD is not None:
        dist.group.WORLD.abort()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
        dist.destroy_process_group()
