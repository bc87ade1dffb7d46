import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flambeau.recipes.training.mixup import mixup

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}


class Recorder(TorchDispatchMode):
    """The names of all operations; the ones in WAITS read a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shares(alpha: float, num_calls: int, seed: int = 0) -> Tensor:
    """lam of many calls, read off two one-hot images that were exchanged."""
    generator, targets = seeded(seed), torch.tensor([0, 1])
    out = [
        mixup(torch.eye(2), targets, alpha=alpha, num_classes=2, generator=generator)[0]
        for _ in range(num_calls)
    ]
    mixed = torch.stack(out)
    torch.testing.assert_close(mixed[:, 0, 0], mixed[:, 1, 1], rtol=0, atol=0)  # one lam a call
    exchanged = mixed[:, 0, 1] > 0
    # A half of the permutations of two is the identity, which hides lam.
    assert 0.4 * num_calls < exchanged.sum() < 0.6 * num_calls
    return mixed[exchanged, 0, 0].double()


def distance(a: Tensor, b: Tensor) -> float:
    """Kolmogorov and Smirnov's: the largest difference of the two empirical distributions."""
    points = torch.cat([a, b]).sort().values
    cdfs = [torch.searchsorted(x.sort().values, points, right=True) / len(x) for x in (a, b)]
    return float((cdfs[0] - cdfs[1]).abs().max())


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_share_is_beta_distributed(alpha):
    ours = shares(alpha, 5000)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        theirs = torch.distributions.Beta(alpha, alpha).sample((50_000,)).double()
    # 1.95: the two-sample test at the level 0.001.
    assert distance(ours, theirs) < 1.95 * math.sqrt(1 / len(ours) + 1 / len(theirs))
    variance = 1 / (4 * (2 * alpha + 1))
    kurtosis = 3 - 6 / (2 * alpha + 3)
    assert abs(ours.mean() - 0.5) < 3 * math.sqrt(variance / len(ours))
    assert abs(ours.var() - variance) < 3 * variance * math.sqrt((kurtosis - 1) / len(ours))


def test_share_of_alpha_one_half_follows_the_arcsine_law():
    ours = shares(0.5, 4000).sort().values
    law = 2 / math.pi * torch.asin(ours.sqrt())
    steps = torch.arange(1, len(ours) + 1) / len(ours)
    assert (law - steps).abs().max() < 1.95 / math.sqrt(len(ours))


def test_a_tiny_alpha_is_a_coin_and_a_huge_one_a_half():
    """Where Gamma(alpha) in float32 would be 0 twice, and lam NaN or one half."""
    # A share below 2e-38 hides that images were exchanged, so the coin is read off the pixels.
    mixed = [
        mixup(torch.eye(2), torch.tensor([0, 1]), alpha=1e-6, num_classes=2, generator=seeded(i))
        for i in range(400)
    ]
    own = torch.stack([m[0][0, 0] for m in mixed])
    assert torch.all((own < 1e-3) | (own > 1 - 1e-3))
    assert 60 < int((own < 0.5).sum()) < 140  # exchanged (1/2) and lam = 0 (1/2)
    torch.testing.assert_close(
        shares(1e6, 100), torch.full_like(shares(1e6, 100), 0.5), rtol=0, atol=2e-3
    )


def test_every_image_and_its_label_are_the_same_blend():
    images = torch.rand(6, 3, 4, 5, generator=seeded(9))
    targets = torch.tensor([3, 0, 2, 2, 1, 3])
    one_hot = torch.eye(4)[targets]
    mixed, soft = mixup(images, targets, alpha=1.0, num_classes=4, generator=seeded(3))
    # Which image came in, and how much of it: the least squares of the pixels say.
    partners, lams = [], []
    for i in range(6):
        fits = []
        for j in set(range(6)) - {i}:
            difference = (images[i] - images[j]).flatten()
            lam = float((mixed[i] - images[j]).flatten() @ difference / (difference @ difference))
            blend = lam * images[i] + (1 - lam) * images[j]
            fits.append((float((blend - mixed[i]).abs().max()), j, lam))
        error, j, lam = min(fits)
        assert error < 1e-5
        partners.append(j)
        lams.append(lam)
        torch.testing.assert_close(
            soft[i], lam * one_hot[i] + (1 - lam) * one_hot[j], rtol=0, atol=1e-5
        )
    assert sorted(partners) == list(range(6))
    assert 0.01 < lams[0] < 0.99  # this seed blends
    torch.testing.assert_close(torch.tensor(lams), torch.full((6,), lams[0]), rtol=0, atol=1e-5)


def test_probabilities_are_blended_like_classes():
    images, targets = torch.rand(5, 2), torch.tensor([0, 1, 2, 1, 0])
    by_class = mixup(images, targets, alpha=0.7, num_classes=3, generator=seeded())
    for dtype in (torch.float32, torch.float64):
        one_hot = torch.eye(3, dtype=dtype)[targets]
        soft = mixup(images, one_hot, alpha=0.7, num_classes=3, generator=seeded())[1]
        assert soft.dtype == torch.float32
        torch.testing.assert_close(soft, by_class[1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_labels_get_the_share_that_the_pixels_get(dtype):
    images = torch.eye(4, dtype=dtype)
    mixed, soft = mixup(images, torch.arange(4), alpha=1.0, num_classes=4, generator=seeded(5))
    assert mixed.dtype == dtype
    assert soft.dtype == torch.float32
    own = mixed.diagonal().float()
    assert 0.01 < own[0] < 0.99
    torch.testing.assert_close(soft.diagonal(), own, rtol=0, atol=1e-7)
    torch.testing.assert_close(soft.sum(1), torch.ones(4), rtol=0, atol=1e-6)


def test_memory_format_and_inputs_are_kept():
    images = torch.rand(4, 3, 5, 6).to(memory_format=torch.channels_last)
    targets = torch.arange(4)
    before = images.clone()
    mixed, _ = mixup(images, targets, alpha=1.0, num_classes=4, generator=seeded(5))
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, before)
    assert not torch.equal(mixed, images)


def test_alpha_zero_returns_the_images_with_soft_targets():
    images, generator = torch.rand(3, 2), seeded()
    state = generator.get_state()
    same, soft = mixup(images, torch.tensor([1, 0, 1]), alpha=0, num_classes=2, generator=generator)
    assert same is images
    assert soft.tolist() == [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]
    assert soft.dtype == torch.float32
    assert torch.equal(generator.get_state(), state)


def test_the_generator_alone_decides():
    images, targets = torch.rand(8, 4), torch.arange(8)
    generator = seeded(1)
    first, second = (
        mixup(images, targets, alpha=1.0, num_classes=8, generator=generator) for _ in range(2)
    )
    with torch.random.fork_rng():
        torch.manual_seed(77)
        again = mixup(images, targets, alpha=1.0, num_classes=8, generator=seeded(1))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], second[0])


def test_gradients_flow_to_the_images():
    images = torch.rand(3, 2, requires_grad=True)
    mixed, _ = mixup(images, torch.arange(3), alpha=1.0, num_classes=3, generator=seeded())
    mixed.sum().backward()
    torch.testing.assert_close(images.grad, torch.ones(3, 2), rtol=0, atol=1e-6)


def test_nothing_is_read_on_the_host():
    with Recorder() as recorder:
        mixup(torch.rand(4, 2), torch.arange(4), alpha=0.2, num_classes=4, generator=seeded())
    assert "lerp" in recorder.names  # it does record
    assert not recorder.names & WAITS
    with Recorder() as recorder:
        torch.ones(()).item()
    assert recorder.names & WAITS


def test_images_may_be_elsewhere_than_the_generator():
    images = torch.empty(4, 3, 2, 2, device="meta")
    targets = torch.empty(4, dtype=torch.int64, device="meta")
    mixed, soft = mixup(images, targets, alpha=1.0, num_classes=5, generator=seeded())
    assert mixed.device.type == soft.device.type == "meta"
    assert (mixed.shape, soft.shape) == ((4, 3, 2, 2), (4, 5))


@pytest.mark.parametrize(
    ("images", "targets", "alpha", "error", "message"),
    [
        (torch.zeros(2, 3).byte(), torch.arange(2), 1.0, TypeError, "normalize first"),
        (torch.zeros(2, 3), torch.arange(2), -1.0, ValueError, "alpha must be 0 or in"),
        (torch.zeros(2, 3), torch.arange(2), math.nan, ValueError, "alpha must be 0 or in"),
        (torch.zeros(2, 3), torch.arange(2), 1e7, ValueError, "alpha must be 0 or in"),
        (torch.zeros(2, 3), torch.arange(2), 1e-7, ValueError, "alpha must be 0 or in"),
        (torch.zeros(2, 3), torch.arange(3), 1.0, ValueError, r"must be \(2,\), got \(3,\)"),
        (torch.zeros(2, 3), torch.arange(2).int(), 1.0, TypeError, "int64 or floating"),
        (torch.zeros(2, 3), torch.zeros(2, 4), 1.0, ValueError, r"\(2, 3\), got \(2, 4\)"),
        (torch.zeros(2, 3), torch.arange(2) + 2, 1.0, RuntimeError, "out of bounds"),
    ],
)
def test_bad_input_is_refused(images, targets, alpha, error, message):
    with pytest.raises(error, match=message):
        mixup(images, targets, alpha=alpha, num_classes=3, generator=seeded())


def test_a_generator_on_a_third_device_is_refused():
    elsewhere = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ValueError, match=r"device of the images, cpu, got cuda"):
        mixup(torch.eye(2), torch.arange(2), alpha=1.0, num_classes=2, generator=elsewhere)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_cuda_nothing_waits(device):
    images, targets = torch.eye(4).cuda(), torch.arange(4).cuda()
    generator = torch.Generator(device).manual_seed(5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixed, soft = mixup(images, targets, alpha=1.0, num_classes=4, generator=generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(mixed, soft, rtol=0, atol=1e-6)
    if device == "cpu":
        here = mixup(torch.eye(4), torch.arange(4), alpha=1.0, num_classes=4, generator=seeded(5))
        torch.testing.assert_close(mixed.cpu(), here[0], rtol=0, atol=1e-6)
