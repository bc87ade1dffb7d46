"""What the jobs of this folder share: their arguments, their own clock, photographs, and a slow drive.

Each job is a training script as a user writes it, with one cause of lost time that is known:

    CAUSE     in the doctor's words; several where each of them is right
    WHERE     the line that is to blame, as it stands in the script; None where no line of it is, or several
    REMEDY    the lever that helps; None where only an edit of the script does
    TRAINER   whose loop it is

    python bench/doctor_jobs/NAME.py                       # trains for minutes
    python bench/doctor_jobs/NAME.py --remedied            # the same, with the cause repaired by hand
    python bench/doctor_jobs/NAME.py --clock FILE          # measures itself, writes FILE and exits
    python bench/doctor_jobs/NAME.py --clock FILE --stay   # the same, but trains on

The clock is what a doctor is compared with, so it takes nothing from one: it times `next` on the loader that
trains, counts steps of the optimizer by torch's public hook, and does nothing without `--clock`.
"""

import argparse
import functools
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, SequentialSampler

CACHE = Path(
    os.environ.get("FLAMBEAU_DOCTOR_JOBS", Path(tempfile.gettempdir(), "flambeau_doctor_jobs"))
)
PHOTOS = Path(__file__).resolve().parents[3] / "shared" / "datasets" / "photos.tar"
WARM_UP_STEPS, WARM_UP_S, STEPS, SECONDS = 10, 3.0, 30, 8.0  # of the clock


@dataclass(frozen=True)
class Told:
    """The arguments of a job.

    Attributes:
        remedied: whether the cause is to be repaired.
        number: N of a remedy such as "workers=N"; 0 if it has none.
    """

    remedied: bool
    number: int


def begin(remedy: str | None, *, every: int = 1, batches: tuple[type, str] | None = None) -> Told:
    """Read the arguments, and start the clock if one is asked for.

    Args:
        remedy: of the job; `--remedied workers=3` tries another number.
        every: steps after which what the job does repeats itself; the clock measures whole rounds.
        batches: class and name of the method that gives batches, where that is no DataLoader of torch.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--remedied", nargs="?", const=remedy or "by hand", metavar="REMEDY")
    parser.add_argument("--clock", type=Path, metavar="FILE")
    parser.add_argument("--stay", action="store_true")
    told = parser.parse_args()
    if told.clock is not None:
        clock = Clock(told.clock, every, stays=told.stay)
        register_optimizer_step_post_hook(clock.after_step)
        clock.watch(*(batches or (DataLoader, "__iter__")))
    _, _, number = (told.remedied or "").partition("=")
    return Told(told.remedied is not None, int(number or 0))


class Clock:
    """Seconds per step, and the share of them that goes into `next` on batches.

    With several ranks each writes a file of its own, FILE.RANK, and rank 0 says at which step all end.
    One that stays writes what it knows every second, as a doctor may end it at any time, but no file
    that is there at its start: a doctor that watches the first run makes others after it.
    """

    def __init__(self, file: Path, every: int, *, stays: bool) -> None:
        self.file, self.every, self.stays = file, every, stays
        self.rank = int(os.environ.get("RANK", "0"))
        self.is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
        self.steps = self.first_step = self.last_step = 0
        self.waited_s = self.first_s = self.begun_s = 0.0
        self.last = Path(f"{file}.last")
        self.own_file = file if self.is_alone else Path(f"{file}.{self.rank}")
        self.is_done, self.told_s = stays and self.own_file.exists(), 0.0
        if self.rank == 0:
            self.last.unlink(missing_ok=True)

    def watch(self, owner: type, name: str) -> None:
        """Time the method that gives an iterator over batches; one that shuffles none is for evaluations."""
        iterate = getattr(owner, name)

        @functools.wraps(iterate)
        def timed(loader: Any) -> Iterator[Any]:
            batches = getattr(loader, "batch_sampler", None)
            if isinstance(getattr(batches, "sampler", None), SequentialSampler):
                return iterate(loader)
            return self.timed(functools.partial(iterate, loader))

        setattr(owner, name, timed)

    def timed(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches; also the start of workers, and their end, are waited for."""
        start = time.perf_counter()
        batches = iter(iterate())
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.waited_s += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def after_step(self, *_: object) -> None:
        """A step of the optimizer is done."""
        self.steps += 1
        now = time.perf_counter()
        if self.steps == 1:
            self.first_s = now
        if (
            self.steps % self.every and not self.stays
        ):  # the windows of a doctor are no whole rounds
            return
        if not self.begun_s:
            if self.steps >= WARM_UP_STEPS and now - self.first_s >= WARM_UP_S:
                self.begun_s, self.first_step, self.waited_s = now, self.steps, 0.0
        elif self.stays:
            self.tell_now_and_then(now)
        elif self.is_last(now):
            self.end(now)

    def tell_now_and_then(self, now: float) -> None:
        if not self.is_done and now - self.told_s >= 1:
            self.told_s = now
            self.tell(now)
            self.is_done = self.has_enough(now)

    def has_enough(self, now: float) -> bool:
        return self.steps - self.first_step >= STEPS and now - self.begun_s >= SECONDS

    def is_last(self, now: float) -> bool:
        enough = self.has_enough(now)
        if self.is_alone:
            return enough
        if self.rank == 0 and enough and not self.last_step:
            self.last_step = self.steps + 2 * self.every  # the others are less than a step away
            write(self.last, f"{self.last_step}")
        elif not self.last_step and self.last.exists():
            self.last_step = int(self.last.read_text(encoding="utf-8"))
        return self.steps == self.last_step

    def tell(self, now: float) -> None:
        """Write what was measured."""
        elapsed, steps = now - self.begun_s, self.steps - self.first_step
        row = {"step_s": elapsed / steps, "waiting_share": self.waited_s / elapsed, "steps": steps}
        write(self.own_file, json.dumps(row))

    def end(self, now: float) -> None:
        """Write what was measured, and end the process with its workers."""
        self.tell(now)
        if not self.is_alone:
            time.sleep(1)  # the others write theirs before a launcher sees that one has ended
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or torch's loader complains of the workers
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()
        sys.stdout.flush()
        os._exit(0)


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = Path(f"{path}.part{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class Cached:
    """The first batches of a loader, kept in memory and given again and again: data that cost nothing."""

    def __init__(self, loader: Any, num_batches: int = 8) -> None:
        self.loader, self.num_batches = loader, num_batches
        self.batches: list[Any] = []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if not self.batches:
            for batch in self.loader:
                self.batches.append(batch)
                if len(self.batches) == self.num_batches:
                    break
        for number in range(len(self)):
            yield self.batches[number % len(self.batches)]


class Repeated:
    """A data set that is counted several times over, so that an epoch takes longer than a test."""

    def __init__(self, data: Any, times: int) -> None:
        self.data, self.times = data, times

    def __len__(self) -> int:
        return len(self.data) * self.times

    def __getitem__(self, index: int) -> Any:
        return self.data[index % len(self.data)]


def small_convnet() -> nn.Module:
    """Images (N, 3, H, W) to logits (N, 10), in few milliseconds for 16 images of 64 x 64."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def photos(width: int = 400, height: int = 300, count: int = 2000) -> Path:
    """A folder of ten classes with JPEG files, made once: parts of photographs, or smooth random images."""
    folder = CACHE / f"photos-{width}x{height}-{count}"
    if folder.is_dir():
        return folder
    draws = random.Random(0)
    sources = list(photographs())
    part = Path(tempfile.mkdtemp(dir=made(CACHE)))
    for number in range(count):
        image = sources[number % len(sources)]
        left, top = (draws.uniform(0, 0.3) * side for side in image.size)
        box = (left, top, left + 0.7 * image.width, top + 0.7 * image.height)
        image = image.resize((width, height), Image.Resampling.BICUBIC, box)
        image.save(made(part / f"class{number % 10}") / f"{number:05}.jpg", quality=90)
    try:
        part.replace(folder)
    except OSError:  # another process was faster
        shutil.rmtree(part)
    return folder


def photographs() -> Iterator[Image.Image]:
    """Those of ../shared/datasets/photos.tar, or 50 that are smooth and random."""
    if PHOTOS.exists():
        with tarfile.open(PHOTOS) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    yield Image.open(io.BytesIO(file.read())).convert("RGB")
        return
    draws = np.random.default_rng(0)
    for _ in range(50):
        coarse = draws.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
        noisy = np.asarray(image) + draws.normal(0, 8, (375, 500, 3))
        yield Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def on_slow_disk(folder: Path, *, delay_ms: float = 0.0, mb_per_s: float | None = None) -> None:
    """Start this script again, with files in a folder as slow as on a network drive.

    Args:
        folder: whose files are slow to read; others are as fast as they are.
        delay_ms: that each read waits for, whatever others do.
        mb_per_s: that all processes share; None for no limit.
    """
    if "SLOW_DISK_FOLDER" in os.environ:
        return
    source, clock = Path(__file__).with_name("slow_disk.c"), made(CACHE) / "slow_disk.clock"
    built, library = CACHE / f"slow_disk.{os.getpid()}", CACHE / "slow_disk.so"
    command = ["gcc", "-shared", "-fPIC", "-O2", f"{source}", "-o", f"{built}", "-ldl"]
    subprocess.run(command, check=True)
    built.replace(library)
    clock.write_bytes(bytes(8))
    limits = {} if mb_per_s is None else {"SLOW_DISK_MB_PER_S": f"{mb_per_s}"}
    before = os.environ.get("LD_PRELOAD")
    os.environ.update(
        limits,
        SLOW_DISK_FOLDER=f"{folder}",
        SLOW_DISK_DELAY_MS=f"{delay_ms}",
        SLOW_DISK_CLOCK=f"{clock}",
        LD_PRELOAD=f"{library} {before}" if before else f"{library}",
    )
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def on_ranks(processes: int) -> None:
    """Start this script again by torchrun, as several ranks of this machine."""
    if "RANK" in os.environ:
        return
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    os.execv(sys.executable, [sys.executable, *command, *sys.argv])
