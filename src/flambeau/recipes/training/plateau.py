"""Reduce the learning rate when a metric stops improving, with a complete state to save.

指标不再改善时降低学习率，其状态全部可保存。

Source: the exact rule of torch.optim.lr_scheduler.ReduceLROnPlateau.

It returns a multiplier instead of writing `lr`, so it can be combined with a warm-up or another schedule, and
a resume continues from the numbers in its state.

Not for a metric that is measured rarely (each reduction waits for `patience` measurements), nor measured on
the data set for which results are reported (choosing rates by it is training on it). A schedule that is a
function of the step needs no measurements.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal


class ReduceOnPlateau:
    """Counts measurements without improvement, and multiplies the rate by `factor` after too many.

    Args:
        mode: 'min' for a loss, 'max' for an accuracy.
        factor: in (0, 1).
        patience: measurements without improvement after which the next one reduces, at least 0.
        cooldown: measurements after a reduction that do not count, at least 0.
        threshold: smallest difference that counts as an improvement, at least 0.
        threshold_mode: 'rel' for a fraction of the best value, 'abs' for an absolute difference.
        min_multiplier: the least multiplier, in [0, 1].

    Raises:
        ValueError: a number outside its range, or an unknown mode.

    Example:
        >>> plateau = ReduceOnPlateau(mode="max", factor=0.5, patience=1)
        >>> [plateau.step(accuracy) for accuracy in (0.6, 0.7, 0.7, 0.7, 0.8)]
        [1.0, 1.0, 1.0, 0.5, 0.5]
    """

    def __init__(
        self,
        *,
        mode: Literal["min", "max"],
        factor: float = 0.1,
        patience: int = 10,
        cooldown: int = 0,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        min_multiplier: float = 0.0,
    ) -> None:
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs"):
            raise ValueError(
                "mode must be 'min' or 'max' and threshold_mode 'rel' or 'abs', "
                f"got {mode!r} and {threshold_mode!r}"
            )
        if not (0 < factor < 1 and 0 <= min_multiplier <= 1):
            raise ValueError(
                "factor must be above 0 and below 1 and min_multiplier in [0, 1], "
                f"got {factor} and {min_multiplier}"
            )
        if not (patience >= 0 and cooldown >= 0 and threshold >= 0):
            raise ValueError(
                "patience, cooldown and threshold must be at least 0, "
                f"got {patience}, {cooldown} and {threshold}"
            )
        self._mode, self._factor, self._patience, self._cooldown = mode, factor, patience, cooldown
        self._threshold = threshold
        self._relative = threshold_mode == "rel"
        self._min_multiplier = min_multiplier
        self.multiplier = 1.0
        """The present factor for the base rate."""
        self.best: float | None = None
        """The best metric so far; None before the first."""
        self.num_bad = 0
        """Number of measurements since the best one, without those in a cooldown."""
        self._cooldown_left = 0

    def step(self, metric: float) -> float:
        """Count a measurement.

        Args:
            metric: a number, or a 0-d tensor (which waits for its device). An infinitely bad value is no
                improvement.

        Returns:
            The multiplier from now on.

        Raises:
            ValueError: the metric is NaN, which a lower rate does not fix; nothing is counted.
        """
        value = float(metric)
        if math.isnan(value):
            raise ValueError(
                "the metric is NaN: a lower rate would not fix that; find out where it comes from"
            )
        if self._is_better(value):
            self.best = value
            self.num_bad = 0
        else:
            self.num_bad += 1
        if self._cooldown_left:
            self._cooldown_left -= 1
            self.num_bad = 0
        if self.num_bad > self._patience:
            self.multiplier = max(self.multiplier * self._factor, self._min_multiplier)
            self._cooldown_left = self._cooldown
            self.num_bad = 0
        return self.multiplier

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers, without the settings."""
        return {
            "multiplier": self.multiplier,
            "best": self.best,
            "num_bad": self.num_bad,
            "cooldown_left": self._cooldown_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.multiplier, self.best = state["multiplier"], state["best"]
        self.num_bad, self._cooldown_left = state["num_bad"], state["cooldown_left"]

    def _is_better(self, value: float) -> bool:
        best = self.best
        sign = 1.0 if self._mode == "max" else -1.0
        if best is None:
            return value != -sign * math.inf
        # As torch: a fraction of the signed best value, so for a negative one the bar moves the other way.
        bar = (
            best * (1.0 + sign * self._threshold)
            if self._relative
            else best + sign * self._threshold
        )
        return value * sign > bar * sign
