"""Bytes that one training step sends over the network, by the kernel's own count for each connection.

    python bench/gradient_bytes.py [--ranks 2,3,4] [--record]

DistributedDataParallel sums the gradients of all ranks, in float32 and compressed to 16 bits, beside what
DataParallel does, whose traffic all goes through its first device: that one sends the weights to each of the
others, and each of them sends its gradients back. DataParallel itself runs on GPUs alone, in one process, so
here processes pass the same tensors. All is counted in sizes of the model in float32: what the busiest rank
has sent and received in the second step.
"""

import argparse
import contextlib
import os
import socket
import struct
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from provenance import commit, cpu_model, record

WIDTH = 1024
_BYTES_ACKED = 120  # in struct tcp_info of linux/tcp.h; tcpi_bytes_received follows it


def network_bytes() -> int:
    """What this process has sent and received over TCP so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            facts = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            total += sum(struct.unpack_from("<QQ", facts, _BYTES_ACKED))
    return total


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def of_ddp(hook: Callable[..., Any] | None) -> Callable[[], None]:
    wrapped = DistributedDataParallel(model())
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return lambda: wrapped(torch.ones(1, WIDTH)).sum().backward()


def through_the_first() -> Callable[[], None]:
    parameters = list(model().parameters())
    others = range(1, dist.get_world_size())

    def step() -> None:
        for parameter in parameters:
            weight, gradient = parameter.detach(), torch.ones_like(parameter)
            if dist.get_rank() > 0:
                dist.recv(weight, 0)
                dist.send(gradient, 0)
                continue
            for other in others:
                dist.send(weight, other)
            for other in others:
                dist.recv(gradient, other)

    return step


WAYS: dict[str, Callable[[], Callable[[], None]]] = {
    "ddp": lambda: of_ddp(None),
    "ddp_fp16": lambda: of_ddp(default_hooks.fp16_compress_hook),
    "ddp_bf16": lambda: of_ddp(default_hooks.bf16_compress_hook),
    "data_parallel": through_the_first,
}


def rank(index: int, folder: str, ranks: int, way: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{way}{ranks}", rank=index, world_size=ranks
    )
    step = WAYS[way]()
    step()  # the first one also finds out in which order gradients come
    dist.barrier()
    before = network_bytes()
    step()
    dist.barrier()
    Path(folder, f"{way}-{ranks}-{index}").write_text(str(network_bytes() - before))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    size = sum(parameter.nbytes for parameter in model().parameters())
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            for ranks in map(int, arguments.ranks.split(",")):
                mp.spawn(rank, (folder, ranks, way), nprocs=ranks)
                counted = [
                    int(Path(folder, f"{way}-{ranks}-{index}").read_text())
                    for index in range(ranks)
                ]
                found.setdefault(way, {})[str(ranks)] = round(max(counted) / size, 2)
    line = {
        "bench": "gradient_bytes",
        "model_bytes": size,
        "models_by_ranks": found,
        "torch": version("torch"),
        "processor": cpu_model(),
        "commit": commit(),
    }
    record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
