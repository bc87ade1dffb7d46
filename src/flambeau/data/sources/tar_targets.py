"""Several labels, or numbers, in the .json of a tar's samples.

`labels` (or `tags`, `targets`, `label`, `target`) is a list of names, or a number for each name, null where
it is unknown; `task` and `separator` are what `flambeau pack` writes beside them.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from flambeau.data.sources.class_names_file import known_classes
from flambeau.data.sources.packed_targets import TargetHead, of_words
from flambeau.data.sources.targets import TargetChoice, Targets, is_indicator, table_targets
from flambeau.errors import InputError, json_object

_KEYS = ("labels", "tags", "targets", "label", "target")
_BETWEEN = "\x1f"  # names of labels, as text: what none holds
_SHOWN = "|"


def as_json(names: Sequence[str], values: Sequence[float], head: TargetHead) -> bytes:
    """The .json of a sample; NaN is null."""
    facts: dict[str, object] = {"task": head.task}
    if head.separator is None:
        known = [None if value != value else value for value in values]
        facts["labels"] = dict(zip(names, known, strict=True))
    else:
        facts["labels"] = [name for name, value in zip(names, values, strict=True) if value]
        facts["separator"] = head.separator
    return json.dumps(facts, ensure_ascii=False, allow_nan=False).encode()


def is_packed(content: object) -> bool:
    """Whether the content of a .json says its task, as `flambeau pack` writes it."""
    return isinstance(content, dict) and _head(content) is not None and _value(content) is not None


def has_targets(content: object) -> bool:
    return _value(content) is not None


def targets_text(content: object, where: str) -> str:
    """What of a sample's .json is kept of its targets; InputError if it has none."""
    value = _value(content)
    if value is None or not isinstance(content, dict):
        raise InputError(
            f"{where} has no list of labels and no number for each, as the first sample has\n"
            f"Write them as {_KEYS[0]}: a list of names, or a number for each name"
        )
    said = {key: content[key] for key in ("task", "separator") if isinstance(content.get(key), str)}
    return json.dumps({**said, "labels": value})


def json_targets(
    texts: Sequence[str], path: Path, choice: TargetChoice, describe: Callable[[int], str]
) -> Targets:
    """The targets of all samples, of `targets_text`; InputError if they do not fit the task."""
    contents = [json.loads(text, object_pairs_hook=json_object) for text in texts]
    first = contents[0]
    head = _head(first)
    wanted = choice.task or (None if head is None else head.task)
    kinds = {type(content["labels"]) for content in contents}
    if len(kinds) > 1:
        odd = next(
            at
            for at, one in enumerate(contents)
            if type(one["labels"]) is not type(first["labels"])
        )
        raise InputError(
            f"{describe(odd)}: its labels are of another form than those of the first sample\n"
            "Give all samples a list of names, or all a number for each name"
        )
    if isinstance(first["labels"], list):
        if wanted not in (None, "multilabel"):
            raise InputError(
                f"{path} has lists of labels, and nothing for {wanted}\nLeave --task out"
            )
        cells = [_BETWEEN.join(content["labels"]) for content in contents]
        how = TargetChoice("multilabel", separator=_BETWEEN)
        found = table_targets(
            [cells], ["labels"], how, lambda row, _: describe(row), known_classes(path)
        )
        assert found is not None
        return found._replace(
            separator=_SHOWN if head is None or head.separator is None else head.separator
        )
    names = [*first["labels"]]
    for row, content in enumerate(contents):
        if [*content["labels"]] != names:
            raise InputError(
                f"{describe(row)}: it has values for {', '.join(content['labels'])}, the first sample for "
                f"{', '.join(names)}\nGive each the same names in one order, null for what is unknown"
            )
    columns = [[_cell(content["labels"][name]) for content in contents] for name in names]
    task = wanted or ("multilabel" if all(map(is_indicator, columns)) else "regression")
    how = replace(choice, task=task, columns=tuple(names), separator=None)
    found = table_targets(columns, names, how, lambda row, at: f"{describe(row)}: {names[at]}")
    if found is None:
        raise InputError(f"{path} has a number for each name, and no classes\nLeave --task out")
    return found


def sample_label(content: object) -> Tensor | tuple[str, ...] | None:
    """The values, or label names, in a sample's .json, if any."""
    value = _value(content)
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return None
    return torch.tensor([math.nan if one is None else float(one) for one in value.values()])


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value)


def _head(content: dict[str, object]) -> TargetHead | None:
    task = content.get("task")
    separator = content.get("separator")
    return (
        of_words(task, separator if isinstance(separator, str) else "")
        if isinstance(task, str)
        else None
    )


def _value(content: object) -> object:
    """A list of names, or a number or null for each name; None if there is none."""
    if not isinstance(content, dict):
        return None
    value = next((content[key] for key in _KEYS if key in content), None)
    if isinstance(value, list) and all(_is_name(name) for name in value):
        return value
    if isinstance(value, dict) and value:
        numbers = all(one is None or type(one) in (int, float) for one in value.values())
        return value if numbers and all(map(_is_name, value)) else None
    return None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and name.isprintable()
