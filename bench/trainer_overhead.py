"""Microseconds that a trainer adds to an optimizer step of a small MLP, against the bare loop.

    OMP_NUM_THREADS=1 taskset -c 1 python bench/trainer_overhead.py [--rounds N] [--only NAME,NAME] [--record]
                                                                    [--device cuda]

MLP 32-32-10 with ReLU, batch 16, cross-entropy, SGD 0.01 with momentum 0.9, ready batches, one thread.
Each round runs every contender once, in a new order, and times its steps 40 to 340 in CPU time of the
process (on a GPU in wall time, from an idle device to an idle device, with the batches there, and without the
peers); the ratio is to the bare loop of the same round. One JSON line a contender. Peers run where they are
installed (`pip install -e '.[bench]'`). Every contender must end with the weights of its loop by hand: who
skips work is refused.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import math
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flambeau
from provenance import commit, cpu_model, device_model, record  # beside this script

STEPS, FIRST, BATCH = 340, 40, 16
CLIP, DECAY, LOG_EVERY = 1.0, 0.999, 50
Batch = tuple[Tensor, Tensor]


class Timed(nn.Module):
    """The network, which notes the time of its forward calls 40 and 340."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
        self.calls = 0
        self.times: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.calls == FIRST or self.calls == STEPS - 1:
            self.times.append(now(x.device))
        self.calls += 1
        return self.layers(x)


def now(device: torch.device) -> float:
    """Seconds that this process has computed; with a GPU those of the clock, once the GPU is idle."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Batches:
    """Ready batches, as often as one likes."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(STEPS, BATCH, 32, generator=generator)
        y = torch.randint(0, 10, (STEPS, BATCH), generator=generator)
        self.batches = list(zip(x.to(device), y.to(device), strict=True))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **settings)


def cosine(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / STEPS))


def bare(model: Timed, batches: Batches, **settings: Any) -> None:
    optimizer = sgd(model, **settings)
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def bare_fused(model: Timed, batches: Batches) -> None:
    bare(model, batches, fused=True)


def by_hand(model: Timed, batches: Batches, *, clip: bool, fused: bool = False) -> None:
    """What people write: LambdaLR, a loss sum on the device, torch's AveragedModel, a line every 50 steps."""
    optimizer = sgd(model, fused=fused or None)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    average = torch.optim.swa_utils.AveragedModel(
        model.layers, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    )
    total, lines = torch.zeros((), device=batches.batches[0][0].device), io.StringIO()
    for step, (x, y) in enumerate(batches, 1):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model.layers)
        total += loss.detach()
        if step % LOG_EVERY == 0:
            lines.write(json.dumps({"step": step, "loss": total.item() / LOG_EVERY}) + "\n")
            total.zero_()


def flambeau_run(model: Timed, batches: Batches, *, clip: bool, extras: bool = True) -> None:
    from flambeau.run.run import Run

    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            Path(folder) / "run", model, sgd(model, fused=True), batches, duration="1ep",
            schedule=cosine if extras else "constant", ema=DECAY if extras else 0.0,
            clip_norm=CLIP if clip else 0.0, log_every=LOG_EVERY, bar=False,
        )  # fmt: skip
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(F.cross_entropy(model(x), y))


def fabric(model: Timed, batches: Batches) -> None:
    from lightning.fabric import Fabric

    lightning = Fabric(accelerator="cpu", devices=1)
    net, optimizer = lightning.setup(model, sgd(model))
    for x, y in batches:
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        lightning.backward(loss)
        optimizer.step()


def lightning_trainer(model: Timed, batches: Batches) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.net)

    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            default_root_dir=folder,
            log_every_n_steps=LOG_EVERY,
        ).fit(Module(), batches)


def accelerate(model: Timed, batches: Batches) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    net, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for x, y in batches:
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()


def ignite(model: Timed, batches: Batches) -> None:
    from ignite.engine import create_supervised_trainer

    create_supervised_trainer(model, sgd(model), F.cross_entropy).run(batches, max_epochs=1)


CONTENDERS: dict[str, tuple[Callable[[Timed, Batches], None], str, str]] = {
    # name: (what runs, package it needs, loop whose weights it must reproduce)
    "bare": (bare, "torch", "bare"),
    "bare again": (bare, "torch", "bare"),
    "bare with fused SGD": (bare_fused, "torch", "bare"),
    "by hand with extras": (lambda m, b: by_hand(m, b, clip=False), "torch", "extras"),
    "by hand with extras and fused SGD": (
        lambda m, b: by_hand(m, b, clip=False, fused=True), "torch", "extras",
    ),
    "by hand with extras and clipping": (lambda m, b: by_hand(m, b, clip=True), "torch", "clipped"),
    "by hand with extras and clipping and fused SGD": (
        lambda m, b: by_hand(m, b, clip=True, fused=True), "torch", "clipped",
    ),
    "flambeau Run": (lambda m, b: flambeau_run(m, b, clip=False, extras=False), "flambeau", "bare"),
    "flambeau Run with extras": (lambda m, b: flambeau_run(m, b, clip=False), "flambeau", "extras"),
    "flambeau Run with extras and clipping": (
        lambda m, b: flambeau_run(m, b, clip=True), "flambeau", "clipped",
    ),
    "lightning Fabric": (fabric, "lightning", "bare"),
    "lightning Trainer": (lightning_trainer, "lightning", "bare"),
    "accelerate": (accelerate, "accelerate", "bare"),
    "ignite": (ignite, "ignite", "bare"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", help="names, separated by commas; bare always runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--record", action="store_true", help="append to bench/results/trainer_overhead.jsonl"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    only = {name.strip() for name in arguments.only.split(",")} - {""}
    names = [
        name for name, (_, package, _) in CONTENDERS.items()
        if importlib.util.find_spec(package) and (not only or name in only or name == "bare")
        and (arguments.device == "cpu" or package in ("torch", "flambeau"))
    ]  # fmt: skip
    seconds = measure(
        names,
        rounds=arguments.rounds,
        shuffle=random.Random(arguments.seed),
        device=arguments.device,
    )
    lines = [line(name, seconds, arguments.device) for name in names]
    for entry in lines:
        record(entry, __file__, keep=arguments.record)


def measure(
    names: list[str], *, rounds: int, shuffle: random.Random, device: str
) -> dict[str, list[float]]:
    """Microseconds a step of each contender, a figure a round; the first round warms up, uncounted."""
    batches = Batches(device)
    figures: dict[str, list[float]] = {name: [] for name in names}
    weights: dict[str, Tensor] = {}
    for round_ in range(rounds + 1):
        for name in shuffle.sample(names, len(names)):
            run, _, group = CONTENDERS[name]
            model = Timed(device)
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                run(model, batches)
            assert model.calls == STEPS, f"{name} did {model.calls} steps instead of {STEPS}"
            ended = torch.cat([p.detach().flatten() for p in model.layers.parameters()])
            torch.testing.assert_close(
                ended, weights.setdefault(group, ended), rtol=1e-4, atol=1e-5,
                msg=lambda text, name=name: f"{name} did not train the same: {text}",
            )  # fmt: skip
            if round_:
                figures[name].append((model.times[1] - model.times[0]) / (STEPS - 1 - FIRST) * 1e6)
        print(f"round {round_} of {rounds}", file=sys.stderr)
    return figures


def line(name: str, figures: dict[str, list[float]], device: str) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(figures[name], figures["bare"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    package = CONTENDERS[name][1]
    if package == "flambeau":  # which need not be installed
        version = flambeau.__version__
    else:
        version = importlib.metadata.version({"ignite": "pytorch-ignite"}.get(package, package))
    return {
        "contender": name,
        "us_per_step": round(statistics.median(figures[name]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_p25": round(low, 3),
        "ratio_p75": round(high, 3),
        "n": len(ratios),
        "version": version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "device": device_model(device),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "command": " ".join(["python", "bench/trainer_overhead.py", *sys.argv[1:]]),
    }


if __name__ == "__main__":
    main()
