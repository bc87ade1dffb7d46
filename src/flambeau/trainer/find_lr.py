"""The learning-rate range test of a training: `flambeau train --find-lr`."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Literal

from torch import Tensor

from flambeau.parallel.ranks import join_ranks
from flambeau.recipes.training.lr_range import LRCurve, rising_rates
from flambeau.run.loop.nan_guard import NotFinite
from flambeau.trainer.fit import Training, batch_loss
from flambeau.trainer.parts.data import Prepared
from flambeau.trainer.trial_training import trial_training

_LOW = 1e-6
_HIGH = 10.0
_STEPS = 100


def find_lr(
    prepared: Prepared,
    *,
    say: Callable[[str], None],
    micro_batch: int | Literal["auto"] | None = None,
) -> LRCurve:
    """Train with a rising learning rate in a temporary folder, otherwise like the real run."""
    brief = prepared.but(
        epochs=None,
        duration=f"{_STEPS}st",
        warmup="0%",
        schedule="constant",
        gamma=None,
        milestones=None,
        patience=None,
        plateau_factor=None,
    )
    curve = LRCurve()
    ranks = join_ranks()
    with trial_training(brief, micro_batch=micro_batch) as training:
        ranks.first(lambda: say(f"learning-rate range test: up to {_STEPS} steps"))
        with contextlib.closing(_losses(training)) as losses:
            for rate in rising_rates(_LOW, _HIGH, _STEPS):
                training.run.state.lr_scale = rate / prepared.settings.lr  # of all groups
                loss = next(losses, None)
                if loss is None or not curve.add(rate, loss):
                    break
    return curve


def _losses(training: Training) -> Generator[float]:
    """The loss of each step, which it makes; ends early if a gradient is not finite."""
    run = training.run
    counted = list[tuple[float, int]]()

    def loss_of(batch: Any) -> Tensor:
        loss = batch_loss(training, *batch)
        micro = run.state.micro
        assert micro is not None
        counted.append((float(loss.detach()) * micro.size, micro.size))
        return loss

    try:
        for _ in run.epochs():
            for _ in run.steps(loss_of, halves=False):
                totals, sizes = zip(*counted, strict=True)
                counted.clear()
                sums = training.ranks.gather((sum(totals), sum(sizes)))
                yield sum(s for s, _ in sums) / max(1, sum(n for _, n in sums))
    except NotFinite:
        return
