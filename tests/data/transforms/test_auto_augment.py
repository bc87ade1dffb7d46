"""Against torchvision's RandAugment and TrivialAugmentWide: the operations, and what is drawn how often."""

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from flambeau.data.transforms.auto_augment import (
    OPERATIONS,
    SHAPES,
    Augmentation,
    Operation,
    apply_operations,
    draw_rand_augment,
    draw_trivial_augment_wide,
    rand_augment,
    trivial_augment_wide,
)
from flambeau.recipes.data.sample_order import sample_seeds

SEEDS = sample_seeds(torch.arange(6000), seed=0, epoch=0).tolist()
HEIGHT, WIDTH = 45, 66


def picture(channels=3):
    noise = np.random.default_rng(0).normal(0, 20, (HEIGHT, WIDTH, channels))
    y, x = np.mgrid[:HEIGHT, :WIDTH][..., None]
    waves = 120 + 90 * np.sin(x / 17 + np.arange(channels)) + 40 * np.cos(y / 9)
    return np.clip(waves + noise, 0, 255).astype(np.uint8)


class Caught(v2.RandAugment):
    """torchvision's, telling what it would do."""

    def _apply_image_or_video_transform(self, image, transform_id, magnitude, **_):
        self.caught.append((transform_id, magnitude))
        return image


class CaughtWide(v2.TrivialAugmentWide):
    _apply_image_or_video_transform = Caught._apply_image_or_video_transform


def caught(policy, times):
    policy.caught = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(times):
            policy(torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8))
    return policy.caught


def chi_squared(ours, theirs):
    """Of two samples of things, with its degrees of freedom, scaled to a standard normal."""
    keys = ours.keys() | theirs.keys()
    value = sum((ours[k] - theirs[k]) ** 2 / (ours[k] + theirs[k]) for k in keys)
    return (value - (len(keys) - 1)) / math.sqrt(2 * (len(keys) - 1))


@pytest.mark.parametrize(
    "settings", [{}, {"num_ops": 3, "magnitude": 14, "num_magnitude_bins": 20}]
)
def test_rand_augment_draws_what_torchvision_draws(settings):
    theirs = Counter(caught(Caught(**settings), 2000))
    drawn = [draw_rand_augment(HEIGHT, WIDTH, seed, **settings) for seed in SEEDS[:2000]]
    ours = Counter(operation for operations in drawn for operation in operations)
    assert ours.keys() == theirs.keys()  # names and magnitudes, with their signs, to the bit
    assert len(ours) == 14 + 9
    assert chi_squared(ours, theirs) < 3.3
    # The operations of one image do not depend on each other.
    pairs = Counter((a.name, b.name) for a, b, *_ in drawn)
    assert len(pairs) == 14 * 14
    expected = len(drawn) / 196
    value = sum((count - expected) ** 2 / expected for count in pairs.values())
    assert abs(value - 195) / math.sqrt(2 * 195) < 3.3


def test_trivial_augment_draws_what_torchvision_draws():
    theirs = Counter(caught(CaughtWide(), 6000))
    ours = Counter(map(draw_trivial_augment_wide, SEEDS))
    assert {name for name, _ in ours} == set(OPERATIONS)
    for name in OPERATIONS:
        both = [{m for n, m in drawn if n == name} for drawn in (ours, theirs)]
        space = CaughtWide._AUGMENTATION_SPACE[name]
        all_of_them = space[0](31, HEIGHT, WIDTH)
        allowed = {0.0} if all_of_them is None else set(map(float, all_of_them))
        for magnitudes in both:
            assert magnitudes <= allowed | ({-m for m in allowed} if space[1] else set())
        assert len(both[0]) >= 0.9 * len(both[1])
    assert chi_squared(*(Counter(name for name, _ in c.elements()) for c in (ours, theirs))) < 3.3
    bins, negative = Counter(), Counter()
    for name, magnitude in ours.elements():
        make, signed = CaughtWide._AUGMENTATION_SPACE[name]
        if signed:
            bins[make(31, HEIGHT, WIDTH).tolist().index(abs(magnitude))] += 1
            negative[magnitude < 0] += magnitude != 0
    expected = bins.total() / 31
    # Chi-squared of 30 degrees of freedom passes 59.7 once in a thousand times; the seeds are fixed.
    assert sum((bins[k] - expected) ** 2 / expected for k in range(31)) < 59.7
    assert abs(negative[True] / negative.total() - 0.5) < 3.3 * 0.5 / math.sqrt(negative.total())


@pytest.mark.parametrize("bins", [2, 9, 10, 31, 64])
def test_magnitudes_of_all_bins_are_torchvisions(bins):
    for magnitude in range(bins):
        ours = {
            (name, abs(size))
            for seed in SEEDS[:150]
            for name, size in draw_rand_augment(
                HEIGHT, WIDTH, seed, num_ops=2, magnitude=magnitude, num_magnitude_bins=bins
            )
        }
        space = v2.RandAugment._AUGMENTATION_SPACE
        theirs = {name: make(bins, HEIGHT, WIDTH) for name, (make, _) in space.items()}
        expected = {
            (name, 0.0 if sizes is None else float(sizes[magnitude]))
            for name, sizes in theirs.items()
        }
        assert ours == expected


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_does_what_torchvisions_does(name, channels):
    """At bins of both policies; the same pixels, but for rounding (test_color.py says where)."""
    pixels = picture(channels)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    for policy in (v2.RandAugment(), v2.TrivialAugmentWide()):
        make, signed = policy._AUGMENTATION_SPACE[name]
        sizes = make(31, HEIGHT, WIDTH)
        for bin_ in (0, 7, 9, 19, 30):
            size = 0.0 if sizes is None else float(sizes[bin_])
            for magnitude in (size, -size) if signed else (size,):
                ours = apply_operations(pixels, [Operation(name, magnitude)])
                theirs = policy._apply_image_or_video_transform(
                    tensor, name, magnitude, interpolation=policy.interpolation, fill=policy._fill
                )
                assert ours.shape == pixels.shape
                assert ours.flags.c_contiguous
                difference = np.abs(ours.astype(int) - theirs.permute(1, 2, 0).numpy())
                off = difference.max(2) > (1 if name in ("Color", "Contrast", "Sharpness") else 0)
                # Nearest neighbours whose border the place lies on.
                assert off.mean() <= (0.03 if name in ("ShearX", "ShearY", "Rotate") else 0)


@pytest.mark.parametrize("channels", [1, 3])
def test_levels_of_16_bits_are_moved_as_8_bits_are(channels):
    pixels = picture(channels)
    levels = pixels.astype(np.float32) * 16  # 12 bits
    for name in ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"):
        for magnitude in (-0.3, 0.3, 17.0):
            operations = [Operation(name, magnitude)]
            moved = apply_operations(levels, operations)
            np.testing.assert_array_equal(moved, apply_operations(pixels, operations) * 16.0)
            assert moved.dtype == np.float32


def test_levels_of_16_bits_keep_their_scale():
    levels = picture().astype(np.float32) * 16
    for seed in SEEDS[:200]:
        for augment in (rand_augment, trivial_augment_wide):
            changed = augment(levels, seed)
            assert changed.flags.c_contiguous
            assert changed.max() <= 4 * 4095  # two operations of at most twice as much


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_operations_that_move_are_torchvisions_on_tensors(channels, dtype):
    """Of any numbers and channels; nothing is rounded, and what comes in is 0."""
    rng = np.random.default_rng(channels)
    pixels = rng.normal(0, 50, (41, 37, channels)).astype(dtype)
    x_CHW = torch.from_numpy(pixels).permute(2, 0, 1)
    for name in SHAPES[1:]:
        for magnitude in (-0.317, 0.231) if name.startswith("Shear") else (-9.0, 23.0):
            moved = apply_operations(pixels, [Operation(name, magnitude)])
            assert moved.dtype == dtype and moved.flags.c_contiguous
            wanted = _by_torchvision(x_CHW, name, magnitude).permute(1, 2, 0).numpy()
            # Nearest neighbours whose border the place lies on.
            off = (moved != wanted).any(2).mean()
            assert off <= (0 if name.startswith("Translate") else 0.03), (name, magnitude, off)


def _by_torchvision(x_CHW, name, magnitude):
    places = {"ShearX": 0, "ShearY": 1, "TranslateX": 0, "TranslateY": 1}
    shear, shift = [0.0, 0.0], [0, 0]
    center = None
    if name == "Rotate":
        return F.rotate(x_CHW, magnitude)
    if name.startswith("Shear"):
        shear[places[name]] = math.degrees(math.atan(magnitude))
        center = [0, 0]
    else:
        shift[places[name]] = int(magnitude)
    return F.affine(x_CHW, angle=0, translate=shift, scale=1, shear=shear, center=center)


def test_a_policy_of_moves_draws_all_of_them_and_nothing_else():
    pixels = np.random.default_rng(0).normal(0, 1, (24, 24, 4)).astype(np.float32)
    there = {*pixels.ravel().tolist(), 0.0}
    for policy in ("randaugment", "trivialaugment"):
        augmentation = Augmentation(policy, moves_only=True)
        moved = [augmentation(pixels, seed) for seed in SEEDS[:80]]
        assert all({*x.ravel().tolist()} <= there for x in moved)
        assert len({x.tobytes() for x in moved}) > 30
    drawn = Counter(draw_trivial_augment_wide(seed, names=SHAPES).name for seed in SEEDS)
    assert {*drawn} == {*SHAPES}


def test_results_depend_on_the_seed_alone():
    pixels = picture()
    state = torch.get_rng_state()
    for augment in (rand_augment, trivial_augment_wide):
        alone = [augment(pixels, seed) for seed in SEEDS[:60]]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda seed, f=augment: f(pixels, seed), SEEDS[:60]))
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.shape == pixels.shape
            assert a.dtype == np.uint8
        assert len({image.tobytes() for image in alone}) > 30  # some have no magnitude
    np.testing.assert_array_equal(pixels, picture())
    assert torch.equal(torch.get_rng_state(), state)


def test_an_image_is_its_operations():
    pixels, seed = picture(1), SEEDS[3]
    drawn = draw_rand_augment(HEIGHT, WIDTH, seed, num_ops=4)
    assert len(drawn) == 4
    np.testing.assert_array_equal(
        rand_augment(pixels, seed, num_ops=4), apply_operations(pixels, drawn)
    )
    np.testing.assert_array_equal(rand_augment(pixels, seed, num_ops=0), pixels)
    np.testing.assert_array_equal(
        trivial_augment_wide(pixels, seed),
        apply_operations(pixels, [draw_trivial_augment_wide(seed)]),
    )


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"num_ops": -1}, "num_ops must be at least 0, got -1"),
        ({"num_magnitude_bins": 1, "magnitude": 0}, "num_magnitude_bins must be at least 2, got 1"),
        ({"magnitude": 31}, r"magnitude must be in 0 .. 30, got 31"),
        ({"magnitude": -1}, "magnitude must be in"),
    ],
)
def test_impossible_settings_are_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        rand_augment(picture(), 0, **settings)
