"""Accuracy of other projects' training scripts, as they are and with `fast(loader)` in one line of them.

    taskset -c 0 python bench/peer_scripts.py --data FOLDER --imagenet main.py --torchvision train.py
        --timm train.py [--first-seed N] [--seeds N] [--epochs N] [--record]

FOLDER holds train/ and val/. The scripts are those of PyTorch's examples (imagenet/main.py), of torchvision
(references/classification/train.py) and of timm (train.py); those that are not given are left out. Each is
run on the CPU, with no worker processes, once per seed without and once with the line, in turn. The line is
added to a copy, behind the statement that makes the second loader. One JSON line per script: the accuracies
of the last epoch in percent, their difference with its standard error, wall and CPU seconds of whole runs.
"""

import argparse
import ast
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

from provenance import commit, cpu_model, record  # beside this script

LAUNCHER = Path(__file__).parent / "peer_launcher.py"


@dataclass(frozen=True)
class Peer:
    """How a script is run.

    Attributes:
        loaders: its names for the loader of training and of evaluation.
        accuracy: what the last evaluation writes, in percent.
        arguments: those that do not change.
    """

    loaders: tuple[str, str]
    accuracy: str
    arguments: str


PEERS = {
    "imagenet": Peer(
        ("train_loader", "val_loader"), r"\* +Acc@1 ([\d.]+)",
        "{data} -a small_resnet -j 0 -b 16 --lr 0.02 --epochs {epochs} --seed {seed} -p 1000 --no-accel",
    ),
    "torchvision": Peer(
        ("data_loader", "data_loader_test"), r"Test: +Acc@1 ([\d.]+)",
        "--data-path {data} --model small_resnet --device cpu -j 0 -b 16 --lr 0.05 --epochs {epochs}"
        " --lr-scheduler cosineannealinglr --train-crop-size 64 --val-resize-size 72 --val-crop-size 64"
        " --print-freq 1000",
    ),
    "timm": Peer(
        ("loader_train", "loader_eval"), r"Test: .*Acc@1: +[\d.]+ \( *([\d.]+)\)",
        "--data-dir {data} --val-split val --model test_resnet --num-classes 10 --img-size 64 --device cpu"
        " -j 0 -b 16 --lr 0.05 --sched cosine --warmup-epochs 0 --epochs {epochs} --seed {seed}"
        " --output out --checkpoint-hist 1 --log-interval 1000",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a run of a script gave: percent, seconds, and all that it wrote."""

    accuracy: float
    seconds: float
    cpu_seconds: float
    output: str


def with_the_line(source: str, loaders: tuple[str, str]) -> str:
    """A script with `fast` behind the statement of a function's body in which its second loader is made."""

    def makes(part: ast.AST) -> bool:
        return (
            isinstance(part, ast.Assign)
            and isinstance(part.value, ast.Call)
            and isinstance(part.targets[0], ast.Name)
            and part.targets[0].id == loaders[1]
        )

    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    statements = [one for node in functions for one in node.body if any(map(makes, ast.walk(one)))]
    if len(statements) != 1:
        raise SystemExit(f"{loaders[1]} is made in {len(statements)} places; expected 1")
    own, behind = statements[0], statements[0].end_lineno
    train, evaluation = loaders
    line = (
        f"from flambeau.data.fast import fast; {train}, {evaluation} = fast({train}), fast({evaluation});"
        f" print({train}.report(), {evaluation}.report(), sep='\\n')\n"
    )
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:behind], " " * own.col_offset + line, *lines[behind:]])


def train(name: str, script: Path, data: Path, *, seed: int, epochs: int, is_fast: bool) -> Outcome:
    """Run a copy of a script to its end, in a folder of its own."""
    peer, source = PEERS[name], script.read_text(encoding="utf-8")
    arguments = peer.arguments.format(data=data.resolve(), epochs=epochs, seed=seed).split()
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / script.name
        copy.write_text(
            with_the_line(source, peer.loaders) if is_fast else source, encoding="utf-8"
        )
        start, cpu = time.perf_counter(), children_cpu_seconds()
        done = subprocess.run(
            [sys.executable, LAUNCHER, f"{seed}", copy, script.resolve().parent, *arguments],
            cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        seconds, cpu = time.perf_counter() - start, children_cpu_seconds() - cpu
    found = re.findall(peer.accuracy, done.stdout)
    if done.returncode or len(found) < epochs:
        raise SystemExit(f"{script} ended with {done.returncode} and wrote\n{done.stdout}")
    return Outcome(float(found[-1]), seconds, cpu, done.stdout)


def children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compared(name: str, script: Path, data: Path, *, seeds: range, epochs: int) -> dict[str, Any]:
    """The accuracies with all seeds, without and with the line."""
    runs: dict[str, list[Outcome]] = {"before": [], "after": []}
    for seed in seeds:
        for one, own in runs.items():
            own.append(train(name, script, data, seed=seed, epochs=epochs, is_fast=one == "after"))
            print(name, seed, one, own[-1].accuracy, round(own[-1].seconds), file=sys.stderr)
    accuracies = {one: [run.accuracy for run in own] for one, own in runs.items()}
    before, after = accuracies.values()
    error = math.sqrt((statistics.variance(before) + statistics.variance(after)) / len(seeds))
    return {
        "script": name, "seeds": list(seeds), **accuracies,
        "difference": round(statistics.mean(after) - statistics.mean(before), 2),
        "standard_error": round(error, 2),
        **{f"seconds_{one}": [round(run.seconds) for run in own] for one, own in runs.items()},
        **{f"cpu_seconds_{one}": [round(run.cpu_seconds) for run in own] for one, own in runs.items()},
        "reports": re.findall(r"^(?:to be )?taken over.*$", runs["after"][0].output, re.MULTILINE),
        "epochs": epochs,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--record", action="store_true")
    told = parser.parse_args()
    if told.seeds < 2:
        parser.error(
            "--seeds must be at least 2: the spread is what the difference is compared with"
        )
    at, seeds = commit(), range(told.first_seed, told.first_seed + told.seeds)
    for name in PEERS:
        script = vars(told)[name]
        if script is None:
            continue
        row = compared(name, script, told.data, seeds=seeds, epochs=told.epochs) | {
            "torch": torch.__version__, "torchvision": torchvision.__version__,
            "timm": timm.__version__, "cpu": cpu_model(), "commit": at,
            "command": f"taskset -c 0 python bench/peer_scripts.py --data DIR --{name} {script.name}"
            f" --first-seed {told.first_seed} --seeds {told.seeds} --epochs {told.epochs}",
        }  # fmt: skip
        record(row, __file__, keep=told.record)


if __name__ == "__main__":
    main()
