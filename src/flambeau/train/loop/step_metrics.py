"""Figures of the steps between two log points, kept on the device and read once."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flambeau.parallel.ranks import Ranks
from flambeau.recipes.training.metrics import MeanOnDevice


class StepMetrics:
    """The losses since the last line, and the means of whatever the user logs.

    Losses are kept as they are: putting one in a list costs nothing, adding it up is an operation per step.

    Args:
        device: of the training.
        clock: seconds, for the metrics that depend on wall time.
    """

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self._clock = device, clock
        self.losses: list[Tensor] = []
        self.logged: dict[str, MeanOnDevice] = {}
        self.wait_s = 0.0
        self.total_samples = 0
        """All that were ever counted here, for a progress bar."""
        self._waited_before = 0.0
        self._sizes: list[int] = []
        self._settled: list[tuple[float, int]] = []
        self._ends: list[int] = []
        self._start = clock()

    def add_loss(self, loss: Tensor, num_samples: int) -> list[Tensor]:
        """Count the mean loss of a micro-batch, 0-d; returns all losses so far, float32 without a graph."""
        detached = loss.detach()
        self.losses.append(detached if detached.dtype is torch.float32 else detached.float())
        self._sizes.append(num_samples)
        self.total_samples += num_samples
        return self.losses

    def end_step(self) -> None:
        """All losses of a step are counted; how many there are may change from step to step."""
        self._ends.append(len(self._settled) + len(self.losses))

    def take_back(self, num_losses: int, total_samples: int) -> None:
        """Forget the losses since there were so many, and so many samples were counted."""
        del self.losses[num_losses:], self._sizes[num_losses:]
        self.total_samples = total_samples

    def settle(self, ranks: Ranks) -> None:
        """Put together what all ranks have counted since the last time; waits for the device."""
        if ranks.world == 1:
            return
        losses = torch.stack(self.losses).tolist() if self.losses else []
        logged = {name: mean.sums().tolist() for name, mean in self.logged.items()}
        everyone = ranks.gather((losses, self._sizes, logged, self.wait_s))
        for parts in zip(
            *(zip(theirs, sizes, strict=True) for theirs, sizes, _, _ in everyone), strict=True
        ):
            counted = [(loss, size) for loss, size in parts if size]
            total = sum(size for _, size in counted) or 1
            self._settled.append((sum(loss * size for loss, size in counted) / total, total))
        self.losses.clear()
        self._sizes.clear()
        for name, sums in merged([theirs for _, _, theirs, _ in everyone]).items():
            self.logged[name] = _mean_of(sums if ranks.is_first else (0.0, 0), self.device)
        self.wait_s = max(wait_s for *_, wait_s in everyone)

    def read(self, halted_steps: Tensor) -> tuple[dict[str, float], int]:
        """The row of this window, and `halted_steps` read with it; waits for the device, then starts anew."""
        figures = [torch.stack([halted_steps, *self.losses]).double()]
        means = {name: mean for name, mean in self.logged.items() if mean.num_samples}
        figures += [mean.compute().double().view(1) for mean in means.values()]
        halted, *values = torch.cat(figures).tolist()
        losses, logged = values[: len(self.losses)], values[len(self.losses) :]
        counted = [*self._settled, *zip(losses, self._sizes, strict=True)]
        seconds = max(self._clock() - self._start, 1e-9)
        samples = sum(size for _, size in counted)
        row = {}
        if samples:
            row["train_loss"] = sum(loss * size for loss, size in counted) / samples
        row |= dict(zip(means, logged, strict=True))
        row["images_per_s"] = round(samples / seconds, 1)
        row["data_wait"] = round(min(1.0, self.wait_s / seconds), 4)
        for counted_so_far in (self._settled, self.losses, self._sizes, self._ends, self.logged):
            counted_so_far.clear()
        self.restart_clock()
        return row, int(halted)

    def restart_clock(self) -> None:
        """Leave what happened until now (an evaluation, a pause) out of the figures."""
        self._waited_before += self.wait_s
        self.wait_s, self._start = 0.0, self._clock()

    @property
    def total_wait_s(self) -> float:
        """Seconds that the loop has waited for data since the beginning, for a progress bar."""
        return self._waited_before + self.wait_s

    @property
    def empty(self) -> bool:
        """Nothing was counted since the last line."""
        return not self.losses and not self.logged and not self._settled

    def state_dict(self) -> dict[str, Any]:
        """What is counted so far, so that a resumed run writes the same next line."""
        return {
            "losses": list(self.losses),
            "sizes": list(self._sizes),
            "settled": list(self._settled),
            "ends": list(self._ends),
            "logged": {name: mean.state_dict() for name, mean in self.logged.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.losses = [loss.to(self.device) for loss in state["losses"]]
        self._sizes = list(state["sizes"])
        self._settled = [(loss, size) for loss, size in state.get("settled", ())]
        self._ends = list(state.get("ends", ()))
        self.logged.clear()
        for name, mean in state["logged"].items():
            self.logged[name] = MeanOnDevice(device=self.device)
            self.logged[name].load_state_dict(mean)

    def leave_to_first(self) -> None:
        """What a checkpoint has brought is counted by rank 0: here, on another one, it counts for nothing."""
        self._sizes = [0] * len(self._sizes)
        self.logged.clear()


OF_A_LINE = {"step", "epoch", "learning_rate", "learning_rates", "images_per_s", "data_wait"}
"""Names that a line of metrics.jsonl has in any case."""


def add_value(
    means: dict[str, MeanOnDevice],
    name: str,
    value: Tensor | float,
    num_samples: int,
    device: torch.device,
    *,
    count: Callable[[Callable[[], object]], object] = lambda work: work(),
) -> None:
    """Count one value under a name, without waiting for the device; of (N, ...) the mean of each sample.

    Args:
        means: by name.
        name: of the value.
        value: 0-d or a number, of the batch; or (N, ...).
        num_samples: N of the last batch; 0 of one that does not count, -1 where there was none.
        device: of the run.
        count: takes what is left to do, for when the batch is done.

    Raises:
        TypeError: neither a tensor nor a number, or a tensor on another device.
        ValueError: not one value per sample, or a name that a line has already.
        RuntimeError: there was no batch.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not isinstance(value, Tensor):
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"run.log({name}=...) takes a number or a tensor, got {value!r:.100}"
            ) from error
        value = torch.full((), number, dtype=dtype, device=device)
    _check(name, value, num_samples, device)
    if value.dim() > 1:
        value = value.detach().flatten(1).mean(1, dtype=dtype)
    if name not in means:
        means[name] = MeanOnDevice(device=device)
    if num_samples:
        values = value.detach(), None if value.dim() else num_samples
        count(functools.partial(means[name].update, *values))


def _check(name: str, value: Tensor, num_samples: int, device: torch.device) -> None:
    if name in OF_A_LINE:
        raise ValueError(
            f"run.log({name}=...): each line of metrics.jsonl has {name!r} already; choose another name"
        )
    if num_samples < 0:
        raise RuntimeError(
            f"run.log({name}=...) is of a batch: call it inside `for ... in run.batches()` or run.evaluate"
        )
    on_device = value.device == device or (not value.dim() and value.device.type == "cpu")
    if not on_device or value.is_complex():
        raise TypeError(
            f"run.log({name}=...) takes real values on the model's device, {device}; got {value.dtype} on "
            f"{value.device}"
        )
    if num_samples and value.dim() and len(value) != num_samples:
        raise ValueError(
            f"run.log({name}=...) takes one value per sample or their mean: the batch has {num_samples} "
            f"samples, got the shape {tuple(value.shape)}"
        )


def merged(sums: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, tuple[float, int]]:
    """The sums and counts of all ranks, by name, added up in the order of the ranks."""
    totals: dict[str, tuple[float, int]] = {}
    for theirs in sums:
        for name, (total, count) in theirs.items():
            before = totals.get(name, (0.0, 0))
            totals[name] = before[0] + total, before[1] + int(count)
    return totals


def _mean_of(sums: tuple[float, int], device: torch.device) -> MeanOnDevice:
    mean = MeanOnDevice(device=device)
    total, count = sums
    mean.load_state_dict(
        {"sum": torch.tensor(total, dtype=torch.float64), "num_samples": torch.tensor(count)}
    )
    return mean
