"""The learning-rate range test of a training: `flambeau train --find-lr`."""

import contextlib
import itertools
import math
from collections.abc import Callable, Generator
from typing import Any, Literal

from torch import Tensor

from flambeau.parallel.ranks import join_ranks
from flambeau.recipes.training.lr_range import LRCurve, rising_rates
from flambeau.report.svg import LINE, SIZE, Picture, element
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


_WIDTH, _HEIGHT = 760.0, 340.0  # of the chart, pixels
_LEFT, _TOP = 70.0, 60.0
_Position = Callable[[float, float], tuple[float, float]]
"""A learning rate and a loss to (x, y) in the picture, pixels."""


def svg_of_rates(curve: LRCurve) -> str:
    """Draw each loss as a point, the line of their averages, and the rate to train with."""
    best = curve.suggested
    what = (
        "The loss has hardly fallen."
        if best is None
        else f"Train with {best:.2g}, half of the rate at which the average is lowest."
    )
    picture = Picture(
        _LEFT + _WIDTH + 40,
        _TOP + _HEIGHT + 4 * LINE,
        title="Learning-rate range test",
        description=f"Loss over a rising learning rate. {what}",
    )
    title = "Learning-rate range test: loss over learning rate"
    picture.label(20, 24, title, font_weight="bold", font_size=SIZE + 2)
    picture.label(20, 24 + LINE, what)
    if len(curve.rates) < 2:
        return picture.text()
    first, last = math.log10(curve.rates[0]), math.log10(curve.rates[-1])
    # What diverges at the end stays at the upper edge.
    low = min(curve.losses)
    high = max(curve.losses[: len(curve.losses) // 2 + 1])

    def position(rate: float, loss: float) -> tuple[float, float]:
        share = min(1.0, (loss - low) / ((high - low) or 1.0))
        across = (math.log10(rate) - first) / (last - first)
        return _LEFT + _WIDTH * across, _TOP + _HEIGHT * (1 - share)

    _draw_axes(picture, curve.rates, position, low=low, high=high)
    for rate, loss in zip(curve.rates, curve.losses, strict=True):
        x, y = position(rate, loss)
        picture.add(element("rect", x=x - 1.5, y=y - 1.5, width=3, height=3, fill="#9db4d4"))
    line = [position(*point) for point in zip(curve.rates, curve.averaged, strict=True)]
    for start, end in itertools.pairwise(line):
        picture.line(start, end, color="#1f4e9c")
    if best is not None:
        x, bottom = position(best, low)
        picture.line((x, _TOP), (x, bottom), color="#a00")
        picture.label(x + 4, _TOP + LINE, f"{best:.2g}", fill="#a00")
    return picture.text()


def _draw_axes(
    picture: Picture, rates: list[float], position: _Position, *, low: float, high: float
) -> None:
    for power in range(math.ceil(math.log10(rates[0])), math.floor(math.log10(rates[-1])) + 1):
        x, bottom = position(10.0**power, low)
        picture.line((x, _TOP), (x, bottom), color="#ddd")
        picture.label(x, bottom + LINE, f"1e{power:+03d}", text_anchor="middle", fill="#555")
    for quarter in range(5):
        loss = low + (high - low) * quarter / 4
        _, y = position(rates[0], loss)
        picture.line((_LEFT, y), (_LEFT + _WIDTH, y), color="#ddd")
        picture.label(_LEFT - 6, y + 4, f"{loss:.3g}", text_anchor="end", fill="#555")
