"""Runs a forward pass on a copy of a model and watches it: without values where shapes are enough."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from flambeau.errors import InputError
from flambeau.recipes.memory.memory_budget import fake_tensor_mode
from flambeau.user_code import first_line

_Result = TypeVar("_Result")
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_VALUES_READ = (DataDependentOutputException, DynamicOutputShapeException)


def follow(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    watch: Callable[[nn.Module, _Args, _Kwargs, bool], _Result],
) -> _Result:
    """Call `watch` with a copy of a model whose tensors have no values, or random ones if that fails.

    It takes the copy, args, kwargs and whether tensors have values, and calls the copy. InputError: the model
    does not take the arguments, or reads values on the device meta.
    """
    inputs: tuple[_Args, _Kwargs] = (tuple(args), dict(kwargs))
    tensors = [*model.parameters(), *model.buffers()]
    attempts = []
    if not any(map(is_lazy, tensors)):
        attempts.append(False)
    if not any(one.is_meta for one in tensors):
        attempts.append(True)
    problem: Exception | None = None
    for values in attempts:
        try:
            with _copied(model, inputs, values=values) as (twin, twin_args, twin_kwargs):
                return watch(twin, twin_args, twin_kwargs, values)
        except Exception as error:
            problem = error
    if problem is None or isinstance(problem, _VALUES_READ):
        raise InputError(
            "the model reads values of its tensors: it has to be on a device that has them"
        ) from problem
    raise InputError(
        f"{type(model).__name__} does not take {_described(*inputs)}: "
        f"{type(problem).__name__}: {first_line(problem)}"
    ) from problem


@contextmanager
def _copied(
    model: nn.Module, inputs: tuple[_Args, _Kwargs], *, values: bool
) -> Iterator[tuple[nn.Module, _Args, _Kwargs]]:
    if values:
        copied = copy.deepcopy(model)
        args, kwargs = with_values(inputs)
        if any(map(is_lazy, (*copied.parameters(), *copied.buffers()))):
            with torch.no_grad():  # what initializes them is no part of the forward pass
                copied.eval()(*args, **kwargs)
        yield copied, args, kwargs
        return
    with fake_tensor_mode():
        memo: dict[int, Any] = {id(t): _empty(t) for t in (*model.parameters(), *model.buffers())}
        yield (copy.deepcopy(model, memo), *tree_map_only(Tensor, _empty, inputs))


def _empty(tensor: Tensor) -> Tensor:
    """A fake tensor on the CPU with the shape, strides and dtype of another."""
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake


def with_values(tree: Any) -> Any:
    """Replaces tensors on the meta device by random numbers, or zeros for integers."""
    return tree_map_only(Tensor, _valued, tree)


def _valued(tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def hooked(
    model: nn.Module,
    before: Callable[[nn.Module, Any, Any], None],
    after: Callable[[nn.Module, Any, Any, Any], None],
) -> Iterator[None]:
    """While the context is open, calls `before`(module, args, kwargs) and `after`(module, args, kwargs,
    output) at each call.

    `before` runs before the module's own hooks.
    """
    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share a storage, while it lives; a storage without values has no address."""
    return int(tensor.untyped_storage()._cdata)


def _described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    def text(tensor: Tensor) -> str:
        return f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")

    parts = [f"{tree_map_only(Tensor, text, one)}" for one in args]
    parts += [f"{name}={tree_map_only(Tensor, text, one)}" for name, one in kwargs.items()]
    return f"({', '.join(parts)})"
