"""Train a convolution as several branches and fuse them into one: RepVGG, ACNet, and timm's models.

训练时是多个分支、部署时是一个卷积：RepVGG、ACNet，以及 timm 中的同类模型。

Source: Ding et al., "RepVGG: making VGG-style ConvNets great again", CVPR 2021, section 3.3
(arXiv:2101.03697); "ACNet: strengthening the kernel skeletons ...", ICCV 2019, section 3 (arXiv:1908.03930).

Not before more training: the fused convolution has no BatchNorm and trains differently.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvBranches(nn.Module):
    """The sum of several convolutions of one input, each with BatchNorm; no activation.

    Branches share stride, groups and dilation, and are padded to center on the same pixel.

    Args:
        kernel_sizes: (height, width) of each branch, odd; the first is the largest in both.
        identity: add a branch with only BatchNorm; needs equal numbers of channels and stride 1.
        stride, groups, dilation: as for nn.Conv2d.

    Raises:
        ValueError: no kernel, an even or too large one, or an identity that changes the shape.

    Example:
        >>> block = ConvBranches(4, 8, kernel_sizes=[(5, 5), (3, 3)], stride=2).eval()
        >>> x = torch.randn(1, 4, 9, 9)
        >>> torch.allclose(block.fuse()(x), block(x), atol=1e-5)
        True
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_sizes: Sequence[tuple[int, int]],
        identity: bool = False,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
    ) -> None:
        super().__init__()
        if not kernel_sizes:
            raise ValueError("kernel_sizes is empty: a block has at least one branch")
        largest = kernel_sizes[0]
        if any(
            n % 2 == 0 or n > most for k in kernel_sizes for n, most in zip(k, largest, strict=True)
        ):
            raise ValueError(
                f"kernels have odd sizes, none above those of the first, got {kernel_sizes}"
            )
        if identity and (in_channels, 1) != (out_channels, stride):
            raise ValueError(
                "a branch of the identity needs stride 1 and as many output as input channels, "
                f"got stride {stride}, {in_channels} and {out_channels} channels"
            )
        self.convs = nn.ModuleList(
            nn.Conv2d(
                in_channels,
                out_channels,
                (high, wide),
                stride,
                (dilation * (high // 2), dilation * (wide // 2)),
                dilation,
                groups,
                bias=False,
            )
            for high, wide in kernel_sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(out_channels) for _ in kernel_sizes)
        self.identity_norm = nn.BatchNorm2d(out_channels) if identity else None

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, out_channels, H', W')."""
        outputs = [norm(conv(x_NCHW)) for conv, norm in zip(self.convs, self.norms, strict=True)]
        if self.identity_norm is not None:
            outputs.append(self.identity_norm(x_NCHW))
        total: Tensor = functools.reduce(torch.add, outputs)
        return total

    def fuse(self) -> nn.Conv2d:
        """Make one convolution with bias that equals the block in eval mode.

        Its kernel is the sum of all kernels, each times the factor of its BatchNorm and padded with zeros;
        computed in float64.

        Example:
            >>> ConvBranches(4, 4, kernel_sizes=[(3, 3), (1, 1)]).fuse()
            Conv2d(4, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
        """
        first = self.convs[0]
        assert isinstance(first, nn.Conv2d)
        kernels = [weight.detach().double() for weight in self.convs.parameters()]
        norms = list(self.norms)
        high, wide = kernels[0].shape[2:]
        if self.identity_norm is not None:
            num_out, group_width = kernels[0].shape[:2]
            channels = torch.arange(num_out)
            one = torch.zeros_like(kernels[0])
            one[channels, channels % group_width, high // 2, wide // 2] = 1
            kernels.append(one)
            norms.append(self.identity_norm)
        kernel, bias = torch.zeros_like(kernels[0]), torch.zeros_like(kernels[0][:, 0, 0, 0])
        for branch, norm in zip(kernels, norms, strict=True):
            assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None
            assert norm.running_var is not None
            factor = norm.weight.detach() * (norm.running_var.double() + norm.eps).rsqrt()
            rows = (high - branch.shape[2]) // 2
            columns = (wide - branch.shape[3]) // 2
            kernel += factor[:, None, None, None] * F.pad(branch, (columns, columns, rows, rows))
            bias += norm.bias.detach() - norm.running_mean * factor
        fused = copy.deepcopy(first)
        fused.weight = nn.Parameter(kernel.to(first.weight.dtype))
        fused.bias = nn.Parameter(bias.to(first.weight.dtype))
        return fused


def repvgg_block(
    in_channels: int, out_channels: int, *, stride: int = 1, groups: int = 1, dilation: int = 1
) -> ConvBranches:
    """RepVGG's block: 3 x 3, 1 x 1, and the identity if the shape stays; add the activation after it.

    Example:
        >>> sum(p.numel() for p in repvgg_block(4, 4).parameters())
        184
    """
    identity = stride == 1 and in_channels == out_channels
    return ConvBranches(
        in_channels,
        out_channels,
        kernel_sizes=[(3, 3), (1, 1)],
        identity=identity,
        stride=stride,
        groups=groups,
        dilation=dilation,
    )


def acnet_block(
    in_channels: int,
    out_channels: int,
    *,
    kernel_size: int = 3,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
) -> ConvBranches:
    """ACNet's block: k x k, k x 1 and 1 x k; add the activation after it.

    Args:
        kernel_size: k, odd.

    Example:
        >>> [tuple(conv.kernel_size) for conv in acnet_block(4, 8).convs]
        [(3, 3), (3, 1), (1, 3)]
    """
    k = kernel_size
    return ConvBranches(
        in_channels,
        out_channels,
        kernel_sizes=[(k, k), (k, 1), (1, k)],
        stride=stride,
        groups=groups,
        dilation=dilation,
    )


class Reparameterized(NamedTuple):
    """The result of `reparameterize`.

    Example:
        >>> model, fused = reparameterize(nn.Sequential(repvgg_block(3, 4)).eval(), torch.randn(1, 3, 8, 8))
        >>> fused, type(model[0]).__name__
        (['0'], 'Conv2d')
    """

    model: nn.Module
    """The fused copy."""
    fused: list[str]
    """Names of the fused blocks."""


def reparameterize(model: nn.Module, *example: Any) -> Reparameterized:
    """Fuse every block that has a method `fuse()`, `reparameterize()` or `switch_to_deploy()`.

    `fuse()` returns the replacement, or changes the block and returns None; the other two change the block.
    timm's models (RepVGG, MobileOne, RepViT, GhostNet ...) and most papers' code have one of these.

    Args:
        model: in eval mode; not changed.
        example: the model's arguments; a small batch is enough.

    Returns:
        A new model, and the blocks' names.

    Raises:
        ValueError: the model is in training mode or has no such block, or its outputs differ when fused, are
            empty or NaN.

    Example:
        >>> model = nn.Sequential(acnet_block(3, 4), nn.ReLU()).eval()
        >>> reparameterize(model, torch.randn(1, 3, 8, 8)).model
        Sequential(
          (0): Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
          (1): ReLU()
        )
    """
    if model.training:
        raise ValueError("BatchNorm depends on the batch in training mode: call eval() first")
    exact = copy.deepcopy(model).double()
    inputs = [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in example]
    with torch.no_grad():
        expected = _flat(exact(*inputs))
        exact, fused = _fuse_blocks(exact, "", {})
        if not fused:
            raise ValueError("no module has a method fuse, reparameterize or switch_to_deploy")
        got = _flat(exact(*inputs))
        result, _ = _fuse_blocks(copy.deepcopy(model), "", {})
    if not any(b.numel() for b in expected) or not all(b.isfinite().all() for b in expected):
        raise ValueError(
            "the example cannot show whether the fused model is the same: its outputs "
            "are empty, infinite or NaN"
        )
    for a, b in zip(got, expected, strict=True):
        if not b.numel() and a.shape == b.shape:
            continue
        # timm rounds fused weights to float32, even in float64 models; a wrong fusion differs far more.
        if a.shape != b.shape or not (a - b).abs().max() <= 1e-4 * b.abs().max().clamp(min=1e-3):
            raise ValueError(
                f"fused at {fused} the model gives something else: a block was not trained as it is fused"
            )
    return Reparameterized(result.eval(), fused)


def _fuse_blocks(
    module: nn.Module, name: str, done: dict[nn.Module, nn.Module]
) -> tuple[nn.Module, list[str]]:
    """The module or its replacement, and the names of fused blocks; outer blocks come before inner ones.

    `done` maps modules that were visited under another name to their replacements.
    """
    if module in done:
        return done[module], []
    old = module
    names = []
    for method in ("fuse", "reparameterize", "switch_to_deploy"):
        if callable(fuse := getattr(module, method, None)):
            like = next(module.parameters())  # timm makes new layers in the default dtype
            fused = fuse()
            module = (fused if isinstance(fused, nn.Module) else module).to(like.device, like.dtype)
            names.append(name)
            break
    done[old] = done[module] = module
    children = [
        (n, m) for n, m in module.named_modules(remove_duplicate=False) if n and "." not in n
    ]
    for child_name, child in children:
        full_name = f"{name}.{child_name}" if name else child_name
        new, inside = _fuse_blocks(child, full_name, done)
        names += inside
        if new is not child:
            module.set_submodule(child_name, new)
    return module, names


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return (
        [t for part in parts for t in _flat(part)] if isinstance(value, dict | list | tuple) else []
    )
