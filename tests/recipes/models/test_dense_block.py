import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.densenet import _DenseBlock

from flambeau.recipes.models.dense_block import DenseBlock, DenseLayer


def pair(num_layers: int = 3, *, dropout: float = 0.0) -> tuple[_DenseBlock, DenseBlock]:
    torch.manual_seed(0)
    theirs = _DenseBlock(num_layers, 6, bn_size=4, growth_rate=4, drop_rate=dropout).double()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
    ours = DenseBlock(num_layers, 6, growth_rate=4, dropout=dropout).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(block: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)  # dropout
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = block(x)
    weights = torch.arange(out.numel(), dtype=torch.float64, device=out.device).cos()
    weights = weights.view(out.shape).to(out.dtype)
    (out * weights).sum().backward()
    grads = [p.grad for p in block.parameters() if p.grad is not None]
    assert x.grad is not None
    return [out.detach(), x.grad, *grads, *block.buffers()]


def images(*, channels_last: bool = False) -> Tensor:
    x = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_equals_torchvisions_block(training: bool, channels_last: bool, dropout: float) -> None:
    theirs, ours = pair(dropout=dropout)
    x = images(channels_last=channels_last)
    for _ in range(2):  # the running statistics of two batches
        expected, got = run(theirs.train(training), x), run(ours.train(training), x)
    torch.testing.assert_close(got, expected)
    assert len(got) == 2 + 18 + 18


def test_float32_is_close() -> None:
    theirs, ours = pair()
    expected, got = run(theirs.float(), images().float()), run(ours.float(), images().float())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_statistics_are_updated_once_where_torchvisions_checkpoint_does_it_twice() -> None:
    theirs, ours = pair(1)
    twice = copy.deepcopy(theirs)
    twice.denselayer1.memory_efficient = True
    for block in (theirs, ours, twice):
        run(block, images())
    torch.testing.assert_close(
        ours.denselayer1.norm1.running_mean, theirs.denselayer1.norm1.running_mean
    )
    assert ours.denselayer1.norm1.num_batches_tracked == 1
    assert twice.denselayer1.norm1.num_batches_tracked == 2


@pytest.mark.parametrize("momentum", [None, 0.3])
def test_momentum_frozen_norms_and_no_tracking(momentum: float | None) -> None:
    theirs, ours = pair()
    for block in (theirs, ours):
        for layer in block.values():
            layer.norm1.momentum = momentum
        block.denselayer2.norm1.eval()  # frozen statistics in a training model
        block.denselayer3.norm1.track_running_stats = False
        block.denselayer1.norm1.weight.requires_grad_(False)
        block.denselayer1.conv1.weight.requires_grad_(False)
    for _ in range(3):
        expected, got = run(theirs, images()), run(ours, images())
    torch.testing.assert_close(got, expected)


def test_norms_without_weights() -> None:
    theirs, ours = pair()
    for block in (theirs, ours):
        for layer in block.values():
            layer.norm1 = nn.BatchNorm2d(layer.norm1.num_features, affine=False).double()
    torch.testing.assert_close(run(ours, images()), run(theirs, images()))


def test_running_statistics_may_move_before_the_backward_pass() -> None:
    _, ours = pair()
    ours.eval()
    expected = run(ours, images())[1]
    x = images().requires_grad_()
    out = ours(x)
    for layer in ours.values():
        layer.norm1.running_mean.add_(1)
    weights = torch.arange(out.numel(), dtype=torch.float64).cos().view(out.shape)
    (grad,) = torch.autograd.grad((out * weights).sum(), x)
    torch.testing.assert_close(grad, expected)


def test_gradcheck() -> None:
    block = DenseBlock(2, 2, growth_rate=1).double()
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    kernel = block.denselayer2.conv1.weight
    assert torch.autograd.gradcheck(lambda x, _: block(x), (x, kernel))


def kept(block: nn.Module) -> int:
    """Numbers in the distinct storages that a forward pass keeps for backward, parameters aside."""
    known = {p.untyped_storage().data_ptr() for p in block.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 8
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(images().requires_grad_())
    total = sum(size for address, size in storages.items() if address not in known)
    return total if out.requires_grad else 0


def test_memory_grows_with_the_layers_and_not_with_their_square() -> None:
    """Second differences of what is kept: 0 for a line, 2 a for a parabola."""
    plain, ours = zip(*([kept(block) for block in pair(n)] for n in (2, 4, 6, 8)), strict=True)
    numbers = 2 * 5 * 4  # N * H * W

    def bends(sizes: tuple[int, ...]) -> list[int]:
        steps = [b - a for a, b in itertools.pairwise(sizes)]
        return [b - a for a, b in itertools.pairwise(steps)]

    # Plain keeps the concatenation and its ReLU: a layer more of 4 channels, twice, over 2 x 2 layers.
    few = 4 * 4 * 4  # four numbers for each of these channels: the statistics of BatchNorm
    assert bends(plain) == pytest.approx([2 * 4 * 4 * numbers] * 2, abs=few)
    assert bends(ours) == pytest.approx([0, 0], abs=few)
    assert ours[-1] < 0.6 * plain[-1]


def test_autocast_and_second_derivative() -> None:
    block = DenseBlock(2, 4, growth_rate=4)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(x)
    assert block.denselayer1.conv1.weight.dtype == torch.float32
    out.float().square().sum().backward()
    assert block.denselayer1.conv1.weight.grad is not None
    assert block.denselayer1.conv1.weight.grad.dtype == torch.float32
    (grad,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_meta_device() -> None:
    block = DenseBlock(2, 4, growth_rate=4).to("meta")
    assert block(torch.empty(2, 4, 5, 5, device="meta")).shape == (2, 12, 5, 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda() -> None:
    theirs, ours = pair()
    expected, got = (
        run(theirs.to("cuda"), images().to("cuda")),
        run(ours.to("cuda"), images().to("cuda")),
    )
    torch.testing.assert_close(got, expected)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DenseBlock(0, 4, growth_rate=4)
    with pytest.raises(ValueError, match="dropout"):
        DenseBlock(1, 4, growth_rate=4, dropout=1.0)
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(DenseLayer(4, growth_rate=2))
    with pytest.raises(TypeError, match="got SyncBatchNorm"):
        layer([torch.ones(1, 4, 2, 2)])
