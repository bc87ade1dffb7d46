"""Layers with one to eight bits per weight: DoReFa, TWN, BNN and XNOR-Net, stored as packed bits.

每个权重一到八位的层：DoReFa、TWN、BNN 与 XNOR-Net，按位打包保存。

Source: Zhou et al., "DoReFa-Net", 2016 (arXiv:1606.06160), sections 2.3 to 2.5; Li et al., "Ternary weight
networks", 2016 (arXiv:1605.04711); Hubara et al., "Binarized neural networks", NeurIPS 2016
(arXiv:1602.02830); Rastegari et al., "XNOR-Net", ECCV 2016 (arXiv:1603.05279).

Not for speed in torch, which has no kernels for such weights: they are unpacked and multiplied as floats. For
8 bits that other programs compute with, take `fake_quantize` beside this file.
"""

import copy
import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Method = Literal["dorefa", "twn", "bnn", "xnor"]


class _Sign(torch.autograd.Function):
    """+1 from 0 on, else -1; no gradient where |x| > 1."""

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
        largest = (
            gradient.abs().amax(dims, keepdim=True).clamp(min=torch.finfo(gradient.dtype).tiny)
        )
        noise = torch.empty_like(gradient).uniform_(-0.5, 0.5, generator=ctx.generator)
        part = gradient / (2 * largest) + 0.5
        rounded = (part * steps + noise).round().clamp(0, steps) / steps
        return 2 * largest * (rounded - 0.5), None, None


def round_gradient(x: Tensor, bits: int, *, generator: torch.Generator | None = None) -> Tensor:
    """x itself; its gradient is rounded to `bits` bits with noise, which makes it right on average.

    Equation 12 of DoReFa: the range is that of the largest gradient of each sample, dimension 0.

    Args:
        x: floating, (N, ...).
        bits: 1 to 8.
        generator: for the noise, on the device of x.

    Example:
        >>> x = torch.zeros(1, 4, requires_grad=True)
        >>> (round_gradient(x, 2) * torch.tensor([3.0, 1.0, -1.0, -3.0])).sum().backward()
        >>> x.grad[0, 0].item(), x.grad[0, 3].item()
        (3.0, -3.0)
    """
    found: Tensor = _RoundGradient.apply(x, bits, generator)
    return found


def round_unit(x: Tensor, bits: int) -> Tensor:
    """x clipped to [0, 1] and rounded to 2^bits values; the gradient is that of the clipping.

    Args:
        x: floating, of any shape.
        bits: 1 to 8.

    Example:
        >>> round_unit(torch.tensor([-1.0, 0.2, 0.4, 3.0]), 2).tolist()
        [0.0, 0.3333333432674408, 0.3333333432674408, 1.0]
    """
    steps = 2**bits - 1
    clipped = x.clamp(0, 1)
    found: Tensor = _Replace.apply(clipped, (clipped * steps).round() / steps)
    return found


# ---------------------------------------------------------------- bits in bytes


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Whole numbers side by side without a gap, the lowest bit first.

    Args:
        codes: uint8, of any shape, below 2^bits.
        bits: 1 to 8.

    Returns:
        uint8, of ceil(codes * bits / 8) bytes, on the same device.

    Raises:
        ValueError: a code that needs more bits.

    Example:
        >>> pack_bits(torch.tensor([1, 0, 3, 2], dtype=torch.uint8), 2).tolist()
        [177]
    """
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"{int(codes.max())} does not fit into {bits} bits")
    places = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = ((codes.reshape(-1, 1) >> places) & 1).flatten()
    stream = F.pad(stream, (0, -len(stream) % 8)).view(-1, 8)
    return (
        (stream << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(1).to(torch.uint8)
    )


def unpack_bits(packed: Tensor, bits: int, shape: Iterable[int]) -> Tensor:
    """The codes that `pack_bits` was given.

    Args:
        packed: uint8, one dimension.
        bits: 1 to 8.
        shape: of the codes.

    Returns:
        uint8, of that shape.

    Raises:
        ValueError: another number of bytes than that shape needs.

    Example:
        >>> unpack_bits(torch.tensor([177], dtype=torch.uint8), 2, (2, 2)).tolist()
        [[1, 0], [3, 2]]
    """
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
    """A convolution or linear layer whose weights have few values, in training and afterwards.

    'dorefa': 2^bits values of tanh(weight), and of one bit the sign times the mean size; 'twn': -s, 0 and s;
    'bnn': -1 and 1; 'xnor': -s and s, with s of each output channel. 'bnn' and 'xnor' also read the sign of
    their input, 'xnor' times its local mean size; 'dorefa' reads `input_bits` of the input in [0, 1]. What
    comes before is therefore BatchNorm, without ReLU, except for 'twn'.

    Args:
        layer: nn.Conv2d with zero padding, or nn.Linear; its weight stays the one that trains.
        method: see above.
        bits: of a weight, 1 to 8; for 'dorefa' alone.
        input_bits: of the input, 1 to 8, None for an exact one; for 'dorefa' alone.
        gradient_bits: of the gradient of the output, 1 to 8; for 'dorefa' alone.

    Raises:
        TypeError: another kind of layer.
        ValueError: bits out of range, or for a method that has its own.

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
        if (
            not isinstance(layer, nn.Conv2d | nn.Linear)
            or getattr(layer, "padding_mode", "zeros") != "zeros"
        ):
            raise TypeError(f"nn.Conv2d with zero padding or nn.Linear, got {layer}")
        own = {"twn": 2, "bnn": 1, "xnor": 1}
        given = [n for n in (bits, input_bits, gradient_bits) if n is not None]
        if (
            method not in ("dorefa", *own)
            or (method in own and given)
            or (method == "dorefa" and not bits)
        ):
            raise ValueError(
                f"'dorefa' takes bits; 'twn', 'bnn' and 'xnor' have their own: {method!r}, {given}"
            )
        if not all(1 <= n <= 8 for n in given):
            raise ValueError(f"bits are from 1 to 8, got {given}")
        self.layer, self.method = layer, method
        self.bits: int = own.get(method) or bits or 0
        self.input_bits, self.gradient_bits = input_bits, gradient_bits
        self.shape = tuple(layer.weight.shape)
        self.register_buffer("packed", None)
        self.register_buffer("scale", None)

    def extra_repr(self) -> str:
        return f"method={self.method!r}, bits={self.bits}"

    def weight_values(self) -> Tensor:
        """The weights as they are used, with the gradient that reaches the exact ones."""
        if self.packed is not None:
            assert self.scale is not None
            return self._from_codes(unpack_bits(self.packed, self.bits, self.shape), self.scale)
        weight = self.layer.weight
        if self.method in ("bnn", "xnor"):
            binary: Tensor = _Sign.apply(weight)
            return binary * self._scale(weight)
        if self.method == "twn" or self.bits == 1:
            values = self._from_codes(*self._codes(weight.detach()))
            found: Tensor = _Replace.apply(weight, values)
            return found
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
            scale = (size * large).sum() / large.sum().clamp(min=1)
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
        """As the layer's."""
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
            where: dict[str, Any] = {
                "stride": layer.stride,
                "padding": layer.padding,
                "dilation": layer.dilation,
            }
            y = F.conv2d(x, weight, groups=layer.groups, **where)
            if size is not None:  # section 3.2 of XNOR-Net: K
                box = weight.new_full((1, 1, *weight.shape[2:]), 1 / math.prod(weight.shape[2:]))
                y = y * F.conv2d(size.mean(1, keepdim=True), box, **where)
        if layer.bias is not None:
            y = y + (layer.bias if isinstance(layer, nn.Linear) else layer.bias[:, None, None])
        return y if self.gradient_bits is None else round_gradient(y, self.gradient_bits)

    def pack(self) -> None:
        """Keep the packed bits and the scale alone: as small as they say, and no more training."""
        codes, scale = self._codes(self.layer.weight.detach())
        self.packed = pack_bits(codes, self.bits)
        self.scale = scale
        self.layer.weight = nn.Parameter(scale.new_empty(0), requires_grad=False)


def _unit(weight: Tensor) -> Tensor:
    """Equation 9 of DoReFa: in [0, 1]."""
    bent = weight.tanh()
    return bent / (2 * bent.abs().max().clamp(min=1e-12)) + 0.5


def low_bit(
    model: nn.Module,
    method: Method,
    *,
    bits: int | None = None,
    input_bits: int | None = None,
    gradient_bits: int | None = None,
    skip: Iterable[str] = (),
) -> nn.Module:
    """A copy in which each nn.Conv2d and nn.Linear has weights of few bits.

    Args:
        model: to be trained, from the start or on.
        method, bits, input_bits, gradient_bits: as LowBitLayer.
        skip: names of layers that stay exact: usually the first and the last.

    Raises:
        ValueError: as LowBitLayer, a name that is no layer's, or no layer is left.

    Example:
        >>> low_bit(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "twn", skip=["2"])[0]
        LowBitLayer(
          method='twn', bits=2
          (layer): Linear(in_features=4, out_features=8, bias=True)
        )
    """
    skip, result = set(skip), copy.deepcopy(model)
    names = [n for n, m in result.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    if unknown := skip - set(names):
        raise ValueError(f"no nn.Conv2d or nn.Linear has the name {', '.join(sorted(unknown))}")
    if not set(names) - skip:
        raise ValueError("the model has no nn.Conv2d or nn.Linear besides those that are skipped")
    for name in names:
        if name not in skip:
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
    """The model with `new` in the place of `old`, under each name that it has."""
    names = [name for name, m in model.named_modules(remove_duplicate=False) if m is old]
    if "" in names:
        return new
    for name in names:
        model.set_submodule(name, new)
    return model


def packed(model: nn.Module) -> nn.Module:
    """A copy in eval mode whose low-bit weights are packed; it gives what the model gives.

    Args:
        model: of `low_bit`; for a file's state_dict, a model of the same settings with any weights.

    Raises:
        ValueError: no layer has few bits.

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
    """BatchNorm in eval mode and the sign behind it as one comparison per value.

    gamma * (x - mean) / sqrt(var + eps) + beta >= 0 is x >= threshold where gamma is above 0, x <= threshold
    where it is below, and constant, the sign of beta, where it is 0. The threshold is computed in float64 and
    rounded to the side on which no float32 number changes, so all x have the sign of that formula, ties too.
    torch's BatchNorm rounds in between and may give -1e-8 instead of 0 at a tie.

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
