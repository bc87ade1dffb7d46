"""Against torchvision's RandomErasing: how often, where, how large and what is written."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from flambeau.recipes.data import random_erasing as module
from flambeau.recipes.data.random_erasing import random_erasing
from flambeau.recipes.data.sample_order import sample_seeds

NUM = 4000
SEEDS = sample_seeds(torch.arange(NUM), seed=0, epoch=0)
LIMIT = 1.95 * math.sqrt(2 / NUM)  # passed once in a thousand times; the seeds are fixed


def boxes(erased):
    """(N, 4) of top, left, height, width of the ones in (N, H, W), which must be rectangles."""
    rows, columns = erased.any(2), erased.any(1)
    assert (erased == (rows[:, :, None] & columns[:, None])).all()
    height, width = rows.sum(1), columns.sum(1)
    assert (erased.sum((1, 2)) == height * width).all()
    for line, length in ((rows, height), (columns, width)):
        assert ((np.diff(line.astype(int), axis=1, prepend=0, append=0) == 1).sum(1) <= 1).all()
        assert (line.sum(1) == length).all()
    return np.stack([rows.argmax(1), columns.argmax(1), height, width], 1)


def ours(height, width, **settings):
    x = torch.ones(1, 1, 1, 1).expand(NUM, 1, height, width)
    return boxes((random_erasing(x, seeds=SEEDS, **settings)[:, 0] == 0).numpy())


def theirs(height, width, **settings):
    erasing = v2.RandomErasing(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        image = torch.ones(1, height, width)
        found = [erasing.make_params([image]) for _ in range(NUM)]
        kept = torch.rand(NUM) >= settings.get("p", 0.5)
    found = [[p["i"], p["j"], p["h"], p["w"]] if p["v"] is not None else [0] * 4 for p in found]
    return np.where(kept.numpy()[:, None], 0, np.array(found))


def distance(a, b):
    """Kolmogorov and Smirnov's, between two samples."""
    points = np.concatenate([a, b])
    return max(abs(np.mean(a <= p) - np.mean(b <= p)) for p in np.unique(points))


@pytest.mark.parametrize(
    ("height", "width", "settings"),
    [
        (32, 32, {}),
        (40, 24, {"scale": (0.1, 0.9), "ratio": (0.2, 5.0)}),
        (30, 30, {"p": 0.9, "scale": (0.3, 0.3), "ratio": (1.0, 1.0)}),
    ],
)
def test_rectangles_are_distributed_as_torchvisions(height, width, settings):
    a = ours(height, width, **{{"p": "probability"}.get(k, k): v for k, v in settings.items()})
    b = theirs(height, width, **settings)
    for column in range(4):
        assert distance(a[:, column], b[:, column]) < LIMIT
    assert distance(a[:, 2] * a[:, 3], b[:, 2] * b[:, 3]) < LIMIT
    a, b = (rows[rows[:, 2] > 0] for rows in (a, b))
    assert abs(len(a) - len(b)) < 3.3 * math.sqrt(NUM / 2)
    assert distance(a[:, 2] / a[:, 3], b[:, 2] / b[:, 3]) < 1.95 * math.sqrt(2 / len(b))
    # The place does not depend on the size beyond its room.
    room = (a[:, 0] + 0.5) / (height - a[:, 2] + 1)
    assert len(np.unique(a[:, 2])) == 1 or abs(np.corrcoef(room, a[:, 2])[0, 1]) < 0.08
    other_room = (a[:, 1] + 0.5) / (width - a[:, 3] + 1)
    assert abs(np.corrcoef(room, other_room)[0, 1]) < 0.08


def test_probability_0_and_1():
    assert not ours(16, 16, probability=0.0).any()
    assert (ours(16, 16, probability=1.0)[:, 2:] > 0).all()


def test_what_never_fits_is_left_alone():
    """A rectangle must be smaller than the image on both sides, as torchvision has it."""
    assert not ours(9, 9, probability=1.0, scale=(1.0, 1.0)).any()
    assert not ours(1, 30, probability=1.0).any()


def test_what_is_written():
    x = torch.rand(400, 3, 16, 16) + 10
    seeds = SEEDS[:400]
    zero = random_erasing(x, seeds=seeds)
    erased = zero == 0
    assert 0.02 < erased.float().mean() < 0.2
    mean = torch.tensor([0.1, 0.2, 0.3])
    expected = torch.where(erased, mean.view(3, 1, 1), x)
    assert torch.equal(random_erasing(x, seeds=seeds, value=mean), expected)
    assert torch.equal(random_erasing(x, seeds=seeds, value=torch.tensor(5.0)), zero + 5 * erased)
    assert torch.equal(random_erasing(x, seeds=seeds, value=5), zero + 5 * erased)
    noisy = random_erasing(x, seeds=seeds, value="random")
    assert torch.equal(noisy[~erased], x[~erased])
    noise = noisy[erased].double().sort().values
    normal = 0.5 * (1 + torch.erf(noise / math.sqrt(2)))
    places = torch.arange(1, len(noise) + 1) / len(noise)
    assert (normal - places).abs().max() < 1.95 / math.sqrt(len(noise))
    assert noise.abs().max() < 6
    box = random_erasing(torch.ones(1, 3, 64, 64), seeds=seeds[:1], probability=1.0, scale=(0.5, 0.5),
                         ratio=(1.0, 1.0), value="random")  # fmt: skip
    inside = (box[0] != 1).any(0)
    box = box[0][:, inside.any(1)][:, :, inside.any(0)]
    assert box.numel() > 5000
    for a, b in ((box[0], box[1]), (box[:, 1:], box[:, :-1]), (box[:, :, 1:], box[:, :, :-1])):
        both = torch.stack([a.flatten(), b.flatten()])
        assert torch.corrcoef(both)[0, 1].abs() < 4 / math.sqrt(a.numel())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_noise_on_the_cpu_is_that_of_other_devices(memory_format):
    """There it is made for every pixel, here only where it is written."""
    x = torch.rand(50, 3, 20, 30).contiguous(memory_format=memory_format)
    box = torch.rand(50, 1, 20, 30) < 0.3
    bits = module._bits(SEEDS[:50], 6)
    everywhere = module._normal(module._numbered(bits[:, None], torch.arange(1800))).view(
        50, 3, 20, 30
    )
    assert torch.equal(module._with_noise(x, box, bits), torch.where(box, everywhere, x))


def test_a_sample_depends_on_its_seed_alone():
    x = torch.rand(64, 3, 16, 20)
    state = torch.get_rng_state()
    for value in (0.0, "random"):
        together = random_erasing(x, seeds=SEEDS[:64], value=value)
        order = torch.arange(63, -1, -1)
        turned = random_erasing(x[order], seeds=SEEDS[:64][order], value=value)
        assert torch.equal(turned[order], together)
        with ThreadPoolExecutor(4) as pool:
            alone = pool.map(
                lambda k, v=value: random_erasing(x[k : k + 1], seeds=SEEDS[k : k + 1], value=v),
                range(64),
            )
            assert torch.equal(torch.cat(list(alone)), together)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_gives_the_seeds():
    x = torch.rand(64, 3, 16, 16)
    first, second, third = (
        random_erasing(x, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(random_erasing(x, generator=generator), first)
    assert not torch.equal(random_erasing(x, generator=generator), first)  # its state moves on


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_any_type_and_memory_format(dtype, memory_format):
    x = torch.full((32, 3, 16, 16), 9).to(dtype).contiguous(memory_format=memory_format)
    before = x.clone()
    out = random_erasing(x, seeds=SEEDS[:32], value=7)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=memory_format)
    assert torch.equal(x, before)
    assert set(out.unique().tolist()) == {7, 9}


def test_no_number_is_read_on_the_host():
    """On the meta device there are none: whatever waits for the device would raise here."""
    x, seeds = torch.empty(8, 3, 12, 14, device="meta"), SEEDS[:8].to("meta")
    for value in (0.0, "random", torch.empty(3, device="meta")):
        assert random_erasing(x, seeds=seeds, value=value).shape == x.shape


X = torch.ones(4, 3, 8, 8)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "give seeds or generator, one of the two"),
        ({"seeds": SEEDS[:4], "generator": torch.Generator()}, "one of the two"),
        ({"seeds": SEEDS[:3]}, r"seeds must be \(4,\) on cpu, got \(3,\) on cpu"),
        ({"seeds": SEEDS[:4].to("meta")}, r"got \(4,\) on meta"),
        ({"seeds": SEEDS[:4], "probability": 1.5}, r"probability must be in \[0, 1\], got 1.5"),
        ({"seeds": SEEDS[:4], "scale": (0.0, 0.3)}, r"scale must be .* got \(0.0, 0.3\)"),
        ({"seeds": SEEDS[:4], "scale": (0.5, 0.3)}, "scale must be"),
        ({"seeds": SEEDS[:4], "ratio": (2.0, 1.0)}, r"ratio must be .* got \(2.0, 1.0\)"),
        ({"seeds": SEEDS[:4], "value": "mean"}, "value must be .* got 'mean'"),
        ({"seeds": SEEDS[:4], "value": torch.ones(2)}, r"shape \(\) or \(3,\), got \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        random_erasing(X, **settings)


def test_wrong_types_are_refused():
    with pytest.raises(ValueError, match=r"images must be \(N, C, H, W\), got \(3, 8, 8\)"):
        random_erasing(X[0], seeds=SEEDS[:3])
    with pytest.raises(TypeError, match=r"seeds must be int64, got torch.int32"):
        random_erasing(X, seeds=SEEDS[:4].int())
    with pytest.raises(TypeError, match=r"'random' needs floating images, got torch.uint8"):
        random_erasing(X.to(torch.uint8), seeds=SEEDS[:4], value="random")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("where", ["seeds", "cpu generator", "cuda generator"])
def test_on_cuda_the_same_rectangles_without_a_wait(where):
    x = torch.rand(256, 3, 32, 32) + 1
    on_device, seeds = x.cuda(), SEEDS[:256].cuda()
    randomness = {"generator": torch.Generator("cuda" if "cuda" in where else "cpu").manual_seed(0)}
    if where == "seeds":
        randomness = {"seeds": seeds}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = random_erasing(on_device, **randomness)
        noisy = random_erasing(on_device, seeds=seeds, value="random")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if where == "seeds":
        randomness = {"seeds": SEEDS[:256]}
    if where == "cpu generator":
        randomness["generator"].manual_seed(0)
    if where != "cuda generator":
        # sqrt and exp may differ in the last bit, so that an edge may be rounded to the other side.
        expected = random_erasing(x, **randomness)
        assert (ours.cpu() != expected).float().mean() < 1e-3
    if where == "seeds":
        expected = random_erasing(x, **randomness, value="random")
        assert ((noisy.cpu() - expected).abs() > 1e-4).float().mean() < 1e-3


@pytest.mark.parametrize("value", [-1, 0.5, 300, math.nan])
def test_a_value_that_the_images_cannot_hold_is_refused(value: float) -> None:
    x = torch.ones(2, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"value must be one of torch\.uint8"):
        random_erasing(x, generator=torch.Generator(), value=value)


def test_an_infinite_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio must be .* finite"):
        random_erasing(torch.ones(2, 3, 8, 8), generator=torch.Generator(), ratio=(0.3, math.inf))
