"""Changes of color and of shape against torchvision's functions, on uint8 tensors and on Pillow's images."""

import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF
from PIL import Image
from torchvision.transforms import v2

from flambeau.data.transforms import color, shape
from flambeau.images.native import kernel as native
from flambeau.recipes.data.sample_order import sample_seeds

SEEDS = sample_seeds(torch.arange(3000), seed=0, epoch=0)


def picture(height=61, width=94, channels=3):
    noise = np.random.default_rng(0).normal(0, 25, (height, width, channels))
    y, x = np.mgrid[:height, :width][..., None]
    waves = 120 + 90 * np.sin(x / 17 + np.arange(channels)) + 40 * np.cos(y / 9)
    return np.clip(waves + noise, 0, 255).astype(np.uint8)


PICTURES = [
    picture(),
    picture(channels=1),
    np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8),
    np.full((8, 9, 3), (7, 200, 255), np.uint8),
    np.zeros((5, 6, 1), np.uint8),
    picture(1, 7),
    picture(2, 2, 1),
    picture(50, 40)[::-1, ::2],
]


def theirs(function, pixels, *args, **settings):
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()
    return function(tensor, *args, **settings).permute(1, 2, 0).numpy()


def as_pil(function, pixels, *args, **settings):
    image = Image.fromarray(
        pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels)
    )
    return np.array(function(image, *args, **settings)).reshape(pixels.shape)


def called(function, pixels, *args):
    """The result, after what holds of all of them."""
    before = pixels.copy()
    result = function(pixels, *args)
    np.testing.assert_array_equal(pixels, before)
    assert result.shape == pixels.shape
    assert result.dtype == np.uint8
    assert result.flags.c_contiguous
    return result


EXACT = {
    "posterize": range(9),
    "solarize": [0.0, 8.5, 127.5, 128.0, 254.1, 255.0, -3.0],
    "adjust_brightness": [0.0, 0.1, 0.5, 0.73, 1.0, 1.3, 1.9, 4.0],
    "autocontrast": [None],
    "equalize": [None],
    "invert": [None],
}


@pytest.mark.parametrize("name", EXACT)
def test_equals_torchvision_to_the_bit(name):
    changed = 0
    for pixels in PICTURES:
        for value in EXACT[name]:
            args = () if value is None else (value,)
            ours = called(getattr(color, name), pixels, *args)
            np.testing.assert_array_equal(ours, theirs(getattr(TF, name), pixels, *args))
            changed += (ours != pixels).any()
    assert changed >= 3


@pytest.mark.parametrize(
    "name", ["adjust_contrast", "adjust_saturation", "adjust_sharpness", "adjust_hue"]
)
def test_equals_torchvision_within_rounding(name):
    """One level, and seldom: where the exact value is a whole number, fused operations decide."""
    draws = np.random.default_rng(2).uniform(-0.5, 0.5, 12).tolist()
    factors = [-0.5, 0.0, 0.5, *draws]
    if name != "adjust_hue":
        factors = [1.0 + 2 * draw for draw in factors]
    changed = off = total = 0
    for pixels in PICTURES:
        for factor in factors:
            ours = called(getattr(color, name), pixels, factor)
            expected = theirs(getattr(TF, name), pixels, factor)
            difference = np.abs(ours.astype(int) - expected)
            assert difference.max() <= 1
            off, total = off + (difference > 0).sum(), total + ours.size
            changed += (ours != pixels).any()
    assert off < 2e-4 * total
    assert changed > 20


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "name", ["adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_sharpness"]
)
def test_levels_of_16_bits_change_as_torchvisions(name, channels):
    """Which rounds them to whole levels."""
    levels = picture(channels=channels).astype(np.uint16) * 257 + 91
    for factor in (0.0, 0.4, 1.0, 1.7, 3.0):
        ours = getattr(color, name)(levels.astype(np.float32), factor)
        assert ours.dtype == np.float32
        difference = np.abs(ours - theirs(getattr(TF, name), levels, factor).astype(np.float32))
        assert (
            difference.max() < 8
        )  # its weights of grey add up to 1 - 1e-4, rounded down in between
        assert difference.mean() < 4
        assert (ours == levels).all() == (
            factor == 1.0 or (name, channels) == ("adjust_saturation", 1)
        )


@pytest.mark.skipif(native.kernel() is None, reason="the C kernel is not built")
@pytest.mark.parametrize(
    "name", ["adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue"]
)
def test_the_kernel_gives_the_same_pixels(name, monkeypatch):
    colors = np.random.default_rng(3).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    factors = (
        [-0.5, -0.31, 0.0, 0.02, 0.5] if name == "adjust_hue" else [0.0, 0.3, 0.77, 1.0, 1.9, 5.1]
    )
    cases = [(pixels, factor) for pixels in [*PICTURES, colors] for factor in factors]
    by_kernel = [getattr(color, name)(*case) for case in cases]
    monkeypatch.setattr(color, "kernel", lambda: None)
    for case, expected in zip(cases, by_kernel, strict=True):
        np.testing.assert_array_equal(getattr(color, name)(*case), expected)


def test_round_factors_are_off_by_one_level_at_most():
    """Tenths make many exact values whole; then torchvision's own answer depends on its vector unit."""
    for name in ("adjust_saturation", "adjust_sharpness", "adjust_contrast"):
        for factor in (0.1, 0.3, 0.9, 1.1, 1.3, 1.9):
            ours = getattr(color, name)(PICTURES[2], factor).astype(int)
            assert np.abs(ours - theirs(getattr(TF, name), PICTURES[2], factor)).max() <= 1


def test_every_color_has_torchvisions_grey():
    """All 2**24 colors, sampled on a grid with all whole-number sums: never off by more than one."""
    levels = np.arange(256, dtype=np.uint8)
    colors = np.stack(np.meshgrid(levels, levels[::5], levels[::3], indexing="ij"), -1)
    pixels = colors.reshape(256, -1, 3)
    ours = color.adjust_saturation(pixels, 0.0).astype(int)
    naive = pixels.astype(np.int64) @ np.array([2989, 5870, 1140]) // 10000
    np.testing.assert_array_equal(ours[:, :, 1], naive)
    difference = np.abs(ours - theirs(TF.adjust_saturation, pixels, 0.0))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-4


GEOMETRY = [
    *(("rotate", degrees) for degrees in (-135.0, -30.0, -9.0, 0.0, 0.5, 13.0, 77.3, 90.0, 180.0)),
    *(
        (name, amount)
        for name in ("shear_x", "shear_y")
        for amount in (-0.99, -0.3, 0.04, 0.2, 0.9)
    ),
    *(
        (name, shift)
        for name in ("translate_x", "translate_y")
        for shift in (-30, 0, 5, 39, 40, 500)
    ),
]


def torchvisions(name, value):
    """(function, its arguments) of torchvision for one of ours."""
    if name == "rotate":
        return TF.rotate, {"angle": value}
    axis = name.endswith("y")
    settings = {"angle": 0.0, "scale": 1.0, "translate": [0, 0], "shear": [0.0, 0.0]}
    if name.startswith("shear"):
        settings["shear"][axis] = math.degrees(math.atan(value))
        settings["center"] = [0, 0]
    else:
        settings["translate"][axis] = value
    return TF.affine, settings


def doubt(name, value, height, width):
    """Distance of each sampled place from the border between two pixels, naively, in pixels."""
    y, x = np.mgrid[:height, :width] + 0.5
    if name == "rotate":
        angle, x, y = math.radians(value), x - width / 2, y - height / 2
        cos, sin = math.cos(angle), math.sin(angle)
        x, y = cos * x - sin * y + width / 2, sin * x + cos * y + height / 2
    elif name == "shear_x":
        x = x + value * y
    elif name == "shear_y":
        y = y + value * x
    return np.minimum(*(np.abs(places - np.round(places)) for places in (x, y)))


@pytest.mark.parametrize(("name", "value"), GEOMETRY)
def test_moves_pixels_as_torchvision(name, value):
    """To the bit as on Pillow's images; as on tensors but for places within 1/64 pixel of a border."""
    function, settings = torchvisions(name, value)
    for pixels in PICTURES[:4]:
        ours = called(getattr(shape, name), pixels, value)
        height, width = pixels.shape[:2]
        np.testing.assert_array_equal(ours, as_pil(function, pixels, **settings))
        sure = doubt(name, value, height, width) > 1 / 64
        assert name != "rotate" or value in (0.0, 90.0, 180.0) or sure.mean() > 0.85
        if name.startswith("translate"):
            sure[:] = True
        np.testing.assert_array_equal(ours[sure], theirs(function, pixels, **settings)[sure])


def test_color_jitter_is_its_parts_in_the_drawn_order():
    """The factors come out of an image in which they can be read."""
    pixels = np.full((4, 4, 3), 100, np.uint8)
    brightness = np.array(
        [color.color_jitter(pixels, s, brightness=0.4)[0, 0, 0] for s in SEEDS[:800].tolist()]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        jitter = v2.ColorJitter(brightness=0.4)
        tensor = torch.full((3, 1, 1), 100, dtype=torch.uint8)
        expected = np.array([jitter(tensor)[0, 0, 0].item() for _ in range(800)])
    assert distance(brightness, expected) < 1.95 * math.sqrt(2 / 800)
    assert brightness.min() in (60, 61, 62)
    assert brightness.max() in (137, 138, 139)


def test_color_jitter_draws_as_torchvision(monkeypatch):
    """Orders and factors, caught on their way."""
    calls = []
    for name in ("brightness", "contrast", "saturation", "hue"):
        monkeypatch.setattr(
            color, f"adjust_{name}",
            lambda pixels, factor, name=name: (calls.append((name, factor)), pixels)[1],
        )  # fmt: skip
    settings = {"brightness": 0.4, "contrast": 1.5, "saturation": 0.2, "hue": 0.1}
    pixels = np.zeros((1, 1, 3), np.uint8)
    for seed in SEEDS.tolist():
        color.color_jitter(pixels, seed, **settings)
    names = list(settings)
    drawn = [calls[k : k + 4] for k in range(0, len(calls), 4)]
    orders = np.array([[names.index(name) for name, _ in four] for four in drawn])
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    expected = len(SEEDS) / 24
    assert len(counts) == 24
    assert ((counts - expected) ** 2 / expected).sum() < 49.7  # chi-squared, 23 d.o.f., p = 0.001
    factors = np.array([[dict(four)[name] for name in names] for four in drawn])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        jitter = v2.ColorJitter(**settings)
        params = [jitter.make_params([]) for _ in range(len(SEEDS))]
    for column, name in enumerate(names):
        other = np.array([p[f"{name}_factor"] for p in params])
        assert distance(factors[:, column], other) < 1.95 * math.sqrt(2 / len(SEEDS))
        for before in range(column):
            assert abs(np.corrcoef(factors[:, column], factors[:, before])[0, 1]) < 0.06


def distance(a, b):
    """Kolmogorov and Smirnov's, between two samples."""
    points = np.concatenate([a, b])
    a, b = np.sort(a), np.sort(b)
    return np.abs(
        np.searchsorted(a, points, "right") / len(a) - np.searchsorted(b, points, "right") / len(b)
    ).max()


def test_color_jitter_depends_on_the_seed_alone():
    settings = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
    pixels, seeds = PICTURES[0], SEEDS[:40].tolist()
    state = torch.get_rng_state(), pickle.dumps(np.random.get_state())
    once = [called(color.color_jitter, pixels, seed) for seed in seeds[:2]]
    alone = [color.color_jitter(pixels, seed, **settings) for seed in seeds]
    assert torch.equal(torch.get_rng_state(), state[0])
    assert pickle.dumps(np.random.get_state()) == state[1]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda s: color.color_jitter(pixels, s, **settings), seeds))
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len({image.tobytes() for image in alone}) == len(seeds)
    np.testing.assert_array_equal(once[0], pixels)
    np.testing.assert_array_equal(
        color.color_jitter(pixels, -1, **settings),
        color.color_jitter(pixels, 2**64 - 1, **settings),
    )


@pytest.mark.parametrize(
    ("name", "args", "rule"),
    [
        ("adjust_brightness", (-0.1,), "factor must be at least 0, got -0.1"),
        ("adjust_contrast", (math.nan,), "factor must be at least 0, got nan"),
        ("adjust_saturation", (-1,), "factor must be"),
        ("adjust_sharpness", (-1,), "factor must be"),
        ("adjust_hue", (0.51,), r"turn must be in \[-0.5, 0.5\], got 0.51"),
        ("posterize", (9,), "bits must be in 0 .. 8, got 9"),
        ("solarize", (255.5,), "threshold must be at most 255, got 255.5"),
    ],
)
def test_impossible_settings_are_refused(name, args, rule):
    with pytest.raises(ValueError, match=rule):
        getattr(color, name)(PICTURES[0], *args)


def test_impossible_jitter_is_refused():
    with pytest.raises(ValueError, match=r"hue in \[0, 0.5\], got \(0.0, 0.0, 0.0, 0.6\)"):
        color.color_jitter(PICTURES[0], 0, hue=0.6)
    with pytest.raises(ValueError, match="at least 0"):
        color.color_jitter(PICTURES[0], 0, contrast=-0.1)
