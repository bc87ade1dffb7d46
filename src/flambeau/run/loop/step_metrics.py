"""Figures of the steps between two log points, kept on the device and read once."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from flambeau.parallel.ranks import Ranks
from flambeau.recipes.training.metrics import MeanOnDevice

_Part = TypeVar("_Part")


class StepMetrics:
    """The losses since the last line, and the means of whatever the user logs.

    Losses are kept as they are: putting one in a list costs nothing, adding it up is an operation per step.

    Args:
        device: of the training.
        adding: how the ranks add up what they have counted.
    """

    def __init__(self, device: torch.device, adding: "Adding") -> None:
        self.device = device
        self._adding = adding
        self.losses: list[Tensor] = []
        self.logged: dict[str, MeanOnDevice] = {}
        self.wait_s = 0.0
        self.total_samples = 0
        """All that were ever counted here, for a progress bar."""
        self._waited_before = 0.0
        self.sizes: list[int] = []
        self.settled: list[tuple[float, int]] = []
        """Losses of all ranks, and of how many samples each is the mean."""
        self._start = time.perf_counter()

    def add_loss(self, loss: Tensor, num_samples: int, *, ends_step: bool = True) -> list[Tensor]:
        """Count the mean loss of a micro-batch, 0-d; returns all losses so far, float32 without a graph.

        Args:
            loss: 0-d.
            num_samples: of the micro-batch.
            ends_step: it is the last of its step; how many a step has may change from one to the next.
        """
        detached = loss.detach()
        self.losses.append(detached if detached.dtype is torch.float32 else detached.float())
        self.sizes.append(num_samples)
        self.total_samples += num_samples
        if ends_step:
            self._adding.end_step(self)
        return self.losses

    def take_back(self, num_losses: int, total_samples: int) -> None:
        """Forget the losses since there were so many, and so many samples were counted."""
        del self.losses[num_losses:], self.sizes[num_losses:]
        self.total_samples = total_samples

    def means_of(self, step: int, sum_key: int, *, is_late: bool) -> dict[str, MeanOnDevice]:
        """Where the means that are logged of a micro-batch are counted.

        Args:
            step: how many came before its step.
            sum_key: of the micro-batch.
            is_late: its backward pass is done.
        """
        return self._adding.means_of(self, step, sum_key, is_late=is_late)

    def settle(self, ranks: Ranks, *, step: int) -> None:
        """Put together what all ranks have counted since the last time; waits for the device.

        Args:
            step: how many are done.
        """
        self._adding.settle(self, ranks, step)

    def read(self, halted_steps: Tensor) -> tuple[dict[str, float], int]:
        """The row of this window, and `halted_steps` read with it; waits for the device, then starts anew."""
        figures = [torch.stack([halted_steps, *self.losses]).double()]
        means = {name: mean for name, mean in self.logged.items() if mean.num_samples}
        figures += [mean.compute().double().view(1) for mean in means.values()]
        halted, *values = torch.cat(figures).tolist()
        losses, logged = values[: len(self.losses)], values[len(self.losses) :]
        counted = [*self.settled, *zip(losses, self.sizes, strict=True)]
        seconds = max(time.perf_counter() - self._start, 1e-9)
        samples = sum(size for _, size in counted)
        row = {}
        if samples:
            row["train_loss"] = sum(loss * size for loss, size in counted) / samples
        row |= dict(zip(means, logged, strict=True))
        row["images_per_s"] = round(samples / seconds, 1)
        row["data_wait"] = round(min(1.0, self.wait_s / seconds), 4)
        for counted_so_far in (self.settled, self.losses, self.sizes, self.logged):
            counted_so_far.clear()
        self._adding.clear_ends()
        self.restart_clock()
        return row, int(halted)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the figures that depend on wall time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self._start = min(self._start + now - start, now)  # it may have begun anew inside

    def restart_clock(self) -> None:
        """Leave what happened until now out of the figures."""
        self._waited_before += self.wait_s
        self.wait_s = 0.0
        self._start = time.perf_counter()

    @property
    def total_wait_s(self) -> float:
        """Seconds that the loop has waited for data since the beginning, for a progress bar."""
        return self._waited_before + self.wait_s

    @property
    def empty(self) -> bool:
        """No loss was counted since the last line; values that were logged since then wait for the next."""
        return not self.losses and not self.settled

    def state_dict(self) -> dict[str, Any]:
        """What is counted so far, so that a resumed run writes the same next line."""
        return {
            "losses": list(self.losses),
            "sizes": list(self.sizes),
            "settled": list(self.settled),
            "logged": {name: mean.state_dict() for name, mean in self.logged.items()},
            **self._adding.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.losses = [loss.to(self.device) for loss in state["losses"]]
        self.sizes = list(state["sizes"])
        self.settled = [(loss, size) for loss, size in state.get("settled", ())]
        self._adding.load_state_dict(state)
        self.logged.clear()
        for name, mean in state["logged"].items():
            self.logged[name] = MeanOnDevice(device=self.device)
            self.logged[name].load_state_dict(mean)

    def leave_to_first(self) -> None:
        """What a checkpoint has brought is counted by rank 0: here, on another one, it counts for nothing."""
        self.sizes = [0] * len(self.sizes)
        self._adding.leave_to_first()
        self.logged.clear()


class Adding(Protocol):
    """How ranks add up what they have counted: a strategy for what they share."""

    def end_step(self, window: StepMetrics) -> None:
        """The last loss of a step was counted."""

    def means_of(
        self, window: StepMetrics, step: int, sum_key: int, *, is_late: bool
    ) -> dict[str, MeanOnDevice]:
        """As `StepMetrics.means_of` says."""

    def settle(self, window: StepMetrics, ranks: Ranks, step: int) -> None:
        """As `StepMetrics.settle` says."""

    def clear_ends(self) -> None:
        """The losses so far are in a line."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the window: `ends` and `early`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def leave_to_first(self) -> None:
        """Count nothing of what a checkpoint has brought: rank 0 does."""


class AddingShares:
    """Each rank has a share of every micro-batch: their losses are one, weighted by their samples."""

    def end_step(self, window: StepMetrics) -> None:
        """Nothing depends on it."""

    def means_of(
        self, window: StepMetrics, step: int, sum_key: int, *, is_late: bool
    ) -> dict[str, MeanOnDevice]:
        """One mean for all micro-batches."""
        return window.logged

    def settle(self, window: StepMetrics, ranks: Ranks, step: int) -> None:
        """Weigh the losses of the ranks by their samples, and add up the means."""
        if ranks.world == 1:
            return
        losses = torch.stack(window.losses).tolist() if window.losses else []
        logged = {name: mean.sums().tolist() for name, mean in window.logged.items()}
        everyone = ranks.gather((losses, window.sizes, logged, window.wait_s))
        for shares in zip(
            *(zip(theirs, sizes, strict=True) for theirs, sizes, _, _ in everyone), strict=True
        ):
            counted = [(loss, size) for loss, size in shares if size]
            total = sum(size for _, size in counted) or 1
            window.settled.append((sum(loss * size for loss, size in counted) / total, total))
        window.losses.clear()
        window.sizes.clear()
        for name, sums in merged([theirs for _, _, theirs, _ in everyone]).items():
            window.logged[name] = _mean_of(sums if ranks.is_first else (0.0, 0), window.device)
        window.wait_s = max(wait_s for *_, wait_s in everyone)

    def clear_ends(self) -> None:
        """There are none."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing, under the names that a checkpoint has."""
        return {"ends": [], "early": []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing."""

    def leave_to_first(self) -> None:
        """There is nothing."""


class AddingParts:
    """A step has the same parts for any number of ranks: all is added up part by part, in their order."""

    def __init__(self) -> None:
        self._by_part: dict[tuple[int, int], dict[str, MeanOnDevice]] = {}
        self._early: dict[tuple[int, int], dict[str, list[float]]] = {}
        self._ends: list[int] = []

    def end_step(self, window: StepMetrics) -> None:
        """Note where the losses of the step end."""
        self._ends.append(len(window.settled) + len(window.losses))

    def means_of(
        self, window: StepMetrics, step: int, sum_key: int, *, is_late: bool
    ) -> dict[str, MeanOnDevice]:
        """A mean for each part; what comes late counts with the next step.

        Whether this step has a line by then depends on who computes the parts after it.
        """
        return self._by_part.setdefault((step + is_late, sum_key), {})

    def settle(self, window: StepMetrics, ranks: Ranks, step: int) -> None:
        """Add up the means of the steps that are done, and bring the losses of all parts to all ranks."""
        self._settle_means(window, ranks, step)
        if ranks.world > 1:
            self._settle_losses(window, ranks)

    def _settle_means(self, window: StepMetrics, ranks: Ranks, step: int) -> None:
        """What was logged of the parts of the first `step` steps, added up in their order, on rank 0."""
        everyone = [self._early, *ranks.gather(sums_by_part(self._by_part))]
        self._by_part.clear()
        self._early = {}
        for key in sorted(set().union(*everyone)):
            theirs = [sums[key] for sums in everyone if key in sums]
            if key[0] >= step:
                counted = merged(theirs) if ranks.is_first else {}
                self._early[key] = {name: [*sums] for name, sums in counted.items()}
                continue
            so_far = {name: mean.sums().tolist() for name, mean in window.logged.items()}
            for name, sums in merged([so_far, *theirs]).items():
                window.logged[name] = _mean_of(sums if ranks.is_first else (0.0, 0), window.device)

    def _settle_losses(self, window: StepMetrics, ranks: Ranks) -> None:
        """The losses of all parts, step by step, in the order of the ranks, which is that of the parts."""
        losses = torch.stack(window.losses).tolist() if window.losses else []
        base = len(window.settled)
        ends = [end - base for end in self._ends if end > base]
        pairs = list(zip(losses, window.sizes, strict=True))
        own = [pairs[start:end] for start, end in itertools.pairwise([0, *ends])]
        everyone = ranks.gather((own, window.wait_s))
        self._ends = [end for end in self._ends if end <= base]
        for of_step in zip(*(theirs for theirs, _ in everyone), strict=True):
            window.settled += [(loss, size) for pairs in of_step for loss, size in pairs if size]
            self._ends.append(len(window.settled))
        window.losses.clear()
        window.sizes.clear()
        window.wait_s = max(wait_s for _, wait_s in everyone)

    def clear_ends(self) -> None:
        """The losses so far are in a line."""
        self._ends.clear()

    def state_dict(self) -> dict[str, Any]:
        """Where steps end, and what was logged of steps that are not done."""
        return {
            "ends": list(self._ends),
            "early": [(*key, means) for key, means in self._early.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._ends = list(state.get("ends", ()))
        self._by_part.clear()
        self._early = {(step, part): means for step, part, means in state.get("early", ())}

    def leave_to_first(self) -> None:
        """Rank 0 counts what was logged early."""
        self._early = {}


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


def sums_by_part(
    means: Mapping[_Part, Mapping[str, MeanOnDevice]],
) -> dict[_Part, dict[str, list[float]]]:
    """Sum and count of each mean, in one look at the device."""
    all_of_them = [mean.sums() for of_part in means.values() for mean in of_part.values()]
    sums = iter(torch.stack(all_of_them).tolist() if all_of_them else [])
    return {part: {name: next(sums) for name in of_part} for part, of_part in means.items()}


def _mean_of(sums: tuple[float, int], device: torch.device) -> MeanOnDevice:
    mean = MeanOnDevice(device=device)
    total, count = sums
    mean.load_state_dict(
        {"sum": torch.tensor(total, dtype=torch.float64), "num_samples": torch.tensor(count)}
    )
    return mean
