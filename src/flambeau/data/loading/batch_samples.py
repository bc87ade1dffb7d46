"""How many samples a collated batch holds, and slices of it; a batch is whatever a collate function makes."""

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal

from torch import Tensor

from flambeau.errors import InputError

_Layout = Literal["tensors", "columns", "rows", "unclear"]


def count_samples(batch: Any) -> int:
    """The first dimension of its first tensor, or the length of its lists of samples."""
    size = _common_size(batch) if _is_list(batch) else None
    return _layout(batch)[1] if size is None else size


def _common_size(values: Sequence[Any]) -> int | None:
    """The fast path for a list of tensors, taken at each step: half a microsecond instead of 13."""
    size = None
    for value in values:
        if not isinstance(value, Tensor) or not value.dim():
            return None
        if size is None:
            size = value.size(0)
        elif value.size(0) != size:
            return None
    return size


def is_tensor_per_sample(batch: Any, expected: int) -> bool | None:
    """Whether a batch is a list with one tensor per sample; None if that is ambiguous."""
    if not _is_list(batch) or len(batch) != expected:
        return False
    if not all(isinstance(v, Tensor) for v in batch) or len({v.dim() for v in batch}) != 1:
        return False
    num_dims = batch[0].dim()
    sizes = {len(v) if v.dim() else None for v in batch}
    if len(sizes) > 1 or num_dims == 0:
        return True
    if num_dims < 3:
        return False  # rows, of which a sample may have several
    # Images (C, H, W), one per sample; or tensors of all samples, if as many as `expected` are so long.
    return (None if expected in sizes else True) if num_dims == 3 else False


def slice_samples(
    batch: Any, samples: slice, *, stacked: bool = False, listed: bool | None = False
) -> Any:
    """The same batch with these samples only; what is not per sample stays whole.

    `stacked`: each tensor holds all samples; `listed`: the result of `is_tensor_per_sample`.
    """
    layout, size = _layout(batch)
    if stacked:
        return _sliced(batch, samples, size)
    if listed:
        return batch[samples]
    if layout == "unclear" or listed is None:
        raise InputError(
            "the loader's batches cannot be shared by several processes: a list of tensors in them may hold "
            f"one tensor per sample, or {size} samples in each tensor.\n"
            "Stack them in its collate function, give it a DistributedSampler, or give the Dataset to Run"
        )
    if layout == "rows":
        return batch[samples]
    if layout == "columns":
        return rebuilt(batch, [column[samples] for column in values_of(batch)])
    return _sliced(batch, samples, size)


def _layout(batch: Any) -> tuple[_Layout, int]:
    """Whether each tensor holds all samples, or lists have an item per sample; and the number of samples."""
    tensors = list(tensors_in_batch(batch))
    if not tensors:
        raise InputError(
            f"a batch of the loader is a {type(batch).__name__} without a tensor, whose first dimension "
            "counts the samples"
        )
    size = len(tensors[0]) if tensors[0].dim() else 1
    columns = values_of(batch)
    lists = [c for c in columns if _is_list(c)]
    lengths = {len(c) for c in columns if _is_list(c) or (isinstance(c, Tensor) and c.dim())}
    # As default_collate makes them: each tensor holds all samples, and a list one string per sample.
    stacked = all(t.dim() and len(t) == size for t in tensors) and all(
        len(c) == size for c in lists if not any(True for _ in tensors_in_batch(c))
    )
    if _is_list(batch) and _are_rows(columns):
        unclear = stacked and all(isinstance(v, Tensor) for c in columns for v in values_of(c))
        return ("unclear", size) if unclear else ("rows", len(batch))
    is_listed = len(lengths) == 1 and any(True for c in lists for _ in tensors_in_batch(c))
    if not is_listed or not all(_is_list(c) or isinstance(c, Tensor) for c in columns):
        return "tensors", size
    return ("unclear", size) if stacked else ("columns", lengths.pop())


def _are_rows(columns: Sequence[Any]) -> bool:
    """Whether these are samples: dicts of equal keys, or tuples of equal types such as (image, class)."""
    if all(isinstance(c, Mapping) for c in columns):
        return len({tuple(c) for c in columns}) == 1
    kinds = {tuple(map(type, c)) if _is_list(c) else () for c in columns}
    return len(kinds) == 1 and len(set(kinds.pop())) > 1


def values_of(batch: Any) -> list[Any]:
    """The values of a dict, list or tuple; none for anything else."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if _is_list(batch) else []


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def tensors_in_batch(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    for value in values_of(batch):
        yield from tensors_in_batch(value)


def rebuilt(batch: Any, values: Sequence[Any]) -> Any:
    if isinstance(batch, Mapping):
        items = dict(zip(batch, values, strict=True))
        if not isinstance(batch, MutableMapping):
            return items
        new = copy.copy(batch)  # keeps the type: BatchEncoding of Hugging Face is a UserDict
        new.update(items)
        return new
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _sliced(batch: Any, samples: slice, size: int) -> Any:
    """Slices each tensor or list of length `size` in nested containers."""
    if isinstance(batch, Tensor):
        return batch[samples] if batch.dim() and len(batch) == size else batch
    is_column = _is_list(batch) and not hasattr(batch, "_fields") and len(batch) == size
    if is_column and not any(isinstance(value, Tensor) for value in batch):
        return batch[samples]
    if isinstance(batch, Mapping) or _is_list(batch):
        return rebuilt(batch, [_sliced(value, samples, size) for value in values_of(batch)])
    return batch
