"""The resizing and centre crop of an evaluation as traceable operations, with the same pixels.

The rule is `eval_image`'s, and the arithmetic that of torch's antialiased filter on uint8: weights in double
precision, scaled to integers of 16 bits, first along the rows, rounded to 8 bits, then along the columns.
Here a filter is a matrix of such integers in float64, in which every product and sum of them is exact: the
order in which a runtime adds makes no difference. Of floating-point pixels the weights stay fractions.

N: images, C: channels, H, W: height and width as decoded, S: side of the result.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from flambeau.data.transforms.crops import EvalResize, shorter_side


def _triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def _cubic(x: Tensor) -> Tensor:
    """Keys' kernel with a = -0.5, as Pillow and torch's antialiased filter have it."""
    a, x = -0.5, x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


_FILTERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "bilinear": (_triangle, 1),
    "bicubic": (_cubic, 2),
}
"""The kernels, and how far each reaches to one side."""
_BITS = 16  # of a weight, sign included
_MOST_BITS = 22  # torch's limit where all weights are small
_LONGEST = 8  # times the shorter side; only the middle of a longer image is used


class ResizedCentre(nn.Module):
    """Resizes the shorter side, to S / 0.875 or by `resize`, and crops the centre, as an evaluation.

    Images of S x S pixels are not changed.
    """

    def __init__(
        self, size: int, interpolation: str = "bilinear", resize: EvalResize = None
    ) -> None:
        super().__init__()
        self.size = size
        self.shorter = shorter_side(size, resize)
        self.squashes = resize == "squash"
        self.interpolation = interpolation

    def forward(self, pixels: Tensor, full_size: Tensor) -> Tensor:
        """From pixels (N, H, W, C), upright, to (N, C, S, S) float32; of uint8, integers 0 .. 255.

        `full_size`, (2,) int64: height and width of the picture before a JPEG's decoding at 1/2, 1/4 or 1/8,
        else H and W.
        """
        decoded = [torch.full((), side, dtype=torch.int64) for side in pixels.shape[1:3]]
        full = full_size[0], full_size[1]
        middle, resized = self._sides(full)
        rows, columns = (
            _filter_matrix(
                *_decoded_part(full[axis], middle[axis], decoded[axis]),
                resized[axis],
                self.size,
                pixels.shape[1 + axis],
                self.interpolation,
                whole=not pixels.is_floating_point(),
            )
            for axis in (0, 1)
        )
        x = pixels.permute(0, 3, 1, 2).double()
        if pixels.is_floating_point():
            return (rows[0] @ (x @ columns[0].T)).float()
        x = _rounded(x @ columns[0].T, columns[1])
        return _rounded(rows[0] @ x, rows[1]).float()

    def _sides(self, full: tuple[Tensor, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Height and width of the part that is resized, and of the result; 0-d int64 each."""
        if self.squashes:
            return [*full], [torch.full_like(side, self.size) for side in full]
        longest = _LONGEST * torch.minimum(*full)
        middle = [torch.minimum(side, longest + side % 2) for side in full]
        is_prepared = (full[0] == self.size) & (full[1] == self.size)
        shorter = torch.where(is_prepared, self.size, self.shorter)
        return middle, [
            torch.where(
                middle[axis] <= middle[1 - axis],
                shorter,
                shorter * middle[axis] // middle[1 - axis].clamp(min=1),
            )
            for axis in (0, 1)
        ]


def _decoded_part(full: Tensor, middle: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
    """Begin and length of the middle part of a side in the decoded image; 0-d int64."""
    begin = _centred(full - middle)
    eighths = torch.where(
        decoded == full,
        8,
        torch.where(decoded == (full + 1) // 2, 4, torch.where(decoded == (full + 3) // 4, 2, 1)),
    )
    # Each border at the nearest pixel.
    first, behind = ((2 * at * eighths + 8) // 16 for at in (begin, begin + middle))
    return first, behind - first


def _filter_matrix(
    begin: Tensor,
    length: Tensor,
    resized: Tensor,
    size: int,
    total: int,
    interpolation: str,
    *,
    whole: bool,
) -> tuple[Tensor, Tensor]:
    """Weights in float64 of the centred S resized positions, (S, total), and the weight that stands for 1.0.

    Args:
        begin, length: the part of the side that is resized, 0-d int64.
        resized: its length afterwards, 0-d int64.
        total: length of the side.
        whole: make integers of the weights, as the filter of 8-bit pixels has them.
    """
    kernel, reach = _FILTERS[interpolation]
    positions = cast(int, resized.item())  # in a graph a symbol, which int() would freeze
    scale = length.double() / resized.double()
    stretch = scale.clamp(min=1.0)
    centre = (scale * (torch.arange(positions, dtype=torch.float64) + 0.5))[:, None]
    low = (centre - stretch * reach + 0.5).trunc().clamp(min=0)
    high = torch.minimum((centre + stretch * reach + 0.5).trunc(), length.double())
    k = (torch.arange(total, dtype=torch.float64) - begin.double())[None]
    weights = kernel((k - centre + 0.5) * (1 / stretch)) * ((k >= low) & (k < high))
    weights = weights / weights.sum(1, keepdim=True)
    window = _centred(resized - size) + torch.arange(size)
    if not whole:
        return torch.index_select(weights, 0, window), torch.ones((), dtype=torch.float64)
    # The largest power of two at which the largest weight of all positions fits.
    powers = torch.arange(_MOST_BITS, dtype=torch.float64)
    fits = (0.5 + weights.max() * torch.exp2(powers + 1)).trunc() < 2 ** (_BITS - 1)
    one = torch.exp2(fits.double().sum())
    chosen = torch.index_select(weights, 0, window) * one
    return torch.where(chosen < 0, chosen - 0.5, chosen + 0.5).trunc(), one


def _rounded(sums: Tensor, one: Tensor) -> Tensor:
    return ((sums + one / 2) / one).floor().clamp(0, 255)


def _centred(rest: Tensor) -> Tensor:
    """Half, rounded to even, as `eval_image` centres."""
    return (rest.double() / 2).round().long()
