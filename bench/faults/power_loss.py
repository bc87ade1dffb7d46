"""Power cuts while checkpoints are saved: each state that a disk may be left in is read right, or refused.

    python bench/faults/power_loss.py [--states N] [--seconds S] [--seed S] [--record]

A run of six checkpoints with its settings, pruned, is cut off at each of its disk operations and inside each
write, on the disk in memory of tests/recipes/checkpoints/test_checkpoint_faults.py.
A cut leaves any part of the changes of names, and each file that was not synced absent, empty, cut short,
zeroed, with a hole, with what lay there before, or whole.
Then all that was promised is there and right, a restart takes the newest, and goes on from it.
In others a write went elsewhere besides, over a file that was synced long ago: here each checkpoint is right
or refused by name, and the newest right one is taken.
Packed images, exports and weights are in power_loss_outputs.py.
Needs pytest, whose tests it runs.
"""

import argparse
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/recipes/checkpoints"))

import test_checkpoint_faults as faults

from flambeau.recipes.checkpoints.atomic_checkpoint import (
    CheckpointDamaged,
    checkpoint_folders,
    latest_checkpoint,
)
from provenance import commit, cpu_model, record


def files_below(node: Any) -> list[Any]:
    if isinstance(node, faults.FileNode):
        return [node]
    return [file for child in node.names.values() for file in files_below(child)]


def misdirect(disk: Any, rng: random.Random) -> bool:
    """Let a write of one file land in another; False if that changes nothing."""
    files = files_below(disk.top)
    if not files:
        return False
    source, target = rng.choice(files), rng.choice(files)
    at = rng.randrange(len(target.data) + 1)
    size = rng.choice([1, 32, 512])
    start = rng.randrange(len(source.data) + 1)
    written = bytes(source.data[start : start + size])
    changed = target.data[:at] + written + target.data[at + len(written) :]
    if changed == target.data:
        return False
    target.data = changed
    target.synced = bytes(changed)
    return True


def is_refused_or_right(disk: Any) -> bool:
    """Whether each checkpoint is right or refused, and the newest right one is taken."""
    right = []
    for folder in checkpoint_folders(faults.ROOT, disk=disk):
        step = int(folder.name[5:])
        try:
            if not faults.is_right(disk, step):
                return False
        except CheckpointDamaged:
            continue
        right.append(step)
    latest, _ = latest_checkpoint(faults.ROOT, disk=disk)
    return (latest.meta["step"] if latest else 0) == max(right, default=0)


def campaign(states: int, seed: int, ends: float) -> tuple[dict[str, int], list[str]]:
    """How many states of each kind there were, and those that were read wrongly."""
    counts = {"cuts": 0, "kept, dropped or torn": 0, "misdirected": 0}
    bad = []
    rng = random.Random(seed)
    while True:
        for number, (disk, past) in enumerate(faults.deaths()):
            counts["cuts"] += 1
            for at, rest in enumerate(faults.crashes(disk, rng, samples=3)):
                if sum(counts.values()) - counts["cuts"] >= states or time.monotonic() > ends:
                    return counts, bad
                name = f"seed {seed}, cut {number}, state {at}, after {sum(counts.values())}"
                other = faults.crash(rest, faults.everything, lambda synced, data: data)
                counts["kept, dropped or torn"] += 1
                try:
                    faults.check_and_go_on(rest, past)
                except (AssertionError, OSError, ValueError) as error:
                    bad.append(f"{name}: {type(error).__name__} {error}"[:300])
                if misdirect(other, rng):
                    counts["misdirected"] += 1
                    if not is_refused_or_right(other):
                        bad.append(f"{name}: misdirected")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    started = time.monotonic()
    counts, bad = campaign(arguments.states, arguments.seed, started + arguments.seconds)
    line = {
        "bench": "power_loss",
        "states": sum(counts.values()) - counts["cuts"],
        **counts,
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - started, 1),
        "bad": bad,
        "torch": version("torch"),
        "processor": cpu_model(),
        "commit": commit(),
    }
    record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
