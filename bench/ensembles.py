"""What several trained models that answer as one are worth, beside one of them and beside a soup.

    python bench/ensembles.py [--seeds N] [--record]

`flambeau train` on the embedded Fashion-MNIST, 4 epochs, on one thread, with N seeds: each run alone, and the
mean of the probabilities of 2, 3 and 5 of them, over all such groups; one run of five times the epochs, which
costs what five runs cost; and five runs that go on from the weights of the first, with other seeds: alone,
together, and as the soup of `flambeau soup` (nothing where no average is as good as the best of them).
`cpu_ratio` is the processor time of the predictions beside that of one run, the median of five. Figures are
of the 1,000 validation images, which also choose the best weights and the soup. One JSON line per contender.
"""

import argparse
import io
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

import flambeau
from flambeau.recipes.data.recordio import RecordReader, unpack
from flambeau.recipes.training.calibration_error import CalibrationError
from provenance import commit, cpu_model, record  # beside this script

VALIDATION = Path(flambeau.__file__).parent / "data" / "embedded" / "fashion_mnist_val.rec"
EPOCHS = 4
GROUPS = (1, 2, 3, 5)


def validation() -> tuple[Any, Tensor]:
    """Images (N, H, W, 1) uint8, and labels."""
    with RecordReader(VALIDATION) as reader:
        records = [unpack(one) for one in reader]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(payload))) for _, payload in records])
    return pixels[..., None], torch.tensor([int(header.label) for header, _ in records])


def trained(out: Path, **settings: Any) -> Path:
    flambeau.train(None, out=out, precision="fp32", bar=False, **settings)
    return out


def figures(groups: Iterable[Sequence[Tensor]], labels: Tensor) -> dict[str, Any]:
    """Of the mean of the probabilities (N, K) of each group; the figures are means over the groups."""
    found = []
    for group in groups:
        log = torch.stack([*group]).mean(0).log()
        error = CalibrationError()
        error.update(log, labels)
        right = int((log.argmax(1) == labels).sum())
        loss = functional.nll_loss(log, labels)
        found.append((right / len(labels), float(loss), float(error.compute())))
    accuracies, losses, errors = zip(*found, strict=True)
    return {
        "groups": len(found),
        "val_accuracy": round(statistics.mean(accuracies), 4),
        "val_accuracy_range": [min(accuracies), max(accuracies)],
        "val_loss": round(statistics.mean(losses), 4),
        "calibration_error": round(statistics.mean(errors), 4),
    }


def cpu_ratio(folders: Sequence[Path], images: Any) -> float:
    one, several = flambeau.load(folders[0]), flambeau.load([*folders])
    ratios = []
    for _ in range(5):
        seconds = []
        for predictor in (one, several):
            begun = time.process_time()
            predictor(images)
            seconds.append(time.process_time() - begun)
        ratios.append(seconds[1] / seconds[0])
    return round(statistics.median(ratios), 2)


def soup_of(folders: Sequence[Path], out: Path) -> Path | None:
    command = [sys.executable, "-m", "flambeau", "soup", *map(str, folders), "--out", str(out)]
    done = subprocess.run(command, check=False)
    return out if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    told = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = validation()
    about = {"epochs": EPOCHS, "torch": torch.__version__, "cpu": cpu_model(), "commit": commit()}

    def say(contender: str, groups: Iterable[Sequence[Tensor]], **more: Any) -> None:
        row = {"contender": contender, **figures(groups, labels), **more, **about}
        record(row, __file__, keep=told.record)

    def answers(folder: Path) -> Tensor:
        return flambeau.load(folder)(images).probabilities

    with tempfile.TemporaryDirectory() as place:
        runs = [
            trained(Path(place, f"seed{seed}"), seed=seed, epochs=EPOCHS)
            for seed in range(told.seeds)
        ]
        alone = [answers(run) for run in runs]
        for count in GROUPS:
            ratio = cpu_ratio(runs[:count], images) if count > 1 else 1.0
            say(
                f"{count} runs" if count > 1 else "1 run",
                itertools.combinations(alone, count),
                cpu_ratio=ratio,
            )
        longer = trained(Path(place, "longer"), seed=0, epochs=5 * EPOCHS)
        say("1 run, five times the epochs", [[answers(longer)]], cpu_ratio=1.0)

        weights = runs[0] / "model.safetensors"
        tuned = [
            trained(
                Path(place, f"tuned{seed}"), seed=seed, epochs=EPOCHS, weights=str(weights), lr=0.1
            )
            for seed in range(told.seeds, told.seeds + 5)
        ]
        again = [answers(run) for run in tuned]
        say("1 of 5 fine-tuned runs", [[one] for one in again], cpu_ratio=1.0)
        say("5 fine-tuned runs", [again], cpu_ratio=cpu_ratio(tuned, images))
        cooked = soup_of(tuned, Path(place, "soup"))
        if cooked is not None:
            say("soup of 5 fine-tuned runs", [[answers(cooked)]], cpu_ratio=1.0)


if __name__ == "__main__":
    main()
