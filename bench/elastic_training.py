"""What bench/elastic_plans.py carries out: plans drawn from a seed, and the training that they run."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import Dataset

from flambeau.recipes.parallel.sync_batchnorm import convert_sync_batchnorm
from flambeau.run.run import Run

FEATURES = 6


class Life(NamedTuple):
    """One start of a training.

    Attributes:
        world: ranks.
        workers: data workers of each rank.
        end: what is waited for before it is killed; 'finish' lets it run to the end.
        reach: of 'batches' and 'save', how far it gets before, as a part of the whole run.
        delay_s: from that moment to the kill.
        victim: the rank that is killed; None for all at once.
        grace_s: how long the others live on.
        asks: with SIGTERM, after which the ranks save together and leave.
    """

    world: int
    workers: int
    end: Literal["start", "batches", "save", "finish"] = "finish"
    reach: float = 0.0
    delay_s: float = 0.0
    victim: int | None = None
    grace_s: float = 0.0
    asks: bool = False


@dataclass(frozen=True)
class Plan:
    """A training and its lives.

    Attributes:
        number: of the plan.
        exact: all lives have the same number of ranks, and the bits count.
        last_batch: samples of the last global batch of an epoch.
        cut_steps: how many steps before the end of its last epoch the run ends.
        norm: 'batch' is BatchNorm of each rank's own share or part, 'sync' of all of them together.
        has_unused: the model has parameters that never get a gradient.
        parts: of a step, which are the same on any number of ranks, so that the bits count; None has none.
    """

    number: int
    seed: int
    exact: bool
    lives: tuple[Life, ...]
    batch_size: int
    accumulate: int
    steps_per_epoch: int
    last_batch: int
    val_length: int
    epochs: int
    cut_steps: int
    checkpoint_steps: int
    log_every: int
    keep: int
    dropout: float
    norm: Literal["layer", "batch", "sync"]
    compression: Literal["none", "fp16", "bf16"]
    has_unused: bool
    parts: int | None = None

    @property
    def bits_count(self) -> bool:
        """Whether the run must be, to the bit, the one that nobody killed."""
        return self.exact or self.parts is not None

    @property
    def global_batch(self) -> int:
        """Samples an optimizer step."""
        return self.batch_size * self.accumulate

    @property
    def length(self) -> int:
        """Samples an epoch."""
        return self.global_batch * (self.steps_per_epoch - 1) + self.last_batch

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.epochs * self.steps_per_epoch - self.cut_steps


def make_plan(number: int, seed: int) -> Plan:
    """Plan `number` of the harness with this seed."""
    rng = random.Random(f"{seed} {number}")
    exact = number % 4 == 3
    kills = rng.randint(2, 3)
    worlds = [2 + number // 4 % 3] * (kills + 1) if exact else _changing_worlds(kills + 1, rng)
    # BatchNorm of each rank's own share cannot train on one sample.
    batch_size = rng.randint(2 * worlds[0], 12) if exact else rng.randint(4, 12)
    accumulate = rng.choice((1, 2, 2, 3) if exact else (1, 1, 2, 3))
    steps_per_epoch = rng.randint(4, 8)
    norm: Any = "batch" if exact else rng.choice(("layer", "sync"))
    has_unused = rng.random() < 0.25
    return Plan(
        number, rng.randrange(2**31), exact,
        (*(_killed_life(world, kills, rng) for world in worlds[:-1]), Life(worlds[-1], rng.randint(0, 2))),
        batch_size=batch_size, accumulate=accumulate, steps_per_epoch=steps_per_epoch,
        last_batch=rng.randint(1 if norm == "layer" else 2, batch_size * accumulate - 1),
        val_length=rng.randint(5, 23), epochs=rng.randint(2, 3),
        cut_steps=rng.choice((0, 0, 0, rng.randrange(steps_per_epoch))),
        checkpoint_steps=rng.randint(1, 5), log_every=rng.randint(1, 4), keep=rng.randint(1, 3),
        dropout=0.2 if exact else rng.choice((0.0, 0.0, 0.2)), norm=norm,
        compression=rng.choice(("none", "none", "fp16", "bf16")) if exact and not has_unused else "none",
        has_unused=has_unused,
    )  # fmt: skip


def make_plan_in_parts(number: int, seed: int) -> Plan:
    """Plan `number` of those whose lives have other numbers of ranks, and whose bits count all the same."""
    rng = random.Random(f"{seed} {number} parts")
    plan = make_plan(4 * number, seed)  # no exact one
    parts, norm = rng.randint(1, 6), rng.choice(("layer", "batch", "sync"))
    # Before the ranks have met nobody listens to SIGTERM.
    lives = (
        life._replace(asks=life.end in ("batches", "save") and rng.random() < 0.3)
        for life in plan.lives
    )
    batch_size = rng.randint(2 * parts, 4 * parts)
    return dataclasses.replace(
        plan, number=number, lives=tuple(lives), parts=parts, norm=norm, batch_size=batch_size, accumulate=1,
        dropout=0.2,
        last_batch=rng.randint(1 if norm == "layer" else 2, batch_size), compression="none",
    )  # fmt: skip


def _changing_worlds(number: int, rng: random.Random) -> list[int]:
    """Numbers of ranks, from 1 to 4; each life has another one than the life before."""
    worlds = [rng.randint(1, 4)]
    while len(worlds) < number:
        worlds.append(rng.choice([world for world in range(1, 5) if world != worlds[-1]]))
    return worlds


def _killed_life(world: int, kills: int, rng: random.Random) -> Life:
    end: Any = rng.choice(("start", *["batches"] * 5, *["save"] * 4))
    delays = {"start": 0.5, "batches": 0.02, "save": rng.choice((0.0, 0.001, 0.01))}
    return Life(
        world, rng.choice((0, 0, 1, 2)), end, reach=1.3 * rng.random() / kills,
        delay_s=rng.uniform(0, delays[end]), victim=rng.choice((None, rng.randrange(world))),
        grace_s=rng.choice((0.0, rng.uniform(0, 0.2))),  # torchrun looks every 0.1 s
    )  # fmt: skip


class Rows(Dataset[tuple[Tensor, Tensor, int]]):
    """Noisy rows, their classes and their numbers; the noise is drawn when a row is read."""

    def __init__(self, length: int) -> None:
        self._rows = torch.randn(length, FEATURES, generator=torch.Generator().manual_seed(length))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        row = self._rows[index]
        return row + 0.1 * torch.randn(FEATURES), (row[0] * row[1] > 0).long(), index


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.norm, self.linear = norm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(gelu(self.linear(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Residual blocks; those of an exact plan hold 1.3 MB, so that DDP sums in two buckets (first 1 MiB)."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        width, num_blocks = (256, 5) if plan.exact else (16, 2)
        norm = nn.LayerNorm if plan.norm == "layer" else nn.BatchNorm1d
        self.stem, self.head = nn.Linear(FEATURES, width), nn.Linear(width, 2)
        self.blocks = nn.Sequential(*(Block(width, norm, plan.dropout) for _ in range(num_blocks)))
        self.unused = nn.Linear(3, 3) if plan.has_unused else None
        # Training changes it, on each rank in another way.
        self.register_buffer("drift", torch.zeros(()) if plan.exact else None)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.drift, Tensor) and self.training:
            self.drift.mul_(0.9).add_(x.detach().mean())
            x = x + 0.1 * self.drift
        return self.head(self.blocks(self.stem(x)))  # type: ignore[no-any-return]


def train(plan: Plan, folder: Path, *, workers: int, note: Callable[..., None]) -> None:
    """The script of each rank.

    Args:
        plan: what to train.
        folder: of the run.
        workers: of this rank.
        note: told which samples a batch brought: (kind, step, epoch, indices).
    """
    torch.manual_seed(plan.seed)
    random.seed(plan.seed)
    np.random.seed(plan.seed)
    model: nn.Module = Net(plan)
    if plan.norm == "sync":
        model = convert_sync_batchnorm(model)
    # AdamW, whose first steps divide rounding errors by themselves, only where bits are equal anyway.
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
        if plan.bits_count
        else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    )
    run = Run(
        folder, model, optimizer, Rows(plan.length), duration=f"{plan.total_steps}st",
        batch_size=plan.batch_size, accumulate=plan.accumulate, parts=plan.parts, seed=plan.seed,
        workers=workers,
        schedule="cosine", warmup="3st", clip_norm=0.5, ema=0.9, keep=plan.keep,
        checkpoint_every=f"{plan.checkpoint_steps}st", log_every=plan.log_every,
        best="val_loss", best_mode="min", compression=plan.compression, bar=False,
    )  # fmt: skip

    def loss_of(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        rows, targets, indices = batch
        # A rank without a share gets samples that stand in; only the run knows that they do not count.
        there = indices if run._loop.num_samples else indices[:0]
        note("train", run.state.step, run.state.epoch, there)
        logits = model(rows)
        run.log(confidence=logits.detach().softmax(1)[:, 0])
        return cross_entropy(logits, targets)

    for epoch in run.epochs():
        for _ in run.steps(loss_of):
            pass
        for rows, targets, indices in run.evaluate(Rows(plan.val_length)):
            note("val", run.state.step, epoch, indices)
            run.log(
                val_loss=cross_entropy(model(rows), targets, reduction="none"),
                val_index=indices.double(), val_square=indices.double() ** 2,
            )  # fmt: skip
