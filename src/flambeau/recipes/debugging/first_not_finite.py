"""The first module, and the first sample, where NaN or infinity appears in a forward and backward pass.

在一次前向与反向传播中，找出最先出现 NaN 或无穷大的模块和样本。

Source: own.

Looks at the inputs and outputs of every module, and at the gradients of the outputs, which waits for the
device each time: for one bad batch, not for every step. A batch that is good in evaluation may be
bad in training: keep the modes, and seed dropout as it was. Not for models in torch.compile, whose hooks do
not see inner values: give it what was compiled. Only what the calling thread computes is looked at.
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
    """One place where a value was not finite.

    Attributes:
        phase: 'parameter', 'input', 'forward', 'loss', 'backward' or 'gradient' (of a parameter).
        name: of the module (or parameter), as `named_modules` has it; '' is the model itself.
        kind: class of the module; empty for parameters and the loss.
        num_values: how many values are not finite.
        samples: rows of the first dimension that hold them; empty where rows are not samples.
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
    """Run one forward and backward pass, and say where values stop being finite, in the order of events.

    Args:
        model: whose modules are watched; its gradients (`.grad`) and modes stay as they are, buffers
            (BatchNorm statistics) go back to what they were.
        loss_of: computes the loss of the batch with the model, 0-d or any shape.
        batch_size: samples of the batch: rows of outputs with that many are samples. None takes no rows.

    Returns:
        The first bad place of each phase, in the order of events; empty if all is finite. An input comes
        up only if no output was bad before: then something between the modules made it so, or the data
        did. After a bad loss, which makes every gradient bad, backward is left out.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> images = torch.tensor([[0.0, 1.0], [float("inf"), 1.0]])
        >>> for place in first_not_finite(model, lambda: model(images).sum(), batch_size=2)[:1]:
        ...     print(place)
        the input of the model (Sequential): 1 not finite, in sample 1
    """
    found: dict[str, NotFiniteAt] = {}

    def see(phase: str, name: str, kind: str, value: Any) -> None:
        if phase in found or (phase == "input" and "forward" in found):
            return
        for tensor in _tensors(value):
            place = _look(phase, name, kind, tensor.detach(), batch_size)
            if place is not None:
                found.setdefault(phase, place)

    for name, parameter in model.named_parameters():
        see("parameter", name, "", parameter)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    with _buffers_kept(model), _watched(model, see), torch.enable_grad():
        loss = loss_of()
        see("loss", "", "", loss)
        if "loss" in found or not trained or not loss.requires_grad:
            return list(found.values())
        # Not backward(): neither `.grad` nor the hooks of DistributedDataParallel are touched.
        parameters = [p for _, p in trained]
        gradients = torch.autograd.grad(loss.sum(), parameters, allow_unused=True)
        for (name, _), gradient in zip(trained, gradients, strict=True):
            see("gradient", name, "", gradient)
    return list(found.values())


def _look(
    phase: str, name: str, kind: str, tensor: Tensor, batch_size: int | None
) -> NotFiniteAt | None:
    if tensor.is_sparse:  # the gradient of an embedding; what is not stored is 0
        tensor = tensor.coalesce().values()
    bad = ~torch.isfinite(tensor)  # all of integers are
    if not bad.any():
        return None
    rows: list[int] = []
    if phase not in ("parameter", "gradient") and bad.dim() and len(bad) == batch_size:
        rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
    return NotFiniteAt(phase, name, kind, int(bad.sum()), tuple(rows))


@contextmanager
def _watched(model: nn.Module, see: Callable[[str, str, str, Any], None]) -> Iterator[None]:
    """Hooks on all modules, inner ones before outer ones, and on the gradients of what they give."""

    own = threading.get_ident()

    def watch(name: str, kind: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, inputs: Any, named: Any) -> None:
            if threading.get_ident() == own:
                see("input", name, kind, (inputs, named))

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() != own:
                return
            see("forward", name, kind, output)
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(see, "backward", name, kind))

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
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
