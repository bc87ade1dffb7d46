import inspect
import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flambeau.recipes.training import cutmix as cutmix_file
from flambeau.recipes.training import mixup as mixup_file
from flambeau.recipes.training.cutmix import cutmix

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}
HEIGHT, WIDTH = 16, 12


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


def numbered(length: int, height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """Images that are each of one value, their own number."""
    return torch.arange(float(length)).reshape(-1, 1, 1, 1).repeat(1, 2, height, width)


def boxes(alpha: float, num_calls: int) -> Tensor:
    """(calls, H, W) bool: the pasted pixels, read off two images that were exchanged."""
    generator, out = seeded(), []
    for _ in range(num_calls):
        cut, soft = cutmix(
            numbered(2), torch.tensor([0, 1]), alpha=alpha, num_classes=2, generator=generator
        )
        out.append(cut[0, 0] != 0)
        assert soft[0, 1] == out[-1].sum() / (HEIGHT * WIDTH)
    return torch.stack(out)


def boxes_of_the_authors(alpha: float, num_calls: int) -> Tensor:
    """The box of section 3.2 and of the authors' code, as it is written there, on host integers."""
    host = random.Random(0)
    out = torch.zeros(num_calls, HEIGHT, WIDTH, dtype=torch.bool)
    for box in out:
        if host.random() < 0.5:  # the permutation of two that exchanges nothing
            continue
        cut_ratio = math.sqrt(1.0 - host.betavariate(alpha, alpha))
        cut_w, cut_h = int(WIDTH * cut_ratio), int(HEIGHT * cut_ratio)
        cx, cy = host.randrange(WIDTH), host.randrange(HEIGHT)
        left, right = max(cx - cut_w // 2, 0), min(cx + cut_w // 2, WIDTH)
        top, bottom = max(cy - cut_h // 2, 0), min(cy + cut_h // 2, HEIGHT)
        box[top:bottom, left:right] = True
    return out


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_boxes_are_distributed_like_the_authors(alpha):
    ours, theirs = boxes(alpha, 1500), boxes_of_the_authors(alpha, 20_000)
    # How often each pixel is pasted, and how often a box has so many rows and columns.
    error = 0.5 * math.sqrt(1 / len(ours) + 1 / len(theirs))  # at most, of a share
    torch.testing.assert_close(
        ours.double().mean(0), theirs.double().mean(0), rtol=0, atol=4 * error
    )
    for dim, length in ((1, HEIGHT), (2, WIDTH)):
        sides = [
            x.any(3 - dim).sum(1).bincount(minlength=length + 1) / len(x) for x in (ours, theirs)
        ]
        torch.testing.assert_close(sides[0], sides[1], rtol=0, atol=4 * error)


@pytest.mark.parametrize("seed", range(8))
def test_one_rectangle_and_its_share_for_the_whole_batch(seed):
    targets = torch.tensor([3, 0, 2, 2, 1, 3])
    one_hot = torch.eye(4)[targets]
    cut, soft = cutmix(numbered(6), targets, alpha=1.0, num_classes=4, generator=seeded(seed))
    assert torch.equal(cut[:, 0], cut[:, 1])  # all channels alike
    changed = cut[:, 0] != numbered(6)[:, 0]
    box = changed.any(0)
    assert torch.equal(box, box.any(1, keepdim=True) & box.any(0))  # rows times columns ...
    for side in (box.any(0), box.any(1)):
        assert (side[1:] != side[:-1]).sum() <= 2  # ... without a gap
    share = float(box.double().mean())
    partners = []
    for i in range(6):
        inside = cut[i, 0][box].unique()
        assert len(inside) <= 1  # one partner
        partner = int(inside[0]) if len(inside) else i
        partners.append(partner)
        assert torch.equal(changed[i], box if partner != i else torch.zeros_like(box))
        expected = (1 - share) * one_hot[i] + share * one_hot[partner]
        torch.testing.assert_close(soft[i], expected, rtol=0, atol=1e-7)
    assert sorted(partners) == list(range(6))


def test_a_box_inside_the_image_has_twice_a_half_side():
    inner = [box for box in boxes(1.0, 400) if not (box[[0, -1]].any() or box[:, [0, -1]].any())]
    sides = {(int(box.any(1).sum()), int(box.any(0).sum())) for box in inner}
    assert len(sides) > 4
    assert all(rows % 2 == columns % 2 == 0 for rows, columns in sides)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8]
)
def test_pixels_are_copied_in_any_type(dtype):
    images = numbered(4).to(dtype)
    cut, soft = cutmix(images, torch.arange(4), alpha=1.0, num_classes=4, generator=seeded(2))
    expected, _ = cutmix(
        numbered(4), torch.arange(4), alpha=1.0, num_classes=4, generator=seeded(2)
    )
    assert cut.dtype == dtype
    assert torch.equal(cut.float(), expected)
    assert not torch.equal(cut, images)
    assert soft.dtype == torch.float32


def test_memory_format_and_inputs_are_kept():
    images = torch.rand(4, 3, 8, 8).to(memory_format=torch.channels_last)
    before = images.clone()
    cut, _ = cutmix(images, torch.arange(4), alpha=1.0, num_classes=4, generator=seeded(2))
    assert cut.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, before)
    plain, _ = cutmix(
        images.contiguous(), torch.arange(4), alpha=1.0, num_classes=4, generator=seeded(2)
    )
    assert plain.is_contiguous()
    assert torch.equal(plain, cut)


def test_probabilities_are_shared_like_classes():
    targets = torch.tensor([0, 1, 2, 1])
    by_class = cutmix(numbered(4), targets, alpha=1.0, num_classes=3, generator=seeded(2))[1]
    soft = cutmix(
        numbered(4), torch.eye(3)[targets].double(), alpha=1.0, num_classes=3, generator=seeded(2)
    )[1]
    assert soft.dtype == torch.float32
    torch.testing.assert_close(soft, by_class, rtol=0, atol=0)


def test_alpha_zero_returns_the_images_with_soft_targets():
    images, generator = numbered(2), seeded()
    state = generator.get_state()
    same, soft = cutmix(images, torch.tensor([1, 0]), alpha=0, num_classes=2, generator=generator)
    assert same is images
    assert soft.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert torch.equal(generator.get_state(), state)


def test_the_generator_alone_decides():
    generator = seeded(1)
    first, second = (
        cutmix(numbered(8), torch.arange(8), alpha=1.0, num_classes=8, generator=generator)
        for _ in range(2)
    )
    with torch.random.fork_rng():
        torch.manual_seed(77)
        again = cutmix(numbered(8), torch.arange(8), alpha=1.0, num_classes=8, generator=seeded(1))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], second[0])


def test_nothing_is_read_on_the_host():
    with Recorder() as recorder:
        cutmix(numbered(4), torch.arange(4), alpha=1.0, num_classes=4, generator=seeded())
    assert "where" in recorder.names  # it does record
    assert not recorder.names & WAITS


def test_images_may_be_elsewhere_than_the_generator():
    images = torch.empty(4, 3, 8, 8, device="meta")
    targets = torch.empty(4, dtype=torch.int64, device="meta")
    cut, soft = cutmix(images, targets, alpha=1.0, num_classes=5, generator=seeded())
    assert cut.device.type == soft.device.type == "meta"
    assert (cut.shape, soft.shape) == ((4, 3, 8, 8), (4, 5))


@pytest.mark.parametrize("name", ["_beta", "_moved", "_probabilities"])
def test_what_is_written_twice_stays_the_same(name):
    """A recipe imports no other one, so mixup's draws and labels are repeated here."""
    sources = [inspect.getsource(getattr(file, name)) for file in (cutmix_file, mixup_file)]
    assert sources[0] == sources[1]


@pytest.mark.parametrize(
    ("images", "targets", "alpha", "error", "message"),
    [
        (torch.zeros(2, 3, 4), torch.arange(2), 1.0, ValueError, r"must be \(N, C, H, W\)"),
        (numbered(2), torch.arange(2), -1.0, ValueError, "alpha must be 0 or in"),
        (numbered(2), torch.arange(2), math.inf, ValueError, "alpha must be 0 or in"),
        (numbered(2), torch.arange(3), 1.0, ValueError, r"must be \(2,\), got \(3,\)"),
        (numbered(2), torch.arange(2).int(), 1.0, TypeError, "int64 or floating"),
        (numbered(2), torch.zeros(2, 4), 1.0, ValueError, r"\(2, 3\), got \(2, 4\)"),
        (numbered(2), torch.arange(2) + 2, 1.0, RuntimeError, "out of bounds"),
    ],
)
def test_bad_input_is_refused(images, targets, alpha, error, message):
    with pytest.raises(error, match=message):
        cutmix(images, targets, alpha=alpha, num_classes=3, generator=seeded())


def test_a_generator_on_a_third_device_is_refused():
    elsewhere = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ValueError, match=r"device of the images, cpu, got cuda"):
        cutmix(numbered(2), torch.arange(2), alpha=1.0, num_classes=2, generator=elsewhere)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_cuda_nothing_waits(device):
    images, targets = numbered(4).cuda(), torch.arange(4).cuda()
    generator = torch.Generator(device).manual_seed(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cut, soft = cutmix(images, targets, alpha=1.0, num_classes=4, generator=generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The mean of an image is the mean number of its labels.
    numbers = torch.arange(4.0, device="cuda")
    torch.testing.assert_close(cut.mean((1, 2, 3)), soft @ numbers, rtol=0, atol=1e-5)
    if device == "cpu":
        here = cutmix(numbered(4), torch.arange(4), alpha=1.0, num_classes=4, generator=seeded(2))
        torch.testing.assert_close(cut.cpu(), here[0], rtol=0, atol=0)
