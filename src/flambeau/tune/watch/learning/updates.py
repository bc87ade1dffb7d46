"""Gradients and updates: who computes, clears, clips and uses them, and in which order."""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flambeau.recipes.training.amp_step import AmpStep
from flambeau.tune.watch.learning.losses import LossCall
from flambeau.tune.watch.learning.measures import is_added, is_mean_of_logarithms, tensors_in
from flambeau.tune.watch.learning.notes import Notes, line_here
from flambeau.tune.watch.stack_phases import CodeLocation, is_torchs

_MOST_VALUES = 1_000_000  # of a parameter that are compared with those before a step; chosen


class OptimizerSeen:
    """What is known of one optimizer. It is kept alive, so that its `id` stays its own."""

    def __init__(self, optimizer: Optimizer, where: CodeLocation | None) -> None:
        self.optimizer, self.where = optimizer, where
        self.made_s = time.monotonic()
        self.stepped_s = 0.0  # when its last step ended
        self.steps = self.cleared = self.cleared_too_soon = self.watched = 0
        self.first_step = self.last_step = 0  # among the steps of all optimizers
        self.is_cleared = True
        self.has_closure = self.in_step = False
        self.closure_calls = self.closure_clears = 0  # backward passes within steps
        self.is_left = self.has_new = False  # gradients that another optimizer's step has left
        self.backward_since_clear = self.backwards_since_step = 0
        self.waiting = self.num_used = 0  # backward passes, for a step and by all steps
        self.unused: dict[CodeLocation | None, int] = {}  # passes cleared before a step, by line
        self.used: set[CodeLocation | None] = set()  # lines of passes that a step has used
        self.gradients: dict[int, Tensor] = {}
        self.with_gradient: set[int] = set()
        self.with_value: dict[int, int] = {}
        self.ratios: list[float] = []
        self.rates: list[float] = []
        self.decay = 0.0  # largest share of the weights that decay removes in a step
        self.schedule_line: CodeLocation | None = None
        self.step_line: CodeLocation | None = None
        self.zero_line: CodeLocation | None = None

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def note_cleared(self) -> None:
        self.is_cleared = True
        self.is_left = self.has_new = False
        self.waiting = 0


class UpdateWatch:
    """Hooks around backward, optimizers, clipping, GradScaler and schedules.

    Attributes:
        backwards: calls of backward so far.
        whole: the only call of a loss, with whose value the last backward pass began; None if it did not.
        losses: the first 2000 values that backward began from.
    """

    def __init__(self, notes: Notes, is_open: Callable[[], bool]) -> None:
        self._notes, self._is_open = notes, is_open
        self.seen: dict[int, OptimizerSeen] = {}
        self.backwards = 0
        self._clipped_first: set[CodeLocation | None] = set()  # lines, before any backward
        self.losses: list[float] = []
        self.backward_line: CodeLocation | None = None
        self.criterion: LossCall | None = None
        self.criteria = 0
        self.whole: LossCall | None = None
        self.after_step: Callable[[], None] = lambda: None
        self.after_backward: Callable[[], None] = lambda: None
        self._before: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._in_scaler = self._in_backward = False
        self._scaled = False
        self._num_steps = 0
        self._kept_loss: tuple[Any, int] | None = None  # its node and step
        self._unscaled: set[int] = set()

    def install(self) -> None:
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._wrap(Optimizer, "__init__", after=self._made)
        self._wrap(Optimizer, "zero_grad", before=self._cleared)
        self._wrap(nn.Module, "zero_grad", before=self._module_cleared)
        for owner in (Tensor, torch.autograd, AmpStep):
            self._wrap_backward(owner)
        self._wrap(torch.autograd, "grad", after=self._backward_done)
        self._wrap(nn.utils, "clip_grad_norm_", before=self._clip, after=self._clipped)
        self._wrap(nn.utils, "clip_grad_value_", before=self._clip)
        self._wrap(LRScheduler, "__init__", after=self._schedule_made)
        self._wrap(LRScheduler, "step", before=self._schedule)
        self._wrap(GradScaler, "scale", before=self._scale)
        self._wrap(GradScaler, "unscale_", before=self._unscale)
        self._wrap(GradScaler, "step", before=self._scaler_step, after=self._scaler_stepped)

    @staticmethod
    def _wrap(
        owner: Any,
        name: str,
        *,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = function(*args, **kwargs)
            if after is not None:
                after(*args, result=result)
            return result

        setattr(owner, name, call)

    def _wrap_backward(self, owner: Any) -> None:
        """Each of these may call another one, with the same loss: the outermost counts."""
        backward = owner.backward

        @functools.wraps(backward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward:
                return backward(*args, **kwargs)
            self._in_backward = True
            try:
                tensors = list(tensors_in([*args, *kwargs.values()]))
                sums = self._gradient_sums()
                if tensors:
                    self._backward(tensors[0])
                    self._look_at_kept(tensors[0], bool(kwargs.get("retain_graph")))
                result = backward(*args, **kwargs)
            finally:
                self._in_backward = False
            self._backward_done()
            self._look_at_left(sums)
            return result

        owner.backward = call

    # ------------------------------------------------------------ optimizers

    def _made(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        self.seen.setdefault(id(optimizer), OptimizerSeen(optimizer, line_here(3)))

    def _of(self, optimizer: Optimizer) -> OptimizerSeen:
        return self.seen.setdefault(id(optimizer), OptimizerSeen(optimizer, None))

    def _cleared(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        seen = self._of(optimizer)
        if seen.waiting and self._is_open():
            seen.unused[self.backward_line] = seen.unused.get(self.backward_line, 0) + 1
        seen.note_cleared()
        if seen.backward_since_clear and self._is_open():
            seen.zero_line = line_here(3)
        seen.backward_since_clear = 0

    def _module_cleared(self, module: nn.Module, *_: Any, **__: Any) -> None:
        mine = {id(p) for p in module.parameters()}
        for seen in self.seen.values():
            if all(id(p) in mine for p in seen.parameters):
                seen.note_cleared()
                seen.backward_since_clear = 0

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_open():
            return
        seen = self._of(optimizer)
        # A closure clears and computes gradients within the step, after this hook.
        seen.has_closure |= any(callable(value) for value in (*args[1:], *kwargs.values()))
        seen.in_step = True
        seen.step_line = line_here(3)
        if seen.waiting:
            seen.used.add(self.backward_line)
        if self._scaled and not self._in_scaler and id(optimizer) not in self._unscaled:
            self._notes.add("step with scaled gradients", seen.step_line)
        with torch.no_grad():
            self._look_at_gradients(seen)
            self._before[id(optimizer)] = [
                (p, p.detach().clone())
                for p in seen.parameters
                if p.ndim > 1 and p.numel() <= _MOST_VALUES and p.grad is not None
            ]

    def _look_at_gradients(self, seen: OptimizerSeen) -> None:
        seen.watched += 1
        grads = [(id(p), p.grad) for p in seen.parameters if p.grad is not None]
        same = [grad is seen.gradients.get(key) for key, grad in grads]
        seen.cleared += seen.is_cleared or not grads or not any(same)
        nonzero = 0
        for key, grad in grads:
            values = grad.coalesce().values() if grad.is_sparse else grad
            if not values.numel():
                continue
            dtype = torch.promote_types(values.dtype, torch.float32)
            norm = float(torch.linalg.vector_norm(values, dtype=dtype))
            seen.with_gradient.add(key)
            if norm != norm or norm == float("inf"):
                self._notes.add("gradients not finite", seen.step_line)
            if norm > 0:
                nonzero += 1
                seen.with_value[key] = seen.with_value.get(key, 0) + 1
        is_empty = not nonzero and seen.backwards_since_step > 0
        seen.cleared_too_soon += is_empty and not seen.backward_since_clear
        if not seen.backwards_since_step and seen.steps and not seen.has_closure:
            self._notes.add("step without backward", seen.step_line)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        seen = self._of(optimizer)
        seen.steps += 1
        seen.stepped_s = time.monotonic()
        self._num_steps += 1
        seen.first_step = seen.first_step or self._num_steps
        seen.last_step = self._num_steps
        seen.is_cleared = seen.in_step = False
        seen.num_used += seen.waiting
        seen.waiting = 0
        seen.backwards_since_step = 0
        for other in self.seen.values():
            other.is_left = other is not seen and other.has_new
        seen.has_new = False
        self._unscaled.discard(id(optimizer))
        if self._is_open():
            self._note_update(seen)
        seen.decay = max(seen.decay, _decay_of(optimizer))
        if len(seen.rates) < 2000:
            seen.rates.append(max(float(group["lr"]) for group in optimizer.param_groups))
        self.after_step()

    def _note_update(self, seen: OptimizerSeen) -> None:
        seen.gradients = {id(p): p.grad for p in seen.parameters if p.grad is not None}
        moved = weight = 0.0
        for p, before in self._before.pop(id(seen.optimizer), []):
            norm = float(before.float().norm())
            if norm > 0:
                moved += float((p.detach() - before).float().norm()) ** 2
                weight += norm**2
        if weight:
            seen.ratios.append((moved / weight) ** 0.5)

    # ------------------------------------------------------------ backward

    def _backward(self, loss: Tensor) -> None:
        self.backwards += 1
        for seen in self.seen.values():
            is_zero = self._is_zero(seen)
            if is_zero:
                seen.note_cleared()
            seen.waiting += 1
            if seen.has_closure and seen.in_step:
                seen.closure_calls += 1
                seen.closure_clears += is_zero
        if len(self.losses) < 2000 and loss.numel() == 1:
            value = float(loss.detach())
            self.losses.append(value)
            if self._is_open():
                with torch.no_grad():
                    self._look_at_loss(loss, value)
        self.criterion = None
        self.criteria = 0

    def _look_at_loss(self, loss: Tensor, value: float) -> None:
        where = self.backward_line = line_here(4)
        if loss.grad_fn is None:
            self._notes.add("loss is detached", where)
        if value != value or abs(value) == float("inf"):
            self._notes.add("loss is not finite", where)
        if value == 0:
            self._notes.add("loss is zero", where)
        if value < 0 and is_mean_of_logarithms(loss):
            self._notes.add(
                "loss is negated", where, loss=value, name="logarithms of probabilities"
            )
        self.whole = None
        if self.criterion is None or self.criterion.value is None or self.criteria != 1:
            return
        name = self.criterion.name
        positive = self.criterion.value
        is_negated = value < 0 < positive and abs(value + positive) <= 1e-4 * positive
        if is_negated and name != "kl_div":
            self._notes.add("loss is negated", where, loss=value, name=name)
        if value == positive and positive > 0:
            self.whole = self.criterion
            self._notes.add("whole loss", where)

    def _look_at_kept(self, loss: Tensor, is_kept: bool) -> None:
        """Whether a loss holds that of an earlier step, whose graph was kept."""
        if self._kept_loss is not None and self._is_open():
            before, step = self._kept_loss
            if step < self._num_steps and is_added(loss, before):
                self._notes.add("losses add up", self.backward_line)
        is_kept &= self._is_open()
        self._kept_loss = (loss.grad_fn, self._num_steps) if is_kept else None

    def _gradient_sums(self) -> dict[int, float]:
        """Something that differs when the gradients do, of each of several optimizers."""
        if len(self.seen) < 2 or not self._is_open():
            return {}
        with torch.no_grad():
            return {
                key: sum(float(p.grad.sum()) for p in seen.parameters[:4] if p.grad is not None)
                for key, seen in self.seen.items()
            }

    def _look_at_left(self, before: dict[int, float]) -> None:
        """Gradients that a loss leaves in an optimizer, and that are added to those of another loss."""
        for key, value in self._gradient_sums().items():
            seen = self.seen[key]
            if before.get(key) != value:
                if seen.is_left:
                    self._notes.add("gradients of two losses", self.backward_line)
                seen.has_new = True

    def _is_zero(self, seen: OptimizerSeen) -> bool:
        for p in seen.parameters:
            if p.grad is not None and not p.grad.is_sparse:
                return not bool(p.grad.any())
        return all(p.grad is None for p in seen.parameters)

    def _backward_done(self, *_: Any, **__: Any) -> None:
        for seen in self.seen.values():
            seen.backwards_since_step += 1
            seen.backward_since_clear += 1
        self.after_backward()

    # ------------------------------------------------------------ clipping, scaling, schedules

    def _clip(self, parameters: Any, *_: Any, **__: Any) -> None:
        if not self._is_open():
            return
        where = line_here(3)
        if self._scaled and not self._unscaled:
            self._notes.add("clip of scaled gradients", where)
        if not self.backwards:
            self._clipped_first.add(where)
        waiting = [seen.backwards_since_step for seen in self.seen.values()]
        if waiting and self.backwards and not any(waiting):
            is_first = where in self._clipped_first
            self._notes.add("clip before backward" if is_first else "clip after step", where)

    def _clipped(self, parameters: Any, max_norm: Any = None, *_: Any, result: Any) -> None:
        if self._is_open() and max_norm is not None and float(max_norm) > 0:
            ratio = float(result) / float(max_norm)
            self._notes.add("clipped", line_here(3), ratio=ratio, most=float(max_norm))

    def _scale(self, scaler: GradScaler, *_: Any, **__: Any) -> None:
        self._scaled = scaler.is_enabled()

    def _unscale(self, scaler: GradScaler, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        self._unscaled.add(id(optimizer))

    def _scaler_step(self, *_: Any, **__: Any) -> None:
        self._in_scaler = True

    def _scaler_stepped(self, scaler: GradScaler, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        self._in_scaler = False
        self._unscaled.discard(id(optimizer))

    def _schedule_made(self, scheduler: LRScheduler, *_: Any, **__: Any) -> None:
        if (seen := self._scheduled(scheduler)) is not None:
            seen.schedule_line = seen.schedule_line or line_here(3)

    def _scheduled(self, scheduler: LRScheduler) -> OptimizerSeen | None:
        """That of Accelerate is a wrapper around the optimizer that makes the steps."""
        optimizer: Any = scheduler.optimizer
        while optimizer is not None and id(optimizer) not in self.seen:
            optimizer = getattr(optimizer, "optimizer", None)
        return self.seen.get(id(optimizer))

    def _schedule(self, scheduler: LRScheduler, *_: Any, **__: Any) -> None:
        frame = sys._getframe(2)
        if is_torchs(frame) or not self._is_open():
            return
        if (seen := self._scheduled(scheduler)) is not None:
            self._notes.add("schedule", line_here(3), first=not seen.steps)


def _decay_of(optimizer: Optimizer) -> float:
    """Share of the weights that weight decay removes in a step; 0 where it is added to gradients."""
    name = type(optimizer).__name__
    return max(
        float(group["lr"]) * float(group.get("weight_decay") or 0)
        if name == "SGD" or "AdamW" in name or group.get("decoupled_weight_decay")
        else 0.0
        for group in optimizer.param_groups
    )
