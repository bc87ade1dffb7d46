"""Where a user's own loader stands, for checkpoints: by its state, or by what its last batch began with."""

import copy
import itertools
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from flambeau.data.loading.batch_samples import tensors_in_batch
from flambeau.data.loading.sampler_chain import owners_of, set_epoch
from flambeau.errors import InputError

_TENSORS, _NUMBERS = 8, 1024  # of a batch, and of its first sample, that are compared
_KEPT = 64  # places that are known: a device is some batches behind

Place = tuple[int, int]
"""An epoch, and how many of its batches have been read."""


def stateful_part(loader: Any) -> Any:
    """What can save and restore a loader's position: itself, or its IterableDataset; None if nothing.

    A data set that workers read has its state there, out of reach.
    """
    # Of the class: a loader around another one passes on its attributes, but reads by itself.
    if _has_state(type(loader)) and getattr(loader, "use_stateful_dataloader", True):
        return loader
    dataset = getattr(loader, "dataset", None)
    reads_here = isinstance(loader, DataLoader) and not loader.num_workers
    if reads_here and isinstance(dataset, IterableDataset) and _has_state(type(dataset)):
        return dataset
    return None


def _has_state(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


class LoaderPlace:
    """The place of a loader in the stream of a run.

    `restores`: False where each process has batches of its own, of which a checkpoint holds one.
    """

    def __init__(self, loader: Any, *, say: Callable[[str], None], restores: bool) -> None:
        self._loader, self._say = loader, say
        self._part = stateful_part(loader) if restores else None
        self._digests: deque[tuple[Place, int]] = deque(maxlen=_KEPT)
        self._at: Place | None = None
        self._saved: tuple[Place, dict[str, Any]] | None = None

    @property
    def is_stateful(self) -> bool:
        """Whether a resume enters an epoch without reading what came before."""
        return self._part is not None

    def reached(self, place: Place, batch: Any) -> None:
        self._at = place
        self._digests.append((place, _beginning(batch)))

    def saved(self, place: Place) -> dict[str, Any]:
        if self._saved is not None and self._saved[0] == place:
            return self._saved[1]
        digest = next((one for at, one in reversed(self._digests) if at == place), None)
        if self._part is None or self._at != place:
            return {"digest": digest}
        return {"digest": digest, "state": copy.deepcopy(self._part.state_dict())}

    def restore(self, place: Place, saved: dict[str, Any] | None) -> None:
        self._saved = None if saved is None else (place, saved)

    def enter(self, epoch: int, position: int) -> int:
        """Prepare the loader for the batches from a place on; returns how many it skips itself.

        InputError: it cannot go back within this process.
        """
        place = epoch, position
        saved = None
        if self._saved is not None and self._saved[0] == place:
            saved = self._saved[1].get("state")
        elif self._part is not None and position and self._at == place:
            saved = copy.deepcopy(self._part.state_dict())
        if self._part is not None and saved is None and self._at not in (None, place):
            raise InputError(
                f"{type(self._part).__name__} has read on and cannot be set back to batch {position} of "
                f"epoch {epoch}\nStart the script again: it continues from the last checkpoint"
            )
        self._at = place
        if self._part is None or saved is None:
            set_epoch(self._loader, epoch)
            if position and saved is None:
                self._tell_of_reading(position)
            return 0
        if position:
            set_epoch(self._loader, epoch)  # which may begin an epoch
            self._part.load_state_dict(saved)
            self._tell_of_workers()
            return position
        if not any(hasattr(owner, "set_epoch") for owner in owners_of(self._loader)):
            self._part.load_state_dict(saved)
        set_epoch(self._loader, epoch)
        return 0

    def check(self, place: Place, batch: Any) -> None:
        """Say if the last batch that a resume drops is not that before the stop."""
        if self._saved is None or self._saved[0] != place:
            return
        digest = self._saved[1].get("digest")
        if digest is not None and digest != _beginning(batch):
            self._say(
                f"batch {place[1] - 1} of the loader is another one than before the stop: its order or its "
                "random draws do not follow from the seed, so some samples of this epoch are seen twice and "
                "others never; a Dataset, or a loader with state_dict and load_state_dict, continues exactly"
            )

    def _tell_of_reading(self, position: int) -> None:
        dataset = getattr(self._loader, "dataset", None)
        if isinstance(dataset, IterableDataset) and _has_state(type(dataset)):
            self._say(
                f"the state of {type(dataset).__name__} is in the loader's workers, and in no checkpoint: "
                f"{position} batches are read and dropped; torchdata's StatefulDataLoader saves it"
            )

    def _tell_of_workers(self) -> None:
        if getattr(self._loader, "num_workers", 0):
            self._say(
                f"{type(self._loader).__name__} continues by its state, with new workers: the order is that "
                "of a run without a stop, and what they draw from global generators is not"
            )


def _beginning(batch: Any) -> int:
    """CRC-32 of how the first tensors of a batch begin; those on a device would make it wait."""
    crc = 0
    for tensor in itertools.islice(tensors_in_batch(batch), _TENSORS):
        if tensor.is_nested:
            continue
        crc = zlib.crc32(repr(tuple(tensor.shape)).encode(), crc)
        if tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel():
            first = tensor.detach().reshape(1) if not tensor.dim() else tensor.detach()[:1]
            numbers = first.flatten()[:_NUMBERS].contiguous()
            crc = zlib.crc32(numbers.view(torch.uint8).numpy().data, crc)
    return crc
