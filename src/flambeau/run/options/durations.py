"""Durations with a unit: '90ep' (epochs), '5000st' (steps), '5%' (of the run)."""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from flambeau.errors import InputError

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(ep|st|%)")
_LONGEST = 1e24  # any longer is a mistake
_NAMES = {"ep": "epochs", "st": "steps", "%": "% of the run"}


@dataclass(frozen=True)
class Duration:
    """A length of training: `amount` in `unit`."""

    amount: float
    unit: Literal["ep", "st", "%"]

    def __str__(self) -> str:
        # Without an exponent: 1e+06st is not a duration.
        return f"{Decimal(repr(self.amount)):f}".removesuffix(".0") + self.unit

    def steps(self, *, steps_per_epoch: int, total_steps: int | None = None) -> int:
        """The duration in optimizer steps, rounded; a percentage is of `total_steps`."""
        if self.unit == "st":
            return int(self.amount)
        if self.unit == "ep":
            return round(self.amount * steps_per_epoch)
        assert total_steps is not None
        return round(self.amount / 100 * total_steps)


def parse_seconds(text: str, *, name: str) -> float:
    """Read a time such as '30s', '5min' or '8h', in seconds."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)(s|min|h)", str(text).strip())
    if match is None or not float(match[1]):
        raise InputError(f"{name} must be a time such as '30s', '5min' or '8h', got {text!r}")
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


def parse_share(text: str, *, name: str) -> int:
    """Read '1/100' as 100 and '0' as 0: one of how many steps."""
    match = re.fullmatch(r"1/([1-9]\d{0,8})|0", str(text).strip())
    if match is None:
        raise InputError(
            f"{name} must be a share of the steps such as '1/100', or '0', got {text!r}"
        )
    return int(match[1] or 0)


def parse_duration(text: str, *, name: str, units: str = "ep st") -> Duration:
    """Read '90ep', '5000st', '5%' or '0.5ep'; InputError: another form or unit, or a fraction of a step."""
    match = _PATTERN.fullmatch(str(text).strip())  # a script may give a number
    allowed = " or ".join(f"'{5 if u == '%' else 10}{u}' ({_NAMES[u]})" for u in units.split())
    if match is None or match[2] not in units.split():
        zero = f"; '0{units.split()[0]}' is none" if str(text).strip() == "0" else ""
        raise InputError(f"{name} must be a duration such as {allowed}, got {text!r}{zero}")
    if match[2] == "st" and "." in match[1]:
        raise InputError(f"{name} = {text!r}: steps are whole numbers")
    if match[2] == "%" and float(match[1]) > 100:
        raise InputError(f"{name} = {text!r}: at most 100%")
    if float(match[1]) > _LONGEST:
        raise InputError(f"{name} = {text!r:.50} is too long: at most {_LONGEST:g}{match[2]}")
    return Duration(float(match[1]), match[2])  # type: ignore[arg-type]
