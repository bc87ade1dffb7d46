"""Masks are cut, resized and mirrored as torchvision does it, and at the place of their image."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from flambeau.data.transforms.crops import (
    TrainingCrop,
    eval_image,
    random_resized_crop_box,
    train_image,
)
from flambeau.data.transforms.mask_crops import eval_mask, fill_nearest, train_mask
from flambeau.images.native import kernel as native


@pytest.mark.parametrize("with_kernel", [True, False])
def test_equal_to_torchvision(with_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_kernel:
        monkeypatch.setattr(native, "kernel", lambda: None)
    draw = np.random.default_rng(0)
    for _ in range(200):
        height, width = draw.integers(3, 400, 2)
        mask = draw.integers(0, 256, (height, width)).astype(np.uint8)
        rows, columns = draw.integers(1, height + 1), draw.integers(1, width + 1)
        top, left = draw.integers(0, height - rows + 1), draw.integers(0, width - columns + 1)
        size = int(draw.integers(1, 300))
        mirror = bool(draw.integers(2))
        out = np.empty((size, size), np.uint8)
        box = int(top), int(left), int(rows), int(columns)
        fill_nearest(mask, box, out, mirror=mirror)
        expected = F.resized_crop(tv_tensors.Mask(torch.from_numpy(mask)[None]), *box, [size, size])
        expected = F.horizontal_flip(expected) if mirror else expected
        assert (out == expected[0].numpy()).all(), (mask.shape, box, size)


def test_a_mask_is_cut_where_its_image_is() -> None:
    """The image is its own mask: what is bright in one has the number in the other."""
    draw = np.random.default_rng(1)
    mask = np.zeros((90, 130), np.uint8)
    mask[20:60, 40:110] = 1
    image = np.repeat(255 * mask[:, :, None], 3, 2)
    crop = TrainingCrop(scale=(0.1, 1.0))
    mirrored = 0
    for seed in draw.integers(-(2**62), 2**62, 50).tolist():
        out = np.empty((48, 48), np.uint8)
        train_mask(mask, seed, out, crop=crop)
        shown = train_image(image, seed, 48, channels=3, crop=crop)[:, :, 0]
        # But for the pixels at the edge, which the image's filter mixes.
        assert ((shown > 127) != (out == 1)).mean() < 0.06
        assert out.any() == (shown > 127).any()
        mirrored += crop.mirrors(seed)
    assert 10 < mirrored < 40


def test_a_crop_of_all_is_the_whole_image_where_an_evaluation_shows_it_whole() -> None:
    """Also of a panorama, of which a random crop of an allowed shape is the middle."""
    draw = np.random.default_rng(2)
    mask = draw.integers(0, 256, (20, 90)).astype(np.uint8)
    image = np.repeat(mask[:, :, None], 3, 2)
    whole = TrainingCrop(flip=False, scale=(1.0, 1.0), eval_resize="squash")
    for seed in (-5, 3, 8):
        out, expected = np.empty((2, 16, 16), np.uint8)
        train_mask(mask, seed, out, crop=whole)
        eval_mask(mask, expected)
        assert (out == expected).all()
        shown = train_image(image, seed, 16, channels=3, crop=whole)
        assert (shown == eval_image(image, 16, channels=3, resize="squash")).all()
    assert whole.box(20, 90, 3) == (0, 0, 20, 90)
    middle = TrainingCrop(flip=False, scale=(1.0, 1.0)).box(20, 90, 3)
    assert middle == random_resized_crop_box(20, 90, 3, scale=(1.0, 1.0)) != (0, 0, 20, 90)


def test_an_evaluation_shows_the_whole_mask() -> None:
    mask = np.arange(64, dtype=np.uint8).reshape(8, 8).repeat(3, 0).repeat(5, 1)
    out = np.empty((8, 8), np.uint8)
    eval_mask(mask, out)
    assert (out == np.arange(64).reshape(8, 8)).all()
    image = np.repeat(mask[:, :, None], 3, 2)
    shown = eval_image(image, 8, channels=3, resize="squash")[:, :, 0]
    assert abs(shown.astype(int) - out).max() < 20


def test_the_box_is_that_of_the_seed_alone(tmp_path: Path) -> None:
    """Decoded from a JPEG at a part of its size, the image still shows the box of the mask."""
    mask = np.zeros((400, 600), np.uint8)
    mask[:, 300:] = 1
    Image.fromarray(np.repeat(255 * mask[:, :, None], 3, 2)).save(tmp_path / "a.jpg", quality=95)
    data = (tmp_path / "a.jpg").read_bytes()
    for seed in range(30):
        out = np.empty((32, 32), np.uint8)
        train_mask(mask, seed, out, crop=TrainingCrop())
        shown = train_image(data, seed, 32, channels=3)[:, :, 0]
        assert ((shown > 127) != (out == 1)).mean() < 0.05
    assert random_resized_crop_box(400, 600, 3) == random_resized_crop_box(400, 600, 3)
