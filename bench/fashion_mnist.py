"""Time to 92 % on the whole of Fashion-MNIST, on a CPU: `flambeau train` beside a script as torchvision's.

    python bench/fashion_mnist.py --data FOLDER [--rounds 3] [--cores 1] [--limit 7] [--set FLAGS] [--record]

FOLDER is torchvision's: FashionMNIST/raw is in it. Each round runs, as processes of their own:
`flambeau`: the command with FLAGS, from its start to the published weights; its mean accuracy has to be 92 %.
`script`: torchvision's resnet18 with the crops, flips, SGD, meters and evaluation of its
references/classification/train.py, by PIL and a DataLoader, in EPOCHS epochs. `script, same network`: the
same with the network of the command. Their clock stops at the first evaluation that reaches 92 %: epochs
after it and Python's imports are not counted. One that has not got there after LIMIT times the seconds of the
command is stopped (`reached` false), and its figures are those of the last whole epoch. All have the same
cores.
`seconds` are by the clock, `cpu_s` of all threads; `times_flambeau` compares the seconds of each round.
"""

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import FashionMNIST

from end_to_end_peers import evaluated, multiplier, train_one_epoch  # beside this script
from provenance import commit, cpu_model, record

TARGET = 0.92
FLAGS = (
    "--model tiny_convnet --duration 4ep --optimizer muon --lr 0.03 --batch-size 128 --padding 1 "
    "--warmup 15%"
)
EPOCHS = {"resnet18": 6, "same": 8}
NAMES = {"flambeau": "flambeau", "resnet18": "script", "same": "script, same network"}
BATCH, WEIGHT_DECAY = 128, 5e-4
LR = {"resnet18": 0.05, "same": 0.4}
MEAN, STD = (0.286,), (0.353,)


def network(name: str) -> nn.Module:
    if name == "same":
        from flambeau.recipes.models.small_convnet import SmallConvNet

        return SmallConvNet(1, 10, width=16)
    model: nn.Module = torchvision.models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    return model


def script(name: str, data: Path, seed: int) -> None:
    """Train until an evaluation reaches the target; print a line per epoch."""
    epochs = EPOCHS[name]
    started = time.perf_counter()
    torch.manual_seed(seed)
    normalize = [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32), v1.Normalize(MEAN, STD)]
    moves = [v1.RandomCrop(28, padding=2), v1.RandomHorizontalFlip()]
    train = DataLoader(
        FashionMNIST(data, True, v1.Compose([*moves, *normalize])), BATCH, shuffle=True
    )
    evaluation = DataLoader(FashionMNIST(data, False, v1.Compose(normalize)), 500)
    model = network(name).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), LR[name], 0.9, weight_decay=WEIGHT_DECAY, nesterov=True, fused=True
    )
    schedule = LambdaLR(optimizer, multiplier(epochs * len(train)))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def logits_of(images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits: Tensor = model(images.contiguous(memory_format=torch.channels_last))
        return logits.float()

    for epoch in range(epochs):
        train_one_epoch(model, train, logits_of, criterion, optimizer, schedule)
        reached = evaluated(model, evaluation, logits_of, criterion)
        seconds = round(time.perf_counter() - started, 1)
        row = {"epochs": epoch + 1, "val_accuracy": reached, "seconds": seconds}
        print(json.dumps({**row, "cpu_s": round(time.process_time(), 1)}), flush=True)
        if reached >= TARGET:
            return


def by_script(name: str, told: argparse.Namespace, seed: int, limit_s: float) -> dict[str, Any]:
    words = [__file__, "--data", str(told.data), "--script", name, "--seed", str(seed)]
    started = time.perf_counter()
    rows = list[dict[str, Any]]()
    with subprocess.Popen(
        [*held_to(told.cores), *words],
        env=environment(told.cores),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        stop = threading.Timer(limit_s, process.kill)
        stop.start()
        assert process.stdout is not None
        rows.extend(map(json.loads, process.stdout))
        stop.cancel()
    last = rows[-1] if rows else {"epochs": 0, "val_accuracy": 0.0, "cpu_s": 0.0}
    reached = last["val_accuracy"] >= TARGET
    seconds = last["seconds"] if reached else round(time.perf_counter() - started, 1)
    return {**last, "seconds": seconds, "reached": reached}


def by_flambeau(told: argparse.Namespace, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data = f"torchvision:fashion-mnist:{told.data}"
        words = ["-m", "flambeau", "train", data, "--seed", str(seed), "--out", f"{folder}/run"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        subprocess.run(
            [*held_to(told.cores), *words, *shlex.split(told.set)],
            env=environment(told.cores), cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = json.loads(Path(folder, "run", "result.json").read_text(encoding="utf-8"))
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    accuracy = result["metrics"]["val_accuracy"]
    return {"val_accuracy": accuracy, "seconds": round(seconds, 1), "cpu_s": round(cpu_s, 1)}


def held_to(cores: int) -> list[str]:
    numbers = sorted(os.sched_getaffinity(0))[:cores]
    return ["taskset", "-c", ",".join(map(str, numbers)), sys.executable]


def environment(cores: int) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(cores)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--limit", type=float, default=7.0)
    parser.add_argument("--set", default=FLAGS)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--script", choices=EPOCHS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    told = parser.parse_args()
    told.data = told.data.resolve()
    if told.script:
        script(told.script, told.data, told.seed)
        return
    of_commit = commit()  # before the first line of results changes the checkout
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for seed in range(told.rounds):
        own = by_flambeau(told, seed)
        figures["flambeau"].append(own)
        for name in EPOCHS:
            row = by_script(name, told, seed, told.limit * own["seconds"])
            figures[name].append(row | {"ratio": row["seconds"] / own["seconds"]})
    for name, rows in figures.items():
        ratios = [round(row.get("ratio", 1.0), 2) for row in rows]
        row = {
            "contender": NAMES[name],
            "n": told.rounds,
            "seconds_median": statistics.median(row["seconds"] for row in rows),
            "seconds": [row["seconds"] for row in rows],
            "cpu_s_median": statistics.median(row["cpu_s"] for row in rows),
            "times_flambeau": statistics.median(ratios),
            "times_flambeau_all": ratios,
            "reached": [row.get("reached", row["val_accuracy"] >= TARGET) for row in rows],
            "val_accuracy_mean": round(statistics.mean(row["val_accuracy"] for row in rows), 4),
            "val_accuracy": [round(row["val_accuracy"], 4) for row in rows],
            "epochs": [row.get("epochs") for row in rows] if name in EPOCHS else told.set,
            "cores": told.cores,
            "limit": told.limit,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "cpu": cpu_model(),
            "commit": of_commit,
        }
        record(row, __file__, keep=told.record)


if __name__ == "__main__":
    main()
