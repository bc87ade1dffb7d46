"""The columns of a table that say which images stay together, and which are to train or to validate on."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flambeau.data.sources.listing import PARTS
from flambeau.data.sources.tables.columns import features_of, other_columns
from flambeau.data.sources.targets import TargetChoice, named_column
from flambeau.errors import InputError


class SplitColumns(NamedTuple):
    """Each row's group, and train, val or test; None without such a column."""

    groups: tuple[str, ...] | None = None
    parts: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()


def split_columns(
    path: Path, schema: Any, batches: Iterator[Any], choice: TargetChoice
) -> SplitColumns:
    """The columns that `choice` names; pyarrow's batches are read if there is one.

    InputError: no such column, a row without a group, or a part that is none.
    """
    others = other_columns(schema, path)
    group = _named(path, choice.group, others, choice)
    part = _named(path, choice.split, others, choice)
    wanted = [name for name in (group, part) if name is not None]
    if not wanted:
        return SplitColumns()
    features = features_of(schema.metadata or {}, path)
    texts: dict[str, list[str]] = {name: [] for name in wanted}
    for batch in batches:
        for name, cells in texts.items():
            column = batch.column(name)
            column.validate(full=True)
            cells += [_text(value, features.get(name, {})) for value in column.to_pylist()]
    if group is not None and "" in texts[group]:
        raise InputError(
            f"{path}, row {texts[group].index('')}, column {group} names no group\n"
            "Give each image the group that it belongs to"
        )
    parts = None if part is None else [PARTS.get(text.lower(), "") for text in texts[part]]
    if parts is not None and part is not None and "" in parts:
        row = parts.index("")
        raise InputError(
            f"{path}, row {row}, column {part}: {texts[part][row]!r:.50} is no part of the data\n"
            f"Expected one of {', '.join(PARTS)} in that column"
        )
    return SplitColumns(
        None if group is None else tuple(texts[group]),
        None if parts is None else tuple(parts),
        tuple(wanted),
    )


def _named(path: Path, wanted: str | None, names: list[str], choice: TargetChoice) -> str | None:
    if wanted is None or (choice.of_others and wanted not in names):
        return None
    return names[named_column(wanted, names, f"{path} has")]


def _text(value: object, feature: Mapping[str, Any]) -> str:
    """A cell as text; the name of the class for a number of Hugging Face's ClassLabel."""
    names = feature.get("names")
    if isinstance(names, list) and type(value) is int and 0 <= value < len(names):
        return str(names[value])
    return "" if value is None else str(value).strip()
