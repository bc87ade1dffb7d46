"""The losses of a learning-rate range test over the rates, as an SVG picture."""

import itertools
import math
from collections.abc import Callable

from flambeau.inspection.svg import LINE, SIZE, Picture
from flambeau.recipes.training.lr_range import LRCurve

_WIDTH, _HEIGHT = 760.0, 340.0  # of the chart, pixels
_LEFT, _TOP = 70.0, 60.0
_Place = Callable[[float, float], tuple[float, float]]
"""Where a rate and a loss are in the picture."""


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
    picture.words(
        20, 24, "Learning-rate range test: loss over learning rate", bold=True, size=SIZE + 2
    )
    picture.words(20, 24 + LINE, what)
    if len(curve.rates) < 2:
        return picture.text()
    first, last = math.log10(curve.rates[0]), math.log10(curve.rates[-1])
    # What diverges at the end stays at the upper edge.
    low = min(curve.losses)
    high = max(curve.losses[: len(curve.losses) // 2 + 1])

    def place(rate: float, loss: float) -> tuple[float, float]:
        share = min(1.0, (loss - low) / ((high - low) or 1.0))
        across = (math.log10(rate) - first) / (last - first)
        return _LEFT + _WIDTH * across, _TOP + _HEIGHT * (1 - share)

    _draw_axes(picture, curve.rates, place, low=low, high=high)
    for rate, loss in zip(curve.rates, curve.losses, strict=True):
        x, y = place(rate, loss)
        picture.box((x - 1.5, y - 1.5, 3, 3), fill="#9db4d4", line="none")
    line = [place(*point) for point in zip(curve.rates, curve.averaged, strict=True)]
    for start, end in itertools.pairwise(line):
        picture.line(start, end, color="#1f4e9c")
    if best is not None:
        x, bottom = place(best, low)
        picture.line((x, _TOP), (x, bottom), color="#a00")
        picture.words(x + 4, _TOP + LINE, f"{best:.2g}", color="#a00")
    return picture.text()


def _draw_axes(
    picture: Picture, rates: list[float], place: _Place, *, low: float, high: float
) -> None:
    for power in range(math.ceil(math.log10(rates[0])), math.floor(math.log10(rates[-1])) + 1):
        x, bottom = place(10.0**power, low)
        picture.line((x, _TOP), (x, bottom), color="#ddd")
        picture.words(x, bottom + LINE, f"1e{power:+03d}", anchor="middle", color="#555")
    for quarter in range(5):
        loss = low + (high - low) * quarter / 4
        _, y = place(rates[0], loss)
        picture.line((_LEFT, y), (_LEFT + _WIDTH, y), color="#ddd")
        picture.words(_LEFT - 6, y + 4, f"{loss:.3g}", anchor="end", color="#555")
