"""The `Checkpointer` of an FSDP run: all ranks save together, and agree on the newest whole checkpoint.

Its files are those of `shard_files`.
"""

import secrets
from pathlib import Path

import torch.distributed as dist

from flambeau.errors import InputError
from flambeau.parallel.ranks import FailedElsewhere, Ranks
from flambeau.parallel.shard_layout import Layout
from flambeau.recipes.checkpoints.atomic_checkpoint import CheckpointDamaged, Disk
from flambeau.run.folder.checkpointer import Checkpointer, Restored, Snapshot
from flambeau.run.folder.shard_files import FailedOnRanks, restore_pieces, save_sharded
from flambeau.run.options.advice import Advice


class ShardedCheckpointer(Checkpointer):
    """`Checkpointer` for a run whose tensors are spread over ranks.

    Every rank makes one and calls the same methods. Each writes its own part of a snapshot; of what is not
    in the layout, rank 0's is written. A failure is a SaveFailed on rank 0 and a FailedElsewhere on the
    others.

    Args:
        root: the folder `checkpoints/` of a run, on a file system that all ranks share.
        layout: what this rank holds.
        keep: how many of the newest stay, besides the best.
        disk: all file operations of this rank go through it.
        advice: what messages advise.

    Raises:
        InputError: rank 0's folder is not there for all others.
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
        # A group of its own: the thread's talk must not mix with the training's.
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
    """See that a folder is one and the same for all ranks; they all call it.

    Raises:
        InputError: on rank 0, naming the ranks that do not see what it has written there.
        FailedElsewhere: on the others.
    """
    # The name of a leftover: should this process die now, the next start removes it.
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
