"""The exceptions of flambeau that a user can act on, and suggestions for misspelled words."""

import contextlib
import difflib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """Wrong input, in one or two lines that name it and what to do about it.

    Commands print the message without a traceback and exit with 2.
    """


class DamagedData(InputError):
    """Data whose bytes are damaged; other InputErrors may be about undamaged data that are not supported."""


class WorkerLost(RuntimeError):
    """A data worker died or hangs; the message names it, and the sample that it was reading.

    Commands print the message without a traceback and exit with 1: the same command may continue.
    """


class DecodeError(ValueError):
    """Bytes that cannot be decoded as an image; the message is the reason, without a path."""


class UnsupportedImage(DecodeError):
    """Undamaged bytes that are no supported image."""


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn a ValueError raised inside, as by a recipe, into an InputError that begins with `what`."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{what}: {error}") from error


def unreadable(path: object, error: OSError) -> InputError:
    """The error for a file or folder that the system does not allow to be read.

    Example:
        >>> unreadable("a.rec", FileNotFoundError(2, "No such file or directory"))
        InputError('a.rec cannot be read: no such file or directory')
    """
    return InputError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}")


def require_folder(path: Path) -> None:
    """InputError for a file in a folder that does not exist, which may be a typing error."""
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be made: there is no folder {path.parent}\nMake it first")


def why_no_json(error: Exception) -> str:
    """An exception of json.loads in words; other exceptions as they are.

    Example:
        >>> why_no_json(RecursionError("maximum recursion depth exceeded"))
        'it is nested too deeply'
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is no JSON (byte {error.start} is no UTF-8)"
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON ({error})"
    is_of_int = isinstance(error, ValueError) and "set_int_max_str_digits" in str(error)
    return "it has a number of thousands of digits" if is_of_int else str(error)


def json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook` of json.loads, which silently takes the last of two values for a name.

    Example:
        >>> json.loads('{"cat": 1, "dog": 2}', object_pairs_hook=json_object)
        {'cat': 1, 'dog': 2}
    """
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"it gives {name[:80]!r} twice")
        values[name] = value
    return values


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the known word that begins with it or is most similar, or ''.

    Dashes of flags are ignored: all flags have them. Typos of two letters in five have a similarity of 0.6,
    but so have 'extra' and 'train': at that similarity the first letters must be equal.
    """
    by_bare = {name.lower().lstrip("-"): name for name in known}
    word = word.lower().lstrip("-")
    longer = [name for name in by_bare if name.startswith(word)] if len(word) > 2 else []
    close = [min(longer, key=lambda name: (len(name), name))] if longer else []
    close = close or difflib.get_close_matches(word, by_bare, n=1, cutoff=0.7)
    begin_alike = [name for name in by_bare if name[:1] == word[:1]]
    close = close or difflib.get_close_matches(word, begin_alike, n=1, cutoff=0.6)
    return f"; did you mean '{by_bare[close[0]]}'?" if close else ""
