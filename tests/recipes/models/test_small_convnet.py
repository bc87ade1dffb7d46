import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flambeau.recipes.models.small_convnet import SmallConvNet

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def images(n: int, channels: int, size: int) -> Tensor:
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(0))


def reference(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network in evaluation mode, written out from its weights: convolution, then w * x + b."""

    def conv(x: Tensor, name: str) -> Tensor:
        weight = state[f"{name}.0.weight"]
        x = F.conv2d(x, weight, padding=weight.shape[-1] // 2)
        mean, var = state[f"{name}.1.running_mean"], state[f"{name}.1.running_var"]
        scale = state[f"{name}.1.weight"] / (var + 1e-5).sqrt()
        shift = state[f"{name}.1.bias"] - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]

    x = conv(x, "stem").clamp(min=0)
    for stage in range(3):
        x = F.max_pool2d(x, 2)
        y = conv(x, f"stages.{stage}.conv1").clamp(min=0)
        y = conv(y, f"stages.{stage}.conv2")
        x = (y + (x if stage == 0 else conv(x, f"stages.{stage}.shortcut"))).clamp(min=0)
    return x.flatten(2).mean(2) @ state["head.weight"].T + state["head.bias"]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 15, 28, 64])
def test_equals_the_network_written_out(channels: int, size: int) -> None:
    torch.manual_seed(0)
    model = SmallConvNet(channels, 7, width=8, dropout=0.5)
    x = images(4, channels, size)
    model(x), model(x)  # running statistics that are not 0 and 1
    model.eval()
    with torch.no_grad():
        logits = model(x)
    assert logits.shape == (4, 7)
    torch.testing.assert_close(logits, reference(model.state_dict(), x), rtol=1e-4, atol=1e-5)


def test_images_need_not_be_square() -> None:
    assert SmallConvNet(3, 5, width=8)(torch.zeros(2, 3, 9, 40)).shape == (2, 5)


def test_gradient_reaches_every_parameter() -> None:
    torch.manual_seed(0)
    model = SmallConvNet(1, 10, width=8)
    targets = torch.arange(16) % 10
    F.cross_entropy(model(images(16, 1, 28)), targets).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_learns_a_small_task() -> None:
    """Sixteen images of noise by heart: fails if signal or gradient is lost on the way."""
    torch.manual_seed(0)
    model = SmallConvNet(1, 4, width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, targets = images(16, 1, 8), torch.arange(16) % 4
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_initialisation_keeps_the_size_of_the_gradient() -> None:
    """He et al., section 2.2, backward case: std sqrt(2 / (out_channels * kernel area))."""
    torch.manual_seed(0)
    convs = [m for m in SmallConvNet(3, 10, width=64).modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == 9
    for conv in convs:
        expected = (2 / (conv.out_channels * conv.kernel_size[0] ** 2)) ** 0.5
        assert conv.weight.std().item() == pytest.approx(expected, rel=0.1)


def test_evaluation_is_deterministic_and_dropout_works_in_training() -> None:
    torch.manual_seed(0)
    model = SmallConvNet(1, 10, width=8, dropout=0.5)
    x = images(4, 1, 28)
    assert not torch.equal(model(x), model(x))
    model.eval()
    first = model(x)
    torch.testing.assert_close(model(x), first, rtol=0, atol=0)
    # A sample does not depend on its neighbours.
    torch.testing.assert_close(model(x[1:2]), first[1:2], rtol=1e-4, atol=1e-5)


def test_channels_last_gives_the_same_numbers() -> None:
    torch.manual_seed(0)
    model = SmallConvNet(3, 10, width=16)
    other = SmallConvNet(3, 10, width=16).to(memory_format=torch.channels_last)
    other.load_state_dict(model.state_dict())
    x = images(8, 3, 28)
    expected, got = model(x), other(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    expected.square().mean().backward()
    got.square().mean().backward()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_autocast_stays_near_float32() -> None:
    torch.manual_seed(0)
    model = SmallConvNet(1, 10, width=16)
    x = images(8, 1, 28)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("in_channels", "num_classes", "width", "dropout", "message"),
    [
        (0, 10, 32, 0.0, "must be at least 1, got 0, 10 and 32"),
        (1, 0, 32, 0.0, "must be at least 1, got 1, 0 and 32"),
        (1, 10, 0, 0.0, "must be at least 1, got 1, 10 and 0"),
        (1, 10, 32, 1.0, r"dropout must be in \[0, 1\), got 1.0"),
        (1, 10, 32, -0.1, r"dropout must be in \[0, 1\), got -0.1"),
    ],
)
def test_settings_are_refused(
    in_channels: int, num_classes: int, width: int, dropout: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SmallConvNet(in_channels, num_classes, width=width, dropout=dropout)


@pytest.mark.parametrize("shape", [(1, 1, 7, 28), (1, 1, 28, 7)])
def test_small_images_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"at least 8 x 8 px, got {shape[2]} x {shape[3]}"):
        SmallConvNet(1, 10, width=8)(torch.zeros(shape))


@pytest.mark.gpu
@needs_cuda
def test_same_numbers_on_cuda() -> None:
    torch.manual_seed(0)
    model = SmallConvNet(3, 10, width=16).eval()
    x = images(4, 3, 28)
    expected = model(x)
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        got = model.to("cuda")(x.to("cuda")).cpu()
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
