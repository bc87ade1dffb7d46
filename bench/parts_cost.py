"""What steps in parts cost: beside DistributedDataParallel on several ranks, and accumulation on one.

    python bench/parts_cost.py [--rounds 15] [--synced] [--record]

On 2 and 4 ranks (gloo) a step of as many parts as ranks, whose gradients are exchanged after the backward
pass (`Run(parts=N)`), beside DDP's, which overlaps (`Run()`); on one process four parts beside four
micro-batches. Freed memory is kept in the process, as `flambeau train` does. Both keep a model of their own
in the same processes and take blocks of steps in turn; a round is the ratio of one block to the mean of the
two around it. Median, smallest and largest ratio of all rounds; of several ranks the clock is rank 0's.

With --synced the parts have the statistics of SyncBatchNorm, as have the ranks of DDP; micro-batches have
those of BatchNorm.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share few cores

import argparse
import multiprocessing
import platform
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.parallel.gradient_sync.ddp import Replicas
from flambeau.parallel.gradient_sync.fixed_parts import FixedParts
from flambeau.parallel.gradient_sync.interface import GradientSync
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.models.small_convnet import SmallConvNet
from flambeau.recipes.parallel.sync_batchnorm import convert_sync_batchnorm
from flambeau.recipes.setup.freed_memory import keep_freed_memory
from provenance import commit, cpu_model, record  # beside this script

BLOCK = {"small_convnet": 12, "resnet18": 3}  # steps
NO_INDICES = torch.empty(0, dtype=torch.int64).numpy()


class Job(NamedTuple):
    """What is timed.

    Attributes:
        model: small_convnet on 28 x 28, or resnet18 on 64 x 64.
        world: ranks.
        parts: of a step, of 16 images each.
        synced: with SyncBatchNorm.
    """

    model: str
    world: int
    parts: int
    synced: bool


def a_model(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "resnet18":
        return torchvision.models.resnet18(num_classes=10), torch.randn(16, 3, 64, 64)
    return SmallConvNet(1, 10, width=32), torch.randn(16, 1, 28, 28)


def stepper(job: Job, sync_of: Callable[[nn.Module], GradientSync | None]) -> Callable[[], None]:
    """A function that makes one step of a model of its own."""
    model, images = a_model(job.model)
    targets = torch.arange(16) % 10
    if job.synced:
        model = convert_sync_batchnorm(model)  # is BatchNorm without parts, on one process
    sync = sync_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    own = job.parts // job.world
    is_fixed = isinstance(sync, FixedParts)
    if sync is not None:
        sync.start_epoch()

    weight = 1 / own if not is_fixed else 1 / job.parts

    def compute() -> None:
        (cross_entropy(model(images), targets) * weight).backward()
        if sync is not None:
            sync.after_part()

    def step() -> None:
        for part in range(1, own + 1):
            micro = MicroBatch(
                None, NO_INDICES, 16, 16 * job.parts, part, part == own, False, 0, (), True, part,
                dealt=job.parts if is_fixed else 0,
            )  # fmt: skip
            if sync is not None:
                sync.before_batch(micro)
            if isinstance(sync, FixedParts) and sync.together is not None:
                sync.together.do(compute, micro)
            else:
                compute()
        if sync is not None:
            sync.after_backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - began


def measure(rank: int, job: Job, rounds: int, port: int, answer: Any) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as `flambeau train` does
    if job.world > 1:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=job.world
        )
    ranks = Ranks(rank, job.world, dist.group.WORLD if job.world > 1 else None)
    usual = stepper(job, lambda m: Replicas(m, ranks) if job.world > 1 else None)
    parts = stepper(job, lambda m: FixedParts(m, ranks, parts=job.parts))
    steps = BLOCK[job.model]
    for step in (usual, parts):
        seconds(step, steps)
    ratios, usual_s = [], []
    before = seconds(usual, steps)
    for _ in range(rounds):
        middle, after = seconds(parts, steps), seconds(usual, steps)
        ratios.append(middle / ((before + after) / 2))
        usual_s.append(before / steps)
        before = after
    if rank == 0:
        answer.put((ratios, usual_s))
    if job.world > 1:
        dist.destroy_process_group()


def run(job: Job, rounds: int) -> tuple[list[float], list[float]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    processes = [
        context.Process(target=measure, args=(rank, job, rounds, port, answer))
        for rank in range(job.world)
    ]
    for process in processes:
        process.start()
    found = answer.get()
    for process in processes:
        process.join()
    return found  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--synced", action="store_true", help="with SyncBatchNorm")
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    for model in BLOCK:
        for world, parts in ((1, 4), (2, 2), (4, 4)):
            job = Job(model, world, parts, options.synced)
            ratios, usual_s = run(job, options.rounds)
            row = {
                **job._asdict(), "beside": "DDP" if world > 1 else "accumulation of 4",
                "ratio": round(statistics.median(ratios), 4),
                "low": round(min(ratios), 4), "high": round(max(ratios), 4),
                "keeps_freed_memory": True, "usual_step_ms": round(1000 * statistics.median(usual_s), 2),
                "rounds": options.rounds, "torch": torch.__version__,
                "python": platform.python_version(), "cpu": cpu_model(), "commit": commit(),
            }  # fmt: skip
            record(row, __file__, keep=options.record)


if __name__ == "__main__":
    main()
