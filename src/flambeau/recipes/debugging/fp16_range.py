"""Which operations of a model leave the range of float16: overflow to infinity, or underflow to zero.

模型的哪些运算超出 float16 的范围：上溢为无穷大，或下溢为零。

Source: own; IEEE 754 binary16: largest 65504, smallest normal 2**-14, smallest at all 2**-24.

Run it in float32 to learn of all places at once, before changing anything; run it under autocast or with
`model.half()` to learn which of them stay in float16 there. bfloat16 has the range of float32: nothing in it
overflows that did not before. Waits for the device after each operation, so for one batch. Not for models in
torch.compile.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGEST = 65504.0
"""The largest float16."""
SMALLEST = 2.0**-24
"""The smallest float16 above 0; what is below half of it becomes 0."""


@dataclass
class Fp16Range:
    """The values that one operation gave within one module.

    Attributes:
        module: name, as `named_modules` has it; '' is the model itself, 'backward' all of backward.
        operation: torch's name of it, such as 'aten.mm'.
        dtype: that it gave.
        largest: of the finite values, in magnitude.
        overflowed: values that are infinite or NaN although all tensors and numbers that went in were finite.
        num_values: how many there were.
        num_lost: how many of them are not 0 and would be in float16.
    """

    module: str
    operation: str
    dtype: torch.dtype
    largest: float = 0.0
    overflowed: int = 0
    num_values: int = 0
    num_lost: int = 0

    @property
    def overflows(self) -> bool:
        """Whether the values do not fit into float16, or did not."""
        return self.largest > LARGEST or self.overflowed > 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        place = f"'{self.module}'" if self.module else "the model"
        parts = [f"{self.operation} ({kind}) in {place}: up to {self.largest:.4g}"]
        if self.overflowed:
            parts.append(f"{self.overflowed} values overflowed")
        if self.num_lost:
            parts.append(f"{self.num_lost / self.num_values:.1%} become 0 in float16")
        return ", ".join(parts)


def fp16_range(model: nn.Module, work: Callable[[], object]) -> list[Fp16Range]:
    """Watch every operation of a pass, and say how far its values are from the limits of float16.

    Args:
        model: whose modules name the places.
        work: does the pass: forward, or forward and backward, under autocast or not.

    Returns:
        One entry for each operation of each module, the largest values first, overflows before all others.
        Those with `overflows` have to stay in float32, or what goes into them to be scaled. Where many
        values of 'backward' are lost, the loss has to be scaled (torch.amp.GradScaler).

    Example:
        >>> class Sum(nn.Module):
        ...     def forward(self, x):
        ...         return x.sum(1)
        >>> first = fp16_range(Sum(), lambda: Sum()(torch.ones(1, 70_000)))[0]
        >>> print(first, first.overflows)
        aten.sum (float32) in the model: up to 7e+04 True
    """
    watch = _Watch()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(_named(watch, name, module))
        stack.enter_context(watch)
        work()
    found = watch.found.values()
    return sorted(found, key=lambda r: (not r.overflows, -r.overflowed, -r.largest))


class _Watch(TorchDispatchMode):
    """Looks at what each operation gives, within the module that is running."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules: list[str] = []
        self.found: dict[tuple[str, str, torch.dtype], Fp16Range] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operation.__name__  # such as 'mm.default'
        given = args[1:] if name.startswith("copy_.") else args  # what copy_ overwrites is no input
        # A mask of -inf is wanted: where a number among the arguments is one, nothing overflowed.
        were_finite = all(bool(t.isfinite().all()) for t in _floating((given, kwargs))) and all(
            math.isfinite(x) for x in tree_leaves((given, kwargs)) if isinstance(x, float)
        )
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view and "empty" not in name:
            # Of a normalization the first is what goes on, the others are statistics in float32.
            shown = result[0] if "_norm." in name and isinstance(result, tuple) else result
            for tensor in _floating(shown):
                if tensor.numel():
                    self._see(str(operation).rpartition(".")[0], tensor.detach(), were_finite)
        return result

    def _see(self, operation: str, tensor: Tensor, were_finite: bool) -> None:
        module = self.modules[-1] if self.modules else ""
        if torch._C._current_graph_task_id() != -1:
            module = "backward"
        entry = self.found.setdefault(
            (module, operation, tensor.dtype), Fp16Range(module, operation, tensor.dtype)
        )
        values = tensor.abs() if tensor.dtype is torch.float64 else tensor.float().abs()
        finite = values.isfinite()
        entry.largest = max(entry.largest, float(values.where(finite, 0).max()))
        if were_finite:
            entry.overflowed += int((~finite).sum())
        entry.num_values += tensor.numel()
        entry.num_lost += int(((values > 0) & (values < SMALLEST / 2)).sum())


@contextmanager
def _named(watch: _Watch, name: str, module: nn.Module) -> Iterator[None]:
    """Keep the name of the module that is running."""

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        watch.modules.pop()

    handles = [
        module.register_forward_pre_hook(lambda *_: watch.modules.append(name)),
        module.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _floating(part)
    elif isinstance(value, dict):
        yield from _floating(list(value.values()))
