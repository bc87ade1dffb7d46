"""Sharpness-aware minimization (SAM, ASAM): the gradient at the worst point near the weights.

锐度感知最小化：取权重附近最差点处的梯度（SAM 与 ASAM）。

Source: Foret et al., "Sharpness-aware minimization for efficiently improving generalization", ICLR 2021,
algorithm 1 (arXiv:2010.01412); Kwon et al., "ASAM", ICML 2021, algorithm 1 (arXiv:2102.11600).

Not if training time is limited: every step costs two forward and backward passes.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def sam_gradients(
    model: nn.Module, closure: Callable[[], Tensor], *, rho: float, adaptive: bool = False
) -> Tensor:
    """Set `.grad` to the gradient at the worst point within `rho`; then clip and step as usual.

    Existing gradients are dropped.

    Args:
        model: in DDP the wrapped model.
        closure: runs forward and backward of the whole batch and returns the loss, 0-d or detached. It is
            called twice and must not zero gradients; in the second call BatchNorm keeps its running
            statistics.
        rho: the radius, above 0; 0.05 in the SAM paper, 0.5 (CIFAR-10) to 1 in the ASAM paper.
        adaptive: ASAM: the radius is relative to each weight.

    Returns:
        The loss at the original weights, detached.

    Raises:
        ValueError: rho is not above 0, or no gradient after the first call.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> def closure():
        ...     loss = model(torch.tensor([[3.0, 4.0]])).sum().square() / 2
        ...     loss.backward()
        ...     return loss
        >>> sam_gradients(model, closure, rho=0.2)  # gradient 7 * (3, 4); at w + 0.2 * (.6, .8) the sum is 8
        tensor(24.5000)
        >>> model.weight.grad, model.weight.detach()
        (tensor([[24., 32.]]), tensor([[1., 1.]]))
    """
    _check(rho)
    model.zero_grad(set_to_none=True)
    loss = closure()
    with perturbed(model, rho=rho, adaptive=adaptive):
        closure()
    return loss.detach()


@contextlib.contextmanager
def perturbed(model: nn.Module, *, rho: float, adaptive: bool = False) -> Iterator[Tensor]:
    """Move the weights to the worst point along the present gradients for the `with` block.

    Run the second forward and backward in the block, which begins without gradients. After it, even on an
    exception, the weights have their bits back, and `.grad` is that of the block, in which BatchNorm keeps
    its running statistics. A gradient that is not finite makes weights and gradients in the block NaN, so
    that code which checks gradients skips the step. A loss scale (fp16) cancels out.

    Args:
        model: after backward; parameters without gradient are not moved.
        rho: above 0.
        adaptive: ASAM.

    Yields:
        The gradients' norm (ASAM: times |w| + 0.01), 0-d on the device; float32 or float64.

    Raises:
        ValueError: rho is not above 0, or no parameter has a gradient.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> with perturbed(model, rho=0.05) as norm:
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> norm
        tensor(1.7321)
    """
    _check(rho)
    moved = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    if not moved:
        raise ValueError("no parameter has a gradient: run backward of the first pass before")
    parameters: list[Tensor] = [p for _, p in moved]
    backup = [p.detach().clone() for p in parameters]  # w + e - e would not equal w
    with torch.no_grad():
        # The gradients of the first pass are overwritten, to save another copy of the model.
        steps = [p.grad for p in parameters if p.grad is not None]
        if adaptive:
            # |w| + 0.01, and 1 for biases: element-wise, as in the authors' code.
            sizes = [
                torch.ones_like(p) if name.endswith("bias") else p.abs().add_(0.01)
                for name, p in moved
            ]
            torch._foreach_mul_(steps, sizes)
        norm = _norm(steps)
        for step, parameter in zip(steps, parameters, strict=True):
            step.mul_((rho / (norm + 1e-12)).to(step.device))
            parameter.grad = None
        if adaptive:
            torch._foreach_mul_(steps, sizes)
        torch._foreach_add_(parameters, steps)
    del steps
    tracking = [m for m in model.modules() if m.training and getattr(m, _TRACKS, False)]
    for module in tracking:
        setattr(module, _TRACKS, False)  # in training, BatchNorm then uses only the batch
    try:
        yield norm
    finally:
        for module in tracking:
            setattr(module, _TRACKS, True)
        with torch.no_grad():
            for parameter, old in zip(parameters, backup, strict=True):
                parameter.copy_(old)  # one by one: sharded parameters (FSDP) have no _foreach_copy_


_TRACKS = "track_running_stats"


def _check(rho: float) -> None:
    if not rho > 0:
        raise ValueError(f"rho must be above 0, got {rho}")


def _norm(tensors: list[Tensor]) -> Tensor:
    norms = [
        torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))
        for t in tensors
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    return total
