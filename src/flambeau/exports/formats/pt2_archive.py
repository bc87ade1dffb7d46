"""Reads a .pt2 file of torch.export as data, JSON and raw tensors, without unpickling.

Source: the layout of torch.export.pt2_archive (PyTorch 2.8 to 2.15), read with the standard library.
`torch.export.load` unpickles what such a file may hold (sample inputs, tensor subclasses, opaque objects),
evaluates its shape expressions and compiles its names as Python; this reader does none of that.
Not for files before PyTorch 2.8, which hold their weights as pickles.
"""

import io
import json
import math
import re
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.errors import ZIP_ERRORS, json_object, why_no_json
from flambeau.recipes.checkpoints.safe_pickle import PickleRefused, pickle_contents

_MODEL = "models/model.json"
_WEIGHTS, _CONSTANTS = "data/weights/", "data/constants/"
_SAMPLE = "data/sample_inputs/model.pt"
_FIXED = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little"}
_NAMES = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(?:version|serialization_id)|models/model\.json"
    r"|data/weights/(?:weight_[0-9]{1,9}|model_weights_config\.json)"
    r"|data/constants/(?:tensor_[0-9]{1,9}|model_constants_config\.json)|data/sample_inputs/model\.pt"
)
_MOST_MEMBERS = 200_000  # one per tensor; the largest models have some thousands
_MOST_SIZES = 64  # dimensions of a tensor, torch's limit
# The numbers of torch.export's schema, several per line.
_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn",
    30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 34: "uint32", 35: "uint64",
}  # fmt: skip


class NotPlain(ValueError):
    """The file is damaged or holds more than a graph and tensors; the message says what."""


class NotWhole(NotPlain):
    """The bytes of the file are damaged, or it is of another format."""


@dataclass(frozen=True)
class PlainArchive:
    """A .pt2 file: the program's JSON; parameters, buffers and constants by name."""

    program: dict[str, Any]
    weights: dict[str, Tensor]
    constants: dict[str, Tensor]


def read_archive(data: bytes) -> PlainArchive:
    """Check every member of a .pt2 file and read those that are needed.

    NotPlain: damaged, of another layout, or with a member that needs unpickling or is code.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = _members(archive, len(data))
            for name, value in _FIXED.items():
                if name in members and archive.read(members[name]) != value:
                    raise NotPlain(f"{name} is not {value.decode()!r}")
            if _SAMPLE in members:
                _check_pickle(archive.read(members[_SAMPLE]), _SAMPLE)
            program = _json(archive, members, _MODEL)
            weights = _tensors(archive, members, _WEIGHTS, "weight_", "model_weights_config.json")
            constants = _tensors(
                archive, members, _CONSTANTS, "tensor_", "model_constants_config.json"
            )
    except NotPlain:
        raise
    except (*ZIP_ERRORS, OSError) as error:
        raise NotWhole(f"it is no whole .pt2 file: {str(error)[:200]}") from error
    if sys.byteorder != "little":
        raise NotPlain("it is for processors of the other byte order")
    return PlainArchive(program, weights, constants)


def _members(archive: zipfile.ZipFile, size: int) -> dict[str, str]:
    """The members: names below the root of the archive to names in it."""
    infos = archive.infolist()
    if not infos or len(infos) > _MOST_MEMBERS:
        raise NotPlain(f"it has {len(infos)} members")
    # zipfile opens the last archive inside a cut file.
    if min(info.header_offset for info in infos):
        raise NotWhole("it does not begin with an archive, or its end is missing")
    root = infos[0].filename.split("/")[0]
    members: dict[str, str] = {}
    total = 0
    for info in infos:
        name = info.filename.removeprefix(f"{root}/")
        total += info.file_size
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or total > size:
            raise NotPlain(f"{name[:80]!r} is compressed or encrypted, or larger than the file")
        if name in members:
            raise NotPlain(f"{name[:80]!r} is there twice")
        if not _NAMES.fullmatch(name):
            raise NotPlain(
                f"{name[:80]!r} is no part of a plain graph: it would be run or unpickled"
            )
        members[name] = info.filename
    return members


def _check_pickle(data: bytes, name: str) -> None:
    """Refuse a pickle of more than tensors and plain containers; it is analyzed, not loaded."""
    with tempfile.TemporaryDirectory(prefix="flambeau-pt2-") as folder:
        path = Path(folder, "member.pt")
        path.write_bytes(data)
        try:
            contents = pickle_contents(path)
        except PickleRefused as error:
            raise NotPlain(f"{name}: {str(error).removeprefix(str(path))[:200]}") from error
    if contents.refused:
        raise NotPlain(f"{name} would run {', '.join(contents.refused[:3])[:200]}")
    if not contents.weights_only:
        raise NotPlain(f"{name} is a pickle of more than tensors")


def _json(archive: zipfile.ZipFile, members: Mapping[str, str], name: str) -> dict[str, Any]:
    if name not in members:
        raise NotPlain(f"{name} is missing")
    try:
        content = json.loads(archive.read(members[name]).decode(), object_pairs_hook=json_object)
    except (ValueError, RecursionError) as error:
        raise NotPlain(f"{name}: {why_no_json(error)}") from error
    if not isinstance(content, dict):
        raise NotPlain(f"{name} is no object")
    return content


def _tensors(
    archive: zipfile.ZipFile, members: Mapping[str, str], folder: str, prefix: str, index: str
) -> dict[str, Tensor]:
    """The tensors that an index lists; those in one file share its memory."""
    config = _json(archive, members, folder + index).get("config")
    if not isinstance(config, dict):
        raise NotPlain(f"{folder}{index} lists no tensors")
    memory: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, stored in config.items():
        entry = stored if isinstance(stored, dict) else {}
        file = entry.get("path_name")
        if not isinstance(file, str) or not file.startswith(prefix) or entry.get("use_pickle"):
            raise NotPlain(f"{folder}{str(file)[:80]} ({name[:80]}) is pickled, or no tensor")
        if folder + file not in members:
            raise NotPlain(f"{folder}{file[:80]} is missing")
        if file not in memory:
            memory[file] = _bytes(archive.read(members[folder + file]))
        tensors[name] = _tensor(memory[file], entry.get("tensor_meta"), f"{folder}{file}")
    return tensors


def _bytes(data: bytes) -> Tensor:
    """(N,) uint8 in memory that torch allocates, aligned for its kernels."""
    held = torch.empty(len(data), dtype=torch.uint8)
    held.numpy()[:] = memoryview(data)
    return held


def _tensor(memory: Tensor, meta: object, file: str) -> Tensor:
    """The view of bytes that the index describes; torch itself checks only that it fits the storage."""
    facts = meta if isinstance(meta, dict) else {}
    dtype = dtype_of(facts.get("dtype"))
    sizes, strides = _numbers(facts.get("sizes")), _numbers(facts.get("strides"))
    (offset,) = _numbers([facts.get("storage_offset")])
    if len(sizes) != len(strides) or facts.get("layout") != 7:
        raise NotPlain(f"{file}: it is no dense tensor")
    steps = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    last = offset + steps if math.prod(sizes) else -1
    whole = len(memory) // dtype.itemsize
    if last >= whole:
        raise NotPlain(f"{file}: its tensor reaches beyond what the file holds")
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype)
    return memory[: whole * dtype.itemsize].view(dtype).as_strided(sizes, strides, offset)


def dtype_of(number: object) -> torch.dtype:
    """The dtype with a number of the format; NotPlain if this torch has none."""
    name = _DTYPES.get(number) if type(number) is int else None
    dtype = getattr(torch, name or "", None)
    if not isinstance(dtype, torch.dtype):
        raise NotPlain(f"there is no dtype {str(number)[:40]!r}")
    return dtype


def _numbers(values: object) -> list[int]:
    """Sizes, strides or offsets of a stored tensor, which are numbers and no expressions."""
    numbers = [value.get("as_int") if isinstance(value, dict) else None for value in _list(values)]
    whole = [number for number in numbers if type(number) is int and 0 <= number < 1 << 62]
    if len(whole) != len(numbers) or len(numbers) > _MOST_SIZES:
        raise NotPlain("a stored tensor has a size that is no number")
    return whole


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise NotPlain("a stored tensor has no list of sizes")
    return value
