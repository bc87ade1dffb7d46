"""The losses of each training sample over a training, by which targets look wrong.

Source: the mean of a sample's loss over the training, of Arpit et al. 2017, "A closer look at memorization in
deep networks" (arXiv:1706.05394): a wrong label is learned late. The area under the margin of Pleiss et al.
2020 (arXiv:2001.10528) finds fewer (bench/label_errors.py). Nothing is recorded for mixed images (mixup,
cutmix), which have no single label.
"""

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.data.sources.source import Source
from flambeau.errors import ZIP_ERRORS
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file

FILE = "sample_losses.npz"
"""In the folder of a finished run: loss, seen and other of each sample, and the data's fingerprint."""
_UNIT = 2.0**-24  # sums are integers in it, so the order of additions changes no bit
_MAX_LOSS = 2.0**16
_CLASSES = 2**20  # more than there are: an int64 holds the step times this plus the label


class SampleHistory:
    """Sums of losses on the device over all epochs, saved in checkpoints.

    Each rank counts its samples, and `settle_ranks` brings all to rank 0. A step's values count when the next
    one starts, so that they can be taken back.

    Args:
        losses: from outputs float32 and targets to each sample's loss, without smoothing and weights, and a
            number below 2^20, kept of the newest epoch: what the model would rather have.
    """

    may_be_missing = True  # in a checkpoint of an earlier version, which stays usable

    def __init__(
        self,
        num_samples: int,
        *,
        fingerprint: str,
        device: torch.device,
        losses: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        self._fingerprint, self._losses = fingerprint, losses
        self._sums = torch.zeros(num_samples, dtype=torch.int64, device=device)
        self._seen = torch.zeros(num_samples, dtype=torch.int32, device=device)
        self._newest = torch.zeros(num_samples, dtype=torch.int64, device=device)
        self._open: list[tuple[Tensor, Tensor, Tensor]] = []  # of the current step
        self._step = -1

    @torch.no_grad()
    def note(
        self, micro: MicroBatch | None, outputs: Tensor, targets: Tensor, *, step: int
    ) -> None:
        """Add the losses of a batch."""
        if micro is None or not micro.size:
            return
        indices = micro.indices[micro.local]
        if len(micro.bad):
            indices = indices[~np.isin(indices, micro.bad)]
        if len(indices) != len(targets):  # a stand-in, as no image of the batch could be read
            return
        at = torch.from_numpy(indices)
        if self._sums.is_cuda:
            at = at.pin_memory()  # only from pinned memory a copy never waits
        at = at.to(self._sums.device, non_blocking=True)
        losses, other = self._losses(outputs.detach().float(), targets)
        units = losses.nan_to_num().clamp(max=_MAX_LOSS) / _UNIT
        if step != self._step:
            self._count()
        self._open.append((at, units.round().long(), other + step * _CLASSES))
        self._step = step

    def _count(self) -> None:
        """Count the values of the last step."""
        for at, units, newest in self._open:
            self._sums.index_add_(0, at, units)
            self._seen.index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
            self._newest.scatter_reduce_(0, at, newest, "amax")
        self._open.clear()

    def take_back(self) -> None:
        """Drop the values of the current step, which starts over."""
        self._open.clear()

    def settle_ranks(self, ranks: Ranks) -> None:
        """Bring the counts of all ranks to rank 0; every rank calls it."""
        self._count()
        if ranks.world > 1:
            for part in (self._sums, self._seen):
                ranks.add_up(part)
            ranks.worst(self._newest)
            if not ranks.is_first:
                self.leave_to_first()

    def leave_to_first(self) -> None:
        for part in self.state_dict().values():
            part.zero_()

    @property
    def epochs(self) -> float:
        """How often a sample was seen, on average; waits for the device."""
        self._count()
        return float(self._seen.float().mean())

    def state_dict(self) -> dict[str, Tensor]:
        self._count()
        return {"units": self._sums, "seen": self._seen, "newest": self._newest}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        current = self.state_dict()
        if current.keys() == state.keys():  # an earlier version counted in other units
            for name, part in current.items():
                part.copy_(state[name])

    def save(self, folder: Path) -> None:
        """Write FILE into a run folder, whole or not at all, if anything was recorded."""
        sums, seen, newest = (part.cpu().numpy() for part in self.state_dict().values())
        if not seen.any():
            return
        content = io.BytesIO()
        np.savez(
            content,
            loss=(sums * _UNIT / np.maximum(seen, 1)).astype(np.float32),
            seen=seen,
            other=(newest % _CLASSES).astype(np.int32),
            fingerprint=np.array(self._fingerprint),
        )
        write_file(folder / FILE, content.getvalue())


class RecordedLoss(NamedTuple):
    """A training image whose target may be wrong, and its mean loss over the training.

    `other`: what the model preferred at the end: a class, a label.
    """

    number: int
    image: str
    other: int
    loss: float


def recorded_losses(run: Path, train: Source, *, most: int) -> list[RecordedLoss] | None:
    """The training images with the highest losses, the highest first.

    None without a record: the run mixed images, is unfinished, of an earlier version, or of other images.
    """
    path = run / FILE
    try:
        with zipfile.ZipFile(path) as members:
            if sum(member.file_size for member in members.infolist()) > 32 * len(train) + 4096:
                return None
        with np.load(path, allow_pickle=False) as stored:
            loss, seen, other = (np.asarray(stored[name]) for name in ("loss", "seen", "other"))
            fingerprint = str(stored["fingerprint"])
    except (*ZIP_ERRORS, OSError, KeyError, MemoryError):
        return None
    fits = {len(column) for column in (loss, seen, other)} == {len(train)}
    if not fits or fingerprint != train.fingerprint:
        return None
    scores = np.where(seen > 0, loss, -np.inf)
    order = np.argsort(-scores, kind="stable")[: min(most, int((seen > 0).sum()))]
    return [
        RecordedLoss(index, train.describe(index), max(0, int(other[index])), float(loss[index]))
        for index in order.tolist()
    ]


class LabelSuspect(NamedTuple):
    """A training image whose class may be wrong.

    Attributes:
        suggested: the class that the model preferred at the end.
        loss: its mean over the training; a guess has log(number of classes).
    """

    number: int
    image: str
    label: str
    suggested: str
    loss: float


def label_suspects(
    run: Path, train: Source, *, most: int | None = None
) -> list[LabelSuspect] | None:
    """The training images whose classes look wrong, the most suspicious first; None without a record.

    Without `most` all labels that were less likely than a guess, on average.
    """
    recorded = recorded_losses(run, train, most=len(train) if most is None else most)
    if recorded is None:
        return None
    labels = train.labels.tolist()
    classes = train.classes
    return [
        LabelSuspect(
            one.number,
            one.image,
            classes[labels[one.number]],
            classes[one.other] if one.other < len(classes) else "?",
            one.loss,
        )
        for one in recorded
        if most is not None or one.loss > np.log(len(classes))
    ]
