"""Recompute the activations of chosen modules in the backward pass instead of keeping them.

在反向传播时重新计算所选模块或各分段的激活值，而不是一直保存它们。

Source: Chen et al., "Training deep nets with sublinear memory cost", arXiv 1604.06174; for segments its
section 4: n layers in k segments keep k inputs, plus n / k layers while one segment is recomputed, which is
least for k = sqrt(n). The recomputation is that of torch.utils.checkpoint with use_reentrant=False.

Not for the memory of parameters or optimizer, nor for modules whose output depends on a buffer that every
forward pass changes (spectral norm): their recomputation would start from the changed value.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


class _Recomputing:
    """Replaces `forward` of one module; without a wrapper, names, hooks and `isinstance` stay the same.

    An object, not a closure, so that `copy.deepcopy` and pickle bind it to the copy of the module.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = partial(type(self.module).forward, self.module)
        return _recompute(run, [self.module], self.name, *args, **kwargs)


class _Segmented:
    """Replaces `forward` of a Sequential, and recomputes its children in segments."""

    def __init__(self, module: nn.Sequential, num_segments: int) -> None:
        self.module = module
        self.num_segments = num_segments

    def __call__(self, x: Any) -> Any:
        children = list(self.module)
        bounds = [i * len(children) // self.num_segments for i in range(self.num_segments + 1)]
        for start, end in pairwise(bounds):
            run = partial(_chain, children[start:end])
            if end == len(
                children
            ):  # backward needs the last segment at once: keep its activations
                x = run(x)
            else:
                name = f"the segment of children {start} to {end - 1}"
                x = _recompute(run, children[start:end], name, x)
        return x


def _chain(modules: Sequence[nn.Module], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x


def _recompute(
    run: Callable[..., Any], modules: Sequence[nn.Module], name: str, *args: Any, **kwargs: Any
) -> Any:
    """Call `run`, which runs these modules, and keep only its inputs for the backward pass."""
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    run = partial(run, **kwargs)
    if torch.compiler.is_compiling():  # a compiled graph writes each buffer only once
        return checkpoint(run, *args, use_reentrant=False)
    before = _versions(args, kwargs)
    output = checkpoint(
        run, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _OnCopies(modules))
    )
    changed = _versions(args, kwargs) != before
    if changed and any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves(output)):
        raise ValueError(
            f"{name} changes its input in place, and recomputing would start from the changed one: "
            "make its first activation inplace=False, or checkpoint a module around it"
        )
    return output


def _versions(*inputs: Any) -> list[int]:
    """How often each tensor was written to; tensors of inference_mode do not count it."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


class _OnCopies:
    """The context of a recomputation: it changes copies of the buffers, which so are updated once per step.

    All buffers are copied, because batch_norm does not raise the version counters of those it changes.
    It can be entered several times: a retained graph recomputes in each backward pass.
    """

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


def checkpoint_modules(model: nn.Module, *patterns: str) -> nn.Module:
    """Make the named modules keep only their inputs, and recompute the rest in the backward pass.

    Outputs, gradients and buffers are those of the plain model: random numbers repeat, autocast is kept.
    Without gradients nothing is recomputed.

    Args:
        model: changed in place and returned; names and the state dict stay.
        patterns: of module names as in a shell; `*` matches dots too: 'layer*.*'. Of nested modules the
            outermost is taken. A ModuleList has no forward pass; match its members.

    Raises:
        ValueError: a pattern matches no module with a forward pass, a module is inside or around one that
            recomputes, or its `forward` was replaced by another library; in the first forward pass: a module
            changes its input in place.

    Example:
        >>> block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout())
        >>> model = nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 1))
        >>> checkpointed_modules(checkpoint_modules(model, "1"))
        ['1']
        >>> model(torch.ones(2, 4)).sum().backward()
    """
    chosen = {module: name for pattern in patterns for name, module in _matches(model, pattern)}
    inner = {m for outer in chosen for m in outer.modules() if m is not outer}
    present = {model.get_submodule(name): name for name in checkpointed_modules(model)}
    for module, name in chosen.items():
        if module in inner or module in present:
            continue
        for other, other_name in present.items():
            if module in set(other.modules()) or other in set(module.modules()):
                raise ValueError(
                    f"{name} and {other_name or 'the whole model'} are nested, and the latter "
                    "recomputes already: call undo_checkpoints(model) first"
                )
        if "forward" in module.__dict__:
            raise ValueError(
                f"{name}: another library has replaced its forward; checkpoint before that"
            )
    for module in chosen.keys() - inner - present.keys():
        module.forward = _Recomputing(module, chosen[module])
    return model


def _matches(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    names = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and type(module).forward is not nn.Module.forward  # a ModuleList has none
    }
    matches = [(name, module) for name, module in names.items() if fnmatchcase(name, pattern)]
    if not matches:
        near = get_close_matches(pattern, names, n=1, cutoff=0.0) or ["none"]
        raise ValueError(
            f"{pattern!r} matches no module with a forward pass; the nearest is {near[0]!r}"
        )
    return matches


def checkpoint_segments(model: nn.Sequential, *, num_segments: int | None = None) -> nn.Sequential:
    """Make a Sequential keep only the inputs of its segments, and recompute the rest in the backward pass.

    Outputs, gradients and buffers as in `checkpoint_modules`.

    Args:
        model: changed in place and returned; may be a part of a model: `model.layers`.
        num_segments: 1 to the number of children, split evenly; None is the rounded square root of that
            number. 1 recomputes nothing, and undoes an earlier call.

    Raises:
        TypeError: no Sequential, or one with another forward pass.
        ValueError: number out of range; later, a segment changes its input in place.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
        >>> checkpoint_segments(model)(torch.ones(2, 4)).sum().backward()
        >>> model.forward.num_segments
        3
    """
    replaced = model.__dict__.get("forward")
    is_plain = getattr(type(model), "forward", None) is nn.Sequential.forward
    if not is_plain or (replaced and not isinstance(replaced, _Segmented)):
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


def checkpointed_modules(model: nn.Module) -> list[str]:
    """The names of the modules that recompute, in the order of the model.

    Example:
        >>> checkpointed_modules(nn.Sequential(nn.Linear(1, 1)))
        []
    """
    ours = (_Recomputing, _Segmented)
    return [n for n, m in model.named_modules() if isinstance(m.__dict__.get("forward"), ours)]


def undo_checkpoints(model: nn.Module) -> nn.Module:
    """Make every module of the model keep its activations again; returns the same model.

    Example:
        >>> model = checkpoint_modules(nn.Sequential(nn.Linear(1, 1)), "0")
        >>> checkpointed_modules(undo_checkpoints(model))
        []
    """
    for name in checkpointed_modules(model):
        del model.get_submodule(name).forward
    return model
