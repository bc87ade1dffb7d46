"""What `flambeau verify` reports of a file of weights: whether it is intact, would run code, or holds NaN."""

import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.data.pack.scan import RECOVERY
from flambeau.data.sources.arrays.array_roles import role_of
from flambeau.errors import ZIP_ERRORS, InputError
from flambeau.file_signature import signature
from flambeau.recipes.checkpoints.checkpoint_tensors import tensors_in
from flambeau.recipes.checkpoints.safe_pickle import (
    Contents,
    Foreign,
    PickleRefused,
    pickle_contents,
)
from flambeau.weights.not_weights import not_weights_reason, unreadable_reason
from flambeau.weights.npz_file import holds_weights, read_npz
from flambeau.weights.readers import weights_in, weights_kind, with_tensors
from flambeau.weights.safetensors_file import check_header, each_tensor

_ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle", ".npz", ".npy")
_OTHERS = (".pt2", ".onnx", ".gguf", ".keras", ".tflite")  # recognized, but not read
_CHUNK = 1 << 24  # elements checked at a time


@dataclass
class WeightsReport:
    """Facts about a file of weights.

    Attributes:
        container: 'safetensors', 'npz', or the container that `safe_pickle` reports.
        damaged: one sentence per defect.
        other: what the file is, without weights to read.
        checksums: it has some, and all are right.
        not_read: contents that are intact, no code, and still not read.
        names: globals that unpickling would import or call, beyond weights and plain data.
        convertible: it has named weights for `flambeau convert`.
        weights_only: torch.load(weights_only=True) reads it; None for safetensors.
        not_finite: by tensor, the number of NaN and infinite values.
    """

    path: Path
    container: str
    num_tensors: int = 0
    num_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    other: str = ""
    checksums: bool = False
    not_read: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    convertible: bool = True
    weights_only: bool | None = None
    not_finite: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Intact, nothing in it would run, and no NaN; masks hold infinities on purpose."""
        is_read = not (self.damaged or self.other or self.names)
        return is_read and not any(nan for nan, _ in self.not_finite.values())


def is_weights(path: Path) -> bool:
    """Whether a file holds weights and not images, by its content; a damaged .pth counts as weights.

    So does git-annex's link to unfetched weights.
    """
    is_annexed = path.is_symlink() and not path.exists() and not_weights_reason(path) is not None
    named = path.name.endswith((*_ENDINGS, *_OTHERS, ".pth.tar", ".index.json"))
    if not named or not (path.is_file() or is_annexed):
        return False
    if path.with_name(f"{path.name}.pack.json").exists():
        return False
    if path.suffix in (".npz", ".npy"):
        return path.exists() and holds_weights(path)
    if path.suffix not in (".pth", ".pt") or not path.exists():
        return True
    try:
        contents = pickle_contents(path)
        return bool(contents.refused) or not _holds_images(contents)
    except ValueError:  # refused, or names that cannot be listed: the report says so
        return True


def _holds_images(contents: Contents) -> bool:
    """Whether its names or layout are those of image arrays of `flambeau pack` and `train`."""
    values = contents.value
    if isinstance(values, list | tuple):
        # A list of state dicts begins with named tensors, one of images and labels with tensors.
        is_states = bool(values) and isinstance(values[0], dict) and bool(tensors_in(values[0]))
        if not is_states:
            return not _holds_dicts(values)
    for location, tensor in tensors_in(contents.value).items():
        name = role_of(location.replace(".", "/"))
        if name and name[1] == "images" and (tensor.dtype == torch.uint8 or tensor.dim() > 2):
            return True
    return False


def _holds_dicts(values: Sequence[Any]) -> bool:
    """Checks two levels of lists, as in pairs of images and labels."""
    return any(
        isinstance(item, dict)
        or (isinstance(item, list | tuple) and any(isinstance(inner, dict) for inner in item))
        for item in values
    )


def report_weights(path: Path) -> WeightsReport:
    """Read every byte of a file of weights, and run nothing in it."""
    other = not_weights_reason(path)
    if other is not None:
        report = WeightsReport(path, "no weights", convertible=False)
        if (file_type := signature(path)) is not None and file_type.kind == "zeros":
            report.damaged.append(f"this is {other}")
        else:
            report.other = other
        return report
    kind = weights_kind(path)
    if kind == "index":
        what = "an index of several files of weights: verify each; `flambeau convert` reads them as one"
        return WeightsReport(path, "index", other=what)
    if kind == "npz":
        return _npz(path)
    return _safetensors(path) if kind == "safetensors" else _pickle(path)


def _npz(path: Path) -> WeightsReport:
    report = WeightsReport(path, "npz", checksums=_has_checksums(path))
    value = _count_read(report, lambda: with_tensors(read_npz(path)))
    if value is not None:
        names = {item.name: None for item in value.values() if isinstance(item, Foreign)}
        report.not_read = tuple(names)
    return report


def _count_read(report: WeightsReport, read: Callable[[], Any]) -> Any:
    """Read and count into the report; None if damaged."""
    try:
        value = read()
        report.convertible = bool(weights_in(value))
        tensors = tensors_in(value)
    except ValueError as error:
        report.damaged.append(str(error).removeprefix(f"{report.path}: "))
        return None
    _count(report, tensors.items())
    return value


def _pickle(path: Path) -> WeightsReport:
    try:
        contents, damaged = _contents(path)
    except PickleRefused as error:
        other = unreadable_reason(path, error)
        if other is not None:
            return WeightsReport(path, "no weights", other=other, convertible=False)
        what = str(error).removeprefix(f"{path}: ")
        tool = f"; {RECOVERY['pth']}" if "zip file" in what else ""
        return WeightsReport(path, "pickle", damaged=[what + tool])
    report = WeightsReport(path, contents.container, damaged=damaged, names=contents.refused)
    report.checksums = _has_checksums(path)
    report.not_read = contents.not_read
    report.weights_only = contents.weights_only
    if not damaged:
        _count_read(report, lambda: with_tensors(contents.value))
    return report


def _contents(path: Path) -> tuple[Contents, list[str]]:
    """The contents of a pickle, and wrong checksums, which do not hide what it would run."""
    try:
        return pickle_contents(path, mapped=True), []
    except PickleRefused as error:
        what = str(error).removeprefix(f"{path}: ")
        if "CRC-32" not in what:
            raise
        return pickle_contents(path), [what]


def _has_checksums(path: Path) -> bool:
    """CRC-32 of a zip file's records; torch.serialization.set_crc32_options(False) writes zeros."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(record.CRC for record in archive.infolist())
    except ZIP_ERRORS:
        return False


def _count(report: WeightsReport, tensors: Iterable[tuple[str, Tensor]]) -> None:
    waiting: dict[torch.dtype, dict[str, Tensor]] = {}  # small ones, checked together
    for name, tensor in tensors:
        report.num_tensors += 1
        report.num_bytes += tensor.numel() * tensor.element_size()
        is_checked = tensor.is_floating_point() and tensor.dtype is not torch.float4_e2m1fn_x2
        if is_checked or tensor.is_complex():  # float4 has neither NaN nor infinity
            # Torch warns when it makes a complex32 tensor.
            pairs = tensor.dtype is torch.complex32
            flat = _each_once(torch.view_as_real(tensor) if pairs else tensor)
            group = waiting.setdefault(flat.dtype, {})
            if len(flat) > _CHUNK // 1000:
                _check_finite(report, name, flat)
            else:
                group[name] = flat
            if len(group) == 1000:
                _check_group(report, waiting.pop(flat.dtype))
    for group in waiting.values():
        _check_group(report, group)


def _check_group(report: WeightsReport, group: Mapping[str, Tensor]) -> None:
    if group and not bool(torch.isfinite(_wide(torch.cat([*group.values()]))).all()):
        for name, flat in group.items():
            _check_finite(report, name, flat)


def _check_finite(report: WeightsReport, name: str, flat: Tensor) -> None:
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
    """The elements as one row; for a tensor that repeats its storage (`expand`), those of the storage."""
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((held,), (1,), 0) if held < tensor.numel() else tensor.reshape(-1)


def _safetensors(path: Path) -> WeightsReport:
    """The library checks types, shapes and offsets, but accepts duplicate names."""
    report = WeightsReport(path, "safetensors")
    try:
        check_header(path)
        _count(report, each_tensor(path))
    except InputError as error:
        report.damaged.append(str(error).splitlines()[0].removeprefix(f"{path} "))
    return report
