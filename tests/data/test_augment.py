"""Against torchvision (distributions and pixels) and against padding by NumPy."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import CenterCrop, RandomResizedCrop, Resize

from flambeau.data.augment import (
    CROP_RATIO,
    CROP_SCALE,
    augment_small,
    eval_image,
    eval_min_side,
    random_resized_crop_box,
    train_image,
    train_min_side,
)
from flambeau.recipes.data.sample_order import sample_seeds

SEEDS = sample_seeds(torch.arange(4000), seed=0, epoch=0)


def picture(height, width, channels=3):
    noise = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    y, x = np.mgrid[:height, :width][..., None]
    return ((x + 2 * y) % 200 + noise // 5).astype(np.uint8)


def distance(a, b):
    """Kolmogorov and Smirnov's, between two samples."""
    points = np.concatenate([a, b])
    return max(abs(np.mean(a <= p) - np.mean(b <= p)) for p in np.unique(points))


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (32, 32), (100, 190)])
def test_boxes_are_distributed_as_torchvision_draws_them(height, width):
    image = torch.empty(1, height, width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = [
            RandomResizedCrop.get_params(image, list(CROP_SCALE), list(CROP_RATIO))
            for _ in range(len(SEEDS))
        ]
    ours = [random_resized_crop_box(height, width, seed) for seed in SEEDS.tolist()]
    theirs, ours = np.array(theirs, float), np.array(ours, float)
    # 1.95 * sqrt(2 / 4000) is passed once in a thousand times; the seeds are fixed.
    limit = 1.95 * math.sqrt(2 / len(SEEDS))
    for column in range(4):
        assert distance(ours[:, column], theirs[:, column]) < limit
    assert distance(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]) < limit
    assert distance(ours[:, 3] / ours[:, 2], theirs[:, 3] / theirs[:, 2]) < limit
    inside = ours[:, 2] < height  # where it is moved at all, its place does not depend on its size
    place = (ours[inside, 0] + 0.5) / (height - ours[inside, 2] + 1)
    assert abs(np.corrcoef(place, ours[inside, 2])[0, 1]) < 0.06


@pytest.mark.parametrize(("height", "width"), [(10, 400), (400, 10), (1, 1), (1, 9), (2, 3)])
def test_boxes_of_odd_images_lie_inside_and_fall_back_as_torchvision(height, width):
    boxes = {random_resized_crop_box(height, width, seed) for seed in range(300)}
    for top, left, h, w in boxes:
        assert 0 <= top <= height - h
        assert 0 <= left <= width - w
        assert min(h, w) >= 1
    if max(height, width) > 100:
        theirs = RandomResizedCrop.get_params(
            torch.empty(1, height, width), [0.9, 1.0], [0.75, 4 / 3]
        )
        assert random_resized_crop_box(height, width, 0, scale=(0.9, 1.0)) == theirs


def test_fixed_scale_and_ratio_give_the_whole_image():
    assert random_resized_crop_box(30, 40, 5, scale=(1, 1), ratio=(4 / 3, 4 / 3)) == (0, 0, 30, 40)


def test_a_box_takes_the_low_64_bits_of_any_seed():
    assert random_resized_crop_box(90, 90, -1) == random_resized_crop_box(90, 90, 2**64 - 1)


@pytest.mark.parametrize(
    ("size", "settings", "rule"),
    [
        ((0, 5), {}, "got height 0 and width 5"),
        ((5, 5), {"scale": (0, 1)}, r"scale must be .* got \(0, 1\)"),
        ((5, 5), {"scale": (0.5, 0.4)}, "scale must be"),
        ((5, 5), {"scale": (0.5, 1.1)}, "scale must be"),
        ((5, 5), {"ratio": (2, 1)}, r"ratio must be .* got \(2, 1\)"),
    ],
)
def test_impossible_boxes_are_refused(size, settings, rule):
    with pytest.raises(ValueError, match=rule):
        random_resized_crop_box(*size, 0, **settings)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_training_image_is_the_resized_box_or_its_mirror_image(channels):
    pixels = picture(90, 120, channels)
    flips = 0
    for seed in SEEDS[:100].tolist():
        top, left, height, width = random_resized_crop_box(90, 120, seed)
        crop = Image.fromarray(pixels[top : top + height, left : left + width].squeeze())
        theirs = np.array(crop.resize((32, 32), Image.Resampling.BILINEAR)).reshape(32, 32, -1)
        ours = train_image(pixels, seed, 32)
        assert ours.shape == (32, 32, channels)
        assert ours.dtype == np.uint8
        assert ours.flags.c_contiguous
        straight = np.abs(ours.astype(int) - theirs).max()
        mirrored = np.abs(ours.astype(int) - theirs[:, ::-1]).max()
        assert min(straight, mirrored) <= 1 < max(straight, mirrored)
        flips += mirrored < straight
        unflipped = train_image(pixels, seed, 32, flip=False)
        assert np.abs(unflipped.astype(int) - theirs).max() <= 1
    assert 35 <= flips <= 65


def test_a_training_image_does_not_change_its_input_nor_the_generators():
    pixels = picture(40, 40)
    before, state = pixels.copy(), torch.random.get_rng_state()
    train_image(pixels, 3, 16)
    np.testing.assert_array_equal(pixels, before)
    assert torch.equal(state, torch.random.get_rng_state())


def test_from_the_announced_side_on_no_crop_is_enlarged():
    for size in (32, 160, 224):
        side = train_min_side(size)
        least = min(min(random_resized_crop_box(side, side, seed)[2:]) for seed in SEEDS.tolist())
        assert size <= least < size * 1.05
        assert eval_min_side(size) == round(size / 0.875)


@pytest.mark.parametrize(
    ("height", "width"), [(90, 120), (121, 90), (30, 31), (300, 299), (77, 200), (37, 53)]
)
def test_an_evaluation_image_is_resized_and_cropped_as_by_torchvision(height, width):
    pixels = picture(height, width)
    theirs = CenterCrop(28)(Resize(32)(Image.fromarray(pixels)))
    ours = eval_image(pixels, 28)
    assert ours.flags.c_contiguous
    difference = np.abs(ours.astype(int) - np.array(theirs))
    assert difference.max() <= 1
    assert difference.mean() < 0.1


def test_of_a_very_long_image_the_middle_is_evaluated():
    ramp = np.arange(600, dtype=np.uint16)[None, :, None] // 3  # 0 .. 199 along 20 x 600
    pixels = np.broadcast_to(ramp, (20, 600, 1)).astype(np.uint8)
    for view in (pixels, pixels.swapaxes(0, 1)):
        assert abs(eval_image(view, 28).mean() - 99.5) < 0.5


def test_an_image_of_the_right_size_is_evaluated_as_it_is():
    pixels = picture(28, 28, 1)
    np.testing.assert_array_equal(eval_image(pixels, 28), pixels)


def test_small_odd_images_are_resized_like_by_floating_point():
    # Views with odd strides on sides of length 1 among them: torch's kernel must not be given those.
    for height, width, channels in itertools.product([1, 2, 3, 7], [1, 2, 3, 7], [1, 3]):
        pixels = picture(20, 20, channels)[5 : 5 + height, 6 : 6 + width]
        for view in (pixels, pixels.swapaxes(0, 1)):
            sides = [round(64 * side / min(view.shape[:2])) for side in view.shape[:2]]
            whole = torch.from_numpy(view.copy()).permute(2, 0, 1)[None].double()
            whole = F.interpolate(whole, sides, mode="bilinear", antialias=True)
            theirs = whole[0].permute(1, 2, 0).numpy()
            ours = eval_image(view, 56)
            top, left = (round((side - 56) / 2) for side in theirs.shape[:2])
            theirs = theirs[top : top + 56, left : left + 56]
            assert np.abs(ours - theirs).max() <= 1
            assert train_image(view, height * width, 56).shape == (56, 56, channels)


def test_a_line_of_pixels_is_evaluated_without_filling_the_memory(monkeypatch):
    asked = []

    def spy(images, size, **settings):
        asked.append(size)
        return interpolate(images, size, **settings)

    interpolate = F.interpolate
    monkeypatch.setattr(F, "interpolate", spy)
    pixels = np.arange(1_000_000, dtype=np.uint64).astype(np.uint8).reshape(1, -1, 1)
    for line in (pixels, pixels.swapaxes(0, 1)):
        assert eval_image(line, 32).shape == (32, 32, 1)
        assert train_image(line, 0, 32).shape == (32, 32, 1)
    assert max(map(max, asked)) <= 37 * 9  # whole, it would be 37 x 37,000,000


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
    batch = torch.from_numpy(image).expand(len(SEEDS), 3, 8, 9)
    moved = augment_small(batch, SEEDS, padding=2)
    assert moved.shape == (len(SEEDS), 3, 8, 9)
    assert moved.dtype == torch.uint8
    assert moved.is_contiguous(memory_format=torch.channels_last)
    assert (moved == moved[:, :1]).all()
    counts = dict.fromkeys(found.values(), 0)
    for each in moved[:, 0].numpy():
        counts[found[each.tobytes()]] += 1
    expected = len(SEEDS) / 50
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 85.4  # 49 degrees of freedom, passed once in a thousand times
    still = augment_small(batch, SEEDS, padding=2, flip=False)[:, 0].numpy()
    assert not any(found[each.tobytes()][2] for each in still)


def test_a_small_image_depends_on_its_own_seed_alone():
    images = torch.randint(0, 256, (64, 3, 12, 10), dtype=torch.uint8)
    whole = augment_small(images, SEEDS[:64], padding=3)
    order = torch.randperm(64)
    torch.testing.assert_close(
        augment_small(images[order], SEEDS[:64][order], padding=3), whole[order], rtol=0, atol=0
    )
    for i in (0, 17, 63):
        alone = augment_small(images[i : i + 1], SEEDS[i : i + 1], padding=3)
        torch.testing.assert_close(alone, whole[i : i + 1], rtol=0, atol=0)


def test_small_images_of_other_types_and_none_at_all():
    floats = torch.rand(5, 1, 8, 8)
    assert augment_small(floats, SEEDS[:5], padding=1).dtype == torch.float32
    assert augment_small(floats[:0], SEEDS[:0], padding=1).shape == (0, 1, 8, 8)
    torch.testing.assert_close(
        augment_small(floats, SEEDS[:5], padding=0, flip=False), floats, rtol=0, atol=0
    )


def test_small_images_with_wrong_settings_are_refused():
    images = torch.zeros(3, 1, 8, 6, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"seeds must have shape \(3,\), got \(2,\)"):
        augment_small(images, SEEDS[:2], padding=1)
    for padding in (-1, 6):
        with pytest.raises(ValueError, match=rf"padding must be in 0 .. 5, got {padding}"):
            augment_small(images, SEEDS[:3], padding=padding)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_small_images_on_the_gpu_are_the_same():
    images = torch.randint(0, 256, (64, 3, 12, 10), dtype=torch.uint8)
    on_gpu = augment_small(images.cuda(), SEEDS[:64].cuda(), padding=3)
    on_cpu = augment_small(images, SEEDS[:64], padding=3)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=0, atol=0)
