"""Bits flipped while steps are checked by `verify_steps`, false alarms, and what the check costs.

    python bench/faults/flipped_bits.py [--flips N] [--from-outside N] [--on-ranks N] [--steps N]
        [--steps-on-ranks N] [--rounds N] [--seed S] [--record]

A small convnet with BatchNorm and dropout trains on noise in one process. In each of N steps, all of which
are checked, one random bit of the batch, a weight, an activation or a gradient is flipped while the first or
the second computation runs. A flip is `found` if the run says so; `harmless` if the gradients have the bits
of an undisturbed step all the same, as where ReLU or dropout take the value away; `missed` otherwise. The
weights at the end are compared with those of a run that nothing disturbed.

--from-outside: of so many steps on two ranks, each with a bit of rank 1 that this process flips in that
rank's memory, as a debugger would, while the rank waits in the middle of a computation.

--on-ranks: on two and on three ranks, with `parts` (one for each rank) and without, in each of so many steps
a bit of rank 1 is flipped once, as above; `accused_others`: of those found, how often another rank is the
suspect. `always`: in so many runs of one step rank 1 flips the same bit of the same activation or gradient in
each of its computations, as a core that is wrong every time; `named`: how often it is told which rank that
is, of three. Of two ranks nobody knows.

False alarms: of so many checked steps without a flip, in one process and on two ranks. Cost: seconds of 400
steps with 1/100 and without the check, by turns; the median of the ratios.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from flambeau import Run
from provenance import commit, cpu_model, record

KINDS = ("batch", "weight", "activation", "gradient")
BATCH = 16
Disturb = Callable[[nn.Module, Tensor, int], None]


def make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * width, 10),
    )  # fmt: skip


def train(
    folder: Path,
    steps: int,
    share: str,
    *,
    width: int = 8,
    parts: int | None = None,
    disturb: Disturb | None = None,
) -> tuple[dict[str, Tensor], float]:
    """Final weights, and seconds."""
    model = make_model(width)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(256, 3, 12, 12, generator=draw)
    data = TensorDataset(x, torch.randint(0, 10, (256,), generator=draw))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = Run(
        folder, model, optimizer, data, duration=f"{steps}st", batch_size=BATCH, bar=False,
        parts=parts, verify_steps=share, checkpoint_every=f"{steps}st",
    )  # fmt: skip
    start = time.perf_counter()
    for _ in run.epochs():
        for images, targets in run.batches():
            if disturb is not None:
                disturb(model, images, run.state.step + 1)
            run.step(cross_entropy(model(images), targets))
    return model.state_dict(), time.perf_counter() - start


class Flips:
    """One flipped bit per step, in its first or second computation."""

    def __init__(self, seed: int, flip_at: Callable[[int, int], None] | None = None) -> None:
        self._flip_at = flip_at  # an address in this process, and which of 8 bits
        self._draw = random.Random(seed)
        self._step = 0
        self._left = 0  # computations of the step until the flip
        self.kinds: dict[int, str] = {}

    def __call__(self, model: nn.Module, images: Tensor, step: int) -> None:
        if step != self._step:
            self._step = step
            self._left = self._draw.randrange(2)
            self.kinds[step] = self._draw.choice(KINDS)
        else:
            self._left -= 1
        if self._left:
            return
        kind = self.kinds[step]
        if kind == "batch":
            self._flip(images)
        elif kind == "weight":
            self._flip(self._draw.choice(list(model.parameters())))
        elif kind == "activation":
            module = self._draw.choice([m for m in model if not isinstance(m, nn.Flatten)])
            handle = module.register_forward_hook(
                lambda module, args, out: (handle.remove(), self._flipped(out))[1]
            )
        else:
            parameter = self._draw.choice(list(model.parameters()))
            remover = parameter.register_hook(
                lambda grad: (remover.remove(), self._flipped(grad))[1]
            )

    def _flipped(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        self._flip(copy)
        return copy

    def _flip(self, tensor: Tensor) -> None:
        bits = tensor.detach().view(torch.int32)
        place = tuple(self._draw.randrange(size) for size in bits.shape)
        bit = self._draw.randrange(31)
        if self._flip_at is None:
            bits[place] ^= 1 << bit
        else:
            self._flip_at(bits[place].data_ptr() + bit // 8, bit % 8)


def flipped(folder: Path, flips: int, seed: int) -> dict[str, Any]:
    calm, _ = train(folder / "calm", flips, "0")
    disturb = Flips(seed)
    found, _ = train(folder / "flipped", flips, "1/1", disturb=disturb)
    return counted(folder / "flipped", disturb.kinds, calm, found)


def alarms(run: Path) -> int:
    return (run / "events.jsonl").read_text(encoding="utf-8").count("computations ")


def counted(
    run: Path, kinds: dict[int, str], calm: dict[str, Tensor], found: dict[str, Tensor]
) -> dict[str, Any]:
    """How many flips a run has named; `kinds` by step."""
    events = (run / "events.jsonl").read_text(encoding="utf-8")
    is_equal = all(torch.equal(value, found[name]) for name, value in calm.items())
    named = {step for step in kinds if f"step {step}: " in events}
    silent = set(kinds) - named
    return {
        "flips": dict(Counter(kinds.values())),
        "found": len(named),
        # All that was not said has left the bits as they were, or the weights would be others.
        "harmless": len(silent) if is_equal else None,
        "missed": 0 if is_equal else len(silent),
        "same_weights": is_equal,
    }


def flipped_from_outside(folder: Path, flips: int, seed: int) -> dict[str, Any]:
    """The same in rank 1 of two; this process writes into its memory."""
    os.mkfifo(folder / "flipped")
    results = []
    for name, share in (("calm", "0"), ("outside", "1/1")):
        work = "calm" if share == "0" else "outside"
        with started(folder, 2, work, name, flips, seed, share, 0) as job:
            assert job.stdout is not None
            for line in job.stdout:
                word, *numbers = line.split() or [""]
                if word == "flip":
                    flip_in(*map(int, numbers))
                    (folder / "flipped").write_text("\n", encoding="ascii")
        assert job.returncode == 0
        results.append(torch.load(folder / f"{name}.pt"))
    kinds = json.loads((folder / "kinds.json").read_text(encoding="utf-8"))
    by_step = {int(step): kind for step, kind in kinds.items()}
    return counted(folder / "outside", by_step, *results)


def started(folder: Path, world: int, *told: object) -> "subprocess.Popen[str]":
    """This script on so many ranks, which do `on_rank(*told)`."""
    ours = [__file__, "--rank", json.dumps(told)]
    return subprocess.Popen(
        [sys.executable, "-m", "flambeau", "launch", "--procs", str(world), "--", *ours],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(job: "subprocess.Popen[str]") -> None:
    job.communicate()
    assert job.returncode == 0


def flipped_on_ranks(
    folder: Path, flips: int, seed: int, *, world: int, parts: int
) -> dict[str, Any]:
    folder.mkdir()
    wait_for(started(folder, world, "calm", "calm", flips, seed, "0", parts))
    wait_for(started(folder, world, "inside", "flipped", flips, seed, "1/1", parts))
    wait_for(started(folder, world, "always", "always", flips, seed, "1/1", parts))
    kinds = json.loads((folder / "kinds.json").read_text(encoding="utf-8"))
    by_step = {int(step): kind for step, kind in kinds.items()}
    calm, found = (torch.load(folder / f"{name}.pt") for name in ("calm", "flipped"))
    row = counted(folder / "flipped", by_step, calm, found)
    events = (folder / "flipped" / "events.jsonl").read_text(encoding="utf-8")
    row["accused_others"] = row["found"] - events.count("memory of the machine of rank 1 (")
    outcomes = Counter(json.loads((folder / "always.json").read_text(encoding="utf-8")))
    return row | {"always": dict(sorted(outcomes.items()))}


def flip_in(process: int, address: int, bit: int) -> None:
    """Flip a bit in the memory of another process."""
    with Path(f"/proc/{process}/mem").open("r+b", buffering=0) as memory:
        memory.seek(address)
        (byte,) = memory.read(1)
        memory.seek(address)
        memory.write(bytes([byte ^ 1 << bit]))


def on_rank(
    work: str, name: str, steps: int, seed: int, share: str, parts: int, width: int = 8
) -> None:
    """One rank of a job, in its folder; `work`: calm, or flips from inside, from outside, or always."""
    rank = os.environ["RANK"]
    if work == "always":
        outcomes = [always_flipped(f"{name}-{n}", seed + n, share, parts) for n in range(steps)]
        if rank == "0":
            Path(f"{name}.json").write_text(json.dumps(outcomes), encoding="utf-8")
        return

    def flip_at(address: int, bit: int) -> None:
        print("flip", os.getpid(), address, bit, flush=True)
        Path("flipped").read_text(encoding="ascii")  # a pipe

    disturb = None
    if rank == "1" and work != "calm":
        disturb = Flips(seed, flip_at if work == "outside" else None)
    weights, _ = train(Path(name), steps, share, width=width, parts=parts or None, disturb=disturb)
    if rank == "0":
        torch.save(weights, f"{name}.pt")
    if disturb is not None:
        Path("kinds.json").write_text(json.dumps(disturb.kinds), encoding="utf-8")


def always_flipped(name: str, seed: int, share: str, parts: int) -> str:
    """What came of a run of one step in which rank 1 makes the same mistake each time."""
    flips = FixedFlip(seed) if os.environ["RANK"] == "1" else None
    calm, _ = train(Path(f"{name}-calm"), 1, "0", parts=parts or None)
    try:
        weights, _ = train(Path(name), 1, share, parts=parts or None, disturb=flips)
    except SystemExit as stopped:
        assert stopped.code == 70
        weights = {}
    if os.environ["RANK"] != "0":
        return ""  # rank 0 writes what is read here
    events = (Path(name) / "events.jsonl").read_text(encoding="utf-8")
    if " differ in " in events:
        return "named" if "rank 1 (" in events else "found"
    is_equal = all(torch.equal(value, weights[name]) for name, value in calm.items())
    return "harmless" if is_equal else "missed"


class FixedFlip:
    """Flips one bit of one activation, or of one gradient, in each computation."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._is_set = False

    def __call__(self, model: nn.Module, images: Tensor, step: int) -> None:
        if self._is_set:
            return
        self._is_set = True
        draw = random.Random(self._seed)
        if draw.randrange(2):
            module = draw.choice([m for m in model if not isinstance(m, nn.Flatten)])
            module.register_forward_hook(lambda module, args, out: self._flipped(out))
        else:
            draw.choice(list(model.parameters())).register_hook(self._flipped)

    def _flipped(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        draw = random.Random(self._seed + 1)
        bits = copy.detach().view(torch.int32)
        bits[tuple(draw.randrange(size) for size in bits.shape)] ^= 1 << draw.randrange(31)
        return copy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=400)
    parser.add_argument("--from-outside", type=int, default=100, metavar="FLIPS")
    parser.add_argument("--on-ranks", type=int, default=50, metavar="FLIPS")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--steps-on-ranks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank:
        on_rank(*json.loads(arguments.rank))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row = {"bench": "flipped_bits", "seed": arguments.seed}
        row |= flipped(folder, arguments.flips, arguments.seed)
        (ranks := folder / "ranks").mkdir()
        row["from_outside"] = flipped_from_outside(ranks, arguments.from_outside, arguments.seed)
        row["on_ranks"] = {
            f"{world} {'parts' if parts else 'shares'}": flipped_on_ranks(
                folder / f"ranks-{world}-{parts}",
                arguments.on_ranks,
                arguments.seed,
                world=world,
                parts=parts,
            )
            for world in (2, 3)
            for parts in (0, world)
        }
        train(folder / "long", arguments.steps, "1/1", width=2)
        row |= {"checked_steps": arguments.steps, "false_alarms": alarms(folder / "long")}
        row |= {"checked_steps_on_ranks": arguments.steps_on_ranks, "false_alarms_on_ranks": {}}
        for kind, parts in (("shares", 0), ("parts", 2)):
            wait_for(started(folder, 2, "calm", kind, arguments.steps_on_ranks, 0, "1/1", parts, 2))
            row["false_alarms_on_ranks"][kind] = alarms(folder / kind)
        ratios = []
        for number in range(arguments.rounds):
            seconds = {}
            for share in ("0", "1/100") if number % 2 else ("1/100", "0"):
                place = folder / f"cost-{number}-{share.replace('/', '-')}"
                _, seconds[share] = train(place, 400, share, width=32)
            ratios.append(seconds["1/100"] / seconds["0"])
    row |= {
        "cost": round(statistics.median(ratios), 4),
        "cost_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "torch": torch.__version__,
        "cpu": cpu_model(),
        "commit": commit(),
    }
    record(row, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
