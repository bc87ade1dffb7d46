"""Kills `flambeau train` at random moments, and compares what it ends with to a run that nobody killed.

    python bench/kill_storm.py --kills 60 [--seed S] [--precision bf16] [--task TASK] [--ranks N] [--sharded]
                               [--store | --own-data | --extended] [--out FILE] [--record]

With --store the runs that are killed read from a store on loopback (s3_server.py) that fails in 2 % of its
answers, the one that nobody kills from the disk; before a third of the lives the cache, which all runs share,
is removed, also under a run that reads from it.
With --ranks each life has 1 to N processes, drawn anew, and the steps are in parts; one may die alone.
With --sharded each life has N processes, as the run that nobody kills, and each saves its shard (FSDP).
With --own-data the images come from a class of the user's own, as the model always does.
With --extended each run is first trained to half of its epochs, and killed while it is extended by the rest.
A life is one start of the command in a process group of its own, on one core; --workers is 0 and 2 in turn.
Lives end by SIGKILL: while torch loads, while the run folder is claimed and the checkpoint read, between two
saves, in the middle of a save, and while the weights are published.
A run of ten kills is then left to finish.
Model, data and settings are such that everything random and everything that sums up is in play.

Linux only: it reads /proc. Prints one JSON line; the exit code is 1 if any bit differs.
tests/run/test_kill_resume.py runs the same code.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from PIL import Image

from flambeau.recipes.checkpoints.atomic_checkpoint import (
    checkpoint_folders,
    from_bytes,
    read_checkpoint,
)
from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack

# It draws from Python's and NumPy's generators as well: who does not restore them ends with other bits.
MODEL = """
import os, random, time
import numpy as np
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, channels):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, num_classes)
        )

    def forward(self, x):
        if self.training and (sleep_s := float(os.environ.get("FORWARD_SLEEP_S", "0"))):
            print("the forward pass sleeps", flush=True)
            time.sleep(sleep_s)
        x = self.stem(x)
        if not self.training or random.random() < 0.8:
            x = x + self.block(x) * (1 + 0.1 * np.random.standard_normal() * self.training)
        return self.head(x)


def net(num_classes, channels):
    return Net(num_classes, channels)


def pixel_net(num_classes, channels):
    model = Net(num_classes, channels)
    up = nn.Upsample(scale_factor=2, mode="nearest")
    model.head = nn.Sequential(nn.Dropout(0.2), up, nn.Conv2d(8, num_classes, 1))
    return model
"""
OWN_DATA = """
import random
from PIL import Image


class Noise:
    classes = ["a", "b", "c", "d"]

    def __init__(self, part, count):
        self.part, self.targets = part, [number % 4 for number in range(count)]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        rng = random.Random(f"{self.part} {index}")
        width, height = rng.randint(18, 30), rng.randint(18, 30)
        image = Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))
        return image, self.targets[index]


def noise():
    return Noise("train", TRAIN), Noise("val", VAL)
"""
TRAIN_IMAGES, EPOCHS, SAVE_EVERY = 407, 8, 5
IMAGES = {"train": TRAIN_IMAGES, "val": 64}
TOTAL_STEPS = EPOCHS * -(-TRAIN_IMAGES // 16)  # 26 an epoch, the last of 7 images
WALL_CLOCK = {"images_per_s", "data_wait"}
ELSEWHERE = {"workers", "data", "cache"}
"""Settings that may differ: who reads, and from where."""
# Not tracebacks: a worker whose parent is killed may print one; a command that fails has an exit code.
BAD = re.compile("damaged|not to the same bits|lines are lost")
KILLS_A_RUN = 10
WAIT_S = 240  # for anything at all to happen; only a hang takes as long
POLL_S = 0.0003


TASKS: dict[str, list[str]] = {
    "classification": [
        "--mixup", "0.2", "--cutmix", "1", "--label-smoothing", "0.1", "--lr", "0.05",
    ],
    "multilabel": [
        "--task", "multilabel", "--mixup", "0.2", "--cutmix", "1", "--label-smoothing", "0.1", "--lr", "0.05",
        "--class-weights", "auto",
    ],
    "regression": ["--task", "regression", "--mixup", "0.2", "--loss", "huber", "--lr", "0.005"],
    "segmentation": [
        "--loss", "cross-entropy+dice", "--class-weights", "auto", "--label-smoothing", "0.1",
        "--lr", "0.05", "--color-jitter", "0.3", "--random-erasing", "0.3",
    ],
}  # fmt: skip
"""What each task is trained with, beside what all are."""


def label_of(number: int, task: str) -> Any:
    """The label of an image; NaN is unknown."""
    if task == "multilabel":
        return [number % 2, number // 2 % 2, math.nan if number % 5 == 0 else number % 3 == 0]
    if task == "regression":
        return [100 + number % 7 / 2, math.nan if number % 5 == 0 else number % 11]
    return number % 4


def noise(rng: random.Random) -> Image.Image:
    size = rng.randint(18, 30), rng.randint(18, 30)
    return Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))


def write_records(folder: Path, task: str) -> None:
    """Images with labels, in noise_train.rec and noise_val.rec."""
    rng = random.Random(0)
    for part, count in IMAGES.items():
        with RecordWriter(folder / f"noise_{part}.rec") as records:
            for number in range(count):
                file = io.BytesIO()
                noise(rng).save(file, "PNG")
                header = IRHeader(0, label_of(number, task), number, 0)
                records.write(pack(header, file.getvalue()))


def write_masks(folder: Path) -> None:
    """Images and masks of three classes, and pixels that are ignored."""
    rng = random.Random(0)
    for part, count in IMAGES.items():
        for kind in ("images", "masks"):
            (folder / kind / part).mkdir(parents=True)
        for number in range(count):
            image = noise(rng)
            image.save(folder / "images" / part / f"{part}{number}.png")
            mask = Image.new("L", image.size, number % 3)
            mask.paste((number + 1) % 3, (0, 0, 9, 12))
            mask.paste(255, (0, 0, 30, 1 + number % 4))
            mask.save(folder / "masks" / part / f"{part}{number}.png")


def make_inputs(
    folder: Path,
    *,
    precision: str = "fp32",
    task: str = "classification",
    parts: int = 0,
    sharded: bool = False,
    own_data: bool = False,
) -> list[str]:
    """Write data (PNGs of many sizes) and a model; give the arguments of the command for them.

    Args:
        parts: of a step, instead of two micro-batches.
        sharded: with FSDP, instead of both.
        own_data: by a class of the user's own.
    """
    data, net = f"{folder / 'noise_train.rec'}", "net"
    if own_data:
        text = OWN_DATA.replace("TRAIN", f"{IMAGES['train']}").replace("VAL", f"{IMAGES['val']}")
        (folder / "data.py").write_text(text)
        data = f"{folder / 'data.py'}:noise"
    elif task == "segmentation":
        data, net = f"{folder / 'noise'}", "pixel_net"
        write_masks(folder / "noise")
    else:
        write_records(folder, task)
    (folder / "model.py").write_text(MODEL)
    batch = ["--batch-size", "8", "--accumulate", "2"]
    if sharded:
        batch = ["--batch-size", "16", "--shard", "fsdp"]
    elif parts:
        batch = ["--batch-size", "16", "--parts", f"{parts}"]
    return [
        data, "--model", f"{folder / 'model.py'}:{net}", "--image-size", "16",
        "--epochs", f"{EPOCHS}", "--clip-norm", "1", "--ema", "0.9", *TASKS[task],
        *batch,
        "--log-every", "3", "--checkpoint-every", f"{SAVE_EVERY}st", "--keep", "2",
        "--precision", precision,
    ]  # fmt: skip


def in_two_halves(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments that train for half of the epochs, and those that extend such a run by the rest."""
    first = [*arguments]
    first[first.index("--epochs") + 1] = f"{EPOCHS // 2}"
    return first, [*first, "--extend", f"{EPOCHS - EPOCHS // 2}ep"]


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Children of this thread start on one core: so all lives compute with as many threads, one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


Start = Callable[..., Any]
"""Takes the words of `flambeau`, and `output` and `environ` of its process, which starts a session."""


def start_python(
    words: Sequence[str], *, output: IO[Any], environ: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """The command as a user starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "flambeau", *words],
        stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True, env=environ,
    )  # fmt: skip


class Life:
    """One start of the command, in a process group of its own.

    Args:
        arguments: of `flambeau train`.
        run: the run folder.
        workers: processes that read.
        core: it and its workers run there.
        environ: added to the environment.
        start: how: as a new Python by default.
        ranks: processes that train, each in a group of its own.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        run: Path,
        *,
        workers: int,
        core: int,
        environ: Mapping[str, str] | None = None,
        start: "Start | None" = None,
        ranks: int = 1,
    ) -> None:
        self.run, self.workers, self._log = run, workers, log_of(run)
        self.first_step, self._leftovers_before = newest_step(run), leftovers(run)
        with on_core(core), self._log.open("a") as output:
            self._log_start = output.tell()
            words = ["train", *arguments, "--out", f"{run}", "--workers", f"{workers}"]
            environ = {**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})}
            places = rank_environs(ranks) if ranks > 1 else [{}]
            self.processes = [
                (start or start_python)(words, output=output, environ={**environ, **place})
                for place in places
            ]
            self.process = self.processes[0]

    @property
    def output(self) -> str:
        """What it has said so far."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode()

    def wait_for(self, happened: Callable[[], bool]) -> bool:
        """Return True as soon as `happened`, False where the command ends without it."""
        deadline = time.monotonic() + WAIT_S
        while not happened():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"nothing for {WAIT_S} s:\n{self.output}")
            time.sleep(POLL_S)
        return True

    def has_claimed(self) -> bool:
        """Whether the run folder is its own: the imports are done, reading the checkpoint begins."""
        try:
            return (self.run / ".lock").read_text().strip() == f"{self.process.pid}"
        except FileNotFoundError:
            return False

    def has_open_save(self) -> bool:
        """Whether a save or removal of its own is under way, or was when it was killed."""
        return self.has_claimed() and bool(leftovers(self.run) - self._leftovers_before)

    def kill(self, *, whole_group: bool = True, rank: int = 0) -> None:
        """SIGKILL to all, or to one rank alone: its workers and the other ranks must end by themselves."""
        if whole_group:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        else:
            self.processes[rank].kill()
        for process in self.processes:
            process.wait(WAIT_S)
        self.wait_gone()

    def wait_gone(self) -> None:
        """Return when no process of the group is left.

        Raises:
            TimeoutError: one survives.
        """
        deadline = time.monotonic() + 30  # torch's own watchdog in a worker looks every 5 s
        for process in self.processes:
            while alive := group_members(process.pid):
                if time.monotonic() > deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    raise TimeoutError(f"processes {alive} outlive their parent {process.pid}")
                time.sleep(0.005)

    def finish(self) -> None:
        """Let it come to its end.

        Raises:
            RuntimeError: it ends with another exit code than 0.
        """
        codes = [process.wait(WAIT_S) for process in self.processes]
        self.wait_gone()
        if any(codes):
            raise RuntimeError(f"exit codes {codes}:\n{self.output}")


@contextlib.contextmanager
def store_of(folder: Path) -> Iterator[None]:
    """While it lasts, s3://data/ has what lies in folder/data."""
    script = Path(__file__).with_name("s3_server.py")
    command = [sys.executable, f"{script}", f"{folder}", "--faults", "0.02"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            os.environ["AWS_ENDPOINT_URL"] = server.stdout.readline().strip()
            os.environ |= {
                "AWS_ACCESS_KEY_ID": "nobody",
                "AWS_SECRET_ACCESS_KEY": "nothing",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            yield
        finally:
            server.terminate()


def start_with_small_blocks(
    words: Sequence[str], *, output: IO[Any], environ: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """The command, which fetches some 20 images at a time of so few."""
    code = (
        "import sys; from flambeau.data.sources import sample_blocks; sample_blocks.BLOCK_BYTES = 40_000\n"
        "from flambeau.cli.command import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True, env=environ,
    )  # fmt: skip


def rank_environs(ranks: int) -> list[dict[str, str]]:
    """What a launcher tells each process of one machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    return [{**shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(ranks)]


def log_of(run: Path) -> Path:
    """What all lives of a run have said."""
    return run.with_name(f"{run.name}.log")


def group_members(group: int) -> list[int]:
    """The processes of a group that are not dead; one that waits to be reaped is."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, group_id = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(group_id) == group and state not in "ZX":
                members.append(int(entry.name))
    return members


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint; -1 where there is none."""
    folders = checkpoint_folders(run / "checkpoints")
    return int(folders[-1].name.removeprefix("step-")) if folders else -1


def leftovers(run: Path) -> set[str]:
    """The temporary names in checkpoints/: of a save or removal that is under way, or was killed."""
    try:
        return {name for name in os.listdir(run / "checkpoints") if name.startswith(".")}  # noqa: PTH208
    except FileNotFoundError:
        return set()


@dataclass(frozen=True)
class Kill:
    """One kill, and what it hit.

    Attributes:
        moment: what was waited for.
        parent_alone: its two workers, and other ranks, had to notice by themselves.
        in_save: a temporary folder of this life was left behind.
        step: of the newest checkpoint then.
    """

    moment: str
    parent_alone: bool
    in_save: bool
    step: int
    ranks: int = 1


def moments_of(kills: int, rng: random.Random) -> list[str]:
    """Which kind of moment each kill of a run is at."""
    deck = ["start", "claim", "steps", "steps", "steps", "steps", "save", "save", "save"]
    kinds = list(itertools.islice(itertools.cycle(deck), kills - 1))
    return [*rng.sample(kinds, len(kinds)), "end"]


def wait_for_moment(life: Life, kind: str, rng: random.Random, *, stride: int) -> bool:
    """Sleep until it is time to kill; False where the life has ended before.

    Args:
        life: just started.
        kind: what to wait for.
        rng: of the details.
        stride: checkpoints that a life should make on average, so that the kills are spread over the run.
    """
    target = max(0, life.first_step) + SAVE_EVERY * rng.randint(1, 2 * stride - 1)
    target = min(target, TOTAL_STEPS)
    delay_s = 0.0
    if kind == "start":
        time.sleep(rng.uniform(0, 2))
        return life.process.poll() is None
    if kind == "claim":
        came, delay_s = life.wait_for(life.has_claimed), rng.uniform(0, 0.1)
    elif kind == "steps":
        came, delay_s = life.wait_for(lambda: newest_step(life.run) >= target), rng.uniform(0, 0.05)
    elif kind == "save":
        came = life.wait_for(
            lambda: newest_step(life.run) >= target - SAVE_EVERY and life.has_open_save()
        )
        delay_s = rng.choice((0, rng.uniform(0, 0.001), rng.uniform(0, 0.01)))
    else:
        came = life.wait_for(lambda: newest_step(life.run) == TOTAL_STEPS)
        delay_s = rng.uniform(0, 0.02)
    if delay_s:
        time.sleep(delay_s)
    return came and life.process.poll() is None


def storm_one_run(
    arguments: Sequence[str],
    run: Path,
    *,
    kills: int,
    rng: random.Random,
    core: int,
    start: Start | None = None,
    ranks: tuple[int, int] = (1, 1),
    before_life: Callable[[random.Random], object] = lambda rng: None,
) -> list[Kill]:
    """Kill one run again and again, then let it finish; with `start`, but where it dies while torch loads.

    Returns:
        The kills; fewer than asked for where the run came to its end too early.
    """
    done: list[Kill] = []
    moments = moments_of(kills, rng)
    steps_left = TOTAL_STEPS - max(0, newest_step(run))
    stride = max(
        1, steps_left // SAVE_EVERY // (moments.count("steps") + moments.count("save") + 2)
    )
    workers = itertools.cycle(rng.sample((0, 2), 2))
    for moment in moments:
        how = None if moment == "start" else start
        num_ranks = rng.randint(*ranks) if ranks[1] > 1 else 1
        before_life(rng)
        life = Life(arguments, run, workers=next(workers), core=core, start=how, ranks=num_ranks)
        if not wait_for_moment(life, moment, rng, stride=stride):
            life.finish()
            break
        # Before ranks have met, nobody could tell one that was killed from one that is late.
        has_others = moment in ("steps", "save") if num_ranks > 1 else life.workers > 0
        parent_alone = has_others and rng.random() < 0.3
        life.kill(
            whole_group=not parent_alone, rank=rng.randrange(num_ranks) if num_ranks > 1 else 0
        )
        done.append(Kill(moment, parent_alone, life.has_open_save(), newest_step(run), num_ranks))
    Life(arguments, run, workers=next(workers), core=core, start=start, ranks=ranks[1]).finish()
    return done


def storm(
    folder: Path,
    *,
    kills: int,
    seed: int,
    arguments: Sequence[str],
    cores: Sequence[int],
    start: Start | None = None,
    ranks: tuple[int, int] = (1, 1),
    unkilled_ranks: int = 1,
    unkilled_arguments: Sequence[str] | None = None,
    first_arguments: Sequence[str] | None = None,
    before_life: Callable[[random.Random], object] = lambda rng: None,
) -> tuple[list[Kill], list[str], Path]:
    """As many runs as it takes for so many kills, one a core at a time, each compared with an unkilled one.

    Args:
        folder: an empty one.
        kills: at least so many.
        seed: of the moments.
        arguments: of the command, without --out and --workers.
        cores: to use.
        start: of lives that are not killed while torch loads.
        ranks: processes of a life, at least and at most; their number is drawn.
        unkilled_ranks: of the run that nobody kills.
        unkilled_arguments: of the run that nobody kills, if they are others.
        first_arguments: of a first start of each run, which is left to finish.
        before_life: called before each life that will be killed.

    Returns:
        The kills, the differences from the unkilled run, and its folder.
    """
    unkilled, lock, stop = folder / "unkilled", threading.Lock(), threading.Event()
    runs: list[Path] = []
    done: list[Kill] = []
    open_kills = kills

    def begin(run: Path, core: int) -> None:
        if first_arguments is not None:
            Life(first_arguments, run, workers=0, core=core, start=start).finish()

    def work(core: int) -> None:
        nonlocal open_kills
        if core == cores[0]:
            begin(unkilled, core)
            reference = arguments if unkilled_arguments is None else unkilled_arguments
            Life(
                reference, unkilled, workers=0, core=core, start=start, ranks=unkilled_ranks
            ).finish()
        while not stop.is_set():
            with lock:
                share = min(KILLS_A_RUN, open_kills)
                if share <= 0:
                    return
                open_kills -= share
                runs.append(folder / f"run-{len(runs):03}")
                run, rng = runs[-1], random.Random(f"{seed} {len(runs)}")
            begin(run, core)
            new = storm_one_run(
                arguments, run, kills=share, rng=rng, core=core, start=start, ranks=ranks,
                before_life=before_life,
            )  # fmt: skip
            with lock:
                open_kills += share - len(new)
                done.extend(new)

    def work_or_stop(core: int) -> None:
        try:
            work(core)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(len(cores)) as pool:
        list(pool.map(work_or_stop, cores))
    found = [f"{run.name}: {text}" for run in runs for text in differences(unkilled, run)]
    return done, found, unkilled


def differences(expected: Path, actual: Path) -> list[str]:
    """What is not bit-identical in a finished run, wall-clock figures and --workers aside; and complaints."""
    runs = expected, actual
    found = [
        f"it said: {line}" for line in log_of(actual).read_text().splitlines() if BAD.search(line)
    ]
    names, newest = ({p.name for p in run.iterdir()} for run in runs), map(newest_step, runs)
    found += compare("files", *map(sorted, names)) + compare("newest checkpoint", *newest)
    for name in ("model.safetensors", "result.json", "dataset.json"):
        if name == "dataset.json" and not (expected / name).exists():
            continue  # a loop with `Run` has none
        found += compare(name, *((run / name).read_bytes() for run in runs))
    configs = (tomllib.loads((run / "config.toml").read_text()) for run in runs)
    of_run = ({k: v for k, v in config.items() if k not in ELSEWHERE} for config in configs)
    found += compare("config.toml", *of_run)
    found += compare("metrics.jsonl", *map(journal, runs))
    in_parts = bool(tomllib.loads((expected / "config.toml").read_text()).get("parts"))
    for folder in checkpoint_folders(expected / "checkpoints"):
        other = actual / "checkpoints" / folder.name
        # A run that was killed between a save and the removal of older ones may have others as well.
        if other.exists():
            found += compare(
                folder.name,
                checkpoint(folder, in_parts=in_parts),
                checkpoint(other, in_parts=in_parts),
            )
    return found


def journal(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the wall clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in WALL_CLOCK} for row in rows]


def checkpoint(folder: Path, *, in_parts: bool = False) -> dict[str, Any]:
    """All that a checkpoint holds, verified; safetensors as bytes, the rest as objects.

    Args:
        in_parts: without the losses of the open line, which one process has one by one, and several together.
    """
    found = read_checkpoint(folder)
    # Wall-clock figures in metrics.jsonl have more or fewer digits, so its length says nothing.
    state, meta = (
        {k: v for k, v in part.items() if k not in ("metrics_bytes", "metrics_crc32", "created")}
        for part in (from_bytes(found.files["training_state.pt"]), found.meta)
    )
    if in_parts:
        state.pop("window")
    return {**found.files, "training_state.pt": state, "meta": meta}


def compare(place: str, expected: Any, actual: Any) -> list[str]:
    """Where two nested objects are not equal to the bit, types and the order of keys included."""
    if type(expected) is not type(actual):
        return [f"{place}: {type(actual).__name__}, expected {type(expected).__name__}"]
    if isinstance(expected, torch.Tensor):
        if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
            return [
                f"{place}: {actual.dtype} {actual.shape}, not {expected.dtype} {expected.shape}"
            ]
        bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (expected, actual))
        return [] if torch.equal(*bits) else [f"{place}: other bits"]
    if isinstance(expected, dict):
        found = compare(f"keys of {place}", list(expected), list(actual))
        pairs = [] if found else [(f"{place} {k}", v, actual[k]) for k, v in expected.items()]
    elif isinstance(expected, list | tuple):
        found = compare(f"length of {place}", len(expected), len(actual))
        numbers = itertools.count()
        pairs = [(f"{place} {n}", a, b) for n, a, b in zip(numbers, expected, actual, strict=False)]
    elif repr(expected) == repr(actual):  # tells 0.0 from -0.0, and NaN is equal to itself
        return []
    elif isinstance(expected, bytes):
        return [f"{place}: other bytes"]
    else:
        return [f"{place}: {actual!r}, expected {expected!r}"]
    return found + [text for pair in pairs for text in compare(*pair)]


def storm_of(options: argparse.Namespace, folder: Path) -> tuple[list[Kill], list[str]]:
    """The storm of the command line: the kills, and the differences."""
    (data := folder / "data").mkdir()
    arguments = make_inputs(
        data,
        precision=options.precision,
        task=options.task,
        parts=6 if options.ranks > 1 and not options.sharded else 0,
        sharded=options.sharded,
        own_data=options.own_data,
    )
    first = None
    if options.extended:
        first, arguments = in_two_halves(arguments)
    fewest = options.ranks if options.sharded else 1
    how = {
        "first_arguments": first, "kills": options.kills, "seed": options.seed,
        "ranks": (fewest, options.ranks), "unkilled_ranks": fewest,
        "cores": sorted(os.sched_getaffinity(0))[:2],
    }  # fmt: skip
    if not options.store:
        return storm(folder, arguments=arguments, **how)[:2]
    cache = folder / "cache"

    def wipe(rng: random.Random) -> None:
        if rng.random() < 1 / 3:
            shutil.rmtree(cache, ignore_errors=True)

    with store_of(folder):
        inside = [f"s3://data/{Path(arguments[0]).name}", *arguments[1:], "--cache", f"{cache}"]
        return storm(
            folder, arguments=inside, unkilled_arguments=arguments, before_life=wipe,
            start=start_with_small_blocks, **how,
        )[:2]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--task", choices=tuple(TASKS), default="classification")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a life, at most")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--store", action="store_true", help="what is killed reads from a store")
    parser.add_argument("--sharded", action="store_true", help="--shard fsdp, on --ranks processes")
    which.add_argument("--own-data", action="store_true", help="images of a class of the user's")
    which.add_argument("--extended", action="store_true", help="what is killed extends a run")
    parser.add_argument("--out", type=Path, help="append the line to this file as well")
    parser.add_argument(
        "--record", action="store_true", help="... to bench/results/kill_storm.jsonl"
    )
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill_storm_") as temporary:
        kills, found = storm_of(options, Path(temporary))
    from provenance import commit, cpu_model  # beside this script

    text = json.dumps({
        "contender": "kill_storm", "identical": not found, "kills": len(kills),
        "kills_in_saves": sum(kill.in_save for kill in kills),
        "kills_of_parent_alone": sum(kill.parent_alone for kill in kills),
        "kills_at": dict(sorted(Counter(kill.moment for kill in kills).items())),
        "distinct_steps": len({kill.step for kill in kills}), "steps_a_run": TOTAL_STEPS,
        "seed": options.seed, "precision": options.precision, "task": options.task,
        "store": options.store, "sharded": options.sharded, "own_data": options.own_data,
        "extended": options.extended,
        "kills_by_ranks": dict(sorted(Counter(kill.ranks for kill in kills).items())),
        "differences": found[:20],
        "seconds": round(time.monotonic() - start, 1), "torch": torch.__version__,
        "python": platform.python_version(), "cpu": cpu_model(), "commit": commit(),
        "command": " ".join(["python", "bench/kill_storm.py", *sys.argv[1:]]),
    })  # fmt: skip
    print(text)
    results = Path(__file__).parent / "results" / "kill_storm.jsonl"
    for path in [p for p in (options.out, results if options.record else None) if p is not None]:
        with path.open("a") as file:
            file.write(text + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
