"""Tensors compared to the bit, against differences that were made by hand."""

import numpy as np
import pytest
import torch

from flambeau.compare import tensor_difference as module
from flambeau.compare.tensor_difference import tensor_difference


def flipped(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    data = bytearray(tensor.numpy().tobytes())
    size = tensor.element_size()
    data[element * size + bit // 8] ^= 1 << bit % 8
    return torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
@pytest.mark.parametrize("bit", [0, 9, 15])
def test_a_flipped_bit_is_found(dtype: torch.dtype, bit: int) -> None:
    tensor = torch.arange(1, 25).view(4, 6).to(dtype)
    found = tensor_difference("w", tensor, flipped(tensor, 7, bit))
    assert found is not None
    assert (found.num_different, found.num_elements) == (1, 24)
    assert found.flipped_bit == (7, bit)
    two = tensor_difference("w", tensor, flipped(flipped(tensor, 7, bit), 7, bit - 1 if bit else 1))
    assert two is not None
    assert two.flipped_bit is None


def test_units_in_the_last_place_are_those_of_numpy() -> None:
    values = np.array([1.0, -1.0, 0.0, -0.0, 3e-45, 1e30], np.float32)
    other = np.nextafter(np.nextafter(values, np.float32(2)), np.float32(2))
    found = tensor_difference("w", torch.from_numpy(values), torch.from_numpy(other))
    assert found is not None
    assert (found.max_ulps, found.num_different) == (2, 6)
    around_zero = tensor_difference("w", torch.tensor([-1e-45]), torch.tensor([1e-45]))
    assert around_zero is not None
    assert around_zero.max_ulps == 2


def test_equal_is_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 3)
    odd = torch.tensor([float("nan"), 0.0, float("inf"), 1.0])
    assert tensor_difference("w", odd, odd.clone()) is None
    zero = odd.clone()
    zero[1] = -0.0
    found = tensor_difference("w", odd, zero)
    assert found is not None
    assert (found.num_different, found.max_abs, found.flipped_bit) == (1, 0.0, (1, 31))
    both = tensor_difference("w", odd, torch.tensor([1.0, 0.0, 2.0, 5.0]))
    assert both is not None
    assert (both.num_different, both.max_abs, both.flipped_bit) == (3, 4.0, None)
    assert tensor_difference("w", torch.empty(0), torch.empty(0)) is None


def test_other_shapes_and_types_are_told_in_words() -> None:
    found = tensor_difference("w", torch.ones(2, 3), torch.ones(3))
    assert str(found) == "w: (2, 3) of float32 and (3,) of float32"
    for tensor in (torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.bfloat16)):
        assert tensor_difference("w", tensor, tensor.clone()) is None
        assert tensor_difference("w", tensor, torch.zeros_like(tensor)) is not None
    pair = torch.ones(2, dtype=torch.complex64), torch.full((2,), 1 + 2j)
    found = tensor_difference("w", *pair)
    assert found is not None
    assert (found.num_different, found.max_abs) == (2, 2.0)
