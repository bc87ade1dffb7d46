"""Calls that make the host wait for the device, by line: `.item()`, printing, `if tensor` ..."""

import functools
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from flambeau.tune.watch.stack_phases import CodeLocation, is_torchs, user_line

_METHODS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__repr__",
    "__format__",
    "nonzero",
    "cuda",
    "to",
)
_SHOWN = {
    "__bool__": "if tensor",
    "__float__": "float(tensor)",
    "__int__": "int(tensor)",
    "__index__": "int(tensor)",
    "__repr__": "printing a tensor",
    "__format__": "printing a tensor",
}


class WaitingCalls:
    """Counts and times calls of Tensor's methods, by the user's line.

    On a GPU they also wait for all queued work.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[CodeLocation, str], list[float]] = {}
        """By line and method: number of calls, seconds, bytes copied to a device."""
        self._is_inside = False
        self._original: dict[str, Any] = {}

    def start(self) -> None:
        for name in _METHODS:
            self._original[name] = Tensor.__dict__.get(name)
            setattr(Tensor, name, self._counted(getattr(Tensor, name), name))

    def stop(self) -> None:
        for name, before in self._original.items():
            if before is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, before)
        self._original.clear()

    def _counted(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Torch's optimizers read counters on the CPU, which costs almost nothing.
            if self._is_inside or torch.compiler.is_compiling() or is_torchs(sys._getframe(1)):
                return method(tensor, *args, **kwargs)
            self._is_inside = True
            began = time.perf_counter()
            try:
                result = method(tensor, *args, **kwargs)
            finally:
                self._is_inside = False
            self._note(name, tensor, result, time.perf_counter() - began)
            return result

        return call

    def _note(self, name: str, tensor: Tensor, result: Any, seconds: float) -> None:
        copied = 0
        shown = _SHOWN.get(name, f".{name}()")
        if name in ("to", "cuda"):
            if not isinstance(result, Tensor) or result.device == tensor.device:
                return
            is_pinned = tensor.device.type == "cpu" and tensor.is_pinned()
            copied = tensor.nbytes
            shown = f"copy to {result.device.type}{'' if is_pinned else ', not pinned'}"
        location = user_line(sys._getframe(2))
        if location is not None:
            figures = self.calls.setdefault((location, shown), [0, 0.0, 0])
            figures[0] += 1
            figures[1] += seconds
            figures[2] += copied


def skip_waiting_calls(lines: Collection[str]) -> None:
    """Make calls from these lines, each FILE:LINE, return their first result again."""
    answers: dict[tuple[str, int, str], Any] = {}
    wanted = set(lines)
    files = {line.rpartition(":")[0] for line in lines}

    def once(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            file = frame.f_code.co_filename
            if file not in files or f"{file}:{frame.f_lineno}" not in wanted:
                return method(tensor, *args, **kwargs)
            key = (file, frame.f_lineno, name)
            if key not in answers:
                answers[key] = method(tensor, *args, **kwargs)
            return answers[key]

        return call

    for name in _METHODS:
        if name not in ("to", "cuda"):
            with suppress(AttributeError):
                setattr(Tensor, name, once(getattr(Tensor, name), name))
