"""The name of a fold, such as 2/5."""

import re

from flambeau.errors import InputError

Fold = tuple[int, int]
"""Which one, from 1, and of how many."""
_MOST = 100


def parse_fold(text: str) -> Fold:
    """The numbers of '2/5'; InputError if it is nothing like it."""
    found = re.fullmatch(r"([0-9]{1,3})/([0-9]{1,3})", text)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not (1 <= number <= of and 2 <= of <= _MOST):
        raise InputError(f"fold must be such as 2/5, the second of five; got {text!r:.50}")
    return number, of
