"""What the cookbook pages say and no block of theirs prints."""

import argparse
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision.transforms import v2

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


# ---------------------------------------------------------------- hooks.md


class TwoOperations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * 2).relu()


def grad_inputs_of(register: str) -> list[tuple[int, ...]]:
    model = TwoOperations()
    seen: list[tuple[int, ...]] = []
    getattr(model, register)(lambda module, grad_input, _: seen.extend(g.shape for g in grad_input))
    model(torch.randn(5, 3, requires_grad=True)).sum().backward()
    return seen


def test_the_old_backward_hook_sees_the_last_operation_alone() -> None:
    assert grad_inputs_of("register_full_backward_hook") == [(5, 3)]
    with pytest.warns(FutureWarning, match="missing some grad_input"):
        assert grad_inputs_of("register_backward_hook") == [(5, 2)]


def test_without_an_input_that_requires_a_gradient_a_backward_hook_gets_none() -> None:
    model = nn.Linear(3, 2)
    seen: list[Any] = []
    model.register_full_backward_hook(lambda module, grad_input, _: seen.append(grad_input))
    with pytest.warns(UserWarning, match="no inputs require gradients"):
        model(torch.randn(5, 3)).sum().backward()
    assert seen == [(None,)]


def test_a_hook_stays_on_a_copy_and_does_not_hear_forward() -> None:
    model = nn.Linear(3, 2)
    calls: list[int] = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    copied = copy.deepcopy(model)
    hook.remove()
    model(torch.randn(1, 3))
    copied.forward(torch.randn(1, 3))
    assert calls == []
    copied(torch.randn(1, 3))
    assert calls == [1]


# ---------------------------------------------------------------- uneven_classes.md


def test_a_batch_of_one_class_has_no_weights_at_all() -> None:
    logits = torch.randn(4, 2)
    classes = torch.ones(4, dtype=torch.long)
    weighed = functional.cross_entropy(logits, classes, weight=torch.tensor([1.0, 9.0]))
    torch.testing.assert_close(weighed, functional.cross_entropy(logits, classes))


def test_smoothing_beside_weights_draws_a_frequent_image_to_rare_classes() -> None:
    """At its lowest, the loss has p in proportion to target times weight: 42 % and 11 %."""
    weight = torch.tensor([0.52] * 5 + [12.5] * 5)
    target = torch.full((10,), 0.01)
    target[0] = 0.91
    best = target * weight / (target * weight).sum()
    logits = best.log()[None].requires_grad_()
    loss = functional.cross_entropy(
        logits, torch.tensor([0]), weight=weight, label_smoothing=0.1, reduction="sum"
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, torch.zeros(1, 10), rtol=0, atol=1e-5)
    assert [round(best[place].item(), 2) for place in (0, 9)] == [0.42, 0.11]


# ---------------------------------------------------------------- tensors.md


def test_there_are_no_strings() -> None:
    with pytest.raises((TypeError, ValueError)):
        torch.tensor(["a", "b"])


def test_expanded_tensor_refuses_to_be_written_as_a_whole() -> None:
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.zeros(2, 1).expand(2, 3).add_(1)


def test_which_conversions_between_numpy_and_torch_copy() -> None:
    array = np.zeros(3, np.float32)
    tensor = torch.from_numpy(array)
    address = array.ctypes.data
    assert tensor.data.numpy().ctypes.data == address
    assert tensor.numpy().copy().ctypes.data != address
    assert tensor.clone().numpy().ctypes.data != address


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "complex128"])
def test_types_that_numpy_has(dtype: str) -> None:
    assert torch.zeros(2, dtype=getattr(torch, dtype)).numpy().dtype == np.dtype(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_types_that_numpy_has_not(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="unsupported ScalarType"):
        torch.zeros(2, dtype=dtype).numpy()
    assert torch.zeros(2, dtype=dtype).float().numpy().dtype == np.float32


def test_truncated_pixel_is_one_less() -> None:
    assert torch.tensor(0.999).mul(255).byte() == 254


def test_allclose_compares_no_types() -> None:
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="did not match"):
        torch.allclose(x.double(), x)
    torch.testing.assert_close(x, x.clone())


def test_one_hot_has_the_type_of_classes() -> None:
    assert functional.one_hot(torch.tensor([2, 0])).dtype == torch.int64


def test_cpu_number_without_dimensions_goes_with_any_device() -> None:
    assert (torch.ones(2, device="meta") + torch.ones(())).shape == (2,)


# ---------------------------------------------------------------- models.md


def test_copies_of_shared_layers_share_no_weights_with_them() -> None:
    layer = nn.Linear(2, 2)
    copied = copy.deepcopy(nn.Sequential(layer, layer))
    assert copied[0] is copied[1]
    assert copied[0].weight is not layer.weight


# ---------------------------------------------------------------- devices.md


@pytest.mark.parametrize("place", [torch.cuda.set_device, torch.device, nn.Linear(2, 2).cuda])
def test_a_name_for_two_devices_is_refused(place: Callable[[str], object]) -> None:
    with pytest.raises(RuntimeError, match="Invalid device string: 'cuda:1,2'"):
        place("cuda:1,2")


# ---------------------------------------------------------------- data_cookbook.md


@pytest.mark.parametrize("setting", [{"shuffle": True}, {"sampler": range(9)}, {"drop_last": True}])
def test_what_a_batch_sampler_excludes(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="mutually exclusive"):
        DataLoader(range(9), batch_sampler=[[0]], **setting)


def test_timeout_without_workers_is_an_assertion() -> None:
    with pytest.raises(AssertionError):
        next(iter(DataLoader(range(9), timeout=1)))


def test_to_tensor_of_v2_names_what_takes_its_place() -> None:
    with pytest.warns(UserWarning, match=r"v2\.ToImage\(\)"):
        v2.ToTensor()


# ---------------------------------------------------------------- inference.md


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_trace_warns_of_the_path_that_it_does_not_record() -> None:
    def gate(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else -x

    with pytest.warns(torch.jit.TracerWarning):
        torch.jit.trace(gate, torch.ones(2))


# ---------------------------------------------------------------- from_apex_and_old_launchers.md


def test_an_old_argument_parser_refuses_the_spelling_of_todays_launcher(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--local-rank=1"])
    assert stop.value.code == 2
    assert "unrecognized arguments: --local-rank=1" in capsys.readouterr().err


# ---------------------------------------------------------------- what torch says, on several pages


def load_with_module_prefix() -> None:
    nn.Linear(2, 3).load_state_dict(nn.DataParallel(nn.Linear(2, 3)).state_dict())


def load_another_number_of_classes() -> None:
    nn.Linear(2, 3).load_state_dict(nn.Linear(2, 4).state_dict(), strict=False)


def load_a_whole_model() -> None:
    file = io.BytesIO()
    torch.save(nn.Linear(2, 3), file)
    file.seek(0)
    torch.load(file)


def derive_twice_without_a_graph() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    (first,) = torch.autograd.grad(x**3, x)
    torch.autograd.grad(first, x)


def check_gradients_at_a_corner() -> None:
    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(torch.relu, (zero,))


def write_in_place_what_backward_needs() -> None:
    y = torch.ones(2, requires_grad=True).exp()
    y.relu_().add_(1)
    y.sum().backward()


def run_what_is_not_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        torch.ones(4).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: torch.save({}, "missing/model.pth"), "Parent directory missing does not exist"),
        (load_with_module_prefix, r"Missing key\(s\) in state_dict(.|\n)*Unexpected key\(s\)"),
        (load_another_number_of_classes, "size mismatch for weight"),
        (load_a_whole_model, "Weights only load failed"),
        (lambda: torch.optim.SGD([{"parameters": [torch.ones(1)]}]), "'params'"),
        # torch.compile leaves the check of arguments off for the rest of a process.
        (lambda: torch.distributions.Beta(0.0, 0.0, validate_args=True), "concentration"),
        (lambda: nn.Conv2d(1, 1, 3, stride=2, padding="same"), "not supported for strided"),
        (derive_twice_without_a_graph, "element 0 of tensors does not require grad"),
        (check_gradients_at_a_corner, "Jacobian mismatch"),
        (write_in_place_what_backward_needs, "modified by an inplace operation"),
        (run_what_is_not_deterministic, "does not have a deterministic implementation"),
    ],
)
def test_message_of_a_mistake(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises((KeyError, RuntimeError, ValueError, pickle.UnpicklingError), match=message):
        mistake()


def test_a_schedule_that_is_stepped_first_is_warned_of() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"call of `lr_scheduler.step\(\)` before"):
        schedule.step()
