"""Rounding and gradients against the papers' formulas and torch's operators; exports in ONNX Runtime."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from flambeau.recipes.compress.fake_quantize import (
    FakeQuantize,
    QuantizedLayer,
    fake_quantize,
    to_integers,
)


def quantizer(scale: Any, zero_point: Any = None, **settings: Any) -> FakeQuantize:
    scale = torch.as_tensor(scale, dtype=torch.float64)
    found = FakeQuantize(num_channels=len(scale) if scale.ndim else None, **settings).double()
    with torch.no_grad():
        found.scale.copy_(scale)
        if zero_point is not None:
            found.zero_point.copy_(torch.as_tensor(zero_point))
    return found


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_values_are_those_of_torch(bits: int, symmetric: bool) -> None:
    low, high = (-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    x, zero = 3 * noise(1000), 0 if symmetric else high // 3
    q = quantizer(0.3, zero, bits=bits, symmetric=symmetric).float()
    expected = torch.fake_quantize_per_tensor_affine(x, 0.3, zero, low, high)
    assert_close(q(x), expected, rtol=1e-6, atol=1e-6)
    assert len(q(x).unique()) <= 2**bits
    assert_close(q(x), q.from_codes(q.codes(x)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_values_per_channel_are_those_of_torch(axis: int) -> None:
    x = noise(4, 4, 4)
    scales = torch.tensor([0.01, 0.02, 0.05, 0.5])
    q = quantizer(scales, axis=axis).float()
    zeros = torch.zeros(4, dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(x, scales, zeros, axis % 3, -127, 127)
    assert_close(q(x), expected, rtol=1e-6, atol=1e-6)


def lsq_gradients(x: Tensor, s: float, low: int, high: int) -> tuple[Tensor, float]:
    """Equations 3 and 5 of LSQ, value by value, for the sum of the outputs weighted by 1, 2, 3 ..."""
    of_x, of_s = [], 0.0
    for weight, value in enumerate(x.tolist(), start=1):
        v = value / s
        inside = low < v < high
        of_x.append(weight * float(inside))
        if inside:
            of_s += weight * (round(v) - v)
        else:
            of_s += weight * (low if v <= low else high)
    return torch.tensor(of_x, dtype=torch.float64), of_s / math.sqrt(len(x) * high)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_gradients_of_lsq(bits: int) -> None:
    x = (0.5 * noise(50)).double().requires_grad_()
    high = 2 ** (bits - 1) - 1
    s = 0.4 / high
    q = quantizer(s, bits=bits)
    (q(x) * torch.arange(1, 51)).sum().backward()
    of_x, of_s = lsq_gradients(x.detach(), s, -high, high)
    assert x.grad is not None
    assert q.scale.grad is not None
    assert 0 < of_x.ne(0).sum() < 50
    assert_close(x.grad, of_x, rtol=1e-12, atol=0)
    assert_close(q.scale.grad.item(), of_s, rtol=1e-9, atol=0)


def test_outside_the_range_the_gradient_is_the_slope_of_the_output() -> None:
    """There the output is (high - zero) * scale: differences of the function itself, in the scale and x."""
    x = torch.tensor([9.0, -9.0, 8.0], dtype=torch.float64)
    q = quantizer(0.1, 3, bits=4, symmetric=False)
    q(x).sum().backward()
    assert q.scale.grad is not None
    assert q.zero_point.grad is not None

    def total(scale: float) -> float:
        return quantizer(scale, 3, bits=4, symmetric=False)(x).sum().item()

    factor = math.sqrt(3 * 15)
    slope = (total(0.1 + 1e-6) - total(0.1 - 1e-6)) / 2e-6
    assert_close(q.scale.grad.item() * factor, slope, rtol=1e-6, atol=0)
    assert_close(
        q.zero_point.grad.item() * factor, -3 * 0.1, rtol=1e-9, atol=0
    )  # each moves by -scale


def test_gradients_are_those_of_torchs_learnable_operator() -> None:
    x = (2 * noise(64)).requires_grad_()
    q = quantizer(0.05, 100, symmetric=False).float()
    factor = 1 / math.sqrt(64 * 255)
    (q(x) ** 2).sum().backward()
    scale, zero = (
        torch.tensor([0.05], requires_grad=True),
        torch.tensor([100.0], requires_grad=True),
    )
    other = x.detach().clone().requires_grad_()
    ours: Any = torch.ops.aten._fake_quantize_learnable_per_tensor_affine
    (ours(other, scale, zero, 0, 255, factor) ** 2).sum().backward()
    assert_close(x.grad, other.grad)
    assert_close(
        [q.scale.grad, q.zero_point.grad], [scale.grad[0], zero.grad[0]], rtol=1e-4, atol=1e-5
    )  # type: ignore[index]


def test_observe_finds_about_the_best_range() -> None:
    """No range of a fine grid has an error below 0.98 of it."""
    x = noise(5000)
    for bits in (2, 4, 8):
        q = FakeQuantize(bits=bits)
        q.observe(x)
        high = 2 ** (bits - 1) - 1
        errors = [
            (torch.fake_quantize_per_tensor_affine(x, end / high, 0, -high, high) - x)
            .square()
            .sum()
            .item()
            for end in torch.linspace(0.05, 5, 500).tolist()
        ]
        assert (q(x) - x).square().sum().item() * 0.98 < min(errors)


def test_observe_of_values_on_one_side_keeps_zero() -> None:
    q = FakeQuantize(symmetric=False)
    q.observe(torch.rand(100) + 5)
    assert q(torch.zeros(1)).item() == 0
    q.observe(torch.zeros(5))
    assert q(torch.zeros(1)).item() == 0


def test_a_negative_scale_rounds_as_its_absolute_value() -> None:
    assert_close(quantizer(-0.3)(torch.tensor([1.0])), quantizer(0.3)(torch.tensor([1.0])))


# ---------------------------------------------------------------- whole models


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, groups=2),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5),
    ).eval()  # fmt: skip


def test_eight_bits_are_close_and_two_are_not() -> None:
    model, x = network(), noise(16, 3, 12, 12)
    errors = []
    for bits in (8, 4, 2):
        prepared = fake_quantize(model, [x], weight_bits=bits, input_bits=bits).model
        with torch.no_grad():
            errors.append(((prepared(x) - model(x)).norm() / model(x).norm()).item())
    assert errors[0] < 0.02 < errors[1] < errors[2]


def test_weights_in_use_have_few_values_per_channel() -> None:
    prepared, quantized, left = fake_quantize(network(), [noise(2, 3, 12, 12)], weight_bits=3)
    assert (quantized, left) == (["0", "2", "4", "6", "9"], {})
    layer: Any = prepared.get_submodule("4")
    used = layer.quantize_weight(layer.layer.weight).transpose(0, 1).flatten(1)
    assert all(len(row.unique()) <= 7 for row in used)
    assert layer.quantize_weight.scale.shape == (6,)
    assert prepared.get_parameter("6.quantize_weight.scale").shape == ()  # grouped and transposed


def test_training_lowers_the_loss_and_moves_the_ranges() -> None:
    model, x = network(), noise(32, 3, 12, 12)
    target = model(x).detach()
    prepared = fake_quantize(model, [x], weight_bits=3, input_bits=3).model.train()
    before = copy.deepcopy(prepared.state_dict())
    optimizer = torch.optim.Adam(prepared.parameters(), lr=2e-3)
    losses = []
    for _ in range(40):
        loss = (prepared(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    after = prepared.state_dict()
    assert all(not after[k].equal(before[k]) for k in after if k.endswith("scale"))
    integers = to_integers(prepared)
    with torch.no_grad():
        assert_close(integers(x), prepared.eval()(x), rtol=1e-5, atol=1e-5)


def test_the_file_of_integers_is_a_quarter(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    integers = to_integers(fake_quantize(model, [noise(4, 512)]).model)
    sizes = []
    for name, part in (("float", model), ("int8", integers)):
        torch.save(part.state_dict(), tmp_path / name)
        sizes.append((tmp_path / name).stat().st_size)
    assert sizes[1] < 0.27 * sizes[0]
    again = to_integers(fake_quantize(model, [noise(4, 512)]).model)
    again.load_state_dict(torch.load(tmp_path / "int8"))
    assert_close(again(noise(2, 512)), integers(noise(2, 512)), rtol=0, atol=0)


def exported(model: nn.Module, x: Tensor, path: Path) -> tuple[list[str], Any, Any]:
    """(operations, types of stored tensors, session) of the model as ONNX, with any batch size."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.onnx.export(
        model,
        (x,),
        path,
        dynamo=True,
        dynamic_shapes=({0: batch},),
        external_data=False,
        verbose=False,
    )
    graph = onnx.load(path).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    return [node.op_type for node in graph.node], kinds, runtime.InferenceSession(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_onnx_runtime_gives_the_same(bits: int, tmp_path: Path) -> None:
    model, x = network(), noise(8, 3, 12, 12)
    integers = to_integers(fake_quantize(model, [x], weight_bits=bits, input_bits=bits).model)
    operations, kinds, session = exported(integers, x[:2], tmp_path / "model.onnx")
    assert operations.count("QuantizeLinear") == 5
    assert operations.count("DequantizeLinear") == 10
    assert sum(kind == 3 for kind in kinds.values()) >= 5  # weights as int8
    for images in (x, noise(3, 3, 12, 12, seed=1)):
        (got,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        with torch.no_grad():
            expected = integers(images)
        # Sums in another order may move a value to the next step: of 8 bits that is a small one.
        step = 0.01 if bits == 8 else 0.1
        assert (torch.from_numpy(got) - expected).abs().max() < step * expected.abs().max()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_one_layer_in_onnx_runtime_to_rounding(tmp_path: Path) -> None:
    layer = nn.Sequential(nn.Conv2d(3, 8, 3)).eval()
    x = noise(4, 3, 9, 9)
    prepared = fake_quantize(layer, [x]).model
    _, _, session = exported(to_integers(prepared), x, tmp_path / "layer.onnx")
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        assert_close(torch.from_numpy(got), prepared(x), rtol=1e-5, atol=1e-5)


def test_torch_export_of_integers() -> None:
    integers, x = (
        to_integers(fake_quantize(network(), [noise(4, 3, 12, 12)]).model),
        noise(2, 3, 12, 12),
    )
    program = torch.export.export(integers, (x,))
    assert_close(program.module()(x), integers(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.linear = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.attention(x, x, x)[0])


def test_what_is_left() -> None:
    prepared, quantized, left = fake_quantize(Attention().eval(), [noise(3, 2, 8)])
    assert quantized == ["linear"]
    assert "forward does not call it" in left["attention.out_proj"]
    assert isinstance(prepared.get_submodule("linear"), QuantizedLayer)
    assert fake_quantize(network(), [noise(1, 3, 12, 12)], skip=["0"]).left == {"0": "skipped"}


def test_refusals() -> None:
    model, x = network(), noise(1, 3, 12, 12)
    with pytest.raises(ValueError, match="bits must be from 2 to 8, got 1"):
        fake_quantize(model, [x], weight_bits=1)
    with pytest.raises(ValueError, match="at least one batch, got none"):
        fake_quantize(model, [])
    with pytest.raises(ValueError, match="no convolution or linear layer has the name 77"):
        fake_quantize(model, [x], skip=["77"])
    with pytest.raises(ValueError, match="there is nothing to round"):
        fake_quantize(nn.ReLU(), [x])
    with pytest.raises(ValueError, match="no layer of the model rounds"):
        to_integers(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_channel_of_zeros_stays_zero_in_half_precision(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 3, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight[1] = 0
    rounded = QuantizedLayer(layer, weight_bits=8, input_bits=8)
    rounded.quantize_input.observe(torch.linspace(-1, 1, 9))
    x = torch.linspace(-1, 1, 8, dtype=dtype).view(2, 4)
    assert rounded(x)[:, 1].tolist() == [0, 0]
    assert rounded(x).isfinite().all()
    rounded.store_codes()
    assert rounded(x)[:, 1].tolist() == [0, 0]


def test_one_string_is_not_a_list_of_names() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(11)])
    with pytest.raises(TypeError, match=r"\['10'\]"):
        fake_quantize(model, [torch.randn(8, 2)], skip="10")  # it would skip '1' and '0'


@pytest.mark.parametrize(
    "layer", [nn.Linear(64, 8), nn.Conv2d(32, 8, 3), nn.ConvTranspose2d(8, 8, 3)]
)
def test_gradients_of_float16_are_those_of_float32(layer: nn.Module) -> None:
    """Steps of 0.001: x / step**2 is beyond the largest number of float16."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(layer.get_parameter("weight").shape, generator=generator) / 30
    copied = copy.deepcopy(layer).half()
    copied.load_state_dict({"weight": weight, "bias": torch.zeros(8)})
    size = () if isinstance(layer, nn.Linear) else (5, 5)
    num_inputs = getattr(layer, "in_channels", 64)
    x = torch.randn(4, num_inputs, *size, generator=generator).half()
    rough = fake_quantize(nn.Sequential(copied), [x]).model
    exact = copy.deepcopy(rough).float()
    rough(x).float().mean().backward()
    exact(x.float()).mean().backward()
    for name, parameter in exact.named_parameters():
        got = rough.get_parameter(name).grad
        if parameter.grad is not None:
            assert got is not None
            tolerance = 0.02 * float(parameter.grad.abs().max()) + 1e-6
            torch.testing.assert_close(got.float(), parameter.grad, rtol=0.05, atol=tolerance)
