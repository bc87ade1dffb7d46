"""Layers with one to eight bits per weight: DoReFa, TWN, BNN and XNOR-Net, stored as packed bits.

每个权重一到八位的层：DoReFa、TWN、BNN 与 XNOR-Net，按位打包保存。

Source: Zhou et al., "DoReFa-Net", 2016 (arXiv:1606.06160), sections 2.3 to 2.5; Li et al., "Ternary weight
networks", 2016 (arXiv:1605.04711); Hubara et al., "Binarized neural networks", NeurIPS 2016
(arXiv:1602.02830); Rastegari et al., "XNOR-Net", ECCV 2016 (arXiv:1603.05279).

Not for speed in torch, which has no kernels for such weights: they are unpacked and multiplied as floats. For
8-bit models that other runtimes execute, see `fake_quantize`.
"""

import copy
import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

Method = Literal["dorefa", "twn", "bnn", "xnor"]


class _Sign(torch.autograd.Function):
    """+1 where x >= 0, else -1; no gradient where |x| > 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= 1, gradient, 0.0)


class _Replace(torch.autograd.Function):
    """The values of `y` with the gradient of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int, generator: torch.Generator | None) -> Tensor:
        ctx.bits, ctx.generator = bits, generator
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        steps = 2**ctx.bits - 1
        dims = tuple(range(1, gradient.ndim))
        largest = gradient.abs()
        if dims and largest.numel():
            largest = largest.amax(dims, keepdim=True)
        largest = largest.clamp(min=torch.finfo(gradient.dtype).tiny)
        noise = torch.empty_like(gradient).uniform_(-0.5, 0.5, generator=ctx.generator)
        part = gradient / (2 * largest) + 0.5
        rounded = (part * steps + noise).round().clamp(0, steps) / steps
        return 2 * largest * (rounded - 0.5), None, None


def round_gradient(x: Tensor, bits: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Return x; its gradient is rounded to `bits` bits after adding noise, which keeps it unbiased.

    Equation 12 of DoReFa; the range is given by the largest gradient of each sample (dimension 0).

    Args:
        x: floating, (N, ...).
        bits: 1 to 8.
        generator: for the noise, on the device of x.

    Raises:
        ValueError: bits out of range.

    Example:
        >>> x = torch.zeros(1, 4, requires_grad=True)
        >>> (round_gradient(x, 2) * torch.tensor([3.0, 1.0, -1.0, -3.0])).sum().backward()
        >>> x.grad[0, 0].item(), x.grad[0, 3].item()
        (3.0, -3.0)
    """
    _check_bits(bits)
    result: Tensor = _RoundGradient.apply(x, bits, generator)
    return result


def round_unit(x: Tensor, bits: int) -> Tensor:
    """Clip x to [0, 1] and round it to 2^bits values; the gradient is that of the clipping.

    Args:
        x: floating, of any shape.
        bits: 1 to 8.

    Raises:
        ValueError: bits out of range.

    Example:
        >>> round_unit(torch.tensor([-1.0, 0.2, 0.4, 3.0]), 2).tolist()
        [0.0, 0.3333333432674408, 0.3333333432674408, 1.0]
    """
    _check_bits(bits)
    steps = 2**bits - 1
    clipped = x.clamp(0, 1)
    result: Tensor = _Replace.apply(clipped, (clipped * steps).round() / steps)
    return result


# ---------------------------------------------------------------- bits in bytes


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack integers of a few bits without gaps, the lowest bit first.

    Args:
        codes: uint8, of any shape, below 2^bits.
        bits: 1 to 8.

    Returns:
        uint8, (ceil(codes.numel() * bits / 8),), on the same device.

    Raises:
        TypeError: codes are not uint8.
        ValueError: a code needs more bits, or bits out of range.

    Example:
        >>> pack_bits(torch.tensor([1, 0, 3, 2], dtype=torch.uint8), 2).tolist()
        [177]
    """
    _check_bits(bits)
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes must be uint8, got {codes.dtype}")
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"{int(codes.max())} does not fit into {bits} bits")
    shifts = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = ((codes.reshape(-1, 1) >> shifts) & 1).flatten()
    stream = F.pad(stream, (0, -len(stream) % 8)).view(-1, 8)
    return (
        (stream << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(1).to(torch.uint8)
    )


def unpack_bits(packed: Tensor, bits: int, shape: Iterable[int]) -> Tensor:
    """Unpack the codes that `pack_bits` packed.

    Args:
        packed: uint8, one dimension.
        bits: 1 to 8.
        shape: of the codes.

    Returns:
        uint8, of that shape.

    Raises:
        ValueError: the number of bytes does not fit the shape, or bits out of range.

    Example:
        >>> unpack_bits(torch.tensor([177], dtype=torch.uint8), 2, (2, 2)).tolist()
        [[1, 0], [3, 2]]
    """
    _check_bits(bits)
    shape = tuple(shape)
    count = math.prod(shape)
    if len(packed) != -(-count * bits // 8):
        raise ValueError(
            f"{shape} of {bits} bits is {-(-count * bits // 8)} bytes, got {len(packed)}"
        )
    eight = torch.arange(8, dtype=torch.uint8, device=packed.device)
    stream = ((packed[:, None] >> eight) & 1).flatten()[: count * bits].view(-1, bits)
    return (stream << eight[:bits]).sum(1).to(torch.uint8).view(shape)


# ---------------------------------------------------------------- the layer


class LowBitLayer(nn.Module):
    """A convolution or linear layer whose weights take few values, in training and afterwards.

    'dorefa': 2^bits values of tanh(weight), with one bit the sign times the mean magnitude; 'twn': -s, 0, s;
    'bnn': -1 and 1; 'xnor': -s and s, with one s per output channel. 'bnn' and 'xnor' also reduce their input
    to its sign, 'xnor' times the local mean magnitude; 'dorefa' rounds the input in [0, 1] to `input_bits`.
    So a BatchNorm without ReLU should come before, except with 'twn'.

    Args:
        layer: nn.Conv2d with zero padding, or nn.Linear; its exact weight is still the trained parameter. It
            is not called: no subclass with a forward of its own, no hooks, no weight_norm or other
            parametrization.
        method: see above.
        bits: of a weight, 1 to 8; only for 'dorefa'.
        input_bits: of the input, 1 to 8, None for an exact one; only for 'dorefa'.
        gradient_bits: of the gradient of the output, 1 to 8; only for 'dorefa'.

    Raises:
        TypeError: another kind of layer, or one that computes more than its class.
        ValueError: bits out of range, or given for a method with a fixed number of bits.

    Example:
        >>> layer = LowBitLayer(nn.Conv2d(3, 4, 3), "xnor")
        >>> len(layer.weight_values()[0].unique())
        2
    """

    packed: Tensor | None
    scale: Tensor | None

    def __init__(
        self,
        layer: nn.Module,
        method: Method,
        *,
        bits: int | None = None,
        input_bits: int | None = None,
        gradient_bits: int | None = None,
    ) -> None:
        super().__init__()
        if reason := _unfit(layer):
            raise TypeError(f"nn.Conv2d with zero padding or nn.Linear, got {layer}: {reason}")
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        fixed_bits = {"twn": 2, "bnn": 1, "xnor": 1}
        given = [n for n in (bits, input_bits, gradient_bits) if n is not None]
        if (
            method not in ("dorefa", *fixed_bits)
            or (method in fixed_bits and given)
            or (method == "dorefa" and not bits)
        ):
            raise ValueError(
                f"'dorefa' takes bits; 'twn', 'bnn' and 'xnor' have their own: {method!r}, {given}"
            )
        _check_bits(*given)
        self.layer, self.method = layer, method
        self.bits: int = fixed_bits.get(method) or bits or 0
        self.input_bits, self.gradient_bits = input_bits, gradient_bits
        self.shape = tuple(layer.weight.shape)
        self.register_buffer("packed", None)
        self.register_buffer("scale", None)

    def extra_repr(self) -> str:
        return f"method={self.method!r}, bits={self.bits}"

    def weight_values(self) -> Tensor:
        """The low-bit weights; their gradient reaches the exact ones."""
        if self.packed is not None:
            assert self.scale is not None
            return self._from_codes(unpack_bits(self.packed, self.bits, self.shape), self.scale)
        weight = self.layer.weight
        if self.method in ("bnn", "xnor"):
            binary: Tensor = _Sign.apply(weight)
            return binary * self._scale(weight)
        if self.method == "twn" or self.bits == 1:
            values = self._from_codes(*self._codes(weight.detach()))
            replaced: Tensor = _Replace.apply(weight, values)
            return replaced
        return 2 * round_unit(_unit(weight), self.bits) - 1

    def _scale(self, weight: Tensor) -> Tensor:
        if self.method == "bnn":
            return weight.new_ones(())
        if self.method == "xnor":
            return weight.abs().mean(tuple(range(1, weight.ndim)), keepdim=True)
        return weight.abs().mean() if self.bits == 1 else weight.new_ones(())

    def _codes(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(uint8 codes, scale) of exact weights."""
        if self.bits == 1:
            return (weight >= 0).to(torch.uint8), self._scale(weight)
        if self.method == "twn":
            size = weight.abs()
            large = size > 0.7 * size.mean()  # equation 6 of TWN
            # Sums of float16 end at 65504.
            total = (size * large).sum(dtype=torch.promote_types(size.dtype, torch.float32))
            scale = (total / large.sum().clamp(min=1)).to(size.dtype)
            return (1 + weight.sign() * large).to(torch.uint8), scale
        return (_unit(weight) * (2**self.bits - 1)).round().to(torch.uint8), self._scale(weight)

    def _from_codes(self, codes: Tensor, scale: Tensor) -> Tensor:
        if self.bits == 1:
            return (2 * codes.to(scale.dtype) - 1) * scale
        if self.method == "twn":
            return (codes.to(scale.dtype) - 1) * scale
        part: Tensor = codes.to(scale.dtype) / (2**self.bits - 1)
        return 2 * part - 1

    def forward(self, x: Tensor) -> Tensor:
        """The same input and output shapes as the layer."""
        size = None
        if self.method in ("bnn", "xnor"):
            size = x.abs() if self.method == "xnor" else None
            x = _Sign.apply(x)
        elif self.input_bits is not None:
            x = round_unit(x, self.input_bits)
        weight = self.weight_values()
        layer = self.layer
        if isinstance(layer, nn.Linear):
            y = F.linear(x, weight)
            y = y if size is None else y * size.mean(-1, keepdim=True)
        else:
            geometry: dict[str, Any] = {
                "stride": layer.stride,
                "padding": layer.padding,
                "dilation": layer.dilation,
            }
            y = F.conv2d(x, weight, groups=layer.groups, **geometry)
            if size is not None:  # section 3.2 of XNOR-Net: K
                box = weight.new_full((1, 1, *weight.shape[2:]), 1 / math.prod(weight.shape[2:]))
                y = y * F.conv2d(size.mean(-3, keepdim=True), box, **geometry)
        if layer.bias is not None:
            y = y + (layer.bias if isinstance(layer, nn.Linear) else layer.bias[:, None, None])
        return y if self.gradient_bits is None else round_gradient(y, self.gradient_bits)

    def pack(self) -> None:
        """Keep only the packed bits and the scale, which ends training."""
        codes, scale = self._codes(self.layer.weight.detach())
        self.packed = pack_bits(codes, self.bits)
        self.scale = scale
        self.layer.weight = nn.Parameter(scale.new_empty(0), requires_grad=False)


def _check_bits(*given: int) -> None:
    if not all(isinstance(bits, int) and 1 <= bits <= 8 for bits in given):
        raise ValueError(f"bits are whole numbers from 1 to 8, got {list(given)}")


def _unfit(layer: nn.Module) -> str | None:
    """Why the layer computes something else than its class with other weights would; None if it does not."""
    if not isinstance(layer, nn.Conv2d | nn.Linear):
        return "it is of another class"
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        return "its padding is not of zeros"
    kind: Any = nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d
    methods = ("forward", "_conv_forward")
    if any(getattr(type(layer), name, None) is not getattr(kind, name, None) for name in methods):
        return f"{type(layer).__name__} has a forward of its own"
    if not isinstance(dict(layer.named_parameters(recurse=False)).get("weight"), nn.Parameter):
        return "its weight is computed from others (weight_norm, spectral_norm, pruning)"
    if is_lazy(layer.weight):
        return "it has no shape yet: run one batch first"
    if not layer.weight.is_floating_point():
        return f"its weights are {layer.weight.dtype}"
    if any(value for key, value in vars(layer).items() if key.endswith("_hooks")):
        return "it has hooks, which would not be called"
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weights without calling it"
    return None


def _unit(weight: Tensor) -> Tensor:
    """Equation 9 of DoReFa: the weight mapped to [0, 1]."""
    bent = weight.tanh()
    least = max(1e-12, torch.finfo(weight.dtype).tiny)  # float16 cannot represent 1e-12
    return bent / (2 * bent.abs().max().clamp(min=least)) + 0.5


def low_bit(
    model: nn.Module,
    method: Method,
    *,
    bits: int | None = None,
    input_bits: int | None = None,
    gradient_bits: int | None = None,
    skip: Iterable[str] = (),
) -> nn.Module:
    """Copy a model and give each nn.Conv2d and nn.Linear low-bit weights.

    Args:
        model: before or after training; the copy is to be trained.
        method, bits, input_bits, gradient_bits: as for LowBitLayer.
        skip: names of layers that stay exact: usually the first and the last.

    Raises:
        TypeError: as LowBitLayer, with the names of the layers; or `skip` is a single string.
        ValueError: as LowBitLayer; or a name in `skip` is not a layer's, no layer is left, or some have few
            bits already.

    Example:
        >>> low_bit(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "twn", skip=["2"])[0]
        LowBitLayer(
          method='twn', bits=2
          (layer): Linear(in_features=4, out_features=8, bias=True)
        )
    """
    if isinstance(skip, str):
        raise TypeError(f"skip must be a list of names, got one string: [{skip!r}]")
    skip = set(skip)
    modules = dict(model.named_modules(remove_duplicate=False))
    if before := [n for n, m in modules.items() if isinstance(m, LowBitLayer)]:
        raise ValueError(f"some layers have few bits already: {', '.join(before)}")
    layers = {n: m for n, m in modules.items() if isinstance(m, nn.Conv2d | nn.Linear)}
    if unknown := skip - set(layers):
        raise ValueError(f"no nn.Conv2d or nn.Linear has the name {', '.join(sorted(unknown))}")
    skipped = {layers[name] for name in skip}
    chosen = {layer: name for name, layer in reversed(layers.items()) if layer not in skipped}
    if not chosen:
        raise ValueError("the model has no nn.Conv2d or nn.Linear besides those that are skipped")
    if unfit := [f"{name!r}, {why}" for m, name in chosen.items() if (why := _unfit(m))]:
        raise TypeError(f"skip layers that cannot have few bits: {'; '.join(reversed(unfit))}")
    result = copy.deepcopy(model)
    for name in chosen.values():
        layer = result.get_submodule(name)
        new = LowBitLayer(
            layer,
            method,
            bits=bits,
            input_bits=input_bits,
            gradient_bits=gradient_bits,
        )
        result = _replaced(result, layer, new)
    return result


def _replaced(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The model with `new` in place of `old`, under each of its names."""
    names = [name for name, m in model.named_modules(remove_duplicate=False) if m is old]
    if "" in names:
        return new
    for name in names:
        model.set_submodule(name, new)
    return model


def packed(model: nn.Module) -> nn.Module:
    """Copy a model in eval mode with its low-bit weights packed; the outputs stay the same.

    Args:
        model: from `low_bit`; to load a saved packed model, one of the same settings with any weights.

    Raises:
        ValueError: no layer has low-bit weights.

    Example:
        >>> packed(low_bit(nn.Linear(16, 4), "bnn")).packed.shape
        torch.Size([8])
    """
    result = copy.deepcopy(model).eval()
    layers = [m for m in result.modules() if isinstance(m, LowBitLayer)]
    if not layers:
        raise ValueError("no layer has few bits: give the model to low_bit first")
    for layer in layers:
        if layer.packed is None:
            layer.pack()
    return result.requires_grad_(False)


# ---------------------------------------------------------------- BatchNorm and sign


class SignThreshold(nn.Module):
    """BatchNorm in eval mode and the sign after it, as one comparison per value.

    gamma * (x - mean) / sqrt(var + eps) + beta >= 0 means x >= threshold where gamma > 0, x <= threshold
    where gamma < 0, and the constant sign of beta where gamma = 0. The threshold is computed in float64 and
    rounded inwards, so that each float32 x gets the sign of that formula, ties included. (torch's BatchNorm
    rounds in between and may give -1e-8 instead of 0 at a tie.)

    Args:
        norm: with running statistics, with or without weight and bias.

    Raises:
        ValueError: no running statistics.

    Example:
        >>> norm = nn.BatchNorm2d(3).eval()
        >>> SignThreshold(norm)(torch.tensor([-0.1, 0.0, 0.1]).view(1, 3, 1, 1)).flatten().tolist()
        [-1.0, 1.0, 1.0]
    """

    threshold: Tensor
    rising: Tensor

    def __init__(self, norm: Any) -> None:
        super().__init__()
        if getattr(norm, "running_mean", None) is None:
            raise ValueError(
                "BatchNorm has no running statistics, so its sign depends on the batch"
            )
        mean = norm.running_mean.double()
        var = norm.running_var.double()
        gamma = torch.ones_like(mean) if norm.weight is None else norm.weight.detach().double()
        beta = torch.zeros_like(mean) if norm.bias is None else norm.bias.detach().double()
        exact = mean - beta * (var + norm.eps).sqrt() / gamma
        exact = torch.where(gamma == 0, torch.where(beta >= 0, -math.inf, math.inf), exact)
        rising = gamma >= 0
        near = exact.float()
        inward = torch.where(rising, math.inf, -math.inf).float()
        is_outside = torch.where(rising, near.double() < exact, near.double() > exact)
        self.register_buffer("threshold", torch.where(is_outside, near.nextafter(inward), near))
        self.register_buffer("rising", rising)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) to +1 and -1 of the same shape and dtype."""
        threshold, rising = (
            t.view([-1] + [1] * (x.ndim - 2)) for t in (self.threshold, self.rising)
        )
        above = torch.where(rising, x >= threshold, x <= threshold)
        return torch.where(above, 1.0, -1.0).to(x.dtype)
