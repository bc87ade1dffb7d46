"""What limits.py trains: the model of `flambeau train`, a loop with `Run`, and limits that begin in a step.

    python limits_job.py train --out FOLDER --workers N

LIMIT names what begins in the sixth step of rank LIMIT_RANK; without it nothing does.
"""

import argparse
import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

AT_STEP, LAST_STEP, SAVE_EVERY = 6, 12, 2
MIB = 2**20


def size_of(name: str, pid: int | str = "self") -> int:
    """VmSize or VmData of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def lower(kind: int, value: int, pid: int = 0) -> None:
    resource.prlimit(pid, kind, (value, resource.prlimit(pid, kind)[1]))


def files_of(pid: int) -> int:
    """A limit that the next file is above."""
    numbers = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(numbers) + 1) if number not in numbers)


def first_worker() -> int:
    me = os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    return int(children[0])


def fill(folder: str) -> None:
    """Leave no byte free there."""
    with Path(folder, "filler").open("wb", buffering=0) as file:
        for size in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def confine(pid: int) -> None:
    """Move a process into the cgroup that LIMIT_CGROUP names: it gets no more memory than that has left."""
    Path(os.environ["LIMIT_CGROUP"], "cgroup.procs").write_text(f"{pid}")


def end_writes() -> None:
    """An error of the file system of the run, after which ext4 is read-only."""
    device = Path(os.environ["LIMIT_DEVICE"]).name
    Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("by a test")


def take_memory() -> None:
    """What the run needs and may not have."""
    torch.ones(64 * MIB, dtype=torch.uint8)


LIMITS: dict[str, Callable[[], object]] = {
    "address space": lambda: lower(resource.RLIMIT_AS, size_of("VmSize") + MIB),
    "data": lambda: lower(resource.RLIMIT_DATA, size_of("VmData") + MIB),
    "address space of a worker": lambda: lower(
        resource.RLIMIT_AS, size_of("VmSize", first_worker()), first_worker()
    ),
    "data of a worker": lambda: lower(
        resource.RLIMIT_DATA, size_of("VmData", first_worker()), first_worker()
    ),
    "files": lambda: lower(resource.RLIMIT_NOFILE, files_of(os.getpid())),
    "files of a worker": lambda: lower(
        resource.RLIMIT_NOFILE, files_of(first_worker()), first_worker()
    ),
    "processes": lambda: lower(resource.RLIMIT_NPROC, 1),
    "size of files": lambda: lower(resource.RLIMIT_FSIZE, 20_000),
    "processor time": lambda: lower(resource.RLIMIT_CPU, int(time.process_time()) + 1),
    "shared memory": lambda: fill("/dev/shm"),
    "disk": lambda: fill(os.environ["LIMIT_DISK"]),
    "read-only disk": end_writes,
    "cgroup": lambda: (confine(os.getpid()), take_memory()),
    "cgroup of a worker": lambda: confine(first_worker()),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class Net(nn.Module):
    """Random, with statistics; in its sixth training step the limit begins."""

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, num_classes),
        )  # fmt: skip
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and x.device.type != "meta":
            self.steps += 1
            limit = os.environ.get("LIMIT", "")
            is_here = os.environ.get("RANK", "0") == os.environ.get("LIMIT_RANK", "0")
            if limit and is_here and self.steps == AT_STEP:
                LIMITS[limit]()
            if limit == "processor time" and self.steps > AT_STEP:
                enough = time.process_time() + 0.4
                while time.process_time() < enough:
                    pass
        return self.layers(x)


def net(num_classes: int, channels: int) -> nn.Module:
    return Net(num_classes, channels)


class Noise(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(3, 16, 16) + index % 4, index % 4


def loop(folder: str, workers: int) -> None:
    from flambeau import Run

    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = net(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    run = Run(
        folder, model, optimizer, Noise(), batch_size=16, workers=workers,
        duration=f"{LAST_STEP}st", checkpoint_every=f"{SAVE_EVERY}st", log_every=1, ema=0.9,
        stall_timeout=20,
    )  # fmt: skip
    for _ in run.epochs():
        for inputs, targets in run.batches():
            loss = cross_entropy(model(inputs), targets)
            run.step(loss)
            run.log(loss=loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--workers", type=int, default=0)
    arguments, _ = parser.parse_known_args()
    loop(arguments.out, arguments.workers)


if __name__ == "__main__":
    main()
