"""One setting: its help text, type, range and words, kept beside the field that they are about."""

import dataclasses
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flambeau.errors import InputError, nearest

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number", float: "a number", str: "a text", bool: "true or false", Mapping: "a dict",
    Callable: "a function",
}  # fmt: skip


class Range(NamedTuple):
    """Which numbers a setting may be.

    Attributes:
        low, high: the bounds.
        above_low: the lower bound itself is refused.
        below_high: the upper bound itself is refused.
        or_zero: 0 is allowed too, and switches something off.
    """

    low: float
    high: float = math.inf
    above_low: bool = False
    below_high: bool = False
    or_zero: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, (int, float)):
            return False
        if self.or_zero and value == 0:
            return True
        is_low = value <= self.low if self.above_low else value < self.low
        is_high = value >= self.high if self.below_high else value > self.high
        return not is_low and not is_high

    def __str__(self) -> str:
        zero = "0 or " if self.or_zero else ""
        if self.high == math.inf:
            return f"{zero}{'above' if self.above_low else 'at least'} {_number(self.low)}"
        if not self.above_low and not self.below_high:
            return f"{zero}from {_number(self.low)} to {_number(self.high)}"
        low, high = (
            "above" if self.above_low else "at least",
            "below" if self.below_high else "at most",
        )
        return f"{zero}{low} {_number(self.low)} and {high} {_number(self.high)}"


AT_LEAST_0, AT_LEAST_1, ABOVE_0 = Range(0), Range(1), Range(0, above_low=True)
SHARE = Range(0, 1)
SHARE_ABOVE_0 = Range(0, 1, above_low=True)
SHARE_BELOW_1 = Range(0, 1, below_high=True)


def setting(
    default: Any,
    text: str,
    *,
    group: str,
    auto: str = "",
    choices: tuple[str, ...] = (),
    range: Range | None = None,
    neutral: bool = False,
    bare: str | None = None,
) -> Any:
    """A field of a dataclass of settings.

    Args:
        default: None leaves the value to be chosen.
        text: for `--help` and the docs; percent signs doubled, as argparse wants them.
        group: under which heading it is listed.
        auto: what is chosen for None, in words.
        choices: the words that it may be.
        range: the numbers that it may be.
        neutral: a resume may change it.
        bare: what the flag means without a value; None needs one.
    """
    metadata = {
        "help": text, "group": group, "auto": auto, "choices": choices, "range": range,
        "neutral": neutral, "bare": bare,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def allowed_types(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """The types of a setting, without None; of a generic one the class, and a Literal as it is."""
    hint = field.type
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    members = typing.get_args(hint) if is_union else (hint,)
    return tuple(
        member
        if typing.get_origin(member) is typing.Literal
        else typing.get_origin(member) or member
        for member in members
        if member is not type(None)
    )


def typed(field: dataclasses.Field[Any], value: Any) -> Any:
    """The value in the field's type; numbers of NumPy become Python's, whole ones pass as floats.

    Raises:
        InputError: another type, an empty text, or a text that is not UTF-8.
    """
    if value is None:
        if None is not field.default:
            raise InputError(f"{field.name} needs a value")
        return None
    wanted = allowed_types(field)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if type(value) is int and abs(value) >= 2**100:  # which cannot always be shown, nor be a float
        raise InputError(
            f"{field.name} is a number of {value.bit_length()} bits; that is too large"
        )
    if float in wanted and type(value) is int:
        return float(value)
    if not any(_is_of(value, kind) for kind in wanted):
        what = field.metadata.get("what") or " or ".join(map(_type_name, wanted))
        raise InputError(f"{field.name} must be {what}, got {value!r:.200}")
    if isinstance(value, str) and not value:
        raise InputError(f"{field.name} is empty; give it a value or leave it out")
    if isinstance(value, str) and "\\udc" in ascii(value):  # bytes that are no text
        raise InputError(f"{field.name} must be UTF-8, got {value!r}; rename it")
    if isinstance(value, str) and CONTROL.search(value):  # a terminal would obey them
        raise InputError(f"{field.name} holds control characters: {value!r:.200}")
    return value


def _is_of(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is typing.Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if kind in (int, float, bool):
        return type(value) is kind
    return callable(value) if kind is Callable else isinstance(value, kind)


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        *words, last = map(repr, typing.get_args(kind))
        return f"{', '.join(words)} or {last}"
    return _TYPE_NAMES.get(kind) or f"a {kind.__name__}"


def check_value(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse what is not among the choices, not finite, or out of range.

    Raises:
        InputError: it is.
    """
    choices, allowed = field.metadata["choices"], field.metadata["range"]
    if value is None:
        return
    if choices and value not in choices:
        hint = nearest(str(value), choices)
        raise InputError(f"{field.name} must be one of {', '.join(choices)}; got {value!r}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{field.name} must be a finite number, got {value}")
    if isinstance(value, str) and allowed is not None:
        return  # words instead of a number, which are read elsewhere
    if allowed is not None and value not in allowed:
        raise InputError(f"{field.name} must be {allowed}, got {value}")


def _number(value: float) -> str:
    return "2**64" if value == 2**64 else f"{value:g}"


class BatchSize(NamedTuple):
    """What `batch_size` asks for.

    Attributes:
        num: samples per forward pass, or per step if `finds`; None leaves it to the data.
        finds: as many of them at once as fit into memory, which is to be found out.
    """

    num: int | None
    finds: bool = False


def parse_batch_size(value: int | str | None) -> BatchSize:
    """Read a number, 'auto', or 'auto:N'.

    Raises:
        InputError: another text.

    Example:
        >>> parse_batch_size("auto:512")
        BatchSize(num=512, finds=True)
    """
    if not isinstance(value, str):
        return BatchSize(value)
    match = re.fullmatch(r"auto(?::0*([1-9][0-9]{0,17}))?", value)
    if match is None:
        raise InputError(
            "batch_size must be a whole number, 'auto', or 'auto:N' for steps of N samples, got "
            f"{value!r:.200}"
        )
    return BatchSize(int(match[1]) if match[1] else None, finds=True)


def parse_betas(text: str | None) -> tuple[float, float] | None:
    """The two numbers of `betas`.

    Raises:
        InputError: they are not two, or one is not from 0 to below 1.
    """
    if text is None:
        return None
    try:
        first, second = map(float, text.split(","))
        good = 0 <= first < 1 and 0 <= second < 1
    except ValueError:
        good = False
    if not good:
        raise InputError(
            f"betas must be two numbers from 0 to below 1, such as 0.9,0.999; got {text!r}"
        )
    return first, second
