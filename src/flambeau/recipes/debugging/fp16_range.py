"""Find the operations of a model that leave the range of float16: overflow to infinity, or underflow to zero.

模型的哪些运算超出 float16 的范围：上溢为无穷大，或下溢为零。

Source: original; IEEE 754 binary16: largest 65504, smallest normal 2**-14, smallest subnormal 2**-24.

Run it in float32 to see all such operations at once; then under autocast or with `model.half()` to see which
of them run in float16 there. bfloat16 has the range of float32, so it does not overflow where float32 does
not. It waits for the device after each operation: use it for one batch. Not for compiled models.
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
"""The smallest float16 above 0; values below half of it become 0."""


@dataclass
class Fp16Range:
    """The results of one operation within one module.

    Attributes:
        module: name as in `named_modules`; '' is the model itself, 'backward' the whole backward pass.
        operation: torch's name, such as 'aten.mm'.
        dtype: of the results.
        largest: magnitude of the largest finite value.
        overflowed: infinite or NaN values although all inputs were finite.
        num_lost: values that are not 0 but would be in float16.
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
        """Whether values exceed the range of float16, or overflowed."""
        return self.largest > LARGEST or self.overflowed > 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        module = f"'{self.module}'" if self.module else "the model"
        parts = [f"{self.operation} ({kind}) in {module}: up to {self.largest:.4g}"]
        if self.overflowed:
            parts.append(f"{self.overflowed} values overflowed")
        if self.num_lost:
            parts.append(f"{self.num_lost / self.num_values:.1%} become 0 in float16")
        return ", ".join(parts)


def fp16_range(model: nn.Module, work: Callable[[], object]) -> list[Fp16Range]:
    """Watch every operation of a pass, and report how close results are to the limits of float16.

    Args:
        model: its modules name the entries.
        work: runs the pass: forward, or forward and backward, with or without autocast.

    Returns:
        One entry per operation and module, overflows first, then by the largest value. Keep operations with
        `overflows` in float32, or scale their inputs; if 'backward' loses many values, scale the loss
        (torch.amp.GradScaler).

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
    ranges = watch.ranges.values()
    return sorted(ranges, key=lambda r: (not r.overflows, -r.overflowed, -r.largest))


class _Watch(TorchDispatchMode):
    """Records the results of each operation under the module that is running."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules: list[str] = []
        self.ranges: dict[tuple[str, str, torch.dtype], Fp16Range] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operation.__name__  # such as 'mm.default'
        inputs = args[1:] if name.startswith("copy_.") else args  # copy_ overwrites the first
        # Infinite numbers are checked too: filling a mask with -inf is not an overflow.
        were_finite = all(bool(t.isfinite().all()) for t in _floating((inputs, kwargs))) and all(
            math.isfinite(x) for x in tree_leaves((inputs, kwargs)) if isinstance(x, float)
        )
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view and "empty" not in name:
            # The first result of a normalization is its output, the others are statistics in float32.
            shown = result[0] if "_norm." in name and isinstance(result, tuple) else result
            for tensor in _floating(shown):
                if tensor.numel():
                    self._see(str(operation).rpartition(".")[0], tensor.detach(), were_finite)
        return result

    def _see(self, operation: str, tensor: Tensor, were_finite: bool) -> None:
        module = self.modules[-1] if self.modules else ""
        if torch._C._current_graph_task_id() != -1:
            module = "backward"
        entry = self.ranges.setdefault(
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
    """Keep the name of this module in `watch` while it runs."""

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
