"""Settings in TOML files: `--config`, and the config.toml of a run."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from flambeau.errors import InputError, nearest
from flambeau.train.settings.durations import parse_duration
from flambeau.train.settings.settings import FIELDS, ResolvedSettings, Settings

_AnySettings = TypeVar("_AnySettings", bound=Settings)


def read_config(path: Path) -> dict[str, Any]:
    """The settings that a TOML file holds.

    Raises:
        InputError: no such file, not TOML, an unknown key.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read as TOML: {error}") from error
    _check_keys(values, path)
    return values


def from_stored(values: Mapping[str, Any], path: Path) -> ResolvedSettings:
    """The settings of a run, from what its config.toml (at `path`) holds.

    Raises:
        InputError: an unknown key, or a missing or wrong value: of another version, or edited by hand.
    """
    _check_keys(values, path)
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
        model=model,
        epochs=None,
        duration=None if duration is None else str(parse_duration(duration, name="duration")),
        warmup=str(parse_duration(settings.warmup, name="warmup", units="% ep st")),
        checkpoint_every=str(parse_duration(settings.checkpoint_every, name="checkpoint_every")),
    )


def _full(data: str | None) -> str | None:
    """A path in full; a data set by name stays what it is."""
    if data is None or data.startswith("torchvision:"):
        return data
    return str(Path(data).resolve())


def as_toml(values: Mapping[str, Any]) -> bytes:
    """Settings as a TOML document, those that are None left out."""
    import tomli_w

    return tomli_w.dumps({k: v for k, v in values.items() if v is not None}).encode()


def _check_keys(values: Mapping[str, Any], path: Path) -> None:
    for key in values:
        if key not in FIELDS:
            raise InputError(f"{path}: unknown key '{key}'{nearest(key, FIELDS)}")
