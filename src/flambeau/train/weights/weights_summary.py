"""What `flambeau verify` says of a file of weights: whole or not, what unpickling it would run, NaNs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.data.pack.scan import RECOVERY
from flambeau.data.sources.arrays.array_roles import role_of
from flambeau.errors import InputError
from flambeau.recipes.checkpoints.checkpoint_tensors import tensors_in
from flambeau.recipes.checkpoints.safe_pickle import (
    Contents,
    PickleRefused,
    load_pickle,
    pickle_contents,
)
from flambeau.train.weights.readers import (
    MAX_HEADER,
    no_file_of_weights,
    read_safetensors,
    weights_in,
    weights_kind,
    with_tensors,
)

_ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle")
_CHUNK = 1 << 24  # elements that are looked at in one go


@dataclass
class WeightsReport:
    """What was found in a file of weights.

    Attributes:
        container: 'safetensors', or what `safe_pickle` calls it.
        num_tensors, num_bytes: of its tensors.
        damaged: what is not whole, one sentence each.
        not_read: what is whole as far as it can be told, and no code, and yet not read.
        names: globals that unpickling would import or call, beyond weights and plain data.
        convertible: whether there are weights by name, which `flambeau convert` takes.
        weights_only: whether torch.load(weights_only=True) reads it; None of safetensors.
        not_finite: by tensor, how many values are NaN and how many infinite.
    """

    path: Path
    container: str
    num_tensors: int = 0
    num_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    not_read: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    convertible: bool = True
    weights_only: bool | None = None
    not_finite: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whole, nothing in it would run, and no NaN; masks hold infinities on purpose."""
        return not (self.damaged or self.names or any(nan for nan, _ in self.not_finite.values()))


def is_weights(path: Path) -> bool:
    """Whether a file is one of weights and not of images, by its content; a damaged .pth is weights.

    Args:
        path: any path.
    """
    if not path.is_file() or not path.name.endswith((*_ENDINGS, ".pth.tar")):
        return False
    if path.suffix not in (".pth", ".pt"):
        return True
    if path.with_name(f"{path.name}.pack.json").exists():
        return False
    try:
        contents = pickle_contents(path)
        return bool(contents.refused) or not _holds_images(contents)
    except ValueError:  # refused, or names that cannot be listed: the report says so
        return True


def _holds_images(contents: Contents) -> bool:
    """Named or laid out as `flambeau pack` and `train` take arrays of images."""
    if isinstance(contents.value, list | tuple) and not _holds_states(contents.value):
        return True
    for place, tensor in tensors_in(contents.value).items():
        name = role_of(place.replace(".", "/"))
        if name and name[1] == "images" and (tensor.dtype == torch.uint8 or tensor.dim() > 2):
            return True
    return False


def _holds_states(values: Sequence[Any]) -> bool:
    """A list of state dicts, which hold tensors by name; one of images and labels begins with tensors."""
    return bool(values) and isinstance(values[0], dict) and bool(tensors_in(values[0]))


def report_weights(path: Path) -> WeightsReport:
    """Look at every byte of a file of weights, and run nothing of it.

    Raises:
        OSError: it cannot be read for a reason that says nothing about it.
    """
    other = no_file_of_weights(path)
    if other is not None:
        return WeightsReport(path, "no weights", damaged=[f"this is {other}"], convertible=False)
    return _safetensors(path) if weights_kind(path) == "safetensors" else _pickle(path)


def _pickle(path: Path) -> WeightsReport:
    try:
        contents = pickle_contents(path)
    except PickleRefused as error:
        what = str(error).removeprefix(f"{path}: ")
        tool = f"; {RECOVERY['pth']}" if "zip file" in what else ""
        container = "tar" if what.startswith("a tar archive") else "pickle"
        return WeightsReport(path, container, damaged=[what + tool])
    report = WeightsReport(path, contents.container, names=contents.refused)
    report.not_read = contents.not_read
    report.weights_only = contents.weights_only
    try:
        value = with_tensors(load_pickle(path, drop_objects=True, mapped=True))
        report.convertible, tensors = bool(weights_in(value)), tensors_in(value)
    except ValueError as error:
        report.damaged.append(str(error).removeprefix(f"{path}: "))
        return report
    _count(report, tensors)
    return report


def _count(report: WeightsReport, tensors: Mapping[str, Tensor]) -> None:
    report.num_tensors = len(tensors)
    waiting: dict[torch.dtype, dict[str, Tensor]] = {}  # small ones, looked at together
    for name, tensor in tensors.items():
        report.num_bytes += tensor.numel() * tensor.element_size()
        is_checked = tensor.is_floating_point() and tensor.dtype is not torch.float4_e2m1fn_x2
        if is_checked or tensor.is_complex():  # float4 has neither NaN nor infinity
            flat, group = _each_once(tensor), waiting.setdefault(tensor.dtype, {})
            if len(flat) > _CHUNK // 1000:
                _look(report, name, flat)
            else:
                group[name] = flat
            if len(group) == 1000:
                _look_at_all(report, waiting.pop(tensor.dtype))
    for group in waiting.values():
        _look_at_all(report, group)


def _look_at_all(report: WeightsReport, group: Mapping[str, Tensor]) -> None:
    if group and not bool(torch.isfinite(_wide(torch.cat([*group.values()]))).all()):
        for name, flat in group.items():
            _look(report, name, flat)


def _look(report: WeightsReport, name: str, flat: Tensor) -> None:
    nan = infinite = 0
    for part in map(_wide, flat.split(_CHUNK)):
        if not bool(torch.isfinite(part).all()):
            nan += int(part.isnan().sum())
            infinite += int(part.isinf().sum())
    if nan or infinite:
        report.not_finite[name] = (nan, infinite)


def _wide(flat: Tensor) -> Tensor:
    return flat.float() if flat.element_size() == 1 else flat  # float8 has no isfinite


def _each_once(tensor: Tensor) -> Tensor:
    """Its elements in one row; of a tensor that repeats its storage (`expand`), those of the storage."""
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((held,), (1,), 0) if held < tensor.numel() else tensor.reshape(-1)


# ---------------------------------------------------------------- safetensors


def _safetensors(path: Path) -> WeightsReport:
    """The library checks types, shapes and places; it takes a name that stands there twice."""
    report = WeightsReport(path, "safetensors")
    try:
        _check_header(path)
        _count(report, read_safetensors(path))
    except InputError as error:
        report.damaged.append(str(error).splitlines()[0].removeprefix(f"{path} "))
    return report


def _check_header(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise InputError(
                f"the header should have {length} bytes; the file has {size}, the format allows {MAX_HEADER}"
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_twins)
        ends = [
            entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
        ]
        end = 8 + length + max(ends, default=0)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the header is no JSON: {error}"[:200]) from error
    except (AttributeError, LookupError, TypeError):
        return  # the library says what is wrong
    if end > size:
        raise InputError(f"is truncated: its tensors end at byte {end} of {size}"[:200])


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands there twice")
    return found
