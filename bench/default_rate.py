"""The default learning rate of `flambeau train` beside smaller and larger ones.

    python bench/default_rate.py --data FOLDER [--models resnet18,vgg11] [--shares 0.25,1,4] [--seeds N]
        [--flags '--image-size 128 --epochs 5'] [--record]

FOLDER has train/ and val/. Each training is a `flambeau train` of its own with the defaults, but for --flags
and a rate of a share of the default; the first is made without --lr. A line has the accuracy on the
validation images after the last epoch, and the processor time of the whole command. Each line is written
when it is known.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from flambeau.trainer.settings.stored_settings import read_config
from provenance import commit, cpu_model, record  # beside this script

SETTINGS = "model", "image_size", "batch_size", "duration", "optimizer", "lr"


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(words: list[str | Path], *, lr: float | None) -> dict[str, Any]:
    """The figures of a training, with the default rate or another; `failed` says why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        rate = [] if lr is None else ["--lr", f"{lr:.4g}"]
        cpu = children_cpu_s()
        done = subprocess.run(
            [sys.executable, "-m", "flambeau", "train", *words, *rate, "--out", out],
            text=True, capture_output=True, check=False,
        )  # fmt: skip
        cpu_s = round(children_cpu_s() - cpu, 1)
        if not (out / "config.toml").is_file():
            raise SystemExit(f"default_rate: {done.stderr.strip()}")
        settings = read_config(out / "config.toml")
        found = {name: settings[name] for name in SETTINGS} | {"cpu_s": cpu_s}
        if done.returncode:
            return {**found, "failed": done.stderr.strip().splitlines()[0]}
        rows = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        accuracies = [row["val_accuracy"] for row in rows if "val_accuracy" in row]
        return {**found, "val_accuracy": round(accuracies[-1], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=["resnet18"], metavar="NAME,..."
    )
    parser.add_argument(
        "--shares", type=lambda text: [*map(float, text.split(","))], default=[0.25, 1.0, 4.0]
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--flags", default="", help="of flambeau train, for all trainings")
    parser.add_argument("--record", action="store_true")
    told = parser.parse_args()
    num = {part: sum(1 for _ in (told.data / part).glob("*/*")) for part in ("train", "val")}
    about = {
        "flags": told.flags, "images": num, "torch": torch.__version__,
        "threads": torch.get_num_threads(), "cpu": cpu_model(), "commit": commit(),
    }  # fmt: skip
    for seed in range(told.seeds):
        for model in told.models:
            words: list[str | Path] = [told.data, "--model", model, "--seed", str(seed)]
            words += told.flags.split()
            default = 0.0
            for share in (1.0, *(share for share in told.shares if share != 1)):
                found = train(words, lr=None if share == 1 else share * default)
                default = default or found["lr"]
                row = {"share": share, "seed": seed, **found, **about}
                record(row, __file__, keep=told.record)


if __name__ == "__main__":
    main()
