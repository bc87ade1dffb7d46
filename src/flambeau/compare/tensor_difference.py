"""Compares two tensors to the bit: how many elements differ, by how much, and whether by a single bit."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 2**22  # elements compared at a time; each takes some 60 bytes
_MAX_ULPS = 1000  # a larger difference is no rounding, and its ulps are not shown; chosen
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """How two tensors of one name differ.

    Attributes:
        num_different: elements with different bits; 0 if shapes or types differ.
        max_abs: largest difference of finite elements; None for different shapes.
        max_ulps: the same in units of the last place, if floating-point.
        flipped_bit: (element, bit) if only that differs.
        what: in words, for another shape or type, or a missing tensor.
    """

    name: str
    num_different: int = 0
    num_elements: int = 0
    max_abs: float | None = None
    max_ulps: int | None = None
    flipped_bit: tuple[int, int] | None = None
    what: str | None = None

    def __str__(self) -> str:
        if self.what is not None:
            return f"{self.name}: {self.what}"
        text = f"{self.name}: {self.num_different} of {self.num_elements} elements"
        if self.max_abs is not None:
            text += f", at most {self.max_abs:.3g}"
        if self.max_ulps is not None and self.max_ulps <= _MAX_ULPS:
            text += f" ({self.max_ulps} ulp{'s' * (self.max_ulps != 1)})"
        if self.flipped_bit is not None:
            text += f"; one bit: number {self.flipped_bit[1]} of element {self.flipped_bit[0]}"
        return text

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "different": self.num_different,
            "elements": self.num_elements,
            "max_abs": self.max_abs,
            "max_ulps": self.max_ulps,
            "flipped_bit": self.flipped_bit,
            "what": self.what,
        }


def tensor_difference(name: str, left: Tensor, right: Tensor) -> TensorDifference | None:
    """How two tensors differ; None if equal to the bit, including NaN and signs of zero."""
    if left.shape != right.shape or left.dtype != right.dtype:
        kinds = [
            f"{tuple(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in (left, right)
        ]
        return TensorDifference(name, what=f"{kinds[0]} and {kinds[1]}")
    if left.numel() == 0:
        return None
    sides = [_flat(tensor) for tensor in (left, right)]
    count = 0
    most = 0.0
    ulps = 0
    flipped = None
    for start in range(0, len(sides[0]), _CHUNK):
        a, b = (side[start : start + _CHUNK] for side in sides)
        words = [part.view(_WORDS[part.element_size()]) for part in (a, b)]
        indices = (words[0] != words[1]).nonzero().flatten()
        if not len(indices):
            continue
        count += len(indices)
        first, second = (word[indices].to("cpu", torch.int64) for word in words)
        if count == 1:
            flipped = _one_bit(
                int(first[0]) ^ int(second[0]), a.element_size(), int(indices[0]) + start
            )
        values = [part[indices].to("cpu", torch.float64) for part in (a, b)]
        finite = values[0].isfinite() & values[1].isfinite()
        most = max(most, _largest((values[0] - values[1]).abs()[finite]))
        if a.is_floating_point():
            ulps = max(ulps, _ulps(first[finite], second[finite], a.element_size()))
    if not count:
        return None
    return TensorDifference(
        name,
        count,
        len(sides[0]),
        most,
        ulps if sides[0].is_floating_point() else None,
        flipped if count == 1 else None,
    )


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1)


def _one_bit(changed: int, size: int, element: int) -> tuple[int, int] | None:
    changed &= (1 << 8 * size) - 1
    return (element, changed.bit_length() - 1) if changed.bit_count() == 1 else None


def _largest(values: Tensor) -> float:
    return float(values.max()) if len(values) else 0.0


def _ulps(first: Tensor, second: Tensor, size: int) -> int:
    """Largest distance of floating-point numbers of `size` bytes, given as sign-extended words."""
    if not len(first):
        return 0
    low_bits = 2 ** (8 * size - 1) - 1  # without the sign, the order of words is that of numbers
    ordered = [torch.where(w < 0, -(w & low_bits), w) for w in (first, second)]
    # Of float64 the difference may need 65 bits.
    return int((ordered[0].double() - ordered[1].double()).abs().max())
