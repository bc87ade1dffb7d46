"""Metrics of evaluations other than means, such as F1, IoU or AUROC; exact over all processes.

An object needs `update`, `compute` and `reset`. With several processes its states must also be merged:
torchmetrics' metrics support that, and so do objects with `state_dict()` and `merge(state)`, as the recipes.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks
from flambeau.run.folder.checkpointer import copy_nested
from flambeau.run.loop.logged_predictions import PREDICTIONS, LoggedPredictions
from flambeau.run.loop.step_metrics import LINE_FIELDS

# Of torchmetrics, by class: from how many processes on its figures would be others, or none, and why.
_INEXACT = {
    "MinMaxMetric": (1, "it compares earlier evaluations, which no checkpoint holds"),
    "Running": (2, "its window is of the last batches of each process"),
    "NormalizedRootMeanSquaredError": (3, "its compute() fails on the states of more than two"),
}


class EvaluationMetrics:
    """The user's metrics by name, reset before each evaluation; modules move to the device.

    InputError: a metric lacks a method, would not be exact, or has a name of every line of metrics.jsonl.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any],
        *,
        device: torch.device,
        ranks: Ranks,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._metrics = dict(metrics)
        self.predictions: LoggedPredictions | None = None
        """What the loop logs as `predictions`; None where a metric of the user's has that name."""
        if PREDICTIONS not in metrics:
            self.predictions = LoggedPredictions(classes, rank=ranks.rank)
            self._metrics[PREDICTIONS] = self.predictions
        self._ranks = ranks
        self._updated: set[str] = set()
        self._counting = False
        for name, metric in self._metrics.items():
            _check(name, metric, world=ranks.world)
            if isinstance(metric, nn.Module):
                metric.to(device)
            for one in _torchmetrics(metric):
                # Merged here, not in its compute.
                one.distributed_available_fn = lambda: False

    def takes(self, name: str, value: Any) -> bool:
        """Whether a logged value is for a metric, and not one whose mean counts."""
        if name == PREDICTIONS and self.predictions is not None:
            return isinstance(value, tuple)
        return name in self._metrics

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        self._reset()
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def _reset(self) -> None:
        self._updated.clear()
        for metric in self._metrics.values():
            metric.reset()

    def update(self, name: str, value: Any, num_samples: int) -> None:
        """Count a batch of so many samples; 0: it does not count.

        `value`: a tuple of arguments, a dict of keywords, or the only argument. RuntimeError: no evaluation
        is under way.
        """
        if not self._counting:
            raise RuntimeError(f"metrics[{name!r}] counts in `for ... in run.evaluate(...)` alone")
        if not num_samples:
            return
        self._updated.add(name)
        metric = self._metrics[name]
        if isinstance(value, tuple):
            metric.update(*value)
        elif isinstance(value, Mapping):
            metric.update(**value)
        else:
            metric.update(value)

    def figures(self, means: Mapping[str, float]) -> dict[str, float]:
        """The logged means, and the metrics' values over all ranks' samples; waits for the device.

        TypeError: `compute` returned neither a number nor a dict of numbers. ValueError: two figures of one
        name.
        """
        if not self._metrics:
            return dict(means)
        local = {}
        if self._ranks.world > 1:
            local = {name: copy_nested(_state(self._metrics[name])) for name in self._updated}
        states = self._ranks.gather(local)
        updated = self._updated.union(*states)

        def compute() -> dict[str, float]:
            figures = dict(means)
            for name in (name for name in self._metrics if name in updated):
                _merge(
                    self._metrics[name], [theirs[name] for theirs in states[1:] if name in theirs]
                )
                values = _numbers(name, self._metrics[name].compute())
                for twice in values.keys() & figures.keys():
                    raise ValueError(f"metrics[{name!r}] gives {twice!r}, which is logged already")
                figures |= values
            return figures

        figures = self._ranks.first(compute)
        self._reset()
        return figures


def _check(name: str, metric: Any, *, world: int) -> None:
    missing = [m for m in ("update", "compute", "reset") if not callable(getattr(metric, m, None))]
    if isinstance(metric, type):
        raise InputError(f"metrics[{name!r}] is the class {metric.__name__}: give an object of it")
    if missing:
        raise InputError(
            f"metrics[{name!r}] must be an object with update, compute and reset, such as torchmetrics' "
            f"metrics; {metric!r:.100} has no {missing[0]}"
        )
    if name in LINE_FIELDS:
        raise InputError(
            f"metrics[{name!r}]: each line of metrics.jsonl has {name!r} already; choose another name"
        )
    can_merge = hasattr(metric, "state_dict") and hasattr(metric, "merge")
    if world > 1 and not can_merge and not _torchmetrics(metric):
        raise InputError(
            f"metrics[{name!r}]: several processes each count a part of the data, and "
            f"{type(metric).__name__} has no state_dict() and merge(state) to put the parts together"
        )
    for part in _torchmetrics(metric):
        kind = type(part).__name__
        least, why = _INEXACT.get(kind, (world + 1, ""))
        if world >= least:
            raise InputError(
                f"metrics[{name!r}]: torchmetrics' {kind} would not be exact on {world} "
                f"process{'es' * (world > 1)}: {why}; give the metric that it is made of, or another one"
            )


def _torchmetrics(metric: Any) -> list[Any]:
    """The torchmetrics metrics in an object that have states of their own: itself, or those inside of it."""
    library = sys.modules.get("torchmetrics")
    if library is None or not isinstance(metric, nn.Module):
        return []
    # The inner ones last: ClasswiseWrapper passes the states of its metric off as its own.
    owners = {
        id(module._reductions): module
        for module in metric.modules()
        if isinstance(module, library.Metric)
    }
    return list(owners.values())


def _state(metric: Any) -> Any:
    if parts := _torchmetrics(metric):
        return [part.metric_state for part in parts]
    return metric.state_dict()


def _merge(metric: Any, states: list[Any]) -> None:
    parts = _torchmetrics(metric)
    for state in states if not parts else ():
        metric.merge(state)
    for number, part in enumerate(parts):
        # The only private name of torchmetrics used here: how the states of ranks are reduced.
        for name, reduce in part._reductions.items():
            local = getattr(part, name)
            theirs = [state[number][name] for state in states]
            if isinstance(local, list):  # of batches, which compute() concatenates
                # A new list: metrics of a collection may share the old one.
                batches = [_on(part.device, batch) for batches in theirs for batch in batches]
                setattr(part, name, [*local, *batches])
            elif theirs:
                stacked = torch.stack([local, *(one.to(local.device) for one in theirs)])
                setattr(part, name, stacked if reduce is None else reduce(stacked))


def _on(device: torch.device, batch: Any) -> Any:
    return batch.to(device) if isinstance(batch, Tensor) else batch


def _numbers(name: str, value: Any) -> dict[str, float]:
    """The numbers that `compute` returned: one under the metric's name, or one per key of a dict."""
    if isinstance(value, Mapping):
        return {
            k: v for key, one in value.items() for k, v in _numbers(f"{name}_{key}", one).items()
        }
    try:
        return {name: float(value)}
    except (TypeError, ValueError, RuntimeError) as error:
        got = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        )
        raise TypeError(
            f"metrics[{name!r}]: compute() must give one number or a dict of numbers, which a line of "
            f"metrics.jsonl takes; got {got:.100}"
        ) from error
