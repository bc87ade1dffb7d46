"""Gradient flow: mean and largest gradient and size of updates per parameter, without waiting for the device.

梯度流：每个参数的梯度均值与最大值，以及更新的幅度，不等待设备。

Source: original.

Sums stay on the device until `read()`. Not for optimizers that compute gradients inside `step` (LBFGS), nor
for sharded weights (FSDP); sparse gradients are left out.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.optim import Optimizer


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter since the last read.

    Attributes:
        name: of the parameter.
        steps: how many gradients were seen.
        mean, largest: of the absolute values; NaN or infinite if one was.
        update_ratio: norm of the updates divided by norm of the weights, root mean square over the steps;
            about 1e-3 is usual. None without `updates=True`, or if all weights were 0.
    """

    name: str
    steps: int
    mean: float
    largest: float
    update_ratio: float | None


class GradientWatch:
    """Records gradients, and on request updates, in each step of an optimizer inside a `with` block.

    It sees the gradients that the optimizer gets: reduced over ranks, unscaled, clipped. A step that a
    GradScaler skips is not seen; only a fused optimizer, which skips on the device, shows it as infinite or
    NaN.

    Args:
        model: its parameters are watched; not changed.
        optimizer: of some or all of the parameters. With None, call `record()` yourself.
        updates: record the size of updates too, which costs a copy of the weights; needs `optimizer`.

    Raises:
        ValueError: `updates` without `optimizer`.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with GradientWatch(model, optimizer) as watch:
        ...     model(torch.tensor([[1.0, -3.0]])).sum().backward()
        ...     optimizer.step()
        >>> watch.read()
        [Gradient(name='weight', steps=1, mean=2.0, largest=3.0, update_ratio=None)]
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, updates: bool = False
    ) -> None:
        if updates and optimizer is None:
            raise ValueError("updates=True needs the optimizer, whose steps make them")
        self._named = list(model.named_parameters())
        self._optimizer, self._updates = optimizer, updates
        self._handles: list[Any] = []
        self._before: dict[str, Tensor] = {}
        self._seen: dict[str, list[Tensor]] = {}  # sum and largest of |gradient|
        self._moved: dict[str, list[Tensor]] = {}  # squared norms of updates and weights, summed
        self._steps: Counter[str] = Counter()

    def __enter__(self) -> Self:
        if self._optimizer is not None:
            self._handles = [
                self._optimizer.register_step_pre_hook(self._before_step),
                self._optimizer.register_step_post_hook(self._after_step),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._before.clear()

    @torch.no_grad()
    def record(self, *, scale: Tensor | float = 1.0) -> None:
        """Record the present gradients; call it after backward if there is no `optimizer`.

        Args:
            scale: divide the gradients by this, such as a GradScaler's scale.
        """
        for name, parameter in self._named:
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse or not gradient.numel():
                continue
            sizes = gradient.abs()
            dtype = torch.promote_types(sizes.dtype, torch.float32)
            total = sizes.sum(dtype=dtype) / scale
            largest = sizes.amax().to(dtype) / scale
            if name in self._seen:
                total = total + self._seen[name][0]
                largest = torch.maximum(largest, self._seen[name][1])
            self._seen[name] = [total, largest]
            self._steps[name] += 1

    def read(self) -> list[Gradient]:
        """Return the records since the last read, in model order, and reset; waits for the device."""
        gradients = []
        for name, parameter in self._named:
            if name in self._seen:
                total, largest = map(float, self._seen[name])
                update, weight = map(float, self._moved.get(name, (0, 0)))
                mean = total / (self._steps[name] * parameter.numel())
                ratio = math.sqrt(update / weight) if weight else None
                gradients.append(Gradient(name, self._steps[name], mean, largest, ratio))
        self._seen = {}
        self._moved = {}
        self._steps = Counter()
        return gradients

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        # For a fused optimizer, a GradScaler does not unscale but sets grad_scale.
        scale = getattr(optimizer, "grad_scale", None)
        self.record(scale=1.0 if scale is None else scale)
        if self._updates:
            self._before = {name: p.clone() for name, p in self._named if name in self._seen}

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for name, parameter in self._named:
            if name in self._before:
                old = self._before[name]
                # In float16 the square of a norm above 255 is infinite, and of one below 1e-4 it is 0.
                wide = torch.promote_types(old.dtype, torch.float32)
                norms = vector_norm(parameter - old, dtype=wide), vector_norm(old, dtype=wide)
                new = [norm.square() for norm in norms]
                sums = self._moved.get(name, [0, 0])
                self._moved[name] = [a + b for a, b in zip(sums, new, strict=True)]
        self._before.clear()


def gradient_table(gradients: Sequence[Gradient]) -> str:
    """Format the result of `read` as a table.

    Example:
        >>> print(gradient_table([Gradient("0.weight", 9, 0.002, 0.31, 1.2e-3)]))
        parameter    steps   mean |g|    max |g|  update/weight
        0.weight         9      0.002       0.31         0.0012
    """
    width = max([9, *(len(g.name) for g in gradients)])
    row = f"{{:{width}}} {{:>8}} {{:>10}} {{:>10}} {{:>14}}"
    lines = [row.format("parameter", "steps", "mean |g|", "max |g|", "update/weight")]
    for g in gradients:
        ratio = "-" if g.update_ratio is None else f"{g.update_ratio:.2g}"
        lines.append(row.format(g.name, g.steps, f"{g.mean:.3g}", f"{g.largest:.3g}", ratio))
    return "\n".join(lines)


def plot_gradients(gradients: Sequence[Gradient], path: str | Path) -> None:
    """Plot the result of `read`: mean and largest |gradient| per parameter, in the order of the model.

    Args:
        path: NAME.png, .pdf or .svg, a new file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no gradients.
        FileExistsError: the file exists.

    Example:
        >>> plot_gradients([], "flow.png")
        Traceback (most recent call last):
        ValueError: no gradients were seen: step the optimizer inside the `with` block, or call record()
    """
    if not gradients:
        raise ValueError(
            "no gradients were seen: step the optimizer inside the `with` block, or call record()"
        )
    if Path(path).exists():
        raise FileExistsError(f"{path} exists; choose another name")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install matplotlib") from error
    positions = range(len(gradients))
    figure = Figure(figsize=(2 + 0.25 * len(gradients), 5), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever backend was chosen elsewhere
    axes = figure.add_subplot(yscale="log", ylabel="|gradient|")
    axes.bar(positions, [g.largest for g in gradients], color="lightblue", label="largest")
    axes.bar(positions, [g.mean for g in gradients], color="navy", label="mean")
    names = [g.name for g in gradients]
    axes.set_xticks(positions, names, rotation=90, fontsize=7, parse_math=False)
    axes.legend()
    figure.savefig(path, dpi=150)
