"""What each module of a model computes for an example and what it costs, from shapes alone.

FLOPs are those of torch.utils.flop_counter: matrix products and convolutions, multiply and add being two.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flambeau.inspection.receptive_field import FieldTracker, ReceptiveField
from flambeau.inspection.watched_forward import follow, hooked, storage_key, tensors_of


@dataclass(frozen=True)
class ModuleSummary:
    """A module in a forward pass of one example, with everything inside it.

    Attributes:
        name: '' is the model itself.
        output: shapes of the tensors of its last call; empty without one.
        parameters: numbers, each tensor once.
        flops: multiply and add being two.
        accessed_bytes: read and written by operations except views: the memory access cost.
        kept_bytes: tensors kept for the backward pass, except parameters and inputs of the model; a storage
            counts where it is kept first.
        receptive_field: input pixels that one output position depends on, along each dimension; None if
            unknown, empty for the whole input.
        same_as: this module's earlier name in the list.
    """

    name: str
    kind: str
    output: tuple[tuple[int, ...], ...]
    calls: int
    parameters: int
    trainable: int
    buffers: int
    flops: int
    accessed_bytes: int
    kept_bytes: int
    receptive_field: tuple[int, ...] | None
    same_as: str | None = None

    @property
    def depth(self) -> int:
        """0 of the model, 1 of its children."""
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True)
class ModelSummary:
    """What `summarize` finds.

    Attributes:
        modules: in the order of `named_modules`; the first is the model, with the totals.
        unused: the outermost modules that are not called and whose parameters no operation reads.
        shared: names of parameters that are one tensor.
        ran: operations ran on random values, as the model reads some.
    """

    modules: tuple[ModuleSummary, ...]
    unused: tuple[str, ...]
    shared: tuple[tuple[str, ...], ...]
    ran: bool


@dataclass
class _Cost:
    """The sums over the calls of one module so far."""

    calls: int = 0
    output: tuple[tuple[int, ...], ...] = ()
    receptive_field: ReceptiveField | None = None
    figures: list[int] = field(default_factory=lambda: [0, 0, 0])


def summarize(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> ModelSummary:
    """Watch a forward pass in evaluation mode; the model, which may be on 'meta', is not changed.

    Only shapes and dtypes count, unless the model reads values. InputError: it does not take the arguments.
    """
    return follow(model, args, kwargs or {}, _watched)


def _watched(
    twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], ran: bool
) -> ModelSummary:
    twin.eval()
    inputs = tensors_of((args, kwargs))
    watch = _Watch(twin, inputs)
    with ExitStack() as stack:
        # Counting needs the products: neither a fused layer for inference nor a fused attention.
        stack.enter_context(_counted_attention())
        stack.enter_context(watch.hooks())
        stack.enter_context(watch.flops)
        stack.enter_context(watch)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda kept: kept))
        stack.enter_context(torch.enable_grad())
        twin(*args, **kwargs)
    return _summary(twin, watch, ran=ran)


@contextmanager
def _counted_attention() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _recurrent_flops(
    x: Sequence[int], w_ih: Sequence[int], w_hh: Sequence[int], *_: Any, **__: Any
) -> int:
    """One direction of one layer: x (T, N, features), weights (gates x hidden, features or hidden)."""
    return 2 * x[0] * x[1] * (math.prod(w_ih) + math.prod(w_hh))


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """All heads: query (N, heads, T, E), key (N, heads, S, E), value (N, heads, S, E')."""
    return 2 * math.prod(query[:3]) * key[-2] * (query[-1] + value[-1])


# torch counts these as 0: oneDNN computes an LSTM in one operation (a GRU is separate products, which are
# counted), and before torch 2.15 attention on a CPU has no formula.
_UNCOUNTED = {
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}


class _Watch(TorchDispatchMode):
    """Sums what the operations of a forward pass read, write and keep, by module."""

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
        self.costs = {id(module): _Cost() for module in model.modules()}
        self.read = set[int]()  # storages of the parameters that operations read
        self._model = model
        self._fields = FieldTracker(inputs)
        self._accessed = self._kept = 0
        known = [*model.parameters(), *model.buffers(), *inputs]
        self._storages = {storage_key(t) for t in known if not is_lazy(t)}
        self._alive: list[Tensor] = []  # so that no other storage gets its key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sources = tensors_of((args, kwargs))
        self.read |= {storage_key(one) for one in sources}
        made = tensors_of(out)
        if made and not func.is_view:
            self._accessed += sum(one.numel() * one.element_size() for one in (*sources, *made))
        self._fields.follow(func, args, sources, made)
        return out

    def keep(self, tensor: Tensor) -> Tensor:
        """A hook of autograd for each tensor that it keeps for the backward pass."""
        if (key := storage_key(tensor)) not in self._storages:
            self._storages.add(key)
            self._alive.append(tensor)
            self._kept += tensor.untyped_storage().nbytes()
        return tensor

    def _figures(self) -> list[int]:
        return [self.flops.get_total_flops(), self._accessed, self._kept]

    def hooks(self) -> AbstractContextManager[None]:
        """While the context is open, the calls of all modules are counted."""
        began: list[list[int]] = []

        def before(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
            began.append(self._figures())

        def after(module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            tensors = tensors_of(output)
            cost = self.costs[id(module)]
            start = began.pop()
            cost.calls += 1
            cost.output = tuple(tuple(one.shape) for one in tensors)
            cost.receptive_field = self._fields[tensors[0]] if tensors else None
            cost.figures = [
                c + n - s for c, n, s in zip(cost.figures, self._figures(), start, strict=True)
            ]

        return hooked(self._model, before, after)


def _summary(model: nn.Module, watch: _Watch, *, ran: bool) -> ModelSummary:
    modules = []
    first_names = dict[int, str]()
    for name, module in model.named_modules(remove_duplicate=False):
        cost = watch.costs[id(module)]
        flops, accessed, kept = cost.figures
        parameters = list(module.parameters())
        before = first_names.setdefault(id(module), name)
        modules.append(
            ModuleSummary(
                name=name,
                kind=type(module).__name__,
                output=cost.output,
                calls=cost.calls,
                parameters=sum(p.numel() for p in parameters),
                trainable=sum(p.numel() for p in parameters if p.requires_grad),
                buffers=sum(b.numel() for b in module.buffers()),
                flops=flops,
                accessed_bytes=accessed,
                kept_bytes=kept,
                receptive_field=_pixels(cost.receptive_field),
                same_as=None if before == name else before,
            )
        )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = tuple(tuple(same) for same in names.values() if len(same) > 1)
    return ModelSummary(tuple(modules), _unused(model, watch), shared, ran)


def _pixels(field: ReceptiveField | None) -> tuple[int, ...] | None:
    return None if field is None else tuple(map(round, field.size))


def _unused(model: nn.Module, watch: _Watch) -> tuple[str, ...]:
    """Modules that are not called and whose parameters no operation reads (attention reads some itself)."""
    names: list[str] = []
    for name, module in model.named_modules():
        inside = list(module.modules())
        called = any(watch.costs[id(one)].calls for one in inside)
        read = any(not is_lazy(p) and storage_key(p) in watch.read for p in module.parameters())
        within = any(name.startswith(f"{outer}.") for outer in names)
        if name and not called and not read and not within:
            names.append(name)
    return tuple(names)
