"""Reads weights from files and folders of any kind; nothing that a file names is run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from flambeau.errors import InputError, json_object, refusing, why_no_json
from flambeau.parallel.shard_layout import unsharded
from flambeau.recipes.checkpoints import checkpoint_tensors
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    MANIFEST,
    CheckpointDamaged,
    latest_checkpoint,
    read_checkpoint,
)
from flambeau.recipes.checkpoints.checkpoint_tensors import (
    nested_items,
    state_dicts_in,
    tensors_in,
)
from flambeau.recipes.checkpoints.safe_pickle import (
    Foreign,
    PickleRefused,
    load_pickle,
    pickle_contents,
)
from flambeau.recipes.checkpoints.state_dict_prefixes import strip_prefixes
from flambeau.run.folder.published_weights import published
from flambeau.run.folder.run_folder import RunFolder
from flambeau.terminal import printable
from flambeau.weights.not_weights import not_weights_reason, unreadable_reason
from flambeau.weights.npz_file import read_npz
from flambeau.weights.safetensors_file import MAX_HEADER, read_safetensors

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Weights:
    """A model's weights on the CPU, mostly mapped.

    Attributes:
        others: keys of further weights in the file.
        dropped: objects that the file names and that were not made.
        lost: where they would be, such as 'w (torch._utils._rebuild_sparse_tensor)'.
        unlisted: tensors that an index does not list, such as 'model-1.bin: w'.
    """

    tensors: Mapping[str, Tensor]
    source: str
    others: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()


def weights_kind(path: Path) -> str:
    """'safetensors', 'index' (of a model in several files), 'npz' or 'pickle', by a file's first bytes."""
    if path.suffix in (".json", ".npz"):
        return "index" if path.suffix == ".json" else "npz"
    with path.open("rb") as file:
        head = file.read(9)
    is_header = int.from_bytes(head[:8], "little") <= MAX_HEADER
    is_pickle = head[:4] == b"PK\3\4" or (head[:1] == b"\x80" and not is_header)
    named = path.suffix == ".safetensors" and not is_pickle
    return "safetensors" if named or (head[8:] == b"{" and is_header) else "pickle"


def open_weights(path: Path, *, key: str | None = None, drop_objects: bool = False) -> Weights:
    """The weights of a file, of a run folder or of a checkpoint.

    Args:
        path: .pth, .pt, .pth.tar, .bin, .safetensors, .npz, an .index.json, a run folder, or a checkpoint's.
        key: of several weights: in the file's dict; 'model' or 'ema' of a checkpoint.
        drop_objects: accept a file with other objects, such as a whole model.
    """
    if path.is_dir():
        return _from_folder(path, key)
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is no regular file")
    other = not_weights_reason(path) if path.exists() or path.is_symlink() else None
    if other is not None:
        raise InputError(f"{path} is {other}")
    if not path.exists():
        raise InputError(f"{path} does not exist: give a file of weights, or the folder of a run")
    kind = weights_kind(path)
    if kind == "index":
        return _from_index(path, key, drop_objects)
    if kind == "safetensors":
        if key is not None:
            raise InputError(f"{path} is a safetensors file, which has no keys: leave --key out")
        tensors = read_safetensors(path)
        if not tensors:
            raise InputError(f"{path} holds no weights: it is whole, and lists no tensor")
        return Weights(tensors, path.name)
    return (
        _from_npz(path, key, drop_objects)
        if kind == "npz"
        else _from_pickle(path, key, drop_objects)
    )


def _from_pickle(path: Path, key: str | None, drop_objects: bool) -> Weights:
    try:
        contents = pickle_contents(path)
        refused = contents.refused
        if contents.not_read and not refused and not drop_objects:
            raise InputError(
                f"{path} holds {', '.join(contents.not_read)}, which is not read here\n"
                "`flambeau convert --drop-objects` takes the rest, and names what it leaves out"
            )
        if refused and not drop_objects:
            names = ", ".join(refused[:3]) + (" ..." if len(refused) > 3 else "")
            what = "a TorchScript program, which torch.jit.load reads"
            what = what if contents.container == "TorchScript" else "a whole model or other objects"
            raise InputError(
                f"{path} names {names}: {what}; nothing was run\n"
                "`flambeau convert --drop-objects` takes the weights, and still runs nothing"
            )
        value = load_pickle(path, drop_objects=drop_objects, mapped=True)
    except PickleRefused as error:
        other = unreadable_reason(path, error)
        raise InputError(f"{path} is {other}" if other else str(error)) from error
    return _from_value(path, value, key, refused)


def _from_npz(path: Path, key: str | None, drop_objects: bool) -> Weights:
    try:
        value = read_npz(path)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path} is damaged: {str(error).removeprefix(f'{path}: ')}") from error
    weights = _from_value(path, value, key, ())
    if weights.lost and not drop_objects:
        raise InputError(
            f"{path} holds what is no number: {printable(', '.join(weights.lost))[:200]}\n"
            "`flambeau convert --drop-objects` takes the rest, and names what it leaves out"
        )
    return weights


def _from_value(path: Path, value: Any, key: str | None, refused: tuple[str, ...]) -> Weights:
    value = with_tensors(value)
    with refusing(str(path)):
        state_dicts = weights_in(value)
    taken, tensors = _chosen(path, state_dicts, key)
    source = f"{path.name}, key {taken}" if taken else path.name
    others = tuple(k for k in state_dicts if k != taken)
    return Weights(tensors, source, others, refused, tuple(_lost(value)))


def weights_in(value: Any) -> dict[str, dict[str, Tensor]]:
    """The state dicts in the result of `load_pickle`, by key; none if a tensor has no name."""
    state_dicts = state_dicts_in(value)
    return {} if any("" in tensors for tensors in state_dicts.values()) else state_dicts


def with_tensors(value: Any) -> Any:
    """Turns weights saved as arrays, in nested dicts, into tensors; other data stay."""
    if not isinstance(value, dict) or tensors_in(value):
        return value
    done: dict[int, Any] = {}  # each object is converted once, even if it is in several dicts

    def made(item: Any) -> Any:
        if id(item) not in done:
            done[id(item)] = _tensor_of(item)
        return done[id(item)]

    for item in value.values():
        if isinstance(item, dict) and id(item) not in done:
            done[id(item)] = {key: made(inner) for key, inner in item.items()}
    return {key: made(item) for key, item in value.items()}


def _tensor_of(array: Any) -> Any:
    name = getattr(getattr(array, "dtype", None), "name", "")
    if not isinstance(getattr(torch, name, None), torch.dtype):
        return array
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _lost(value: Any) -> Iterator[str]:
    """Paths of objects that were not made and hold nothing, and of arrays."""
    for location, item in nested_items(value):
        if isinstance(item, Foreign) and not item.state:
            yield f"{location[:200] or 'the object itself'} ({item.name})"
        elif type(item).__name__ == "ndarray":
            yield f"{location[:200]} (a NumPy array)"


def _chosen(
    path: Path, state_dicts: Mapping[str, dict[str, Tensor]], key: str | None
) -> tuple[str, dict[str, Tensor]]:
    if not state_dicts:
        raise InputError(f"{path} holds no weights by name")
    taken = next(iter(state_dicts)) if key is None else key
    names = printable(", ".join(state_dicts))[:1000]
    if taken not in state_dicts:
        raise InputError(f"{path} has no weights under {key!r}; there are: {names}")
    if key is None and len(state_dicts) > 1 and taken not in checkpoint_tensors.KEYS:
        raise InputError(
            f"{path} holds several weights, and which are meant is not known: {names}\n"
            f"`flambeau convert {path} OUT --key {printable(taken)}` takes those, and so on"
        )
    return taken, state_dicts[taken]


def _from_index(path: Path, key: str | None, drop_objects: bool) -> Weights:
    try:
        text = path.read_text(encoding="utf-8")
        weight_map = json.loads(text, object_pairs_hook=json_object)["weight_map"]
        files = dict.fromkeys(weight_map.values())
        if not files:
            raise InputError(f"{path} lists no weights: its weight_map is empty")
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f": {why_no_json(error)}" if isinstance(error, ValueError | RecursionError) else ""
        raise InputError(
            f"{path} is no index of weights (a JSON object with weight_map){why}"
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
    lost = tuple(
        f"{file}: {location}" for file, weights in held.items() for location in weights.lost
    )
    unlisted = tuple(
        f"{file}: {name}"
        for file, weights in held.items()
        for name in weights.tensors
        if name not in tensors
    )
    source = f"{path.name}, {len(files)} files"
    return Weights(tensors, source, dropped=tuple(dropped), lost=lost, unlisted=unlisted)


def _from_folder(path: Path, key: str | None) -> Weights:
    if key not in (None, "model", "ema"):
        raise InputError(f"{path} is a folder of flambeau: --key is model or ema, got {key!r}")
    folder = RunFolder(path)
    if (path / MANIFEST).exists():
        try:
            return _from_checkpoint(read_checkpoint(path).files, path.name, key)
        except CheckpointDamaged as error:
            raise InputError(str(error)) from error
    if not folder.config.is_file():
        raise InputError(f"{path} is neither the folder of a run nor of a checkpoint")
    result = published(folder)
    if result is not None and key is None:
        source = f"{path.name}, {result.weights} weights of step {result.step}"
        return Weights(read_safetensors(folder.weights), source)
    checkpoint, _ = latest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        raise InputError(f"{path} has no whole checkpoint yet")
    return _from_checkpoint(checkpoint.files, f"{path.name}, {checkpoint.folder.name}", key)


def _from_checkpoint(files: Mapping[str, bytes], source: str, key: str | None) -> Weights:
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
    """Tensors without the prefixes of wrappers and without `strip`, such as 'model'.

    InputError: two names would become one; no name has the prefix.
    """
    try:
        names = dict(strip_prefixes(tensors))
    except ValueError as error:
        raise InputError(str(error)) from error
    if strip is None:
        return names
    if any(name.startswith(f"{strip}.") for name in names):
        strip += "."  # or names would begin with the dot
    if not any(name.startswith(strip) for name in names):
        raise InputError(f"no name begins with {strip!r}; the first is {next(iter(names), None)!r}")
    stripped = {name.removeprefix(strip): tensor for name, tensor in names.items()}
    if len(stripped) < len(names) or "" in stripped:
        raise InputError(
            f"without {strip!r} two tensors would have one name, or one would have none"
        )
    return stripped
