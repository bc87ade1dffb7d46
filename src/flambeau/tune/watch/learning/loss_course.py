"""Whether the loss of a training falls or grows over the first steps."""

import math
import statistics

_FEW = 5


def falls(losses: list[float]) -> bool:
    """Whether a loss is clearly lower at the end than at the beginning."""
    few = max(1, len(losses) // 5)
    if len(losses) < _FEW:
        return False
    first = sorted(losses[:few])[few // 2]
    last = sorted(losses[-few:])[few // 2]
    return last < first - 0.1 * abs(first)


def is_better(losses: list[float]) -> bool:
    """Whether the last losses are below the very first one, which no step has changed yet."""
    last = sorted(losses[-max(1, len(losses) // 5) :])
    return falls(losses) and last[len(last) // 2] < 0.9 * losses[0]


def grows(losses: list[float]) -> bool:
    """Whether a loss ends far above its beginning, or is no number."""
    if len(losses) < _FEW:
        return False
    last = statistics.median(losses[-max(len(losses) // 4, 1) :])
    highest = max(losses[_FEW:], default=0.0)
    leaps = highest > 10 * abs(losses[0]) + 1 and not is_better(losses)
    return not math.isfinite(last) or last > 2 * abs(losses[0]) + 1 or leaps
