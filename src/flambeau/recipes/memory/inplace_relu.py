"""Make ReLUs work in place, but only where a test shows that outputs and gradients stay the same.

让 ReLU 就地计算，但只在证明输出与梯度都不变的地方启用。

Source: original; which tensors each activation keeps was measured (torch 2.11 and 2.15).

Not for activations called as functions (F.relu), which have no flag to set, and not for a model whose path
through its layers depends on the data: only the path of the example is tested.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Their in-place backward reads the output and gives the same bits. ReLU6, SiLU, Mish, Hardswish and others
# read the input, which torch copies first, so nothing is saved; ELU's result differs in the last bit.
_FROM_OUTPUT = (nn.ReLU, nn.LeakyReLU, nn.RReLU)


class InplaceReport(NamedTuple):
    """The result of `use_inplace_relu`.

    Example:
        >>> report = use_inplace_relu(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2))
        >>> report.enabled, report.left
        (['1'], {})
    """

    enabled: list[str]
    """Names of the activations that now work in place."""
    left: dict[str, str]
    """Names of the other activations, with the reason."""
    kept_bytes_before: int
    """Bytes that a training forward pass of the example keeps for backward, besides parameters and inputs."""
    kept_bytes_after: int
    avoided_bytes: int
    """Outputs of the enabled activations, which a forward pass no longer allocates."""


def use_inplace_relu(model: nn.Module, *example: Any) -> InplaceReport:
    """Set `inplace` on each ReLU-like module for which no result changes, to the bit.

    All are tried together on a copy; if a result changes, the group is halved, down to single modules.
    Compared are outputs, gradients of parameters and inputs, buffers and the inputs themselves, in training
    and eval mode. An activation's input is also filled with NaN after the activation has read it, so that any
    other reader shows, even if the example has no negative numbers there.

    Args:
        model: on the device of the example; two more copies must fit beside it.
        example: the arguments of the model; a small batch of real images. It is not changed.

    Returns:
        Names and bytes. On an exception the model is unchanged.

    Raises:
        ValueError: two runs of the unchanged model differ: kernels that are not deterministic, or NaN.

    Example:
        >>> class Residual(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.act, self.fc = nn.ReLU(), nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         return x + self.fc(self.act(x))
        >>> model = nn.Sequential(nn.Linear(2, 2), Residual(), nn.ReLU())
        >>> use_inplace_relu(model, torch.tensor([[1.0, -1.0]])).enabled
        ['2']
    """
    trial = copy.deepcopy(model)
    candidates = [
        name
        for name, module in trial.named_modules()
        if isinstance(module, _FROM_OUTPUT) and not module.inplace
    ]
    kept_before, sizes = _measure(trial, example, candidates)
    expected = _results(trial, example)
    if not _same(expected, _results(trial, example)):
        raise ValueError(
            "two runs of the model on the example differ, so nothing can be proved: try on the CPU, or "
            "with torch.use_deterministic_algorithms(True), and look for NaN"
        )
    enabled: list[str] = []
    left: dict[str, str] = {}
    groups = [candidates] if candidates else []
    while groups:
        group = groups.pop()
        reason = _difference(trial, example, group, expected)
        if not reason:
            enabled += group
        elif len(group) == 1:
            left[group[0]] = reason
        else:
            half = len(group) // 2
            groups += [group[half:], group[:half]]
    kept_after, _ = _measure(trial, example, [])
    for name in enabled:
        _activation(model, name).inplace = True
    return InplaceReport(enabled, left, kept_before, kept_after, sum(sizes[n] for n in enabled))


def _activation(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)


def _difference(
    model: nn.Module, example: Sequence[Any], names: list[str], expected: list[Tensor]
) -> str:
    """Set the flag of these activations, or if a result changes, return the reason."""
    modules = [_activation(model, name) for name in names]
    reason = ""
    # Their inputs become NaN, so that any other reader shows, whatever the values of the example.
    handles = [module.register_forward_pre_hook(_spoil) for module in modules]
    if not _same(expected, _results(model, example)):
        reason = "its input is read elsewhere"
    for handle in handles:
        handle.remove()
    for module in modules:
        module.inplace = True
    try:
        if not _same(expected, _results(model, example)):
            reason = reason or "changes the results"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # autograd: 'modified by an inplace operation', 'a leaf Variable'
        reason = str(error).split("\n")[0].split(". ")[0]
    for module in modules:
        module.inplace = not reason
    return reason


def _spoil(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    copied = inputs[0].clone()  # for the activation itself, whose backward may read its input
    inputs[0].data.fill_(torch.nan)  # .data hides the write from autograd
    return (copied, *inputs[1:])


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _results(model: nn.Module, example: Sequence[Any]) -> list[Tensor]:
    """Outputs, gradients, buffers and inputs, after a run in training and one in eval mode."""
    # Parameters too, because `_spoil` overwrites one that an activation reads.
    kept = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    # By place, too: a forward pass may put another tensor in the place of a buffer.
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    results: list[Tensor] = []
    try:
        for training in (True, False):
            results += _run(model.train(training), example)
            results += [buffer.clone() for buffer in model.buffers()]
    finally:
        for buffers, before_run in places:
            buffers.clear()
            buffers.update(before_run)
        for tensor, before in kept:
            tensor.data.copy_(before)
    return results


def _run(model: nn.Module, example: Sequence[Any]) -> list[Tensor]:
    inputs = _copies(example)
    outputs = _call(model, inputs)
    leaves = [t for t in [*model.parameters(), *inputs] if isinstance(t, Tensor)]
    leaves = [t for t in leaves if t.requires_grad]
    roots = [out for out in outputs if out.requires_grad]
    # Uneven weights: the plain sum of a normalized output has no gradient.
    weights = [
        torch.arange(out.numel(), device=out.device).cos().view(out.shape).to(out.dtype)
        for out in roots
    ]
    has_gradients = roots and leaves
    grads = torch.autograd.grad(roots, leaves, weights, allow_unused=True) if has_gradients else ()
    results = [*outputs, *(g for g in grads if g is not None)]
    results += [value for value in inputs if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in results]


def _copies(example: Sequence[Any]) -> list[Any]:
    return [
        value.detach().clone().requires_grad_(value.is_floating_point())
        if isinstance(value, Tensor)
        else value
        for value in example
    ]


def _call(model: nn.Module, inputs: list[Any]) -> list[Tensor]:
    cuda = {p.device for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(list(cuda)):
        torch.manual_seed(0)  # the same dropout in every run
        return _flat(model(*inputs))


def _measure(
    model: nn.Module, example: Sequence[Any], names: list[str]
) -> tuple[int, dict[str, int]]:
    """Bytes kept for backward in distinct storages, and bytes that these modules write."""
    inputs = _copies(example)
    known = {_storage(t) for t in [*model.parameters(), *inputs] if isinstance(t, Tensor)}
    kept: dict[int, int] = {}
    written = dict.fromkeys(names, 0)

    def pack(tensor: Tensor) -> Tensor:
        kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def wrote(name: str, out: Tensor) -> None:
        written[name] += out.nbytes

    handles = [
        model.get_submodule(name).register_forward_hook(lambda m, i, out, n=name: wrote(n, out))
        for name in names
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = _call(model.train(), inputs)  # kept alive, so that no address is reused
    for handle in handles:
        handle.remove()
    del outputs
    return sum(size for address, size in kept.items() if address not in known), written


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return (
        [t for part in parts for t in _flat(part)] if isinstance(value, dict | list | tuple) else []
    )
