"""Damaged tables and markers: with and without the kernel the same pixels, or the same refusal."""

import io
import random

import numpy as np
import pytest
from PIL import Image

from flambeau.errors import DecodeError
from flambeau.images.decode import Picture, decode
from flambeau.images.jpeg.headers import read_header
from flambeau.images.jpeg.scan_segments import segment
from flambeau.images.native import kernel as native

PIXELS = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
PIXELS[8:30, 8:40] = 90
DQT, DHT, SOS = 0xDB, 0xC4, 0xDA
MARKERS = [b"\xff" + bytes([kind]) for kind in (0xD9, 0xD0, 0xD8, DQT, DHT, SOS, 0xFF, 0)]

FOUND = native.kernel()
pytestmark = pytest.mark.skipif(FOUND is None or not FOUND.uses_avx2, reason=native.kernel_status())


def encoded(pixels=PIXELS, **settings):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", **settings)
    return buffer.getvalue()


def originals():
    plain = encoded(subsampling=0)
    return [
        plain,
        encoded(),
        encoded(quality=95, optimize=True),
        encoded(PIXELS[:, :, 0]),
        encoded(subsampling=0, restart_marker_blocks=2),
        segment(plain, interval_px=16),
    ]


def tables(data, kind):
    """Begin and end of the bodies of the segments of one kind."""
    at, found = 2, []
    while data[at + 1] != SOS:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == kind:
            found.append((at + 4, end))
        at = end
    return found


def mutant(data, rng):
    """One thing is wrong in a table, or a marker stands where there should be none."""
    changed = bytearray(data)
    quant, huffman = rng.choice(tables(data, DQT)), rng.choice(tables(data, DHT))
    begin, end = rng.choice([quant, huffman])
    count = huffman[0] + 1 + rng.randrange(16)  # of the codes of one length
    match rng.randrange(10):
        case 0:  # a marker within a table
            at = rng.randrange(begin, end - 1)
            changed[at : at + 2] = rng.choice(MARKERS)
        case 1:  # or within the pixels
            at = rng.randrange(read_header(data).scan_at + 14, len(data) - 4)
            changed[at : at + 2] = rng.choice(MARKERS)
        case 2:
            for at in rng.sample(range(quant[0] + 1, quant[1]), rng.choice([1, 3, 60])):
                changed[at] = rng.choice([0, 255, rng.randrange(256)])
        case 3:  # 16 bits
            factor = rng.choice([1, 1, 20, 500])
            wide = b"".join(
                (value * rng.choice([1, factor]) & 0xFFFF).to_bytes(2, "big")
                for value in data[quant[0] + 1 : quant[0] + 65]
            )
            id_ = bytes([0x10 | data[quant[0]]])
            changed[quant[0] - 2 : quant[1]] = (131).to_bytes(2, "big") + id_ + wide
        case 4:  # too many codes or too few, and then of the right number but in other lengths
            changed[count] = rng.randrange(4)
        case 5:
            other = huffman[0] + 1 + rng.randrange(16)
            if changed[count]:
                changed[count] -= 1
                changed[other] += 1
        case 6:  # a symbol twice, or one that means nothing
            changed[rng.randrange(huffman[0] + 17, huffman[1])] = rng.randrange(256)
        case 7:  # the table of another number, of another kind, or one twice
            changed[begin] = rng.choice([changed[begin] ^ 1, changed[begin] ^ 16, 3])
            changed[begin - 4 : begin - 4] = rng.choice([b"", data[begin - 4 : end]])
        case 8:
            length = end - begin + 2 + rng.choice([-64, -16, -2, -1, 1, 2, 16, 64])
            changed[begin - 2 : begin] = max(0, length).to_bytes(2, "big")
        case 9:
            del changed[begin - 4 : end]
    return bytes(changed)


def part(data, seed):
    """Of any place and size, at any scale; None where it is refused."""
    rng = random.Random(seed)
    try:
        if seed % 2:
            return decode(data, channels=3)
        picture = Picture(data)
        scale = rng.choice([8, 4, 2, 1])
        height, width = (-(-side * scale // 8) for side in (picture.height, picture.width))
        top, left = rng.randrange(height), rng.randrange(width)
        box = top, left, rng.randint(1, height - top), rng.randint(1, width - left)
        return picture.pixels(box, channels=rng.choice([1, 3]), scale_eighths=scale)
    except DecodeError:
        return None


def test_the_kernel_changes_no_pixel_of_a_damaged_file(monkeypatch):
    rng = random.Random(0)
    mutants = [mutant(data, rng) for data in originals() for _ in range(800)]
    ours = [part(data, seed) for seed, data in enumerate(mutants)]
    assert 0.3 < sum(pixels is not None for pixels in ours) / len(ours) < 0.9
    monkeypatch.setattr(native, "kernel", lambda: None)
    for seed, (data, pixels) in enumerate(zip(mutants, ours, strict=True)):
        np.testing.assert_array_equal(pixels, part(data, seed), f"mutant {seed}")


@pytest.mark.parametrize("quality", [1, 10, 50, 100])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_no_undamaged_file_is_refused(quality, subsampling):
    """Noise of black and white has the largest coefficients that there are."""
    noise = np.where(PIXELS > 127, 255, 0).astype(np.uint8)
    stripes = np.zeros_like(noise)
    stripes[:, ::2] = 255
    for pixels in (noise, stripes, stripes[::-1] ^ noise // 2, np.full_like(noise, 255)):
        for eighths in (8, 4, 2, 1):
            height, width = (-(-side * eighths // 8) for side in pixels.shape[:2])
            FOUND.decode_region(
                encoded(pixels, quality=quality, subsampling=subsampling),
                (0, 0, height, width),
                np.empty((height, width, 3), np.uint8),
                scale_eighths=eighths,
            )
