"""Checkpoints of a run: copied between two steps, then written and verified by a thread.

The recipe checkpoints/atomic_checkpoint.py writes, verifies and removes them.
"""

import errno
import pickle
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from flambeau.errors import InputError, disk_remedy
from flambeau.parallel.ranks import Ranks
from flambeau.parallel.shard_layout import unsharded, weights_bytes
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointDamaged,
    Disk,
    checkpoint_folders,
    from_bytes,
    prune_checkpoints,
    read_checkpoint,
    remove_leftovers,
    save_checkpoint,
    set_aside,
    to_bytes,
    verify_checkpoint,
)
from flambeau.recipes.memory.batch_size_finder import is_out_of_memory, release_memory
from flambeau.run.options.advice import Advice

EXTRA_STATE = "_extra_state"
"""Ends torch's names of what a module's get_extra_state gives."""


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps, in copies on the CPU.

    Attributes:
        ema: the averaged weights, or None.
        state: all else, for torch.load(weights_only=True).
        meta: JSON for `flambeau verify` and for people.
    """

    model: Mapping[str, Tensor]
    ema: Mapping[str, Tensor] | None
    state: Mapping[str, Any]
    meta: Mapping[str, Any]


class SaveFailed(InputError):
    """A checkpoint could not be written; the ones before it are whole."""


class Checkpointer:
    """Writes snapshots as checkpoints, one at a time; keeps the newest, besides the best."""

    def __init__(
        self, root: Path, *, keep: int, disk: Disk | None = None, advice: Advice = Advice()
    ) -> None:
        self._root = root
        self._advice = advice
        self._keep = keep
        self._disk = disk or Disk()
        self._ranks = Ranks(0, 1, None)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._unwritten: Callable[[], None] | None = None  # memory ran out while it was written
        self._newest = ""  # the checkpoint of the last save
        self._began = 0.0  # when that save began
        self._took = deque[float](maxlen=3)  # seconds of the last saves
        self.last_good: str | None = None
        self.has_failed = False  # a failure was raised by `wait`

    def save(
        self,
        name: str,
        snapshot: Snapshot,
        *,
        best: str | None,
        before: Callable[[], None],
        rollback: str | None = None,
        began: float | None = None,
    ) -> None:
        """Start writing; waits only for a save that is still running.

        Args:
            best: a checkpoint to keep at any age.
            rollback: another, to which a rollback would return.
            before: runs first, in the thread (syncs metrics.jsonl).
            began: when the snapshot began, by time.monotonic; None: now.
        """
        self.wait()
        self._newest = name
        self._began = time.monotonic() if began is None else began
        keep = {kept for kept in (best, rollback) if kept}
        work = partial(self._write, name, snapshot, keep, before)
        self._thread = threading.Thread(target=work, name=f"save {name}")
        try:
            self._thread.start()
        except RuntimeError:  # none may be started (`ulimit -u`): the step waits for the save
            self._thread = None
            work()

    def seconds_to_save(self) -> float:
        """Seconds until another checkpoint is on the disk, after the one being written.

        Estimated as the longest of the last three saves; 0 before the first.
        """
        longest = max(self._took, default=0.0)
        passed = time.monotonic() - self._began
        return longest + (max(0.0, longest - passed) if self._is_writing else 0.0)

    def resume_point(self) -> str:
        """In words, the checkpoint that a resume would load; one being written may not be completed."""
        good = self.last_good or "the beginning"
        return (
            f"{self._newest}, if that is written in time, else {good}" if self._is_writing else good
        )

    @property
    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._unwritten is not None:  # again, while no training uses the memory
            work, self._unwritten = self._unwritten, None
            release_memory()
            work()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self.has_failed = True
            raise failure

    def restore_latest(
        self, *, say: Callable[[str], None], newest: str | None = None
    ) -> "Restored | None":
        """The newest checkpoint, up to `newest`, that is whole for every rank; damaged ones are set aside and
        reported.

        On rank 0 InputError: no checkpoint is whole; OSError: one could not be read, which says nothing about
        its content. FailedElsewhere on the other ranks.
        """
        ranks = self._ranks
        damaged = list[CheckpointDamaged]()
        for name in ranks.first(lambda: _newest_first(self._root)):
            if newest is not None and (len(name), name) > (len(newest), newest):
                continue
            checkpoint, error = None, None
            try:
                checkpoint = self._read(self._root / name)
            except (CheckpointDamaged, OSError) as caught:
                error = caught.with_traceback(None)  # its frames would keep what was read so far
            errors = [theirs for theirs in ranks.gather(error) if theirs is not None]
            for theirs in errors:
                if not isinstance(theirs, CheckpointDamaged):
                    ranks.first(partial(_raise, theirs))
            if not errors:
                ranks.first(partial(_set_aside, damaged, name, say))
                self.last_good = name
                return checkpoint
            damaged += [theirs for theirs in errors[:1] if isinstance(theirs, CheckpointDamaged)]
        if damaged:
            text = (
                f"none of the {len(damaged)} checkpoints in {self._root} is whole ({damaged[0]}).\n"
                f"Restore one from a copy, or {self._advice.start_again}."
            )
            ranks.first(partial(_raise, InputError(text)))
        return None

    def _read(self, folder: Path) -> "Restored":
        return restored(read_checkpoint(folder, disk=self._disk))

    def _save(self, folder: Path, snapshot: Snapshot) -> None:
        save_checkpoint(folder, _files(snapshot), meta=snapshot.meta, disk=self._disk)
        verify_checkpoint(folder, disk=self._disk)

    def _write(
        self, name: str, snapshot: Snapshot, keep: set[str], before: Callable[[], None]
    ) -> None:
        """Write a snapshot, in the thread; if memory runs out there, `wait` repeats it."""
        folder = self._root / name
        prune = partial(prune_checkpoints, keep_last=self._keep, keep=keep, disk=self._disk)
        try:
            self._ranks.first(before)
            if not self._ranks.first(folder.exists):
                self._save(folder, snapshot)
            self.last_good = name
            self._took.append(time.monotonic() - self._began)
            self._ranks.first(partial(prune, self._root))
        except (OSError, CheckpointDamaged) as error:
            self._failure = self._failed(folder, error)
        except BaseException as error:  # raised by `wait`, in the caller's thread
            self._failure = error
            if not _is_short(error) or self._ranks.world > 1:
                return
            release_memory(error)
            if threading.current_thread() is self._thread:
                self._failure = None
                self._unwritten = partial(self._write, name, snapshot, keep, before)
            else:
                self._failure = SaveFailed(
                    f"checkpoint {folder} could not be written: there is no memory for it; the last good one "
                    f"is {self.last_good or 'none'}.\nFree some and run the same command again."
                )

    def _failed(
        self, folder: Path, error: OSError | CheckpointDamaged, *, by: str = ""
    ) -> SaveFailed:
        """The message to the user; `by` names another process, as in 'by rank 2: '."""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        number = error.errno if isinstance(error, OSError) else None
        full = number in (errno.ENOSPC, errno.EDQUOT)
        remedy = disk_remedy(number) or ("free some space" if full else "repair the disk")
        failure = SaveFailed(
            f"checkpoint {folder} could not be written: {by}{reason}; "
            f"the last good one is {self.last_good or 'none'}.\n"
            f"{remedy[0].upper()}{remedy[1:]} and run the same command again."
        )
        failure.__cause__ = error
        return failure


def _is_short(error: BaseException | None) -> bool:
    """Whether memory has run out, including errors that hide it."""
    if error is None:
        return False
    # Safetensors panics if Python has no memory, NumPy fails without an error of its own, and torch.save then
    # reports a short file.
    is_panic = type(error).__name__ == "PanicException" or isinstance(error, SystemError)
    return is_panic or is_out_of_memory(error) or _is_short(error.__context__)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors copied to the CPU, each with its own memory, as safetensors needs."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def copy_nested(value: Any) -> Any:
    """A nested state with its tensors copied to the CPU, in new containers."""
    if isinstance(value, Tensor):
        copied = value.detach().to("cpu", copy=True)
        # Optimizers make their state of a parameter's class, which no file for weights_only holds.
        return copied if type(copied) is Tensor else copied.as_subclass(Tensor)
    if isinstance(value, Mapping):
        return {k: copy_nested(v) for k, v in value.items()}
    if hasattr(value, "_fields"):  # a namedtuple, which is refused as it is saved
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(copy_nested(v) for v in value)
    return value


@dataclass(frozen=True)
class Restored:
    """A checkpoint in memory, verified."""

    name: str
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    state: dict[str, Any]
    meta: dict[str, Any]


def restore(folder: Path) -> Restored:
    try:
        return restored(read_checkpoint(folder))
    except CheckpointDamaged as error:
        raise InputError(f"{error}; choose another checkpoint") from error


def _newest_first(root: Path) -> list[str]:
    remove_leftovers(root)
    return [folder.name for folder in reversed(checkpoint_folders(root))]


def _set_aside(damaged: Sequence[CheckpointDamaged], name: str, say: Callable[[str], None]) -> None:
    for error in damaged:
        set_aside(error.folder)
        say(f"damaged checkpoint set aside: {error}; going on from {name}")


def _raise(error: BaseException) -> None:
    raise error


def _files(snapshot: Snapshot) -> dict[str, bytes]:
    files = {"model.safetensors": weights_bytes(snapshot.model)}
    if snapshot.ema is not None:
        files["ema.safetensors"] = weights_bytes(snapshot.ema)
    files["training_state.pt"] = state_bytes(snapshot.state)
    return files


def state_bytes(state: Mapping[str, Any]) -> bytes:
    """The file of all but weights; InputError: something could not be read without running code."""
    try:
        return to_bytes(state)
    except TypeError as error:
        what = re.sub(r"^user\.(\w+)", r"state['\1']", str(error))
        raise InputError(f"no checkpoint can hold the state of this run: {what}") from error


def check_name(folder: Path, meta: Mapping[str, Any]) -> None:
    """CheckpointDamaged: the checkpoint in the folder `step-N` is of another step, so it was put there."""
    named = re.fullmatch(r"step-([0-9]+)", folder.name)
    step = meta.get("step")
    if named is not None and type(step) is int and step != int(named[1]):
        raise CheckpointDamaged(
            folder, MANIFEST, f"is of step {step}: the folder was renamed or copied"
        )


def restored(checkpoint: Checkpoint) -> Restored:
    check_name(checkpoint.folder, checkpoint.meta)
    with reading(checkpoint):
        files = unsharded(checkpoint.files)
        ema = files.get("ema.safetensors")
        return Restored(
            name=checkpoint.folder.name,
            model=safetensors.torch.load(files["model.safetensors"]),
            ema=None if ema is None else safetensors.torch.load(ema),
            state=from_bytes(files["training_state.pt"]),
            meta=dict(checkpoint.meta),
        )


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Refuse what no run writes into a checkpoint, whatever its manifest says."""
    try:
        yield
    except (pickle.UnpicklingError, safetensors.SafetensorError, LookupError, TypeError) as error:
        why = "it holds objects that only running its code could make; nothing of it was run"
        if not isinstance(error, pickle.UnpicklingError):
            why = str(error).partition("\n")[0][:200]
        raise InputError(
            f"{checkpoint.folder} is no checkpoint of a run: {why}\n"
            "Remove it, if it comes from elsewhere: a run goes on from the checkpoint before it"
        ) from error


def why_not_loadable(model: torch.nn.Module, saved: Mapping[str, Any]) -> str | None:
    """Why the entries of a state_dict do not fit the model; None if they do."""
    current = model.state_dict()
    for name in (*current, *saved):
        if name not in current:
            return f"the model has no '{name}'"
        if name not in saved:
            return f"'{name}' is missing"
        if name.endswith(EXTRA_STATE):
            continue  # its shape may change
        there, now = (
            tuple(value.shape) if isinstance(value, Tensor) else ()
            for value in (saved[name], current[name])
        )
        if there != now:
            return f"'{name}' is {there}, the model's {now}"
    return None
