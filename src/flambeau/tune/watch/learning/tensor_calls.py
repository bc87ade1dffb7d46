"""Methods of tensors that lose what a loss is to teach: a wrong axis, a factor of 0, mixed shapes, a sign."""

import functools
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from flambeau.tune.watch.code_origin import origin_of
from flambeau.tune.watch.learning.measures import is_plain, made_by
from flambeau.tune.watch.learning.notes import Notes, line_here
from flambeau.tune.watch.stack_phases import CodeLocation

_STILL = (
    5e-5  # share by which an average moves in a step: half of the way takes 14000 steps; chosen
)


class TensorCallWatch:
    """Looks at calls while `is_open`."""

    def __init__(self, notes: Notes, is_open: Callable[[], bool]) -> None:
        self._notes, self._is_open = notes, is_open
        self._log_prob: Callable[[], Tensor | None] = lambda: None

    def install(self) -> None:
        for name in ("__sub__", "__rsub__"):
            self._wrap(Tensor, name, self._subtract)
        for name in ("__mul__", "__rmul__", "mul"):
            self._wrap(Tensor, name, self._multiply)
        for name in ("view", "reshape"):
            self._wrap(Tensor, name, self._reshape)
        for owner in (Tensor, torch):
            self._wrap(owner, "argmax", self._argmax)
            self._wrap(owner, "gather", self._gather)
        self._wrap(Tensor, "lerp_", self._lerp)
        self._wrap(Tensor, "add_", self._add)
        for distribution in (Bernoulli, Categorical, Normal):
            self._wrap(distribution, "log_prob", self._log_prob_made)

    def _wrap(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if self._is_open() and is_plain(result):
                look(result, *args, **kwargs)
            return result

        setattr(owner, name, call)

    def _subtract(self, _: Tensor, one: Any, other: Any) -> None:
        """`(N, 1) - (N,)` is N by N: an output beside labels whose shapes differ in a loss of one's own."""
        if not isinstance(other, Tensor) or one.ndim + other.ndim != 3:
            return
        column, row = (one, other) if one.ndim == 2 else (other, one)
        is_pair = row.ndim == 1 and column.shape == (len(row), 1) and len(row) > 1
        if is_pair and column.requires_grad != row.requires_grad:
            shapes = {"input": list(one.shape), "target": list(other.shape)}
            self._notes.add("shapes broadcast", line_here(3), loss="subtraction", **shapes)

    def _multiply(self, product: Tensor, one: Tensor, other: Any) -> None:
        if not product.requires_grad:
            return
        if isinstance(other, int | float):
            if other == 0 and product.ndim == 0:
                self._notes.add("times zero", line_here(3))
            return
        known = self._log_prob()
        for log_prob, factor in ((one, other), (other, one)):
            is_signed = isinstance(factor, Tensor) and not factor.requires_grad
            if (
                log_prob is known
                and known is not None
                and is_signed
                and factor.shape == known.shape
            ):
                note = functools.partial(self._note_policy, line_here(3), factor.detach())
                product.register_hook(note)

    def _note_policy(self, where: CodeLocation | None, factor: Tensor, gradient: Tensor) -> None:
        """A step against the gradient makes what has a high factor less likely if the gradient is above 0."""
        if self._is_open() and bool((factor > 0).any()) and bool((factor < 0).any()):
            self._notes.add("policy", where, lowered=bool((gradient > 0).all()))

    def _log_prob_made(self, result: Tensor, *_: Any, **__: Any) -> None:
        if result.requires_grad:
            self._log_prob = weakref.ref(result)

    def _reshape(self, result: Tensor, one: Tensor, *_: Any, **__: Any) -> None:
        """(N, C, H, W) to (N * H * W, C) mixes channels and pixels, unless channels were moved to the end."""
        is_flat = result.ndim == 2 and one.ndim >= 3 and one.requires_grad
        if is_flat and one.shape[1] == result.shape[1] > 1 and len(result) > len(one):
            is_image = one.ndim >= 4 or made_by(one).startswith("Convolution")
            # (N, T, H, D) to (N * T, H * D) joins the heads of attention, whatever T is.
            joined = {math.prod(one.shape[start:]) for start in range(2, one.ndim)}
            if is_image and one.shape[1] not in joined:
                shapes = {"old": list(one.shape), "new": list(result.shape)}
                self._notes.add("channels mixed", line_here(3), **shapes)

    def _argmax(self, _: Tensor, one: Tensor, dim: Any = None, *__: Any, **___: Any) -> None:
        if dim not in (0, -2) or one.ndim != 2 or one.requires_grad or min(one.shape) < 2:
            return
        is_one_hot = bool(((one == 0) | (one == 1)).all()) and bool((one.sum(1) == 1).all())
        if is_one_hot and bool((one.sum(0) != 1).any()):
            self._notes.add("argmax over samples", line_here(3), shape=list(one.shape))

    def _gather(self, picked: Tensor, one: Tensor, *_: Any, **__: Any) -> None:
        if picked.requires_grad and made_by(one).startswith("LogSoftmax"):
            picked.register_hook(functools.partial(self._note_sign, line_here(3)))

    def _note_sign(self, where: CodeLocation | None, gradient: Tensor) -> None:
        """A step against a gradient above 0 lowers the log-probability."""
        if self._is_open():
            is_lowered = bool((gradient >= 0).all()) and bool((gradient > 0).any())
            self._notes.add("picked log-probabilities", where, lowered=is_lowered)

    def _lerp(self, _: Tensor, one: Tensor, end: Any, weight: Any) -> None:
        if not _is_users():
            return
        if isinstance(end, Tensor) and end.data_ptr() == one.data_ptr():
            self._notes.add("average of itself", line_here(3))
        elif isinstance(weight, float) and 0 < weight < _STILL:
            self._notes.add("average hardly moves", line_here(3), share=weight)

    def _add(self, *_: Any, alpha: Any = 1, **__: Any) -> None:
        is_still = isinstance(alpha, float) and 0 < alpha < _STILL and not torch.is_grad_enabled()
        if is_still and _is_users():
            self._notes.add("average hardly moves", line_here(3), share=alpha)


def _is_users() -> bool:
    """Whether the user's own line made the call, and no optimizer or library."""
    return origin_of(sys._getframe(3)).owner == "user"
