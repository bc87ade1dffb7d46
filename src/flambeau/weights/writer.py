"""Writes weights into one new file, completely or not at all."""

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
from flambeau.unfinished_file import remove, unfinished
from flambeau.weights.readers import SAFETENSORS_DTYPES
from flambeau.weights.safetensors_file import MAX_HEADER

_PICKLES = (".pth", ".pt", ".bin")
_ENTRY = 120  # bytes of a header per tensor without its name: type, shape, two offsets
_SPREAD = 1 << 30  # bytes; a larger tensor over smaller storage is no weight but an attack


@dataclass(frozen=True)
class Written:
    """The result of `write_weights`; `num_shared`: tensors that shared memory, in full in .safetensors."""

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
    """Write tensors into a file, whole or not at all; converted tensors are all in memory at once.

    NAME.safetensors, with `source`, for people, in its metadata; or NAME.pth, .pt or .bin: a plain dict for
    weights_only. `dtype` is of floating tensors. InputError: another ending, `out` exists without `force`, a
    value beyond `dtype`, a type that the format lacks.
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
    filled = [tensor for tensor in tensors.values() if tensor.numel()]
    different = {(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in filled}
    return Written(len(tensors), size, len(filled) - len(different))


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
            # bf16 and fp32 both reach 3.4e38.
            other = "; --dtype bf16 can" if bool(torch.isfinite(finite.bfloat16()).all()) else ""
            raise InputError(f"{printable(name)} has values that {dtype} cannot hold{other}")


def _wanted(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _save_safetensors(
    out: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, source: str, disk: Disk
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
        storage = whole.untyped_storage().data_ptr()
        # The library refuses tensors that share memory, as tied weights do.
        ready[name] = whole.clone() if storage in storages else whole
        storages.add(storage)
    size = sum(len(json.dumps(name)) + _ENTRY for name in ready)
    if size > MAX_HEADER:
        raise InputError(f"the names take {size} bytes; safetensors allows {MAX_HEADER}")
    metadata = {"format": "pt", "source": source} if source else {"format": "pt"}

    def write(_: object, temporary: Path) -> None:
        # The library (0.8) writes under a name of its own, for its owner alone and not synced: in a folder
        # of our name, which is found if we are killed.
        (folder := unfinished(out)).mkdir()
        try:
            safetensors.torch.save_file(ready, folder / out.name, metadata)
            (folder / out.name).chmod(temporary.stat().st_mode)
            with (folder / out.name).open("rb+") as file:
                disk.sync(file.fileno())
            (folder / out.name).replace(temporary)
        except safetensors.SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        finally:
            remove(folder)

    return _write_atomically(out, write, disk)


def _save(out: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, disk: Disk) -> int:
    made: dict[Any, Tensor] = {}
    plain = {}
    for name, tensor in tensors.items():
        key: Any = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        key = key if tensor.numel() else name  # empty tensors have no storage
        if key not in made:
            # Torch warns when it makes a complex32 tensor.
            pairs = tensor.dtype is torch.complex32
            whole = torch.view_as_real(tensor) if pairs else tensor
            whole = whole.detach().to(_wanted(whole, None if pairs else dtype)).contiguous()
            if whole.untyped_storage().nbytes() > whole.numel() * whole.element_size():
                whole = whole.clone()  # or torch.save would write the whole storage
            made[key] = torch.view_as_complex(whole) if pairs else whole
        plain[name] = made[key]

    def write(put: Callable[[bytes | memoryview], int], _: Path) -> None:
        try:
            torch.save(plain, cast(IO[bytes], _Sink(put)))
        except RuntimeError as error:
            if error.__context__ is None:
                raise
            # Torch fails again when it closes its archive; the first error, a full disk or Ctrl-C, counts.
            raise error.__context__ from None

    return _write_atomically(out, write, disk)


class _Sink:
    """A file for torch.save."""

    def __init__(self, put: Callable[[bytes | memoryview], int]) -> None:
        self.write = put

    def flush(self) -> None:
        pass


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
