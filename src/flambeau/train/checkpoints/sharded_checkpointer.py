"""Checkpoints of a run whose tensors are spread over ranks: all write, and all find the same one."""

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from flambeau.errors import InputError
from flambeau.parallel.ranks import FailedElsewhere, Ranks
from flambeau.parallel.shard_layout import Layout
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    CheckpointDamaged,
    Disk,
    checkpoint_folders,
    prune_checkpoints,
    remove_leftovers,
    set_aside,
)
from flambeau.train.checkpoints.checkpointer import Checkpointer, Restored, Snapshot
from flambeau.train.checkpoints.run_folder import START_AGAIN
from flambeau.train.checkpoints.shard_files import restore_pieces, save_sharded


class ShardedCheckpointer(Checkpointer):
    """`Checkpointer` for a run whose tensors are spread over ranks.

    Every rank makes one and calls the same methods. Each writes its own part of a snapshot; of what is not
    in the layout, rank 0's is written. A failure is a SaveFailed on rank 0 and a FailedElsewhere on the
    others.

    Args:
        root: the folder `checkpoints/` of a run, on a file system that all ranks share.
        layout: what this rank holds.
        ranks: of the job.
        keep: how many of the newest stay, besides the best.
        disk: all file operations of this rank go through it.

    Raises:
        InputError: rank 0's folder is not there for all others.
    """

    def __init__(
        self, root: Path, layout: Layout, ranks: Ranks, *, keep: int, disk: Disk | None = None
    ) -> None:
        check_shared(root, ranks)
        super().__init__(root, keep=keep, disk=disk)
        self._layout = layout
        # A group of its own: the thread's talk must not mix with the training's.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._ranks = Ranks(ranks.rank, ranks.world, self._group)

    def restore_latest(self, *, say: Callable[[str], None]) -> Restored | None:
        """This rank's part of the newest checkpoint that is whole for every rank.

        Damaged ones are set aside and named in one line each, as `restore_latest` of one process does.

        Args:
            say: takes lines for the user; called on rank 0.

        Raises:
            InputError: there are checkpoints, and none is whole; on rank 0.
            OSError: one could not be read for a reason that says nothing about it; on rank 0.
            FailedElsewhere: the same, on the others.
        """
        ranks, damaged = self._ranks, list[CheckpointDamaged]()
        for name in ranks.first(functools.partial(_newest_first, self._root)):
            found, error = None, None
            try:
                found = restore_pieces(
                    self._root / name, self._layout, rank=ranks.rank, world=ranks.world,
                    disk=self._disk,
                )  # fmt: skip
            except (CheckpointDamaged, OSError) as caught:
                error = caught
            errors = [theirs for theirs in ranks.gather(error) if theirs is not None]
            for theirs in errors:
                if not isinstance(theirs, CheckpointDamaged):
                    _raise_on_first(ranks, theirs)
            if not errors:
                ranks.first(functools.partial(_put_aside, damaged, name, say))
                self.last_good = name
                return found
            damaged += [theirs for theirs in errors[:1] if isinstance(theirs, CheckpointDamaged)]
        if damaged:
            text = (
                f"none of the {len(damaged)} checkpoints in {self._root} is whole ({damaged[0]}).\n"
            )
            _raise_on_first(ranks, InputError(f"{text}Restore one from a copy, or {START_AGAIN}."))
        return None

    def _write(
        self, name: str, snapshot: Snapshot, best: str | None, before: Callable[[], None]
    ) -> None:
        folder = self._root / name
        try:
            self._ranks.first(before)
            if not self._ranks.first(folder.exists):
                save_sharded(folder, snapshot, self._layout, group=self._group, disk=self._disk)
            self.last_good = name
            keep = {best} if best else set()
            self._ranks.first(
                lambda: prune_checkpoints(
                    self._root, keep_last=self._keep, keep=keep, disk=self._disk
                )
            )
        except CheckpointException as error:
            self._failure = self._told(folder, dict(error.failures))
        except (OSError, CheckpointDamaged) as error:
            self._failure = self._told(folder, {0: (error, None)})
        except (Exception, FailedElsewhere) as error:  # raised by `wait`
            self._failure = error

    def _told(
        self, folder: Path, failures: Mapping[int, tuple[BaseException, Any]]
    ) -> BaseException:
        """What this rank raises for a save that has failed on some: rank 0 alone reports it to the user."""
        rank, (error, _) = min(failures.items())
        if not self._ranks.is_first:
            return FailedElsewhere(f"{type(error).__name__}: {error}")
        where = f"by rank {rank}: " if rank else ""
        if not isinstance(error, (OSError, CheckpointDamaged)):
            told = RuntimeError(f"checkpoint {folder} was not written {where}{error!r}")
            told.__cause__ = error
            return told
        return self._failed(folder, error, by=where)


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


def _newest_first(root: Path) -> list[str]:
    remove_leftovers(root)
    return [folder.name for folder in reversed(checkpoint_folders(root))]


def _put_aside(damaged: Sequence[CheckpointDamaged], name: str, say: Callable[[str], None]) -> None:
    for error in damaged:
        set_aside(error.folder)
        say(f"damaged checkpoint set aside: {error}; going on from {name}")


def _raise_on_first(ranks: Ranks, error: BaseException) -> NoReturn:
    def fail() -> NoReturn:
        raise error

    ranks.first(fail)
    raise AssertionError("unreachable")
