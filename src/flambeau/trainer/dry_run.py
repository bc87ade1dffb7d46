"""The first steps of a training, leaving nothing: `flambeau train --dry-run`."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flambeau.errors import InputError
from flambeau.parallel.ranks import join_ranks
from flambeau.run.loop.nan_guard import NotFinite
from flambeau.run.loop.progress_bar import peak_bytes
from flambeau.trainer.fit import Training
from flambeau.trainer.parts.data import Prepared
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import BY_FLAGS
from flambeau.trainer.trial_training import trial_training

_STEPS = 6
_ENOUGH_S = 20.0  # of steps; there is always a first one


def dry_run(
    prepared: Prepared,
    *,
    say: Callable[[str], None],
    micro_batch: int | Literal["auto"] | None = None,
) -> "Cost":
    """Make all that a training needs, train some steps, and say their cost; nothing is left."""
    ranks = join_ranks()
    with trial_training(prepared, micro_batch=micro_batch) as training:
        try:
            seconds = _first_steps(training, world=ranks.world)
            is_finite = not training.run.state.amp.halted
        except NotFinite:  # its message names a file in the temporary folder
            is_finite = False
        if not is_finite:
            raise InputError(
                f"within {_STEPS} steps the loss or a gradient was NaN or infinite\n{BY_FLAGS.stay_finite}"
            )
        cost = _cost(training, seconds, prepared.settings)
        if ranks.is_first:
            grows = prepared.settings.start_size is not None
            for line in _report(cost, seconds, training.run.device, grows=grows):
                say(line)
    return cost


def _first_steps(training: Training, *, world: int) -> list[float]:
    """Seconds of each of the first steps, including the wait for data."""
    run = training.run
    seconds = list[float]()

    def loss_of(batch: Any) -> Tensor:
        return training.loss_of(*batch, step=run.state.step)

    for _ in run.epochs():
        start = time.perf_counter()
        # Several ranks that halve would be started again, but nothing is left to start from.
        for _ in run.steps(loss_of, halves=world == 1):
            if run.device.type != "cpu":
                torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            # Several ranks stop together, after the same number of steps.
            if len(seconds) == _STEPS or (world == 1 and sum(seconds) > _ENOUGH_S):
                run.close()
                return seconds
    return seconds


@dataclass(frozen=True)
class Cost:
    """What a run would take here.

    Attributes:
        step_s: median of the steps after the first.
        total_s: of all steps, without evaluations; with `start_size`, of images at full size.
        memory_bytes: at the peak; 0: not known.
        fitting: samples at once that fit into memory.
        disk_bytes: of the run folder at most: its checkpoints, and the weights at the end.
    """

    first_step_s: float
    step_s: float
    steps: int
    steps_per_epoch: int
    total_s: float
    memory_bytes: int
    device: str
    batch_size: int
    fitting: int
    disk_bytes: int


def _cost(training: Training, seconds: list[float], settings: ResolvedSettings) -> Cost:
    run = training.run
    steps = run.plan.total_steps + run.plan.extension(settings.extend)
    per_step = statistics.median(seconds[1:] or seconds)
    return Cost(
        first_step_s=seconds[0],
        step_s=per_step,
        steps=steps,
        steps_per_epoch=run.plan.steps_per_epoch,
        total_s=per_step * steps,
        memory_bytes=peak_bytes(run.device),
        device=str(run.device),
        batch_size=settings.batch_size,
        fitting=run.state.micro_batch or settings.batch_size,
        disk_bytes=_disk_bytes(training, keep=settings.keep),
    )


def _disk_bytes(training: Training, *, keep: int) -> int:
    state = training.run.state
    weights = _tensor_bytes(state.model.state_dict())
    averaged = 0 if state.ema is None else _tensor_bytes(state.ema.shadow)
    checkpoint = weights + averaged + _tensor_bytes(state.optimizer.state_dict())
    return (keep + 1) * checkpoint + weights  # the newest ones and the best


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    return sum(map(_tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _report(cost: Cost, seconds: list[float], device: torch.device, *, grows: bool) -> list[str]:
    of = (
        "the first step alone" if len(seconds) == 1 else f"{len(seconds) - 1} steps after the first"
    )
    less = " and with all images at full size: those of --start-size take less" if grows else ""
    smaller = f"{cost.batch_size} samples at once do not fit into memory, {cost.fitting} do"
    return [
        *([smaller] if cost.fitting < cost.batch_size else []),
        f"first step {cost.first_step_s:.2f} s, then {cost.step_s:.3g} s per step (median of {of})",
        f"the run has {cost.steps} steps of {cost.steps_per_epoch} per epoch: about "
        f"{_duration(cost.total_s)}, without evaluations{less}",
        f"{_memory(cost.memory_bytes, device)}disk at most {cost.disk_bytes / 2**20:.0f} MiB",
        "a dry run: nothing was written",
    ]


def _memory(num: int, device: torch.device) -> str:
    where = "in this process" if device.type == "cpu" else f"on {device}"
    return f"memory at most {num / 2**20:.0f} MiB {where}, " if num else ""  # 0: not known


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
