"""Mixup: train on blends of two images, labelled with the same blend of their classes.

Mixup：用两张图像的混合来训练，标签按相同比例混合。

Source: Zhang et al., "mixup: beyond empirical risk minimization", ICLR 2018, section 2
(arXiv:1710.09412), with one lam per batch, as in its section 2 and in the authors' code.

Not for uint8 images, nor for targets that cannot be averaged (boxes, masks), nor for evaluation.
"""

import torch
from torch import Tensor

_MIN_ALPHA, _MAX_ALPHA = 1e-6, 1e6  # chosen: beyond, lam in float32 is only 0 or 1, or one half


def mixup(
    images: Tensor,
    targets: Tensor,
    *,
    alpha: float,
    num_classes: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Blend every image with another one of the batch: lam * image + (1 - lam) * other.

    lam is one draw of Beta(alpha, alpha) per call; the other images are a random permutation. Nothing waits
    for the device.

    Args:
        images: (N, ...) floating-point.
        targets: (N,) int64 classes, or (N, num_classes) probabilities; on the images' device.
        alpha: in [1e-6, 1e6], or 0, which changes and draws nothing.
        num_classes: at least 1.
        generator: on the CPU or the images' device; its state advances.

    Returns:
        New images, same dtype, device and memory format; and soft targets, (N, num_classes) float32 on the
        device.

    Raises:
        TypeError: images not floating-point, or targets neither int64 nor floating-point.
        ValueError: alpha out of range, shapes that do not fit, a generator on a third device.

    Example:
        >>> images, targets = torch.eye(2), torch.tensor([0, 1])
        >>> generator = torch.Generator().manual_seed(2)
        >>> mixed, soft = mixup(images, targets, alpha=1.0, num_classes=2, generator=generator)
        >>> torch.equal(mixed, soft), soft.sum(1)  # these images are their own labels
        (True, tensor([1., 1.]))
    """
    _check(images, alpha, generator)
    soft = _probabilities(targets, num_classes, len(images))
    if alpha == 0:
        return images, soft
    lam = _beta(alpha, generator)
    order = torch.randperm(len(images), generator=generator, device=generator.device)
    lam, order = _moved(lam, images.device), _moved(order, images.device)
    # The labels get the same rounded lam as the images; in bfloat16 it has 8 bits.
    lam = lam.to(images.dtype)
    mixed = torch.lerp(images[order], images, lam)
    return mixed, torch.lerp(soft[order], soft, lam.to(soft.dtype))


def _check(images: Tensor, alpha: float, generator: torch.Generator) -> None:
    if not images.dtype.is_floating_point:
        raise TypeError(
            f"images must be floating, got {images.dtype}: blending rounds integers; "
            "normalize first, mix then"
        )
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
