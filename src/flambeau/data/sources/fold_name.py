"""The names of parts of data: a fold such as 2/5, a share to test on such as 10%."""

import re

from flambeau.errors import InputError

Fold = tuple[int, int]
"""Which one, from 1, and of how many."""
_MOST = 100
_MOST_TESTED = 0.5  # of the images


def parse_fold(text: str) -> Fold:
    """The numbers of '2/5'; InputError if it is nothing like it."""
    found = re.fullmatch(r"([0-9]{1,3})/([0-9]{1,3})", text)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not (1 <= number <= of and 2 <= of <= _MOST):
        raise InputError(f"fold must be such as 2/5, the second of five; got {text!r:.50}")
    return number, of


def parse_test(text: str) -> float | None:
    """The share of '10%'; None for what names data.

    Raises:
        InputError: no percent sign, or a share outside (0, 0.5].
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *(%?)", text)
    if found is None:
        return None
    share = float(found[1]) / 100
    if not found[2] or not 0 < share <= _MOST_TESTED:
        raise InputError(
            f"test must be a share above 0% and at most {_MOST_TESTED:.0%}, such as 10%, or data; got "
            f"{text!r:.50}"
        )
    return share
