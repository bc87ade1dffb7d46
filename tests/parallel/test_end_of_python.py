"""A process that has ended well exits with 0, however late gloo's threads get a processor."""

import subprocess
import sys

import pytest

# Each child's threads of gloo get the processor only when nobody else wants it: before the exit waited for
# them, most such processes aborted.
SCRIPT = """
import os, socket, sys
import torch
import torch.distributed as dist
from flambeau.parallel.ranks import join_ranks
from flambeau.recipes.parallel.process_group import process_group

how, world = sys.argv[1], int(sys.argv[2])
core = min(os.sched_getaffinity(0))
codes = []
for _ in range(4):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            break
        children.append(child)
    if child == 0:
        break
    codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
else:
    print(codes)
    sys.exit()
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
os.environ |= {"WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}


def threads():
    return {*os.listdir("/proc/self/task")}


def reduce():
    for thread in threads() - before:
        os.sched_setaffinity(int(thread), {core})
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {core})
    for _ in range(3):
        dist.all_reduce(torch.zeros(4))


before = threads()
if how == "job":
    join_ranks()
    reduce()
else:
    with process_group(device="cpu"):
        kept = dist.group.WORLD  # as DistributedDataParallel keeps it
        reduce()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it schedules threads as Linux does")
@pytest.mark.parametrize(("how", "world"), [("job", 2), ("recipe", 1)])
def test_the_exit_waits_for_threads_that_still_hold_a_tensor(how: str, world: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, str(world)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout == f"{[0] * 4 * world}\n"
