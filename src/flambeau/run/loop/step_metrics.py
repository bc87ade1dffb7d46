"""Losses and logged means between two lines of metrics.jsonl, kept on the device and read once."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flambeau.parallel.ranks import Ranks
from flambeau.recipes.training.metrics import MeanOnDevice

_Part = TypeVar("_Part")
_SLOTS = 256  # losses that memory is made for at once; chosen


class StepMetrics:
    """The losses since the last line, and the means of the values that the user logs.

    Losses are kept in a list; adding them up would be one kernel per step. On a GPU they are copied into
    memory that stays: kept tensors would move each step's gradients to other addresses, which a `GraphReplay`
    needs. `settle` weights the ranks' losses by their samples, or with `in_parts`, where a step has the same
    parts on any number of ranks, adds up part by part, in order.
    """

    def __init__(self, device: torch.device, *, in_parts: bool = False) -> None:
        self.device = device
        self._in_parts = in_parts
        self.losses: list[Tensor] = []
        self.sizes: list[int] = []
        self.settled: list[tuple[float, int]] = []
        """Losses combined over all ranks, each with its number of samples."""
        self.logged: dict[str, MeanOnDevice] = {}
        self.wait_s = 0.0
        self.total_samples = 0
        """Samples counted since the run began, for a progress bar."""
        self._waited_before = 0.0
        self._start = time.perf_counter()
        self._slots: list[Tensor] = []  # on a GPU alone
        # With `in_parts` alone; keys are (steps done before, part).
        self._by_part: dict[tuple[int, int], dict[str, MeanOnDevice]] = {}
        self._early: dict[tuple[int, int], dict[str, list[float]]] = {}
        self._step_ends: list[int] = []  # indices in settled + losses

    def add_loss(self, loss: Tensor, num_samples: int, *, ends_step: bool = True) -> list[Tensor]:
        """Count the mean loss of a micro-batch, 0-d; returns all losses since the last line, detached."""
        detached = loss.detach()
        if type(detached) is not Tensor:  # a subclass of it, which no checkpoint can hold
            detached = detached.as_subclass(Tensor)
        if self.device.type == "cuda":
            detached = self._next_slot().copy_(detached)
        self.losses.append(detached if detached.dtype is torch.float32 else detached.float())
        self.sizes.append(num_samples)
        self.total_samples += num_samples
        if ends_step and self._in_parts:
            self._step_ends.append(len(self.settled) + len(self.losses))
        return self.losses

    def _next_slot(self) -> Tensor:
        if len(self.losses) >= len(self._slots):
            self._slots += torch.empty(_SLOTS, device=self.device, dtype=torch.float32).unbind()
        return self._slots[len(self.losses)]

    def take_back(self, num_losses: int, total_samples: int) -> None:
        """Return to an earlier number of losses and of samples."""
        del self.losses[num_losses:], self.sizes[num_losses:]
        while self._step_ends and self._step_ends[-1] > len(self.settled) + num_losses:
            self._step_ends.pop()
        self.total_samples = total_samples

    def means_of(self, step: int, sum_key: int, *, is_late: bool) -> dict[str, MeanOnDevice]:
        """The means by name of a micro-batch's logged values.

        Args:
            is_late: its backward pass is done. In parts such values count with the next step: whether this
                one has its line depends on who computes later parts.
        """
        if not self._in_parts:
            return self.logged
        return self._by_part.setdefault((step + is_late, sum_key), {})

    def settle(self, ranks: Ranks, *, step: int) -> None:
        """Combine the counts of all ranks since the last call; waits for the device."""
        if self._in_parts:
            self._settle_means_of_parts(ranks, step)
        if ranks.world == 1:
            return
        losses = torch.stack(self.losses).tolist() if self.losses else []
        if self._in_parts:
            self._settle_losses_of_parts(ranks, losses)
        else:
            self._settle_shares(ranks, losses)
        self.losses.clear()
        self.sizes.clear()

    def _settle_shares(self, ranks: Ranks, losses: list[float]) -> None:
        logged = {name: mean.sums().tolist() for name, mean in self.logged.items()}
        everyone = ranks.gather((losses, self.sizes, logged, self.wait_s))
        for shares in zip(
            *(zip(theirs, sizes, strict=True) for theirs, sizes, _, _ in everyone), strict=True
        ):
            counted = [(loss, size) for loss, size in shares if size]
            total = sum(size for _, size in counted) or 1
            self.settled.append((sum(loss * size for loss, size in counted) / total, total))
        self._set_logged(merged([theirs for _, _, theirs, _ in everyone]), ranks)
        self.wait_s = max(wait_s for *_, wait_s in everyone)

    def _settle_means_of_parts(self, ranks: Ranks, step: int) -> None:
        """Add up on rank 0, part by part, what was logged in the first `step` steps."""
        everyone = [self._early, *ranks.gather(sums_by_part(self._by_part))]
        self._by_part.clear()
        self._early = {}
        for key in sorted(set().union(*everyone)):
            theirs = [sums[key] for sums in everyone if key in sums]
            if key[0] >= step:
                counted = merged(theirs) if ranks.is_first else {}
                self._early[key] = {name: [*sums] for name, sums in counted.items()}
                continue
            so_far = {name: mean.sums().tolist() for name, mean in self.logged.items()}
            self._set_logged(merged([so_far, *theirs]), ranks)

    def _settle_losses_of_parts(self, ranks: Ranks, losses: list[float]) -> None:
        """Collect the losses of all parts, step by step; the ranks hold the parts in order."""
        base = len(self.settled)
        ends = [end - base for end in self._step_ends if end > base]
        pairs = list(zip(losses, self.sizes, strict=True))
        by_step = [pairs[start:end] for start, end in itertools.pairwise([0, *ends])]
        everyone = ranks.gather((by_step, self.wait_s))
        self._step_ends = [end for end in self._step_ends if end <= base]
        for of_step in zip(*(theirs for theirs, _ in everyone), strict=True):
            self.settled += [(loss, size) for pairs in of_step for loss, size in pairs if size]
            self._step_ends.append(len(self.settled))
        self.wait_s = max(wait_s for _, wait_s in everyone)

    def _set_logged(self, totals: Mapping[str, tuple[float, int]], ranks: Ranks) -> None:
        """Let rank 0 hold these sums and counts, and the others zeros."""
        for name, counted in totals.items():
            total, count = counted if ranks.is_first else (0.0, 0)
            mean = self.logged[name] = MeanOnDevice(device=self.device)
            mean.load_state_dict(
                {
                    "sum": torch.tensor(total, dtype=torch.float64),
                    "num_samples": torch.tensor(count),
                }
            )

    def read(self, halted_steps: Tensor) -> tuple[dict[str, float], int]:
        """A line's figures, and `halted_steps`; waits for the device and starts anew."""
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
        self._step_ends.clear()
        self.restart_clock()
        return row, int(halted)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from the figures of speed."""
        start = time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self._start = min(self._start + now - start, now)  # the clock may have restarted inside

    def restart_clock(self) -> None:
        """Exclude the time until now from the figures of speed."""
        self._waited_before += self.wait_s
        self.wait_s = 0.0
        self._start = time.perf_counter()

    @property
    def total_wait_s(self) -> float:
        """Seconds that the loop has waited for data since it began, for a progress bar."""
        return self._waited_before + self.wait_s

    @property
    def empty(self) -> bool:
        """No loss since the last line; logged values alone wait for the next one."""
        return not self.losses and not self.settled

    def state_dict(self) -> dict[str, Any]:
        """All counts so far: a resumed run writes the same next line."""
        return {
            "losses": list(self.losses),
            "sizes": list(self.sizes),
            "settled": list(self.settled),
            "logged": {name: mean.state_dict() for name, mean in self.logged.items()},
            "ends": list(self._step_ends),
            "early": [(*key, means) for key, means in self._early.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = [loss.to(self.device) for loss in state["losses"]]
        self.sizes = list(state["sizes"])
        self.settled = [(loss, size) for loss, size in state.get("settled", ())]
        self._step_ends = list(state.get("ends", ()))
        self._by_part.clear()
        self._early = {(step, part): means for step, part, means in state.get("early", ())}
        self.logged.clear()
        for name, mean in state["logged"].items():
            self.logged[name] = MeanOnDevice(device=self.device)
            self.logged[name].load_state_dict(mean)

    def leave_to_first(self) -> None:
        """Drop the counts of a loaded checkpoint: rank 0 counts them, and this is another rank."""
        self.sizes = [0] * len(self.sizes)
        self._early = {}
        self.logged.clear()


LINE_FIELDS = {"step", "epoch", "learning_rate", "learning_rates", "images_per_s", "data_wait"}
"""Names that every line of metrics.jsonl has."""


def cloned(value: Any) -> Any:
    """The value with copies of its tensors on their devices; waits for nothing."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: cloned(one) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(cloned(one) for one in value)
    return value


def add_value(
    means: dict[str, MeanOnDevice],
    name: str,
    value: Tensor | float,
    num_samples: int,
    device: torch.device,
    *,
    count: Callable[[Callable[[], object]], object] = lambda work: work(),
) -> None:
    """Count a value under a name without waiting for the device; (N, ...) counts as N means of samples.

    Args:
        num_samples: N of the last batch; 0 if it does not count, -1 without one, a RuntimeError.
        count: runs the counting, now or when the batch is done.

    Raises:
        TypeError: not a number or a tensor, or a tensor on another device.
        ValueError: no value per sample, or a name of every line.
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
    if name in LINE_FIELDS:
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
    """Sums and counts by name, added up in the order of the ranks."""
    totals: dict[str, tuple[float, int]] = {}
    for theirs in sums:
        for name, (total, count) in theirs.items():
            before = totals.get(name, (0.0, 0))
            totals[name] = before[0] + total, before[1] + int(count)
    return totals


def sums_by_part(
    means: Mapping[_Part, Mapping[str, MeanOnDevice]],
) -> dict[_Part, dict[str, list[float]]]:
    """Sum and count of each mean, read from the device in one copy."""
    on_device = [mean.sums() for of_part in means.values() for mean in of_part.values()]
    sums = iter(torch.stack(on_device).tolist() if on_device else [])
    return {part: {name: next(sums) for name in of_part} for part, of_part in means.items()}
