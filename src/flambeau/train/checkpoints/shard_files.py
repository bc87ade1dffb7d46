"""The files of an FSDP checkpoint: every rank writes and reads its own pieces.

The folder keeps the contract of `atomic_checkpoint`: a hidden folder, every file written, synced and read
back, manifest.json with the size and SHA-256 of each, then the rename. torch.distributed.checkpoint plans
who writes what and agrees on failures, and its resharding finds the pieces of another number of ranks.

    step-00001200/shard-00000-of-00004.safetensors ...   the pieces of a rank, by name
    step-00001200/sharding.json                          where each piece lies in the whole
    step-00001200/training_state.pt                      the rest, as in every checkpoint
"""

import contextlib
import errno
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from flambeau.parallel.shard_layout import (
    INDEX,
    INDEX_FORMAT,
    STATE,
    Layout,
    Piece,
    put_back,
    read_index,
)
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    MANIFEST,
    Disk,
    from_bytes,
    hidden_path,
    make_folders,
    manifest_bytes,
    read_checkpoint,
    read_manifest,
    remove_tree,
    to_bytes,
    verified_chunks,
    write_synced,
)
from flambeau.train.checkpoints.checkpointer import Restored, Snapshot, restored, weights_bytes


@dataclass(frozen=True)
class _Held:
    piece: Piece
    tensor: Tensor


def save_sharded(
    folder: Path,
    snapshot: Snapshot,
    layout: Layout,
    *,
    group: dist.ProcessGroup,
    disk: Disk | None = None,
) -> None:
    """Save what all ranks hold as one checkpoint, which outlives a power failure when this returns.

    Args:
        folder: the folder to make, the same on all ranks.
        snapshot: what this rank holds; its `state` and `meta` count on rank 0 alone.
        layout: where that lies in the whole.
        group: of torch, of all ranks, for objects on the CPU.
        disk: all file operations of this rank go through it.

    Raises:
        CheckpointException: on all ranks, with the errors of those that failed; `folder` is not there.
    """
    planner = _Planner(snapshot, layout)
    writer = _Writer(folder, planner, snapshot.meta, disk or Disk())
    try:
        save({}, storage_writer=writer, planner=planner, process_group=group)
    except BaseException:
        writer.undo()
        raise


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))


def _held(snapshot: Snapshot, layout: Layout) -> tuple[dict[str, _Held], dict[str, Any]]:
    """The pieces by name, and the state without those of its tensors."""
    held = {f"model/{n}": _Held(layout.model[n], t) for n, t in snapshot.model.items()}
    for name, tensor in (snapshot.ema or {}).items():
        held[f"ema/{name}"] = _Held(layout.model[name], tensor)
    optimizer = snapshot.state["optimizer"]
    rest: dict[int, dict[str, Any]] = {}
    for number, entries in optimizer["state"].items():
        rest[number] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim():
                held[f"optimizer/{number}/{key}"] = _Held(layout.parameters[number], value)
            else:
                rest[number][key] = value
    for name, one in held.items():
        if tuple(one.tensor.shape) != one.piece.sizes:
            raise ValueError(
                f"{name} has the shape {tuple(one.tensor.shape)}, its piece {one.piece.sizes}: only what "
                "is laid out as a parameter, or a single number of shape (), can be saved in pieces"
            )
    return held, {**snapshot.state, "optimizer": {**optimizer, "state": rest}}


class _Planner(DefaultSavePlanner):
    """Plans by the pieces; what several ranks hold whole is written by rank 0."""

    def __init__(self, snapshot: Snapshot, layout: Layout) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._snapshot, self._layout = snapshot, layout
        self.state: dict[str, Any] = {}
        self._held: dict[str, _Held] = {}

    def create_local_plan(self) -> SavePlan:
        # Not before: what fails here fails on all ranks.
        self._held, self.state = _held(self._snapshot, self._layout)
        items = []
        for name, held in self._held.items():
            piece, tensor = held.piece, held.tensor
            is_whole = piece.sizes == piece.shape
            if self.is_coordinator if is_whole else tensor.numel():
                data = TensorWriteData(
                    chunk=_chunk(piece),
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=torch.Size(piece.shape),
                )
                index = MetadataIndex(name, _chunk(piece).offsets)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._held[index.fqn].tensor


class _Writer(StorageWriter):
    """Writes the pieces of a rank as one file, and on rank 0 all that makes them a checkpoint."""

    def __init__(
        self, folder: Path, planner: _Planner, meta: Mapping[str, Any], disk: Disk
    ) -> None:
        self._folder, self._planner, self._meta, self._disk = folder, planner, meta, disk
        self._temporary: Path | None = None
        self._renamed = False
        self._file_of: dict[tuple[str, tuple[int, ...]], str] = {}

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """The plan says all."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Folders are given otherwise."""
        return False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: make the hidden folder, and name the file of each rank."""
        make_folders(self._disk, self._folder.parent)
        if self._folder.name in self._disk.names(self._folder.parent):
            raise FileExistsError(
                errno.EEXIST, "a checkpoint is never overwritten", str(self._folder)
            )
        temporary = hidden_path(self._folder, "tmp")
        self._disk.make_folder(temporary)
        self._temporary = temporary
        named = []
        for rank, plan in enumerate(plans):
            file = f"shard-{rank:05d}-of-{len(plans):05d}.safetensors"
            for item in plan.items:
                self._file_of[item.index.fqn, tuple(item.index.offset or ())] = file
            named.append(replace(plan, storage_data=(temporary.name, file)))
        return named

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On each rank: write its file, and tell its size and SHA-256."""
        temporary, file = plan.storage_data
        tensors = {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors[item.index.fqn] = tensor.contiguous()
        entry = self._write(self._folder.with_name(temporary) / file, weights_bytes(tensors))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(file), entry["size"], entry["sha256"])])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: write the rest and the manifest, and give the folder its name."""
        assert self._temporary is not None
        entries = {}
        for (result,) in results:
            entries[result.index.fqn] = {
                "size": result.size_in_bytes,
                "sha256": result.storage_data,
            }
        index = json.dumps(self._index(metadata), indent=1).encode() + b"\n"
        for name, data in {STATE: to_bytes(self._planner.state), INDEX: index}.items():
            entries[name] = self._write(self._temporary / name, data)
        self._write(self._temporary / MANIFEST, manifest_bytes(entries, self._meta))
        self._disk.sync_folder(self._temporary)
        self._disk.rename(self._temporary, self._folder)
        self._renamed = True
        self._disk.sync_folder(self._folder.parent)

    def undo(self) -> None:
        """On rank 0: leave nothing of a save that failed."""
        if self._temporary is not None:
            with contextlib.suppress(OSError):  # the first error is the one to report
                if self._renamed:
                    self._disk.rename(self._folder, self._temporary)
                remove_tree(self._disk, self._temporary)

    def _index(self, metadata: Metadata) -> dict[str, Any]:
        tensors = {}
        for name, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata)
            tensors[name] = {
                "dtype": str(saved.properties.dtype).removeprefix("torch."),
                "shape": list(saved.size),
                "pieces": [
                    {
                        "file": self._file_of[name, tuple(chunk.offsets)],
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                    }
                    for chunk in saved.chunks
                ],
            }
        return {"format": INDEX_FORMAT, "tensors": tensors}

    def _write(self, path: Path, data: bytes) -> dict[str, Any]:
        """Write, sync, and read back what the disk has made of it."""
        write_synced(self._disk, path, data)
        size, sha256 = len(data), hashlib.sha256(data).hexdigest()
        for _ in verified_chunks(self._disk, path.parent, path.name, size, sha256, 1 << 20):
            pass
        return {"size": size, "sha256": sha256}


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
    disk = disk or Disk()
    meta, entries = read_manifest(folder, disk=disk)
    if INDEX not in entries:
        return _cut(restored(read_checkpoint(folder, disk=disk)), layout)

    def read(name: str) -> bytes:
        size, sha256 = entries[name]
        return b"".join(verified_chunks(disk, folder, name, size, sha256, size + 1))

    saved = read_index(read(INDEX), folder)
    tensors, reads = {}, _reads(saved, layout)
    for name, entry in saved.items():
        sizes = _wanted(name, entry["shape"], layout).sizes
        tensors[name] = torch.empty(sizes, dtype=getattr(torch, entry["dtype"]))
    for number, file in enumerate(sorted(entries.keys() - {INDEX, STATE})):
        if file in reads or number % world == rank:
            found = safetensors.torch.load(read(file))
            for name, item in reads.get(file, []):
                part = Piece((), tuple(item.storage_offsets), tuple(item.lengths)).of(found[name])
                Piece((), tuple(item.dest_offsets), tuple(item.lengths)).of(tensors[name]).copy_(
                    part
                )
    state = from_bytes(read(STATE))
    model, ema = put_back(tensors, state)
    return Restored(folder.name, model, ema, state, meta)


def _wanted(name: str, shape: Sequence[int], layout: Layout) -> Piece:
    """What this rank holds of a saved tensor."""
    kind, _, rest = name.partition("/")
    piece = layout.model.get(rest)
    if kind == "optimizer":
        number = int(rest.partition("/")[0])
        piece = layout.parameters[number] if number < len(layout.parameters) else None
    return piece if piece is not None and piece.shape == tuple(shape) else Piece.whole(shape)


def _reads(saved: Mapping[str, Any], layout: Layout) -> dict[str, list[tuple[str, ReadItem]]]:
    """By file, what of it goes where: the resharding of torch.distributed.checkpoint."""
    reads: dict[str, list[tuple[str, ReadItem]]] = {}
    for name, entry in saved.items():
        chunks = [_chunk(Piece((), p["offsets"], p["sizes"])) for p in entry["pieces"]]
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        stored = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        wanted = _chunk(_wanted(name, entry["shape"], layout))
        for item in create_read_items_for_chunk_list(name, stored, [wanted]):
            assert item.storage_index.index is not None
            file = entry["pieces"][item.storage_index.index]["file"]
            reads.setdefault(file, []).append((name, item))
    return reads


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
