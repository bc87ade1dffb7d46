"""BatchNorm over the whole batch of all ranks, on CPU too, with batches of any sizes.

对所有 rank 的整个批次做 BatchNorm，CPU 上也可用，各 rank 的批大小可以不同。

Source: Ioffe and Szegedy, "Batch Normalization", 2015; the statistics of the ranks are merged as in Chan,
Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.

Not where each rank has some 16 samples or more (classification): ordinary BatchNorm per rank is then as
good, and does not wait for other ranks.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

Group = dist.ProcessGroup | Callable[[Tensor], Tensor]
"""A process group, or a function from a batch's tensor (...) to (K, ...) of all batches, in one order."""


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose training statistics are over the batches of all ranks together.

    In evaluation and on one rank it equals BatchNorm to the bit. On CUDA it computes with torch's
    SyncBatchNorm. All ranks must call it, forward and backward.

    Args:
        num_features: C of the input (N, C, ...); N may differ between ranks, and be 0.
        eps, momentum, affine, track_running_stats, device, dtype: as for `nn.BatchNorm2d`.
        process_group: ranks that share statistics; None is all. Or a function, called once in the forward and
            once in the backward pass with a tensor of this batch, that returns those of all batches that
            share statistics, stacked in one order.

    Raises:
        ValueError: the input has not C channels, or `process_group` does not contain this rank.

    Example:
        >>> layer = SyncBatchNorm(3)
        >>> images = torch.arange(24.0).reshape(2, 3, 2, 2)
        >>> torch.equal(layer(images), nn.BatchNorm2d(3)(images))
        True
    """

    _original: ClassVar[type[_BatchNorm] | None] = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.process_group = process_group
        self.counted: bool | None = None
        """None: all batches count. False: this rank's is a stand-in that does not; True: another's may be."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (N, C, ...) to the same shape, dtype, device and memory format."""
        if not self.training or (group := self._group()) is None:
            return super().forward(input)
        # The original class may add an activation and more. Its forward runs unchanged, except for the one
        # call that computes statistics.
        with _Intercept(self, group) as intercept:
            output: Tensor = super().forward(input)
        if not intercept.met:
            raise TypeError(
                f"{self._original} does not call torch.nn.functional.batch_norm, so its statistics cannot "
                "be synchronized: do not convert it"
            )
        return output

    def _group(self) -> Group | None:
        """The ranks to synchronize with; None if there are no others."""
        if callable(self.process_group):
            return self.process_group
        if not dist.is_available() or not dist.is_initialized():
            return None
        group = self.process_group or dist.group.WORLD
        world = dist.get_world_size(group)
        if world < 1:
            raise ValueError("this rank is not in process_group: give each rank the group it is in")
        if world == 1 and self.counted is False:
            raise ValueError("counted is False, and no other rank has a batch that counts")
        return group if world > 1 else None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input (N, C, ...), got the shape {tuple(input.shape)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (self._original or type(self),), self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> "SyncBatchNorm":
        memo[id(self.process_group)] = (
            self.process_group
        )  # shared: a process group cannot be copied
        copied = memo[id(self)] = _empty(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def convert_sync_batchnorm(
    model: nn.Module, process_group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Make every BatchNorm of a model a SyncBatchNorm, in place; before DDP, FSDP or torch.compile.

    Only a layer's class changes: parameters (and their optimizer), buffers, names, mode and hooks stay. A
    subclass such as timm's BatchNormAct2d keeps its activation.

    Args:
        model: may itself be a BatchNorm.
        process_group: ranks that share statistics; None is all.

    Returns:
        The model; layers are instances of both SyncBatchNorm and their original class.

    Raises:
        ValueError: a lazy layer is not initialised; the model is unchanged.
        TypeError: a layer is a torch.nn.SyncBatchNorm; the model is unchanged.

    Example:
        >>> model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)))
        >>> isinstance(model[1], SyncBatchNorm), isinstance(model[1], nn.BatchNorm2d)
        (True, True)
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    for name, layer in layers:
        if isinstance(layer, nn.SyncBatchNorm):
            raise TypeError(
                f"{name or 'the model'} is a torch.nn.SyncBatchNorm already, which has forgotten what it "
                "was: convert the model with this function instead of torch's or timm's"
            )
        if isinstance(layer, LazyModuleMixin):  # it changes its class itself
            raise ValueError(f"{name or 'the model'} is lazy: pass a batch through the model first")
    for _, layer in layers:
        original: Any = type(layer)
        layer.__class__ = _synchronised(original)
        layer.__dict__.update(process_group=process_group, counted=None)
    return model


def revert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Give every converted layer its original class back, in place; for export, tracing, folding.

    Raises:
        TypeError: a layer was built as SyncBatchNorm; the model is unchanged.

    Example:
        >>> model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)))
        >>> type(revert_sync_batchnorm(model)[1]) is nn.BatchNorm2d
        True
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, SyncBatchNorm)]
    for name, layer in layers:
        if layer._original is None:
            raise TypeError(
                f"{name or 'the model'} was built as SyncBatchNorm, there is no class to go back to: "
                "build it as nn.BatchNorm2d and convert it"
            )
    for _, layer in layers:
        del layer.process_group, layer.counted
        layer.__class__ = layer._original  # type: ignore[assignment]
    return model


@functools.cache
def _synchronised(original: type[_BatchNorm]) -> type[SyncBatchNorm]:
    """A subclass of SyncBatchNorm and the original class, in this order."""
    if issubclass(original, SyncBatchNorm):
        return original
    body = {"_original": original, "_check_input_dim": original._check_input_dim}
    return type(f"Sync{original.__name__}", (SyncBatchNorm, original), body)


def _empty(original: Any) -> SyncBatchNorm:
    """A layer without attributes, for copy and pickle, which cannot name a class made at run time."""
    kind = _synchronised(original)
    return kind.__new__(kind)


class _Intercept(TorchFunctionMode):
    """A mode in which F.batch_norm in training computes over all ranks of a group."""

    def __init__(self, layer: SyncBatchNorm, group: Group) -> None:
        super().__init__()
        self.layer = layer
        self.group = group
        self.met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.met = True
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        running = (running_mean, running_var)
        counted = self.layer.counted
        if not training:
            return F.batch_norm(x, *running, weight, bias, False, momentum, eps)
        if x.dim() < 2 or x.shape[1] != self.layer.num_features or not x.is_floating_point():
            raise ValueError(  # before the other ranks wait for this one
                f"expected a floating input (N, {self.layer.num_features}, ...), got {x.dtype} of shape "
                f"{tuple(x.shape)}"
            )
        if x.is_cuda and counted is None and not callable(self.group):
            # torch sends the zeros of an empty batch in the batch's dtype, other statistics in float32.
            wide = x if x.numel() else x.float()
            world = dist.get_world_size(self.group)
            y = TorchFunction.apply(wide, weight, bias, *running, eps, momentum, self.group, world)
            if not x.numel():  # torch gives this rank no gradients; they must be zeros
                for parameter in (weight, bias):
                    if parameter is not None:
                        y = y + parameter.view(1, -1, *[1] * (x.dim() - 2))
                y = y + wide
        else:
            counts = counted is not False and x.numel() > 0
            y = _Normalise.apply(x, weight, bias, running, momentum, eps, self.group, counts)
        result: Tensor = y.to(x.dtype)
        return result


class _Normalise(Function):
    """BatchNorm in training over the ranks of a group: one collective forward, one backward.

    Values are computed in float32 (float64 for float64 inputs), statistics per channel in float64. A rank
    that does not count adds nothing to either collective; it takes the statistics as constants.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
        group: Group,
        counts: bool,
    ) -> Tensor:
        dims, shape, dtype = _layout(x)
        # Centred on the batch's mean, neither the squares nor the result suffer from cancellation.
        shift = x.mean(dims, dtype=dtype) if x.numel() else x.new_zeros(x.shape[1], dtype=dtype)
        centred = x - shift.view(shape)
        mean, square, count = _statistics(shift, centred, counts, group)
        # A single value has no variance, and leaves the running statistics unchanged.
        weight_of_new = momentum * (count > 1).double()
        for buffer, new in zip(running, (mean, square / (count - 1).clamp(min=1)), strict=True):
            if buffer is not None:
                buffer.copy_(buffer.double().lerp(new, weight_of_new))
        invstd = (square / count.clamp(min=1) + eps).rsqrt()
        gain = invstd if weight is None else invstd * weight
        offset = (shift - mean) * gain
        offset = offset if bias is None else offset + bias
        ctx.save_for_backward(x, weight, mean, invstd, count)
        ctx.group, ctx.counts = group, counts
        y = centred.mul_(gain.to(dtype).view(shape)).add_(offset.to(dtype).view(shape))
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        dims, shape, dtype = _layout(x)
        shift = mean.to(dtype)
        rest = shift - mean  # the rounding error of float32
        centred = x - shift.view(shape)
        # (2, C): sums of dy, and of dy times the normalized x
        sums = torch.stack([dy.sum(dims, dtype=dtype), (dy * centred).sum(dims)]).double()
        sums[1] = (sums[1] + rest * sums[0]) * invstd
        dx = None
        if ctx.needs_input_grad[0]:
            totals = sums.clone() if ctx.counts else torch.zeros_like(sums)
            if callable(ctx.group):
                totals = _added(ctx.group(totals))
            else:
                dist.all_reduce(totals, group=ctx.group)
            means = totals / count if ctx.counts else torch.zeros_like(sums)
            gain = invstd if weight is None else invstd * weight
            slope = -gain * invstd * means[1]
            offset = rest * slope - gain * means[0]
            dx = centred.mul_(slope.to(dtype).view(shape)).add_(offset.to(dtype).view(shape))
            dx = dx.addcmul_(dy.to(dtype), gain.to(dtype).view(shape)).to(x.dtype)
        dweight = None if weight is None else sums[1]
        dbias = sums[0] if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None, None, None, None


def _layout(x: Tensor) -> tuple[list[int], list[int], torch.dtype]:
    """For (N, C, ...): the dimensions without C, the shape to broadcast a (C,), the dtype to compute in."""
    dims = [0, *range(2, x.dim())]
    shape = [1, -1] + [1] * (x.dim() - 2)
    return dims, shape, torch.promote_types(x.dtype, torch.float32)


def _statistics(
    shift: Tensor, centred: Tensor, counts: bool, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (C,), sum of squared deviations (C,) and count () over all ranks, in float64, equal on all."""
    num_channels = len(shift)
    local = shift.new_zeros(2 * num_channels + 1, dtype=torch.float64)
    if counts:
        dims, _, _ = _layout(centred)
        size = centred.numel() // num_channels
        drift = centred.sum(dims).double() / size  # because the mean was rounded
        local[:num_channels] = shift + drift
        local[num_channels:-1] = centred.square().sum(dims)
        local[-1:].fill_(size)  # an assignment would wait for a GPU
    means, squares, sizes = _gathered(local, group).split([num_channels, num_channels, 1], dim=1)
    count = _added(sizes[:, 0])
    mean = _added(sizes * means) / count.clamp(min=1)
    return mean, _added(squares + sizes * (means - mean).square()), count


def _gathered(local: Tensor, group: Group) -> Tensor:
    """The tensors of all that share statistics, (K, ...), in one order."""
    if callable(group):
        return group(local)
    ranks = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, local, group=group)
    return torch.stack(ranks)


def _added(rows: Tensor) -> Tensor:
    """Sum over the first dimension in pairs: (0 + 1) + (2 + 3)."""
    while len(rows) > 1:
        left, right = rows[0::2], rows[1::2]
        rows = torch.cat([left[: len(right)] + right, left[len(right) :]])
    return rows[0]
