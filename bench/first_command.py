"""Seconds and accuracy of `flambeau train` without data, with and without native bfloat16.

    python bench/first_command.py [--seeds N] [--record]

Each seed runs both contenders, in a new order, each as a command of its own in an empty folder: `bf16` as the
machine has it, and `fp32` with the instruction sets of torch and oneDNN held to AVX2, as on a processor of
2013 to 2017. Seconds are those of the whole command, with Python's start; `cpu_s` is the processor time of
all its threads. One JSON line per contender.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from provenance import commit, cpu_model  # beside this script

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
CONTENDERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "bf16": (["--precision", "bf16"], {}),
    "fp32, AVX2": (["--precision", "fp32"], AVX2),
}


def one(flags: list[str], environment: dict[str, str], seed: int) -> dict[str, float]:
    """Seconds of one command, and the accuracy that it publishes."""
    with tempfile.TemporaryDirectory() as folder:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "flambeau", "train", "--seed", str(seed), *flags],
            cwd=folder, env=os.environ | environment, check=True, capture_output=True,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        (result,) = Path(folder).glob("runs/*/result.json")
        accuracy = json.loads(result.read_text(encoding="utf-8"))["metrics"]["val_accuracy"]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu_s, "val_accuracy": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--record", action="store_true", help="append to bench/results/first_command.jsonl"
    )
    arguments = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    shuffle = random.Random(0)
    for seed in range(arguments.seeds):
        for name in shuffle.sample(list(CONTENDERS), len(CONTENDERS)):
            figures[name].append(one(*CONTENDERS[name], seed))
            print(f"seed {seed}, {name}: {figures[name][-1]}", file=sys.stderr)
    lines = []
    for name, runs in figures.items():
        seconds = [run["seconds"] for run in runs]
        accuracies = [run["val_accuracy"] for run in runs]
        lines.append(
            json.dumps(
                {
                    "contender": name, "n": len(runs),
                    "seconds_median": round(statistics.median(seconds), 1),
                    "seconds": [round(min(seconds), 1), round(max(seconds), 1)],
                    "cpu_s_median": round(statistics.median(run["cpu_s"] for run in runs), 1),
                    "val_accuracy_mean": round(statistics.mean(accuracies), 4),
                    "val_accuracy": [min(accuracies), max(accuracies)],
                    "load": os.getloadavg()[0], "torch": torch.__version__, "cpu": cpu_model(),
                    "commit": commit(),
                }
            )
        )  # fmt: skip
    print("\n".join(lines))
    if arguments.record:
        path = Path(__file__).parent / "results" / "first_command.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
