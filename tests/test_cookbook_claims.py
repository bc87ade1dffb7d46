"""What the cookbook pages say and no block of theirs prints."""

import pytest
import torch

# ---------------------------------------------------------------- autograd.md


def test_grad_of_a_tensor_that_is_no_leaf_is_none_with_a_warning() -> None:
    other = torch.ones(2, requires_grad=True) * 2
    other.sum().backward()
    with pytest.warns(UserWarning, match="not a leaf Tensor"):
        assert other.grad is None


def test_parameter_that_was_moved_is_refused_and_one_that_stayed_is_not() -> None:
    parameter = torch.ones(2, requires_grad=True)
    assert parameter.to("cpu") is parameter
    with pytest.raises(ValueError, match="non-leaf"):
        torch.optim.SGD([parameter.to("meta")], lr=0.1)


def test_where_has_the_gradient_of_relu_at_zero() -> None:
    zero = torch.zeros(1, requires_grad=True)
    assert torch.autograd.grad(zero.relu(), zero)[0] == 0


def test_a_graph_of_sums_can_be_walked_twice() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    y = x + x
    y.backward()
    y.backward()
    assert x.grad == 4
