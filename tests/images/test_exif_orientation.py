"""Turning against Pillow's exif_transpose; boxes against cutting the upright image; damaged tags."""

import random

import numpy as np
import pytest
from PIL import Image, ImageOps

from flambeau.images.exif_orientation import (
    exif_orientation,
    stored_box,
    swaps_sides,
    turn_upright,
)

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def exif_with(value):
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_are_turned_as_pillow_turns_them(orientation):
    image = Image.fromarray(PIXELS)
    image.getexif()[0x0112] = orientation
    expected = np.array(ImageOps.exif_transpose(image))
    turned = turn_upright(PIXELS, orientation)
    np.testing.assert_array_equal(turned, expected)
    assert swaps_sides(orientation) == (turned.shape[0] == 7)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_box_is_the_same_part_before_turning_and_after(orientation):
    upright = turn_upright(PIXELS, orientation)
    height, width = upright.shape[:2]
    rng = random.Random(orientation)
    for _ in range(30):
        top, left = rng.randrange(height), rng.randrange(width)
        box = top, left, rng.randint(1, height - top), rng.randint(1, width - left)
        y, x, h, w = stored_box(box, orientation, height, width)
        part = turn_upright(PIXELS[y : y + h, x : x + w], orientation)
        np.testing.assert_array_equal(part, upright[top : top + box[2], left : left + box[3]])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_tag_is_found_in_both_byte_orders(orientation):
    exif = exif_with(orientation).tobytes()  # Pillow's own, little-endian or big-endian
    assert exif_orientation(exif) == orientation
    assert exif_orientation(exif.removeprefix(b"Exif\0\0")) == orientation
    big = (
        b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + orientation.to_bytes(2, "big") + b"\0\0"
    )
    assert exif_orientation(big) == orientation


def test_damaged_tags_mean_upright():
    for exif in (
        b"",
        b"II*\0",
        b"II*\0\xff\xff\xff\xff",
        b"MM\0*\0\0\0\x08\xff\xff",
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0",  # orientation 99
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\0\0\0\0",  # orientation 0
        b"nonsense",
    ):
        assert exif_orientation(exif) == 1
    rng = random.Random(0)
    for _ in range(2000):
        exif = bytearray(exif_with(6).tobytes())
        exif[rng.randrange(len(exif))] = rng.randrange(256)
        assert 1 <= exif_orientation(bytes(exif[: rng.randrange(len(exif) + 1)])) <= 8
