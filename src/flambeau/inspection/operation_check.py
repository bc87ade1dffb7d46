"""Operations on a device beside the same ones in float64 on the CPU, to find those that are silently wrong.

Some builds of torch compute a wrong result without an error, above all on a new kind of device. What went
wrong there is among the cases: writing into a tensor with other strides (pytorch#118115), strided weights of
a convolution (#192212), a function of a transposed tensor (#131736), a condition of other strides (#150967),
LSTM (#92615). Each runs forward and backward; a small training shows what single operations may not.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Operation = Callable[..., Tensor]
# Largest difference, of the largest value of the reference; chosen: 2e-6, 0.02 and 0.001 are seen on a CPU.
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
_TRAINING = 0.01  # of a loss after 20 steps
# The losses of `_losses` after 5, 10, 15 and 20 steps in float64, of torch 2.14.1 on x86.
STORED = (1.3076997549, 1.0002111895, 0.6700198254, 0.4149761361)
_STORED_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Difference:
    """What is wrong on a device, or missing there.

    Attributes:
        operation: its name, or `training`.
        dtype: such as `float32`.
        error: largest difference as a share of the largest right value; None: it raised.
        message: of the exception, its first line; "" where the device has no such operation.
    """

    operation: str
    dtype: str
    error: float | None
    message: str = ""

    @property
    def is_missing(self) -> bool:
        return self.error is None and not self.message


def _indices(x: Tensor, most: int) -> Tensor:
    """Whole numbers from 0, of the values of a tensor; without a gradient."""
    return (x.detach().cpu().double() * 7919).floor().long().remainder(most).to(x.device)


def _into_transposed(write: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    """A copy of the tensor with other strides, after `write` has changed it in place."""

    def operation(x: Tensor) -> Tensor:
        other = x.detach().t().contiguous().t()
        write(other)
        return x * 0 + other

    return operation


def _into_every_second(x: Tensor) -> Tensor:
    room = torch.zeros(2 * x.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    room[::2].copy_(x.detach())
    return x * 0 + room[::2] + room[1::2]


def _adam(x: Tensor) -> Tensor:
    weight = nn.Parameter(x.detach().t().contiguous().t())
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(3):
        weight.grad = torch.cos(weight.detach())
        optimizer.step()
    return x * 0 + weight.detach()


def _into_strided_output(a: Tensor, b: Tensor) -> Tensor:
    room = torch.zeros(a.shape[0], 2 * b.shape[1], dtype=a.dtype, device=a.device)
    torch.matmul(a.detach(), b.detach(), out=room[:, b.shape[1] :])
    return a.sum() * 0 + room


def _lstm(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """One layer, with the weights (4 H, F) and (4 H, H)."""
    zeros = torch.zeros(1, x.shape[1], r.shape[1], dtype=x.dtype, device=x.device)
    output, _, _ = torch.lstm(x, (zeros, zeros), [w, r], False, 1, 0.0, True, False, False)
    return output


_IMAGE = (2, 4, 9, 11)
OPERATIONS: Mapping[str, tuple[Operation, tuple[tuple[int, ...], ...]]] = {
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (_IMAGE, (6, 4, 3, 3), (6,))),
    "conv2d, stride and groups": (
        lambda x, w: F.conv2d(x, w, stride=2, groups=2, dilation=2),
        (_IMAGE, (6, 2, 3, 3)),
    ),
    "conv2d, channels_last": (
        lambda x, w: F.conv2d(
            x.contiguous(memory_format=torch.channels_last),
            w.contiguous(memory_format=torch.channels_last),
        ),
        (_IMAGE, (6, 4, 3, 3)),
    ),
    "conv2d, strided weight": (
        lambda x, w: F.conv2d(x, w[:, :, 1]),
        (_IMAGE, (6, 4, 2, 3, 3)),
    ),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=2), ((2, 4, 13), (5, 4, 5))),
    "conv3d": (F.conv3d, ((2, 3, 5, 6, 7), (4, 3, 2, 3, 3))),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1),
        (_IMAGE, (4, 3, 3, 3)),
    ),
    "linear": (F.linear, ((5, 7), (6, 7), (6,))),
    "linear, transposed weight": (lambda x, w: F.linear(x, w.t()), ((5, 7), (7, 6))),
    "matmul into a strided output": (_into_strided_output, ((5, 7), (7, 6))),
    "lstm": (_lstm, ((4, 3, 5), (24, 5), (24, 6))),
    "matmul, batched": (torch.matmul, ((3, 5, 7), (3, 7, 4))),
    "matmul, transposed": (
        lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2),
        ((3, 7, 5), (3, 4, 7)),
    ),
    "einsum": (lambda a, b: torch.einsum("nqd,nkd->nqk", a, b), ((2, 5, 8), (2, 6, 8))),
    "scaled_dot_product_attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    ),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (_IMAGE, (4,), (4,)),
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (11,), w, b), (_IMAGE, (11,), (11,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (_IMAGE, (4,), (4,))),
    "softmax": (lambda x: x.softmax(1), (_IMAGE,)),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, _indices(x[:, 0], 10), label_smoothing=0.1),
        ((6, 10),),
    ),
    "binary_cross_entropy_with_logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach().sigmoid()),
        ((6, 10), (6, 10)),
    ),
    "gelu, silu, tanh": (lambda x: F.gelu(x) + F.silu(x) + x.tanh(), (_IMAGE,)),
    "softplus of a transposed tensor": (lambda x: F.softplus(x.t()), ((5, 7),)),
    "mse_loss of transposed tensors": (lambda x, y: F.mse_loss(x.t(), y.t()), ((5, 7), (5, 7))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), (_IMAGE,)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (_IMAGE,)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), (_IMAGE,)),
    "interpolate, bilinear": (
        lambda x: F.interpolate(x, (13, 7), mode="bilinear", antialias=True),
        (_IMAGE,),
    ),
    "interpolate, bicubic": (lambda x: F.interpolate(x, (13, 7), mode="bicubic"), (_IMAGE,)),
    "grid_sample": (
        lambda x, grid: F.grid_sample(x, grid.tanh(), align_corners=False),
        (_IMAGE, (2, 5, 6, 2)),
    ),
    "pad, flip, roll": (
        lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect").flip(3).roll(2, 2),
        (_IMAGE,),
    ),
    "embedding": (lambda w: F.embedding(_indices(w[:8, :3], 9), w), ((9, 5),)),
    "gather": (lambda x: x.gather(1, _indices(x, 7)), ((5, 7),)),
    "scatter_add": (lambda x: torch.zeros_like(x).scatter_add(1, _indices(x, 7), x), ((5, 7),)),
    "index_add": (lambda x: x.index_add(0, _indices(x[:, 0], 5), x), ((5, 7),)),
    "index_put, accumulated": (
        lambda x: x.index_put((_indices(x[:, 0], 5),), x, accumulate=True),
        ((5, 7),),
    ),
    "cumsum": (lambda x: x.cumsum(1), (_IMAGE,)),
    "sort": (lambda x: x.sort(1, descending=True).values, ((5, 33),)),
    "topk": (lambda x: x.topk(4, 1).values, ((5, 33),)),
    "argmax": (lambda x: x.sum() * 0 + x.argmax(1), ((5, 33),)),
    "where": (lambda x, y: torch.where(x > y, x, y * 2), (_IMAGE, _IMAGE)),
    "where, transposed condition": (
        lambda x, y: torch.where((x > 0).t(), x.t(), y.t()),
        ((5, 7), (5, 7)),
    ),
    "cat of strided tensors": (
        lambda x: torch.cat([x[..., 0::2], -x[..., 1::2]], -1),
        ((5, 8),),
    ),
    "var, norm, logsumexp": (
        lambda x: x.var(1) + x.norm(dim=1) + x.logsumexp(1),
        (_IMAGE,),
    ),
    "sum of a transposed tensor": (lambda x: x.permute(3, 1, 0, 2).sum((0, 2)), (_IMAGE,)),
    "cat, stack, repeat_interleave": (
        lambda x, y: torch.stack([torch.cat([x, y], 1), torch.cat([y, x], 1)]).repeat_interleave(
            2, 1
        ),
        ((3, 4), (3, 4)),
    ),
    "addcmul_ into a transposed tensor": (
        _into_transposed(lambda x: x.addcmul_(torch.cos(x), torch.sin(x), value=0.5)),
        ((5, 7),),
    ),
    "addcdiv_ into a transposed tensor": (
        _into_transposed(lambda x: x.addcdiv_(torch.cos(x), 2 + torch.sin(x), value=0.5)),
        ((5, 7),),
    ),
    "lerp_, mul_, clamp_ into a transposed tensor": (
        _into_transposed(lambda x: x.lerp_(torch.cos(x), 0.3).mul_(1.5).clamp_(-0.7, 0.7)),
        ((5, 7),),
    ),
    "copy_ into every second row": (_into_every_second, ((5, 7),)),
    "Adam of a transposed weight": (_adam, ((5, 7),)),
}


# In 16 bits values may be equal, and which of them counts is free; coordinates and Adam's epsilon are lost.
_FLOAT32_ALONE = {
    "max_pool2d",
    "grid_sample",
    "sort",
    "topk",
    "argmax",
    "where",
    "Adam of a transposed weight",
}


def operation_differences(device: torch.device, dtype: torch.dtype) -> Iterator[Difference]:
    """The operations whose result or gradient is not that of float64 on the CPU."""
    name = str(dtype).removeprefix("torch.")
    for number, (operation, (run, shapes)) in enumerate(OPERATIONS.items()):
        if dtype != torch.float32 and operation in _FLOAT32_ALONE:
            continue
        generator = torch.Generator().manual_seed(number)
        # Values that the smaller type holds too, so that only the computation differs.
        inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        right = _with_gradients(run, [one.double() for one in inputs])
        try:
            found = _with_gradients(run, [one.to(device) for one in inputs])
        except (RuntimeError, TypeError) as error:
            yield _raised(operation, name, error)
            continue
        worst = max(_error(one, other) for one, other in zip(found, right, strict=True))
        if not worst <= TOLERANCES[dtype]:  # a NaN is wrong
            yield Difference(operation, name, worst)


def _raised(operation: str, dtype: str, error: Exception) -> Difference:
    """Missing, or, as where a build has no kernels for a GPU, broken."""
    text = str(error).partition("\n")[0]
    is_missing = isinstance(error, NotImplementedError) or "not implemented" in text
    return Difference(operation, dtype, None, "" if is_missing else text)


def _with_gradients(run: Operation, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    output = run(*leaves)
    places = torch.arange(output.numel(), dtype=torch.float64)
    weights = (1 + places.remainder(5)).reshape(output.shape).to(output.dtype).to(output.device)
    gradients = torch.autograd.grad((output * weights).sum(), leaves, allow_unused=True)
    return [one.detach() for one in (output, *gradients) if one is not None]


def _error(found: Tensor, right: Tensor) -> float:
    difference = (found.cpu().double() - right).abs().max()
    return float(difference / right.abs().max().clamp(min=1e-3))


def training_difference(device: torch.device) -> Difference | None:
    """Whether a small training in float32 goes as it does in float64 on the CPU."""
    right = _losses(torch.device("cpu"), torch.float64)
    try:
        found = _losses(device, torch.float32)
    except (RuntimeError, TypeError) as error:
        return _raised("training", "float32", error)
    worst = max(abs(one - other) / other for one, other in zip(found, right, strict=True))
    return None if worst <= _TRAINING else Difference("training", "float32", worst)


def stored_difference() -> Difference | None:
    """Whether that training in float64 goes as it did on another machine."""
    found = _losses(torch.device("cpu"), torch.float64)
    worst = max(abs(one - other) / other for one, other in zip(found, STORED, strict=True))
    is_right = worst <= _STORED_TOLERANCE
    return None if is_right else Difference("training beside stored figures", "float64", worst)


def _losses(device: torch.device, dtype: torch.dtype) -> list[float]:
    """Of a convnet on made data; numbers by sine, since generators may differ between machines."""

    def numbers(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        made = (torch.arange(count, dtype=torch.float64) * 12.9898).sin() * 43758.5453
        return (made - made.floor() - 0.5).reshape(shape).to(dtype).to(device)

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 4),
    ).to(device, dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(numbers(*parameter.shape) * 0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    images = numbers(32, 3, 12, 12)
    labels = torch.arange(32, device=device) % 4
    images += labels.to(dtype)[:, None, None, None] * 0.3
    losses = []
    for step in range(1, 21):
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            losses.append(float(loss.detach()))
    return losses


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Without the shorter multiplications that some devices use for float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def differences(device: torch.device) -> list[Difference]:
    """All that is wrong on a device, in the types that it computes in."""
    found: list[Difference] = []
    with full_precision():
        for dtype in TOLERANCES:
            found += operation_differences(device, dtype)
        found += [one for one in [training_difference(device)] if one is not None]
        if device.type == "cpu":
            found += [one for one in [stored_difference()] if one is not None]
    return found
