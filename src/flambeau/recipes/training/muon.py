"""Muon: orthogonal updates for the hidden weight matrices, AdamW or SGD for the rest, in one optimizer.

Muon：对隐藏层的权重矩阵做正交化更新，其余参数用 AdamW 或 SGD，合为一个优化器。

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024,
kellerjordan.github.io/posts/muon (Nesterov momentum, five Newton-Schulz steps, convolution filters as
matrices, AdamW for input and output layers); Liu et al., arXiv 2502.16982, section 2.2 (decoupled decay, and
updates as large as AdamW's: 0.2 sqrt(max(rows, columns))), so that both share one learning rate.

Not for weights that are sharded over processes (a piece of a matrix has other singular vectors), nor for
models without hidden matrices.
"""

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

_MATRIX_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


def hidden_matrices(model: nn.Module) -> list[Parameter]:
    """The weights for Muon: trainable ones of linear and convolution layers but the first and the last.

    Left to AdamW are the first and the last of these layers, frozen or not (input and head), grouped
    convolutions (each group would be a matrix), embeddings, biases, norms, and all else.

    Args:
        model: if the head is not its last layer, remove the head's weight from the result.

    Returns:
        Parameters in the model's order, each once.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 2))
        >>> [tuple(weight.shape) for weight in hidden_matrices(model)]
        [(12, 16)]
    """
    layers: list[Any] = [m for m in model.modules() if isinstance(m, _MATRIX_MODULES)]
    excluded = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}  # may be tied
    excluded |= {layer.weight for layer in layers if getattr(layer, "groups", 1) > 1}
    # Attention has its projections in one weight, unless keys or values have another width.
    inner = dict.fromkeys(
        m.in_proj_weight if hasattr(m, "in_proj_weight") else m.weight for m in layers
    )
    inner.pop(None, None)
    return [w for w in list(inner)[1:-1] if w.requires_grad and w not in excluded]


class Muon(Optimizer):
    """Muon for the parameters in `matrices`, AdamW or SGD for the others.

    Each group is split in two with the same settings and `muon` True or False. A parameter without a gradient
    is not changed.

    Args:
        params: parameters, or groups with `lr`, `weight_decay` and `momentum` of their own. A group with
            `"others": "sgd"` gives what is no matrix to SGD with Nesterov's look-ahead.
        matrices: for Muon, of at least two dimensions.
        lr, weight_decay: of both, above 0 and at least 0; values for AdamW.
        momentum: of Muon and SGD, with Nesterov's look-ahead, in [0, 1).
        betas, eps: of AdamW.
        ns_steps: Newton-Schulz steps, at least 1.
        ns_dtype: of these; None is bfloat16, as in the source, and float32 on a CPU.
        fixed_norm: before each update give each matrix the Frobenius norm of an unscaled update,
            sqrt(min(rows, columns)), in place of weight decay (Jordan's airbench94_muon, 2024). `lr` is then
            the share of its norm by which a matrix moves, and the others need groups with their own `lr`.
            Only where a normalization follows each matrix, so that its size makes no difference.

    Raises:
        ValueError: a number outside its range, no parameters or matrices, a matrix of fewer than two
            dimensions or in no group, or `others` neither 'adamw' nor 'sgd'.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 2))
        >>> optimizer = Muon(model.parameters(), matrices=hidden_matrices(model), lr=2e-3)
        >>> [(group["muon"], len(group["params"])) for group in optimizer.param_groups]
        [(True, 1), (False, 5)]
    """

    steps_on_device = True
    """A step is kernels alone, and the `lr` of a group may be a 0-d float32 tensor beside the parameters."""

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[dict[str, Any]],
        *,
        matrices: Collection[Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        fixed_norm: bool = False,
    ) -> None:
        if not (0 <= momentum < 1 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"momentum and betas must be in [0, 1), got {momentum} and {betas}")
        if not (lr > 0 and weight_decay >= 0 and eps > 0 and ns_steps >= 1):
            raise ValueError(
                "lr and eps must be above 0, weight_decay at least 0 and ns_steps at least 1, "
                f"got {lr}, {eps}, {weight_decay} and {ns_steps}"
            )
        for_muon = set(matrices)
        listed: list[Any] = list(params)
        if not for_muon or not listed:
            raise ValueError("no matrices or no parameters: AdamW is for models without matrices")
        split = []
        for group in listed if isinstance(listed[0], dict) else [{"params": listed}]:
            # One tensor, or an iterable, perhaps with names, as torch's optimizers take them.
            given = group["params"]
            for_group = [given] if isinstance(given, Tensor) else [*given]
            for muon in (True, False):
                half = [
                    p
                    for p in for_group
                    if ((p[1] if isinstance(p, tuple) else p) in for_muon) == muon
                ]
                split += [{**group, "params": half, "muon": muon}] if half else []
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "fixed_norm": fixed_norm,
            "others": "adamw",
        }
        super().__init__(split, defaults)
        if missing := for_muon - {p for group in self.param_groups for p in group["params"]}:
            count = len(for_muon)
            raise ValueError(f"{len(missing)} of {count} matrices are in no parameter group")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group for AdamW or SGD, or for Muon if it has only matrices and `muon` True."""
        super().add_param_group({"muon": False, **param_group})
        group = self.param_groups[-1]
        if group["others"] not in ("adamw", "sgd"):
            raise ValueError(f"others must be 'adamw' or 'sgd', got {group['others']!r}")
        if not group["muon"]:
            # load_state_dict keeps the step count on the device if 'fused' is set.
            group["fused"] = all(p.device.type in ("cpu", "cuda") for p in group["params"])
        elif vectors := [tuple(p.shape) for p in group["params"] if p.dim() < 2]:
            raise ValueError(f"Muon is for matrices, not for the rest: got shapes {vectors}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure: call backward before step")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["muon"]:
                self._step_matrices(parameters, group)
            elif parameters and group.get("others") == "sgd":  # a state dict of before has none
                self._step_by_sgd(parameters, group)
            elif parameters:
                self._step_by_adamw(parameters, group)

    def _step_matrices(self, parameters: list[Parameter], group: dict[str, Any]) -> None:
        alike: dict[tuple[int, int, torch.device], list[tuple[Parameter, Tensor]]] = {}
        for p in parameters:
            assert p.grad is not None
            state = self.state[p]
            gradient = p.grad.flatten(1)
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(buffer, group["momentum"])
            alike.setdefault((*update.shape, p.device), []).append((p, update))
        for (rows, columns, _), pairs in alike.items():
            stack = torch.stack([update for _, update in pairs])  # a few large products
            stack = orthogonalized(stack, steps=group["ns_steps"], dtype=group["ns_dtype"])
            is_fixed = group.get("fixed_norm", False)  # a state dict of before has none
            size = group["lr"]
            if not is_fixed:
                size = size * 0.2 * math.sqrt(max(rows, columns))
            for (p, _), update in zip(pairs, stack, strict=True):
                if is_fixed:
                    norm = torch.linalg.vector_norm(p).clamp(min=1e-7)
                    p.mul_(math.sqrt(min(rows, columns)) / norm)
                else:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(update.view(p.shape).to(p.dtype) * size)

    def _step_by_sgd(self, parameters: list[Parameter], group: dict[str, Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        sgd(
            list(parameters),
            [p.grad for p in parameters if p.grad is not None],
            [self.state[p]["momentum_buffer"] for p in parameters],
            fused=group["fused"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["momentum"] > 0,
            maximize=False,
        )

    def _step_by_adamw(self, parameters: list[Parameter], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=p.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        adamw(
            list(parameters),
            [p.grad for p in parameters if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalized(x_BRC: Tensor, *, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Approximate U V^T of each matrix U S V^T: singular values end between about 0.7 and 1.2.

    Args:
        x_BRC: floating-point matrices, (B, R, C).
        steps: of Newton-Schulz.
        dtype: of the products; None is bfloat16, on a CPU float32.

    Returns:
        (B, R, C) in that dtype; zeros stay zeros.

    Example:
        >>> x = orthogonalized(torch.diag(torch.tensor([3.0, 1.0, 0.5]))[None])
        >>> bool((x[0].diagonal() > 0.6).all() and (x[0].diagonal() < 1.3).all())
        True
    """
    x = x_BRC.to(dtype or (torch.float32 if x_BRC.device.type == "cpu" else torch.bfloat16))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the Gram matrix of the shorter side
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315  # from the source: steep at 0, so that small values grow fast
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
