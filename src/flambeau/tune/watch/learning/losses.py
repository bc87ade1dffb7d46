"""Losses of torch.nn.functional: what comes in, beside the labels, and whether the two fit."""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.tune.watch.learning.measures import is_bare_clamp, is_plain, is_softmax, made_by
from flambeau.tune.watch.learning.notes import Notes, line_here
from flambeau.tune.watch.stack_phases import CodeLocation

LOSSES = (
    "cross_entropy",
    "nll_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
)
_REGRESSIONS = "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"
_MOST_PAIRS = 20_000  # samples whose labels are kept; chosen


@dataclass(frozen=True)
class LossCall:
    """A call of a loss.

    Attributes:
        arguments: those beside the output of the model, by name.
        shape: of that output.
        value: None of several values.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    shape: torch.Size
    value: float | None


class LossWatch:
    """Looks at each call of a loss while `is_open`; `called` gets it and the output of the model.

    Attributes:
        inputs: content of the samples of the last call of the model, whose labels come now.
        ids: numbers that the model read last, if these are of whole type.
    """

    def __init__(
        self,
        notes: Notes,
        is_open: Callable[[], bool],
        called: Callable[[LossCall, Tensor], None],
    ) -> None:
        self._notes, self._is_open, self._called = notes, is_open, called
        self.without_gradients: Callable[[], None] = lambda: None
        self.inputs: list[int] = []
        self.ids: Tensor | None = None
        self.labels: dict[int, int] = {}
        self.again, self.changed = 0, 0
        self.classes: dict[CodeLocation | None, dict[str, Any]] = {}

    def install(self) -> None:
        for name in LOSSES:
            setattr(F, name, self._watched(name, getattr(F, name)))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            if not torch.is_grad_enabled():
                self.without_gradients()
            where = line_here() if self._is_open() else None
            given: dict[str, Any] = {}
            if self._is_open():
                given = dict(signature.bind(*args, **kwargs).arguments)
                with torch.no_grad():
                    self._look(name, given, where)
            loss = function(*args, **kwargs)
            if given and is_plain(loss):
                with torch.no_grad():
                    value = float(loss) if loss.numel() == 1 else None
                    predicted = given["input"]
                    rest = {key: one for key, one in given.items() if key != "input"}
                    call = LossCall(name, function, rest, predicted.shape, value)
                    self._called(call, predicted)
                    self._first_value(name, given, loss, where)
            return loss

        return call

    def _look(self, name: str, given: dict[str, Any], where: CodeLocation | None) -> None:
        predicted, target = given["input"], given["target"]
        if not (is_plain(predicted) and is_plain(target) and torch.is_floating_point(predicted)):
            return
        if not predicted.requires_grad:
            return
        if self._are_samples_equal(target):
            self._notes.add("equal samples", where, samples=len(self.inputs))
        if given.get("reduction") == "sum":
            self._notes.add("summed", where, samples=len(predicted))
        if name == "cross_entropy":
            self._cross_entropy(predicted, given, where)
        elif name == "nll_loss":
            if is_softmax(predicted):
                self._notes.add("softmax before nll_loss", where)
            elif (predicted > 1e-3).any():
                self._notes.add("nll of no logarithms", where)
            self._count_classes(predicted, given, where)
        elif name.startswith("binary"):
            self._binary(name, predicted, target, where)
        elif name == "kl_div":
            if is_softmax(predicted, predicted.ndim - 1):
                self._notes.add("kl_div of probabilities", where)
        elif not torch.is_floating_point(target) or bool((target == target.flatten()[0]).all()):
            self._notes.add("equal targets", where, value=float(target.flatten()[0]))
        if name in _REGRESSIONS and predicted.shape != target.shape:
            shapes = {"input": list(predicted.shape), "target": list(target.shape)}
            self._notes.add("shapes broadcast", where, loss=name, **shapes)

    def _are_samples_equal(self, target: Tensor) -> bool:
        """Whether the model has read one sample in each row, for labels that differ."""
        is_one = len(self.inputs) > 1 and len(set(self.inputs)) == 1
        return is_one and target.ndim > 0 and not bool((target == target[:1]).all())

    def _binary(
        self, name: str, predicted: Tensor, target: Tensor, where: CodeLocation | None
    ) -> None:
        low, high = float(target.min()), float(target.max())
        if low < 0 or high > 1:
            self._notes.add("binary labels out of range", where, low=low, high=high)
        elif not name.endswith("logits") and is_bare_clamp(predicted):
            self._notes.add("clamp in place of sigmoid", where)
        if name.endswith("logits"):
            maker = made_by(predicted)
            if maker.startswith(("Sigmoid", "Softmax")):
                what = "sigmoid" if maker.startswith("Sigmoid") else "softmax"
                self._notes.add("sigmoid before logits", where, what=what)

    def _cross_entropy(
        self, predicted: Tensor, given: dict[str, Any], where: CodeLocation | None
    ) -> None:
        target = given["target"]
        if predicted.ndim < 2:
            return
        maker = made_by(predicted)
        if is_softmax(predicted):
            self._notes.add("softmax before cross_entropy", where, classes=predicted.shape[1])
        elif maker.startswith("LogSoftmax"):
            self._notes.add("log_softmax before cross_entropy", where)
        elif maker.startswith(("Sigmoid", "Relu", "Tanh")):
            what = next(one for one in ("sigmoid", "relu", "tanh") if maker.lower().startswith(one))
            self._notes.add("activation before cross_entropy", where, what=what)
        if torch.is_floating_point(target):
            if target.shape == predicted.shape:
                total = target.float().sum(1)
                if ((total - 1).abs() > 0.01).float().mean() > 0.3:
                    self._notes.add("labels do not sum to one", where, mean=float(total.mean()))
            return
        ids = self.ids
        is_alike = ids is not None and ids.numel() == target.numel() > 8
        if is_alike and ids is not None and bool((ids.flatten() == target.flatten()).all()):
            self._notes.add("labels are the inputs", where)
        self._look_at_padding(given, where)
        self._count_classes(predicted, given, where)
        self._pair(target)

    def _look_at_padding(self, given: dict[str, Any], where: CodeLocation | None) -> None:
        """Whether one label stands at the end of sequences, just where the model read one number."""
        ids = self.ids
        target = given["target"]
        is_weighted = given.get("weight") is not None or given.get("reduction") == "none"
        if ids is None or ids.ndim != 2 or target.numel() != ids.numel() or is_weighted:
            return
        labels = target.reshape(ids.shape)
        padding = labels == labels.flatten().mode().values
        share = float(padding.float().mean())
        is_last = bool((padding[:, 1:] >= padding[:, :-1]).all()) and not bool(padding.all())
        filled = ids[padding]
        label = int(labels[padding][0])
        is_same = bool((filled == filled[0]).all()) and bool(((ids == filled[0]) == padding).all())
        if share >= 0.2 and is_last and is_same and label != given.get("ignore_index", -100):
            self._notes.add("padding in the loss", where, share=share, label=label)

    def _count_classes(
        self, predicted: Tensor, given: dict[str, Any], where: CodeLocation | None
    ) -> None:
        target = given["target"]
        classes = predicted.shape[1] if predicted.ndim > 1 else 0
        if not 2 <= classes <= 1000 or given.get("ignore_index", -100) >= 0:
            return
        empty = {"classes": classes, "counts": [0] * classes, "below": 0}
        seen = self.classes.setdefault(where, empty)
        if seen["classes"] == classes:
            valid = target[(target >= 0) & (target < classes)].flatten()
            seen["below"] += int((target == -1).sum())
            more = torch.bincount(valid, minlength=classes).tolist()
            seen["counts"] = [one + two for one, two in zip(seen["counts"], more, strict=True)]

    def _pair(self, target: Tensor) -> None:
        """Whether the same input comes again with another label."""
        if target.ndim != 1 or not self.inputs or len(self.inputs) > len(target):
            return
        if target.tolist() == list(range(len(target))):  # a contrastive loss: its own place
            return
        new = {}
        for sample, label in zip(self.inputs, target.tolist(), strict=False):
            before = self.labels.get(sample)
            if before is None:
                new[sample] = label
            else:
                self.again += 1
                self.changed += before != label
        if len(self.labels) < _MOST_PAIRS:
            self.labels |= new
        self.inputs = []

    def _first_value(
        self, name: str, given: dict[str, Any], loss: Tensor, where: CodeLocation | None
    ) -> None:
        """Beside the loss what chance would give; both per element."""
        predicted, target = given["input"], given["target"]
        if loss.ndim or given.get("reduction", "mean") != "mean" or not predicted.requires_grad:
            return
        chance = math.nan
        if name == "cross_entropy" and predicted.ndim > 1 and given.get("weight") is None:
            chance = math.log(max(predicted.shape[1], 2))
        elif name.startswith("binary"):
            chance = math.log(2)
        elif name == "mse_loss" and torch.is_floating_point(target):
            chance = float(target.double().var(correction=0))
        if not math.isnan(chance):
            figures = {
                "loss": float(loss),
                "chance": chance,
                "name": name,
                "output": float(predicted.double().square().mean().sqrt()),
                "target": float(target.double().square().mean().sqrt()),
            }
            self._notes.add("value", where, **figures)
