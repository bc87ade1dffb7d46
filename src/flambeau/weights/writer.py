"""Weights into one new file, whole or not at all."""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from flambeau.errors import InputError, require_folder
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk, replacing
from flambeau.terminal import printable
from flambeau.weights.readers import SAFETENSORS_DTYPES
from flambeau.weights.safetensors_file import MAX_HEADER

_PICKLES = (".pth", ".pt", ".bin")
_ENTRY = 120  # bytes of a header beside a name: type, shape of four sides, two offsets
_SPREAD = 1 << 30  # bytes; a tensor of more than this, laid over less, is no weight but an attack


@dataclass(frozen=True)
class Written:
    """What `write_weights` did.

    Attributes:
        num_tensors, size_bytes: of the file.
        num_shared: tensors that were one in memory with another; .safetensors holds each in full.
    """

    num_tensors: int
    size_bytes: int
    num_shared: int


def write_weights(
    tensors: Mapping[str, Tensor],
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    source: str = "",
    force: bool = False,
    disk: Disk | None = None,
) -> Written:
    """Write tensors into a file, whole or not at all; what is converted is in memory at once.

    Args:
        tensors: by name.
        out: NAME.safetensors, or NAME.pth, .pt or .bin: a plain dict, as weights_only reads it.
        dtype: of all floating tensors; the others stay as they are.
        source: what they came from, for the metadata of a safetensors file.
        force: replace a file.
        disk: all file operations go through it.

    Raises:
        InputError: another ending, `out` exists, a value that `dtype` cannot hold, a tensor that the
            format has no type for.
    """
    if out.suffix != ".safetensors" and out.suffix not in _PICKLES:
        raise InputError(f"{out}: OUT must end with .safetensors, .pth, .pt or .bin")
    if out.is_dir() or (out.exists() and not force):
        raise InputError(f"{out} exists\nName another OUT, or give --force to replace the file")
    require_folder(out)
    for name, tensor in tensors.items():
        _check(name, tensor, dtype)
    if out.suffix == ".safetensors":
        size = _save_safetensors(out, tensors, dtype, source, disk or Disk())
    else:
        size = _save(out, tensors, dtype, disk or Disk())
    places = {(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors.values() if t.numel()}
    num_filled = sum(tensor.numel() > 0 for tensor in tensors.values())
    return Written(len(tensors), size, num_filled - len(places))


def _check(name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
    if name.encode(errors="replace").decode() != name:
        raise InputError(f"the name {printable(name)} is no text that a file could hold: rename it")
    size = tensor.numel() * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if size > max(_SPREAD, held):
        raise InputError(f"{printable(name)} is {size} bytes laid over {held}: that is no weight")
    if dtype is not None and tensor.dtype is torch.float4_e2m1fn_x2:
        raise InputError(f"{printable(name)} is of {tensor.dtype}, which torch cannot convert")
    if dtype is not None and tensor.is_floating_point():
        wide = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no isfinite
        finite = wide[torch.isfinite(wide)]
        if not bool(torch.isfinite(finite.to(dtype)).all()):
            # 3.4e38 is the limit of bf16 and of fp32 alike.
            other = "; --dtype bf16 can" if bool(torch.isfinite(finite.bfloat16()).all()) else ""
            raise InputError(f"{printable(name)} has values that {dtype} cannot hold{other}")


def _wanted(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _save_safetensors(
    out: Path,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    source: str,
    disk: Disk,
) -> int:
    ready: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        wanted = _wanted(tensor, dtype)
        if wanted not in SAFETENSORS_DTYPES.values() or name == "__metadata__":
            raise InputError(
                f"safetensors has no type for {printable(name)} of {wanted}; write a .pth"
            )
        whole = tensor.detach().to(wanted).contiguous()
        place = whole.untyped_storage().data_ptr()
        # The library refuses tensors that share memory, as tied weights do.
        ready[name] = whole.clone() if place in storages else whole
        storages.add(place)
    size = sum(len(json.dumps(name)) + _ENTRY for name in ready)
    if size > MAX_HEADER:
        raise InputError(f"the names take {size} bytes; safetensors allows {MAX_HEADER}")
    metadata = {"format": "pt", "source": source} if source else {"format": "pt"}

    def write(_: object, temporary: Path) -> None:
        try:
            safetensors.torch.save_file(ready, temporary, metadata)
        except safetensors.SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error

    return _write_atomically(out, write, disk)


def _save(out: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, disk: Disk) -> int:
    made: dict[Any, Tensor] = {}
    plain = {}
    for name, tensor in tensors.items():
        place: Any = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        place = place if tensor.numel() else name  # what is empty has no place
        if place not in made:
            # Of complex32 torch makes none without a warning.
            pairs = tensor.dtype is torch.complex32
            whole = torch.view_as_real(tensor) if pairs else tensor
            whole = whole.detach().to(_wanted(whole, None if pairs else dtype)).contiguous()
            if whole.untyped_storage().nbytes() > whole.numel() * whole.element_size():
                whole = whole.clone()  # else torch.save writes all of what it is a part of
            made[place] = torch.view_as_complex(whole) if pairs else whole
        plain[name] = made[place]

    def write(put: Callable[[bytes | memoryview], int], _: Path) -> None:
        try:
            torch.save(plain, cast(IO[bytes], _Sink(put)))
        except RuntimeError as error:
            if error.__context__ is None:
                raise
            # Closing its archive, torch raises over a full disk or Ctrl-C, which is what counts.
            raise error.__context__ from None

    return _write_atomically(out, write, disk)


class _Sink:
    """What torch.save writes to."""

    def __init__(self, put: Callable[[bytes | memoryview], int]) -> None:
        self.write = put

    def flush(self) -> None:
        """Nothing is held back."""


def _write_atomically(
    out: Path, write: Callable[[Callable[[bytes | memoryview], int], Path], None], disk: Disk
) -> int:
    with replacing(out, disk=disk) as temporary:
        file = disk.create(temporary)

        def put(data: bytes | memoryview) -> int:
            left = memoryview(data).cast("B")
            while left:
                left = left[disk.write(file, left) :]
            return len(data)

        try:
            write(put, temporary)
            disk.sync(file)
            return temporary.stat().st_size
        finally:
            disk.close(file)
