"""How fast `flambeau train` brings small images to a fixed accuracy, run after run in one process.

    python bench/speedrun.py --data FOLDER [--preset speedrun] [--runs 25] [--device cuda]
        [--set lr=0.03 ...] [--grid 'lr=0.02,0.04;momentum=0.6,0.8'] [--limit SECONDS] [--out FILE] [--again]
        [--threads N] [--peer SCRIPT --peer-data FOLDER]

FOLDER has train/ and val/, or is any other DATA of `flambeau train`. The training is that of the command: its
model, data set, loss and `Run`, with the settings of a preset. `train_s` is the clock that the
records for CIFAR-10 count: from the first step to the last, without evaluations in between, with the
evaluation at the end in --views. Not counted are reading the data and a first epoch, which compiles and
warms up (`warmup_s`); `wall_s` is all of a run, with its files. Each run is one line, written when it ends; a
run of the same commit, device, settings and seed that is in --out is not done again, unless --again. The last
line of each combination of settings has mean, standard error and number.

--peer runs a record holder's script, brought by its path, in the folder where its data lie, in the same call,
and gives its output, line by line.
"""

import argparse
import itertools
import json
import platform
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

from flambeau.trainer import fit as training_code
from flambeau.trainer.fit import Training, batch_loss, set_up
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import Prepared, datasets, open_data
from flambeau.trainer.settings.settings import FIELDS, PRESETS, Settings
from flambeau.trainer.settings.stored_settings import canonical, with_preset
from provenance import commit, cpu_model, device_model  # beside this script

ROOT = Path(__file__).resolve().parents[1]
VIEWS = ("plain", "flip", "flip and shift")


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
        train_s = 0.0
        accuracy: dict[str, float] = {}
        for _ in run.epochs():
            start = wait(run.device)
            for _ in run.steps(lambda batch: batch_loss(training, *batch)):
                pass
            if run.state.step >= run.plan.total_steps:
                accuracy = accuracies(training, (views,))
            train_s += wait(run.device) - start
            if run.state.step >= run.plan.total_steps:
                others = tuple(kind for kind in VIEWS if kind != views)
                accuracy |= accuracies(training, others)
        steps = run.state.step
    return {
        "accuracy": accuracy[views],
        "accuracies": {kind: accuracy[kind] for kind in VIEWS},
        "train_s": round(train_s, 3),
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
            if shape not in self._warm:
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
            self._write({"set": dict(values), **summary(lines), **self._about})

    def _known(self, values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        out = self._arguments.out
        if not out.is_file():
            return {}
        same = ("settings", "views", "device", "torch", "commit", "threads")
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
    """Means and standard errors of runs."""
    found: dict[str, Any] = {"n": len(lines)}
    for name in ("accuracy", "train_s", "wall_s"):
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


def run_peer(script: Path, folder: Path, limit_s: float) -> None:
    """Run another's script where its data lie; its output is printed as it comes."""
    command = [sys.executable, str(script.resolve())]
    try:
        subprocess.run(command, cwd=folder, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        print(f"speedrun: {script.name} has been stopped after {limit_s:.0f} s", file=sys.stderr)


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
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "speedrun.jsonl")
    parser.add_argument("--peer", type=Path, help="a record holder's script")
    parser.add_argument("--peer-data", type=Path, help="the folder in which that runs")
    parser.add_argument("--peer-limit", type=float, default=300.0, help="seconds")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.peer is not None:
        run_peer(arguments.peer, arguments.peer_data or Path(), arguments.peer_limit)
    fixed = {}
    for text in arguments.set:
        name, _, value = text.partition("=")
        fixed[name] = value_of(name, value)
    bench = Bench(arguments)
    for values in combinations(arguments.grid):
        bench.runs_of({**fixed, **values})


if __name__ == "__main__":
    main()
