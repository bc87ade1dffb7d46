"""Settings in TOML files: `--config`, `--preset`, and the config.toml of a run."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from flambeau.data.sources.fold_name import parse_test
from flambeau.data.stores.address import address_of, is_address
from flambeau.errors import InputError, nearest, unreadable
from flambeau.run.options.durations import parse_duration
from flambeau.run.options.option import check_value, typed
from flambeau.run.options.toml_file import load_toml
from flambeau.run.options.tracker_names import tracker_list
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import FIELDS, Settings, teacher_runs

PRESET_FOLDER = Path(__file__).parents[1] / "presets"
_AnySettings = TypeVar("_AnySettings", bound=Settings)


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a TOML file; InputError: no such file, an empty one, not TOML, an unknown key."""
    try:
        values = load_toml(path)
        is_empty = not values and not path.read_bytes().strip()
    except FileNotFoundError:
        raise InputError(f"--config {path}: no such file") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise InputError(f"{path} cannot be read as TOML: {error}") from error
    if is_empty:
        # Left by a program that was killed while writing: it does not mean the defaults.
        raise InputError(
            f"--config {path} is empty: write it again, as flambeau tune does its own, or leave --config out"
        )
    _check_keys(values, path)
    return values


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings given, on top of those of their `preset`, if they name one."""
    name = given.get("preset")
    if name is None:
        return {**given}
    field = FIELDS["preset"]
    check_value(field, typed(field, name))
    return overridden(read_config(PRESET_FOLDER / f"{name}.toml"), given)


def overridden(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A file's settings, replaced by those given; a length replaces both of its spellings."""
    length = {"epochs", "duration"}
    left_out = length if length & given.keys() else set()
    return {**{k: v for k, v in values.items() if k not in left_out}, **given}


def from_stored(values: Mapping[str, Any], path: Path) -> ResolvedSettings:
    """The settings of a run, from the content of its config.toml (at `path`).

    InputError: an unknown key, or a missing or wrong value.
    """
    _check_keys(
        values, path, why="\nThe file was edited, or written by a later version of flambeau"
    )
    missing = [
        field.name
        for field in dataclasses.fields(ResolvedSettings)
        if field.kw_only and field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise InputError(
            f"{path} says no {missing[0]}: it was edited, or is not of a finished set-up"
        )
    return ResolvedSettings(**values)


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
        cache=_full(settings.cache),
        test=_full_test(settings.test),
        teacher=_full_teacher(settings.teacher),
        weights=_full(settings.weights),
        class_weights=_full(settings.class_weights),
        model=model,
        epochs=None,
        duration=None if duration is None else str(parse_duration(duration, name="duration")),
        extend=settings.extend and str(parse_duration(settings.extend, name="extend")),
        warmup=settings.warmup
        and str(parse_duration(settings.warmup, name="warmup", units="% ep st")),
        checkpoint_every=str(parse_duration(settings.checkpoint_every, name="checkpoint_every")),
        track=",".join(map(str, tracker_list(settings.track))) or "none",
    )


def _full(data: str | None) -> str | None:
    """An absolute path; names of data sets, addresses and 'auto' unchanged."""
    if data is not None and is_address(data):
        return address_of(data)
    if data is None or data == "auto" or data.startswith(("torchvision:", "hf:")):
        return data
    return str(Path(data).resolve())


def _full_test(test: str | None) -> str | None:
    share = None if test is None else parse_test(test)
    return _full(test) if share is None else f"{100 * share:g}%"


def _full_teacher(teacher: str | None) -> str | None:
    runs = [str(_full(run)) for run in teacher_runs(teacher)]
    odd = next((run for run in runs if "," in run), None)
    if odd is not None and len(runs) > 1:
        raise InputError(
            f"teacher names {odd}, whose path has a comma, and such a folder cannot be one of several: "
            "rename it"
        )
    return ",".join(runs) or None


def _check_keys(values: Mapping[str, Any], path: Path, *, why: str = "") -> None:
    for key in values:
        if key not in FIELDS:
            raise InputError(f"{path}: unknown key '{key}'{nearest(key, FIELDS)}{why}")
