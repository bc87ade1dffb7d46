"""Random pipelines through a DataLoader and through `fast` of it, compared to the bit.

    python bench/faults/fast_pipelines.py [--count N] [--first SEED] [--record]

A plan is drawn from its number: files of many kinds, some damaged; transforms of torchvision v1, v2 and timm,
nested, known and unknown, drawn from nothing (probabilities of 0 and 1) or from generators that the data set
seeds or sets back; hooks; a change within the epoch; a data set of torchvision or of one's own, which catches
what opening raises; 0 or 2 workers, forked or spawned. Equal must be: types, shapes, strides, bits, labels,
what is caught and where, how often a hook is called, and what ends the epoch. One JSON line, with the numbers
of the plans that differ; `--count 1 --first NUMBER` prints such a one.
"""

import argparse
import io
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).parents[1]))

from flambeau.data.fast import fast
from provenance import commit, cpu_model, record

KINDS: list[dict[str, Any]] = [
    {"format": "JPEG", "quality": 92},
    {"format": "JPEG", "progressive": True},
    {"format": "JPEG", "subsampling": 0, "restart_marker_rows": 1},
    {"format": "PNG"},
    {"format": "WEBP", "lossless": True},
    {"format": "MPO", "save_all": True},
]
SEEDINGS = ("none", "none", "none", "torch", "python", "both", "torch state", "python state")


@dataclass
class Plan:
    """What one comparison is about."""

    number: int
    rng: random.Random = field(init=False)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.number)

    def chance(self, p: float, word: str) -> bool:
        """Whether something happens, noted for the person who reads the plan."""
        happens = self.rng.random() < p
        if happens:
            self.words.append(word)
        return happens


class Own(Dataset[Any]):
    """As people write it: reads, catches, and transforms an image and its mask."""

    def __init__(self, files: list[Path], transform: Any, seeding: str) -> None:
        self.files = files
        self.transform = transform
        self.seeding = seeding

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        try:
            with Image.open(self.files[index]) as opened:
                frames = getattr(opened, "n_frames", 1)
                if frames > 1:
                    opened.seek(1)
                words = f"{opened.format} {frames}"
                image = opened.convert("RGB")
        except Exception as error:
            return torch.zeros(3, 4, 4), torch.zeros(3, 4, 4), f"{type(error).__name__} {error}"
        state = torch.get_rng_state(), random.getstate()
        self._seed(index, state)
        first = self.transform(image)
        self._seed(index, state)
        return first, self.transform(image), words

    def _seed(self, index: int, state: tuple[Any, Any]) -> None:
        if self.seeding in ("torch", "both"):
            torch.manual_seed(index)
        if self.seeding in ("python", "both"):
            random.seed(index)
        if self.seeding == "torch state":
            torch.set_rng_state(state[0])
        if self.seeding == "python state":
            random.setstate(state[1])


def draw_files(plan: Plan, folder: Path) -> list[Path]:
    """Ten images in two classes."""
    pixels = np.random.default_rng(plan.number)
    is_damaged = plan.chance(0.3, "damaged")
    paths = []
    for number in range(10):
        settings = dict(plan.rng.choice(KINDS))
        height = plan.rng.randint(30, 90)
        small = pixels.integers(0, 256, (height // 6 + 2, 9, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((70, height), Image.Resampling.BICUBIC)
        if settings["format"] == "MPO":
            settings["append_images"] = [image.rotate(180)]
        elif plan.rng.random() < 0.2:
            image = image.convert(plan.rng.choice(["L", "RGB"]))
        file = io.BytesIO()
        image.save(file, **settings)
        data = bytearray(file.getvalue())
        if is_damaged and plan.rng.random() < 0.5:
            at = plan.rng.randrange(2, len(data) - 2)
            data[at : at + 9] = pixels.bytes(len(data[at : min(at + 9, len(data) - 2)]))
        ending = "jpg" if settings["format"] in ("JPEG", "MPO") else settings["format"].lower()
        path = folder / "ab"[number % 2] / f"{number}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        paths.append(path)
    return sorted(paths)


def draw_step(plan: Plan, version: Any, *, is_seeded: bool, depth: int = 0) -> Any:
    """One transform of PIL images, or of several."""
    p = plan.rng.choice([0.5, 0.3] if is_seeded else [0.0, 1.0])
    kind = plan.rng.randrange(10 if depth < 3 else 6)
    plan.words.append(f"{'>' * depth}{kind}({p})")
    if kind == 0:
        return version.RandomHorizontalFlip(p)
    if kind == 1:
        return version.RandomVerticalFlip(p)
    if kind == 2:
        return version.CenterCrop(plan.rng.randint(10, 60))
    if kind == 3:
        return version.Resize((plan.rng.randint(9, 60), plan.rng.randint(9, 60)))
    if kind == 4:
        return plan.rng.choice([version.Grayscale(3), version.Pad(3), version.RandomInvert(p)])
    if kind == 5:
        return Identity()
    inner = [
        draw_step(plan, version, is_seeded=is_seeded, depth=depth + 1)
        for _ in range(1 if kind == 8 and not is_seeded else plan.rng.randint(1, 3))
    ]
    if kind == 8:
        return version.RandomChoice(inner)
    return version.Compose(inner) if kind == 9 else version.RandomApply(inner, p=p)


class Identity(nn.Module):
    """A transform of one's own."""

    def forward(self, image: Any) -> Any:
        """The image itself."""
        return image


def draw_transform(plan: Plan, seeding: str) -> Any:
    """A pipeline from PIL images to tensors of one size."""
    version = plan.rng.choice([v1, v2])
    plan.words.append(version.__name__[-2:])
    is_seeded = seeding == "both"
    steps = [draw_step(plan, version, is_seeded=is_seeded) for _ in range(plan.rng.randint(0, 4))]
    if seeding != "none":
        crop = version.RandomResizedCrop(24)
        timms = RandomResizedCropAndInterpolation(24, interpolation="random")
        is_timms = seeding.startswith("python") or (is_seeded and plan.chance(0.3, "timm"))
        steps.insert(0, timms if is_timms else crop)
    steps.append(version.Resize((24, 20)))
    if version is v1:
        steps.append(v1.ToTensor())
    else:
        steps += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    if plan.chance(0.5, "normalized"):
        steps.append(version.Normalize([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))
    return version.Compose(steps)


def modules_of(transform: Any) -> Iterator[nn.Module]:
    for one in transform.transforms:
        if isinstance(one, nn.Module):
            yield one
        if hasattr(one, "transforms"):
            yield from modules_of(one)


def make_loader(plan: Plan, folder: Path, calls: list[str]) -> tuple[Any, Any]:
    """A loader, and its pipeline."""
    files = draw_files(plan, folder)
    is_own = plan.chance(0.6, "own")
    seeding = plan.rng.choice(SEEDINGS) if is_own else "none"
    plan.words.append(seeding)
    transform = draw_transform(plan, seeding)
    dataset: Any = Own(files, transform, seeding) if is_own else ImageFolder(folder, transform)
    if plan.chance(0.2, "parts"):
        dataset = ConcatDataset([Subset(dataset, [7, 2, 3]), dataset])
    workers = plan.rng.choice([0, 0, 0, 2])
    context = "fork" if plan.rng.random() < 0.9 else "spawn"
    if workers == 0 or context == "fork":
        watched = [*modules_of(transform)]
        if watched and plan.chance(0.2, "hook"):
            plan.rng.choice(watched).register_forward_hook(lambda *_: calls.append("called"))
    plan.words.append(f"{workers} {context if workers else ''}")
    loader: Any = DataLoader(
        dataset,
        batch_size=plan.rng.choice([3, 4, 10]),
        shuffle=plan.rng.random() < 0.5,
        num_workers=workers,
        multiprocessing_context=context if workers else None,
        collate_fn=plan.rng.choice([default_collate, list]),
    )
    return loader, transform


def run(plan: Plan, folder: Path, *, is_fast: bool) -> list[Any]:
    """Everything that somebody sees of an epoch."""
    calls: list[str] = []
    loader, transform = make_loader(plan, folder, calls)
    changes = plan.chance(0.3, "changed")
    way: dict[str, int] = plan.rng.choice([{}, {}, {"workers": 1}]) if not changes else {}
    seen: list[Any] = []
    torch.manual_seed(plan.number)
    random.seed(plan.number)
    batches = iter(fast(loader, **way) if is_fast else loader)
    while True:
        try:
            seen.append(next(batches))
        except StopIteration:
            break
        except Exception as error:
            # A worker's message has the traceback before it, and `stack` has another one there.
            words = str(error).strip().splitlines()[-1]
            seen.append((type(error).__name__, "" if way else words))
            break
        if changes and len(seen) == 1:
            at = [type(one).__name__ for one in transform.transforms].index("Resize")
            transform.transforms[at].size = (18, 16)
    if loader.num_workers == 0 and "workers" not in way:
        seen.append(len(calls))
    return seen


def flat(value: Any) -> Iterator[Any]:
    """Tensors as type, dtype, shape, strides and bytes; everything else as it is."""
    if isinstance(value, torch.Tensor):
        yield (
            type(value),
            value.dtype,
            value.shape,
            value.stride(),
            value.contiguous().numpy().tobytes(),
        )
    elif isinstance(value, list | tuple):
        for one in value:
            yield from flat(one)
    else:
        yield value


def compare(number: int) -> tuple[bool, Plan]:
    """Whether both loaders show the same."""
    with tempfile.TemporaryDirectory() as place:
        plan = Plan(number)
        expected = run(plan, Path(place), is_fast=False)
        found = run(Plan(number), Path(place), is_fast=True)
    if "torch state" in plan.words or "python state" in plan.words:  # what is drawn differs
        return shown(found) == shown(expected), plan
    return [*flat(found)] == [*flat(expected)], plan


def shown(seen: list[Any]) -> list[Any]:
    """Whether image and mask are alike in each batch; types and words."""
    rows: list[Any] = []
    for batch in seen:
        if isinstance(batch, list) and len(batch) == 3 and isinstance(batch[0], torch.Tensor):
            rows.append([torch.equal(batch[0], batch[1]), batch[0].shape, batch[2]])
        elif isinstance(batch, list):
            rows.append([(torch.equal(a, b), a.shape, word) for a, b, word in batch])
        else:
            rows.append(batch)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    differing = {}
    for number in range(options.first, options.first + options.count):
        is_equal, plan = compare(number)
        if not is_equal:
            differing[number] = " ".join(plan.words)
            print(number, differing[number], file=sys.stderr, flush=True)
    row = {
        "pipelines": options.count,
        "first": options.first,
        "equal": options.count - len(differing),
        "differing": differing,
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    record(row, __file__, keep=options.record)
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
