"""What `flambeau verify` says of a file of weights: whole or not, what unpickling it would run, NaNs."""

import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.data.pack.scan import RECOVERY
from flambeau.data.sources.arrays.array_roles import role_of
from flambeau.errors import InputError
from flambeau.file_signature import signature
from flambeau.recipes.checkpoints.checkpoint_tensors import tensors_in
from flambeau.recipes.checkpoints.safe_pickle import (
    Contents,
    Foreign,
    PickleRefused,
    pickle_contents,
)
from flambeau.weights.not_weights import no_file_of_weights, not_read
from flambeau.weights.npz_file import is_of_weights, read_npz
from flambeau.weights.readers import weights_in, weights_kind, with_tensors
from flambeau.weights.safetensors_file import check_header, each_tensor

_ENDINGS = (
    ".safetensors",
    ".pth",
    ".pt",
    ".bin",
    ".ckpt",
    ".pkl",
    ".pickle",
    ".npz",
    ".npy",
    ".pt2",
    ".onnx",
    ".gguf",
    ".keras",
    ".tflite",  # of other programs: named, and not read
)
_CHUNK = 1 << 24  # elements that are looked at in one go


@dataclass
class WeightsReport:
    """What was found in a file of weights.

    Attributes:
        container: 'safetensors', 'npz', or what `safe_pickle` calls it.
        num_tensors, num_bytes: of its tensors.
        damaged: what is not whole, one sentence each.
        other: what the file is, where it is none of weights that are read here.
        checksums: whether the file has them, all of which were right.
        not_read: what is whole, as far as can be seen, and no code, and yet not read.
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
    other: str = ""
    checksums: bool = False
    not_read: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    convertible: bool = True
    weights_only: bool | None = None
    not_finite: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whole, nothing in it would run, and no NaN; masks hold infinities on purpose."""
        is_read = not (self.damaged or self.other or self.names)
        return is_read and not any(nan for nan, _ in self.not_finite.values())


def is_weights(path: Path) -> bool:
    """Whether a file is one of weights and not of images, by its content; a damaged .pth is weights.

    Args:
        path: any path; a link of git-annex to weights that have not been fetched counts.
    """
    is_annexed = path.is_symlink() and not path.exists() and no_file_of_weights(path) is not None
    named = path.name.endswith((*_ENDINGS, ".pth.tar", ".index.json"))
    if not named or not (path.is_file() or is_annexed):
        return False
    if path.with_name(f"{path.name}.pack.json").exists():
        return False
    if path.suffix in (".npz", ".npy"):
        return path.exists() and is_of_weights(path)
    if path.suffix not in (".pth", ".pt") or not path.exists():
        return True
    try:
        contents = pickle_contents(path)
        return bool(contents.refused) or not _holds_images(contents)
    except ValueError:  # refused, or names that cannot be listed: the report says so
        return True


def _holds_images(contents: Contents) -> bool:
    """Named or laid out as `flambeau pack` and `train` take arrays of images."""
    if isinstance(contents.value, list | tuple) and not _holds_states(contents.value):
        return not _holds_dicts(contents.value)
    for place, tensor in tensors_in(contents.value).items():
        name = role_of(place.replace(".", "/"))
        if name and name[1] == "images" and (tensor.dtype == torch.uint8 or tensor.dim() > 2):
            return True
    return False


def _holds_dicts(values: Sequence[Any]) -> bool:
    """At most two lists deep, as pairs of images and labels are."""
    return any(
        isinstance(item, dict)
        or (isinstance(item, list | tuple) and any(isinstance(inner, dict) for inner in item))
        for item in values
    )


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
        report = WeightsReport(path, "no weights", convertible=False)
        if (found := signature(path)) is not None and found.kind == "zeros":
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
    """What has been read, counted in the report; None where it is damaged."""
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
        other = not_read(path, error)
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
    """What a pickle holds, and which checksum is wrong: what it would run is said all the same."""
    try:
        return pickle_contents(path, mapped=True), []
    except PickleRefused as error:
        what = str(error).removeprefix(f"{path}: ")
        if "CRC-32" not in what:
            raise
        return pickle_contents(path), [what]


def _has_checksums(path: Path) -> bool:
    """Of a zip file the CRC-32 of its records; torch.serialization.set_crc32_options(False) writes zeros."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(record.CRC for record in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return False


def _count(report: WeightsReport, tensors: Iterable[tuple[str, Tensor]]) -> None:
    waiting: dict[torch.dtype, dict[str, Tensor]] = {}  # small ones, looked at together
    for name, tensor in tensors:
        report.num_tensors += 1
        report.num_bytes += tensor.numel() * tensor.element_size()
        is_checked = tensor.is_floating_point() and tensor.dtype is not torch.float4_e2m1fn_x2
        if is_checked or tensor.is_complex():  # float4 has neither NaN nor infinity
            # Of complex32 torch makes none without a warning.
            pairs = tensor.dtype is torch.complex32
            flat = _each_once(torch.view_as_real(tensor) if pairs else tensor)
            group = waiting.setdefault(flat.dtype, {})
            if len(flat) > _CHUNK // 1000:
                _look(report, name, flat)
            else:
                group[name] = flat
            if len(group) == 1000:
                _look_at_all(report, waiting.pop(flat.dtype))
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
        check_header(path)
        _count(report, each_tensor(path))
    except InputError as error:
        report.damaged.append(str(error).splitlines()[0].removeprefix(f"{path} "))
    return report
