"""How many of the labels that `flambeau check --model RUN` suspects most are wrong, and what noting costs.

    python bench/label_errors.py --data fashion_mnist.npz [--images N] [--epochs N] [--seeds N] [--record]

5 % of the labels of Fashion-MNIST are changed to another class, `flambeau train` trains on them with its
default model and settings, and the images are ranked by what it has noted. One JSON line: for each seed the
share of planted labels among the 5 % most suspicious; the same of the area under the margin (Pleiss et al.
2020) of the same training, and of cleanlab's find_label_issues with out-of-sample probabilities of two such
trainings, each on the other half, where it is installed; and the share of a training step that noting takes.
"""

import argparse
import importlib.metadata
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flambeau
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.trainer.evaluation.sample_history import FILE, SampleHistory
from provenance import commit, cpu_model, record  # beside this script

SHARE = 0.05
NOTE = SampleHistory.note


def precision(suspicion: Any, wrong: Any) -> float:
    """Among as many as are wrong."""
    worst = np.argsort(-suspicion, kind="stable")[: int(wrong.sum())]
    return round(float(wrong[worst].mean()), 4)


def ranked(images: Any, labels: Any, folder: Path, epochs: int) -> tuple[Any, Any, float]:
    """Mean loss and mean margin of each image of a training; the share of the time that noting took."""
    margins = np.zeros(len(labels))
    seconds = 0.0

    def note(
        self: SampleHistory, micro: MicroBatch, logits: Tensor, targets: Tensor, *, step: int
    ) -> None:
        nonlocal seconds
        start = time.perf_counter()
        NOTE(self, micro, logits, targets, step=step)
        seconds += time.perf_counter() - start
        own = logits.gather(1, targets[:, None])[:, 0]
        rest = logits.scatter(1, targets[:, None], -torch.inf).amax(1)
        margins[micro.indices] += (own - rest).float().numpy()

    folder.mkdir()
    for part, some in (("train", slice(None)), ("val", slice(0, 1000))):
        np.savez(folder / f"a_{part}.npz", images=images[some], labels=labels[some])
    SampleHistory.note = note  # type: ignore[method-assign]
    try:
        start = time.perf_counter()
        flambeau.train(
            folder / "a_train.npz", out=folder / "run", epochs=epochs, device="cpu", bar=False
        )
        total = time.perf_counter() - start
    finally:
        SampleHistory.note = NOTE  # type: ignore[method-assign]
    with np.load(folder / "run" / FILE) as stored:
        return np.array(stored["loss"]), -margins, seconds / total


def by_cleanlab(images: Any, labels: Any, folder: Path, epochs: int) -> Any:
    """Its score for each image; ImportError where it is missing."""
    from cleanlab.rank import get_label_quality_scores  # type: ignore[import-not-found]

    half = np.arange(len(labels)) % 2
    probabilities = np.zeros((len(labels), 10))
    for part in (0, 1):
        place = folder / f"half-{part}"
        ranked(images[half != part], labels[half != part], place, epochs)
        np.savez(place / "b.npz", images=images[half == part], labels=labels[half == part])
        found = flambeau.evaluate(place / "run", place / "b.npz").predictions
        rows = np.full((len(found), 10), 1e-6)  # what is not among the five most probable
        np.put_along_axis(rows, found.ranked.numpy(), found.probabilities.numpy(), 1)
        probabilities[np.flatnonzero(half == part)[found.indices.numpy()]] = rows
    probabilities /= probabilities.sum(1, keepdims=True)
    return 1 - get_label_quality_scores(labels, probabilities)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    told = parser.parse_args()
    with np.load(told.data) as stored:
        images, labels = stored["x_train"], stored["y_train"].astype(np.int64)
    found: dict[str, list[Any]] = {
        "flambeau check": [],
        "area under the margin": [],
        "cleanlab": [],
    }
    shares = []
    for seed in range(told.seeds):
        draw = np.random.default_rng(seed)
        chosen = draw.permutation(len(labels))[: told.images]
        right = labels[chosen]
        wrong = np.zeros(len(chosen), bool)
        wrong[draw.permutation(len(chosen))[: round(SHARE * len(chosen))]] = True
        given = np.where(wrong, (right + draw.integers(1, 10, len(chosen))) % 10, right)
        with tempfile.TemporaryDirectory() as place:
            loss, margin, share = ranked(images[chosen], given, Path(place, "all"), told.epochs)
            found["flambeau check"].append(precision(loss, wrong))
            found["area under the margin"].append(precision(margin, wrong))
            shares.append(share)
            try:
                scores = by_cleanlab(images[chosen], given, Path(place), told.epochs)
                found["cleanlab"].append(precision(scores, wrong))
            except ImportError as error:
                found["cleanlab"].append(f"not measured: {error}")
    row: dict[str, Any] = {
        "images": told.images, "epochs": told.epochs, "seeds": told.seeds, "wrong": SHARE,
        "precision_at_5_percent": found,
        "mean": {
            name: round(statistics.mean(some), 4)
            for name, some in found.items() if all(isinstance(one, float) for one in some)
        },
        "share_of_training_time": round(statistics.mean(shares), 4),
        "threads": torch.get_num_threads(), "torch": torch.__version__,
        "flambeau": importlib.metadata.version("flambeau"), "python": platform.python_version(),
        "cpu": cpu_model(), "commit": commit(),
        "command": f"python bench/label_errors.py --data {told.data.name} --images {told.images} "
        f"--epochs {told.epochs} --seeds {told.seeds} --record",
    }  # fmt: skip
    record(row, __file__, keep=told.record)


if __name__ == "__main__":
    main()
