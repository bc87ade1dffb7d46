"""What a user's data set says of itself beside its samples: labels, classes, what may be done with it.

Source: own; `.classes`, `.targets` and `.labels` are what torchvision's data sets have.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset


def is_source(data: object) -> bool:
    """Whether it has the methods of a flambeau.data.sources.source.Source, and not those of a Dataset."""
    return hasattr(data, "read") and hasattr(data, "labels") and not hasattr(data, "__getitem__")


def promise(data: Any, name: str, *, default: bool | None = None) -> bool:
    """What a data set says of itself; one that takes others along says what they say."""
    if isinstance(data, Subset):
        return promise(data.dataset, name, default=default)
    if isinstance(data, ConcatDataset):
        return all(promise(part, name, default=default) for part in data.datasets)
    return bool(getattr(data, name, is_source(data) if default is None else default))


def labels_of(data: Any, length: int) -> list[Any] | None:
    """The labels that a data set has beside its samples, where there is one per sample."""
    if isinstance(data, Subset):
        inner = labels_of(data.dataset, len(data.dataset))  # type: ignore[arg-type]  # it has a length
        return None if inner is None else [inner[index] for index in data.indices]
    if isinstance(data, ConcatDataset):
        parts = [labels_of(part, len(part)) for part in data.datasets]  # type: ignore[arg-type]
        return None if None in parts else [label for part in parts for label in part or []]
    for name in ("targets", "labels"):
        found: Any = getattr(data, name, None)
        if isinstance(found, torch.Tensor | np.ndarray):
            # (N, 1) are labels too; one-hot rows are not.
            found = found.reshape(-1).tolist() if np.prod(found.shape) == length else None
        is_list = hasattr(found, "__len__") and not isinstance(found, str | bytes | Mapping)
        if is_list and len(found) == length:
            return list(found)
    return None


def classes_of(data: Any) -> list[str] | None:
    """Class names; several names of one class, as ImageNet has them, are joined."""
    if isinstance(data, Subset):
        return classes_of(data.dataset)
    if isinstance(data, ConcatDataset):
        parts = [classes_of(part) for part in data.datasets]
        if any(part != parts[0] for part in parts):
            raise ValueError("the parts of a ConcatDataset have different .classes")
        return parts[0]
    found = getattr(data, "classes", None)
    if not isinstance(found, Iterable) or isinstance(found, str | Mapping):
        return None
    return [", ".join(map(str, n)) if isinstance(n, tuple | list) else str(n) for n in found]
