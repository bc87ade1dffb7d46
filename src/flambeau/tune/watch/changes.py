"""Changes that a trial makes to the script from outside.

By name, with their values:

- every DataLoader, see `loader_clock.py`: workers (a number; of iterable data sets only for the classes in
  shared, see `worker_shares.py`), prefetch (a number), persistent, once (of those made on the same way, the
  first is used in the place of later ones), pin, cached (number of batches to keep),
  alone (seconds), fast;
- the process: threads and worker_threads (at most), keep_freed, tf32, cudnn_benchmark, no_anomaly,
  no_tracer, no_tracemalloc, no_profiler, no_saves;
- optimizers: fused, foreach, set_to_none;
- the model, that is every module with trainable parameters that is called from outside of modules:
  channels_last, autocast (the name of a dtype), compile;
- calls that wait for the device, see `waiting_calls.py`: skip_waits (lines).
"""

import functools
import inspect
import os
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from flambeau.recipes.setup.freed_memory import keep_freed_memory
from flambeau.tune.watch.waiting_calls import skip_waiting_calls

_MODEL_CHANGES = ("channels_last", "autocast", "compile")


def apply_changes(change: Mapping[str, Any]) -> Callable[[], None]:
    """Make this trial's changes, but those of loaders; the result is called after the first step."""
    if "threads" in change:
        _limit_threads(change["threads"])
    if "worker_threads" in change:
        _limit_threads_of_workers(change["worker_threads"])
    if change.get("keep_freed"):
        keep_freed_memory()
    for name in ("fused", "foreach"):
        if change.get(name):
            _change_optimizers(name)
    if change.get("set_to_none"):
        _zero_by_none()
    if change.get("no_anomaly"):
        torch.set_anomaly_enabled = lambda *_, **__: None
    if change.get("no_tracer"):
        for name in ("settrace", "setprofile"):
            setattr(sys, name, lambda _: None)
    if change.get("no_tracemalloc"):
        tracemalloc.stop()
        tracemalloc.start = lambda *_, **__: None
    if change.get("no_profiler"):
        _silence_profiler()
    if change.get("no_saves"):
        for owner, name in (
            (torch, "save"),
            (numpy, "save"),
            (numpy, "savez"),
            (numpy, "savez_compressed"),
        ):
            setattr(owner, name, lambda *_, **__: None)
    if change.get("tf32"):
        torch.set_float32_matmul_precision("high")
    if change.get("cudnn_benchmark"):
        torch.backends.cudnn.benchmark = True
    if "skip_waits" in change:
        skip_waiting_calls(change["skip_waits"])
    if any(name in change for name in _MODEL_CHANGES):
        return _change_models(change)
    return lambda: None


def _limit_threads(most: int) -> None:
    """Now, and in later calls of the script; a worker keeps its one thread."""
    set_threads = torch.set_num_threads
    set_threads(min(most, torch.get_num_threads()))
    torch.set_num_threads = lambda nthreads: set_threads(min(most, nthreads))
    os.environ.update(OMP_NUM_THREADS=f"{most}", MKL_NUM_THREADS=f"{most}")


def _limit_threads_of_workers(most: int) -> None:
    """Limit torch in DataLoader workers, and OpenCV, which by default uses all CPUs."""
    set_threads = torch.set_num_threads

    def limited(nthreads: int) -> None:
        set_threads(nthreads if get_worker_info() is None else min(most, nthreads))

    def in_fork() -> None:
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(most)

    torch.set_num_threads = limited
    os.register_at_fork(after_in_child=in_fork)


def _change_optimizers(way: str) -> None:
    """Set this option, fused or foreach, in all of torch's optimizers that have it."""
    other = {"fused": "foreach", "foreach": "fused"}[way]

    def changed(kind: type[Optimizer]) -> None:
        make = kind.__init__
        signature = inspect.signature(make)

        @functools.wraps(make)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(self, *args, **kwargs)
            if type(self) is kind:
                given.arguments[way] = True
                given.arguments.pop(other, None)
            make(*given.args, **given.kwargs)

        kind.__init__ = init  # type: ignore[method-assign]

    for kind in vars(torch.optim).values():
        if (
            isinstance(kind, type)
            and issubclass(kind, Optimizer)
            and way in inspect.signature(kind.__init__).parameters
        ):
            changed(kind)


def _zero_by_none() -> None:
    def changed(zero: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(zero)
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            zero(self, set_to_none=True)

        return zero_grad

    for kind in (Optimizer, nn.Module):
        kind.zero_grad = changed(kind.zero_grad)  # type: ignore[method-assign]


def _silence_profiler() -> None:
    def nothing(self: Any, *_: Any) -> Any:
        return self

    kind = torch.profiler.profile
    for name in ("start", "step", "__enter__"):
        setattr(kind, name, nothing)
    for name in ("stop", "__exit__"):
        setattr(kind, name, lambda *_: None)


# ---------------------------------------------------------------- the model


def _change_models(change: Mapping[str, Any]) -> Callable[[], None]:
    """Change each model at its first call, until the first step is over."""
    known: set[int] = set()

    def before(module: nn.Module, _: Any) -> None:
        # Submodules were changed together with their model.
        if id(module) in known or not any(p.requires_grad for p in module.parameters()):
            return
        known.update(id(one) for one in module.modules())
        change_model(module, change)

    return register_module_forward_pre_hook(before).remove


def change_model(model: nn.Module, change: Mapping[str, Any]) -> None:
    """Change a model in place (channels_last, autocast, compile); its parameters stay the same objects."""
    if change.get("channels_last"):
        model.to(memory_format=torch.channels_last)
    if change.get("channels_last") or "autocast" in change:
        model.forward = _around(model.forward, change)
    if change.get("compile"):
        model.compile()


def _around(forward: Callable[..., Any], change: Mapping[str, Any]) -> Callable[..., Any]:
    dtype = getattr(torch, change["autocast"]) if "autocast" in change else None

    def channels_last(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim == 4:
            return value.contiguous(memory_format=torch.channels_last)
        return value

    def to_float32(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float() if value.dtype == dtype else value
        if isinstance(value, dict):
            for key, inner in value.items():
                value[key] = to_float32(inner)
            return value
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(to_float32(inner) for inner in value)
        return value

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if change.get("channels_last"):
            args = tuple(channels_last(value) for value in args)
            kwargs = {name: channels_last(value) for name, value in kwargs.items()}
        if dtype is None:
            return forward(*args, **kwargs)
        device = next(
            (v.device.type for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), "cpu"
        )
        with torch.autocast(device, dtype):
            result = forward(*args, **kwargs)
        return to_float32(result)

    return call
