"""Curves of trainings that learn, that overfit and whose rate is too large, for pictures of the pages.

    python bench/learning_curves.py [--record]

`flambeau train` on the embedded Fashion-MNIST, seed 0, on one thread: all 5,000 training images with their
augmentation (`learns`); 150 of them without any, 50 epochs (`overfits`); and all of them with a rate of 10,
25 times the usual one (`rate too large`). A row has the losses of each epoch, and the confusion matrix
of the best on the validation images.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import flambeau
from flambeau import evaluate, train
from provenance import commit, cpu_model, record  # beside this script

VALIDATION = Path(flambeau.__file__).parent / "data" / "embedded" / "fashion_mnist_val.rec"
PLAIN: dict[str, Any] = {"flip": False, "padding": 0, "label_smoothing": 0.0, "weight_decay": 0.0}
TRAININGS: dict[str, dict[str, Any]] = {
    "learns": {"epochs": 12, "label_smoothing": 0.0},
    "overfits": {"epochs": 50, "subset": "3%", "lr": 0.02, "schedule": "constant", **PLAIN},
    "rate too large": {"epochs": 12, "lr": 10.0, "label_smoothing": 0.0},
}


def losses(folder: Path) -> dict[str, list[float]]:
    """Of each epoch: the mean loss of its training lines, and that of the validation images."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = range(1 + max(row["epoch"] for row in rows))
    found: dict[str, list[float]] = {"train_loss": [], "val_loss": []}
    for epoch in epochs:
        for name, values in found.items():
            of_epoch = [row[name] for row in rows if row["epoch"] == epoch and name in row]
            values.append(round(sum(of_epoch) / len(of_epoch), 4))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    told = parser.parse_args()
    torch.set_num_threads(1)
    for name, settings in TRAININGS.items():
        with tempfile.TemporaryDirectory() as place:
            out = Path(place, "run")
            train(None, out=out, seed=0, precision="fp32", log_every=1, bar=False, **settings)
            evaluation = evaluate(out, VALIDATION)
            row = {
                "training": name, **losses(out),
                "classes": [one.name for one in evaluation.classes],
                "confusion": evaluation.confusion.tolist(),
                "torch": torch.__version__, "cpu": cpu_model(), "commit": commit(),
            }  # fmt: skip
        record(row, __file__, keep=told.record)


if __name__ == "__main__":
    main()
