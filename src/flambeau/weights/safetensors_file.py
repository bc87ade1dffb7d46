"""Files of safetensors: what the header claims, compared with the file, and the tensors one by one."""

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
    """The tensors of a file, mapped where safetensors does so.

    Raises:
        InputError: it is not there, or damaged.
    """
    return dict(each_tensor(path))


def each_tensor(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file with their names; whoever keeps none needs no memory for all.

    Raises:
        InputError: as `read_safetensors`.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
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
    """Compare what the header of a file claims with the file; the library lets names stand there twice.

    Raises:
        InputError: what is wrong, without the path; what only the library knows is left to it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise InputError(
                f"the header should have {length} bytes; the file has {size}, the format allows {MAX_HEADER}"
            )
        text = file.read(length)
    entries = _parsed(text)
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


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_entry)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the header cannot be read: {why_no_json(error)}") from error


def _entry(pairs: list[tuple[str, Any]]) -> Any:
    """Of a tensor the end of its data, or what is wrong: of many tensors, lists would cost memory."""
    found = json_object(pairs)
    places, shape = found.get("data_offsets"), found.get("shape")
    if not (isinstance(places, list) and isinstance(shape, list)):
        return found  # the table itself, or its metadata
    if len(places) != 2 or not all(map(_is_size, places)) or places[0] > places[1]:
        return _Fault(f"lies at {places}, which is no place: first and end are expected")
    if not all(map(_is_size, shape)):
        return _Fault(f"has the shape {shape}, which no tensor can have")
    return places[1]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
