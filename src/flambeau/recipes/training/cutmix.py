"""CutMix: paste a rectangle of another image, and mix the labels in proportion to the pixels.

CutMix：贴上另一张图像的矩形区域，标签按各自的像素数分配。

Source: Yun et al., "CutMix: regularization strategy to train strong classifiers with localizable
features", ICCV 2019, section 3.2 (arXiv:1905.04899); center and clipping as in the authors' code.

Not for targets that belong to positions (boxes, masks), nor for images whose object may be only in a
corner, nor for evaluation.
"""

import torch
from torch import Tensor

_MIN_ALPHA, _MAX_ALPHA = 1e-6, 1e6  # chosen: beyond, lam in float32 is only 0 or 1, or one half


def cutmix(
    images: Tensor,
    targets: Tensor,
    *,
    alpha: float,
    num_classes: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Replace a rectangle of every image by that of another image of the batch.

    The rectangle has the image's aspect ratio and the fraction 1 - lam of its area, lam being one draw of
    Beta(alpha, alpha) per call; its center is uniform, and it is clipped at the border. The other label
    weighs the fraction of replaced pixels. Nothing waits for the device.

    Args:
        images: (N, C, H, W) of any dtype; pixels are only copied.
        targets: (N,) int64 classes, or (N, num_classes) probabilities; on the images' device.
        alpha: in [1e-6, 1e6], or 0, which changes and draws nothing.
        num_classes: at least 1.
        generator: on the CPU or the images' device; its state advances.

    Returns:
        New images, same dtype, device and memory format; and soft targets, (N, num_classes) float32 on the
        device.

    Raises:
        TypeError: targets neither int64 nor floating-point.
        ValueError: alpha out of range, shapes that do not fit, a generator on a third device.

    Example:
        >>> images = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 1, 8, 8)
        >>> generator = torch.Generator().manual_seed(2)
        >>> cut, soft = cutmix(images, torch.tensor([0, 1]), alpha=1.0, num_classes=2,
        ...                    generator=generator)
        >>> torch.equal(cut.mean((1, 2, 3)), soft[:, 1])  # the fraction of ones is the label's
        True
    """
    _check(images, alpha, generator)
    soft = _probabilities(targets, num_classes, len(images))
    if alpha == 0:
        return images, soft
    height, width = images.shape[-2:]
    order = torch.randperm(len(images), generator=generator, device=generator.device)
    edges = _edges(_beta(alpha, generator), height, width, generator)
    # A single transfer of all random numbers.
    drawn = _moved(torch.cat([order, edges]), images.device)
    order, edges = drawn[:-4], drawn[-4:]
    in_rows = _between(edges[0], edges[1], height)
    in_columns = _between(edges[2], edges[3], width)
    box = in_rows.unsqueeze(1) & in_columns
    share = in_rows.sum() * in_columns.sum() / (height * width)
    return torch.where(box, images[order], images), torch.lerp(soft, soft[order], share)


def _edges(lam: Tensor, height: int, width: int, generator: torch.Generator) -> Tensor:
    """(4,) int64 on the generator's device: top, bottom, left, right, not yet clipped."""
    edges = []
    side = torch.sqrt(1 - lam)
    for length in (height, width):
        center = torch.randint(length, (1,), generator=generator, device=generator.device)
        half = (side * (0.5 * length)).long()
        edges += [center - half, center + half]
    return torch.cat(edges)


def _between(start: Tensor, stop: Tensor, length: int) -> Tensor:
    index = torch.arange(length, device=start.device)
    return (index >= start) & (index < stop)


def _check(images: Tensor, alpha: float, generator: torch.Generator) -> None:
    if images.ndim != 4:
        raise ValueError(f"images must be (N, C, H, W), got {tuple(images.shape)}")
    if alpha != 0 and not _MIN_ALPHA <= alpha <= _MAX_ALPHA:
        raise ValueError(f"alpha must be 0 or in [{_MIN_ALPHA:g}, {_MAX_ALPHA:g}], got {alpha}")
    if generator.device.type not in ("cpu", images.device.type):
        raise ValueError(
            f"generator must be on the CPU or on the device of the images, {images.device}, "
            f"got {generator.device}"
        )


def _beta(alpha: float, generator: torch.Generator) -> Tensor:
    """One draw of Beta(alpha, alpha), 0-d float32 on the generator's device.

    It is G/(G + G') of two draws of Gamma(alpha), in logarithms, because both underflow for a small alpha.
    Gamma(alpha) = Gamma(alpha + 1) * U**(1/alpha) (Marsaglia and Tsang 2000, section 6), and
    -log U is exponential.
    """
    shape = torch.full((2,), alpha + 1.0, device=generator.device)
    log_gamma = torch._standard_gamma(shape, generator=generator).log_()
    tail = torch.empty_like(shape).exponential_(generator=generator)
    return torch.sigmoid(log_gamma[0] - log_gamma[1] - (tail[0] - tail[1]) / alpha)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()  # only copies from pinned memory never wait
    return tensor.to(device, non_blocking=True)


def _probabilities(targets: Tensor, num_classes: int, length: int) -> Tensor:
    if targets.dtype == torch.int64:
        if targets.shape != (length,):
            raise ValueError(f"class targets must be ({length},), got {tuple(targets.shape)}")
        # Not F.one_hot, which on the CPU and some devices reads the targets on the host.
        soft = torch.zeros(length, num_classes, device=targets.device)
        return soft.scatter_(1, targets.unsqueeze(1), 1.0)
    if not targets.dtype.is_floating_point:
        raise TypeError(f"targets must be int64 or floating, got {targets.dtype}")
    if targets.shape != (length, num_classes):
        raise ValueError(
            f"targets of probabilities must be ({length}, {num_classes}), "
            f"got {tuple(targets.shape)}"
        )
    return targets.float()
