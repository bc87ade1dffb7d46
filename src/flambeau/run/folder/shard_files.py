"""The files of an FSDP checkpoint: every rank writes and reads its own pieces.

The folder keeps the contract of `atomic_checkpoint`: a hidden folder, every file written, synced and read
back, manifest.json with the size and SHA-256 of each, then the rename.

    step-00001200/shard-00000-of-00004.safetensors ...   the pieces of a rank, by name
    step-00001200/sharding.json                          where each piece lies in the whole
    step-00001200/training_state.pt                      the rest, as in every checkpoint
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from flambeau.parallel.ranks import Ranks
from flambeau.parallel.shard_layout import (
    INDEX,
    INDEX_FORMAT,
    STATE,
    Layout,
    Piece,
    put_back,
    read_index,
    weights_bytes,
)
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    CheckpointWriter,
    Disk,
    from_bytes,
    read_checkpoint,
    to_bytes,
)
from flambeau.run.folder.checkpointer import Restored, Snapshot, restored

_T = TypeVar("_T")


class FailedOnRanks(Exception):
    """Some ranks could not do their part: `errors` by rank, the same on all."""

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        super().__init__(errors)
        self.errors = errors


def save_sharded(
    folder: Path, snapshot: Snapshot, layout: Layout, ranks: Ranks, *, disk: Disk | None = None
) -> None:
    """Save what all ranks hold as one checkpoint, which outlives a power failure when this returns.

    Args:
        folder: the folder to make, the same on all ranks.
        snapshot: what this rank holds; its `state` and `meta` count on rank 0 alone.
        layout: where that lies in the whole.
        ranks: all that hold something.
        disk: all file operations of this rank go through it.

    Raises:
        FailedOnRanks: on all ranks; `folder` is not there.
    """
    writer = CheckpointWriter(folder, disk=disk)
    state = dict[str, Any]()
    held: dict[str, tuple[Piece, Tensor]] = {}
    name_of = f"shard-{{:05d}}-of-{ranks.world:05d}.safetensors".format

    def choose() -> dict[str, Any]:
        mine, rest = _held(snapshot, layout, is_first=ranks.is_first)
        held.update(mine)
        state.update(rest)
        return {name: (str(tensor.dtype), piece) for name, (piece, tensor) in held.items()}

    def write() -> dict[str, Any]:
        own = CheckpointWriter(folder, temporary=temporary, disk=disk)
        tensors = {name: tensor.contiguous() for name, (_, tensor) in held.items()}
        own.write(name_of(ranks.rank), weights_bytes(tensors))
        own.read_back()
        return own.entries

    def finish() -> None:
        writer.write(STATE, to_bytes(state))
        writer.write(INDEX, index)
        writer.read_back()
        for entries in written:
            writer.entries |= entries
        writer.finish(snapshot.meta)

    try:
        chosen = _on_all(ranks, choose)
        index = _index(chosen, name_of)
        temporary = _on_all(ranks, writer.start if ranks.is_first else Path)[0]
        written = _on_all(ranks, write)
        _on_all(ranks, finish if ranks.is_first else lambda: None)
    except BaseException:
        if ranks.is_first:
            writer.undo()
        raise


def _on_all(ranks: Ranks, work: Callable[[], _T]) -> list[_T]:
    """What `work` returns on each rank; if it fails on one, all raise."""
    value: Any = None
    error: Exception | None = None
    try:
        value = work()
    except Exception as caught:  # raised by all, below
        error = caught
    outcomes = ranks.gather((value, error))
    errors = {rank: failed for rank, (_, failed) in enumerate(outcomes) if failed is not None}
    if errors:
        raise FailedOnRanks(errors) from error
    return [value for value, _ in outcomes]


def _held(
    snapshot: Snapshot, layout: Layout, *, is_first: bool
) -> tuple[dict[str, tuple[Piece, Tensor]], dict[str, Any]]:
    """The pieces that this rank writes, by name, and the state without those of its tensors."""
    held = {f"model/{name}": (layout.model[name], t) for name, t in snapshot.model.items()}
    for name, tensor in (snapshot.ema or {}).items():
        held[f"ema/{name}"] = layout.model[name], tensor
    optimizer = snapshot.state["optimizer"]
    rest: dict[int, dict[str, Any]] = {}
    for number, entries in optimizer["state"].items():
        rest[number] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim():
                held[f"optimizer/{number}/{key}"] = layout.parameters[number], value
            else:
                rest[number][key] = value
    for name, (piece, tensor) in held.items():
        if tuple(tensor.shape) != piece.sizes:
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}, its piece {piece.sizes}: only what "
                "is laid out as a parameter, or a single number of shape (), can be saved in pieces"
            )
    held = {  # what several ranks hold whole is written by rank 0
        name: (piece, tensor)
        for name, (piece, tensor) in held.items()
        if (is_first if piece.sizes == piece.shape else tensor.numel())
    }
    return held, {**snapshot.state, "optimizer": {**optimizer, "state": rest}}


def _index(chosen: Sequence[Mapping[str, Any]], name_of: Callable[[int], str]) -> bytes:
    """The content of sharding.json."""
    tensors: dict[str, dict[str, Any]] = {}
    for rank, pieces in enumerate(chosen):
        for name, (dtype, piece) in pieces.items():
            new = {"dtype": dtype.removeprefix("torch."), "shape": piece.shape, "pieces": []}
            place = {"file": name_of(rank), "offsets": piece.offsets, "sizes": piece.sizes}
            tensors.setdefault(name, new)["pieces"].append(place)
    for name, entry in tensors.items():
        held = sum(math.prod(place["sizes"]) for place in entry["pieces"])
        assert held == math.prod(entry["shape"]), f"the pieces of {name} do not make up the whole"
    return json.dumps({"format": INDEX_FORMAT, "tensors": tensors}, indent=1).encode() + b"\n"


# ---------------------------------------------------------------- reading


def restore_pieces(
    folder: Path, layout: Layout, *, rank: int, world: int, disk: Disk | None = None
) -> Restored:
    """Read what a rank holds of a checkpoint, whatever number of ranks has written it.

    A rank reads the files that have something for it, and those whose number is its own among the ranks,
    so that together they verify all. What does not fit the layout comes whole, for `why_not_loadable`.

    Args:
        folder: a checkpoint, in pieces or not.
        layout: what this rank holds.
        rank: of this process.
        world: how many read.
        disk: all file operations go through it.

    Raises:
        CheckpointDamaged: something that this rank has read is not as it was saved.
        OSError: it could not be read for a reason that says nothing about it.
    """
    checkpoint = read_checkpoint(folder, only=lambda name: name in (INDEX, STATE), disk=disk)
    if INDEX not in checkpoint.files:
        return _cut(restored(read_checkpoint(folder, disk=disk)), layout)
    saved = read_index(checkpoint.files[INDEX], folder)
    tensors, wanted = {}, {}
    for name, entry in saved.items():
        wanted[name] = _wanted(name, entry["shape"], layout)
        tensors[name] = torch.empty(wanted[name].sizes, dtype=getattr(torch, entry["dtype"]))
    parts: dict[str, list[tuple[str, Piece, Piece]]] = {}
    for name, entry in saved.items():
        for piece in entry["pieces"]:
            both = _overlap(Piece((), piece["offsets"], piece["sizes"]), wanted[name])
            if both is not None:
                parts.setdefault(piece["file"], []).append((name, *both))

    def is_mine(name: str) -> bool:
        number = name.removeprefix("shard-")[:5]
        return name in parts or (number.isdecimal() and int(number) % world == rank)

    for file, data in read_checkpoint(folder, only=is_mine, disk=disk).files.items():
        found = safetensors.torch.load(data)
        for name, source, target in parts.get(file, ()):
            target.of(tensors[name]).copy_(source.of(found[name]))
    state = from_bytes(checkpoint.files[STATE])
    model, ema = put_back(tensors, state)
    return Restored(folder.name, model, ema, state, checkpoint.meta)


def _overlap(saved: Piece, wanted: Piece) -> tuple[Piece, Piece] | None:
    """Where what two pieces of a tensor share lies in each of them; None if they share nothing."""
    low = [max(pair) for pair in zip(saved.offsets, wanted.offsets, strict=True)]
    ends = [[o + n for o, n in zip(p.offsets, p.sizes, strict=True)] for p in (saved, wanted)]
    sizes = tuple(min(pair) - start for *pair, start in zip(*ends, low, strict=True))
    if any(size <= 0 for size in sizes):
        return None
    starts = [
        tuple(at - offset for at, offset in zip(low, piece.offsets, strict=True))
        for piece in (saved, wanted)
    ]
    return Piece((), starts[0], sizes), Piece((), starts[1], sizes)


def _wanted(name: str, shape: Sequence[int], layout: Layout) -> Piece:
    """What this rank holds of a saved tensor."""
    kind, _, rest = name.partition("/")
    piece = layout.model.get(rest)
    if kind == "optimizer":
        number = int(rest.partition("/")[0])
        piece = layout.parameters[number] if number < len(layout.parameters) else None
    return piece if piece is not None and piece.shape == tuple(shape) else Piece.whole(shape)


def _cut(found: Restored, layout: Layout) -> Restored:
    """What this rank holds of a checkpoint that was read whole."""

    def part(name: str, tensor: Tensor) -> Tensor:
        return _wanted(name, tensor.shape, layout).of(tensor).clone()

    for number, entries in found.state["optimizer"]["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim():
                entries[key] = part(f"optimizer/{number}/", value)
    ema = found.ema
    return replace(
        found,
        model={name: part(f"model/{name}", t) for name, t in found.model.items()},
        ema=None if ema is None else {name: part(f"ema/{name}", t) for name, t in ema.items()},
    )
