"""Recompute a Sequential in segments: the square root of its length, or measured.

把 Sequential 分成若干段重新计算：默认约为长度的平方根，也可以取实测最省的段数。

Source: Chen et al., "Training deep nets with sublinear memory cost", arXiv 1604.06174, section 4: n layers in
k segments keep k inputs, and n / k layers while one segment runs again; the least is at k = sqrt(n).

Not for models that are no plain chain: name their blocks instead.
"""

import copy
import math
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


class _OnCopies:
    """Inside, the buffers are copies: a recomputation must not update statistics a second time."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._originals: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        holders = [m._buffers for outer in self._modules for m in outer.modules() if m._buffers]
        self._originals = [(holder, dict(holder)) for holder in holders]
        for holder in holders:
            holder.update({name: b.clone() for name, b in holder.items() if b is not None})

    def __exit__(self, *exception: object) -> None:
        for holder, original in self._originals:
            holder.update(original)


class _Segmented:
    """Stands as `forward` on one Sequential; an object, so that `copy.deepcopy` binds it to the copy."""

    def __init__(self, module: nn.Sequential, num_segments: int) -> None:
        self.module = module
        self.num_segments = num_segments

    def __call__(self, x: Any) -> Any:
        children = list(self.module)
        bounds = [i * len(children) // self.num_segments for i in range(self.num_segments + 1)]
        for start, end in pairwise(bounds):
            run = partial(_run, children[start:end])
            # The last segment is the first of the backward pass: it would be run again at once.
            if end == len(children) or not torch.is_grad_enabled():
                x = run(x)
            elif torch.compiler.is_compiling():  # its graph writes each buffer once by itself
                x = checkpoint(run, x, use_reentrant=False)
            else:
                contexts: Any = partial(tuple, (nullcontext(), _OnCopies(children[start:end])))
                run = partial(_checked, run, f"children {start} to {end - 1}")
                x = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
        return x


def _checked(run: Any, place: str, x: Any) -> Any:
    # Tensors of inference_mode do not count how often they were written to.
    inputs = [t for t in tree_leaves(x) if isinstance(t, Tensor) and not t.is_inference()]
    versions = [t._version for t in inputs]
    output = run(x)
    changed = versions != [t._version for t in inputs]
    if changed and any(getattr(t, "requires_grad", False) for t in tree_leaves(output)):
        raise ValueError(
            f"the segment of {place} changes its input in place, and recomputing would start from "
            "the changed one: make its first activation inplace=False"
        )
    return output


def _run(modules: Sequence[nn.Module], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x


def checkpoint_segments(model: nn.Sequential, *, num_segments: int | None = None) -> nn.Sequential:
    """Let a Sequential keep the inputs of its segments, and recompute the rest in the backward pass.

    Outputs, gradients and buffers stay those of the plain model: random numbers repeat, autocast is kept,
    and running statistics are updated once. Nothing changes where gradients are off.

    Args:
        model: changed in place; names and the state dict stay. A part of a model will do: `model.layers`.
        num_segments: 1 to the number of children, as equal as possible; None is the square root of it,
            rounded. 1 recomputes nothing, which also undoes an earlier call.

    Returns:
        The same model.

    Raises:
        TypeError: no Sequential, or one with a forward pass of its own.
        ValueError: a number of segments outside of the range; later, a segment that changes its input.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
        >>> checkpoint_segments(model)(torch.ones(2, 4)).sum().backward()
        >>> model.forward.num_segments
        3
    """
    own = model.__dict__.get("forward")
    is_ours = isinstance(own, _Segmented)
    if getattr(type(model), "forward", None) is not nn.Sequential.forward or (own and not is_ours):
        name = type(model).__name__
        raise TypeError(f"a plain nn.Sequential is needed, got {name} with its own forward")
    if num_segments is None:
        num_segments = round(math.sqrt(len(model)))
    if not 1 <= num_segments <= len(model):
        raise ValueError(f"num_segments must be in 1 to {len(model)} children, got {num_segments}")
    model.__dict__.pop("forward", None)
    if num_segments > 1:
        model.forward = _Segmented(model, num_segments)  # type: ignore[method-assign]
    return model


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that exist, each once, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and (key := storage._cdata) not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.live += self._sizes[key]
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._drop, key)
        return out


def _without_data(tensor: Tensor) -> Tensor:
    size, stride = tensor.size(), tensor.stride()
    fake = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def segment_peaks(
    model: nn.Sequential, x: Tensor, *, counts: Sequence[int] | None = None
) -> dict[int, int]:
    """Measure the peak of a forward and backward pass for several numbers of segments.

    The passes run on tensors without data, so nothing is allocated, and the model is not changed.

    Args:
        model: a plain Sequential, in the mode it trains in.
        x: its input; only shape, dtype and device count.
        counts: numbers of segments to try; None is the powers of two, the square root, and all children.

    Returns:
        Peak bytes above what lives before the passes (parameters, buffers, input), by number of segments.

    Raises:
        TypeError, ValueError: as `checkpoint_segments`.

    Example:
        >>> model = nn.Sequential(*(nn.Tanh() for _ in range(16)))
        >>> peaks = segment_peaks(model, torch.ones(256, requires_grad=True))
        >>> min(peaks, key=peaks.get)
        4
    """
    if counts is None:
        powers = [2**i for i in range(len(model).bit_length())]
        counts = sorted({*powers, round(math.sqrt(len(model))), len(model)})
    return {count: _peak(model, x, count) for count in counts}


def _peak(model: nn.Sequential, x: Tensor, num_segments: int) -> int:
    live = _LiveStorages()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        tensors = (*model.parameters(), *model.buffers())
        model = copy.deepcopy(model, {id(tensor): _without_data(tensor) for tensor in tensors})
        checkpoint_segments(model, num_segments=num_segments)
        x = _without_data(x)
        start = live.peak = live.live
        model(x).float().mean().backward()
    return live.peak - start
