"""Settings in TOML files: `--config`, and the config.toml of a run."""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from flambeau.errors import InputError, nearest, unreadable
from flambeau.train.settings.durations import parse_duration
from flambeau.train.settings.resolved_settings import ResolvedSettings
from flambeau.train.settings.settings import FIELDS, Settings
from flambeau.train.settings.track import tracker_list

_MAX_BYTES = 2**18  # config.toml of `flambeau train` has 2 kB; a script may add a table of its own
_KEY_PART = r"""(?:"(?:[^"\\\n]|\\.){0,200}+"|'[^'\n]{0,200}+'|(?<![\w-])[\w-]++)"""
_DEEP_KEY = re.compile(rf"(?:{_KEY_PART}[ \t]*+\.[ \t]*+){{64}}")
_AnySettings = TypeVar("_AnySettings", bound=Settings)


def read_config(path: Path) -> dict[str, Any]:
    """The settings that a TOML file holds.

    Raises:
        InputError: no such file, an empty one, not TOML, an unknown key.
    """
    try:
        data = _start_of(path)
        values = parse_toml(data)
    except FileNotFoundError:
        raise InputError(f"--config {path}: no such file") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise InputError(f"{path} cannot be read as TOML: {error}") from error
    if not data.strip():
        # Such as a program leaves that was killed while it wrote: nobody means the defaults by it.
        raise InputError(
            f"--config {path} is empty: write it again, as flambeau tune does its own, or leave --config out"
        )
    _check_keys(values, path)
    return values


def load_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds, if it is no larger and no deeper than settings can be.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not TOML, or too large; tomllib.TOMLDecodeError is one.
    """
    return parse_toml(_start_of(path))


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES + 1)


def parse_toml(data: bytes) -> dict[str, Any]:
    """The same of the content of a file."""
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
    except ValueError:  # of int(), which takes no more than 4,300 digits
        raise ValueError("a number in it has thousands of digits") from None


def from_stored(values: Mapping[str, Any], path: Path) -> ResolvedSettings:
    """The settings of a run, from what its config.toml (at `path`) holds.

    Raises:
        InputError: an unknown key, or a missing or wrong value: of another version, or edited by hand.
    """
    _check_keys(
        values, path, why="\nThe file was edited, or written by a later version of flambeau"
    )
    missing = [
        f.name for f in dataclasses.fields(ResolvedSettings) if f.kw_only and f.name not in values
    ]
    if missing:
        raise InputError(
            f"{path} says no {missing[0]}: it was edited, or is not of a finished set-up"
        )
    return ResolvedSettings(**values)


def as_dict(settings: Settings) -> dict[str, Any]:
    """The settings that are not None."""
    return {k: v for k, v in dataclasses.asdict(settings).items() if v is not None}


def canonical(settings: _AnySettings) -> _AnySettings:
    """The same settings in one spelling: `epochs` as `duration`, durations and paths in full."""
    duration = settings.duration or (f"{settings.epochs}ep" if settings.epochs else None)
    model = settings.model
    if model is not None and ".py:" in model:
        path, _, function = model.rpartition(":")
        model = f"{Path(path).resolve()}:{function}"
    return dataclasses.replace(
        settings,
        data=_full(settings.data),
        teacher=_full(settings.teacher),
        weights=_full(settings.weights),
        class_weights=_full(settings.class_weights),
        model=model,
        epochs=None,
        duration=None if duration is None else str(parse_duration(duration, name="duration")),
        extend=settings.extend and str(parse_duration(settings.extend, name="extend")),
        warmup=str(parse_duration(settings.warmup, name="warmup", units="% ep st")),
        checkpoint_every=str(parse_duration(settings.checkpoint_every, name="checkpoint_every")),
        track=",".join(map(str, tracker_list(settings.track))) or "none",
    )


def _full(data: str | None) -> str | None:
    """A path in full; a data set by name, and 'auto', stay what they are."""
    if data is None or data == "auto" or data.startswith(("torchvision:", "hf:")):
        return data
    return str(Path(data).resolve())


def as_toml(values: Mapping[str, Any]) -> bytes:
    """Settings as a TOML document, those that are None left out."""
    import tomli_w

    return tomli_w.dumps({k: v for k, v in values.items() if v is not None}).encode()


def _check_keys(values: Mapping[str, Any], path: Path, *, why: str = "") -> None:
    for key in values:
        if key not in FIELDS:
            raise InputError(f"{path}: unknown key '{key}'{nearest(key, FIELDS)}{why}")
