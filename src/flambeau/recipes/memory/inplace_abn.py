"""BatchNorm and leaky ReLU as one layer that keeps only its output for the backward pass.

BatchNorm 与 leaky ReLU 合为一层，反向传播只保存其输出。

Source: Rota Bulò et al., "In-place activated BatchNorm for memory-optimized training of DNNs", CVPR 2018,
section 3 (arXiv:1712.02616), the variant that recovers the normalized input.

Not for ReLU, which cannot be inverted, not for second derivatives, and not where a scale is meant to be 0.
In half precision the gradient of the scale is coarse.
"""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_MIN_SCALE = 1e-4  # chosen: float32 then recovers the normalized input to about 1e-3


class InPlaceABN(nn.Module):
    """leaky_relu(batch_norm(x)); parameters, buffers and their names are those of nn.BatchNorm2d.

    BatchNorm and leaky ReLU each keep their input. This layer keeps neither: both are recomputed from the
    output, which the next convolution keeps anyway. x is not overwritten, so it may be used elsewhere.
    A scale below 1e-4 in absolute value is replaced by 1e-4 of the same sign (0 counts as positive), because
    nothing can be recovered from a channel times 0; the gradient passes as if it were not replaced. The paper
    uses |scale| + eps for all scales, which changes the meaning of a negative one; here a trained BatchNorm
    keeps its function.

    It is deliberately no subclass of nn.BatchNorm2d: code that replaces or folds those would drop the
    activation.

    Args:
        num_features: C.
        negative_slope: in (0, 1]; 0.01 in the paper. 1 is BatchNorm alone.
        eps: as nn.BatchNorm2d.
        momentum: as nn.BatchNorm2d; None is the mean over all batches.

    Raises:
        ValueError: a slope outside (0, 1].

    Example:
        >>> layer = InPlaceABN(8)
        >>> layer(torch.randn(2, 8, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
        >>> list(layer.state_dict()) == list(nn.BatchNorm2d(8).state_dict())
        True
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        negative_slope: float = 0.01,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
    ) -> None:
        super().__init__()
        if not 0 < negative_slope <= 1:
            raise ValueError(
                f"negative_slope must be in (0, 1], got {negative_slope}: ReLU cannot be inverted"
            )
        self.num_features, self.negative_slope = num_features, negative_slope
        self.eps, self.momentum = eps, momentum
        self.track_running_stats = True
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) to the same shape, dtype and memory format."""
        update = self.training and self.track_running_stats
        momentum = self.momentum if update else 0.0
        if update:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / int(self.num_batches_tracked)  # waits, as nn.BatchNorm2d
        stats = (
            (self.running_mean, self.running_var) if update or not self.training else (None,) * 2
        )
        settings = (self.training, momentum, self.eps, self.negative_slope)
        y: Tensor = _ABN.apply(input, self.weight, self.bias, stats, settings)
        return y

    def extra_repr(self) -> str:
        """The settings that print(module) shows."""
        return f"{self.num_features}, negative_slope={self.negative_slope}, eps={self.eps}"


class _ABN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        stats: tuple[Tensor | None, Tensor | None],
        settings: tuple[bool, float, float, float],
    ) -> Tensor:
        training, momentum, eps, slope = settings
        scale = _away_from_zero(gamma)
        y, _, invstd = torch.native_batch_norm(x, scale, beta, *stats, training, momentum, eps)
        if not training:
            assert stats[1] is not None
            invstd = torch.rsqrt(stats[1] + eps)
        F.leaky_relu_(y, slope)
        ctx.training, ctx.slope = training, slope
        ctx.save_for_backward(y, gamma, beta, invstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, gamma, beta, invstd = ctx.saved_tensors
        scale = _away_from_zero(gamma)
        wide = invstd.dtype  # float32 for half-precision features
        shape = (1, -1) + (1,) * (y.ndim - 2)
        negative = y < 0
        grad, y_wide = grad.to(wide), y.to(wide)
        grad_z = torch.where(negative, grad * ctx.slope, grad)
        x_hat = torch.where(negative, y_wide / ctx.slope, y_wide)
        x_hat.sub_(beta.view(shape)).div_(scale.view(shape))
        # As BatchNorm of the normalized input, with mean 0 and deviation 1; dx is multiplied by invstd below.
        zero = torch.zeros_like(invstd)
        one = torch.ones_like(invstd)
        grad_x, grad_gamma, grad_beta = torch.ops.aten.native_batch_norm_backward(
            grad_z, x_hat, scale, zero, one, zero, one, ctx.training, 0.0, [True, True, True]
        )
        return grad_x.mul_(invstd.view(shape)).to(y.dtype), grad_gamma, grad_beta, None, None


def _away_from_zero(gamma: Tensor) -> Tensor:
    return torch.where(gamma < 0, gamma.clamp(max=-_MIN_SCALE), gamma.clamp(min=_MIN_SCALE))


def use_inplace_abn(model: nn.Module, *example: Any, relu_slope: float | None = None) -> list[str]:
    """Replace each BatchNorm2d that feeds only a LeakyReLU by InPlaceABN, in place.

    First, outputs, gradients of parameters and inputs, and running statistics are compared on two copies in
    float64, in training and eval mode. Parameters and buffers stay the same objects under the same names, so
    an optimizer can continue; the activation becomes an nn.Identity. A pair with hooks, which would be lost,
    is left, and so is a ReLU unless `relu_slope` is given.

    Args:
        model: on the device of the example.
        example: the arguments of the model; at least 2 images with realistic values.
        relu_slope: replace a ReLU after a BatchNorm too, by a leaky one of this slope, as the paper does with
            0.01. That changes the network, which must be trained from the start or fine-tuned.

    Returns:
        The names of the layers that are now InPlaceABN; without such a pair none, with a UserWarning if the
        model has ReLUs.

    Raises:
        ValueError: the changed model would compute something else, or the slope is outside (0, 1]; the model
            is unchanged.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.01))
        >>> use_inplace_abn(model, torch.randn(2, 3, 8, 8))
        ['1']
    """
    plain = copy.deepcopy(model).double()
    inputs = [
        v.detach().double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for v in example
    ]
    if relu_slope is not None and not 0 < relu_slope <= 1:
        raise ValueError(f"relu_slope must be in (0, 1], got {relu_slope}")
    pairs = _pairs(plain, inputs, relu_slope)
    if not pairs and relu_slope is None and any(type(m) is nn.ReLU for m in model.modules()):
        warnings.warn(
            "no BatchNorm2d feeds a LeakyReLU here, and a ReLU cannot be inverted: relu_slope=0.01 puts "
            "leaky ones in the place of the ReLUs behind them, as the paper does",
            stacklevel=2,
        )
    leaky = {plain.get_submodule(name) for name in pairs.values()}
    _swap(plain, {act: nn.LeakyReLU(_slope(act, relu_slope)) for act in leaky})
    changed = copy.deepcopy(plain)
    _replace(changed, pairs, relu_slope)
    for training in (True, False):
        expected, got = (_results(m.train(training), inputs) for m in (plain, changed))
        size = max(float(t.abs().max()) for t in expected if t.numel())
        for a, b in zip(expected, got, strict=True):
            # Gradients that are only rounding errors (a bias before BatchNorm) are compared with the largest.
            if not torch.allclose(a, b, rtol=1e-6, atol=1e-8 * size):
                raise ValueError(
                    f"with InPlaceABN at {sorted(pairs)} the model gives something else: another layer reads "
                    f"the output of BatchNorm, or a scale is below {_MIN_SCALE}; nothing was changed"
                )
    _replace(model, pairs, relu_slope)
    return list(pairs)


def _slope(activation: nn.Module, relu_slope: float | None) -> float:
    """The negative slope for an activation; 0 if it cannot be inverted."""
    if type(activation) is nn.LeakyReLU:
        return activation.negative_slope
    return relu_slope or 0.0 if type(activation) is nn.ReLU else 0.0


def _pairs(model: nn.Module, inputs: list[Any], relu_slope: float | None) -> dict[str, str]:
    """Names of BatchNorms and of the activation that reads each, if all their calls are such pairs."""
    # By id and version, because a residual may be added in place. Keeping the tensor keeps its id unique.
    outputs: dict[tuple[int, int], tuple[str | None, Any]] = {}
    calls: list[str | None] = []
    readers: dict[str, list[str | None]] = {}
    handles = []

    def wrote(name: str, out: Any) -> None:
        outputs[id(out), out._version] = (name, out)
        calls.append(name)

    def read(name: str, args: Any, more: Any) -> None:
        x = args[0] if args else more["input"]
        key = id(x), x._version
        readers.setdefault(name, []).append(outputs.get(key, (None, None))[0])

    for name, module in model.named_modules():
        if any(value for key, value in vars(module).items() if key.endswith("_hooks")):
            continue
        if type(module) is nn.BatchNorm2d and module.affine and module.running_mean is not None:
            handles.append(module.register_forward_hook(lambda m, i, out, n=name: wrote(n, out)))
        elif 0 < _slope(module, relu_slope) <= 1:
            handles.append(
                module.register_forward_pre_hook(
                    lambda m, args, more, n=name: read(n, args, more), with_kwargs=True
                )
            )
    with torch.no_grad():
        model.eval()(*inputs)
    for handle in handles:
        handle.remove()
    return {
        norm: activation
        for activation, norms in readers.items()
        if all(norm and calls.count(norm) == norms.count(norm) for norm in norms)
        for norm in norms
        if norm
    }


def _replace(model: nn.Module, pairs: dict[str, str], relu_slope: float | None) -> None:
    swaps: dict[nn.Module | None, nn.Module] = {}
    for name, activation in pairs.items():
        norm, act = model.get_submodule(name), model.get_submodule(activation)
        assert isinstance(norm, nn.BatchNorm2d)
        layer = InPlaceABN(
            norm.num_features,
            negative_slope=_slope(act, relu_slope),
            eps=norm.eps,
            momentum=norm.momentum,
        )
        layer._parameters, layer._buffers = norm._parameters, norm._buffers
        layer.track_running_stats, layer.training = norm.track_running_stats, norm.training
        swaps[norm] = layer
        swaps[act] = nn.Identity()
    _swap(model, swaps)


def _swap(model: nn.Module, swaps: Mapping[nn.Module | None, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in swaps:
                parent._modules[name] = swaps[child]


def _results(model: nn.Module, inputs: list[Any]) -> list[Tensor]:
    """Outputs, gradients and buffers."""
    leaves = [
        v.clone().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
        for v in inputs
    ]
    with torch.random.fork_rng(
        [t.device for t in {p.device: p for p in model.parameters() if p.is_cuda}.values()]
    ):
        torch.manual_seed(0)  # the same dropout in both
        outputs = _flat(model(*leaves))
    wanted = [*model.parameters(), *(v for v in leaves if isinstance(v, Tensor))]
    wanted = [t for t in wanted if t.requires_grad]
    roots = [out for out in outputs if out.requires_grad]
    # Uneven weights: the plain sum of a normalized output has no gradient.
    weights = [
        torch.arange(r.numel(), device=r.device).view(r.shape).cos().to(r.dtype) for r in roots
    ]
    grads = torch.autograd.grad(roots, wanted, weights, allow_unused=True)
    results = [*outputs, *(g for g in grads if g is not None), *model.buffers()]
    return [t.detach().double() for t in results]


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return (
        [t for part in parts for t in _flat(part)] if isinstance(value, dict | list | tuple) else []
    )
