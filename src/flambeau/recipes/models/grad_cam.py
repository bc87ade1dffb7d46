"""Grad-CAM: which places of an image speak for a class, as a map of a layer.

Grad-CAM：图像中哪些位置支持某个类别，以某一层的热力图表示。

Source: Selvaraju et al. 2017, Grad-CAM (arXiv:1610.02391), equations 1 and 2.

A map of the last layer that has a height and a width is the usual one: it is coarse, and says where the model
looks and not why. A map that looks reasonable is no proof that the model is right (Adebayo et al. 2018,
arXiv:1810.03292). Not for compiled models, nor for layers whose output is not (N, C, H, W), such as the
blocks of a transformer. Letters in names: N images, K channels of the layer, H and W a place, C classes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def grad_cam(
    model: nn.Module, images: Tensor, layer: nn.Module, *, classes: Tensor | None = None
) -> Tensor:
    """The Grad-CAM map of each image, on the grid of the layer.

    The model runs in eval mode and gets its modes back; no `.grad` of a parameter changes, and frozen models
    serve as well. The graph begins at the layer, so memory holds what lies behind it.

    Args:
        model: returns logits (N, C).
        images: (N, ...), as the model takes them, on its device.
        layer: a module of the model, whose output is (N, K, H, W).
        classes: (N,) integers, the class that each map is for; by default the one with the highest logit.

    Returns:
        (N, H, W), not negative, in the dtype and on the device of the layer's output. It is not scaled:
        0 everywhere says that no place speaks for the class.

    Raises:
        ValueError: layer is no part of the model, or its output, the logits or classes have another shape.
        RuntimeError: the layer ran never, or several times.

    Example:
        >>> layer = nn.Conv2d(3, 4, 3)
        >>> model = nn.Sequential(layer, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> grad_cam(model, torch.ones(2, 3, 8, 8), layer).shape
        torch.Size([2, 6, 6])
    """
    if all(module is not layer for module in model.modules()):
        raise ValueError("layer must be a module of the model, such as model.layer4")
    leaves: list[Tensor] = []

    def start_graph(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        if not isinstance(output, Tensor) or output.ndim != 4:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"the output of the layer must be (N, K, H, W), got {got}")
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # a ReLU may write into what comes next, but not into a leaf

    hook = layer.register_forward_hook(start_graph)
    with _evaluating(model), torch.inference_mode(False), torch.enable_grad():
        try:
            logits_NC = model(images.clone())  # a tensor of inference_mode cannot be kept
        finally:
            hook.remove()
        if len(leaves) != 1:
            raise RuntimeError(
                f"the layer must run once in a forward pass, and ran {len(leaves)} times"
            )
        chosen_N = _logits_of(logits_NC, classes)
        (gradient_NKHW,) = torch.autograd.grad(chosen_N.sum(), leaves[0])
    return torch.einsum("nk,nkhw->nhw", gradient_NKHW.mean((2, 3)), leaves[0].detach()).relu()


def _logits_of(logits_NC: Tensor, classes: Tensor | None) -> Tensor:
    """The logit of each image's class, or its highest one."""
    if logits_NC.ndim != 2:
        raise ValueError(f"the model must return logits (N, C), got {tuple(logits_NC.shape)}")
    if classes is None:
        classes = logits_NC.argmax(1)  # the gradient of amax would be shared by equal logits
    if classes.shape != logits_NC.shape[:1]:
        raise ValueError(
            f"classes must be ({len(logits_NC)},), one for each image, got {tuple(classes.shape)}"
        )
    return logits_NC.gather(1, classes.long()[:, None])


def heat_overlay(images: Tensor, maps: Tensor, *, opacity: float = 0.5) -> Tensor:
    """Images with their maps over them, from blue at 0 to red at the highest value of each map.

    Args:
        images: (N, 1 or 3, H, W), floating point, from 0 to 1.
        maps: (N, h, w), not negative; enlarged to H x W.
        opacity: from 0 (the image alone) to 1 (the map alone).

    Returns:
        (N, 3, H, W), from 0 to 1, in the dtype and on the device of the images.

    Raises:
        ValueError: the shapes do not fit, or opacity lies outside.

    Example:
        >>> heat_overlay(torch.zeros(1, 3, 2, 2), torch.tensor([[[0.0, 1.0]]]), opacity=1)[0, 0, 0]
        tensor([0.0000, 0.5000])
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be (N, 1 or 3, H, W), got {tuple(images.shape)}")
    if maps.ndim != 3 or len(maps) != len(images):
        raise ValueError(f"maps must be ({len(images)}, h, w), got {tuple(maps.shape)}")
    if not 0 <= opacity <= 1:
        raise ValueError(f"opacity must lie from 0 to 1, got {opacity}")
    large = F.interpolate(maps[:, None].to(images), images.shape[2:], mode="bilinear")
    highest = large.amax((1, 2, 3), keepdim=True)
    heat = large / highest.masked_fill(highest == 0, 1)
    center = torch.tensor([3.0, 2.0, 1.0]).to(images)[None, :, None, None]  # of red, green, blue
    color = (1.5 - (4 * heat - center).abs()).clamp(0, 1)  # the ramp that is called jet
    return torch.lerp(images.expand_as(color), color, opacity)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])  # some modules do more in train() than set a flag
        for module, mode in modes.items():
            module.training = mode
