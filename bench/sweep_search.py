"""What a sweep costs beside its trainings, and what halving finds beside an exhaustive grid.

    python bench/sweep_search.py overhead [--rounds N] [--epochs N] [--record]
    python bench/sweep_search.py halving [--epochs N] [--record]

Both train on the embedded Fashion-MNIST.
overhead: `flambeau sweep` over four rates beside the four commands `flambeau train`, by turns, of 5 epochs
unless --epochs says otherwise: the time of the sweep beside that of its runs, and of the commands.
halving: a grid of 10 rates and 4 strengths of mixup, all trained for 27 epochs unless --epochs says
otherwise, beside 40 trials of a search with halving over the ranges that the grid covers.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from provenance import commit, cpu_model, record

RATES = ["0.02", "0.05", "0.1", "0.2"]
GRID = ["0.001", "0.002", "0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"]


def timed(*words: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "flambeau", *words], check=True, capture_output=True)
    return time.perf_counter() - started


def results(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "sweep.jsonl").read_text().splitlines())
    return [row for row in rows if "member" in row]


def overhead(folder: Path, rounds: int, epochs: int) -> dict[str, Any]:
    pairs = []
    for number in range(rounds):
        out = folder / f"sweep{number}"
        flags = ["--epochs", str(epochs), "--out"]
        of_sweep = timed(
            "sweep", "--set", f"lr={','.join(RATES)}", *flags, str(out), "--sampler", "grid"
        )
        of_runs = sum(row["seconds"] for row in results(out))
        commands = sum(
            timed("train", "--lr", rate, *flags, str(folder / f"{number}-{rate}")) for rate in RATES
        )
        pairs.append((of_sweep, of_runs, commands))
    return {
        "epochs": epochs,
        "sweep_s": [round(one, 2) for one, _, _ in pairs],
        "runs_in_it_s": [round(one, 2) for _, one, _ in pairs],
        "commands_s": [round(one, 2) for _, _, one in pairs],
        "beside_its_runs": round(statistics.median(a / b for a, b, _ in pairs), 3),
        "beside_commands": round(statistics.median(a / c for a, _, c in pairs), 3),
    }


def halving(folder: Path, epochs: int) -> dict[str, Any]:
    flags = ["--epochs", str(epochs), "--trials", "40", "--out"]
    mixup = "0,0.1,0.2,0.4"
    grid_s = timed(
        "sweep", "--set", f"lr={','.join(GRID)}", "--set", f"mixup={mixup}",
        "--sampler", "grid", *flags, str(folder / "grid"),
    )  # fmt: skip
    halving_s = timed(
        "sweep", "--set", "lr=0.001..1:log", "--set", "mixup=0..0.4",
        "--halving", *flags, str(folder / "halving"),
    )  # fmt: skip
    best = {
        name: max(row["value"] for row in results(folder / name) if row["is_whole"])
        for name in ("grid", "halving")
    }
    return {
        "epochs": epochs,
        "grid_s": round(grid_s),
        "halving_s": round(halving_s),
        "time": round(halving_s / grid_s, 3),
        "best": best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("overhead", "halving"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sweep-search-") as name:
        folder = Path(name)
        found = (
            overhead(folder, arguments.rounds, arguments.epochs or 5)
            if arguments.what == "overhead"
            else halving(folder, arguments.epochs or 27)
        )
    row = {
        "bench": f"sweep_{arguments.what}",
        **found,
        "torch": version("torch"),
        "optuna": version("optuna"),
        "processor": cpu_model(),
        "commit": commit(),
    }
    record(row, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
