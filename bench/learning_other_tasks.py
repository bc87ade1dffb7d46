"""Several labels, numbers and masks: `flambeau train` beside a plain PyTorch script, figures and seconds.

    python bench/learning_other_tasks.py --data fashion_mnist.npz [--images N] [--epochs N] [--rounds N]
        [--problems labels,counts,angles,masks] [--record]

--data has Fashion-MNIST as `x_train`, `y_train`, `x_test`, `y_test` and `classes`. Of its articles, images of
40 x 40 pixels are made: `labels`, one to four articles per image, and which of the ten classes are there;
`counts`, the number of articles of such images; `angles`, one article that is turned and resized, and by how
many degrees, and to how many pixels; `masks`, one to four articles in 80 x 80 pixels, and the class of each
pixel. Training and validation images are of other articles.

Contenders, each a command in a process of its own, with the network of `net` below, as many epochs, batches
of 64, one thread, an evaluation and a checkpoint per epoch:
- `flambeau train`: with its defaults: SGD, whole images and mirror images for labels; AdamW and whole images
  for numbers; AdamW, crops of 90 % and more, and mirror images for masks;
- `shifted`: the same with --padding 5, the default of classes in images of 40 pixels; of labels alone;
- `cropped`: the same with --crop-scale 0.25, the default of classes; of masks alone;
- `plain`: a script of torch, torchvision transforms and scikit-learn as most people write it (`plain` below):
  AdamW at 1e-3 with a cosine, BCEWithLogitsLoss, MSELoss of standardized numbers, or CrossEntropyLoss of
  pixels, whole images; masks by `pixel_net`, and mirrored with their images by torchvision's v2 transforms.

Others were looked at and not run: LightlyTrain 0.18 learns several labels, with networks of its own list, and
no numbers; the task `classify` of Ultralytics 8.4 has one class per image.

Each round runs all in a new order with another seed. A line has the figure of the best weights (`map`,
`miou`, or `mae` of each column), the seconds from start to end of the command, and the processor seconds of
all its processes; last come the medians, and the ratio to `plain` of processor seconds, round by round.
"""

import argparse
import csv
import itertools
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

SIDE = 40
TARGETS = {"labels": [], "counts": ["count"], "angles": ["angle", "side"], "masks": []}
VARIED = {
    ("labels", "shifted"): ["--padding", "5"],
    ("masks", "cropped"): ["--crop-scale", "0.25"],
}
"""Flags of contenders that are no default, by problem and name."""
Pixels = NDArray[np.uint8]


def net(num_classes: int, channels: int) -> nn.Module:
    """Four convolutions with BatchNorm, and a linear layer; 0.24 million parameters."""
    widths = (channels, 32, 64, 128, 128)
    layers = list[nn.Module]()
    for number, (before, after) in enumerate(itertools.pairwise(widths)):
        stride = 1 if number == 0 else 2
        layers += [
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, num_classes)
    )


class PixelNet(nn.Module):
    """Three levels, and the way back up; 0.2 million parameters."""

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        widths = (channels, 32, 64, 96)
        self.down = nn.ModuleList(
            _block(before, after, 1 + (number > 0))
            for number, (before, after) in enumerate(itertools.pairwise(widths))
        )
        self.up = nn.ModuleList([_block(96 + 64, 64, 1), _block(64 + 32, 32, 1)])
        self.head = nn.Conv2d(32, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = []
        for block in self.down:
            x = block(x)
            features.append(x)
        for block, skip in zip(self.up, features[-2::-1], strict=True):
            x = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skip], 1))
        logits: Tensor = self.head(x)
        return logits


def _block(before: int, after: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


def pixel_net(num_classes: int, channels: int) -> nn.Module:
    return PixelNet(num_classes, channels)


# ---------------------------------------------------------------- data


def make_data(source: Path, folder: Path, problem: str, *, images: int) -> Path:
    """Write a table of images to train and to validate on; returns its path, of masks that of the folder."""
    with np.load(source) as stored:
        arrays = {name: stored[name] for name in stored.files}
    if problem == "masks":
        return make_masks(arrays, folder, images=images)
    names = [str(name) for name in arrays["classes"]]
    draw = np.random.default_rng(0)
    head = ["labels"] if problem == "labels" else TARGETS[problem]
    folder.mkdir(parents=True)
    with (folder / "table.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", *head, "split"])
        for part, count, of in (("train", images, "train"), ("val", images // 5, "test")):
            x, y = arrays[f"x_{of}"], arrays[f"y_{of}"]
            for number in range(count):
                if problem == "angles":
                    picture, cells = turned(x[draw.integers(len(x))], draw)
                else:
                    chosen = draw.integers(len(x), size=draw.integers(1, 5))
                    picture = several(x[chosen], draw)
                    there = sorted({names[label] for label in y[chosen]})
                    cells = ["|".join(there)] if problem == "labels" else [str(len(chosen))]
                name = f"{part}{number:05}.png"
                Image.fromarray(picture).save(folder / name)
                rows.writerow([name, *cells, part])
    return folder / "table.csv"


def make_masks(arrays: dict[str, Any], folder: Path, *, images: int) -> Path:
    """Images and masks, in which 0 is what is no article."""
    draw = np.random.default_rng(0)
    for part, count, of in (("train", images, "train"), ("val", images // 5, "test")):
        x, y = arrays[f"x_{of}"], arrays[f"y_{of}"]
        for kind in ("images", "masks"):
            (folder / kind / part).mkdir(parents=True)
        for number in range(count):
            canvas, mask = np.zeros((2, 80, 80), np.uint8)
            for place in draw.permutation(4)[: draw.integers(1, 5)]:
                chosen = draw.integers(len(x))
                article = np.asarray(Image.fromarray(x[chosen]).resize((40, 40)))
                top, left = 40 * (place // 2), 40 * (place % 2)
                canvas[top : top + 40, left : left + 40] = article
                mask[top : top + 40, left : left + 40] = np.where(article > 20, y[chosen] + 1, 0)
            Image.fromarray(canvas).save(folder / "images" / part / f"{number:05}.png")
            Image.fromarray(mask).save(folder / "masks" / part / f"{number:05}.png")
    (folder / "classes.txt").write_text("\n".join(["nothing", *map(str, arrays["classes"])]))
    return folder


def several(articles: Pixels, draw: np.random.Generator) -> Pixels:
    """Articles of 20 pixels, each in a quarter of its own."""
    canvas = np.zeros((SIDE, SIDE), np.uint8)
    half = SIDE // 2
    for article, place in zip(articles, draw.permutation(4), strict=False):
        top, left = divmod(int(place), 2)
        small = np.asarray(Image.fromarray(article).resize((half, half), Image.Resampling.BILINEAR))
        canvas[top * half : (top + 1) * half, left * half : (left + 1) * half] = small
    return canvas


def turned(article: Pixels, draw: np.random.Generator) -> tuple[Pixels, list[str]]:
    """One article, turned by up to 60 degrees, of 14 to 28 pixels, somewhere in the image."""
    angle, side = float(draw.uniform(-60, 60)), int(draw.integers(14, 29))
    small = Image.fromarray(article).resize((side, side), Image.Resampling.BILINEAR)
    small = small.rotate(angle, Image.Resampling.BILINEAR, expand=True)
    canvas = Image.new("L", (SIDE, SIDE))
    room = [SIDE - length for length in small.size]
    canvas.paste(small, tuple(int(draw.integers(min(0, r), max(0, r) + 1)) for r in room))
    return np.asarray(canvas), [f"{angle:.3f}", str(side)]


# ---------------------------------------------------------------- the plain script


class Table(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The rows of a part of a table."""

    def __init__(self, path: Path, part: str, columns: list[str], names: list[str]) -> None:
        from torchvision import transforms

        self._folder = path.parent
        with path.open() as file:
            self._rows = [row for row in csv.DictReader(file) if row["split"] == part]
        if columns:
            values = [[float(row[name]) for name in columns] for row in self._rows]
        else:
            cells = [row["labels"].split("|") for row in self._rows]
            values = [[float(name in cell) for name in names] for cell in cells]
        self.targets = torch.tensor(values)
        self._transform = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))]
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = Image.open(self._folder / self._rows[index]["path"])
        return self._transform(image), self.targets[index]


def plain(path: Path, columns: list[str], *, epochs: int, seed: int, out: Path) -> None:
    """Train, evaluate and save as a script of one page does."""
    from sklearn.metrics import average_precision_score

    torch.manual_seed(seed)
    with path.open() as file:
        names = sorted(
            {name for row in csv.DictReader(file) for name in row.get("labels", "").split("|")}
        )
    train, val = (Table(path, part, columns, names) for part in ("train", "val"))
    mean, std = train.targets.mean(0), train.targets.std(0)
    loader = torch.utils.data.DataLoader(train, batch_size=64, shuffle=True)
    val_loader = torch.utils.data.DataLoader(val, batch_size=64)
    model = net(len(columns) or len(names), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    criterion = nn.MSELoss() if columns else nn.BCEWithLogitsLoss()
    best = -math.inf
    for _ in range(epochs):
        model.train()
        for images, targets in loader:
            loss = criterion(model(images), (targets - mean) / std if columns else targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.inference_mode():
            outputs = torch.cat([model(images) for images, _ in val_loader])
        figures: dict[str, Any]
        if columns:
            errors = (outputs * std + mean - val.targets).abs().mean(0)
            figures = {"mae": dict(zip(columns, errors.tolist(), strict=True))}
            score = -float(criterion(outputs, (val.targets - mean) / std))
        else:
            score = float(average_precision_score(val.targets, outputs.sigmoid(), average="macro"))
            figures = {"map": score}
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, out / "last.pt")
        if score > best:
            best = score
            torch.save(model.state_dict(), out / "best.pt")
            (out / "figures.json").write_text(json.dumps(figures))


class Pairs(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The images and masks of a part, mirrored together by torchvision's v2 transforms."""

    def __init__(self, folder: Path, part: str) -> None:
        from torchvision.transforms import v2

        self._images = sorted((folder / "images" / part).iterdir())
        self._masks = folder / "masks" / part
        flips = [v2.RandomHorizontalFlip()] if part == "train" else []
        self._transform = v2.Compose([v2.ToImage(), *flips])
        self._normalize = v2.Compose(
            [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
        )

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from torchvision import tv_tensors

        path = self._images[index]
        with Image.open(path) as image, Image.open(self._masks / path.name) as mask:
            numbers = tv_tensors.Mask(torch.from_numpy(np.array(mask))[None])
            x, y = self._transform(image.copy(), numbers)
        return self._normalize(x), y[0].long()


def plain_masks(folder: Path, *, epochs: int, seed: int, out: Path) -> None:
    """As `plain`, of masks."""
    torch.manual_seed(seed)
    num = len((folder / "classes.txt").read_text().splitlines())
    train, val = (Pairs(folder, part) for part in ("train", "val"))
    loader = torch.utils.data.DataLoader(train, batch_size=64, shuffle=True)
    val_loader = torch.utils.data.DataLoader(val, batch_size=64)
    model = pixel_net(num, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    criterion = nn.CrossEntropyLoss()
    best = -math.inf
    for _ in range(epochs):
        model.train()
        for images, targets in loader:
            loss = criterion(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        pairs = torch.zeros(num, num, dtype=torch.int64)
        with torch.inference_mode():
            for images, targets in val_loader:
                both = targets * num + model(images).argmax(1)
                pairs += torch.bincount(both.flatten(), minlength=num * num).view(num, num)
        right = pairs.diag().double()
        miou = float((right / (pairs.sum(0) + pairs.sum(1) - right)).nanmean())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, out / "last.pt")
        if miou > best:
            best = miou
            torch.save(model.state_dict(), out / "best.pt")
            (out / "figures.json").write_text(json.dumps({"miou": miou}))


# ---------------------------------------------------------------- contenders


def measured(
    contender: str, table: Path, problem: str, *, epochs: int, seed: int, out: Path
) -> dict[str, Any]:
    """One run: its figures, seconds and processor seconds."""
    out.mkdir()
    columns = TARGETS[problem]
    common = ["--epochs", f"{epochs}", "--seed", f"{seed}"]
    if contender == "plain":
        words = [__file__, "--plain", f"{table}", "--problems", problem, "--out", f"{out}", *common]
    else:
        target = ["--task", "regression", "--target", ",".join(columns)] if columns else []
        words = [
            "-m",
            "flambeau",
            "train",
            f"{table}",
            *target,
            "--model",
            f"{__file__}:{'pixel_net' if problem == 'masks' else 'net'}",
            *common,
        ]
        words += ["--batch-size", "64", "--out", f"{out / 'run'}", "--device", "cpu"]
        words += VARIED.get((problem, contender), [])
    core = sorted(os.sched_getaffinity(0))[0]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        ["taskset", "-c", str(core), sys.executable, *words],
        check=False, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{contender} ended with {done.returncode}:\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if contender == "plain":
        figures = json.loads((out / "figures.json").read_text())
    else:
        figures = figures_of(out / "run", table)
    return {**figures, "seconds": round(seconds, 2), "processor_s": round(spent, 2)}


def figures_of(run: Path, table: Path) -> dict[str, Any]:
    """Those of the published weights of a run, which are its best."""
    from flambeau import evaluate

    found: Any = evaluate(run, table)
    for name in ("map", "miou"):
        if hasattr(found, name):
            return {name: getattr(found, name)}
    return {"mae": {one.name: one.mae for one in found.columns}}


def contenders_of(problem: str) -> tuple[str, ...]:
    """Those that differ."""
    varied = (contender for of, contender in VARIED if of == problem)
    return "flambeau train", *varied, "plain"


def summary(
    rows: list[dict[str, Any]], problem: str, shared: dict[str, Any]
) -> list[dict[str, Any]]:
    """Medians of each contender, and its processor seconds in those of `plain`, round by round."""
    plain_s = {row["round"]: row["processor_s"] for row in rows if row["contender"] == "plain"}
    lines = []
    for contender in contenders_of(problem):
        of = [row for row in rows if row["contender"] == contender]
        ratios = [row["processor_s"] / plain_s[row["round"]] for row in of]
        figures: dict[str, Any] = {}
        if not TARGETS[problem]:
            name = "miou" if problem == "masks" else "map"
            figures[name] = round(statistics.median(row[name] for row in of), 4)
        else:
            figures["mae"] = {
                name: round(statistics.median(row["mae"][name] for row in of), 3)
                for name in TARGETS[problem]
            }
        lines.append(
            {
                "contender": contender, "problem": problem, "medians_of": len(of), **figures,
                "processor_s": round(statistics.median(row["processor_s"] for row in of), 2),
                "seconds": round(statistics.median(row["seconds"] for row in of), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios], **shared,
            }
        )  # fmt: skip
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", default=",".join(TARGETS))
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.plain is not None:
        common = {"epochs": told.epochs, "seed": told.seed, "out": told.out}
        if told.problems == "masks":
            plain_masks(told.plain, **common)
        else:
            plain(told.plain, TARGETS[told.problems], **common)
        return 0
    from provenance import (
        commit,
        cpu_model,
        record,
    )  # beside this script, which is a model file, too

    shared = {
        "images": told.images, "epochs": told.epochs, "torch": torch.__version__, "cpu": cpu_model(),
        "commit": commit(), "command": " ".join(["python", "bench/learning_other_tasks.py", *sys.argv[1:]]),
    }  # fmt: skip
    for problem in told.problems.split(","):
        rows = []
        with tempfile.TemporaryDirectory(prefix="other_tasks_") as name:
            table = make_data(told.data, Path(name) / "data", problem, images=told.images)
            for number in range(told.rounds):
                contenders = contenders_of(problem)
                order = random.Random(number).sample(contenders, len(contenders))
                for contender in order:
                    out = Path(name) / f"{number} {contender}"
                    row = measured(
                        contender,
                        table,
                        problem,
                        epochs=told.epochs,
                        seed=told.seed + number,
                        out=out,
                    )
                    rows.append(
                        {"contender": contender, "problem": problem, "round": number, **row}
                    )
                    record(rows[-1], __file__, keep=False)
        for line in summary(rows, problem, shared):
            record(line, __file__, keep=told.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
