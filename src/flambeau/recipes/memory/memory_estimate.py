"""Estimate the memory of a training step before anything is allocated: what it holds, and its peak.

在分配任何内存之前估计一个训练步骤的内存：各类占用与峰值。

Source: none; two steps run on tensors without data (torch's FakeTensorMode) while every storage is counted.

Not for models whose forward pass depends on values of its input (`.item()`, boolean masks), and not for the
scratch space inside a kernel, the CUDA context (0.3 to 0.5 GB) or the allocator's fragments.
"""

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one training step; `print` shows a table. `peak` is not the sum: not all live at once."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    """State between steps: momentum and the like."""
    batch: int
    activations: int
    """What the graph keeps for the backward pass, without parameters, buffers and the batch."""
    peak: int
    """The most that lives at any moment of a step, temporaries between operations included."""

    def __str__(self) -> str:
        rows = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return "\n".join(f"{name:<12}{size / 2**20:12.2f} MiB" for name, size in rows)


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that exist: each once, whatever views it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.live += self._sizes[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out


def _without_data(tensor: Tensor) -> Tensor:
    """Under a FakeTensorMode: shape, layout and device, and no memory. 'meta' counts as the CPU."""
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _forward(
    loss: Callable[[Any], Tensor],
    autocast: torch.dtype | None,
    model: nn.Module,
    batch: tuple[Any, ...],
) -> tuple[Any, Tensor]:
    device = next(model.parameters()).device.type
    with torch.autocast(device, autocast, enabled=autocast is not None):
        output = model(*batch)
        value = loss(output)
    if value.numel() != 1:
        raise ValueError(f"the loss must be a scalar, got the shape {tuple(value.shape)}")
    return output, value


def _mean_of_all(output: Any) -> Tensor:
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack([leaf.float().mean() for leaf in leaves]).sum()


def estimate_memory(
    model: nn.Module,
    batch: tuple[Any, ...],
    *,
    loss: Callable[[Any], Tensor] = _mean_of_all,
    optimizer: Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]] = AdamW,
    autocast: torch.dtype | None = None,
) -> MemoryEstimate:
    """Estimate a step of `loss(model(*batch))`, its backward pass and the optimizer, gradients then freed.

    Args:
        model: on any device, 'meta' too; not changed. In training mode unless you called `eval()`.
        batch: the positional arguments of the model, tensors of any device; only shapes and dtypes count.
        loss: of the output, a scalar; by default the mean. It may use real targets, which then exist.
        optimizer: from the parameters that need gradients, one optimizer or several (Muon beside AdamW).
        autocast: torch.bfloat16 or torch.float16 for the forward pass and the loss; None for none.

    Returns:
        Bytes by category, and the peak.

    Raises:
        ValueError: no parameter needs a gradient, or the loss is not a scalar.

    Example:
        >>> from torch.optim import SGD
        >>> model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU())
        >>> estimate = estimate_memory(model, (torch.ones(16, 256),), optimizer=SGD)
        >>> estimate.parameters, estimate.activations // 1024, estimate.optimizer
        (262144, 16, 0)
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of the model needs a gradient: there is no step to estimate")
    live = _LiveStorages()
    try:
        sizes = _run(model, batch, partial(_forward, loss, autocast), optimizer, live)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"the step reads values of a tensor, but only shapes are known: {error}"
        ) from error
    return MemoryEstimate(**sizes, peak=live.peak)


def _run(
    model: nn.Module,
    batch: tuple[Any, ...],
    forward: Callable[[nn.Module, tuple[Any, ...]], tuple[Any, Tensor]],
    optimizer: Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]],
    live: _LiveStorages,
) -> dict[str, int]:
    """Two steps: the first has no forward pass and only makes the state of the optimizer."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, live:
        memo: dict[int, Any] = {id(p): _without_data(p) for p in model.parameters()}
        marks = [0, live.live]
        memo.update({id(b): _without_data(b) for b in model.buffers()})
        marks.append(live.live)
        model = copy.deepcopy(model, memo)  # ties, hooks and frozen parameters stay as they are
        parameters = [p for p in model.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        marks.append(live.live)
    made = optimizer(parameters)
    optimizers = [made] if isinstance(made, Optimizer) else made

    def update() -> None:  # not under the mode: Adam reads its step count, which is a tensor
        with live:
            for one in optimizers:
                one.step()
                one.zero_grad()

    update()
    marks.append(live.live + marks[3] - marks[2])  # as if the gradients were still there
    with mode, live:
        batch = tree_map_only(Tensor, _without_data, batch)
        marks.append(live.live + marks[3] - marks[2])
        live.peak = live.live
        output, value = forward(model, batch)
        marks.append(live.live + marks[3] - marks[2])
        value.backward()
    update()
    del output  # kept until here, as in a loop that counts hits
    grown = [after - before for before, after in itertools.pairwise(marks)]
    return dict(zip((field.name for field in fields(MemoryEstimate)), grown, strict=False))
