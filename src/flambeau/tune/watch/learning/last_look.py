"""What is looked at when the watch ends: the script goes no further."""

import time
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from flambeau.tune.watch.learning.batches import BatchWatch, LoaderSeen
from flambeau.tune.watch.learning.measures import row_hashes, tensors_in
from flambeau.tune.watch.learning.notes import as_pair
from flambeau.tune.watch.stack_phases import CodeLocation

_MOST_SAMPLES = 3000  # of a data set that are compared by content; chosen
_MOST_S = 5.0
_FEW = 6


def last_look(batches: BatchWatch) -> dict[str, Any]:
    """Data of evaluation beside those of training, and whether they are the same when read again."""
    loaders = list(batches.seen.values())
    training = [one for one in loaders if one.trained]
    others = [one for one in loaders if not one.trained and one.batches]
    return {"shared": _shared(training, others, batches.made), "augmented": _augmented(others)}


def _shared(
    training: list[LoaderSeen], others: list[LoaderSeen], made: dict[int, CodeLocation]
) -> list[dict[str, Any]]:
    rows = []
    for other in others:
        for one in training:
            first = one.loader.dataset
            second = other.loader.dataset
            if first is second or not (_has_items(first) and _has_items(second)):
                continue
            known = set(_contents(first))
            samples = _contents(second)
            if samples:
                twice = sum(sample in known for sample in samples)
                where = as_pair(made.get(id(second)) or other.where)
                rows.append({"where": where, "twice": twice, "samples": len(samples)})
    return rows


def _augmented(others: list[LoaderSeen]) -> list[dict[str, Any]]:
    """Whether a data set of evaluation, which has transforms, gives a sample differently each time."""
    rows = []
    for other in others:
        dataset = other.loader.dataset
        if not (_has_items(dataset) and _has_transform(dataset)):
            continue
        count = min(_FEW, len(dataset))  # type: ignore[arg-type]
        pairs = [(_content(dataset[i]), _content(dataset[i])) for i in range(count)]
        differ = sum(one != two for one, two in pairs)
        if differ:
            rows.append({"where": as_pair(other.where), "differ": differ, "samples": count})
    return rows


def _has_items(dataset: Dataset[Any]) -> bool:
    return not isinstance(dataset, IterableDataset) and hasattr(type(dataset), "__len__")


def _has_transform(dataset: Dataset[Any]) -> bool:
    inner: Any = dataset
    while inner is not None:
        names = getattr(inner, "__dict__", {})
        if any(("transform" in name or "aug" in name) and value for name, value in names.items()):
            return True
        inner = names.get("dataset")
    return False


def _contents(dataset: Dataset[Any]) -> list[int]:
    began = time.monotonic()
    contents = []
    for index in range(min(_MOST_SAMPLES, len(dataset))):  # type: ignore[arg-type]
        content = _content(dataset[index])
        if content is None or time.monotonic() - began > _MOST_S:
            break
        contents.append(content)
    return contents


def _content(sample: Any) -> int | None:
    tensors = list(tensors_in(sample))
    return next(iter(row_hashes(tensors[0].unsqueeze(0))), None) if tensors else None
