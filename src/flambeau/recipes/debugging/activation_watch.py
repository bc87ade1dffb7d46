"""Watch activations by hooks, without waiting for the device: mean, std, zeros, dead units, NaN per module.

用钩子观察激活值，不等待设备：每个模块的均值、标准差、零的比例、死单元和 NaN。

Source: original; the means of several batches are merged after Chan, Golub and LeVeque, "Updating formulae
and a pairwise algorithm for computing sample variances", 1979.

Sums stay on the device until `read()`. Not for compiled models, in which no hooks run (watch the model before
compiling), nor for DataParallel, whose replicas are copies.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm


@dataclass(frozen=True)
class Activation:
    """The output of one module since the last read.

    Attributes:
        name, kind: of the module.
        calls: number of runs on batches that were not empty.
        mean, std: of all values.
        zeros: fraction of values that were 0, in [0, 1].
        num_units: channels or features; 0 if the output has none, or their number varies.
        dead: number of units that were 0 in every sample.
        not_finite: number of values that were NaN or infinite.
    """

    name: str
    kind: str
    calls: int
    mean: float
    std: float
    zeros: float
    num_units: int
    dead: int
    not_finite: int


class ActivationWatch:
    """Collects statistics of the outputs of modules inside a `with` block, by hooks.

    If an output has several tensors, the first floating-point one counts. A module that runs several times
    per step, or again in the backward pass (activation checkpointing), counts each time.

    Args:
        model: not changed; in any mode, with or without autocast and no_grad.
        modules: names or patterns of the modules to watch; None is all modules without children.
        unit_dim: the dimension of units in outputs. None is 1, or the last for outputs of three dimensions
            (tokens), unless they come from a Conv1d, BatchNorm1d or similar.

    Raises:
        ValueError: a pattern has no match.
        TypeError: `modules` is a single string.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with torch.no_grad(), ActivationWatch(model) as watch:
        ...     _ = model[0].bias.copy_(torch.tensor([9.0, 9.0, -9.0]))
        ...     for _ in range(10):
        ...         _ = model(torch.rand(4, 2))
        >>> _, relu = watch.read()
        >>> relu.kind, relu.calls, f"{relu.dead} of {relu.num_units} dead"
        ('ReLU', 10, '1 of 3 dead')
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        modules: Collection[str] | None = None,
        unit_dim: int | None = None,
    ) -> None:
        self._modules = _chosen(model, modules)
        self._unit_dim = unit_dim
        self._handles: list[Any] = []
        self._sums: dict[str, _Sums] = {}

    def __enter__(self) -> Self:
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def read(self) -> list[Activation]:
        """Return the statistics since the last read, in run order, and reset; waits for the device."""
        sums, self._sums = self._sums, {}
        return [s.activation(name) for name, s in sums.items()]

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            x = next((t.detach() for t in _tensors(output) if t.is_floating_point()), None)
            if x is None or x.numel() == 0:
                return
            unit_dim = self._unit_dim
            if unit_dim is None:
                is_sequence = x.dim() == 3 and not type(module).__name__.endswith("1d")
                unit_dim = -1 if is_sequence else 1
            with torch.no_grad():
                self._sums.setdefault(name, _Sums(type(module).__name__)).add(x, unit_dim)

        return hook


def activation_table(activations: Sequence[Activation]) -> str:
    """Format the result of `read` as a table.

    Example:
        >>> print(activation_table([Activation("relu", "ReLU", 9, 0.4, 0.6, 0.5, 64, 3, 0)]))
        module  kind              calls     mean      std    zeros      dead  NaN, inf
        relu    ReLU                  9      0.4      0.6    50.0%      3/64         0
    """
    width = max([6, *(len(a.name) for a in activations)])
    row = f"{{:{width}}}  {{:14}}" + " {:>8}" * 4 + " {:>9}" * 2
    lines = [row.format("module", "kind", "calls", "mean", "std", "zeros", "dead", "NaN, inf")]
    for a in activations:
        dead = f"{a.dead}/{a.num_units}" if a.num_units else "-"
        size = (f"{a.mean:.3g}", f"{a.std:.3g}", f"{a.zeros:.1%}", dead, a.not_finite)
        lines.append(row.format(a.name, a.kind, a.calls, *size))
    return "\n".join(lines)


@dataclass
class _Sums:
    """Sums of one module, on its device; never in place, which tensors of inference_mode refuse."""

    kind: str
    calls: int = 0
    count: int = 0
    mean: Any = 0.0
    squares: Any = 0.0  # sum of squared distances from the mean
    not_finite: Any = 0
    nonzero: Any = None  # number of values that were not 0, per unit, or in total without units
    has_units: bool = True

    def add(self, x: Tensor, unit_dim: int) -> None:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        mean = wide.mean()
        squares = vector_norm(wide - mean).square()  # var_mean is far slower on a CPU
        new = x.numel()
        total = self.count + x.numel()
        step = mean - self.mean
        self.squares = self.squares + squares + step.square() * (self.count * new / total)
        self.mean = self.mean + step * (new / total)
        self.calls, self.count = self.calls + 1, total
        self.not_finite = self.not_finite + (x - x).count_nonzero()  # NaN unless finite
        rest = [dim for dim in range(x.dim()) if dim not in (unit_dim, unit_dim + x.dim())]
        nonzero = x.count_nonzero(dim=rest) if len(rest) > 0 else x.count_nonzero()
        seen = torch.zeros_like(nonzero) if self.nonzero is None else self.nonzero
        self.has_units &= len(rest) == x.dim() - 1 > 0 and seen.shape == nonzero.shape
        self.nonzero = seen + nonzero if self.has_units else seen.sum() + nonzero.sum()

    def activation(self, name: str) -> Activation:
        mean = float(self.mean)
        squares = float(self.squares)
        not_finite = int(self.not_finite)
        nonzero, dead = int(self.nonzero.sum()), int((self.nonzero == 0).sum())
        spread = mean, math.sqrt(squares / self.count), 1 - nonzero / self.count
        dead, num_units = (dead, self.nonzero.numel()) if self.has_units else (0, 0)
        counts = num_units, dead, not_finite
        return Activation(name, self.kind, self.calls, *spread, *counts)


def _chosen(model: nn.Module, patterns: Collection[str] | None) -> dict[str, nn.Module]:
    if patterns is None:
        return {
            name: module for name, module in model.named_modules() if not list(module.children())
        }
    if isinstance(patterns, str):
        raise TypeError(f"modules is a list of patterns, got the string {patterns!r}")
    every = dict(model.named_modules(remove_duplicate=False))
    missing = [p for p in patterns if not any(fnmatchcase(name, p) for name in every)]
    if missing:
        raise ValueError(f"modules: {missing[0]!r} matches none of {[*every]}")
    names: dict[nn.Module, str] = {}  # of several names of a module the first that matches
    for name, module in every.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            names.setdefault(module, name)
    return {name: module for module, name in names.items()}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
