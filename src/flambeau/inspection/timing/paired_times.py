"""Times of several things in turn, so that a machine that slows down does so for all of them."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

_WARM_UP = 3  # rounds that count for nothing: memory, kernels; chosen


@dataclass(frozen=True)
class PartTime:
    """Seconds: the median, and between which two values half of them are."""

    name: str
    median_s: float
    low_s: float
    high_s: float


def summary(name: str, seconds: Sequence[float]) -> PartTime:
    """Of at least two values."""
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return PartTime(name, median, low, high)


def synchronize(device: torch.device) -> None:
    """Wait for what the device still has to do; on a CPU that is nothing."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    rounds: int = 15,
    enough_s: float = 30.0,
) -> dict[str, list[float]]:
    """Time each call once per round, in a new order each round.

    Args:
        calls: by name.
        device: that is waited for around each.
        rounds: of which each call is timed in one; a few more come first.
        enough_s: of timed calls together, after which no new round begins; two are made in any case.

    Returns:
        By name the seconds of each round.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    draw = random.Random(0)
    begin = time.perf_counter()
    for number in range(-_WARM_UP, rounds):
        if number == 0:
            begin = time.perf_counter()
        if number >= 2 and time.perf_counter() - begin > enough_s:
            break
        draw.shuffle(order)
        for name in order:
            synchronize(device)
            start = time.perf_counter()
            calls[name]()
            synchronize(device)
            if number >= 0:
                found[name].append(time.perf_counter() - start)
    return found


def ratios(seconds: Sequence[float], base: Sequence[float]) -> PartTime:
    """How many times as long as another call, compared round by round: what slows a round slows both."""
    return summary("times", [one / of for one, of in zip(seconds, base, strict=True)])
