"""Values, gradients and bits against the formulas of the papers, and accuracy on the embedded images."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

import flambeau.data
from flambeau.recipes.compress.low_bit import (
    LowBitLayer,
    SignThreshold,
    low_bit,
    pack_bits,
    packed,
    round_gradient,
    round_unit,
    unpack_bits,
)
from flambeau.recipes.data.recordio import RecordReader, unpack


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def layer_of(weight: Tensor, method: Any, **settings: Any) -> LowBitLayer:
    layer: Any = nn.Linear(weight.shape[1], weight.shape[0])
    if weight.ndim == 4:
        layer = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2:])  # type: ignore[arg-type]
    layer.weight.data = weight.clone()
    return LowBitLayer(layer, method, **settings)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_weights_of_dorefa(bits: int) -> None:
    """2 quantize_k(tanh(w) / (2 max |tanh w|) + 1/2) - 1, weight by weight."""
    weight = noise(4, 5)
    n = 2**bits - 1
    largest = max(abs(math.tanh(w)) for w in weight.flatten().tolist())
    expected = [
        2 * round(n * (math.tanh(w) / (2 * largest) + 0.5)) / n - 1
        for w in weight.flatten().tolist()
    ]
    values = layer_of(weight, "dorefa", bits=bits).weight_values()
    assert_close(values.flatten(), torch.tensor(expected), rtol=0, atol=1e-6)
    assert len(values.unique()) <= 2**bits
    assert values.abs().max() == 1


def test_one_bit_of_dorefa_bnn_and_xnor() -> None:
    weight = noise(4, 3, 2, 2)
    signs = torch.where(weight >= 0, 1.0, -1.0)
    assert_close(layer_of(weight, "dorefa", bits=1).weight_values(), signs * weight.abs().mean())
    assert_close(layer_of(weight, "bnn").weight_values(), signs)
    for channel, values in enumerate(layer_of(weight, "xnor").weight_values()):
        assert_close(values, signs[channel] * weight[channel].abs().mean())


def test_ternary_weights() -> None:
    """Threshold 0.7 times the mean size; the scale is the mean size of what is above."""
    weight = torch.tensor([[0.1, -0.2, 1.0, -2.0, 0.69, 0.0]])
    limit = 0.7 * weight.abs().mean().item()  # 0.4655
    large = [w for w in weight.flatten().tolist() if abs(w) > limit]
    scale = sum(abs(w) for w in large) / len(large)
    expected = [
        math.copysign(scale, w) if abs(w) > limit else 0.0 for w in weight.flatten().tolist()
    ]
    assert_close(layer_of(weight, "twn").weight_values().flatten(), torch.tensor(expected))


def test_the_scale_of_twn_is_the_best_one_for_its_codes() -> None:
    """Equation 5 of the paper: no other scale is nearer to the weights."""
    weight = noise(50, 20)
    values = layer_of(weight, "twn").weight_values().detach()
    codes, scale = values.sign(), values.abs().max()
    best = min(
        torch.linspace(0, 4, 4001).tolist(), key=lambda s: (weight - s * codes).norm().item()
    )
    assert abs(best - scale.item()) < 0.002


def test_inputs() -> None:
    x = torch.tensor([[-0.4, 0.1, 0.6, 1.7]])
    eye = torch.eye(4)
    layer = layer_of(eye, "dorefa", bits=8, input_bits=2)
    assert layer.layer.bias is not None
    nn.init.zeros_(layer.layer.bias)  # type: ignore[arg-type]
    assert_close(
        layer(x) @ layer.weight_values().inverse().T,
        torch.tensor([[0, 0, 2 / 3, 1]]),
        atol=1e-5,
        rtol=0,
    )


def test_xnor_convolution_by_loops() -> None:
    """(sign(x) * sign(w)) K alpha, with K the mean size of the input under the kernel; padding is 0."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 2, 3, padding=1, stride=2)
    x = noise(1, 3, 5, 5)
    got = LowBitLayer(conv, "xnor")(x)
    bias = conv.bias
    assert bias is not None
    for out in range(2):
        alpha = conv.weight[out].abs().mean()
        for row in range(3):
            for column in range(3):
                total, size = torch.zeros(()), torch.zeros(())
                for i in range(3):
                    for j in range(3):
                        r, c = 2 * row + i - 1, 2 * column + j - 1
                        if 0 <= r < 5 and 0 <= c < 5:
                            total += (x[0, :, r, c].sign() * conv.weight[out, :, i, j].sign()).sum()
                            size += x[0, :, r, c].abs().mean() / 9
                assert_close(got[0, out, row, column], total * alpha * size + bias[out])


# ---------------------------------------------------------------- gradients


def gradient_of_weights(weight: Tensor, method: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """(gradient that reaches the exact weights, gradient of the values) for uneven factors."""
    layer = layer_of(weight, method, **settings)
    factors = noise(*weight.shape, seed=1)
    (layer.weight_values() * factors).sum().backward()
    grad = layer.layer.weight.grad
    assert isinstance(grad, Tensor)
    return grad, factors


def test_straight_through_gradients() -> None:
    weight = 1.5 * noise(4, 6)
    inside = weight.abs() <= 1
    grad, g = gradient_of_weights(weight, "bnn")
    assert_close(grad, torch.where(inside, g, 0))
    grad, g = gradient_of_weights(weight, "twn")
    assert_close(grad, g)
    grad, g = gradient_of_weights(weight, "dorefa", bits=1)
    assert_close(grad, g)
    grad, g = gradient_of_weights(weight, "xnor")
    alpha = weight.abs().mean(1, keepdim=True)
    through_scale = (g * weight.sign()).sum(1, keepdim=True) * weight.sign() / 6
    assert_close(grad, torch.where(inside, g * alpha, 0) + through_scale)


def test_the_gradient_of_dorefa_is_that_without_the_rounding() -> None:
    weight = noise(3, 4).double()
    grad, g = gradient_of_weights(weight, "dorefa", bits=4)

    def smooth(w: Tensor) -> Tensor:
        return ((w.tanh() / w.tanh().abs().max()) * g).sum()

    for index in range(weight.numel()):
        step = torch.zeros(12, dtype=torch.float64)
        step[index] = 1e-6
        step = step.view(3, 4)
        slope = (smooth(weight + step) - smooth(weight - step)) / 2e-6
        assert_close(grad.flatten()[index], slope, rtol=1e-5, atol=1e-6)


def test_rounded_gradients_are_few_and_right_on_average() -> None:
    g = noise(2, 50)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2000):
        x = torch.zeros(2, 50, requires_grad=True)
        (round_gradient(x, 2, generator=generator) * g).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert all(len(row.unique()) <= 4 for row in found[0])
    # One step is 2 max / 3; the mean of 2000 is right to about step / sqrt(12 * 2000) * 5.
    largest = g.abs().amax(1, keepdim=True)
    inner = g.abs() < 0.99 * largest
    error = (torch.stack(found).mean(0) - g) / largest
    assert error[inner].abs().max() < 0.05


def test_round_unit_has_the_gradient_of_the_clip() -> None:
    x = torch.tensor([-0.5, 0.2, 0.7, 1.5], requires_grad=True)
    (round_unit(x, 3) * torch.tensor([1.0, 2, 3, 4])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2, 3, 0]


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_is_exact(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    for shape in ((0,), (1,), (7,), (8,), (3, 5, 2), (64, 9)):
        codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
        stored = pack_bits(codes, bits)
        assert len(stored) == math.ceil(codes.numel() * bits / 8)
        assert unpack_bits(stored, bits, shape).equal(codes)
        text = "".join(f"{code:0{bits}b}"[::-1] for code in codes.flatten().tolist())
        whole = int(text[::-1] or "0", 2)  # as one number, the lowest bit first
        assert bytes(stored.tolist()) == whole.to_bytes(len(stored), "little")


METHODS: list[tuple[str, dict[str, int], int]] = [
    ("dorefa", {"bits": 4, "input_bits": 4}, 4), ("dorefa", {"bits": 3}, 3), ("dorefa", {"bits": 1}, 1),
    ("twn", {}, 2), ("bnn", {}, 1), ("xnor", {}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("method", "settings", "bits"), METHODS)
def test_the_file_is_as_small_as_it_says(
    method: Any, settings: Any, bits: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(64, 128, 3, padding=1, groups=2), nn.BatchNorm2d(128), nn.Conv2d(128, 96, 3)
    )
    model = low_bit(plain, method, **settings).eval()
    small = packed(model)
    x = noise(2, 64, 6, 6)
    with torch.no_grad():
        assert_close(small(x), model(x), rtol=1e-5, atol=1e-5)
    torch.save(small.state_dict(), tmp_path / "small.pt")
    weights = sum(m.weight.numel() for m in plain if isinstance(m, nn.Conv2d))
    rest = 4 * (5 * 128 + 2 * 96 + 128)  # BatchNorm, biases, scales
    size = (tmp_path / "small.pt").stat().st_size
    assert size < math.ceil(weights * bits / 8) + rest + 6000  # names and records of torch.save
    again = packed(low_bit(plain, method, **settings))
    again.load_state_dict(torch.load(tmp_path / "small.pt"))
    assert_close(again(x), small(x), rtol=0, atol=0)


# ---------------------------------------------------------------- thresholds


def norms() -> list[Any]:
    torch.manual_seed(0)
    found: list[Any] = []
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        norm: Any = kind(32).eval()
        norm.running_mean.normal_(0, 10)
        norm.running_var.uniform_(0.1, 100)
        nn.init.normal_(norm.weight)  # negative ones too
        nn.init.normal_(norm.bias)
        with torch.no_grad():
            norm.weight[:4] = 0
            norm.bias[:2] = torch.tensor([0.0, -1.0])
            norm.running_mean[4:12] = (
                torch.arange(8) - 4.0
            )  # ties at whole numbers, in both directions
            norm.bias[4:12] = 0
        found.append(norm)
    return [*found, nn.BatchNorm2d(32, affine=False).eval()]


def by_definition(norm: Any, x: Tensor) -> Tensor:
    """The sign of BatchNorm as it is defined, in float64, with +1 at 0."""
    per_channel = [-1, *[1] * (x.ndim - 2)]
    mean, var = (t.double().view(per_channel) for t in (norm.running_mean, norm.running_var))
    y = (x.double() - mean) / (var + norm.eps).sqrt()
    if norm.affine:
        y = y * norm.weight.detach().double().view(per_channel)
        y = y + norm.bias.detach().double().view(per_channel)
    return torch.where(y >= 0, 1.0, -1.0).float()


@pytest.mark.parametrize("norm", norms(), ids=lambda norm: type(norm).__name__)
def test_thresholds_are_equal_at_all_whole_numbers(norm: Any) -> None:
    sums = torch.arange(-600, 601.0)[:, None].expand(-1, 32)
    dims = {nn.BatchNorm1d: 0, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[type(norm)]
    sums = sums.reshape(-1, 32, *[1] * dims)
    got = SignThreshold(norm)(sums)
    assert_close(got, by_definition(norm, sums), rtol=0, atol=0)
    with torch.no_grad():
        y = norm(sums)
    clear = y.abs() > 1e-5  # nearer to 0 torch's own rounding decides
    assert clear.float().mean() > 0.95 if norm.affine else clear.all(0).sum() == 0
    assert got[clear].equal(y[clear].sign())
    if norm.affine:
        assert (got[:, 0] == 1).all()  # weight and bias are 0: the sign of 0 is +1
        assert (got[:, 1] == -1).all()
        for channel in range(4, 12):  # at the tie itself +1, whatever the direction
            assert (got[600 + channel - 8, channel] == 1).all()


def test_thresholds_are_equal_at_their_neighbors() -> None:
    norm = norms()[1]
    folded = SignThreshold(norm)
    finite = folded.threshold.isfinite()
    assert finite.sum() == 28
    assert {True, False} == set(folded.rising[finite].tolist())
    inf = torch.tensor(math.inf)
    steps = [folded.threshold.nextafter(end) for end in (-inf, inf)]
    signs = []
    for numbers in (*steps, folded.threshold):
        x = torch.where(finite, numbers, 0).view(1, 32, 1, 1)
        signs.append(folded(x))
        assert signs[-1].equal(by_definition(norm, x))
    assert signs[0].flatten()[finite].equal(-signs[1].flatten()[finite])


# ---------------------------------------------------------------- refusals


def test_refusals() -> None:
    conv: Any = nn.Conv2d(3, 4, 3)
    for wrong in ({"method": "twn", "bits": 2}, {"method": "dorefa"}, {"method": "trit"}):
        with pytest.raises(ValueError, match="'dorefa' takes bits"):
            LowBitLayer(conv, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"from 1 to 8, got \[9\]"):
        LowBitLayer(conv, "dorefa", bits=9)
    with pytest.raises(TypeError, match=r"nn\.Conv2d with zero padding or nn\.Linear"):
        LowBitLayer(nn.Conv2d(3, 4, 3, padding_mode="reflect"), "bnn")
    with pytest.raises(ValueError, match="has the name 5"):
        low_bit(nn.Sequential(conv), "bnn", skip=["5"])
    with pytest.raises(ValueError, match="besides those that are skipped"):
        low_bit(nn.Sequential(conv), "bnn", skip=["0"])
    with pytest.raises(ValueError, match="no layer has few bits"):
        packed(conv)
    with pytest.raises(ValueError, match="4 does not fit into 2 bits"):
        pack_bits(torch.tensor([4], dtype=torch.uint8), 2)
    with pytest.raises(ValueError, match=r"\(4,\) of 2 bits is 1 bytes, got 2"):
        unpack_bits(torch.zeros(2, dtype=torch.uint8), 2, (4,))
    with pytest.raises(ValueError, match="no running statistics"):
        SignThreshold(nn.BatchNorm2d(3, track_running_stats=False))


# ---------------------------------------------------------------- accuracy


def embedded(name: str) -> tuple[Tensor, Tensor]:
    path = Path(flambeau.data.__file__).parent / "embedded" / f"fashion_mnist_{name}.rec"
    with RecordReader(path) as reader:
        records = [unpack(record) for record in reader]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(payload))) for _, payload in records])
    images = torch.from_numpy(pixels)[:, None].float().div(255).sub(0.286).div(0.353)
    return images, torch.tensor([int(header.label) for header, _ in records])


def network(act: type[nn.Module]) -> nn.Sequential:
    """An exact first and last layer, three convolutions between, each behind BatchNorm and `act`."""

    def block(num_in: int, num_out: int, *, pool: bool = True) -> list[nn.Module]:
        conv = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False)
        pools: list[nn.Module] = [nn.MaxPool2d(2)] if pool else []
        return [conv, *pools, nn.BatchNorm2d(num_out), act()]

    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), act(),
        *block(32, 64), *block(64, 64), *block(64, 128, pool=False), nn.Flatten(), nn.Linear(128 * 9, 10),
    )  # fmt: skip


def accuracy_after_training(method: str | None, settings: dict[str, int], epochs: int) -> float:
    torch.manual_seed(0)
    images, labels = embedded("train")
    model: nn.Module = network(nn.ReLU if method in (None, "twn") else nn.Identity)
    if method is not None:
        chosen: Any = method
        model = low_bit(model, chosen, skip=["0", "15"], **settings)
    steps = epochs * (len(images) // 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images))[: len(images) // 64 * 64].split(64):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model = model.eval() if method is None else packed(model)
    images, labels = embedded("val")
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings", "bound"),
    [
        (None, {}, 0.85),
        ("dorefa", {"bits": 4, "input_bits": 4}, 0.85),
        ("dorefa", {"bits": 2, "input_bits": 2}, 0.82),
        ("dorefa", {"bits": 1, "input_bits": 2, "gradient_bits": 6}, 0.84),
        ("twn", {}, 0.84),
        ("bnn", {}, 0.83),
        ("xnor", {}, 0.82),
    ],
)
def test_accuracy_on_the_embedded_images(method: str | None, settings: Any, bound: float) -> None:
    """Six epochs, the packed model, 1000 images that were not trained on."""
    assert accuracy_after_training(method, settings, epochs=6) > bound


def test_float16_weights_that_are_zero_or_many() -> None:
    zeros = nn.Linear(4, 3).half()
    nn.init.zeros_(zeros.weight)
    assert LowBitLayer(zeros, "dorefa", bits=2).weight_values().isfinite().all()
    many = nn.Linear(512, 512).half()
    nn.init.ones_(many.weight)  # their sum is above 65504
    assert LowBitLayer(many, "twn").weight_values().unique().tolist() == [1.0]


@pytest.mark.parametrize("bits", [0, 9, -1, 1.5])
def test_bits_out_of_range_are_refused(bits: Any) -> None:
    codes = torch.zeros(8, dtype=torch.uint8)
    for call in (round_unit, round_gradient, pack_bits):
        with pytest.raises(ValueError, match=rf"from 1 to 8, got \[{bits}\]"):
            call(codes.float() if call is not pack_bits else codes, bits)
    with pytest.raises(ValueError, match=rf"from 1 to 8, got \[{bits}\]"):
        unpack_bits(codes, bits, (8,))


def test_codes_that_are_no_bytes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"uint8, got torch\.int64"):
        pack_bits(torch.tensor([-1, 3]), 2)


def test_a_gradient_of_one_number_per_sample_has_its_own_range() -> None:
    x = torch.zeros(3, requires_grad=True)
    round_gradient(x, 2).backward(torch.tensor([1.0, 2.0, 4.0]))
    assert x.grad is not None and x.grad.tolist() == [1.0, 2.0, 4.0]
    empty = torch.zeros(2, 0, requires_grad=True)
    round_gradient(empty, 2).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (2, 0)


def test_one_string_is_not_a_list_of_names() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(11)])
    with pytest.raises(TypeError, match=r"\['10'\]"):
        low_bit(model, "twn", skip="10")  # it would skip '1' and '0'
