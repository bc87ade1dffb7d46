"""Settings in TOML files, which are data: nothing in them is run."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MAX_BYTES = 2**18  # config.toml of `flambeau train` has 2 kB; a script may add a table
_KEY_PART = r"""(?:"(?:[^"\\\n]|\\.){0,200}+"|'[^'\n]{0,200}+'|(?<![\w-])[\w-]++)"""
_DEEP_KEY = re.compile(rf"(?:{_KEY_PART}[ \t]*+\.[ \t]*+){{64}}")


def load_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file of limited size and depth; ValueError: not TOML, a pipe, or too large."""
    if path.is_fifo():  # it would be waited for
        raise ValueError("it is a pipe, and no file")
    with path.open("rb") as file:
        return parse_toml(file.read(_MAX_BYTES + 1))


def parse_toml(data: bytes) -> dict[str, Any]:
    """Like `load_toml`, from the content of a file."""
    text = data.decode()
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    # The cost of a dotted key grows with the square of its parts: 12 s and 1.5 GiB for 40 kB.
    if _DEEP_KEY.search(text):
        raise ValueError("a key in it has more than 64 parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # int() takes at most 4,300 digits
        raise ValueError("a number in it has thousands of digits") from None


def as_toml(values: Mapping[str, Any]) -> bytes:
    import tomli_w

    return tomli_w.dumps({k: v for k, v in values.items() if v is not None}).encode()
