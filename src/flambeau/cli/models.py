"""`flambeau models`: the names that `--model` takes, with parameters, input size and published weights."""

import argparse
import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence

from flambeau.cli.table import count_text, print_json, print_table
from flambeau.errors import InputError, nearest
from flambeau.terminal import say

HELP = "list the models that --model takes, by name"

_COUNTED = 30  # timm models whose parameters are counted by default: 0.05 to 0.2 s each on one core
_TORCHVISION = "torchvision:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "patterns",
        metavar="PATTERN",
        nargs="*",
        help="a name, a part of one, or a pattern such as 'efficientnet*' or 'torchvision:res*'; "
        "none lists all",
    )
    add("--pretrained", action="store_true", help="only those with published weights")
    add(
        "--tags",
        action="store_true",
        help="a row for each set of published weights of timm's: NAME.TAG is a name for --model too",
    )
    add(
        "--sizes",
        action="store_true",
        help=f"count parameters however many models are listed (default: of up to {_COUNTED} of timm)",
    )
    add("--json", action="store_true", help="one JSON object per line, for programs")


def run(arguments: argparse.Namespace) -> int:
    from flambeau.inspection.model_catalog import catalog_entry, counted, model_names

    names = _chosen(arguments.patterns, model_names(tags=arguments.tags))
    rows = [catalog_entry(name) for name in names]
    if arguments.pretrained:
        rows = [row for row in rows if row.pretrained]
    uncounted = sum(row.parameters is None for row in rows)
    counts = arguments.sizes or uncounted <= _COUNTED
    if counts:
        rows = [counted(row) for row in rows]
    if not rows:
        say(f"none of the {len(names)} models of this name has published weights")
    elif arguments.json:
        print_json(map(dataclasses.asdict, rows))
    else:
        columns = ("name", "parameters", "input", "pretrained")
        cells = (
            (
                r.name,
                count_text(r.parameters),
                None if r.input_size is None else str(r.input_size),
                "yes" if r.pretrained else "no",
            )
            for r in rows
        )
        print_table(columns, cells, right=("parameters", "input"))
    if not counts:
        say(
            f"the parameters of {uncounted} models are not counted; --sizes counts them, at about 0.1 s each"
        )
    return 0


def _chosen(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that match any of the patterns, in their order; InputError: a pattern matches none."""
    if not patterns:
        return list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        matches = _matches(pattern.lower(), names) if pattern else set()
        if not matches:
            raise InputError(
                f"no model is named {pattern!r}{nearest(pattern, names)} (flambeau models lists all)"
            )
        chosen |= matches
    return [name for name in names if name in chosen]


def _matches(pattern: str, names: Iterable[str]) -> set[str]:
    """With or without 'torchvision:'; a word that is neither name nor pattern matches names containing it."""
    forms = {name: (name.lower(), name.lower().removeprefix(_TORCHVISION)) for name in names}
    if any(mark in pattern for mark in "*?["):
        return {name for name in forms if any(fnmatch.fnmatchcase(f, pattern) for f in forms[name])}
    exact = {name for name in forms if pattern in forms[name]}
    with_tag = {name for name in forms if forms[name][0].startswith(f"{pattern}.")}
    return exact | with_tag or {name for name in forms if pattern in forms[name][0]}
