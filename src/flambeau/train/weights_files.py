"""Weights out of files and folders of any kind, and into one new file; nothing that a file names is run."""

import errno
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from flambeau.data.errors import InputError
from flambeau.recipes.checkpoints import atomic_checkpoint as atomic
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    MANIFEST,
    CheckpointDamaged,
    Disk,
    latest_checkpoint,
    read_checkpoint,
)
from flambeau.recipes.checkpoints.checkpoint_tensors import state_dicts_in
from flambeau.recipes.checkpoints.prefixes import strip_prefixes
from flambeau.recipes.checkpoints.safe_pickle import (
    PickleRefused,
    load_pickle,
    pickle_contents,
)
from flambeau.train.folder import RunFolder
from flambeau.train.pieces import unsharded
from flambeau.train.result import published

SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAME_OF = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_PICKLES = (".pth", ".pt", ".bin")
_SPREAD = 1 << 30  # bytes; a tensor of more than this, laid over less, is no weight but an attack


@dataclass(frozen=True)
class Weights:
    """The weights of a model, on the CPU, mostly mapped from the file and not in memory.

    Attributes:
        tensors: by name.
        source: where they came from, for people: 'model.pth, key state_dict'.
        others: keys under which there are other weights.
        dropped: what the file names and was not made.
    """

    tensors: Mapping[str, Tensor]
    source: str
    others: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """What `write_weights` did.

    Attributes:
        num_tensors, size_bytes: of the file.
        num_shared: tensors that were one in memory with another; the file holds each of them.
    """

    num_tensors: int
    size_bytes: int
    num_shared: int


def weights_kind(path: Path) -> str:
    """'safetensors', 'index' (of a model in several files) or 'pickle', by what a file begins with."""
    if path.suffix == ".json":
        return "index"
    with path.open("rb") as file:
        head = file.read(9)
    begins = head[8:] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER
    return "safetensors" if begins or path.suffix == ".safetensors" else "pickle"


def open_weights(path: Path, *, key: str | None = None, drop_objects: bool = False) -> Weights:
    """The weights of a file, or of the folder of a run or checkpoint.

    Args:
        path: .pth, .pt, .pth.tar, .bin, .safetensors, the .index.json of several of them, the folder of
            a run, or of one checkpoint.
        key: which of several: a key of the dict in the file; 'model' or 'ema' of a checkpoint.
        drop_objects: take the weights of a file that names other objects too, such as a whole model.

    Raises:
        InputError: not there, damaged, no weights, or it names objects.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist")
    if path.is_dir():
        return _of_folder(path, key)
    kind = weights_kind(path)
    if kind == "index":
        return _of_index(path, key, drop_objects)
    if kind == "safetensors":
        if key is not None:
            raise InputError(f"{path} is a safetensors file, which has no keys: leave --key out")
        return Weights(read_safetensors(path), path.name)
    return _of_pickle(path, key, drop_objects)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped where safetensors does so.

    Raises:
        InputError: it is damaged.
    """
    try:
        return dict(safetensors.torch.load_file(path))
    except (ValueError, RuntimeError, KeyError, safetensors.SafetensorError) as error:
        raise InputError(
            f"{path} is no whole safetensors file: {error}\n`flambeau verify {path}` says more"
        ) from error


def _of_pickle(path: Path, key: str | None, drop_objects: bool) -> Weights:
    try:
        refused = pickle_contents(path).refused
        if refused and not drop_objects:
            names = ", ".join(refused[:3]) + (" ..." if len(refused) > 3 else "")
            raise InputError(
                f"{path} names {names}: a whole model or other objects; nothing was run\n"
                "`flambeau convert --drop-objects` takes the weights, and still runs nothing"
            )
        found = state_dicts_in(load_pickle(path, drop_objects=drop_objects, mapped=True))
    except PickleRefused as error:
        raise InputError(str(error)) from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: {error}") from error
    taken, tensors = _chosen(path, found, key)
    source = f"{path.name}, key {taken}" if taken else path.name
    return Weights(tensors, source, tuple(k for k in found if k != taken), refused)


def _chosen(
    path: Path, found: Mapping[str, dict[str, Tensor]], key: str | None
) -> tuple[str, dict[str, Tensor]]:
    if not found or list(next(iter(found.values()))) == [""]:
        raise InputError(f"{path} holds no weights by name")
    taken = next(iter(found)) if key is None else key
    if taken not in found:
        raise InputError(f"{path} has no weights under {key!r}; there are: {', '.join(found)}")
    return taken, found[taken]


def _of_index(path: Path, key: str | None, drop_objects: bool) -> Weights:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = dict.fromkeys(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path} is no index of weights (a JSON object with weight_map)"
        ) from error
    held: dict[str, Weights] = {}
    for file in files:
        is_name = isinstance(file, str) and Path(file).name == file and file[-5:] != ".json"
        if not is_name or not (path.parent / file).is_file():
            raise InputError(f"{path} lists {file!r}, which is no file of weights beside it")
        held[file] = open_weights(path.parent / file, key=key, drop_objects=drop_objects)
    for name, file in weight_map.items():
        if name not in held[file].tensors:
            raise InputError(f"{path} lists {name!r}, which {file} does not hold")
    tensors = {name: held[file].tensors[name] for name, file in weight_map.items()}
    dropped = dict.fromkeys(name for weights in held.values() for name in weights.dropped)
    return Weights(tensors, f"{path.name}, {len(files)} files", dropped=tuple(dropped))


def _of_folder(path: Path, key: str | None) -> Weights:
    if key not in (None, "model", "ema"):
        raise InputError(f"{path} is a folder of flambeau: --key is model or ema, got {key!r}")
    folder = RunFolder(path)
    if (path / MANIFEST).exists():
        try:
            return _of_checkpoint(read_checkpoint(path).files, path.name, key)
        except CheckpointDamaged as error:
            raise InputError(str(error)) from error
    if folder.read_config() is None:
        raise InputError(f"{path} is neither the folder of a run nor of a checkpoint")
    result = published(folder)
    if result is not None and key is None:
        source = f"{path.name}, {result.weights} weights of step {result.step}"
        return Weights(read_safetensors(folder.weights), source)
    checkpoint, _ = latest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        raise InputError(f"{path} has no whole checkpoint yet")
    return _of_checkpoint(checkpoint.files, f"{path.name}, {checkpoint.folder.name}", key)


def _of_checkpoint(files: Mapping[str, bytes], source: str, key: str | None) -> Weights:
    whole = unsharded(files)
    there = [name for name in ("ema", "model") if f"{name}.safetensors" in whole]
    taken = key or next(iter(there), "model")
    if taken not in there:
        raise InputError(
            f"{source} holds no {taken} weights; there are: {', '.join(there) or 'none'}"
        )
    tensors = safetensors.torch.load(whole[f"{taken}.safetensors"])
    return Weights(tensors, f"{source}, {taken}", tuple(name for name in there if name != taken))


def plain_names(tensors: Mapping[str, Tensor], strip: str | None = None) -> dict[str, Tensor]:
    """Tensors under the names of the model: without what wrappers prefix, and without `strip`.

    Args:
        tensors: by name.
        strip: a prefix of the user's, such as 'model.'; other names stay.

    Raises:
        InputError: two names would become one; no name has the prefix.
    """
    try:
        names = dict(strip_prefixes(tensors))
    except ValueError as error:
        raise InputError(str(error)) from error
    if strip is None:
        return names
    if not any(name.startswith(strip) for name in names):
        raise InputError(f"no name begins with {strip!r}; the first is {next(iter(names), None)!r}")
    stripped = {name.removeprefix(strip): tensor for name, tensor in names.items()}
    if len(stripped) < len(names):
        raise InputError(f"without {strip!r} two tensors would have one name")
    return stripped


def write_weights(
    tensors: Mapping[str, Tensor],
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    source: str = "",
    force: bool = False,
    disk: Disk | None = None,
) -> Written:
    """Write tensors into a file, whole or not at all, one tensor in memory at a time (.safetensors).

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
        raise InputError(f"{out}: OUT ends with .safetensors, .pth, .pt or .bin")
    if out.is_dir() or (out.exists() and not force):
        raise InputError(f"{out} exists\nName another OUT, or give --force to replace the file")
    for name, tensor in tensors.items():
        _check(name, tensor, dtype)
    if out.suffix == ".safetensors":
        size = _write(out, _safetensors(tensors, dtype, source), disk or Disk())
    else:
        size = _save(out, tensors, dtype, disk or Disk())
    places = {(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors.values() if t.numel()}
    num_filled = sum(tensor.numel() > 0 for tensor in tensors.values())
    return Written(len(tensors), size, num_filled - len(places))


def _check(name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
    size, held = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if size > max(_SPREAD, held):
        raise InputError(f"{name} is {size} bytes laid over {held}: that is no weight")
    if dtype is not None and tensor.is_floating_point():
        wide = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no isfinite
        finite = wide[torch.isfinite(wide)]
        if not bool(torch.isfinite(finite.to(dtype)).all()):
            # 3.4e38 is the limit of bf16 and of fp32 alike.
            other = "; --dtype bf16 can" if bool(torch.isfinite(finite.bfloat16()).all()) else ""
            raise InputError(f"{name} has values that {dtype} cannot hold{other}")


def _wanted(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _safetensors(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, source: str
) -> Iterator[bytes | memoryview]:
    """The format: length of the header, header in JSON, the tensors one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if source:
        header["__metadata__"]["source"] = source
    place = 0
    wanted = {name: _wanted(tensor, dtype) for name, tensor in tensors.items()}
    # Large elements first, so that each tensor lies on a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-wanted[name].itemsize, name))
    for name in order:
        if wanted[name] not in _NAME_OF or name == "__metadata__":
            raise InputError(f"safetensors has no type for {name} of {wanted[name]}; write a .pth")
        size = tensors[name].numel() * wanted[name].itemsize
        header[name] = {
            "dtype": _NAME_OF[wanted[name]],
            "shape": list(tensors[name].shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise InputError(
            f"the header would have {len(text)} bytes; safetensors allows {MAX_HEADER}"
        )
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        if tensors[name].numel():
            flat = tensors[name].detach().to(wanted[name]).reshape(-1)
            yield flat.view(torch.uint8).numpy().data


def _write(out: Path, parts: Iterator[bytes | memoryview], disk: Disk) -> int:
    def write(put: Callable[[bytes | memoryview], int]) -> None:
        for part in parts:
            put(part)

    return _write_atomically(out, write, disk)


def _save(out: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, disk: Disk) -> int:
    made: dict[Any, Tensor] = {}
    plain = {}
    for name, tensor in tensors.items():
        place: Any = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        place = place if tensor.numel() else name  # what is empty has no place
        if place not in made:
            whole = tensor.detach().to(_wanted(tensor, dtype)).contiguous()
            if whole.untyped_storage().nbytes() > whole.numel() * whole.element_size():
                whole = whole.clone()  # else torch.save writes all of what it is a part of
            made[place] = whole
        plain[name] = made[place]

    def write(put: Callable[[bytes | memoryview], int]) -> None:
        torch.save(plain, cast(IO[bytes], _Sink(put)))

    return _write_atomically(out, write, disk)


class _Sink:
    """What torch.save writes to."""

    def __init__(self, put: Callable[[bytes | memoryview], int]) -> None:
        self.write = put

    def flush(self) -> None:
        """Nothing is held back."""


def _write_atomically(
    out: Path, write: Callable[[Callable[[bytes | memoryview], int]], None], disk: Disk
) -> int:
    """As `write_file` of atomic_checkpoint, for what need not be in memory at once."""
    temporary, written = atomic._hidden(out, "tmp"), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    file = disk.create(temporary)

    def put(data: bytes | memoryview) -> int:
        nonlocal written
        left = memoryview(data).cast("B")
        while left:
            count = disk.write(file, left)
            written, left = written + count, left[count:]
        return len(data)

    try:
        try:
            write(put)
            disk.sync(file)
        finally:
            disk.close(file)
        disk.rename(temporary, out)
    except BaseException as error:
        with suppress(OSError):
            disk.remove(temporary)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO):
            error.filename = str(out)
        raise
    disk.sync_folder(out.parent)
    return written
