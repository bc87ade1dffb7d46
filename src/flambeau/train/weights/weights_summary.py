"""What `flambeau verify` says of a file of weights: whole or not, what unpickling it would run, NaNs."""

import json
import zipfile
from collections.abc import Iterator, Mapping
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
    SAFETENSORS_DTYPES,
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
    if isinstance(contents.value, list | tuple):
        return True
    for place, tensor in tensors_in(contents.value).items():
        name = role_of(place.replace(".", "/"))
        if name and name[1] == "images" and (tensor.dtype == torch.uint8 or tensor.dim() > 2):
            return True
    return False


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
        return WeightsReport(path, "pickle", damaged=[what + tool])
    report = WeightsReport(path, contents.container, names=contents.refused)
    report.weights_only = contents.weights_only
    report.damaged += _bad_checksums(path)
    try:
        loaded = load_pickle(path, drop_objects=True, mapped=True, checked=False)
        value = with_tensors(loaded)  # the checksums stand above, all of them
        report.convertible, tensors = bool(weights_in(value)), tensors_in(value)
    except ValueError as error:
        report.damaged.append(str(error).removeprefix(f"{path}: "))
        return report
    _count(report, tensors)
    return report


def _bad_checksums(path: Path) -> Iterator[str]:
    """Records of a zip file whose CRC-32 is not that of their bytes; torch itself does not look."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if not any(record.CRC for record in records):
            return  # torch.serialization.set_crc32_options(False) writes zeros
        for record in records:
            try:
                with archive.open(record) as file:
                    while file.read(1 << 20):
                        pass
            except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError):
                yield f"record {record.filename} is not what was saved (its CRC-32 differs)"


def _count(report: WeightsReport, tensors: Mapping[str, Tensor]) -> None:
    report.num_tensors = len(tensors)
    for name, tensor in tensors.items():
        report.num_bytes += tensor.numel() * tensor.element_size()
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        nan = infinite = 0
        flat = _each_once(tensor)
        for start in range(0, len(flat), _CHUNK):
            part = flat[start : start + _CHUNK]
            part = part.float() if part.element_size() == 1 else part
            if not bool(torch.isfinite(part).all()):
                nan += int(part.isnan().sum())
                infinite += int(part.isinf().sum())
        if nan or infinite:
            report.not_finite[name] = (nan, infinite)


def _each_once(tensor: Tensor) -> Tensor:
    """Its elements in one row; of a tensor that repeats its storage (`expand`), those of the storage."""
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((held,), (1,), 0) if held < tensor.numel() else tensor.reshape(-1)


# ---------------------------------------------------------------- safetensors


def _safetensors(path: Path) -> WeightsReport:
    report = WeightsReport(path, "safetensors")
    size = path.stat().st_size
    try:
        header, start = _header(path, size)
        report.damaged += _bad_places(header, size - start)
        if not report.damaged:
            _count(report, read_safetensors(path))
    except InputError as error:
        report.damaged.append(str(error).splitlines()[0].removeprefix(f"{path} "))
    return report


def _header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise InputError(
                f"the header should have {length} bytes; the file has {size}, the format allows {MAX_HEADER}"
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the header is no JSON: {error}"[:200]) from error
    if not isinstance(header, dict):
        raise InputError("the header is no JSON object")
    return header, 8 + length


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands there twice")
    return dict(pairs)


def _bad_places(header: Mapping[str, Any], size: int) -> Iterator[str]:
    """What of the tensors' types, shapes and places does not fit each other or the file."""
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(v, str) for v in entry.values()):
                yield "its metadata are not text by name"
            continue
        span = _span(entry)
        if isinstance(span, str):
            yield f"{name}: {span}"
        else:
            spans.append((*span, name))
    place = 0
    for low, high, name in sorted(spans):
        if low < place:
            yield f"{name} begins at byte {low}, where another tensor lies"
        elif low > place:
            yield f"nothing lies from byte {place} to {low}, before {name}"
        if high > size:
            yield f"{name} ends at byte {high} of {size}: the file is truncated"
        place = max(place, high)
    if place < size:
        yield f"{size - place} bytes stand behind the last tensor"


def _span(entry: Any) -> tuple[int, int] | str:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "not the three entries dtype, shape and data_offsets"
    dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        return f"the type {str(dtype)[:20]!r} is not known"
    numbers = [shape, place]
    if not all(isinstance(n, list) and all(type(i) is int and i >= 0 for i in n) for n in numbers):
        return "shape or offsets are no lists of whole numbers"
    if len(place) != 2 or place[0] > place[1] or place[1] >= 1 << 63 or len(shape) > 64:
        return "its offsets are no beginning and end, or its shape has too many sides"
    size = SAFETENSORS_DTYPES[dtype].itemsize
    for side in shape:
        size *= side
    if size != place[1] - place[0]:
        return f"{dtype} {shape} takes {size} bytes, its offsets give it {place[1] - place[0]}"
    return place[0], place[1]
