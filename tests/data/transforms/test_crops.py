"""Against torchvision (distributions and pixels) and against padding by NumPy."""

import io
import itertools
import math
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torchvision.transforms import CenterCrop, InterpolationMode, RandomResizedCrop, Resize

from flambeau.data.transforms import crops as module
from flambeau.data.transforms import resizing
from flambeau.data.transforms.crops import (
    CROP_RATIO,
    CROP_SCALE,
    TrainingCrop,
    eval_image,
    random_resized_crop_box,
    train_image,
)
from flambeau.images.decode import Picture
from flambeau.images.native import kernel as native
from flambeau.recipes.data.sample_order import sample_seeds

PHOTOS = Path(__file__).parents[4] / "shared" / "datasets" / "photos.tar"

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
        unflipped = train_image(pixels, seed, 32, crop=TrainingCrop(flip=False))
        assert np.abs(unflipped.astype(int) - theirs).max() <= 1
    assert 35 <= flips <= 65


def test_a_training_image_does_not_change_its_input_nor_the_generators():
    pixels = picture(40, 40)
    before, state = pixels.copy(), torch.random.get_rng_state()
    train_image(pixels, 3, 16)
    np.testing.assert_array_equal(pixels, before)
    assert torch.equal(state, torch.random.get_rng_state())


def jpeg(pixels, **settings):
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(buffer, "JPEG", quality=95, **settings)
    return buffer.getvalue()


def test_an_encoded_image_is_augmented_as_its_pixels():
    # 300 x 400 to 160: no crop is twice as large in both directions, so all are decoded in full.
    data = jpeg(picture(300, 400))
    pixels = np.array(Image.open(io.BytesIO(data)))
    for seed in SEEDS[:40].tolist():
        np.testing.assert_array_equal(
            train_image(data, seed, 160, channels=3), train_image(pixels, seed, 160)
        )
    for height, width in [(300, 400), (400, 300), (200, 210), (170, 1500), (1500, 170), (9, 300)]:
        data = jpeg(picture(height, width))
        pixels = np.array(Image.open(io.BytesIO(data)))
        np.testing.assert_array_equal(eval_image(data, 160, channels=3), eval_image(pixels, 160))
        grey = eval_image(data, 160, channels=1)
        assert np.abs(grey[:, :, 0] - eval_image(pixels, 160) @ (0.299, 0.587, 0.114)).mean() < 3


def test_a_crop_is_decoded_no_smaller_than_the_result(monkeypatch):
    asked = []

    def spy(self, box=None, *, channels, scale_eighths=8):
        asked.append((*box[2:], 8 // scale_eighths))
        return pixels(self, box, channels=channels, scale_eighths=scale_eighths)

    pixels = Picture.pixels
    monkeypatch.setattr(Picture, "pixels", spy)
    monkeypatch.setattr(native, "kernel", lambda: None)
    data = jpeg(picture(500, 700))
    for seed in SEEDS[:60].tolist():
        train_image(data, seed, 64, channels=3)
        height, width, scale = asked.pop()
        assert min(height, width) >= 64
        _, _, *whole = random_resized_crop_box(500, 700, seed)
        assert scale == max(s for s in (1, 2, 4, 8) if min(whole) >= 64 * s)
        assert abs(height * scale - whole[0]) <= scale
    eval_image(data, 64, channels=3)  # 73 of 500: a quarter is 125 rows
    assert asked.pop()[2] == 4
    eval_image(data, 448, channels=3)
    assert asked.pop()[2] == 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_jpeg_is_turned_before_the_crop(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(picture(120, 200), exif=exif)
    upright = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    for seed in SEEDS[:5].tolist():
        np.testing.assert_array_equal(
            train_image(data, seed, 100, channels=3), train_image(upright, seed, 100)
        )
    np.testing.assert_array_equal(eval_image(data, 100, channels=3), eval_image(upright, 100))


def psnr(a, b):
    error = np.mean((a.astype(float) - b) ** 2)
    return 10 * math.log10(255**2 / error) if error else math.inf


@pytest.mark.skipif(not PHOTOS.exists(), reason=f"needs {PHOTOS}")
def test_decoding_at_a_fraction_of_the_size_does_photographs_no_harm(monkeypatch):
    crops, centres, halved = [], [], []
    with tarfile.open(PHOTOS) as photos:
        for member in photos.getmembers()[1:90:3]:
            data = photos.extractfile(member).read()
            pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
            for size in (112, 64):
                whole = eval_image(pixels, size)
                centres.append(psnr(eval_image(data, size, channels=3), whole))
                box = random_resized_crop_box(*pixels.shape[:2], 1, scale=(0.5, 1.0))
                scale = 8 // Picture(data).scale_eighths_for(*box[2:], least=size)
                box = [at // scale * scale for at in box]  # on the grid of the smaller image
                monkeypatch.setattr(
                    module, "random_resized_crop_box", lambda *_, box=box, **__: box
                )
                whole = train_image(pixels, 1, size)
                crops.append(psnr(train_image(data, 1, size, channels=3), whole))
                half = Image.fromarray(whole).reduce(2)  # a step too far: what the floor must tell
                halved.append(psnr(np.array(half.resize((size, size))), whole))
    for found, median, least in (
        (crops, 38, 32),
        (centres, 34, 29),
    ):  # found: 41.1, 34.8; 36.1, 31.4
        scaled = [value for value in found if value < math.inf]
        assert len(scaled) > 30, "too few are large enough to be scaled down as they are decoded"
        assert np.median(scaled) > median
        assert min(scaled) > least
    assert np.median(halved) < 30


def test_settings_of_encoded_images_and_of_the_result():
    with pytest.raises(ValueError, match="channels must be given with an encoded image"):
        train_image(jpeg(picture(9, 9)), 0, 4)
    out = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    for crop in (
        train_image(picture(40, 50), 3, 16, out=out[1]),
        eval_image(picture(40, 50), 16, out=out[1]),
    ):
        np.testing.assert_array_equal(crop, out[1])
    assert not out[0].any()
    zoomed = train_image(picture(90, 90), 3, 32, crop=TrainingCrop(False, (0.01, 0.01)))
    assert zoomed.std() < train_image(picture(90, 90), 3, 32, crop=TrainingCrop(flip=False)).std()


@pytest.mark.parametrize("encoded", [False, True])
def test_bicubic_crops_are_pillows(encoded):
    """Also of a JPEG, whose bilinear crops the kernel resizes."""
    pixels = picture(90, 120)
    crop = TrainingCrop(flip=False, scale=(0.3, 0.3), interpolation="bicubic")
    data = jpeg(pixels) if encoded else pixels
    whole = np.array(Image.open(io.BytesIO(data))) if encoded else pixels
    for seed in SEEDS[:20].tolist():
        top, left, height, width = random_resized_crop_box(90, 120, seed, scale=(0.3, 0.3))
        box = Image.fromarray(whole[top : top + height, left : left + width])
        theirs = np.array(box.resize((32, 32), Image.Resampling.BICUBIC)).astype(int)
        ours = train_image(data, seed, 32, channels=3, crop=crop)
        assert np.abs(ours - theirs).max() <= 1
        bilinear = train_image(data, seed, 32, channels=3, crop=TrainingCrop(False, (0.3, 0.3)))
        assert np.abs(bilinear - theirs).max() > 1


def test_read_only_pixels_and_mapped_ones_are_left_alone(tmp_path):
    np.save(tmp_path / "images.npy", np.stack([picture(40, 50), picture(40, 50)]))
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    np.testing.assert_array_equal(
        train_image(mapped[1], 3, 16), train_image(picture(40, 50), 3, 16)
    )
    np.testing.assert_array_equal(eval_image(mapped[1], 16), eval_image(picture(40, 50), 16))
    np.testing.assert_array_equal(eval_image(mapped[1], 40), eval_image(picture(40, 50), 40))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("height", "width"), [(90, 120), (121, 90), (30, 31), (300, 299), (77, 200), (37, 53)]
)
def test_an_evaluation_image_is_resized_and_cropped_as_by_torchvision(height, width, interpolation):
    pixels = picture(height, width)
    resize = Resize(32, InterpolationMode(interpolation))
    theirs = CenterCrop(28)(resize(Image.fromarray(pixels)))
    ours = eval_image(pixels, 28, interpolation=interpolation)
    assert ours.flags.c_contiguous
    difference = np.abs(ours.astype(int) - np.array(theirs))
    assert difference.max() <= 1
    assert difference.mean() < 0.1


@pytest.mark.parametrize(("resize", "theirs"), [("squash", (28, 28)), (28, 28), (35, 35)])
@pytest.mark.parametrize(("height", "width"), [(90, 120), (121, 90), (30, 31), (77, 200), (37, 53)])
def test_another_rule_of_resizing_is_torchvisions(height, width, resize, theirs):
    pixels = picture(height, width)
    expected = CenterCrop(28)(Resize(theirs)(Image.fromarray(pixels)))
    difference = np.abs(eval_image(pixels, 28, resize=resize).astype(int) - np.array(expected))
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

    def spy(pixels, height, width, *more, **settings):
        asked.append((height, width))
        return resize(pixels, height, width, *more, **settings)

    resize = resizing._resize
    monkeypatch.setattr(resizing, "_resize", spy)
    pixels = np.arange(1_000_000, dtype=np.uint64).astype(np.uint8).reshape(1, -1, 1)
    for line in (pixels, pixels.swapaxes(0, 1)):
        assert eval_image(line, 32).shape == (32, 32, 1)
        assert train_image(line, 0, 32).shape == (32, 32, 1)
    assert max(map(max, asked)) <= 37 * 9  # whole, it would be 37 x 37,000,000
