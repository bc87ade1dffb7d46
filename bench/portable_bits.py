"""Whether trainings have the same bits on other processors, and what it costs.

    python bench/portable_bits.py [--qemu qemu-x86_64] [--processors native Haswell EPYC] [--threads 1 2]
        [--models mlp:200 photos:1] [--photos FOLDER] [--switches COMPATIBLE AVX2 none] [--record]
    python bench/portable_bits.py --cost 15 [--record]

Each line has a hash of the weights after some steps of one model on one processor: this one, or one that
qemu-user emulates, which for many operations uses other kernels. `as_native` compares it with the first line
of the same training that another processor, `native_cpu`, computed without qemu-user. `switches` are those of
`portable_bits`, with this value of MKL_CBWR. `mkl_branch` is what MKL then reports: 1 off, 2 AUTO,
3 COMPATIBLE, 10 AVX2. `functions` hashes 100,000 values of each elementwise function; `train` and `photos`
are `flambeau train`, on the embedded data and on photographs, for so many epochs. Lines that
results/portable_bits.jsonl has for the same torch and, without qemu-user, processor are not made again, so a
bench that was stopped goes on.

--cost: seconds per image of an epoch of `flambeau train` on the embedded data, with --portable-bits 1 between
two without; a round is the ratio of the middle to the mean around it.
"""

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flambeau.run.options.portable_bits import SWITCHES
from provenance import commit, cpu_model, record  # beside this script

RESULTS = Path(__file__).parent / "results" / "portable_bits.jsonl"
HASHED_STEPS = 0, 1, 2, 3, 5, 10, 20, 50, 100, 200
FUNCTIONS = (
    "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "reciprocal",
)  # fmt: skip


def made(name: str) -> tuple[Any, tuple[int, ...], bool]:
    """A model, the shape of a batch, and whether adamw trains it; else sgd does."""
    from torch import nn

    if name == "mlp":
        layers = [nn.Flatten(), nn.Linear(192, 128), nn.GELU(), nn.LayerNorm(128)]
        layers += [nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 10)]
        return nn.Sequential(*layers), (16, 3, 8, 8), False
    if name == "convnet":
        layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        layers += [nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        layers += [nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, groups=16, padding=1), nn.SiLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
        return nn.Sequential(*layers), (8, 3, 16, 16), False
    if name == "vit":
        from torchvision.models import VisionTransformer

        sizes = {"image_size": 16, "patch_size": 4, "hidden_dim": 64, "mlp_dim": 128}
        model = VisionTransformer(**sizes, num_layers=3, num_heads=4, num_classes=10)
        return model, (8, 3, 16, 16), True
    from torchvision.models import resnet18

    return resnet18(num_classes=10), (4, 3, 32, 32), False


def digest(tensors: Any) -> str:
    text = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        text.update(tensor.detach().contiguous().numpy())
    return text.hexdigest()


def trained(name: str, steps: int) -> dict[str, str]:
    """Hashes of the weights by step."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(0)
    model, shape, uses_adamw = made(name)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if uses_adamw
        else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    )
    generator = torch.Generator().manual_seed(1)
    hashes = {"0": digest(model.state_dict().values())}
    for step in range(1, steps + 1):
        images = torch.randn(shape, generator=generator)
        targets = torch.randint(0, 10, shape[:1], generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(images), targets).backward()
        optimizer.step()
        if step in HASHED_STEPS:
            hashes[str(step)] = digest(model.state_dict().values())
    return hashes


def trained_by_command(photos: str | None, epochs: int, threads: int) -> dict[str, str]:
    """The hash of what `flambeau train` publishes: of the embedded data, or ResNet-18 of photographs."""
    from safetensors.torch import load_file

    from flambeau import train

    held = dict(SWITCHES).items() <= os.environ.items()
    more: dict[str, Any] = {"model": "resnet18", "image_size": 64} if photos else {"subset": 0.2}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        train(
            photos,
            out=Path(folder) / "run",
            bar=False,
            epochs=epochs,
            precision="fp32",
            portable_bits=threads if held else None,
            **more,
        )
        weights = load_file(Path(folder) / "run" / "model.safetensors")
    return {str(epochs): digest(weights[name] for name in sorted(weights))}


def function_hashes() -> dict[str, str]:
    import torch

    values = 10 * torch.rand(100_000, generator=torch.Generator().manual_seed(1))
    return {name: digest([getattr(torch, name)(values)]) for name in FUNCTIONS}


def work(jobs: list[str], threads: int, photos: str | None) -> None:
    """In a process of its own: one line of JSON for each model."""
    import torch

    torch.set_num_threads(threads)
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    branch = ctypes.CDLL(str(library)).mkl_serv_cbwr_get(1)  # MKL_CBWR_BRANCH
    facts = {"cpu_kernels": torch.backends.cpu.get_cpu_capability(), "mkl_branch": branch}
    for job in jobs:
        name, _, steps = job.partition(":")
        began = time.monotonic()
        if name == "functions":
            hashes = function_hashes()
        elif name in ("train", "photos"):
            data = photos if name == "photos" else None
            hashes = trained_by_command(data, int(steps), threads)
        else:
            hashes = trained(name, int(steps))
        seconds = round(time.monotonic() - began, 1)
        print(
            json.dumps({"model": name, **facts, "hashes": hashes, "seconds": seconds}), flush=True
        )


def switched(value: str) -> dict[str, str]:
    """The environment of a process, with MKL_CBWR at this value, or without any of the switches."""
    plain = {name: text for name, text in os.environ.items() if name not in SWITCHES}
    return plain if value == "none" else {**plain, **SWITCHES, "MKL_CBWR": value}


def lines_of(
    jobs: list[str], processor: str, arguments: Any, *, threads: int, value: str
) -> Iterator[Any]:
    """The lines of one process, as they come."""
    emulator = [] if processor == "native" else [arguments.qemu, "-cpu", processor]
    command = [sys.executable, __file__, "--work", *jobs, "--threads", str(threads)]
    if arguments.photos:
        command += ["--photos", arguments.photos]
    with subprocess.Popen(
        [*emulator, *command],
        env=switched(value),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if emulator else None,  # features that qemu does not have
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    names = "torch", "model", "processor", "threads", "switches"
    cpu = row["cpu"] if row.get("processor") == "native" else None
    return (*(row.get(name) for name in names), cpu)


def native_of(row: dict[str, Any], rows: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The first of the rows of the same training that was made without an emulator, by another processor."""
    same = "torch", "model", "threads", "switches"
    others = (other for other in rows if all(other.get(name) == row[name] for name in same))
    return next((o for o in others if o["processor"] == "native" and key(o) != key(row)), None)


def compare(arguments: Any) -> None:
    from importlib.metadata import version

    facts = {"torch": version("torch"), "cpu": cpu_model(), "python": platform.python_version()}
    texts = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    known = {key(row): row for row in map(json.loads, texts)}
    places = itertools.product(arguments.switches, arguments.threads, arguments.processors)
    for value, threads, processor in places:
        place = {"processor": processor, "threads": threads, "switches": value}
        models = {job.partition(":")[0]: job for job in arguments.models}
        jobs = [
            job
            for name, job in models.items()
            if key({**facts, **place, "model": name}) not in known
        ]
        if not jobs:
            continue
        for found in lines_of(jobs, processor, arguments, threads=threads, value=value):
            row = {"commit": commit(), **facts, **place, **found}
            other = native_of(row, known.values())
            if other is not None:
                row["as_native"] = differing(other["hashes"], row["hashes"])
                row["native_cpu"] = other["cpu"]
            known[key(row)] = row
            record(row, __file__, keep=arguments.record)


def differing(native: dict[str, str], here: dict[str, str]) -> str:
    """'same', or the steps or functions that differ, among those that both have."""
    names = [name for name in here if native.get(name, here[name]) != here[name]]
    return ", ".join(names) or "same"


def seconds_per_image(*flags: str) -> float:
    """Of an epoch of `flambeau train` on a fifth of the embedded data."""
    words = ["--epochs", "1", "--subset", "0.2", "--precision", "fp32", "--workers", "0", *flags]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "flambeau", "train", "--out", "run", *words],
            cwd=folder,
            env={**switched("none"), "HOME": folder, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
        )
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    speeds = [row["images_per_s"] for row in map(json.loads, lines) if "images_per_s" in row]
    return 1 / statistics.median(speeds)


def cost(arguments: Any) -> None:
    model = ["--model", arguments.cost_model]
    ratios = []
    before = seconds_per_image(*model)
    for _ in range(arguments.cost):
        middle = seconds_per_image(*model, "--portable-bits", "1")
        after = seconds_per_image(*model)
        ratios.append(middle / ((before + after) / 2))
        before = after
    row = {
        "commit": commit(),
        "cpu": cpu_model(),
        "cost_of": arguments.cost_model,
        "rounds": len(ratios),
        "ratio": round(statistics.median(ratios), 3),
        "smallest": round(min(ratios), 3),
        "largest": round(max(ratios), 3),
    }
    record(row, __file__, keep=arguments.record)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--qemu", default="qemu-x86_64")
    parser.add_argument("--processors", nargs="+", default=["native", "Haswell", "EPYC"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--switches", nargs="+", default=["COMPATIBLE", "AVX2", "none"])
    models = ["functions", "mlp:200", "vit:20", "convnet:20", "resnet18:1"]
    parser.add_argument("--models", nargs="+", default=models, metavar="NAME:STEPS")
    parser.add_argument("--photos", metavar="FOLDER", help="for --models photos:EPOCHS")
    parser.add_argument("--cost", type=int, metavar="ROUNDS")
    parser.add_argument("--cost-model", default="tiny_convnet")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.threads[0], arguments.photos)
    elif arguments.cost:
        cost(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
