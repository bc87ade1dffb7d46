"""Initialize weights the standard way (Kaiming, Xavier, norms at 1 and 0), or from your own tensor.

按标准方法初始化权重：Kaiming、Xavier、归一化层取 1 和 0，以及用自己的张量作为权重。

Source: He et al., "Delving deep into rectifiers", ICCV 2015, section 2.2; Glorot and Bengio, "Understanding
the difficulty of training deep feedforward neural networks", AISTATS 2010, equation 12; the last norm of a
block at 0: Goyal et al., "Accurate, large minibatch SGD", 2017, section 5.1.

Not for models with special rules (most transformers: a normal distribution with std 0.02), and not for
pretrained models, whose weights would be overwritten.
"""

import math
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_BATCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_NORMS = (*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def initialize_weights(
    model: nn.Module,
    *,
    mode: Literal["fan_in", "fan_out"] = "fan_in",
    negative_slope: float = 0.0,
    xavier: Collection[str] = (),
    zero_norms: Collection[str] = (),
    generator: torch.Generator | None = None,
) -> tuple[str, ...]:
    """Set the weights of a model's convolutions, linear layers and norms, in place.

    Convolutions and linear layers get Kaiming's normal distribution for a (leaky) ReLU after them, or
    Xavier's, and biases 0. Norms get weight 1, bias 0 and fresh running statistics. A parameter that several
    layers share is drawn once. Frozen parameters stay, and so do parameters of all other modules (including
    an embedding that shares its weight with a linear layer).

    The fans are those of one group, and the fan_in of a transposed convolution is divided by its stride,
    because that many fewer taps meet in each output. torch.nn.init, which only sees the shape, gets both
    wrong.

    Args:
        mode: 'fan_in' preserves the size of activations, 'fan_out' that of gradients.
        negative_slope: of the leaky ReLU after the layers; 0 is ReLU.
        xavier: names or patterns of layers that get Xavier instead (before tanh, sigmoid, or no activation).
        zero_norms: names or patterns of norms whose weight becomes 0: the last norm of each residual block,
            which then begins as the identity.
        generator: on any device; with one on the CPU the weights do not depend on the model's device. None is
            torch's default generator of each weight's device.

    Returns:
        The names of the parameters that were not changed.

    Raises:
        ValueError: a pattern without a match, a parameter that is lazy or on the meta device, or a weight
            computed from others (weight_norm, spectral_norm, pruning); nothing is changed then.
        TypeError: a single string instead of patterns.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.PReLU())
        >>> initialize_weights(model, generator=torch.Generator().manual_seed(0))
        ('3.weight',)
        >>> round(model[0].weight.std().item(), 1)  # sqrt(2 / 27) = 0.27
        0.3
    """
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"mode must be 'fan_in' or 'fan_out', got {mode!r}")
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    layers = {name: m for name, m in modules.items() if isinstance(m, _LAYERS)}
    norms = {name: m for name, m in modules.items() if isinstance(m, _NORMS)}
    with_xavier = _matching(layers, xavier, "xavier")
    at_zero = _matching(norms, zero_norms, "zero_norms")
    for name, parameter in model.named_parameters():
        _check_filled(f"'{name}'", parameter)
    for name, module in {**layers, **norms}.items():
        _check(name, module, needs_weight=module in at_zero)
    others = [modules[name] for name in modules.keys() - layers.keys() - norms.keys()]
    held = {id(p) for module in others for p in module.parameters(recurse=False)}
    waiting = {id(p) for p in model.parameters() if p.requires_grad} - held
    touched: set[int] = set()
    for name, module in {**layers, **norms}.items():
        for key, parameter in module.named_parameters(recurse=False):
            if key not in ("weight", "bias") or id(parameter) not in waiting - touched:
                continue
            touched.add(id(parameter))
            if not parameter.numel():
                continue
            with torch.no_grad():
                if key == "bias":
                    parameter.zero_()
                elif name in norms:
                    parameter.fill_(0.0 if module in at_zero else 1.0)
                else:
                    std = _std(module, mode, negative_slope, xavier=module in with_xavier)
                    _draw(parameter, std, generator)
        if isinstance(module, _BATCH_NORMS) and all(p.requires_grad for p in module.parameters()):
            module.reset_running_stats()
    return tuple(name for name, p in model.named_parameters() if id(p) not in touched)


def set_weight(parameter: nn.Parameter, values: Tensor) -> None:
    """Copy your own values into a parameter in place, so that an optimizer which has it keeps training it.

    `layer.weight = nn.Parameter(values)` would leave the optimizer with the old parameter, which is unused.

    Args:
        parameter: of any shape; it keeps its device, memory format and `requires_grad`.
        values: of the same shape and dtype, on any device; copied.

    Raises:
        TypeError: not a parameter (the weight of a parametrized layer is computed), or another dtype.
        ValueError: another shape, or a tensor without values (lazy, or on the meta device).

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> set_weight(layer.weight, torch.eye(2))
        >>> optimizer.param_groups[0]["params"][0] is layer.weight, layer.weight.tolist()
        (True, [[1.0, 0.0], [0.0, 1.0]])
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"a parameter is needed, got {type(parameter).__name__}: the weight of a parametrized layer is "
            "computed from others; set those, or assign to the layer's attribute"
        )
    _check_filled("the parameter", parameter)
    _check_filled("the tensor of values", values)
    if values.shape != parameter.shape:
        raise ValueError(
            f"values of shape {list(values.shape)} for a parameter of {list(parameter.shape)}: "
            "they must be equal, nothing is broadcast"
        )
    if values.dtype != parameter.dtype:
        raise TypeError(
            f"values are {values.dtype}, the parameter is {parameter.dtype}: "
            f"convert them, values.to({parameter.dtype})"
        )
    with torch.no_grad():
        parameter.copy_(values)


def _matching(modules: dict[str, Any], patterns: Collection[str], setting: str) -> set[nn.Module]:
    if isinstance(patterns, str):
        raise TypeError(f"{setting} is a list of patterns, got the string {patterns!r}")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            kind = "layer" if setting == "xavier" else "norm"
            raise ValueError(f"{setting}: {pattern!r} matches no {kind}; there are {[*modules]}")
    return {m for name, m in modules.items() for p in patterns if fnmatchcase(name, p)}


def _check(name: str, module: Any, *, needs_weight: bool) -> None:
    parameters = dict(module.named_parameters(recurse=False))
    for key in ("weight", "bias"):
        if key not in parameters and getattr(module, key, None) is not None:
            raise ValueError(
                f"the {key} of '{name}' is computed from other parameters (weight_norm, spectral_norm, "
                "pruning): initialize before that is applied"
            )
    if needs_weight and "weight" not in parameters:
        raise ValueError(f"zero_norms: '{name}' has no weight (affine=False)")


def _check_filled(what: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{what} is lazy and has no shape yet: run one batch first")
    if tensor.is_meta:
        raise ValueError(
            f"{what} is on the meta device, without values: model.to_empty(device=...)"
        )


def _std(layer: Any, mode: str, negative_slope: float, *, xavier: bool) -> float:
    rows, columns = layer.weight.shape[:2]
    taps = layer.weight[0, 0].numel()
    groups = getattr(layer, "groups", 1)
    fan_in = columns * taps  # of one group
    fan_out = rows // groups * taps
    if isinstance(layer, _TRANSPOSED):  # its weight is (in, out / groups, ...)
        fan_in, fan_out = fan_out / math.prod(layer.stride), fan_in
    if xavier:
        return math.sqrt(2 / (fan_in + fan_out))
    return math.sqrt(2 / (1 + negative_slope**2) / (fan_in if mode == "fan_in" else fan_out))


def _draw(weight: Tensor, std: float, generator: torch.Generator | None) -> None:
    device = weight.device if generator is None else generator.device
    dtype = torch.promote_types(weight.dtype, torch.float32)  # half precision gets the same draw
    values = torch.empty(weight.shape, dtype=dtype, device=device)
    weight.copy_(values.normal_(0, std, generator=generator))
