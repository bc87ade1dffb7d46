"""What the loop of a run remembers: `ResumableState` is saved in checkpoints, `TransientState` is not."""

import contextlib
import dataclasses
import enum
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flambeau.data.loading.loader_place import LoaderPlace
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.setup.seeding import rng_state, set_rng_state
from flambeau.recipes.training.amp_step import AmpStep
from flambeau.recipes.training.ema import EMA
from flambeau.recipes.training.metrics import MeanOnDevice
from flambeau.run.folder.checkpointer import (
    EXTRA_STATE,
    Restored,
    Snapshot,
    copies,
    copy_nested,
    why_not_loadable,
)
from flambeau.run.folder.metrics_log import json_numbers
from flambeau.run.folder.published_weights import Best, Result
from flambeau.run.loop.model_state import load_entries, model_entries, shapes
from flambeau.run.loop.step_metrics import StepMetrics

_SCALE_FLOOR = 2.0**-20
"""With an fp16 loss scale below this, no step has succeeded for long. Chosen, untested."""
_SAVED_FIELDS = (
    "step",
    "epoch",
    "position",
    "order_crc",
    "metrics",
    "rollbacks",
    "lr_scale",
    "stopped",
    "planned",
)


@runtime_checkable
class CountedByRanks(Protocol):
    """An object in `state=` that each rank counts and rank 0 saves for all.

    Attributes:
        may_be_missing: older checkpoints without it can still be resumed.
    """

    may_be_missing: bool

    def settle_ranks(self, ranks: Ranks) -> None:
        """Bring the counts of all ranks to rank 0, before a checkpoint; every rank calls it."""

    def leave_to_first(self) -> None:
        """Count nothing of a loaded checkpoint: this is not rank 0, which counts it."""

    def take_back(self) -> None:
        """Forget what was counted in the current global batch, which starts over."""


@dataclass
class ResumableState:
    """What a checkpoint holds. In brackets: who writes the field, besides `load` and `undo_global_batch`.

    Attributes:
        model: the module inside torch.compile, or this rank's pieces of a sharded one.
        window: losses and logged means since the last line. [TrainingStep, Run.log and Run.batches add to it,
            Lifecycle reads and clears it]
        best: the best evaluation so far. [Lifecycle]
        user: the objects given as `state=`, and the schedule if it has state.
        data_length: samples of an epoch, or batches of a ready-made loader. [never changed]
        place: of a ready-made loader; None for a data set. [UserDataLoader]
        step: optimizer steps done. [TrainingStep]
        epoch: from 0. [Lifecycle]
        position: how much of the epoch is consumed, in the unit of `data_length`.
            [TrainingStep; Lifecycle sets it to 0 at the end of an epoch]
        order_crc: CRC-32 of all sample indices consumed. [TrainingStep]
        metrics: figures of the last evaluation. [Lifecycle]
        rollbacks: returns to a checkpoint after a step that was not finite. [NanGuard]
        lr_scale: factor of the learning rate after them. [NanGuard; find_lr and replay_nan_step of the
            trainer]
        stopped: `run.stop()` has ended the run. [Lifecycle]
        planned: step of the newest checkpoint that a run without stops has, too, for a rollback; None in
            version 0.1. [Lifecycle]
        extend: extension of `duration` that the steps so far were trained for. [Lifecycle]
        micro_batch: samples per forward pass of all ranks; None for ready-made batches. [MemoryGuard]
            Checkpoints record it, but a resume follows the run folder and the options.
        micro: the current or last one without data; not saved. [Run.batches, TrainingStep]
    """

    model: nn.Module
    optimizer: Optimizer
    amp: AmpStep
    ema: EMA | None
    window: StepMetrics
    best: Best
    user: Mapping[str, Any]
    data_length: int
    place: LoaderPlace | None = None
    step: int = 0
    epoch: int = 0
    position: int = 0
    order_crc: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    rollbacks: int = 0
    lr_scale: float = 1.0
    stopped: bool = False
    planned: int | None = None
    extend: str | None = None
    micro_batch: int | None = None
    micro: MicroBatch | None = None

    def __post_init__(self) -> None:
        self._shapes = shapes(self.model)
        self._batch_start = 0, 0, (0, 0)

    def check_shapes(self) -> None:
        """InputError if the model's saved tensors have new shapes, which a new start could not load."""
        now = shapes(self.model)
        for name in {**self._shapes, **now}:
            if self._shapes.get(name) != now.get(name):
                raise InputError(
                    f"'{name}' of the model was {self._shapes.get(name, 'missing')} when the run started and "
                    f"is {now.get(name, 'missing')} now, so no resume could put it back: change the model "
                    "before Run, or leave what the model makes again out of checkpoints, with "
                    "register_buffer(..., persistent=False)"
                )

    def settle(self, ranks: Ranks) -> None:
        """Combine on rank 0 what each rank has counted, before a snapshot; every rank calls it."""
        self.window.settle(ranks, step=self.step)
        for thing in self._counted_by_ranks():
            thing.settle_ranks(ranks)

    def leave_to_first(self) -> None:
        """On other ranks than 0: drop the counts of a loaded checkpoint, which rank 0 counts."""
        self.window.leave_to_first()
        for thing in self._counted_by_ranks():
            thing.leave_to_first()

    def begin_global_batch(self) -> None:
        """Note what `undo_global_batch` returns to."""
        window = self.window
        counts = len(window.losses), window.total_samples
        self._batch_start = self.position, self.order_crc, counts

    def undo_global_batch(self) -> None:
        """Remove what the unfinished global batch has counted, and its gradients."""
        self.position, self.order_crc, counts = self._batch_start
        self.window.take_back(*counts)
        for thing in self._counted_by_ranks():
            thing.take_back()
        self.optimizer.zero_grad(set_to_none=True)

    def _counted_by_ranks(self) -> list[CountedByRanks]:
        return [thing for thing in self.user.values() if isinstance(thing, CountedByRanks)]

    def snapshot(self, *, metrics: tuple[int, int], exactness: Mapping[str, Any]) -> Snapshot:
        """A copy of everything on the CPU; waits for the device. InputError as of `check_shapes`.

        `metrics`: length of metrics.jsonl now, and its CRC-32; `exactness`: what else decides the bits of a
        resume.
        """
        self.check_shapes()
        fields = {name: getattr(self, name) for name in _SAVED_FIELDS}
        metrics_bytes, metrics_crc32 = metrics
        weights, rest = model_entries(self.model)
        state = {
            **fields,
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
        if self.place is not None:
            state["loader"] = self.place.saved(self._place)
        if rest:
            state["model"] = rest
        meta = {
            **fields,
            "micro_batch": self.micro_batch,
            "metrics": json_numbers(self.metrics),
            "metrics_bytes": metrics_bytes,
            "metrics_crc32": metrics_crc32,
            "exactness": exactness,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        return Snapshot(
            model=copies(weights),
            ema=None if self.ema is None else copies(self.ema.shadow),
            state=copy_nested(state),
            meta=meta,
        )

    @property
    def is_bad(self) -> bool:
        """Whether a step was not finite, or fp16 scaling no longer succeeds; waits for the device."""
        return bool(self.amp.halted) or self.amp.loss_scale() < _SCALE_FLOOR

    def read_window(self) -> tuple[dict[str, Any], int]:
        """The figures since the last line, and the steps to undo; waits for the device."""
        figures, halted = self.window.read(self.amp.num_halted)
        row: dict[str, Any] = {**figures}
        if self.amp.precision == "fp16":
            row["loss_scale"] = self.amp.loss_scale()
            halted = halted or int(row["loss_scale"] < _SCALE_FLOOR)
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        row["learning_rate"] = max(rates)
        if len(set(rates)) > 1:
            row["learning_rates"] = rates
        return row, halted

    def results(self) -> list[Result]:
        """The weights to publish, preferred first: the average, or the best and then the last."""
        last = Result(weights="last", step=self.step, metrics=self.metrics)
        if self.ema is not None:
            return [dataclasses.replace(last, weights="ema")]
        if self.best.step is not None:
            return [Result("best", self.best.step, self.best.metrics), last]
        return [last]

    def load(self, restored: Restored) -> None:
        """Load a checkpoint; InputError: another data length, other tensors or optimizer's groups."""
        state = restored.state
        if state["data_length"] != self.data_length:
            raise InputError(
                f"the run was started on {state['data_length']} samples (or batches) and there are "
                f"{self.data_length} now; restore the data, or start again in another folder"
            )
        model = {**restored.model, **state.get("model", {})}
        why = why_not_loadable(self.model, model) or _other_dtype(self.model, model)
        if why is not None:
            raise InputError(
                f"checkpoint {restored.name} is of another model: {why}; use another folder"
            )
        user = self._user_parts(state["user"])
        load_entries(self.model, model)
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise InputError(
                f"checkpoint {restored.name} is of an optimizer with other parameter groups, perhaps of "
                f"another version of flambeau: {error}; use another folder"
            ) from error
        _keep_dtypes(self.optimizer, state["optimizer"])
        _lay_out_alike(self.optimizer)
        self.amp.load_state_dict(state["amp"])
        self.amp.clear_halt()  # it belongs to a step that is undone
        if self.ema is not None:
            self.ema.load_state_dict({"shadow": restored.ema, "num_updates": state["ema_updates"]})
        self.best.load_state_dict(state["best"])
        self.window.load_state_dict(state["window"])
        for name, thing in user.items():
            thing.load_state_dict(state["user"][name])
        set_rng_state(state["rng"])
        self.extend = state.get("extend", self.extend)
        for name in _SAVED_FIELDS:
            setattr(self, name, state.get(name, getattr(self, name)))
        if self.place is not None:
            self.place.restore(self._place, state.get("loader"))

    @property
    def _place(self) -> tuple[int, int]:
        """Epoch and position; the end of an epoch is the beginning of the next one."""
        is_over = self.position >= self.data_length
        return (self.epoch + 1, 0) if is_over else (self.epoch, self.position)

    def _user_parts(self, saved: Mapping[str, Any]) -> dict[str, Any]:
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


def _other_dtype(model: nn.Module, saved: Mapping[str, Any]) -> str | None:
    """Which tensor a resume would round; None if none. Extra state may change."""
    for name, value in model.state_dict().items():
        there = saved[name]
        if not isinstance(value, Tensor) or not isinstance(there, Tensor):
            continue
        if there.dtype is not value.dtype and not name.endswith(EXTRA_STATE):
            return f"'{name}' is {there.dtype}, the model's {value.dtype}"
    return None


def _keep_dtypes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give the optimizer's state its own dtypes back: torch casts it to those of the parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            now = optimizer.state[parameter][name]
            if isinstance(value, Tensor) and value.dtype is not now.dtype:
                optimizer.state[parameter][name] = value.to(now.device)


def _lay_out_alike(optimizer: Optimizer) -> None:
    """Give each tensor of the optimizer's state the strides of its parameter.

    A sharded run saves pieces without channels_last strides, and a fused step walks both memories in the same
    order: it would pair a weight with the momentum of another.
    """
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            is_alike = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_alike and value.stride() != parameter.stride():
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class Phase(enum.Enum):
    """How far the current global batch is, and whether it can be undone and started over.

    The methods of `TransientState` make the transitions:

        BETWEEN -> REVOCABLE (first forward pass, inside `run.halving()`) -> REVOCABLE_PARTIAL -> BETWEEN
        BETWEEN -> PARTIAL (a backward pass outside of `run.halving()`) -> BETWEEN
        BETWEEN -> EVALUATED (a batch of an evaluation, inside `run.halving()`) -> BETWEEN
        REVOCABLE, REVOCABLE_PARTIAL, EVALUATED -> OUT_OF_MEMORY -> BETWEEN
        REVOCABLE, REVOCABLE_PARTIAL -> REPEATED -> REVOCABLE (a step that StepCheck has computed once)

    An evaluation starts in BETWEEN and restores the phase at its end.
    """

    BETWEEN = "there are no gradients"
    REVOCABLE = "the first forward pass is running, and its counts can be undone"
    REVOCABLE_PARTIAL = "some micro-batches have gradients, and their counts can be undone"
    PARTIAL = "some micro-batches have gradients"
    EVALUATED = "a batch of an evaluation is running, which can be cut in two"
    OUT_OF_MEMORY = "memory ran out, and the batch will be repeated"
    REPEATED = "the step is undone, and its micro-batches come again"


class Place(enum.Enum):
    """Where in the user's loop a process is."""

    OUTSIDE = "before run.epochs()"
    EPOCH = "in an epoch, before its run.batches()"
    BATCHES = "in run.batches(), or after it"


_REVOCABLE = (Phase.REVOCABLE, Phase.REVOCABLE_PARTIAL)
_PARTIAL = (Phase.PARTIAL, Phase.REVOCABLE_PARTIAL)


@dataclass
class TransientState:
    """What the loop remembers between its methods; not saved. In brackets: who writes the field.

    Attributes:
        next_event: the next step with a line, a checkpoint or the end; in a new run 1. [Lifecycle]
        saved_step: step of the newest checkpoint; -1 before the first. [Lifecycle]
        again: micro-batches that come before those of the stream. [StepCheck, Run.batches, `give_up`]
        stream: micro-batches from here on; None: to be opened. [Run.batches opens it, StepCheck reads a step
            from it, Lifecycle and `give_up` close it]
        micro: the micro-batch that waits for `run.step`. [`begin`, Run.step, `keep`]
        done: the last micro-batch of a step, until the loop's body has ended. [Run.step, Lifecycle]
        part_of: steps done before the last micro-batch, and its `sum_key`. [`begin`, `keep`]
        num_samples: size of the last batch, for logged means; -1 before the first.
            [`begin`, `keep`, `evaluating`; in an evaluation MemoryGuard]
        indices: positions in the data of an evaluation's last batch, if known. [MemoryGuard]
        stop_requested: this rank has called `run.stop()`; others may not know it yet. [Run.stop]
        evaluated: the means of the current evaluation; None in training. [Run.evaluate, `evaluating`]
        place: where in the user's loop this process is. [Lifecycle]
        phase: of the current global batch. [the methods below]
        held_back: logged values that count once the global batch is done. [`count`, `settle`]
    """

    next_event: int = 0
    saved_step: int = -1
    again: deque[MicroBatch] = field(default_factory=deque)
    stream: Iterator[MicroBatch] | None = None
    micro: MicroBatch | None = None
    done: MicroBatch | None = None
    part_of: tuple[int, int] = (0, 0)
    num_samples: int = -1
    indices: Tensor | None = None
    stop_requested: bool = False
    evaluated: dict[str, MeanOnDevice] | None = None
    place: Place = Place.OUTSIDE
    phase: Phase = Phase.BETWEEN
    held_back: list[Callable[[], object]] = field(default_factory=list)

    def begin(self, micro: MicroBatch, *, step: int) -> None:
        """Note the micro-batch that the loop's body gets next, after `step` steps."""
        self.micro = micro
        self.num_samples = micro.size
        self.part_of = step, micro.sum_key

    def keep(self) -> Callable[[], None]:
        """Save and clear the current micro-batch; the returned function restores it."""
        kept = self.micro, self.num_samples, self.part_of
        self.micro = None

        def put_back() -> None:
            self.micro, self.num_samples, self.part_of = kept

        return put_back

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """An evaluation; afterwards the current training batch is as before."""
        kept = self.num_samples, self.phase, self.held_back
        self.phase = Phase.BETWEEN
        self.held_back = []
        try:
            yield
        finally:
            self.evaluated = None
            self.num_samples, self.phase, self.held_back = kept

    # ---------------------------------------------------------------- the phase of the global batch

    @property
    def is_partial(self) -> bool:
        """Some, but not all, micro-batches of the global batch have gradients."""
        return self.phase in _PARTIAL

    @property
    def is_revocable(self) -> bool:
        """The global batch can be undone and started over."""
        return self.phase in _REVOCABLE

    @property
    def is_out_of_memory(self) -> bool:
        """Memory ran out, and the current batch will be repeated."""
        return self.phase is Phase.OUT_OF_MEMORY

    def begin_revocable(self) -> None:
        self.phase = Phase.REVOCABLE

    def begin_evaluated(self) -> None:
        self.phase = Phase.EVALUATED

    def end_evaluated(self) -> None:
        """An evaluation's batch is done; its values count unless it ran out of memory."""
        if self.is_out_of_memory:
            self.held_back.clear()
        self.phase = Phase.BETWEEN
        self.settle()

    def end_part(self, *, ends_batch: bool) -> None:
        """The backward pass of a micro-batch is done; after the last, the logged values count."""
        if ends_batch:
            self.phase = Phase.BETWEEN
            self.settle()
        else:
            self.phase = Phase.REVOCABLE_PARTIAL if self.is_revocable else Phase.PARTIAL

    @property
    def will_be_repeated(self) -> bool:
        """The current batch comes again: what the rest of the loop's body counts does not count."""
        return self.phase in (Phase.OUT_OF_MEMORY, Phase.REPEATED)

    def run_out(self) -> None:
        self.phase = Phase.OUT_OF_MEMORY

    def repeat_next(self) -> None:
        """The micro-batches in `again` are of the same global batch; what was logged for it is dropped."""
        self.phase = Phase.REPEATED
        self.held_back.clear()

    def give_up(self) -> None:
        self.again.clear()
        self.stream = None
        self.micro = None
        self.phase = Phase.BETWEEN
        self.held_back.clear()

    @property
    def holds_back(self) -> bool:
        """Whether a value logged now counts later: keep a copy."""
        return self.is_revocable or self.phase is Phase.EVALUATED

    def count(self, work: Callable[[], object]) -> None:
        """Count a value of the current batch: now, or at its end if the batch may be undone.

        Nothing counts where the batch will be repeated.
        """
        if self.holds_back:
            self.held_back.append(work)
        elif not self.will_be_repeated:
            work()

    def settle(self) -> None:
        """The current batch is done: count its logged values."""
        for work in self.held_back:
            work()
        self.held_back.clear()

    def restart(self, *, saved_step: int, next_event: int) -> None:
        """Be as a new process that has loaded a checkpoint."""
        self.give_up()
        self.next_event = next_event
        self.saved_step = saved_step
        self.done = None
        self.evaluated = None
        self.stop_requested = False
        self.num_samples = 0
