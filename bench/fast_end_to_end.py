"""How long a training waits for its images before and after `fast(loader)`, in one process and in turn.

    taskset -c 0,1 python bench/fast_end_to_end.py --data CLASS_FOLDERS [--model NAME] [--size PIXELS]
        [--threads N] [--images N] [--rounds N] [--record]

`before` is a DataLoader with a worker for each core, which stay between epochs; `after` is `fast` of the same
loader. What is trained, `small` or a model of torchvision, shares the cores with the loading; --threads says
on how many it computes. An epoch draws --images of the images, with replacement. `no loading` trains on
one batch again and again: the limit of any loader. Each round runs every contender in a new order, by wall
time, so it needs a quiet machine; the first round does not count. One JSON line: medians of images a second,
and of the share of the time in which the loop waits for the next batch, the start of the epoch included;
`times` is the median of the ratios of after to before within a round; `memory_mib` is what this process
holds after the second round and after the last.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from flambeau.data.fast import fast
from provenance import commit, cpu_model, record  # beside this script

Step = Callable[[Tensor, Tensor], None]


def contenders(data: Path, size: int, num_images: int) -> dict[str, Iterable[Any]]:
    transform = v1.Compose([
        v1.RandomResizedCrop(size), v1.RandomHorizontalFlip(), v1.ToTensor(),
        v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])  # fmt: skip
    folder = ImageFolder(data, transform)
    before = DataLoader(
        folder, batch_size=64, num_workers=len(os.sched_getaffinity(0)), persistent_workers=True,
        sampler=RandomSampler(folder, replacement=True, num_samples=num_images), drop_last=True,
    )  # fmt: skip
    batch = torch.randn(64, 3, size, size), torch.zeros(64, dtype=torch.int64)
    return {"before": before, "after": fast(before), "no loading": [batch] * len(before)}


def small(num_classes: int) -> nn.Module:
    """Four convolutions, 15 million multiplications for an image of 64 x 64."""
    widths = (3, 32, 64, 128, 256)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, num_classes)
    )


def training_step(model: str, learning_rate: float = 0.01) -> Step:
    network = small(1000) if model == "small" else torchvision.models.get_model(model, weights=None)
    optimizer = torch.optim.SGD(network.parameters(), learning_rate, momentum=0.9)

    def step(images: Tensor, labels: Tensor) -> None:
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def epoch(loader: Iterable[Any], step: Step) -> tuple[float, float]:
    """Images a second, and the share of the time that went by until batches came."""
    start = asked = time.perf_counter()
    waited, count = 0.0, 0
    for images, labels in loader:
        waited += time.perf_counter() - asked
        step(images, labels)
        count += len(images)
        asked = time.perf_counter()
    end = time.perf_counter()
    return count / (end - start), (waited + end - asked) / (end - start)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="small")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    told = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(told.threads)
    step = training_step(told.model)
    loaders = contenders(told.data, told.size, told.images)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    draw, memory = random.Random(0), list[float]()
    for number in range(told.rounds + 1):
        for name in draw.sample(sorted(loaders), len(loaders)):
            figures = epoch(loaders[name], step)
            if number:
                found[name].append(figures)
        memory.append(resident_mib())
    ratios = [
        after[0] / before[0] for before, after in zip(found["before"], found["after"], strict=True)
    ]
    row = {
        "images_per_s": {n: round(statistics.median(r for r, _ in own), 1) for n, own in found.items()},
        "waiting": {n: round(statistics.median(w for _, w in own), 3) for n, own in found.items()},
        "times": round(statistics.median(ratios), 2),
        "range": [round(min(ratios), 2), round(max(ratios), 2)], "n": told.rounds,
        "memory_mib": [memory[min(2, told.rounds)], memory[-1]],
        "model": told.model, "size": told.size, "images": told.images, "threads": told.threads,
        "cores": len(os.sched_getaffinity(0)), "load_average": round(os.getloadavg()[0], 2),
        "torch": torch.__version__, "torchvision": torchvision.__version__,
        "cpu": cpu_model(), "commit": commit(),
        "command": " ".join(
            ["python bench/fast_end_to_end.py", *(Path(word).name for word in sys.argv[1:])]
        ),
    }  # fmt: skip
    record(row, __file__, keep=told.record)


if __name__ == "__main__":
    main()
