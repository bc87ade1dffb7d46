"""Which piece of a tensor a rank holds, and how the pieces of a checkpoint form the whole."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from flambeau.recipes.checkpoints.atomic_checkpoint import CheckpointDamaged, from_bytes, to_bytes

INDEX = "sharding.json"
INDEX_FORMAT = 1
STATE = "training_state.pt"


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor: the shape of the whole, offsets and sizes of the part."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Piece":
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a whole tensor, as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


@dataclass(frozen=True)
class Layout:
    """The pieces that this rank holds: of model and averages by name, of the optimizer's in its order."""

    model: Mapping[str, Piece]
    parameters: Sequence[Piece]


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard_model` or torch's `fully_shard` was applied; does not import FSDP."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def read_index(data: bytes, folder: Path) -> dict[str, Any]:
    """A sharded checkpoint's tensors by name: dtype, shape, and each piece's file, offsets, sizes."""
    index = json.loads(data)
    if index["format"] != INDEX_FORMAT:
        what = f"has format {index['format']!r}, this program reads {INDEX_FORMAT}"
        raise CheckpointDamaged(folder, INDEX, what)
    tensors: dict[str, Any] = index["tensors"]
    return tensors


def split_tensors(
    tensors: Mapping[str, Tensor], state: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Split a sharded checkpoint's tensors into model and averages; the optimizer's go into `state`."""
    kinds: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        kinds[kind][rest] = tensor
    for key, tensor in kinds["optimizer"].items():
        number, _, entry = key.partition("/")
        state["optimizer"]["state"][int(number)][entry] = tensor
    return kinds["model"], kinds["ema"] or None


def unsharded(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """A verified checkpoint's files, by name, as of a single process."""
    if INDEX not in files:
        return files
    tensors = {}
    shards: dict[str, dict[str, Tensor]] = {}
    for name, entry in read_index(files[INDEX], Path()).items():
        whole = tensors[name] = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for piece in entry["pieces"]:
            file = piece["file"]
            if file not in shards:
                shards[file] = safetensors.torch.load(files[file])
            Piece((), piece["offsets"], piece["sizes"]).of(whole).copy_(shards[file].pop(name))
    state = from_bytes(files[STATE])
    model, ema = split_tensors(tensors, state)
    plain = {"model.safetensors": weights_bytes(model), STATE: to_bytes(state)}
    return plain if ema is None else {**plain, "ema.safetensors": weights_bytes(ema)}


def weights_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A .safetensors file of these tensors, with the 'format: pt' that loaders expect."""
    return bytes(safetensors.torch.save(dict(tensors), metadata={"format": "pt"}))
