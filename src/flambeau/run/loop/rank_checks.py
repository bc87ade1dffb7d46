"""What the ranks of a run exchange between steps: identity, unreadable samples, metrics."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.training.metrics import MeanOnDevice
from flambeau.run.loop.step_metrics import merged, sums_by_part
from flambeau.run.options.run_options import OnBad
from flambeau.version import __version__


def check_ranks(
    ranks: Ranks, identity: Mapping[str, Any], model: nn.Module, data_length: int
) -> None:
    """Check that all ranks will do the same, then copy rank 0's parameters and buffers to them.

    InputError, FailedElsewhere: they differ in code, settings, data or model.
    """
    if ranks.world == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    ranks.check_same(
        {
            "the version of flambeau": __version__,
            "the version of torch": torch.__version__,
            "the script (SHA-256)": _script_sha256(),
            **{f"the setting {name}": value for name, value in identity.items()},
            "the length of the training data": data_length,
            **{f"the shape of '{name}'": (*t.shape, str(t.dtype)) for name, t in tensors},
        }
    )
    # The pieces of a sharded model differ by rank, and already come from rank 0.
    ranks.broadcast_tensors([t.data for _, t in tensors if not hasattr(t, "device_mesh")])


def _script_sha256() -> str | None:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def check_shares(then: int, now: int) -> None:
    """Refuse to resume within an epoch with a DistributedSampler and another number of ranks.

    Some samples would be seen twice.
    """
    if then != now:
        raise InputError(
            f"the run stopped within an epoch on {then} processes, and its DistributedSampler would split "
            f"that epoch differently for {now}: resume with {then}, or give the Dataset to Run"
        )


def gathered_means(
    means: Mapping[int, Mapping[str, MeanOnDevice]], ranks: Ranks
) -> dict[str, float]:
    """The means over the samples of all ranks; waits for the device.

    By part of the data and name, summed in the order of parts, then ranks.
    """
    everyone = ranks.gather(sums_by_part(means))
    in_order = [
        theirs[part]
        for part in sorted(set().union(*everyone))
        for theirs in everyone
        if part in theirs
    ]
    return {name: total / count for name, (total, count) in merged(in_order).items() if count}


class BadReports:
    """Brings the samples that any rank could not read to rank 0, which counts them.

    In one process they are reported at once.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._callbacks: list[OnBad] = []
        self._unreadable: list[tuple[int, int]] = []

    def callback(self, on_bad: OnBad | None) -> OnBad | None:
        """The function that a loader calls instead of `on_bad`."""
        if on_bad is None or self._ranks.world == 1:
            return on_bad
        if on_bad not in self._callbacks:
            self._callbacks.append(on_bad)
        number = self._callbacks.index(on_bad)
        return lambda indices: self._unreadable.extend((number, index) for index in indices)

    def report(self) -> None:
        """Report what was unreadable since the last call; all ranks must call it."""
        if not self._callbacks:
            return
        unreadable = [item for theirs in self._ranks.gather(self._unreadable) for item in theirs]
        self._unreadable.clear()
        if unreadable:
            self._ranks.first(
                lambda: [self._callbacks[number]([index]) for number, index in unreadable]
            )
