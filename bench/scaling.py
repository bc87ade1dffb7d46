"""Step time and bytes on the wire against the number of ranks, for each compression, beside torch's DDP.

    python bench/scaling.py [--ranks 1,2,4] [--rounds N] [--steps N] [--only NAME,NAME] [--record]

A perceptron of 2.4 million parameters, global batch 96, SGD with momentum; ranks are processes on this
machine, one thread each, over gloo (NCCL where each rank can have a GPU). The contenders of one world live
in the same processes and take turns, `--steps` steps at a time; a round's ratio is to `ddp` of that round, a
loop by hand with torch's DistributedDataParallel as its manual has it. More ranks than cores share them.

Bytes are what the loopback interface of a network namespace of the bench's own has carried for a step, sent
by all ranks together, headers included; without the right to make one they are left out (null).
"""

import argparse
import ctypes
import multiprocessing
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from flambeau.parallel.gradient_sync.ddp import COMPRESSIONS
from flambeau.run.run import Run
from provenance import commit, cpu_model, device_model, record  # beside this script

BATCH, WIDTH, CLASSES, ROWS = 96, 1024, 10, 9600
WARM_UP = 120  # PowerSGD starts after 100 steps
CONTENDERS = ("ddp", *(f"flambeau-{name}" for name in COMPRESSIONS))
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <linux/sched.h>


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES),
    ).to(device)  # fmt: skip


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, 256, generator=generator)
    return TensorDataset(rows, torch.randint(CLASSES, (ROWS,), generator=generator))


def steps_of_ddp(device: torch.device, rank: int, world: int) -> Iterator[None]:
    """A loop by hand; each rank takes its part of the same batches."""
    model = make_model(device)
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    rows, targets = make_data().tensors
    while True:
        for order in torch.randperm(ROWS).split(BATCH):
            mine = order[rank::world]
            loss = cross_entropy(model(rows[mine].to(device)), targets[mine].to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def steps_of_run(device: torch.device, folder: Path, compression: str) -> Iterator[None]:
    """The loop of the README."""
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    run = Run(
        folder, model, optimizer, make_data(), duration="100000st", batch_size=BATCH,
        checkpoint_every="100000st", compression=compression, bar=False,
    )  # fmt: skip
    for _ in run.epochs():
        for rows, targets in run.batches():
            run.step(cross_entropy(model(rows), targets))
            yield


def measure(rank: int, world: int, port: int, arguments: argparse.Namespace, pipe: Any) -> None:
    """The life of one rank: every contender by turns; rank 0 sends the samples of each round."""
    os.environ.update(
        RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world}", LOCAL_WORLD_SIZE=f"{world}",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    root = Path(arguments.folder)
    loops: dict[str, Iterator[None]] = {}
    for name in arguments.only:
        if name == "ddp":
            loops[name] = steps_of_ddp(device, rank, world)
        elif world > 1 or name == "flambeau-none":
            folder = root / f"{world}-{name}"
            loops[name] = steps_of_run(device, folder, name.removeprefix("flambeau-"))
    for loop in loops.values():
        take(loop, WARM_UP, device)
    for number in range(arguments.rounds):
        names = list(loops)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before = carried_bytes()
            seconds = take(loops[name], arguments.steps, device)
            if rank == 0:
                carried = (carried_bytes() - before) / arguments.steps
                pipe.send((name, number, seconds / arguments.steps, carried))
    if rank == 0:
        pipe.send(None)
    pipe.close()
    os._exit(0)  # the runs are not at their end


def take(loop: Iterator[None], steps: int, device: torch.device) -> float:
    """Seconds for so many steps, all ranks starting and ending together."""
    barrier()
    start = time.perf_counter()
    for _ in range(steps):
        next(loop)
    if device.type == "cuda":
        torch.cuda.synchronize()
    barrier()
    return time.perf_counter() - start


def barrier() -> None:
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def carried_bytes() -> int:
    """By the loopback interface of this process's network, so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0


def leave_network() -> bool:
    """Move to a network of our own, in which nobody else talks; False where that cannot be done."""
    if shutil.which("ip") is None:  # of iproute2: without it this one would stay down
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK):
        return False
    return subprocess.run(["ip", "link", "set", "lo", "up"], check=False).returncode == 0


def samples_of(world: int, arguments: argparse.Namespace) -> list[tuple[str, int, float, float]]:
    """What the ranks of one world have measured: (contender, round, seconds a step, bytes a step)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not a fork: this process asks a GPU for its name, and CUDA outlives no fork.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=measure, args=(rank, world, port, arguments, sender))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    sender.close()
    samples = []
    while (sample := receiver.recv()) is not None:
        samples.append(sample)
    for rank in ranks:
        rank.join()
    return samples


def lines(
    world: int, samples: list[tuple[str, int, float, float]], *, alone: bool
) -> Iterator[dict[str, Any]]:
    """One line a contender; the bytes only where we were `alone` on the interface."""
    by_hand = {number: seconds for name, number, seconds, _ in samples if name == "ddp"}
    for name in dict.fromkeys(name for name, *_ in samples):
        own = [(number, seconds, carried) for n, number, seconds, carried in samples if n == name]
        ratios = sorted(
            seconds / by_hand[number] for number, seconds, _ in own if number in by_hand
        )
        line: dict[str, Any] = {
            "contender": name,
            "ranks": world,
            "ms_per_step": round(1e3 * statistics.median(s for _, s, _ in own), 3),
            "wire_bytes_per_step": round(statistics.median(c for *_, c in own)) if alone else None,
        }
        if ratios:
            quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            line |= dict(
                zip(
                    ("ratio_p25", "ratio", "ratio_p75"),
                    (round(q, 3) for q in quartiles),
                    strict=True,
                )
            )
        yield line


def hardware() -> dict[str, Any]:
    device = device_model("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "device": device, "cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)), "threads": 1,
        "torch": torch.__version__, "python": platform.python_version(), "commit": commit(),
    }  # fmt: skip


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])

    def whole(text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    parser.add_argument("--ranks", type=whole, default=[1, 2, 4], metavar="N,N")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CONTENDERS))
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    arguments = parser.parse_args(words)
    if unknown := set(arguments.only) - set(CONTENDERS):
        parser.error(f"unknown contender {sorted(unknown)[0]}; there are {', '.join(CONTENDERS)}")
    return arguments


def main(words: list[str]) -> None:
    arguments = parse(words)
    about = hardware()
    alone = leave_network()  # and the ranks, which this process starts, with it
    for world in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            arguments.folder = folder
            samples = samples_of(world, arguments)
        for line in lines(world, samples, alone=alone):
            line |= {
                "n": arguments.rounds,
                **about,
                "command": f"python bench/scaling.py {' '.join(words)}",
            }
            record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main(sys.argv[1:])
