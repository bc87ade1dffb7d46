"""Checkpoints of an FSDP run: every rank writes and reads its own pieces.

The folder keeps the contract of `atomic_checkpoint`: a hidden folder, every file written, synced and read
back, manifest.json with the size and SHA-256 of each, then the rename.

    step-00001200/shard-00000-of-00004.safetensors ...   the pieces of a rank, by name
    step-00001200/sharding.json                          where each piece belongs in the whole tensor
    step-00001200/training_state.pt                      the rest, as in every checkpoint
"""

import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from flambeau.errors import InputError
from flambeau.parallel.ranks import FailedElsewhere, Ranks
from flambeau.parallel.shard_layout import (
    INDEX,
    INDEX_FORMAT,
    STATE,
    Layout,
    Piece,
    read_index,
    split_tensors,
    weights_bytes,
)
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    CheckpointDamaged,
    CheckpointWriter,
    Disk,
    from_bytes,
    read_checkpoint,
)
from flambeau.run.folder.checkpointer import (
    Checkpointer,
    Restored,
    Snapshot,
    check_name,
    reading,
    restored,
    state_bytes,
)
from flambeau.run.options.advice import Advice

_T = TypeVar("_T")


class ShardedCheckpointer(Checkpointer):
    """`Checkpointer` for a run whose tensors are spread over ranks.

    Every rank makes one, with a folder that all share, and calls the same methods. Each writes its pieces,
    and rank 0 the rest. A failure is SaveFailed on rank 0 and FailedElsewhere on the others.
    """

    def __init__(
        self,
        root: Path,
        layout: Layout,
        ranks: Ranks,
        *,
        keep: int,
        disk: Disk | None = None,
        advice: Advice = Advice(),
    ) -> None:
        check_shared(root, ranks)
        super().__init__(root, keep=keep, disk=disk, advice=advice)
        self._layout = layout
        # A separate group: the thread's collectives must not mix with those of the training.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._ranks = Ranks(ranks.rank, ranks.world, self._group)

    def _read(self, folder: Path) -> Restored:
        rank, world = self._ranks.rank, self._ranks.world
        return restore_pieces(folder, self._layout, rank=rank, world=world, disk=self._disk)

    def _save(self, folder: Path, snapshot: Snapshot) -> None:
        try:
            save_sharded(folder, snapshot, self._layout, self._ranks, disk=self._disk)
        except FailedOnRanks as failed:
            rank, error = min(failed.errors.items())
            if not self._ranks.is_first:  # rank 0 alone reports it to the user
                raise FailedElsewhere(f"{type(error).__name__}: {error}") from failed
            where = f"by rank {rank}: " if rank else ""
            if isinstance(error, (OSError, CheckpointDamaged)):
                raise self._failed(folder, error, by=where) from error
            raise RuntimeError(f"checkpoint {folder} was not written {where}{error!r}") from error


def check_shared(folder: Path, ranks: Ranks) -> None:
    """Check that a folder is the same for all ranks; every rank calls it.

    InputError on rank 0, naming the ranks that do not see its file; FailedElsewhere on the others.
    """
    # A leftover's name: if this process dies now, the next start removes the file.
    name = ranks.broadcast(f".shared.{secrets.token_hex(8)}.tmp")
    ranks.first((folder / name).touch)
    seen = ranks.gather((ranks.host, (folder / name).exists()))

    def judge() -> None:
        (folder / name).unlink()
        blind = [f"rank {rank} ({host})" for rank, (host, sees) in enumerate(seen) if not sees]
        if blind:
            raise InputError(
                f"{folder.absolute()} of rank 0 ({ranks.host}) is not there for {', '.join(blind)}: with "
                "shard = 'fsdp' every rank writes its part, so choose one on a file system that all share"
            )

    ranks.first(judge)


# ---------------------------------------------------------------- writing


class FailedOnRanks(Exception):
    """Some ranks could not do their part: `errors` by rank, the same on all."""

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        super().__init__(errors)
        self.errors = errors


def save_sharded(
    folder: Path, snapshot: Snapshot, layout: Layout, ranks: Ranks, *, disk: Disk | None = None
) -> None:
    """Save all ranks' pieces as one checkpoint; once this returns, it survives a power failure.

    `state` and `meta` are rank 0's. FailedOnRanks on all ranks: `folder` was not made.
    """
    writer = CheckpointWriter(folder, disk=disk)
    state = dict[str, Any]()
    held: dict[str, tuple[Piece, Tensor]] = {}
    name_of = f"shard-{{:05d}}-of-{ranks.world:05d}.safetensors".format

    def choose() -> dict[str, Any]:
        mine, rest = _split(snapshot, layout, is_first=ranks.is_first)
        held.update(mine)
        state.update(rest)
        return {name: (str(tensor.dtype), piece) for name, (piece, tensor) in held.items()}

    def write() -> dict[str, Any]:
        rank_writer = CheckpointWriter(folder, temporary=temporary, disk=disk)
        tensors = {name: tensor.contiguous() for name, (_, tensor) in held.items()}
        rank_writer.write(name_of(ranks.rank), weights_bytes(tensors))
        rank_writer.read_back()
        return rank_writer.entries

    def finish() -> None:
        writer.write(STATE, state_bytes(state))
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
    except Exception as caught:  # raised below, by all ranks
        error = caught
    outcomes = ranks.gather((value, error))
    errors = {rank: failed for rank, (_, failed) in enumerate(outcomes) if failed is not None}
    if errors:
        raise FailedOnRanks(errors) from error
    return [value for value, _ in outcomes]


def _split(
    snapshot: Snapshot, layout: Layout, *, is_first: bool
) -> tuple[dict[str, tuple[Piece, Tensor]], dict[str, Any]]:
    """The pieces that this rank writes, by name, and the state without those tensors."""
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
    held = {  # rank 0 writes what every rank holds whole
        name: (piece, tensor)
        for name, (piece, tensor) in held.items()
        if (is_first if piece.sizes == piece.shape else tensor.numel())
    }
    return held, {**snapshot.state, "optimizer": {**optimizer, "state": rest}}


def _index(chosen: Sequence[Mapping[str, Any]], name_of: Callable[[int], str]) -> bytes:
    tensors: dict[str, dict[str, Any]] = {}
    for rank, pieces in enumerate(chosen):
        for name, (dtype, piece) in pieces.items():
            new = {"dtype": dtype.removeprefix("torch."), "shape": piece.shape, "pieces": []}
            location = {"file": name_of(rank), "offsets": piece.offsets, "sizes": piece.sizes}
            tensors.setdefault(name, new)["pieces"].append(location)
    for name, entry in tensors.items():
        held = sum(math.prod(location["sizes"]) for location in entry["pieces"])
        assert held == math.prod(entry["shape"]), f"the pieces of {name} do not make up the whole"
    return json.dumps({"format": INDEX_FORMAT, "tensors": tensors}, indent=1).encode() + b"\n"


# ---------------------------------------------------------------- reading


def restore_pieces(
    folder: Path, layout: Layout, *, rank: int, world: int, disk: Disk | None = None
) -> Restored:
    """Read this rank's pieces of a checkpoint of any number of ranks.

    A rank reads the files with something for it, and a share of the others, so that all are verified. Tensors
    that do not fit the layout are returned whole, for `why_not_loadable`.

    Raises:
        CheckpointDamaged: what this rank has read is not as saved.
        OSError: a file could not be read, which says nothing about its content.
    """
    checkpoint = read_checkpoint(folder, only=lambda name: name in (INDEX, STATE), disk=disk)
    if INDEX not in checkpoint.files:
        return _cut(restored(read_checkpoint(folder, disk=disk)), layout)
    check_name(folder, checkpoint.meta)
    saved = read_index(checkpoint.files[INDEX], folder)
    tensors, wanted = {}, {}
    for name, entry in saved.items():
        wanted[name] = _wanted(name, entry["shape"], layout)
        tensors[name] = torch.empty(wanted[name].sizes, dtype=getattr(torch, entry["dtype"]))
    overlaps: dict[str, list[tuple[str, Piece, Piece]]] = {}  # by file
    for name, entry in saved.items():
        for piece in entry["pieces"]:
            both = _overlap(Piece((), piece["offsets"], piece["sizes"]), wanted[name])
            if both is not None:
                overlaps.setdefault(piece["file"], []).append((name, *both))

    def is_mine(name: str) -> bool:
        number = name.removeprefix("shard-")[:5]
        return name in overlaps or (number.isdecimal() and int(number) % world == rank)

    files = read_checkpoint(folder, only=is_mine, disk=disk).files
    with reading(checkpoint):
        for file, data in files.items():
            pieces = safetensors.torch.load(data)
            for name, source, target in overlaps.get(file, ()):
                target.of(tensors[name]).copy_(source.of(pieces[name]))
        state = from_bytes(checkpoint.files[STATE])
    model, ema = split_tensors(tensors, state)
    return Restored(folder.name, model, ema, state, checkpoint.meta)


def _overlap(saved: Piece, wanted: Piece) -> tuple[Piece, Piece] | None:
    """The overlap of two pieces of a tensor, relative to each of them; None if there is none."""
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
    """This rank's piece of a saved tensor."""
    kind, _, rest = name.partition("/")
    piece = layout.model.get(rest)
    if kind == "optimizer":
        number = int(rest.partition("/")[0])
        piece = layout.parameters[number] if number < len(layout.parameters) else None
    return piece if piece is not None and piece.shape == tuple(shape) else Piece.whole(shape)


def _cut(whole: Restored, layout: Layout) -> Restored:
    """This rank's pieces of a checkpoint that was read whole."""

    def part(name: str, tensor: Tensor) -> Tensor:
        return _wanted(name, tensor.shape, layout).of(tensor).clone()

    for number, entries in whole.state["optimizer"]["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim():
                entries[key] = part(f"optimizer/{number}/", value)
    ema = whole.ema
    return replace(
        whole,
        model={name: part(f"model/{name}", t) for name, t in whole.model.items()},
        ema=None if ema is None else {name: part(f"ema/{name}", t) for name, t in ema.items()},
    )
