"""Quantization-aware training with learned ranges; exports to ONNX as QuantizeLinear and DequantizeLinear.

带着八位取整训练（QAT），取值范围可学习；导出到 ONNX 时成为 QuantizeLinear 与 DequantizeLinear。

Source: Esser et al., "Learned step size quantization", ICLR 2020 (arXiv:1902.08153), section 2, for step and
gradients; Bhalgat et al., "LSQ+", CVPR workshops 2020 (arXiv:2004.09576), for the learned zero point.

Fold BatchNorm into the convolutions first (recipe `fold_batchnorm`): a BatchNorm that is left is computed in
floating point, and folding after the training changes the trained model. Not for speed in torch, where the
layers still compute in floating point; export the model for that.
"""

import copy
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED, nn.Linear)
_NUM_KEPT = 1 << 16  # values per activation from which a range is chosen; chosen, untested


class _Round(torch.autograd.Function):
    """Rounds half to even, as ONNX does; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def _least(dtype: torch.dtype) -> float:
    """The smallest allowed scale; float16 cannot represent 1e-12."""
    return max(1e-12, torch.finfo(dtype).tiny)


def _wide(x: Tensor) -> Tensor:
    """In float32 if it is float16, where x / scale**2, a part of the gradient, is infinite."""
    return x.float() if x.dtype == torch.float16 else x


class FakeQuantize(nn.Module):
    """Rounds to multiples of a learned scale within a range of `bits` bits, in floating point.

    x -> (clip(round(x / scale) + zero_point, low, high) - zero_point) * scale. Gradients are those of LSQ:
    for x, 1 inside the range and 0 outside; for the scale, round(x / scale) - x / scale inside and the end of
    the range outside, times 1 / sqrt(values * high). `observe` chooses the initial range.

    Args:
        bits: 2 to 8.
        symmetric: zero_point stays 0, and codes are signed, without the lowest; else codes are unsigned, and
            the zero point is learned too.
        num_channels: scales, one per channel of dimension `axis`; None for a single one.

    Raises:
        ValueError: bits out of range.

    Example:
        >>> quantize = FakeQuantize(bits=3)
        >>> quantize.observe(torch.tensor([-3.0, 3.0]))
        >>> quantize(torch.tensor([-9.0, -1.2, 0.4, 2.6])).tolist()
        [-3.0, -1.0, 0.0, 3.0]
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        *,
        bits: int = 8,
        symmetric: bool = True,
        num_channels: int | None = None,
        axis: int = 0,
    ) -> None:
        super().__init__()
        if not 2 <= bits <= 8:
            raise ValueError(f"bits must be from 2 to 8, got {bits}")
        self.bits, self.symmetric, self.axis = bits, symmetric, axis
        self.high = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
        self.low = -self.high if symmetric else 0
        shape = () if num_channels is None else (num_channels,)
        self.scale = nn.Parameter(torch.ones(shape))
        self.zero_point = nn.Parameter(torch.zeros(shape), requires_grad=not symmetric)

    def extra_repr(self) -> str:
        kind = "symmetric" if self.symmetric else "affine"
        return f"bits={self.bits}, {kind}, scales={self.scale.numel()}"

    def along(self, values: Tensor, ndim: int) -> Tensor:
        """Values per channel, shaped to broadcast with a tensor of `ndim` dimensions."""
        if not values.ndim:
            return values
        return values.view([-1 if dim == self.axis % ndim else 1 for dim in range(ndim)])

    def forward(self, x: Tensor) -> Tensor:
        """Round x, of any shape and floating dtype, to the same shape and dtype."""
        if torch.onnx.is_in_onnx_export():
            return self._as_onnx(x)
        scale, zero_point = _wide(self.scale), _wide(self.zero_point)
        if scale.requires_grad and torch.is_grad_enabled():
            count = x.numel() // max(1, scale.numel())
            factor = 1 / math.sqrt(max(1, count) * self.high)
            scale = _ScaleGradient.apply(scale, factor)
            zero_point = _ScaleGradient.apply(zero_point, factor)
        # Training may make a scale negative; its absolute value is used.
        scale = scale.abs().clamp(min=_least(x.dtype))
        zero_point = _Round.apply(zero_point.clamp(self.low, self.high))
        wide = _wide(x)
        scale, zero_point = (self.along(t, x.ndim).to(wide.dtype) for t in (scale, zero_point))
        inside = torch.maximum(
            torch.minimum(wide / scale, self.high - zero_point), self.low - zero_point
        )
        rounded: Tensor = _Round.apply(inside)
        return (rounded * scale).to(x.dtype)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Choose scale and zero point: of 64 ranges the one with the least squared error for these values.

        The ranges are fractions of the one that holds all values and 0, which padding needs.

        Args:
            x: floating-point, at least one value per channel, all finite in float32.

        Raises:
            ValueError: a value is not finite.
        """
        rows = x.detach().float()
        rows = rows.movedim(self.axis, 0).flatten(1) if self.scale.ndim else rows.reshape(1, -1)
        if not rows.isfinite().all():
            raise ValueError("there is no range for values that are NaN or infinite")
        # By a power of two, which changes no digit: squares neither overflow nor vanish.
        _, exponent = torch.frexp(rows.abs().max())
        unit = torch.exp2(exponent.clamp(-100, 100).float())
        rows = rows / unit
        top = rows.amax(1).clamp(min=0)
        bottom = rows.amin(1).clamp(max=0)
        if self.symmetric:
            top = torch.maximum(top, -bottom)
            bottom = -top
        best = torch.full_like(top, math.inf)
        for part in torch.linspace(1, 1 / 64, 64).tolist():
            scale = ((top - bottom) * part / (self.high - self.low)).clamp(min=1e-8)
            zero = (self.low - bottom * part / scale).round().clamp(self.low, self.high)
            zero = zero * (not self.symmetric)
            codes = (rows / scale[:, None]).round() + zero[:, None]
            rounded = (codes.clamp(self.low, self.high) - zero[:, None]) * scale[:, None]
            error = (rounded - rows).square().sum(1)
            better = error < best
            best = torch.where(better, error, best)
            for old, new in ((self.scale, scale * unit), (self.zero_point, zero)):
                old.copy_(torch.where(better, new, old.view(-1)).view_as(old))

    def codes(self, x: Tensor) -> Tensor:
        """The integer codes of x: int8 if symmetric, else uint8; of the shape of x."""
        scale, zero_point = (self.along(t, x.ndim) for t in self._numbers())
        codes = ((_wide(x.detach()) / _wide(scale)).round() + zero_point).clamp(self.low, self.high)
        return codes.to(torch.int8 if self.symmetric else torch.uint8)

    def _numbers(self) -> tuple[Tensor, Tensor]:
        scale = self.scale.detach().abs().clamp(min=_least(self.scale.dtype))
        zero_point = self.zero_point.detach()
        return scale, zero_point.clamp(self.low, self.high).round()

    def from_codes(self, codes: Tensor) -> Tensor:
        """(codes - zero_point) * scale; exported to ONNX as DequantizeLinear."""
        scale, zero_point = self._numbers()
        if torch.onnx.is_in_onnx_export():
            values: Tensor = torch.onnx.ops.symbolic(
                "DequantizeLinear",
                (codes, scale, zero_point.to(codes.dtype)),
                self._onnx_axis(codes.ndim),
                dtype=scale.dtype,
                shape=codes.shape,
            )
            return values
        return (codes - self.along(zero_point, codes.ndim)) * self.along(scale, codes.ndim)

    def _as_onnx(self, x: Tensor) -> Tensor:
        """Clip a range of fewer than 8 bits first, because QuantizeLinear saturates at 8 bits."""
        scale, zero_point = self._numbers()
        if self.bits < 8 or self.symmetric:
            low, high = (
                self.along((end - zero_point) * scale, x.ndim) for end in (self.low, self.high)
            )
            x = torch.maximum(torch.minimum(x, high), low)
        kind = torch.int8 if self.symmetric else torch.uint8
        codes: Tensor = torch.onnx.ops.symbolic(
            "QuantizeLinear",
            (x, scale, zero_point.to(kind)),
            self._onnx_axis(x.ndim),
            dtype=kind,
            shape=x.shape,
        )
        return self.from_codes(codes)

    def _onnx_axis(self, ndim: int) -> Any:
        return {"axis": self.axis % ndim} if self.scale.ndim else {}


class QuantizedLayer(nn.Module):
    """A convolution or linear layer with rounded inputs and weights, as `fake_quantize` inserts it.

    `layer` has the exact weights for the optimizer; after `store_codes` only the rounded ones remain, in
    `weight_codes`, one byte each.

    Args:
        layer: its `weight` has output channels in dimension 0, or 1 for transposed convolutions.
        weight_bits, input_bits: 2 to 8.

    Example:
        >>> layer = QuantizedLayer(nn.Linear(4, 2), weight_bits=8, input_bits=8)
        >>> layer.quantize_input.observe(torch.linspace(0, 1, 9))
        >>> layer(torch.rand(3, 4)).shape
        torch.Size([3, 2])
    """

    weight_codes: Tensor | None

    def __init__(self, layer: nn.Module, *, weight_bits: int, input_bits: int) -> None:
        super().__init__()
        self.layer = layer
        weight = layer.get_parameter("weight")
        axis = int(isinstance(layer, _TRANSPOSED))
        channels = None
        # In a grouped transposed convolution a row belongs to several channels.
        if not (axis and getattr(layer, "groups", 1) > 1):
            channels = weight.shape[axis]
        self.quantize_input = FakeQuantize(bits=input_bits, symmetric=False)
        self.quantize_weight = FakeQuantize(bits=weight_bits, num_channels=channels, axis=axis)
        self.to(weight.device, weight.dtype)
        self.quantize_weight.observe(weight)
        self.register_buffer("weight_codes", None)

    def forward(self, input: Tensor, *args: Any, **more: Any) -> Any:
        """The same arguments and result as the layer."""
        if self.weight_codes is None:
            weight = self.quantize_weight(self.layer.weight)
        else:
            weight = self.quantize_weight.from_codes(self.weight_codes)
        x = self.quantize_input(input)
        return torch.func.functional_call(self.layer, {"weight": weight}, (x, *args), more)

    def store_codes(self) -> None:
        """Keep only the rounded weights, as int8: a quarter of the bytes, but no more training."""
        weight = self.layer.get_parameter("weight")
        self.weight_codes = self.quantize_weight.codes(weight)
        self.layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


class Prepared(NamedTuple):
    """The result of `fake_quantize`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
        >>> fake_quantize(model, [torch.randn(2, 3, 8, 8)], skip=["3"])[1:]
        (['0'], {'3': 'skipped'})
    """

    model: nn.Module
    """A copy; each layer is a QuantizedLayer under its old name."""
    quantized: list[str]
    """Names of the quantized layers."""
    left: dict[str, str]
    """Names of the other convolutions and linear layers, with the reason."""


def fake_quantize(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    weight_bits: int = 8,
    input_bits: int = 8,
    skip: Iterable[str] = (),
) -> Prepared:
    """Add learned rounding to the inputs and weights of all convolutions and linear layers.

    Weights get a symmetric range per output channel (a single one for grouped transposed convolutions),
    inputs a single affine range. Train the result with a small learning rate and without weight decay for the
    parameters named `scale` and `zero_point`; then call `to_integers`.

    Args:
        model: with its BatchNorms folded. It is not changed.
        batches: some for the initial ranges, preprocessed as in use: tensors, or tuples of the model's
            arguments.
        weight_bits, input_bits: 2 to 8.
        skip: names of layers to leave exact; with few bits, usually the first and the last.

    Returns:
        A new model, in the same mode, and the names of its layers.

    Raises:
        ValueError: bits out of range, no batch, an unknown name, nothing to quantize, a model quantized
            already, weights that are lazy or computed by a hook (weight_norm, pruning), or weights or inputs
            that are empty or not finite.
        TypeError: `skip` is a single string.

    Example:
        >>> model = fake_quantize(nn.Linear(4, 2), [torch.randn(8, 4)]).model
        >>> model.quantize_weight
        FakeQuantize(bits=8, symmetric, scales=2)
    """
    if isinstance(skip, str):
        raise TypeError(f"skip must be a list of names, got one string: [{skip!r}]")
    skip = set(skip)
    modules = dict(model.named_modules(remove_duplicate=False))
    if before := [name for name, m in modules.items() if isinstance(m, QuantizedLayer)]:
        raise ValueError(f"some layers are quantized already: {', '.join(before)}")
    names = {name: m for name, m in modules.items() if isinstance(m, _LAYERS)}
    if unknown := skip - names.keys():
        raise ValueError(
            f"no convolution or linear layer has the name {', '.join(sorted(unknown))}"
        )
    skipped = {names[name] for name in skip}
    layers = {name: m for name, m in model.named_modules() if m in names.values()}
    _check(layers)
    seen = _inputs(model, layers, batches)
    result = copy.deepcopy(model)
    quantized = []
    left = {}
    for name, layer in layers.items():
        if layer in skipped:
            left[name] = "skipped"
        elif name not in seen:
            left[name] = "forward does not call it: its weights are read by another module"
        elif parametrize.is_parametrized(layer):
            left[name] = "a parametrization computes its weights"
        elif not layer.get_parameter("weight").is_floating_point():
            left[name] = f"its weights are {layer.get_parameter('weight').dtype}"
        elif not seen[name]:
            raise ValueError(
                f"{name!r} got no values: the batches, or its inputs in them, are empty"
            )
        else:
            try:
                new = QuantizedLayer(
                    result.get_submodule(name), weight_bits=weight_bits, input_bits=input_bits
                )
                new.quantize_input.observe(torch.cat(seen[name]))
            except ValueError as error:
                raise ValueError(f"the weights or inputs of {name!r}: {error}") from error
            new.train(layer.training)
            quantized.append(name)
            result = _replaced(result, result.get_submodule(name), new)
    if not quantized:
        raise ValueError(f"there is nothing to round: {left or 'no convolution or linear layer'}")
    return Prepared(result, quantized, left)


def _check(layers: dict[str, nn.Module]) -> None:
    for name, layer in layers.items():
        if parametrize.is_parametrized(layer):
            continue
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        if weight is None:
            raise ValueError(
                f"a hook computes the weight of {name!r} (weight_norm or spectral_norm of torch.nn.utils, "
                "pruning), which no copy keeps: remove it first, or use torch.nn.utils.parametrizations"
            )
        if is_lazy(weight):
            raise ValueError(f"{name!r} has no shape yet: run one batch through the model first")


def to_integers(model: nn.Module) -> nn.Module:
    """Replace the exact weights by 8-bit codes, to store or to export.

    `torch.onnx.export(..., dynamo=True)` writes QuantizeLinear and DequantizeLinear, for which ONNX Runtime
    has integer kernels.

    Args:
        model: from `fake_quantize`; not changed.

    Returns:
        A copy in eval mode with the same outputs.

    Raises:
        ValueError: no quantized layer.

    Example:
        >>> model = fake_quantize(nn.Linear(4, 2), [torch.randn(8, 4)]).model
        >>> to_integers(model).weight_codes.dtype
        torch.int8
    """
    result = copy.deepcopy(model).eval()
    layers = [m for m in result.modules() if isinstance(m, QuantizedLayer)]
    if not layers:
        raise ValueError("no layer of the model rounds: give it to fake_quantize first")
    for layer in layers:
        if layer.weight_codes is None:
            layer.store_codes()
    return result.requires_grad_(False)


def _replaced(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The model with `new` in place of `old`, under each of its names."""
    names = [name for name, m in model.named_modules(remove_duplicate=False) if m is old]
    if "" in names:
        return new
    for name in names:
        model.set_submodule(name, new)
    return model


def _inputs(
    model: nn.Module, layers: dict[str, nn.Module], batches: Iterable[Any]
) -> dict[str, list[Tensor]]:
    """Inputs of each layer in eval mode: per batch some values, the largest and the smallest."""
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str, x: Tensor) -> None:
        kept = seen.setdefault(name, [])
        if not x.numel() or x.is_complex():
            return
        values = x.detach().flatten().float()
        some = values[:: max(1, len(values) // _NUM_KEPT)]
        kept.append(torch.cat([some, values.amax()[None], values.amin()[None]]))

    copied = copy.deepcopy(model).eval()
    for name in layers:
        copied.get_submodule(name).register_forward_pre_hook(
            lambda m, args, more, n=name: keep(n, args[0] if args else more["input"]),
            with_kwargs=True,
        )
    num_batches = 0
    with torch.no_grad():
        for batch in batches:
            copied(*(batch if isinstance(batch, list | tuple) else (batch,)))
            num_batches += 1
    if not num_batches:
        raise ValueError("the first ranges are chosen from at least one batch, got none")
    return seen
