"""What a step on the CPU gains where freed memory stays with the process: `keep_freed_memory`.

    python bench/freed_memory.py [--rounds N] [--only JOB,JOB] [--record]

Each job is a model with random images of one size, channels_last and fused SGD, in the precision that
`train` would take here. In each round one process trains as usual and another with `keep_freed_memory()`, in
turn, the first of them being another one each time; each warms up for a second and times its steps for three.
A line per job has the medians over the rounds, and of the ratios within a round median, smallest and largest.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flambeau.recipes.models.small_convnet import SmallConvNet
from flambeau.recipes.setup.environment import native_bf16, usable_cpus
from flambeau.recipes.setup.freed_memory import keep_freed_memory
from provenance import commit, cpu_model, record  # beside this script

WARM_UP_S, TIMED_S = 1.0, 3.0
# Model of this package, of timm or of torchvision; samples of a step, channels, pixels of a side.
JOBS: dict[str, tuple[int, int, int]] = {
    "small_convnet": (64, 1, 28),
    "torchvision:resnet18": (32, 3, 64),
    "torchvision:resnet50": (8, 3, 224),
    "timm:vit_tiny_patch16_224": (8, 3, 224),
    "timm:mobilenetv3_small_100": (32, 3, 96),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(JOBS))
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.train:
        print(json.dumps(train(told.train[0], keeps=told.train[1] == "kept")))
        return
    for job in told.only.split(","):
        ways: dict[str, list[dict[str, float]]] = {"usual": [], "kept": []}
        for number in range(told.rounds):
            for way in sorted(ways, reverse=bool(number % 2)):
                done = subprocess.run(
                    [sys.executable, __file__, "--train", job, way], capture_output=True, text=True,
                    check=True,
                )  # fmt: skip
                ways[way].append(json.loads(done.stdout))
        ratios = sorted(
            a["step_ms"] / b["step_ms"] for a, b in zip(ways["usual"], ways["kept"], strict=True)
        )
        row = {
            "job": job, "images": JOBS[job], "rounds": told.rounds, "gain": statistics.median(ratios),
            "gain_least": ratios[0], "gain_most": ratios[-1],
        }  # fmt: skip
        for name in ("step_ms", "faults_per_step", "most_mib"):
            row |= {
                f"{name}_{way}": statistics.median(one[name] for one in found)
                for way, found in ways.items()
            }
        row = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        row |= {
            "threads": usable_cpus(), "torch": torch.__version__, "cpu": cpu_model(), "commit": commit(),
        }  # fmt: skip
        record(row, __file__, keep=told.record)


def train(job: str, *, keeps: bool) -> dict[str, float]:
    """Milliseconds of a step, page faults of a step, and the most memory that the process has held."""
    taken = keeps and keep_freed_memory()
    assert taken == keeps, "only the GNU C library can"
    torch.set_num_threads(usable_cpus())
    torch.manual_seed(0)
    batch, channels, pixels = JOBS[job]
    model = made(job, channels).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    images = torch.randn(batch, channels, pixels, pixels).to(memory_format=torch.channels_last)
    targets = torch.randint(0, 10, (batch,))
    is_bf16 = native_bf16(torch.device("cpu"))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            loss = cross_entropy(model(images.clone()), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    run_for(step, WARM_UP_S)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    times = run_for(step, TIMED_S)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "step_ms": 1e3 * statistics.median(times),
        "faults_per_step": (usage.ru_minflt - before) / len(times),
        "most_mib": usage.ru_maxrss / 1024,
    }


def run_for(step: Callable[[], None], seconds: float) -> list[float]:
    """Seconds of each step; five at least."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


def made(job: str, channels: int) -> nn.Module:
    kind, _, name = job.rpartition(":")
    if kind == "torchvision":
        import torchvision

        return torchvision.models.get_model(name, num_classes=10)
    if kind == "timm":
        import timm

        return timm.create_model(name, num_classes=10)
    return SmallConvNet(channels, 10)


if __name__ == "__main__":
    main()
