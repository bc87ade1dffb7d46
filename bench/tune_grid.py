"""Whether `flambeau tune` finds the fastest settings: beside an exhaustive grid over the same levers.

    python bench/tune_grid.py [--pairs N] [--start PAIR] [--budget 5min] [--blocks N] [--out FILE] [--record]

A pair is a model and data for `flambeau train`. For each of them tune searches, within the budget. Then

- its choice and the settings as they are run in turn, in blocks: is the choice slower, by a one-sided test at
  95 %?
- for the first eight pairs, all combinations of the values of the levers run once; the fastest five of them
  run in turn with the choice: how much longer does a step of the choice take than one of the best?

The levers are the number of workers, the threads of the model and the precision. Each run is a process that
times steps for some seconds; ratios are made within a block, so a machine that slows down does so for both.

Each pair is a line of FILE when it is done, and pairs that are in it are not done again, so the bench can be
run in slices: `--pairs 2` does two more. The last line is a summary of all that are done.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from flambeau.recipes.setup.environment import default_device
from flambeau.run.options.durations import parse_seconds
from flambeau.tune.doctor.paired_test import gain_of
from flambeau.tune.search.levers import Lever, levers_of_train
from flambeau.tune.search.run_tune import Options, Trials, tune
from provenance import commit, cpu_model, record  # beside this script

CACHE = Path(tempfile.gettempdir()) / "flambeau_tune_grid"
LEVERS = "workers", "threads", "precision"
NUM_GRIDS = 8
BEST = 5  # of a grid, which run again in turn with the choice
TRIAL_S = 2.0
# Sizes and numbers of JPEG files, and what train makes of them; None is the embedded Fashion-MNIST.
PAIRS: list[tuple[tuple[int, int, int] | None, str]] = [
    (None, "--model tiny_convnet"),
    (None, "--model small_convnet"),
    ((80, 64, 3000), "--model small_convnet --image-size 64"),
    ((160, 120, 3000), "--model resnet18 --image-size 64 --batch-size 32"),
    ((400, 300, 2000), "--model tiny_convnet --image-size 64 --batch-size 32"),
    ((400, 300, 2000), "--model resnet18 --image-size 96 --batch-size 16"),
    ((1000, 750, 500), "--model small_convnet --image-size 96 --batch-size 16"),
    ((400, 300, 2000), "--model mobilenetv3_small_050 --image-size 96 --batch-size 16"),
    (None, "--model tiny_convnet --batch-size 16"),
    (None, "--model tiny_convnet --batch-size 512"),
    (None, "--model small_convnet --batch-size 256"),
    (None, "--model small_convnet --optimizer adamw"),
    ((80, 64, 3000), "--model tiny_convnet --image-size 32"),
    ((80, 64, 3000), "--model test_resnet --image-size 64 --augment randaugment"),
    ((160, 120, 3000), "--model test_vit --image-size 160 --batch-size 16"),
    ((160, 120, 3000), "--model small_convnet --image-size 64 --color-jitter 0.4"),
    ((400, 300, 2000), "--model small_convnet --image-size 64 --batch-size 8"),
    ((400, 300, 2000), "--model test_resnet --image-size 128 --batch-size 16"),
    ((1000, 750, 500), "--model tiny_convnet --image-size 64 --batch-size 8"),
    ((1000, 750, 500), "--model resnet18 --image-size 64 --batch-size 8"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="how many more, at most")
    parser.add_argument("--start", type=int, default=0, help="the pair to begin with, from 0")
    parser.add_argument("--budget", default="5min", help="of each search")
    parser.add_argument("--blocks", type=int, default=5, help="of runs in turn")
    parser.add_argument("--out", type=Path, default=CACHE / "pairs.jsonl")
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    told = parser.parse_args()
    told.out.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        [json.loads(line) for line in told.out.read_text().splitlines()]
        if told.out.exists()
        else []
    )
    done = {row["pair"] for row in rows}
    left = [pair for pair in range(told.start, len(PAIRS)) if pair not in done]
    options = Options(budget_s=parse_seconds(told.budget, name="--budget"), seconds=TRIAL_S)
    for pair in left[: told.pairs]:
        row = one_pair(pair, options, blocks=told.blocks)
        rows.append(row)
        with told.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    summary = summary_of(rows) | {
        "torch": torch.__version__, "cpu": cpu_model(), "commit": commit(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    record(summary, __file__, keep=told.record)


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all pairs."""
    behind = [row["to_best"] for row in rows if row["to_best"] is not None]
    return {
        "pairs": len(rows), "slower": sum(row["verdict"] == "slower" for row in rows),
        "faster": sum(row["verdict"] == "faster" for row in rows),
        "grids": len(behind), "within_3_percent": sum(ratio <= 1.03 for ratio in behind),
        "to_best": behind, "longest_s": max((row["tune_s"] for row in rows), default=0.0),
    }  # fmt: skip


def one_pair(pair: int, options: Options, *, blocks: int) -> dict[str, Any]:
    """Search, compare the choice with nothing set, and with the best of the grid."""
    images, words = PAIRS[pair]
    command = [sys.executable, "-m", "flambeau", "train"]
    command += [] if images is None else [f"{photos(*images)}"]
    command += [*words.split(), "--epochs", "1000"]
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder)
        levers = [
            one for one in levers_of_train(command[4:], objective="throughput", device=default_device())
            if one.name in LEVERS
        ]  # fmt: skip
        began = time.monotonic()
        found = tune(
            command, lambda run: levers, options, is_train=True, journal=journal / "tune.jsonl", say=note
        )  # fmt: skip
        tune_s = time.monotonic() - began
        trials = Trials(
            command, options, is_train=True, journal=journal / "grid.jsonl", say=note
        )  # fmt: skip
        trials.levers = {lever.name: lever for lever in levers}
        row: dict[str, Any] = {
            "pair": pair, "images": images, "words": words, "choice": found.choice,
            "tune_s": round(tune_s, 1),
        }  # fmt: skip
        row |= against_default(trials, found.choice, blocks)
        grid = list(grid_of(levers)) if pair < NUM_GRIDS else []
        return row | against_grid(trials, found.choice, grid, blocks)


def against_default(trials: Trials, choice: dict[str, str], blocks: int) -> dict[str, Any]:
    """The gain of the choice over nothing set; nothing was chosen: it is what it is."""
    if not choice:
        return {"times": 1.0, "low": None, "high": None, "verdict": "nothing chosen"}
    costs = in_turn(trials, [{}, choice], blocks)
    gain = gain_of(*costs)
    return {
        "times": round(gain.times, 3), "low": round(gain.low, 3), "high": round(gain.high, 3),
        "verdict": gain.verdict,
    }  # fmt: skip


def against_grid(
    trials: Trials, choice: dict[str, str], grid: list[dict[str, str]], blocks: int
) -> dict[str, Any]:
    """How many times as long a step of the choice takes as one of the best of all; None without a grid."""
    if not grid:
        return {"grid": 0, "best": None, "to_best": None}
    once = {number: trials.measure(other).cost or math.inf for number, other in enumerate(grid)}
    first = [grid[number] for number in sorted(once, key=lambda number: once[number])[:BEST]]
    if choice not in first:
        first.append(choice)
    costs = in_turn(trials, first, blocks)
    ratios = [
        statistics.geometric_mean(a / b for a, b in zip(costs[first.index(choice)], other, strict=True))
        for other in costs
    ]  # fmt: skip
    best = max(range(len(first)), key=lambda number: ratios[number])
    return {"grid": len(grid), "best": first[best], "to_best": round(ratios[best], 4)}


def in_turn(trials: Trials, choices: list[dict[str, str]], blocks: int) -> list[list[float]]:
    """Seconds per step of each, block by block; the first of a block is another one each time."""
    costs: list[list[float]] = [[] for _ in choices]
    for block in range(blocks):
        order = list(range(len(choices)))
        at = block % len(order)
        for number in order[at:] + order[:at]:
            measured = trials.measure(choices[number])
            assert measured.cost is not None, measured.failure
            costs[number].append(measured.cost)
    return costs


def grid_of(levers: list[Lever]) -> Iterator[dict[str, str]]:
    """All combinations, those with levers left as they are among them."""
    values = [[None, *(setting.value for setting in lever.settings)] for lever in levers]
    for combination in itertools.product(*values):
        yield {
            lever.name: value
            for lever, value in zip(levers, combination, strict=True)
            if value is not None
        }


def photos(width: int, height: int, count: int) -> Path:
    """A folder of ten classes with JPEG files, smooth and noisy, made once."""
    folder = CACHE / f"photos-{width}x{height}-{count}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=CACHE))
    draws = np.random.default_rng(0)
    for number in range(count):
        coarse = draws.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        image = np.asarray(
            Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        )
        noisy = (image + draws.normal(0, 8, image.shape)).clip(0, 255).astype(np.uint8)
        place = part / f"class{number % 10}"
        place.mkdir(exist_ok=True)
        Image.fromarray(noisy).save(place / f"{number:05}.jpg", quality=90)
    part.replace(folder)
    return folder


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
