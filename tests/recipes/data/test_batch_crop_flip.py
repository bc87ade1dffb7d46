"""Against padding by NumPy sample by sample, and a cutout written with a loop."""

import copy
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from flambeau.recipes.data.batch_crop_flip import batch_crop_flip
from flambeau.recipes.data.sample_order import sample_seeds

SEEDS = sample_seeds(torch.arange(600), seed=3, epoch=1)
MANY = sample_seeds(torch.arange(4000), seed=0, epoch=0)


def images(num_images=600, channels=3, height=12, width=14, dtype=torch.uint8):
    """Each pixel of an image is unique, and none is 0 or 255."""
    values = torch.arange(height * width) % 250 + 1
    x = values.view(1, 1, height, width) + torch.arange(channels).view(1, -1, 1, 1)
    return x.expand(num_images, -1, -1, -1).to(dtype)


def draw(seed, stream, below):
    """A sample's own number, as sample_seeds makes those of an epoch."""
    return (int(sample_seeds(torch.tensor([seed]), seed=stream, epoch=0)) >> 11) % (1 << 53) % below


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("padding", [0, 1, 4, 11])
def test_equals_numpy_sample_by_sample(padding, flip):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (600, 3, 12, 14), dtype=torch.uint8, generator=generator)
    ours = batch_crop_flip(x, SEEDS, padding=padding, flip=flip)
    for k, seed in enumerate(SEEDS.tolist()):
        padded = np.pad(x[k].numpy(), [(0, 0), (padding,) * 2, (padding,) * 2], mode="reflect")
        top, left = (draw(seed, stream, 2 * padding + 1) for stream in (2, 3))
        theirs = padded[:, top : top + 12, left : left + 14]
        if flip and draw(seed, 1, 2):
            theirs = theirs[:, :, ::-1]
        np.testing.assert_array_equal(ours[k].numpy(), theirs)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    for k in (0, 5, 599):
        alone = batch_crop_flip(x[k : k + 1], SEEDS[k : k + 1], padding=padding, flip=flip)
        assert torch.equal(alone, ours[k : k + 1])


@pytest.mark.parametrize("border", ["reflect", "constant"])
def test_a_shift_is_a_crop_of_the_padded_image(border):
    x = images()
    ours = batch_crop_flip(x, SEEDS, padding=3, border=border, flip=False, value=255)
    settings = (
        {"mode": "reflect"} if border == "reflect" else {"mode": "constant", "constant_values": 255}
    )
    padded = np.pad(x[0].numpy(), [(0, 0), (3, 3), (3, 3)], **settings)
    crops = {
        padded[:, i : i + 12, j : j + 14].tobytes(): (i, j) for i in range(7) for j in range(7)
    }
    found = [crops[image.contiguous().numpy().tobytes()] for image in ours]
    counts = np.array([found.count(place) for place in crops.values()])
    expected = len(found) / 49
    # Chi-squared of 48 degrees of freedom passes 84 once in a thousand times; the seeds are fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 84


def moves(image, padding):
    """All that a shift by up to `padding` and a mirror can make of an image (H, W)."""
    padded = np.pad(image, padding, mode="reflect")
    height, width = image.shape
    shifts = range(2 * padding + 1)
    for down, right, flip in itertools.product(shifts, shifts, (False, True)):
        moved = padded[down : down + height, right : right + width]
        yield (down, right, flip), moved[:, ::-1] if flip else moved


def test_small_images_are_shifted_and_mirrored_evenly():
    image = np.random.default_rng(1).permutation(8 * 9).reshape(8, 9).astype(np.uint8)
    found = {moved.tobytes(): which for which, moved in moves(image, 2)}
    assert len(found) == 50
    batch = torch.from_numpy(image).expand(len(MANY), 3, 8, 9)
    moved = batch_crop_flip(batch, MANY, padding=2)
    assert moved.shape == (len(MANY), 3, 8, 9)
    assert moved.dtype == torch.uint8
    assert moved.is_contiguous(memory_format=torch.channels_last)
    assert (moved == moved[:, :1]).all()
    counts = dict.fromkeys(found.values(), 0)
    for each in moved[:, 0].numpy():
        counts[found[each.tobytes()]] += 1
    expected = len(MANY) / 50
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 85.4  # 49 degrees of freedom, passed once in a thousand times
    still = batch_crop_flip(batch, MANY, padding=2, flip=False)[:, 0].numpy()
    assert not any(found[each.tobytes()][2] for each in still)


def test_half_of_the_images_are_mirrored():
    x = images()
    ours = batch_crop_flip(x, SEEDS, padding=0)
    mirrored = (ours == x.flip(3)).all((1, 2, 3))
    assert torch.equal(ours[~mirrored], x[~mirrored])
    assert 260 <= mirrored.sum() <= 340


@pytest.mark.parametrize("side", [1, 4, 5, 40])
def test_cutout_is_the_papers_square(side):
    """As in section 3 and the authors' code: a uniform centre, clipped at the border."""
    x = images()
    ours = batch_crop_flip(x, SEEDS, padding=0, flip=False, cutout=side)
    masks = set()
    for row in range(12):
        for column in range(14):
            mask = np.zeros((12, 14), bool)
            top, left = row - side // 2, column - side // 2
            mask[max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)] = True
            masks.add(mask.tobytes())
    cut = (ours == 0).numpy()
    found = {mask.tobytes() for mask in cut[:, 0]}
    assert found <= masks
    assert len(found) > 0.9 * len(masks)
    assert (cut == cut[:, :1]).all()  # all channels alike
    kept = torch.from_numpy(~cut)
    assert torch.equal(ours[kept], x[kept])


def test_centres_of_cutout_are_uniform_and_independent_of_the_rest():
    x = images(600)
    single = (
        (batch_crop_flip(x, SEEDS, padding=0, flip=False, cutout=1)[:, 0] == 0).nonzero().numpy()
    )
    assert len(single) == 600
    for column, below in ((1, 12), (2, 14)):
        counts = np.bincount(single[:, column], minlength=below)
        assert ((counts - 600 / below) ** 2 / (600 / below)).sum() < 34.5  # p = 0.001, 13 d.o.f.
    mirrored = (batch_crop_flip(x, SEEDS, padding=0) == x.flip(3)).all((1, 2, 3)).numpy()
    for column in (1, 2):
        assert abs(np.corrcoef(single[:, column], mirrored)[0, 1]) < 0.13
    assert abs(np.corrcoef(single[:, 1], single[:, 2])[0, 1]) < 0.13


def test_a_square_is_cut_after_the_shift_and_stays_where_it_is():
    x = images()
    plain = batch_crop_flip(x, SEEDS, padding=2)
    cut = batch_crop_flip(x, SEEDS, padding=2, cutout=4, value=torch.tensor([251, 252, 253]))
    level = torch.tensor([251, 252, 253], dtype=torch.uint8).view(1, 3, 1, 1)
    place = batch_crop_flip(x, SEEDS, padding=0, flip=False, cutout=4) == 0
    assert torch.equal(cut, torch.where(place, level, plain))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float32, torch.float16, torch.bfloat16, torch.int64]
)
def test_any_type_and_memory_format(dtype):
    x = images(20, dtype=dtype)
    settings = {"padding": 2, "border": "constant", "cutout": 3, "value": 7.0}
    expected = batch_crop_flip(images(20), SEEDS[:20], **settings)
    before = x.clone()
    for each in (x, x.contiguous(memory_format=torch.channels_last)):
        ours = batch_crop_flip(each, SEEDS[:20], **settings)
        assert ours.dtype == dtype
        assert torch.equal(ours, expected.to(dtype))
    assert torch.equal(x, before)


def test_no_generator_is_used_and_threads_do_not_matter():
    state = torch.get_rng_state()
    x = images(64)
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda _: batch_crop_flip(x, SEEDS[:64], padding=2, cutout=4), range(8))
        )
    again = pickle.loads(pickle.dumps(batch_crop_flip))(
        x, copy.copy(SEEDS[:64]), padding=2, cutout=4
    )
    assert all(torch.equal(result, again) for result in results)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_number_is_read_on_the_host():
    """On the meta device there are none: whatever waits for the device would raise here."""
    x, seeds = torch.empty(8, 3, 12, 14, dtype=torch.uint8, device="meta"), SEEDS[:8].to("meta")
    for border in ("reflect", "constant"):
        out = batch_crop_flip(x, seeds, padding=2, border=border, cutout=4, value=3)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)


def test_an_empty_batch():
    assert batch_crop_flip(images(0), SEEDS[:0], padding=2, cutout=2).shape == (0, 3, 12, 14)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"x_NCHW": images(4)[0]}, r"images must be \(N, C, H, W\), got \(3, 12, 14\)"),
        ({"seeds": SEEDS[:3]}, r"seeds must have shape \(4,\), got \(3,\)"),
        ({"seeds": SEEDS[:4].to("meta")}, "seeds are on meta, the images on cpu"),
        ({"padding": 12}, "padding must be in 0 .. 11, got 12"),
        ({"padding": -1}, "padding must be"),
        ({"border": "zero"}, "border must be 'reflect' or 'constant', got 'zero'"),
        ({"cutout": -1}, "cutout must be at least 0, got -1"),
    ],
)
def test_what_does_not_fit_is_refused(change, rule):
    settings = {"x_NCHW": images(4), "seeds": SEEDS[:4], "padding": 2} | change
    with pytest.raises(ValueError, match=rule):
        batch_crop_flip(settings.pop("x_NCHW"), settings.pop("seeds"), **settings)


def test_seeds_that_are_no_64_bit_integers_are_refused():
    with pytest.raises(TypeError, match=r"seeds must be int64, got torch.float32"):
        batch_crop_flip(images(4), SEEDS[:4].float(), padding=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_same_pixels_without_a_wait():
    x = images()
    settings = {"padding": 2, "border": "constant", "cutout": 4, "value": 9.0}
    on_device, seeds = x.cuda(), SEEDS.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = batch_crop_flip(on_device, seeds, **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(ours.cpu(), batch_crop_flip(x, SEEDS, **settings))
