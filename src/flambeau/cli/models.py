"""`flambeau models`: the names that `--model` takes, with parameters, input size and published weights."""

import argparse
import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flambeau.errors import InputError, nearest
from flambeau.terminal import say

HELP = "list the models that --model takes, by name"

_COUNTED = 30  # timm models whose parameters are counted unasked: 0.05 to 0.2 s each on one core
_TORCHVISION = "torchvision:"


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model without its weights.

    Attributes:
        name: as --model takes it.
        parameters: with the published head, or 1000 classes; None where they are not counted.
        input_size: side of the images of its published weights; None where any will do.
        pretrained: whether published weights exist.
        tags: those of timm's published weights; the first is what --pretrained takes.
    """

    name: str
    parameters: int | None
    input_size: int | None
    pretrained: bool
    tags: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The patterns and what to show."""
    parser.add_argument(
        "patterns",
        metavar="PATTERN",
        nargs="*",
        help="a name, a part of one, or a pattern such as 'efficientnet*' or 'torchvision:res*'; "
        "none lists all",
    )
    parser.add_argument(
        "--pretrained", action="store_true", help="only those with published weights"
    )
    parser.add_argument(
        "--tags",
        action="store_true",
        help="a row for each set of published weights of timm's: NAME.TAG is a name for --model too",
    )
    parser.add_argument(
        "--sizes",
        action="store_true",
        help=f"count parameters however many models are listed (default: of up to {_COUNTED} of timm)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per line, for programs"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the models."""
    from flambeau.cli.table import count_text, print_json, print_table

    names = _chosen(arguments.patterns, _names(tags=arguments.tags))
    rows = [_facts(name) for name in names]
    if arguments.pretrained:
        rows = [row for row in rows if row.pretrained]
    uncounted = sum(row.parameters is None for row in rows)
    counts = arguments.sizes or uncounted <= _COUNTED
    if counts:
        rows = [_counted(row) for row in rows]
    if not rows:
        say(f"none of the {len(names)} models of this name has published weights")
    elif arguments.json:
        print_json(map(dataclasses.asdict, rows))
    else:
        columns = ("name", "parameters", "input", "pretrained")
        cells = (
            (r.name, count_text(r.parameters), None if r.input_size is None else str(r.input_size),
             "yes" if r.pretrained else "no")
            for r in rows
        )  # fmt: skip
        print_table(columns, cells, right=("parameters", "input"))
    if not counts:
        say(
            f"the parameters of {uncounted} models are not counted; --sizes counts them, at about 0.1 s each"
        )
    return 0


def _names(*, tags: bool) -> list[str]:
    """All that --model takes but FILE.py:FUNCTION."""
    import timm
    import torchvision.models

    from flambeau.train.build.model import SMALL, TINY

    names = timm.list_models()
    if tags:
        published = timm.list_pretrained()
        with_tags = {name.partition(".")[0] for name in published}
        names = [name for name in names if name not in with_tags] + published
    known = torchvision.models.list_models(module=torchvision.models)  # classifiers
    return [SMALL, TINY, *sorted(names), *sorted(f"{_TORCHVISION}{name}" for name in known)]


def _chosen(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that fit any of the patterns, in their order.

    Raises:
        InputError: a pattern that fits none.
    """
    if not patterns:
        return list(names)
    fitting: set[str] = set()
    for pattern in patterns:
        found = _fitting(pattern.lower(), names) if pattern else set()
        if not found:
            raise InputError(
                f"no model is named {pattern!r}{nearest(pattern, names)} (flambeau models lists all)"
            )
        fitting |= found
    return [name for name in names if name in fitting]


def _fitting(pattern: str, names: Iterable[str]) -> set[str]:
    """With or without 'torchvision:'; a word that is no name and no pattern fits what contains it."""
    forms = {name: (name.lower(), name.lower().removeprefix(_TORCHVISION)) for name in names}
    if any(mark in pattern for mark in "*?["):
        return {name for name in forms if any(fnmatch.fnmatchcase(f, pattern) for f in forms[name])}
    exact = {name for name in forms if pattern in forms[name]}
    with_tag = {name for name in forms if forms[name][0].startswith(f"{pattern}.")}
    return exact | with_tag or {name for name in forms if pattern in forms[name][0]}


def _facts(name: str) -> ModelFacts:
    from flambeau.train.build.model import SMALL, TINY

    if name in (SMALL, TINY):
        return ModelFacts(name, None, None, pretrained=False)
    if name.startswith(_TORCHVISION):
        return _of_torchvision(name)
    import timm

    published = timm.get_pretrained_cfg(name)
    side = None if published is None else published.input_size[-1]
    model, _, tag = name.partition(".")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(model)] if not tag else [tag]
    if published is not None and published.tag in tags:  # what the name alone stands for
        tags = [published.tag, *(t for t in tags if t != published.tag)]
    return ModelFacts(name, None, side, timm.is_model_pretrained(name), tuple(t for t in tags if t))


def _of_torchvision(name: str) -> ModelFacts:
    """Its published weights say how many parameters there are."""
    from torchvision.models import get_model_weights

    all_weights: Any = get_model_weights(name.removeprefix(_TORCHVISION))
    published = getattr(all_weights, "DEFAULT", None)
    if published is None:
        return ModelFacts(name, None, None, pretrained=False)
    (side,) = published.transforms().crop_size
    return ModelFacts(name, published.meta["num_params"], side, pretrained=True)


def _counted(row: ModelFacts) -> ModelFacts:
    """With the parameters counted, of a model without values."""
    if row.parameters is not None:
        return row
    import timm
    import torch
    from torchvision.models import get_model

    from flambeau.train.build.model import SMALL, TINY, build_model

    with torch.device("meta"):
        if row.name in (SMALL, TINY):
            model = build_model(row.name, num_classes=1000, channels=3, image_size=32)
        elif row.name.startswith(_TORCHVISION):
            model = get_model(row.name.removeprefix(_TORCHVISION))
        else:
            model = timm.create_model(row.name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return dataclasses.replace(row, parameters=parameters)
