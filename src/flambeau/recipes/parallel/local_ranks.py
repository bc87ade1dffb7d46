"""Call a function on several ranks of this machine, from a test, notebook or script, and get its results.

在本机的多个 rank 上调用一个函数（用于测试、笔记本或脚本），并取回结果。

Source: original; the processes are those of torch.multiprocessing.

It sets the environment variables of torchrun, so that the same function runs under both; a rank that fails
ends all others.

Not for training on several machines, nor to restart failed jobs; use torchrun.
"""

import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.multiprocessing.spawn import ProcessContext, start_processes

_T = TypeVar("_T")


def run_ranks(
    work: Callable[[], _T],
    world_size: int,
    *,
    start_method: str = "spawn",
    timeout_s: float = 600.0,
) -> list[_T]:
    """Call `work()` in `world_size` new processes, and return the results.

    Each process has torchrun's RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
    `work` joins a process group if it needs one. Without OMP_NUM_THREADS each has one thread.

    Args:
        work: returns what can be pickled, with tensors on the CPU.
        start_method: 'spawn' imports the module of `work` in each process: `work` must be in a file, and the
            call below `if __name__ == "__main__":`. 'fork' copies this process, so `work` may be in a
            notebook; only before CUDA is initialized and while no other thread runs.
        timeout_s: after it all processes are killed; may be infinite.

    Returns:
        The results by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the rank that raised.
        torch.multiprocessing.ProcessExitedException: a rank exited or was killed.
        TimeoutError: the message names the ranks that did not end.
        RuntimeError: a rank called exit(0).
        ValueError: `world_size` below 1, a timeout not above 0, or no such start method.

    Example:
        >>> run_ranks(lambda: int(os.environ["RANK"]) ** 2, 3, start_method="fork")
        [0, 1, 4]
    """
    if world_size < 1 or not timeout_s > 0:
        raise ValueError(
            f"world_size must be at least 1 and timeout_s above 0, got {world_size} and {timeout_s}"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # another process may take the port before rank 0 does
        port: int = probe.getsockname()[1]
    environ = {
        "WORLD_SIZE": f"{world_size}",
        "LOCAL_WORLD_SIZE": f"{world_size}",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = (work, environ, folder)
        context = start_processes(
            _rank, arguments, world_size, join=False, start_method=start_method
        )
        try:
            _join(context, timeout_s)
        finally:  # even after an interrupt no process is left
            for process in context.processes:
                process.kill()
                process.join()
        files = [Path(folder, f"{rank}") for rank in range(world_size)]
        if absent := [file.name for file in files if not file.exists()]:
            raise RuntimeError(f"rank {', '.join(absent)} has called exit(0): return instead")
        return [pickle.loads(file.read_bytes()) for file in files]


def _join(context: ProcessContext, timeout_s: float) -> None:
    """Wait for all processes; when one fails, the others are ended."""
    deadline = time.monotonic() + timeout_s
    # The system takes no infinite time, so an hour at a time.
    while not context.join(min(3600.0, max(0.0, deadline - time.monotonic())), grace_period=1.0):
        if time.monotonic() > deadline:
            ranks = sorted(context.sentinels.values())
            raise TimeoutError(f"ranks {ranks} have not ended in {timeout_s} s")


def _rank(rank: int, work: Callable[[], object], environ: dict[str, str], folder: str) -> None:
    """Run one rank."""
    os.environ.update(environ, RANK=f"{rank}", LOCAL_RANK=f"{rank}")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    result = pickle.dumps(work())
    Path(folder, f"{rank}").write_bytes(result)
