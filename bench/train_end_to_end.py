"""Photographs to published weights: `flambeau train` at its defaults beside timm, Lightning and torchvision.

    python bench/train_end_to_end.py --data FOLDER [--timm-script train.py] [--sizes 128,224] [--epochs N]
        [--rounds N] [--cores N] [--workers N] [--contenders NAME,...] [--precision auto|bf16|fp32]
        [--peer-lr RATE] [--quiet CORES] [--record]

FOLDER holds train/ and val/ with a folder per class. ResNet-18 from scratch, batches of 64, SGD with
Nesterov momentum 0.9, weight decay 5e-4, rates with a warm-up and a cosine, random resized crops of 25 % and
more, flips; an evaluation and a checkpoint after each epoch. These are the defaults of `flambeau train`, and
the peers are given the same, but for label smoothing, and timm's script no warm-up; with --peer-lr 0.025
they have the rate that timm's script takes by itself, 0.1 at a batch of 256. timm is its train.py, if it is
given, which leaves out the last batch of an epoch if it is not full; the other two are in
end_to_end_peers.py. All have channels_last, and bfloat16 where the processor has it (--precision auto). Two
contenders train on images of half the size first (progressive resizing), each with its own schedule:
`flambeau train --start-size` and `timm --train-img-sizes`.

Each contender is a command in a process of its own, on the first --cores cores of this process, with as many
threads; peers have --workers worker processes: one core has nothing to gain from them. A line has the seconds
from the start of the command to its end and the processor time of all its processes; `others`, how many
cores other programs used meanwhile; `val_accuracy`, that of the best evaluation. With --quiet a contender
waits, for at most ten minutes, until others use less than that.

Each round runs all contenders in a new order, with another seed. Each line is written when it is known; what
has a line of this round and commit is not run again. The last lines have the medians, and the ratio to the
loop of torchvision, round by round: of processor time, `ratio`, and of wall time, `wall_ratio`, which is of
no use where `others` is large. Exit code: 0; 1 if a contender failed.
"""

import argparse
import contextlib
import csv
import importlib.metadata
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.recipes.setup.environment import native_bf16
from provenance import commit, cpu_model, record  # beside this script

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results" / f"{Path(__file__).stem}.jsonl"
OURS = "flambeau train"
SMALL_FIRST = "flambeau train --start-size"
TIMM = "timm"
TIMM_SMALL_FIRST = "timm --train-img-sizes"
OWN, OF_TIMM = (OURS, SMALL_FIRST), (TIMM, TIMM_SMALL_FIRST)
NAMES = *OWN, *OF_TIMM, "lightning", "torchvision"
PACKAGES = "torch", "torchvision", "timm", "lightning"
IDENTITY = (
    "contender",
    "size",
    "cores",
    "workers",
    "epochs",
    "precision",
    "peer_lr",
    "round",
    "commit",
)
SHARED = "epochs", "cores", "workers", "precision", "peer_lr", "images", "cpu", "commit"
BASELINE = "torchvision"
PATIENCE_S = 600.0  # for a quiet machine; chosen


@dataclass(frozen=True)
class Case:
    """One run of a contender."""

    contender: str
    size: int
    seed: int
    workers: int


class Failed(Exception):
    """A contender gave no accuracy; says why."""


def words_of(case: Case, told: argparse.Namespace, out: Path) -> list[str | Path]:
    """The command of a contender, without Python; it writes into `out`."""
    if case.contender in OWN:
        return [
            "-m", "flambeau", "train", told.data, "--out", out, "--image-size", str(case.size),
            "--epochs", str(told.epochs), "--seed", str(case.seed), "--precision", told.precision,
            *(["--start-size", str(case.size // 2)] if case.contender == SMALL_FIRST else []),
        ]  # fmt: skip
    if case.contender in OF_TIMM:
        words = (
            f"--data-dir {told.data} --train-split train --val-split val --model resnet18 --num-classes 10"
            f" --img-size {case.size} --batch-size 64 --workers {case.workers} --device cpu --channels-last"
            f" --opt sgd --momentum 0.9 --weight-decay 5e-4 --lr {told.peer_lr} --opt-kwargs fused=True"
            f" --sched cosine --sched-on-updates --warmup-epochs 0 --min-lr 0 --epochs {told.epochs}"
            f" --scale 0.25 1 --color-jitter 0 --smoothing 0 --crop-pct 0.875 --interpolation bilinear"
            f" --train-interpolation bilinear --seed {case.seed} --log-interval 1000 --checkpoint-hist 1"
            f" --output {out} --experiment run"
        ).split()
        if told.precision == "bf16":
            words += ["--amp", "--amp-dtype", "bfloat16"]
        if case.contender == TIMM_SMALL_FIRST:
            sides = [str(case.size * eighths // 8) for eighths in (4, 6, 8)]
            words += ["--train-img-sizes", *sides, "--train-size-schedule", "progressive"]
        return [told.timm_script, *words]
    return [
        BENCH / "end_to_end_peers.py", case.contender, told.data, "--out", out, "--size", str(case.size),
        "--epochs", str(told.epochs), "--workers", str(case.workers), "--seed", str(case.seed),
        "--precision", told.precision, "--lr", str(told.peer_lr),
    ]  # fmt: skip


def accuracy_of(case: Case, out: Path, output: str) -> float:
    """The accuracy of the best evaluation, 0 to 1."""
    if case.contender in OWN:
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
        return float(result["metrics"]["val_accuracy"])
    if case.contender in OF_TIMM:
        with (out / "run" / "summary.csv").open(encoding="utf-8", newline="") as file:
            return max(float(row["eval_top1"]) for row in csv.DictReader(file)) / 100
    return float(json.loads(output.splitlines()[-1])["val_accuracy"])


def run(case: Case, told: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    cores = sorted(os.sched_getaffinity(0))[: told.cores]
    source = os.pathsep.join(
        filter(None, [str(BENCH.parent / "src"), os.environ.get("PYTHONPATH")])
    )
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": str(len(cores))}
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        cpu, busy, start = children_cpu_s(), busy_cpu_s(), time.perf_counter()
        done = subprocess.run(
            [sys.executable, *words_of(case, told, out)], cwd=place, env=environment, text=True,
            capture_output=True, check=False, preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        seconds = time.perf_counter() - start
        cpu_s, busy_s = children_cpu_s() - cpu, busy_cpu_s() - busy
        if done.returncode:
            lines = [*filter(str.strip, done.stderr.splitlines()), "without a word"]
            raise Failed(f"it ended with {done.returncode}: {lines[-2:][0]}")
        accuracy = accuracy_of(case, out, done.stdout)
    return {
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "others": round(max(0.0, busy_s - cpu_s) / seconds, 2),
        "val_accuracy": round(accuracy, 4),
    }


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def busy_cpu_s() -> float:
    """Seconds that all processors together have worked, by Linux's count."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(cores: float) -> None:
    """Until other programs use less than so many cores, or patience ends."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        before = busy_cpu_s()
        time.sleep(2)
        if (busy_cpu_s() - before) / 2 < cores:
            return


def facts(told: argparse.Namespace) -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    num = {part: sum(1 for _ in (told.data / part).glob("*/*")) for part in ("train", "val")}
    return {
        "epochs": told.epochs, "cores": told.cores, "precision": told.precision, "peer_lr": told.peer_lr,
        "images": num, **versions, "cpu": cpu_model(), "commit": told.commit or commit(),
    }  # fmt: skip


def cases(told: argparse.Namespace) -> Iterator[tuple[int, Case]]:
    """The cases of all rounds: each size, and within it a new order of contenders."""
    for number in range(told.rounds):
        for size in told.sizes:
            order = random.Random(f"{number} {size}").sample(told.contenders, len(told.contenders))
            for name in order:
                yield number, Case(name, size, number, 0 if name in OWN else told.workers)


def summary(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Per size and contender the medians, and the ratio of its figures to the baseline's, round by round."""
    for size in sorted({line["size"] for line in lines}):
        rows = {
            name: {line["round"]: line for line in lines if (line["contender"], line["size"]) == (name, size)}
            for name in NAMES
        }  # fmt: skip
        base = rows[BASELINE]
        for name, own in rows.items():
            rounds = sorted(own.keys() & base.keys())
            if not rounds:
                continue
            about = {
                key: own[rounds[0]][key] for key in (*SHARED, *PACKAGES) if key in own[rounds[0]]
            }
            accuracies = [own[number]["val_accuracy"] for number in rounds]
            found: dict[str, Any] = {"contender": f"{name}, {size} px", "n": len(rounds)}
            for figure, prefix in (("cpu_s", ""), ("seconds", "wall_")):
                ratios = [own[number][figure] / base[number][figure] for number in rounds]
                found[figure] = round(
                    statistics.median(own[number][figure] for number in rounds), 1
                )
                found[f"{prefix}ratio"] = round(statistics.median(ratios), 3)
                found[f"{prefix}ratio_min"] = round(min(ratios), 3)
                found[f"{prefix}ratio_max"] = round(max(ratios), 3)
            found["val_accuracy"] = round(statistics.mean(accuracies), 4)
            yield found | about


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--timm-script", type=Path, metavar="train.py")
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=[*NAMES])
    parser.add_argument(
        "--sizes", type=lambda text: [*map(int, text.split(","))], default=[128, 224]
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--peer-lr", type=float, default=0.1)
    parser.add_argument("--quiet", type=float, metavar="CORES")
    parser.add_argument("--commit", help="of the code, if it is not that of this checkout")
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    told = parser.parse_args()
    for name in ("train", "val"):
        if not (told.data / name).is_dir():
            parser.error(f"--data {told.data}: it has no folder {name}/")
    told.data = told.data.resolve()
    if unknown := {*told.contenders} - {*NAMES}:
        parser.error(f"--contenders: {sorted(unknown)} are not among {', '.join(NAMES)}")
    if told.timm_script is None:
        told.contenders = [name for name in told.contenders if name not in OF_TIMM]
    elif not told.timm_script.is_file():
        parser.error(f"--timm-script {told.timm_script}: there is no such file")
    else:
        told.timm_script = told.timm_script.resolve()
    if told.precision == "auto":
        import torch

        told.precision = "bf16" if native_bf16(torch.device("cpu")) else "fp32"
    return told


def main() -> int:
    told = parse()
    about = facts(told)
    known = []
    if told.record and RESULTS.is_file():
        known = [json.loads(text) for text in RESULTS.read_text(encoding="utf-8").splitlines()]
    done = {tuple(line.get(name) for name in IDENTITY): line for line in known}
    lines, is_well, is_new = [], True, False
    for number, case in cases(told):
        key = {
            "contender": case.contender,
            "size": case.size,
            "workers": case.workers,
            "round": number,
        }
        identity = tuple((about | key)[name] for name in IDENTITY)
        if identity not in done:
            if told.quiet is not None:
                wait_for_quiet(told.quiet)
            try:
                figures = run(case, told)
            except Failed as failure:
                print(f"{case.contender}, {case.size} px: {failure}", file=sys.stderr)
                is_well = False
                continue
            done[identity] = key | figures | about
            record(done[identity], __file__, keep=told.record)
            is_new = True
        lines.append(done[identity])
    for line in summary(lines):
        record(line, __file__, keep=told.record and is_well and is_new)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
