"""A copy of a model that a forward pass can be watched on: without values if shapes are enough."""

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

_Found = TypeVar("_Found")
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_VALUES_READ = (DataDependentOutputException, DynamicOutputShapeException)


def follow(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    watch: Callable[[nn.Module, _Args, _Kwargs, bool], _Found],
) -> _Found:
    """Watch a copy of a model: without values, or with random ones if it fails without.

    Args:
        model: on any device, 'meta' too; not changed.
        args: of the model, tensors in any nesting.
        kwargs: likewise.
        watch: takes the copy, the arguments and whether they have values, and calls the one with the other.

    Returns:
        What `watch` returns.

    Raises:
        InputError: the model does not take the arguments, or needs values and is on the device meta.
    """
    given: tuple[_Args, _Kwargs] = (tuple(args), dict(kwargs))
    own = [*model.parameters(), *model.buffers()]
    ways = []
    if not any(is_lazy(one) for one in own):
        ways.append(False)
    if not any(one.is_meta for one in own):
        ways.append(True)  # values may be all that it lacks
    problem: Exception | None = None
    for values in ways:
        try:
            with _copied(model, given, values=values) as (twin, twin_args, twin_kwargs):
                return watch(twin, twin_args, twin_kwargs, values)
        except Exception as error:
            problem = error
    if problem is None or isinstance(problem, _VALUES_READ):
        raise InputError(
            "the model reads values of its tensors: it has to be on a device that has them"
        ) from problem
    raise InputError(
        f"{type(model).__name__} does not take {_described(*given)}: "
        f"{type(problem).__name__}: {first_line(problem)}"
    ) from problem


@contextmanager
def _copied(
    model: nn.Module, given: tuple[_Args, _Kwargs], *, values: bool
) -> Iterator[tuple[nn.Module, _Args, _Kwargs]]:
    if values:
        yield (copy.deepcopy(model), *with_values(given))
        return
    with fake_tensor_mode():
        memo: dict[int, Any] = {id(t): _empty(t) for t in (*model.parameters(), *model.buffers())}
        yield (copy.deepcopy(model, memo), *tree_map_only(Tensor, _empty, given))


def _empty(tensor: Tensor) -> Tensor:
    """Shape, layout and dtype on the CPU, under a FakeTensorMode."""
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake


def with_values(tree: Any) -> Any:
    """Random numbers in the place of tensors on the device meta, zeros if they are of integers."""
    return tree_map_only(Tensor, _valued, tree)


def _valued(tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in arguments or results of any nesting."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def hooked(
    model: nn.Module,
    before: Callable[[nn.Module, Any, Any], None],
    after: Callable[[nn.Module, Any, Any, Any], None],
) -> Iterator[None]:
    """Until the end of this, two functions are called around each call of a module.

    Args:
        model: whose modules are meant, itself among them.
        before: takes the module, its arguments and those by name; before the module's own hooks.
        after: takes the same and the output.
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
    """Of its storage, which has no address here: equal for tensors that share one, while it lives."""
    return int(tensor.untyped_storage()._cdata)


def _described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    def text(tensor: Tensor) -> str:
        return f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")

    parts = [f"{tree_map_only(Tensor, text, one)}" for one in args]
    parts += [f"{name}={tree_map_only(Tensor, text, one)}" for name, one in kwargs.items()]
    return f"({', '.join(parts)})"
