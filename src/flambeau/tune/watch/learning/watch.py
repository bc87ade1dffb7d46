"""Watches what the first steps of a training learn from, and writes it when enough was seen."""

import atexit
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flambeau.tune.watch.learning.batches import BatchWatch
from flambeau.tune.watch.learning.last_look import last_look
from flambeau.tune.watch.learning.loss_course import is_better
from flambeau.tune.watch.learning.losses import LossCall, LossWatch
from flambeau.tune.watch.learning.models import ModelWatch
from flambeau.tune.watch.learning.notes import Notes, as_pair
from flambeau.tune.watch.learning.rehearsal import ModelCall, Rehearsal, is_reshaped
from flambeau.tune.watch.learning.tensor_calls import TensorCallWatch
from flambeau.tune.watch.learning.updates import OptimizerSeen, UpdateWatch
from flambeau.tune.watch.plan import Plan, write_whole
from flambeau.tune.watch.stack_phases import CodeLocation


class _Rank(NamedTuple):
    number: int
    world: int
    job: str


def watch_learning(folder: Path, plan: Plan) -> None:
    """Watch this process, if it trains."""
    LearningWatch(folder, plan).install()


class LearningWatch:
    """Looks closely at `plan.steps` steps, then waits `plan.seconds` at most for an evaluation.

    It draws no random numbers and changes no tensor, so that the script computes what it computes alone.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._pid = os.getpid()
        self._began = 0.0
        self._last_step = math.inf  # when it ended
        self._steps = 0
        self._is_over = False
        self._evaluated_at = -1
        self._rank = _Rank(0, 1, "")
        self.notes = Notes()
        is_open = self._is_open
        self.updates = UpdateWatch(self.notes, is_open)
        self.batches = BatchWatch(self.notes, is_open)
        self.models = ModelWatch(self.notes, is_open)
        self.losses = LossWatch(self.notes, is_open, self._loss_called)
        self.tensor_calls = TensorCallWatch(self.notes, is_open)
        self.rehearsal = Rehearsal()
        self._model_call: ModelCall | None = None

    def install(self) -> None:
        for part in (self.updates, self.batches, self.models, self.losses, self.tensor_calls):
            part.install()
        self.updates.after_step = self._after_step
        self.updates.after_backward = self._after_backward
        self.models.evaluates = self._evaluates
        self.models.forwarded = self._forwarded
        self.losses.without_gradients = self.models.loss_without_gradients
        atexit.register(self._at_exit)

    def _is_open(self) -> bool:
        made = max(self._steps, self.updates.backwards)
        return made < self._plan.steps and not self._is_over and os.getpid() == self._pid

    def _forwarded(self, samples: list[int], ids: Tensor | None) -> None:
        self.losses.inputs, self.losses.ids = samples, ids

    def _loss_called(self, call: LossCall, predicted: Tensor) -> None:
        self.updates.criteria += 1
        self.updates.criterion = call
        calls = self.models.calls
        is_plain = len(calls) == 1 and is_reshaped(calls[0].output(), predicted)
        self._model_call = calls[0] if is_plain else None

    def _after_backward(self) -> None:
        loss = self.updates.whole
        if loss is not None and self._model_call is not None and self._is_open():
            self.rehearsal.keep(self._model_call, loss)
        self.updates.whole = self._model_call = None
        self.models.backward_came()
        self.batches.note_training()
        if not self._began:
            self._began = time.monotonic()
            self._rank = _rank()
            (self._folder / f"{self._pid}.trains").touch()
        self.losses.inputs = []
        if not self._steps:
            self._perhaps_finish(self.updates.backwards)

    def _after_step(self) -> None:
        self._steps += 1
        self.batches.steps = self._steps
        self._perhaps_finish(self._steps)

    def _perhaps_finish(self, made: int) -> None:
        now = time.time()
        is_last = now + (now - self._last_step) > self._plan.end  # the next one would come too late
        self._last_step = now
        if self._is_over or os.getpid() != self._pid:
            return
        if is_last:
            self._finish(rehearses=False)
            return
        if made < self._plan.steps:
            return
        seen_all = 0 <= self._evaluated_at < made - 1
        if seen_all or time.monotonic() - self._began > self._plan.seconds:
            self._finish()

    def _evaluates(self) -> bool:
        """A model is called without gradients: an evaluation, if the batch is one of evaluation."""
        self._evaluated_at = self._steps if self._steps else self._evaluated_at
        seen = self.batches.last
        return seen is not None and not seen.trained and seen.without_gradients > 0

    def _at_exit(self) -> None:
        if os.getpid() == self._pid and not self._is_over and self.updates.backwards:
            self._finish(is_ending=True)

    def _finish(self, *, is_ending: bool = False, rehearses: bool = True) -> None:
        self._is_over = True
        with torch.random.fork_rng(devices=[]):
            learning = self._seen() | last_look(self.batches)
            if rehearses and self._rank.world == 1 and not is_better(learning["losses"]):
                stepping = [one.optimizer for one in self.updates.seen.values() if one.steps]
                optimizer = stepping[0] if len(stepping) == 1 else None
                learning |= self.rehearsal.results(optimizer)
        write_whole(
            self._folder / f"{self._pid}.json",
            {
                "steps": max(learning["optimizer_steps"], learning["backwards"]),
                "step_s": 0.0,
                "is_ending": is_ending,
                "rank": self._rank.number,
                "world": self._rank.world,
                "learning": learning,
            },
        )

    def _seen(self) -> dict[str, Any]:
        roots = self.models.roots.values()
        parameters = (p for root in roots for p in root.module.parameters())
        classes = self.losses.classes.items()
        return {
            "world": self._rank.world,
            "job": self._rank.job,
            "is_split": any(hasattr(p, "device_mesh") for p in parameters),  # of DTensors
            "optimizer_steps": self._steps,
            "backwards": self.updates.backwards,
            "backward_line": as_pair(self.updates.backward_line),
            "losses": [*self.updates.losses],
            "notes": self.notes.as_rows(),
            "optimizers": [_optimizer(one) for one in self.updates.seen.values()],
            "parameters": self._parameters(),
            "loaders": self.batches.as_rows(),
            "labels": [self.losses.again, self.losses.changed],
            "classes": [{"where": as_pair(where)} | row for where, row in classes],
            "inputs": self.models.firsts,
            "input_line": as_pair(self.models.first_line),
            "own_line": as_pair(self.models.own_line_before),
            "is_normalized": bool(self.models.first_is_normalized),
            "relus": list(self.models.relus.values()),
            "by_heart": [],
            "rates": [],
        }

    def _parameters(self) -> list[dict[str, Any]]:
        """Those of all called models, and those that only optimizers know."""
        optimizers = self.updates.seen.values()
        owned = {id(p): one for one in optimizers for p in one.parameters}
        stranger_ids = {key for keys in self.models.strangers.values() for key in keys}
        rows = []
        known: set[int] = set()
        for root in self.models.roots.values():
            model = type(root.module).__name__
            for name, parameter in root.module.named_parameters():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    rows.append(self._row(parameter, name, owned, model, as_pair(root.where)))
        for key, (p, name) in self.models.ran.items():
            if key in stranger_ids and key not in known:
                known.add(key)
                kind = name.partition(".")[0]
                line = as_pair(self.models.stranger_lines.get(kind))
                rows.append(self._row(p, name, owned, "", line) | {"is_registered": False})
        for key, one in owned.items():
            if key not in known:
                known.add(key)
                p = next(q for q in one.parameters if id(q) == key)
                rows.append(self._row(p, "", owned, "", as_pair(one.where)))
        return rows

    def _row(
        self,
        p: Tensor,
        name: str,
        owned: dict[int, OptimizerSeen],
        model: str,
        where: list[Any],
    ) -> dict[str, Any]:
        one = owned.get(id(p))
        return {
            "name": name,
            "model": model,
            "where": where,
            "made": as_pair(self.models.lines.get(id(p))),
            "run": as_pair(self.models.run_lines.get(id(p))),
            "without_gradients": as_pair(self.models.without_gradients.get(id(p))),
            "optimizers": sum(
                any(q is p for q in one.parameters) for one in self.updates.seen.values()
            ),
            "optimizer": None if one is None else as_pair(one.where),
            "requires_grad": p.requires_grad,
            "frozen": as_pair(self._frozen_at(p, one)),
            "ran": id(p) in self.models.ran,
            "is_last": id(p) in self.models.last_weights,
            "has_grad": p.grad is not None or (one is not None and id(p) in one.with_gradient),
            "with_value": 0 if one is None else one.with_value.get(id(p), 0),
            "watched": 0 if one is None else one.watched,
            "ndim": p.ndim,
            "is_registered": True,
            "equal_rows": _has_equal_rows(p),
        }

    def _frozen_at(self, p: Tensor, one: OptimizerSeen | None) -> CodeLocation | None:
        """The line that froze a parameter; of one with an optimizer while that was in use."""
        if one is None:
            return self.models.frozen_at(p, after_s=-math.inf, before_s=math.inf)
        return self.models.frozen_at(p, after_s=one.made_s, before_s=one.stepped_s)


def _has_equal_rows(p: Tensor) -> bool:
    if p.ndim < 2 or p.shape[0] < 2 or p.numel() // p.shape[0] < 2:
        return False
    with torch.no_grad():
        return bool((p == p[:1]).all())


def _optimizer(seen: OptimizerSeen) -> dict[str, Any]:
    return {
        "name": type(seen.optimizer).__name__,
        "where": as_pair(seen.where),
        "step_line": as_pair(seen.step_line),
        "zero_line": as_pair(seen.zero_line),
        "schedule_line": as_pair(seen.schedule_line),
        "steps": seen.steps,
        "first_step": seen.first_step,
        "last_step": seen.last_step,
        "watched": seen.watched,
        "has_closure": seen.has_closure,
        "closure_calls": seen.closure_calls,
        "closure_clears": seen.closure_clears,
        "listed_twice": len(seen.parameters) - len({id(p) for p in seen.parameters}),
        "cleared": seen.cleared,
        "cleared_too_soon": seen.cleared_too_soon,
        "backwards_used": seen.num_used,
        "cleared_unused": max((seen.unused.get(line, 0) for line in seen.used), default=0),
        "ratios": seen.ratios,
        "rates": seen.rates,
        "decay": seen.decay,
        "maximize": any(group.get("maximize") for group in seen.optimizer.param_groups),
        "has_gradients": bool(seen.with_value) or any(p.grad is not None for p in seen.parameters),
    }


def _rank() -> _Rank:
    """Which rank of which job this process is; a world of 1 if it trains alone."""
    job = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    if dist.is_available() and dist.is_initialized():
        return _Rank(dist.get_rank(), dist.get_world_size(), job)
    environ = os.environ
    return _Rank(int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")), job)
