"""Bits flipped while steps are checked by `verify_steps`, false alarms, and what the check costs.

    python bench/faults/flipped_bits.py [--flips N] [--steps N] [--rounds N] [--seed S] [--record]

A small convnet with BatchNorm and dropout trains on noise in one process. In each of N steps, all of which
are checked, one random bit of the batch, a weight, an activation or a gradient is flipped while the first or
the second computation runs. A flip is `found` if the run says so; `harmless` if the gradients have the bits
of an undisturbed step all the same, as where ReLU or dropout take the value away; `missed` otherwise. The
weights at the end are compared with those of a run that nothing disturbed.

False alarms: of so many checked steps without a flip. Cost: seconds of 400 steps with 1/100 and without the
check, by turns; the median of the ratios.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from flambeau import Run
from provenance import commit, cpu_model, record

KINDS = ("batch", "weight", "activation", "gradient")
BATCH = 16
Disturb = Callable[[nn.Module, Tensor, int], None]


def make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * width, 10),
    )  # fmt: skip


def train(
    folder: Path, steps: int, share: str, *, width: int = 8, disturb: Disturb | None = None
) -> tuple[dict[str, Tensor], float]:
    """Final weights, and seconds."""
    model = make_model(width)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(256, 3, 12, 12, generator=draw)
    data = TensorDataset(x, torch.randint(0, 10, (256,), generator=draw))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = Run(
        folder, model, optimizer, data, duration=f"{steps}st", batch_size=BATCH, bar=False,
        verify_steps=share, checkpoint_every=f"{steps}st",
    )  # fmt: skip
    start = time.perf_counter()
    for _ in run.epochs():
        for images, targets in run.batches():
            if disturb is not None:
                disturb(model, images, run.state.step + 1)
            run.step(cross_entropy(model(images), targets))
    return model.state_dict(), time.perf_counter() - start


class Flips:
    """One flipped bit per step, in its first or second computation."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._step = 0
        self._left = 0  # computations of the step until the flip
        self.kinds: dict[int, str] = {}

    def __call__(self, model: nn.Module, images: Tensor, step: int) -> None:
        if step != self._step:
            self._step = step
            self._left = self._draw.randrange(2)
            self.kinds[step] = self._draw.choice(KINDS)
        else:
            self._left -= 1
        if self._left:
            return
        kind = self.kinds[step]
        if kind == "batch":
            self._flip(images)
        elif kind == "weight":
            self._flip(self._draw.choice(list(model.parameters())))
        elif kind == "activation":
            module = self._draw.choice([m for m in model if not isinstance(m, nn.Flatten)])
            handle = module.register_forward_hook(
                lambda module, args, out: (handle.remove(), self._flipped(out))[1]
            )
        else:
            parameter = self._draw.choice(list(model.parameters()))
            remover = parameter.register_hook(
                lambda grad: (remover.remove(), self._flipped(grad))[1]
            )

    def _flipped(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        self._flip(copy)
        return copy

    def _flip(self, tensor: Tensor) -> None:
        bits = tensor.detach().view(torch.int32)
        place = tuple(self._draw.randrange(size) for size in bits.shape)
        bits[place] ^= 1 << self._draw.randrange(31)


def flipped(folder: Path, flips: int, seed: int) -> dict[str, Any]:
    calm, _ = train(folder / "calm", flips, "0")
    disturb = Flips(seed)
    found, _ = train(folder / "flipped", flips, "1/1", disturb=disturb)
    events = (folder / "flipped" / "events.jsonl").read_text(encoding="utf-8")
    is_equal = all(torch.equal(value, found[name]) for name, value in calm.items())
    named = {step for step in disturb.kinds if f"step {step}: " in events}
    silent = set(disturb.kinds) - named
    return {
        "flips": dict(Counter(disturb.kinds.values())),
        "found": len(named),
        # All that was not said has left the bits as they were, or the weights would be others.
        "harmless": len(silent) if is_equal else None,
        "missed": 0 if is_equal else len(silent),
        "same_weights": is_equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=400)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row = {"bench": "flipped_bits", "seed": arguments.seed}
        row |= flipped(folder, arguments.flips, arguments.seed)
        train(folder / "long", arguments.steps, "1/1", width=2)
        events = (folder / "long" / "events.jsonl").read_text(encoding="utf-8")
        row |= {"checked_steps": arguments.steps, "false_alarms": events.count("computations ")}
        ratios = []
        for number in range(arguments.rounds):
            seconds = {}
            for share in ("0", "1/100") if number % 2 else ("1/100", "0"):
                place = folder / f"cost-{number}-{share.replace('/', '-')}"
                _, seconds[share] = train(place, 400, share, width=32)
            ratios.append(seconds["1/100"] / seconds["0"])
    row |= {
        "cost": round(statistics.median(ratios), 4),
        "cost_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "torch": torch.__version__,
        "cpu": cpu_model(),
        "commit": commit(),
    }
    record(row, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
