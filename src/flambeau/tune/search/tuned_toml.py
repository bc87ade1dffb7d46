"""tuned.toml: the settings that `flambeau tune` has chosen, as a file for `--config`."""

import itertools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.errors import InputError, unreadable
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.run.options.option import allowed_types
from flambeau.run.options.toml_file import as_toml
from flambeau.trainer.settings.settings import FIELDS
from flambeau.tune.search.search import SearchResult

FIRST_LINE = "# flambeau tune"  # marks a file that may be replaced


def check_replaceable(file: Path) -> None:
    """Raise InputError for an existing file that `flambeau tune` has not written."""
    if not file.exists():
        return
    try:
        with file.open("rb") as opened:
            start = opened.read(len(FIRST_LINE))
    except OSError as error:
        raise unreadable(file, error) from error
    if start != FIRST_LINE.encode():
        what = "not of flambeau tune" if start.strip() else "empty, so it may be of anything"
        raise InputError(f"{file} is there, and {what}: name another with --write, or remove it")


def write_tuned_toml(file: Path, result: SearchResult, given: Mapping[str, Any]) -> None:
    """Write the chosen settings and those of the user's own file, `given`, whole or not at all."""
    write_file(file, f"{FIRST_LINE}\n{tuned_toml(result, given)}".encode())


def tuned_toml(result: SearchResult, given: Mapping[str, Any] | None = None) -> str:
    """The content of the file: the chosen flags and the settings in `given`."""
    values = dict(given or {})
    comments = []
    for setting in result.settings:
        values |= _values_of(setting.words)
    if variables := variables_of(result):
        comments.append(
            f"# chosen with them, and to be set by you: {variables} flambeau train ...\n"
        )
    return as_toml(values).decode() + "".join(comments)


def variables_of(result: SearchResult) -> str:
    """The chosen environment variables, as they stand before a command; no setting replaces them."""
    pairs = [pair for setting in result.settings for pair in setting.environment.items()]
    return shlex.join(f"{name}={value}" for name, value in pairs)


def _values_of(words: Sequence[str]) -> dict[str, Any]:
    """Settings by name from flags: values in the setting's type; without a value true, or false for --no-."""
    values: dict[str, Any] = {}
    for flag, word in itertools.zip_longest(words, words[1:], fillvalue="--"):
        if not flag.startswith("--"):
            continue
        name = flag.removeprefix("--").replace("-", "_")
        if word.startswith("--"):
            values[name.removeprefix("no_")] = not name.startswith("no_")
            continue
        kinds = allowed_types(FIELDS[name])
        as_number = int if int in kinds and word.isdecimal() else float if float in kinds else str
        values[name] = as_number(word)
    return values
