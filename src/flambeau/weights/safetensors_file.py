"""Files of safetensors: checks the header's claims against the file, and reads the tensors one by one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from flambeau.errors import InputError, json_object, why_no_json

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, safetensors.SafetensorError)


class _Fault(str):
    """What is wrong with the entry of one tensor."""


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped where the library maps them; InputError: missing or damaged."""
    return dict(each_tensor(path))


def each_tensor(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file with their names, one at a time in memory; errors likewise."""
    if path.is_fifo():  # it would be waited for
        raise InputError(f"{path} is a pipe, and no file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
    except _ERRORS as error:
        what = _fault_of_header(path) or str(error).partition("\n")[0]
        raise InputError(
            f"{path} cannot be read as safetensors: {what}\n`flambeau verify {path}` says more"
        ) from error


def _fault_of_header(path: Path) -> str | None:
    try:
        check_header(path)
    except (InputError, OSError) as error:
        return str(error) if isinstance(error, InputError) else None
    return None


def check_header(path: Path) -> None:
    """Check the header's claims against the file; the library accepts duplicate names.

    InputError: what is wrong, without the path; other checks are left to the library.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise InputError(
                f"the header should have {length} bytes; the file has {size}, the format allows {MAX_HEADER}"
            )
        text = file.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_entry)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the header cannot be read: {why_no_json(error)}") from error
    if not isinstance(entries, dict):
        raise InputError("the header is a JSON text, and no table of tensors")
    entries.pop("__metadata__", None)
    for name, end in entries.items():
        if isinstance(end, _Fault):
            raise InputError(f"the tensor {name[:80]!r} {end}"[:200])
    ends = [end for end in entries.values() if isinstance(end, int)]
    end = 8 + length + max(ends, default=0)
    if end > size:
        raise InputError(f"truncated: its tensors end at byte {end} of {size}")


def _entry(pairs: list[tuple[str, Any]]) -> Any:
    """The end of a tensor's data, or what is wrong: for many tensors, keeping the lists would cost memory."""
    entry = json_object(pairs)
    offsets, shape = entry.get("data_offsets"), entry.get("shape")
    if not (isinstance(offsets, list) and isinstance(shape, list)):
        return entry  # the table itself, or its metadata
    if len(offsets) != 2 or not all(map(_is_size, offsets)) or offsets[0] > offsets[1]:
        return _Fault(f"has the data_offsets {offsets}; a start and an end are expected")
    if not all(map(_is_size, shape)):
        return _Fault(f"has the shape {shape}, which no tensor can have")
    return offsets[1]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
