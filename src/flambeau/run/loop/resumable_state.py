"""Everything of a run that a checkpoint holds, in one object: copied by a snapshot, loaded by a resume."""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.setup.seeding import rng_state, set_rng_state
from flambeau.recipes.training.amp_step import AmpStep
from flambeau.recipes.training.ema import EMA
from flambeau.run.folder.checkpointer import (
    Restored,
    Snapshot,
    copies,
    copy_nested,
    why_not_loadable,
)
from flambeau.run.folder.metrics_log import json_numbers
from flambeau.run.folder.published_weights import Best, Result
from flambeau.run.loop.step_metrics import StepMetrics

_SCALE_FLOOR = 2.0**-20
"""An fp16 loss scale below it: no step has worked for long. Chosen, untested."""


@runtime_checkable
class CountedByRanks(Protocol):
    """An object of `state` that each rank counts for itself, and that rank 0 saves for all.

    Attributes:
        may_be_missing: a checkpoint of an earlier version, which has nothing of it, can be resumed.
    """

    may_be_missing: bool

    def settle_ranks(self, ranks: Ranks) -> None:
        """Bring what all ranks have counted to rank 0; all of them call it, before a checkpoint."""

    def leave_to_first(self) -> None:
        """Count nothing of what a checkpoint has brought: this is not rank 0, which counts it."""

    def take_back(self) -> None:
        """Forget what was counted of the global batch under way, which begins again."""


@dataclass
class ResumableState:
    """The parts of a run that change from step to step.

    Attributes:
        model: what torch.compile wraps, if it does.
        user: objects of the user's with state_dict and load_state_dict.
        data_length: of the training data, in the unit of `position`.
        step: optimizer steps done.
        epoch: from 0.
        position: what of the epoch is consumed.
        order_crc: CRC-32 over all sample indices consumed so far: two runs of equal order have equal ones.
        metrics: of the last evaluation.
        rollbacks: how often the run went back from a step that was not finite.
        lr_scale: what they have made of the learning rate.
        stopped: the run was ended by `run.stop()`.
        micro_batch: samples per forward pass now, of all ranks; None where batches come ready. A checkpoint
            says it; a resume goes by what its folder and options say.
        micro: the batch under way, or the last one, without its data; of no checkpoint.
        extend: what the steps so far were trained for beyond `duration`; the option may ask for more.
    """

    model: nn.Module
    optimizer: Optimizer
    amp: AmpStep
    ema: EMA | None
    window: StepMetrics
    best: Best
    user: Mapping[str, Any]
    data_length: int
    step: int = 0
    epoch: int = 0
    position: int = 0
    order_crc: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    rollbacks: int = 0
    lr_scale: float = 1.0
    stopped: bool = False
    extend: str | None = None
    micro_batch: int | None = None
    micro: MicroBatch | None = None

    def __post_init__(self) -> None:
        self._shapes = _shapes(self.model)

    def check_shapes(self) -> None:
        """See that what is saved of the model still has the shapes that a new start will have.

        Raises:
            InputError: it has not, so no resume could put it back.
        """
        now = _shapes(self.model)
        for name in {**self._shapes, **now}:
            if self._shapes.get(name) != now.get(name):
                raise InputError(
                    f"'{name}' of the model was {self._shapes.get(name, 'missing')} when the run started and "
                    f"is {now.get(name, 'missing')} now, so no resume could put it back: change the model "
                    "before Run, or leave what the model makes again out of checkpoints, with "
                    "register_buffer(..., persistent=False)"
                )

    def settle(self, ranks: Ranks) -> None:
        """Put together on rank 0 what each rank has counted, before a snapshot; all ranks call it."""
        self.window.settle(ranks, step=self.step)
        for thing in self.counted_by_ranks():
            thing.settle_ranks(ranks)

    def leave_to_first(self) -> None:
        """What a checkpoint has brought is counted by rank 0: here, on another one, it counts for nothing."""
        self.window.leave_to_first()
        for thing in self.counted_by_ranks():
            thing.leave_to_first()

    def counted_by_ranks(self) -> list[CountedByRanks]:
        """Of the user's objects those that ranks count together."""
        return [thing for thing in self.user.values() if isinstance(thing, CountedByRanks)]

    def snapshot(self, *, metrics: tuple[int, int], exactness: Mapping[str, Any]) -> Snapshot:
        """A copy of everything on the CPU; waits for the device. Raises InputError as `check_shapes` does.

        Args:
            metrics: the length of metrics.jsonl at this point, and the CRC-32 of that much of it.
            exactness: what else decides the bits, for a resume.
        """
        self.check_shapes()
        place = {name: getattr(self, name) for name in _PLACE}
        metrics_bytes, metrics_crc32 = metrics
        state = {
            **place,
            "data_length": self.data_length,
            "extend": self.extend,
            "micro_batch": self.micro_batch,
            "metrics_bytes": metrics_bytes,
            "best": self.best.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": self.amp.state_dict(),
            "ema_updates": None if self.ema is None else self.ema.num_updates,
            "rng": rng_state(),
            "window": self.window.state_dict(),
            "user": {name: thing.state_dict() for name, thing in self.user.items()},
        }
        meta = {
            **place,
            "micro_batch": self.micro_batch,
            "metrics": json_numbers(self.metrics),
            "metrics_bytes": metrics_bytes,
            "metrics_crc32": metrics_crc32,
            "exactness": exactness,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        return Snapshot(
            model=copies(self.model.state_dict()),
            ema=None if self.ema is None else copies(self.ema.shadow),
            state=copy_nested(state),
            meta=meta,
        )

    @property
    def is_bad(self) -> bool:
        """A step was not finite, or none works any more in fp16; waits for the device."""
        return bool(self.amp.halted) or self.amp.loss_scale() < _SCALE_FLOOR

    def read_window(self, halted_steps: Tensor) -> tuple[dict[str, Any], int]:
        """The line of the steps since the last one, and how many of them are undone; waits for the device."""
        figures, halted = self.window.read(halted_steps)
        row: dict[str, Any] = {**figures}
        if self.amp.precision == "fp16":
            row["loss_scale"] = self.amp.loss_scale()
            halted = halted or int(row["loss_scale"] < _SCALE_FLOOR)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        row["learning_rate"] = max(rates)
        if len(set(rates)) > 1:
            row["learning_rates"] = rates
        return row, halted

    def results(self) -> list[Result]:
        """Which weights the run publishes, the preferred first: the averaged, or the best, or the last."""
        last = Result(weights="last", step=self.step, metrics=self.metrics)
        if self.ema is not None:
            return [dataclasses.replace(last, weights="ema")]
        if self.best.step is not None:
            return [Result("best", self.best.step, self.best.metrics), last]
        return [last]

    def load(self, found: Restored) -> None:
        """Put a checkpoint back.

        Raises:
            InputError: the data have another length, the model other tensors, the optimizer other groups.
        """
        state = found.state
        if state["data_length"] != self.data_length:
            raise InputError(
                f"the run was started on {state['data_length']} samples (or batches) and there are "
                f"{self.data_length} now; restore the data, or start again in another folder"
            )
        why = why_not_loadable(self.model, found.model)
        if why is not None:
            raise InputError(
                f"checkpoint {found.name} is of another model: {why}; use another folder"
            )
        user = self._user_parts(state["user"])
        self.model.load_state_dict(found.model)
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise InputError(
                f"checkpoint {found.name} is of an optimizer with other parameter groups, perhaps of another "
                f"version of flambeau: {error}; use another folder"
            ) from error
        _lay_out_alike(self.optimizer)
        self.amp.load_state_dict(state["amp"])
        self.amp.halted.zero_()  # of a step that is undone
        if self.ema is not None:
            self.ema.load_state_dict({"shadow": found.ema, "num_updates": state["ema_updates"]})
        self.best.load_state_dict(state["best"])
        self.window.load_state_dict(state["window"])
        for name, thing in user.items():
            thing.load_state_dict(state["user"][name])
        set_rng_state(state["rng"])
        self.extend = state.get("extend", self.extend)
        for name in _PLACE:
            setattr(self, name, state.get(name, getattr(self, name)))

    def _user_parts(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The objects that get back what was saved of them."""
        parts = {
            name: thing
            for name, thing in self.user.items()
            if name in saved or not (isinstance(thing, CountedByRanks) and thing.may_be_missing)
        }
        if saved.keys() != parts.keys():
            raise InputError(
                f"the run was saved with state={sorted(saved)}, now {sorted(self.user)}"
            )
        return parts


def _lay_out_alike(optimizer: Optimizer) -> None:
    """Give each tensor of the optimizer's state the strides of its parameter.

    A sharded run saves pieces without those of channels_last, and a fused step goes through the memory of
    both at once: the momentum of one weight would be taken for that of another.
    """
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            is_alike = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_alike and value.stride() != parameter.stride():
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {k: tuple(v.shape) for k, v in model.state_dict().items() if isinstance(v, Tensor)}


_PLACE = (
    "step",
    "epoch",
    "position",
    "order_crc",
    "metrics",
    "rollbacks",
    "lr_scale",
    "stopped",
)
