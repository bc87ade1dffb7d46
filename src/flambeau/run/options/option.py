"""One option: its type, default, range and texts in two languages, declared in one place."""

import dataclasses
import functools
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from flambeau.errors import InputError, nearest

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    Mapping: "a dict",
    Callable: "a function",
}


class Range(NamedTuple):
    """The range of an option, with bounds that may be excluded.

    `or_zero`: 0 is allowed too, and switches something off.
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
        low = "above" if self.above_low else "at least"
        high = "below" if self.below_high else "at most"
        return f"{zero}{low} {_number(self.low)} and {high} {_number(self.high)}"


AT_LEAST_0, AT_LEAST_1, ABOVE_0 = Range(0), Range(1), Range(0, above_low=True)
SHARE = Range(0, 1)
SHARE_ABOVE_0 = Range(0, 1, above_low=True)
SHARE_BELOW_1 = Range(0, 1, below_high=True)
_SHARES = SHARE, SHARE_ABOVE_0, SHARE_BELOW_1
_PERCENT = re.compile(r"[0-9]+(\.[0-9]+)? ?%")


def option(
    default: Any,
    text: str,
    chinese: str,
    *,
    group: str = "",
    auto: tuple[str, str] | None = None,
    choices: tuple[str, ...] = (),
    range: Range | None = None,
    may_change: bool = False,
    bare: str | None = None,
    kind: str = "",
) -> Any:
    """A field of an options dataclass, from which flags, messages, pages and help are made.

    Args:
        default: None: chosen automatically; `dataclasses.MISSING`: required.
        auto: what is chosen for None, in English and Chinese.
        bare: meaning of the flag without a value; None: it needs one.
        kind: the expected value in messages, where the type does not say it.
    """
    metadata = {
        "text": text,
        "chinese": chinese,
        "group": group,
        "auto": auto or ("", ""),
        "choices": choices,
        "range": range,
        "may_change": may_change,
        "bare": bare,
        "kind": kind,
    }
    return dataclasses.field(default=default, metadata=metadata)


GROUPS = {
    "main": "最常用的设置",
    "data": "数据",
    "model": "模型",
    "fine-tuning": "微调",
    "length": "训练长度",
    "optimization": "优化",
    "machine": "机器",
    "processes": "多个进程",
    "run folder": "运行目录",
}
"""The headings of options, in order, with their Chinese names; 'main' lists some flags first."""


def options_of(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """The options of a dataclass by name: required ones first, then by heading, inherited ones last."""
    inherited = {
        field.name
        for parent in kind.__bases__
        if dataclasses.is_dataclass(parent)
        for field in dataclasses.fields(parent)
    }
    groups = [*GROUPS]

    def order(field: dataclasses.Field[Any]) -> tuple[bool, int, bool]:
        has_default = field.default is not dataclasses.MISSING
        return has_default, groups.index(field.metadata["group"]), field.name in inherited

    return {field.name: field for field in sorted(dataclasses.fields(kind), key=order)}


def values_of(options: Any) -> dict[str, Any]:
    """The values of an options dataclass by name, without None, in the order of `options_of`."""
    values = {name: getattr(options, name) for name in options_of(type(options))}
    return {name: value for name, value in values.items() if value is not None}


P = ParamSpec("P")
Returned = TypeVar("Returned")


def declares(
    body: Callable[..., Returned],
) -> Callable[[Callable[P, Returned]], Callable[P, Returned]]:
    """Call `body` instead of the decorated function, with only the arguments that were given.

    Editors, `help()` and type checkers see every keyword with its default, the body which were given.

    Raises:
        TypeError: an argument is missing; `body` refuses unknown ones.
    """

    def decorate(declared: Callable[P, Returned]) -> Callable[P, Returned]:
        signature = inspect.signature(declared)

        @functools.wraps(declared)
        def call(*args: P.args, **kwargs: P.kwargs) -> Returned:
            if kwargs.keys() <= signature.parameters.keys():
                signature.bind(*args, **kwargs)
            return body(*args, **kwargs)

        return call

    return decorate


def plain_text(text: str) -> str:
    """A line of help without Markdown links."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def allowed_types(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """The types of an option, without None; the origin of generics, and Literal unchanged."""
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
    """The value in the field's type; NumPy numbers become Python's, integers pass as floats, and '10%' as a
    share.

    InputError: another type, an empty text, or one that is not UTF-8.
    """
    if value is None:
        if field.default is not None:
            raise InputError(f"{field.name} needs a value")
        return None
    wanted = allowed_types(field)
    if isinstance(value, str) and field.metadata["range"] in _SHARES and _PERCENT.fullmatch(value):
        value = float(value.rstrip(" %")) / 100
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if type(value) is int and abs(value) >= 2**100:  # may be too large to print or for a float
        raise InputError(
            f"{field.name} is a number of {value.bit_length()} bits; that is too large"
        )
    if float in wanted and type(value) is int:
        return float(value)
    if not any(_is_of(value, kind) for kind in wanted):
        what = field.metadata["kind"] or " or ".join(map(_type_name, wanted))
        raise InputError(f"{field.name} must be {what}, got {value!r:.200}")
    if isinstance(value, str) and not value:
        raise InputError(f"{field.name} is empty; give it a value or leave it out")
    if isinstance(value, str) and "\\udc" in ascii(value):  # bytes that are not UTF-8
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
    """Raise InputError if the value is not among the choices, not finite, or out of range."""
    choices, allowed = field.metadata["choices"], field.metadata["range"]
    if value is None:
        return
    if choices and value not in choices:
        hint = nearest(str(value), choices)
        raise InputError(f"{field.name} must be one of {', '.join(choices)}; got {value!r}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{field.name} must be a finite number, got {value}")
    if isinstance(value, str) and allowed is not None:
        return  # words instead of a number are parsed elsewhere
    if allowed is not None and value not in allowed:
        raise InputError(f"{field.name} must be {allowed}, got {value}")


def _number(value: float) -> str:
    return "2**64" if value == 2**64 else f"{value:g}"
