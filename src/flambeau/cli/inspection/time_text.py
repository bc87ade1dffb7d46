"""Seconds as milliseconds, for the tables of `flambeau inspect`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flambeau.inspection.timing.paired_times import PartTime


def milliseconds(seconds: float) -> str:
    """Three digits; more before the point if there are more."""
    return f"{seconds * 1000:.3g}" if seconds < 0.9995 else f"{seconds * 1000:.0f}"


def with_spread(time: "PartTime") -> str:
    """The median, and between which two values half of them are."""
    low, median, high = map(milliseconds, (time.low_s, time.median_s, time.high_s))
    return f"{median} ({low} to {high})"
