"""What its report costs a training, and how large and how fast the report of a long one is.

    python bench/report_cost.py [--runs 5] [--photos FOLDER --epochs 5] [--record]

The first part runs `flambeau train` without arguments, with a clock around whatever is done for the report
alone: the answers to each image, their counts, the pictures, the page; and of that, what the look at the data
takes. With --photos that is all, of a training on a folder. The second part makes the folder of a run of 90
epochs of 1000 classes, 50,000 answers and four groups of learning rates, writes its report, and lets
Chromium say when its script has drawn everything, from the beginning of its navigation.
"""

import argparse
import functools
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flambeau.cli.command import main as flambeau
from flambeau.run.folder.report_file import write_own_report
from flambeau.run.loop import recorder
from flambeau.run.loop.pictures import data_uri
from flambeau.run.loop.sample_results import SampleResultsMetric, evaluation_facts
from flambeau.trainer import fit
from provenance import commit, cpu_model  # beside this script

EPOCHS, STEPS_PER_EPOCH, CLASSES, IMAGES = 90, 5005, 1000, 50_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--photos", help="a folder that `flambeau train` takes")
    parser.add_argument("--epochs", type=int, default=5, help="of the photographs")
    parser.add_argument(
        "--record", action="store_true", help="write bench/results/report_cost.jsonl"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.photos is None:
            lines = [
                _share(Path(folder), arguments.runs, []),
                _long_run(Path(folder) / "long", arguments.runs),
            ]
        else:
            words = [arguments.photos, "--epochs", str(arguments.epochs)]
            lines = [_share(Path(folder), arguments.runs, words)]
            lines[0]["what"] += f", {arguments.epochs} epochs of photographs"
    for line in lines:
        line |= {"torch": torch.__version__, "cpu": cpu_model(), "commit": commit()}
        print(json.dumps(line))
    if arguments.record:
        path = Path(__file__).parent / "results" / "report_cost.jsonl"
        others = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        new = {line["what"] for line in lines}
        lines = [*(line for line in others if line["what"] not in new), *lines]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return 0


# ---------------------------------------------------------------- a training


SPENT: dict[str, float] = {}


def timed(owner: Any, name: str) -> None:
    """Put a clock around a function."""
    original: Callable[..., Any] = getattr(owner, name)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def with_clock(*words: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*words, **options)
        finally:
            SPENT[name] = SPENT.get(name, 0.0) + time.perf_counter() - start

    setattr(owner, name, with_clock)


def _share(folder: Path, runs: int, words: list[str]) -> dict[str, Any]:
    timed(fit, "_keep_for_report")
    timed(fit, "quick_findings")
    timed(recorder, "write_own_report")
    timed(SampleResultsMetric, "update")
    timed(SampleResultsMetric, "compute")
    shares, seconds, of_data = [], [], []
    for number in range(runs):
        SPENT.clear()
        start = time.perf_counter()
        if flambeau(["train", *words, "--out", str(folder / str(number))]):
            sys.exit("the training failed")
        seconds.append(time.perf_counter() - start)
        of_data.append(SPENT.pop("quick_findings") / seconds[-1])
        shares.append(sum(SPENT.values()) / seconds[-1])
    return {
        "what": "share of `flambeau train`", "n": runs,
        "of_the_look_at_the_data": round(statistics.median(of_data), 5),
        "median": round(statistics.median(shares), 5),
        "least": round(min(shares), 5), "most": round(max(shares), 5),
        "seconds_of_training": round(statistics.median(seconds), 2),
    }  # fmt: skip


# ---------------------------------------------------------------- a long run


def _long_run(folder: Path, runs: int) -> dict[str, Any]:
    _make(folder)
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        write_own_report(folder, say=sys.exit)
        seconds.append(time.perf_counter() - start)
    page = (folder / "report.html").read_text(encoding="utf-8")
    line = {
        "what": "report of 90 epochs, 1000 classes", "n": runs, "bytes": len(page.encode()),
        "seconds_to_write": round(statistics.median(seconds), 3),
        "metrics_lines": EPOCHS * (STEPS_PER_EPOCH // 50 + 1),
    }  # fmt: skip
    drawn = [_milliseconds_to_draw(folder, page) for _ in range(runs)]
    if None not in drawn:
        line["milliseconds_until_drawn"] = round(statistics.median(filter(None, drawn)))
        line["most_milliseconds"] = round(max(filter(None, drawn)))
    return line


def _make(folder: Path) -> None:
    folder.mkdir(parents=True)
    draw = random.Random(0)
    (folder / "config.toml").write_text(
        'model = "resnet50"\nduration = "90ep"\nbatch_size = 256\nseed = 0\ncheckpoint_every = "1ep"\n',
        encoding="utf-8",
    )
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for epoch in range(EPOCHS):
            for step in range(epoch * STEPS_PER_EPOCH + 50, (epoch + 1) * STEPS_PER_EPOCH, 50):
                rates = [0.1 * (1 - step / (EPOCHS * STEPS_PER_EPOCH)) * k for k in range(1, 5)]
                row = {
                    "step": step, "epoch": epoch, "train_loss": 7 * math.exp(-step / 1e5) + draw.random(),
                    "train_accuracy": 1 - math.exp(-step / 1e5), "images_per_s": 900 + 50 * draw.random(),
                    "data_wait": 0.02 * draw.random(), "learning_rate": rates[-1], "learning_rates": rates,
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
            row = {
                "step": (epoch + 1) * STEPS_PER_EPOCH, "epoch": epoch,
                "val_loss": 5 * math.exp(-epoch / 30), "val_accuracy": 1 - math.exp(-epoch / 30),
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
    metric, generator = SampleResultsMetric(), torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES, (IMAGES,), generator=generator)
    for part in torch.arange(IMAGES).split(250):
        logits = torch.randn(len(part), CLASSES, generator=generator)
        logits[torch.arange(len(part)), targets[part]] += 4
        metric.update(part, targets[part], logits)
    metric.compute()
    names = [f"a class whose name is long enough {k}" for k in range(CLASSES)]
    assert metric.last is not None
    facts = evaluation_facts(metric.last, names, step=1, describe="val/{}.jpg".format)
    for sample in facts["mistakes"] + facts["unsure"]:
        sample["picture"] = data_uri(torch.rand(3, 224, 224, generator=generator))
    (folder / "evaluation.json").write_text(json.dumps(facts), encoding="utf-8")


def _milliseconds_to_draw(folder: Path, page: str) -> float | None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return None
    script = "document.body.dataset.drawn = performance.now();"
    page = re.sub(r"<meta http-equiv=[^>]*>", "", page)  # which lets no other script run
    path = folder / "timed.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [browser, *flags, f"file://{path}"], check=True, capture_output=True, text=True, timeout=120
    )
    return float(re.findall(r'data-drawn="([0-9.]+)"', done.stdout)[0])


if __name__ == "__main__":
    sys.exit(main())
