"""What a sweep searches: for each setting a range of numbers, or some values."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flambeau.errors import InputError

Value = bool | int | float | str
"""Of a setting."""
_RANGE = re.compile(r"(?P<low>[^.]*?\.?[^.]*?)\.\.(?P<high>[^:]+)(?P<log>:log)?")
_MAX_VALUES = 1000  # of one setting
_MAX_TRIED = 256  # combinations that are looked at for one that is accepted
_MAX_COUNTED = 10**6  # combinations of a space that counts as finite


@dataclass(frozen=True)
class Dimension:
    """One setting of a space: `values`, or the numbers from `low` to `high`, both included.

    Attributes:
        is_log: the logarithm of the number is searched.
        is_whole: only whole numbers.
    """

    values: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False

    @property
    def examples(self) -> tuple[Value, ...]:
        """All values, or the two ends."""
        return self.values or (self.low, self.high)

    @property
    def every_value(self) -> Sequence[Value] | None:
        """All that there are; None if they are not finite in number."""
        if self.values:
            return self.values
        return range(int(self.low), int(self.high) + 1) if self.is_whole else None

    def holds(self, value: object) -> bool:
        if self.values:
            return any(type(value) is type(own) and value == own for own in self.values)
        kind = int if self.is_whole else float
        return type(value) is kind and self.low <= value <= self.high

    def __str__(self) -> str:
        if self.values:
            return ", ".join(map(shown, self.values))
        kind = ", whole numbers" if self.is_whole else ""
        return f"{self.low:g} to {self.high:g}{kind}{', log' if self.is_log else ''}"


Space = Mapping[str, Dimension]
"""By the name of the setting."""


def shown(value: Value) -> str:
    """As messages and the command line have it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def parse_space(
    texts: Mapping[str, str], *, typed: Callable[[str, Value], Value], floats: Callable[[str], bool]
) -> dict[str, Dimension]:
    """The space of texts such as `1e-4..1e-1:log` or `resnet18,resnet34`, by name.

    Values are separated by commas, or by `|` where they hold commas themselves.

    Args:
        typed: from setting and value to its type; raises InputError.
        floats: whether the setting takes numbers that are not whole.

    Raises:
        InputError: a text is neither, or a value is refused.
    """
    return {name: _dimension(name, text, typed, floats(name)) for name, text in texts.items()}


def _dimension(
    name: str, text: str, typed: Callable[[str, Value], Value], is_float: bool
) -> Dimension:
    if (found := _RANGE.fullmatch(text.strip())) is not None:
        ends = [_value(found[end]) for end in ("low", "high")]
        if all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
            return _range(name, text, [typed(name, end) for end in ends], found["log"], is_float)
    words = [word.strip() for word in text.split("|" if "|" in text else ",")]
    if "" in words or len(words) > _MAX_VALUES:
        raise InputError(
            f"--set {name}={text:.100}: give a range such as 1e-4..1e-1:log, or values such as a,b,c"
        )
    values = tuple(dict.fromkeys(typed(name, _value(word)) for word in words))
    if len(values) < len(words):
        raise InputError(f"--set {name}={text:.100} names a value twice")
    return Dimension(values)


def _range(name: str, text: str, ends: Sequence[Any], log: str | None, is_float: bool) -> Dimension:
    low, high = ends
    is_whole = not is_float and all(isinstance(end, int) for end in ends)
    if not all(isinstance(end, int | float) and math.isfinite(end) for end in ends) or low >= high:
        raise InputError(f"--set {name}={text:.100}: the first number must be below the second")
    if log and low <= 0:
        raise InputError(f"--set {name}={text:.100}: with :log both numbers must be above 0")
    if is_whole:
        return Dimension(low=low, high=high, is_log=bool(log), is_whole=True)
    return Dimension(low=float(low), high=float(high), is_log=bool(log))


def _value(word: str) -> Value:
    """A number, true or false, or the word."""
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            number = kind(word)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    return word


def combinations(space: Space, *, ends: bool = False) -> Iterator[dict[str, Value]]:
    """All of a finite space; with `ends`, of each range its two ends alone."""
    names = list(space)
    values = [space[name].examples if ends else space[name].every_value or () for name in names]
    for chosen in itertools.product(*values):
        yield dict(zip(names, chosen, strict=True))


def size(space: Space) -> int | None:
    """The number of combinations; None if it is not finite, or too large to go through."""
    counts = [one.every_value for one in space.values()]
    count = math.prod(0 if values is None else len(values) for values in counts)
    return count if 0 < count <= _MAX_COUNTED else None


def check_space(space: Space, accept: Callable[[Mapping[str, Value]], object]) -> None:
    """Refuse a space with a value that no combination of the others makes right.

    Args:
        accept: raises InputError for a refused combination, which is passed on.
    """
    missing = {(name, value) for name in space for value in space[name].examples}
    why: dict[tuple[str, Value], InputError] = {}
    for combination in itertools.islice(combinations(space, ends=True), _MAX_TRIED):
        try:
            accept(combination)
        except InputError as error:
            for item in combination.items():
                why.setdefault(item, error)
        else:
            missing -= set(combination.items())
    all_refused = len(missing) == sum(len(one.examples) for one in space.values())
    if all_refused and len({str(error) for error in why.values()}) == 1:
        raise next(iter(why.values()))  # of what holds for all trials
    for name in space:
        for value in space[name].examples:
            if (name, value) in missing and (name, value) in why:
                raise InputError(f"--set {name}={shown(value)}: {why[name, value]}")
