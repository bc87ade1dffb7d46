"""How far the int8 of a trained ResNet-18 changes its answers, as `flambeau export` measures it.

    python bench/int8_answers.py --data fashion_mnist.npz [--run RUN] [--images N] [--record]

A ResNet-18 is trained on the data for six epochs (15 minutes on two quiet cores), or the run of an earlier
call is taken, and exported as ONNX in int8. One JSON line: of the images that were not trained on, the share
that keeps the class the run gives, and both accuracies.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from provenance import commit, cpu_model, record  # beside this script

FLAMBEAU = [sys.executable, "-m", "flambeau"]
TRAINING = (
    "--model resnet18 --epochs 6 --image-size 28 --padding 2 --batch-size 128 --label-smoothing 0"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--record", action="store_true")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run, export = told.run or Path(place) / "run", Path(place) / "export"
        train = ["train", str(told.data), "--out", str(run), *TRAINING.split()]
        subprocess.run([*FLAMBEAU, *train], check=True, stdout=sys.stderr)
        ship = [
            "export",
            str(run),
            "--format",
            "onnx",
            "--quantize",
            "int8",
            "--min-agreement",
            "0.9",
        ]
        ship += ["--images", str(told.images), "--out", str(export)]
        subprocess.run([*FLAMBEAU, *ship], check=True, stdout=sys.stderr)
        told_by_export = json.loads((export / "export.json").read_text(encoding="utf-8"))
        rows = [
            json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()
        ]
    last = told_by_export["steps"][-1]
    row = {
        "accuracy_of_the_run": [r["val_accuracy"] for r in rows if "val_accuracy" in r][-1],
        "accuracy_in_int8": last["accuracy"], "same_answer": last["agreement"],
        "mean_difference_of_probabilities": last["mean_difference"], "bytes": last["bytes"],
        "bytes_of_the_run": told_by_export["steps"][0]["bytes"],
        "images": told_by_export["images"]["measured"], "training": TRAINING,
        "precision": told_by_export["settings"]["precision"], "torch": torch.__version__,
        "onnxruntime": importlib.metadata.version("onnxruntime"), "cpu": cpu_model(), "commit": commit(),
        "command": f"python bench/int8_answers.py --data {told.data.name}",
    }  # fmt: skip
    record(row, __file__, keep=told.record)


if __name__ == "__main__":
    main()
