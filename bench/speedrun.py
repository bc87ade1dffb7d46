"""How fast `flambeau train` brings small images to a fixed accuracy, run after run in one process.

    python bench/speedrun.py --data FOLDER [--preset speedrun] [--runs 25] [--device cuda]
        [--set lr=0.03 ...] [--grid 'lr=0.02,0.04;momentum=0.6,0.8'] [--limit SECONDS] [--out FILE] [--again]
        [--campaign] [--threads N] [--target 0.94] [--peer SCRIPT ...] [--ablate]

FOLDER has train/ and val/, or is any other DATA of `flambeau train`. The training is that of the command:
its model, data set, loss and `Run`, with the settings of a preset. `train_s` is the clock that the records
for CIFAR-10 count: from the first step to the last, without evaluations in between, with the evaluation at
the end in --views; `processor_s` is the processor time of the same. Not counted are reading the data and,
but on a CPU, a first epoch, which compiles and warms up (`warmup_s`); `wall_s` is all of a run, with its
files. Each run is one line, written when it ends; a run of the same commit, device, settings and seed that is
in --out is not done again, unless --again. With --campaign those of other commits and machines count, too,
for runs that take days together. The last line of each combination of settings has mean, standard error,
number, and the devices.

--peer runs a record holder's script (airbench94_muon.py, or cifar10_speedrun.py of hiverge), brought by its
path, before the own runs, with DATA as it reads them, and stops it after as many runs: a line for each, by
its own clock, and one with the means. --ablate leaves each ingredient out in turn, after the whole; small
data and --set duration=3ep make that a matter of minutes on a CPU.
"""

import argparse
import hashlib
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.sources.source import Source
from flambeau.trainer import fit as training_code
from flambeau.trainer.fit import Training, batch_loss, set_up
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import Prepared, datasets, open_data
from flambeau.trainer.parts.device import use_threads
from flambeau.trainer.settings.settings import FIELDS, PRESETS, Settings
from flambeau.trainer.settings.stored_settings import canonical, with_preset
from provenance import commit, cpu_model, device_model  # beside this script

ROOT = Path(__file__).resolve().parents[1]
VIEWS = ("plain", "flip", "flip and shift")
VARIANTS = "bench/speedrun_variants.py"
ABLATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"model": f"{VARIANTS}:without_whitening"},
    {"model": f"{VARIANTS}:without_identities"},
    {"model": f"{VARIANTS}:with_learned_scales"},
    {"alternate_flip": False},
    {"flip": False, "alternate_flip": False},
    {"padding": 0},
    {"label_smoothing": 0.0},
    {"fixed_norm": False, "lr": 0.04},
    {"muon_others": "adamw", "muon_others_lr": 0.01, "head_lr": 0.5},
    {
        "optimizer": "sgd",
        "fixed_norm": False,
        "muon_others": "adamw",
        "muon_others_lr": None,
        "head_lr": None,
        "momentum": 0.85,
        "lr": 0.4,
        "weight_decay": 5e-4,
    },
)
"""The preset, and what replaces one ingredient of it."""
ROW = re.compile(r"\|\s*eval\s*\|[^|]*\|\s*([\d.]+)\s*\|\s*([\d.]+)\s*\|\s*([\d.]+)\s*\|")
"""The last row of a run of airbench and its descendants: accuracy plain and with views, and seconds."""


def views_of(images: Tensor, kind: str) -> Iterator[tuple[float, Tensor]]:
    """Weights and views of images (N, C, H, W): as they are, mirrored, and shifted by a pixel each way."""
    shifted: list[tuple[float, Tensor]] = [(1.0, images)]
    if kind == "flip and shift":
        height, width = images.shape[-2:]
        padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
        ends = padded[..., :height, :width], padded[..., 2:, 2:]
        shifted = [(0.5, images), *((0.25, one) for one in ends)]
    for weight, view in shifted:
        if kind == "plain":
            yield weight, view
        else:
            yield weight / 2, view
            yield weight / 2, view.flip(-1)


@torch.no_grad()
def accuracies(training: Training, kinds: tuple[str, ...]) -> dict[str, float]:
    """The share of validation images that are right, for each kind of views."""
    model = training.model.eval()
    hits = {kind: torch.zeros((), device=training.run.device) for kind in kinds}
    num_images = len(training.val)
    size = training.run.state.micro_batch or num_images
    for start in range(0, num_images, size):
        indices = torch.arange(start, min(start + size, num_images))
        (images, targets), _ = training.val.batch(indices, indices)
        x = training.normalize(images.to(training.run.device))
        targets = targets.to(training.run.device)
        for kind in kinds:
            with training.run.autocast():
                logits = sum(weight * model(view).float() for weight, view in views_of(x, kind))
            hits[kind] += (logits.argmax(1) == targets).sum()  # type: ignore[union-attr]
    model.train()
    return {kind: float(hit) / num_images for kind, hit in hits.items()}


def wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def one_run(prepared: Prepared, *, views: str) -> dict[str, Any]:
    """Train once; the run's folder is removed."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        training = set_up(prepared, folder=Path(folder) / "run", bar=False)
        run = training.run
        train_s = processor_s = 0.0
        accuracy: dict[str, float] = {}
        for _ in run.epochs():
            start, processor = wait(run.device), time.process_time()
            for _ in run.steps(lambda batch: batch_loss(training, *batch)):
                pass
            if run.state.step >= run.plan.total_steps:
                accuracy = accuracies(training, (views,))
            train_s += wait(run.device) - start
            processor_s += time.process_time() - processor
            if run.state.step >= run.plan.total_steps:
                others = tuple(kind for kind in VIEWS if kind != views)
                accuracy |= accuracies(training, others)
        steps = run.state.step
    return {
        "accuracy": accuracy[views],
        "accuracies": {kind: accuracy[kind] for kind in VIEWS},
        "train_s": round(train_s, 3),
        "processor_s": round(processor_s, 2),
        "wall_s": round(time.perf_counter() - begin, 2),
        "steps": steps,
    }


class Bench:
    """The runs of one call."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._settings = with_preset({"preset": arguments.preset})
        self._held: dict[tuple[object, ...], Any] = {}
        self._about = {
            "settings": self._settings,
            "views": arguments.views,
            "device": device_model(arguments.device),
            "cpu": cpu_model(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "commit": commit(),
            "command": " ".join(["python", "bench/speedrun.py", *sys.argv[1:]]),
        }
        self._warm = set[str]()
        self._warms_up = arguments.device != "cpu"
        self._end = time.monotonic() + arguments.limit
        settings = canonical(Settings(data=arguments.data, device=arguments.device))
        self._sources = open_data(settings)
        training_code.datasets = self._datasets  # read once, as the records do

    def _datasets(self, prepared: Prepared) -> Any:
        settings = prepared.settings
        key = (settings.padding, settings.flip, settings.alternate_flip, settings.image_size)
        if key not in self._held:
            self._held[key] = datasets(prepared)
        return self._held[key]

    def _prepared(self, values: Mapping[str, Any], seed: int) -> Prepared:
        given = {
            **self._settings,
            "checkpoint_every": "100000ep",
            "data": self._arguments.data,
            "device": self._arguments.device,
            **values,
            "seed": seed,
        }
        if ".py:" in given["model"]:
            given["model"] = str(ROOT / given["model"])  # lines have no path of one machine
        settings, facts = resolve(canonical(Settings(**given)), *self._sources)
        return Prepared(settings, facts, *self._sources)

    def runs_of(self, values: Mapping[str, Any]) -> None:
        """All runs with these settings in place of the preset's."""
        known = {} if self._arguments.again else self._known(values)
        lines = []
        for seed in range(
            self._arguments.first_seed, self._arguments.first_seed + self._arguments.runs
        ):
            if seed in known:
                lines.append(known[seed])
                continue
            shape = json.dumps(
                {k: v for k, v in values.items() if k in ("model", "batch_size", "compile")}
            )
            if self._warms_up and shape not in self._warm:
                self._warm.add(shape)
                start = time.perf_counter()
                one_run(
                    self._prepared({**values, "duration": "1ep"}, seed), views=self._arguments.views
                )
                self._about["warmup_s"] = round(time.perf_counter() - start, 1)
            if time.monotonic() > self._end:
                break
            figures = one_run(self._prepared(values, seed), views=self._arguments.views)
            lines.append({"set": dict(values), "seed": seed, **figures, **self._about})
            self._write(lines[-1])
        if len(lines) > 1:
            self._write({"set": dict(values), **self._summary(lines), **self._about})

    def runs_of_peer(self, script: Path) -> None:
        """As many runs of another's script, where the data lie as it reads them; a first one warms up."""
        about = {
            "peer": script.name,
            "sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
            **{name: value for name, value in self._about.items() if name != "settings"},
        }
        lines: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            write_tensors(self._sources, Path(folder) / "cifar10")
            for plain, with_views, seconds in peer_rows(script, Path(folder)):
                accuracies = {"plain": plain, "flip and shift": with_views}
                figures = {"accuracy": with_views, "accuracies": accuracies, "train_s": seconds}
                lines.append({"run": len(lines), **figures, **about})
                self._write(lines[-1])
                if len(lines) >= self._arguments.runs or time.monotonic() > self._end:
                    break
        if len(lines) > 1:
            self._write({**self._summary(lines), **about})

    def _summary(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        found = summary(lines)
        target = self._arguments.target
        return {**found, "target": target, "reached": found["mean_accuracy"] >= target}

    def _known(self, values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        out = self._arguments.out
        if not out.is_file():
            return {}
        same = ["settings", "views", "torch", "threads"]
        if not self._arguments.campaign:
            same += ["device", "commit"]
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        return {
            line["seed"]: line
            for line in lines
            if "seed" in line
            and line["set"] == dict(values)
            and all(line[name] == self._about[name] for name in same)
        }

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        with self._arguments.out.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and standard errors of runs, and where they ran."""
    found: dict[str, Any] = {"n": len(lines), "devices": sorted({line["device"] for line in lines})}
    for name in ("accuracy", "train_s", "processor_s", "wall_s"):
        if name not in lines[0]:  # a peer's script tells only its own clock
            continue
        values = [line[name] for line in lines]
        found[f"mean_{name}"] = round(statistics.mean(values), 5)
        found[f"se_{name}"] = round(statistics.stdev(values) / len(values) ** 0.5, 5)
    found["median_train_s"] = statistics.median(line["train_s"] for line in lines)
    return found


def value_of(name: str, text: str) -> Any:
    """A setting from text, in the type that TOML would give it."""
    if name not in FIELDS:
        raise SystemExit(f"speedrun: {name} is no setting of flambeau train")
    try:
        return json.loads(text)
    except ValueError:
        return text


def combinations(grid: str) -> Iterator[dict[str, Any]]:
    """Of 'a=1,2;b=3' {'a': 1, 'b': 3} and {'a': 2, 'b': 3}."""
    axes = [axis.partition("=") for axis in grid.split(";") if axis]
    for values in itertools.product(*(texts.split(",") for _, _, texts in axes)):
        names = [name for name, _, _ in axes]
        yield {name: value_of(name, text) for name, text in zip(names, values, strict=True)}


def write_tensors(sources: tuple[Source, Source], folder: Path) -> None:
    """Write train.pt and test.pt, which airbench and its descendants read in place of torchvision's files."""
    folder.mkdir()
    for name, source in zip(("train", "test"), sources, strict=True):
        images = ImageDataset(
            source, image_size=32, channels=3, train=False, skip_bad=False, keep=False
        )
        pixels = images.decoded(torch.device("cpu")).x_NHWC
        content = {"images": pixels, "labels": source.labels, "classes": list(source.classes)}
        torch.save(content, folder / f"{name}.pt")


def peer_rows(script: Path, folder: Path) -> Iterator[tuple[float, float, float]]:
    """Accuracy plain and with views, and seconds, of each run of a script but the first, which warms up."""
    command = [sys.executable, "-u", str(script.resolve())]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        try:
            rows = filter(None, map(ROW.search, peer.stdout))
            for row in itertools.islice(rows, 1, None):
                plain, with_views, seconds = map(float, row.groups())
                yield plain, with_views, seconds
        finally:
            peer.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--preset", choices=PRESETS, default="speedrun")
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--views", choices=VIEWS, default="flip and shift")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--grid", default="", metavar="NAME=A,B;NAME=C")
    parser.add_argument(
        "--limit", type=float, default=1e9, help="seconds; no run begins after them"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--again", action="store_true", help="do runs that are in --out once more")
    parser.add_argument(
        "--campaign",
        action="store_true",
        help="runs of other commits and machines in --out count, too",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "speedrun.jsonl")
    parser.add_argument("--target", type=float, default=0.94, help="mean accuracy to be reached")
    parser.add_argument(
        "--peer", type=Path, action="append", default=[], help="a record holder's script"
    )
    parser.add_argument(
        "--ablate", action="store_true", help="also without each ingredient in turn"
    )
    arguments = parser.parse_args()
    if arguments.threads:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # which each training obeys
    use_threads()
    fixed = {}
    for text in arguments.set:
        name, _, value = text.partition("=")
        fixed[name] = value_of(name, value)
    bench = Bench(arguments)
    for script in arguments.peer:
        bench.runs_of_peer(script)
    for values in combinations(arguments.grid):
        for without in ABLATIONS if arguments.ablate else ({},):
            bench.runs_of({**fixed, **values, **without})


if __name__ == "__main__":
    main()
