"""Small images decoded once and kept, on the host or on the device.

N: images, S: side in pixels, C: channels.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_DECODED_AT_ONCE = 4096  # images in progress, so that the host never has all of them twice


NUMPY_TYPES = {torch.uint8: np.uint8, torch.float32: np.float32}  # of pixels


class NothingReadable(ValueError):
    """No image of the data set is readable."""


class DecodedImages:
    """All images of a data set.

    Args:
        read: takes positions (N,), and returns them, with -1 for images that could not be decoded, and the
            pixels of the others.
        shape: (S, S, C).
        replace: replace a bad image by the next readable one; else leave it out.

    Attributes:
        used: (length,) int64 on the CPU, the image used for each, -1 for none; None if all are readable.
        x_NHWC: (length, S, S, C) of `dtype` on the device; zeros for bad images.
    """

    def __init__(
        self,
        read: Callable[[Tensor], tuple[Tensor, Tensor]],
        length: int,
        shape: tuple[int, int, int],
        *,
        device: torch.device,
        replace: bool,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        self.used: Tensor | None = None
        if device.type == "cpu":  # NumPy asks Linux for huge pages, torch does not
            self.x_NHWC = torch.from_numpy(np.zeros((length, *shape), NUMPY_TYPES[dtype]))
        else:
            self.x_NHWC = torch.zeros(length, *shape, dtype=dtype, device=device)
        good = torch.ones(length, dtype=torch.bool)
        for indices in torch.arange(length).split(_DECODED_AT_ONCE):
            used, x_NHWC = read(indices)
            good[indices] = used >= 0
            self.x_NHWC[indices[used >= 0].to(device)] = x_NHWC.to(device)
        if good.all():
            return
        positions = torch.arange(length)
        self.used = torch.where(good, positions, -1)
        if replace:
            if not good.any():
                raise NothingReadable
            readable = positions[good]
            next_one = torch.searchsorted(readable, positions) % len(readable)
            self.used = readable[next_one]
