"""Find the first module and the samples where NaN or infinity appears in a forward and backward pass.

在一次前向与反向传播中，找出最先出现 NaN 或无穷大的模块和样本。

Source: original.

Checks the inputs and outputs of every module and the gradients of the outputs, waiting for the device each
time: for one bad batch, not for every step. A batch may be bad only in training mode, so keep the modes and
the seed of dropout. Not for compiled models, whose hooks do not see inner values: pass the model before
compiling. Only computations of the calling thread are checked.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class NotFiniteAt:
    """A tensor with values that are not finite.

    Attributes:
        phase: 'parameter', 'input', 'forward', 'loss', 'backward' or 'gradient' (of a parameter).
        name: of the module (or parameter), as in `named_modules`; '' is the model itself.
        kind: class of the module; empty for parameters and the loss.
        num_values: how many are not finite.
        samples: rows with such values; empty if rows are not samples.
    """

    phase: str
    name: str
    kind: str
    num_values: int
    samples: tuple[int, ...]

    def __str__(self) -> str:
        module = f"'{self.name}' ({self.kind})" if self.name else f"the model ({self.kind})"
        where = {
            "parameter": f"parameter '{self.name}'",
            "input": f"the input of {module}",
            "forward": f"the output of {module}",
            "loss": "the loss",
            "backward": f"the gradient of the output of {module}",
            "gradient": f"the gradient of parameter '{self.name}'",
        }[self.phase]
        rows = ", ".join(map(str, self.samples[:3])) + (" ..." if len(self.samples) > 3 else "")
        samples = f", in sample{'s' * (len(self.samples) > 1)} {rows}" if self.samples else ""
        return f"{where}: {self.num_values} not finite{samples}"


def first_not_finite(
    model: nn.Module, loss_of: Callable[[], Tensor], *, batch_size: int | None = None
) -> list[NotFiniteAt]:
    """Run one forward and backward pass, and return where values stop being finite.

    Args:
        model: gradients (`.grad`) and modes stay, buffers (BatchNorm statistics) are restored.
        loss_of: computes the loss of the batch, of any shape.
        batch_size: rows of a tensor with that many are reported as samples.

    Returns:
        The first bad tensor of each phase, in the order of events. An input is reported only if no output was
        bad before: the data, or an operation between modules, made it bad. After a bad loss backward is not
        run.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> images = torch.tensor([[0.0, 1.0], [float("inf"), 1.0]])
        >>> for bad in first_not_finite(model, lambda: model(images).sum(), batch_size=2)[:1]:
        ...     print(bad)
        the input of the model (Sequential): 1 not finite, in sample 1
    """
    first: dict[str, NotFiniteAt] = {}

    def check(phase: str, name: str, kind: str, value: Any) -> None:
        if phase in first or (phase == "input" and "forward" in first):
            return
        for tensor in _tensors(value):
            bad = _not_finite(phase, name, kind, tensor.detach(), batch_size)
            if bad is not None:
                first.setdefault(phase, bad)

    for name, parameter in model.named_parameters():
        check("parameter", name, "", parameter)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    with _buffers_kept(model), _watched(model, check), torch.enable_grad():
        loss = loss_of()
        check("loss", "", "", loss)
        if "loss" in first or not trained or not loss.requires_grad:
            return list(first.values())
        # Not backward(): neither `.grad` nor the hooks of DistributedDataParallel are touched.
        parameters = [p for _, p in trained]
        gradients = torch.autograd.grad(loss.sum(), parameters, allow_unused=True)
        for (name, _), gradient in zip(trained, gradients, strict=True):
            check("gradient", name, "", gradient)
    return list(first.values())


def _not_finite(
    phase: str, name: str, kind: str, tensor: Tensor, batch_size: int | None
) -> NotFiniteAt | None:
    if tensor.is_sparse:  # the gradient of an embedding
        tensor = tensor.coalesce().values()
    bad = ~torch.isfinite(tensor)
    if not bad.any():
        return None
    rows: list[int] = []
    if phase not in ("parameter", "gradient") and bad.dim() and len(bad) == batch_size:
        rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
    return NotFiniteAt(phase, name, kind, int(bad.sum()), tuple(rows))


@contextmanager
def _watched(model: nn.Module, check: Callable[[str, str, str, Any], None]) -> Iterator[None]:
    """Hooks on all modules, and on the gradients of their outputs."""

    calling_thread = threading.get_ident()

    def watch(name: str, kind: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, inputs: Any, named: Any) -> None:
            if threading.get_ident() == calling_thread:
                check("input", name, kind, (inputs, named))

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() != calling_thread:
                return
            check("forward", name, kind, output)
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(check, "backward", name, kind))

        return before, after

    handles = []
    for name, module in model.named_modules():
        before, after = watch(name, type(module).__name__)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers, also where a forward pass puts another tensor in the place of one."""
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffers, before in places:
            buffers.clear()
            buffers.update(before)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
