"""PNG files by our decoder: Pillow's pixels, and Pillow itself for whatever is rare or damaged."""

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from flambeau.errors import DecodeError
from flambeau.images import png
from flambeau.images.decode import Picture, decode
from flambeau.images.native.kernel import kernel

needs_kernel = pytest.mark.skipif(kernel() is None, reason="the C kernel is not built")


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def file_of(header: bytes, deflated: bytes, *between: bytes, piece: int = 1000) -> bytes:
    """A PNG of these chunks, its pixels in pieces."""
    pieces = [chunk(b"IDAT", deflated[at : at + piece]) for at in range(0, len(deflated), piece)]
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + b"".join(between)
        + b"".join(pieces)
        + chunk(b"IEND", b"")
    )


def random_file(seed: int, *between: bytes) -> bytes:
    """A PNG of random bytes in rows of random filters."""
    draw = random.Random(seed)
    height, width, channels = draw.randint(1, 40), draw.randint(1, 60), draw.choice([1, 3])
    rows = b"".join(
        bytes([draw.randint(0, 4)]) + draw.randbytes(width * channels) for _ in range(height)
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    return file_of(header, zlib.compress(rows), *between, piece=draw.randint(50, 9000))


def by_pillow(data: bytes, mode: str) -> Any:
    pixels = np.array(Image.open(io.BytesIO(data)).convert(mode))
    return pixels.reshape(*pixels.shape[:2], -1)


def saved(image: Image.Image, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "png", **settings)
    return file.getvalue()


@needs_kernel
@pytest.mark.parametrize("seed", range(40))
def test_all_filters_and_sizes_give_pillows_pixels(seed: int) -> None:
    data = random_file(seed)
    header = png.read_header(data)
    assert header is not None and Picture(data).grey == (header.channels == 1)
    for channels, mode in ((1, "L"), (3, "RGB")):
        expected = by_pillow(data, mode)
        np.testing.assert_array_equal(decode(data, channels=channels), expected)
        draw = random.Random(seed)
        top, left = draw.randrange(header.height), draw.randrange(header.width)
        box = (
            top,
            left,
            draw.randint(1, header.height - top),
            draw.randint(1, header.width - left),
        )
        part = expected[top : top + box[2], left : left + box[3]]
        np.testing.assert_array_equal(Picture(data).pixels(box, channels=channels), part)


def flat_file(seed: int) -> bytes:
    """As `random_file`, of rows that mostly are what their filter expects, as in a mask."""
    draw = np.random.default_rng(seed)
    height, width = (int(side) for side in draw.integers(1, 70, 2))
    rows = draw.integers(0, 256, (height, 1 + width)) * (draw.random((height, 1 + width)) < 0.06)
    rows[:, 0] = draw.choice(5, height)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return file_of(header, zlib.compress(rows.astype(np.uint8).tobytes()))


@needs_kernel
def test_rows_of_equal_pixels_are_pillows() -> None:
    for seed in range(300):
        data = flat_file(seed)
        assert png.read_header(data) is not None
        np.testing.assert_array_equal(decode(data, channels=1), by_pillow(data, "L"))


NOISE = Image.effect_noise((31, 20), 90)
EXIF = Image.Exif()
EXIF[0x0112] = 6
TEXT = PngImagePlugin.PngInfo()
TEXT.add_text("Raw profile type exif", "\nexif\n       4\n00000000\n")
RARE = {
    "alpha": saved(Image.merge("RGBA", [NOISE] * 4)),
    "grey with alpha": saved(Image.merge("LA", [NOISE] * 2)),
    "palette": saved(NOISE.quantize(16)),
    "16 bits": saved(Image.fromarray(np.full((20, 31), 40_000, np.uint16))),
    "1 bit": saved(NOISE.convert("1")),
    "one transparent color": saved(NOISE.convert("RGB"), transparency=(3, 4, 5)),
    "turned": saved(NOISE, exif=EXIF),
    "turned, as text": saved(NOISE, pnginfo=TEXT),
    "an animation": saved(NOISE, save_all=True, append_images=[NOISE.rotate(90)]),
    "interlaced": file_of(struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 1), zlib.compress(b"\x00\x07")),
}


@pytest.mark.parametrize("name", RARE)
def test_rare_files_are_pillows(name: str) -> None:
    assert png.read_header(RARE[name]) is None
    assert decode(RARE[name], channels=3).shape[2] == 3


@needs_kernel
def test_what_does_not_change_the_pixels_is_passed_over() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("Software", "a camera")
    data = saved(NOISE, pnginfo=info, dpi=(72, 72), icc_profile=b"a profile")
    assert png.read_header(data) is not None
    np.testing.assert_array_equal(decode(data, channels=1), by_pillow(data, "L"))


def outcome(data: bytes, *, pillow: bool) -> Any:
    """The pixels, or that there are none."""
    try:
        return by_pillow(data, "RGB") if pillow else decode(data, channels=3)
    except (DecodeError, OSError, SyntaxError, ValueError, OverflowError, EOFError, MemoryError):
        return None


def test_damage_is_what_it_is_to_pillow() -> None:
    differing = 0
    for seed in range(300):
        data, draw = bytearray(random_file(seed)), random.Random(seed)
        kind = seed % 3
        if kind == 0:
            data[draw.randrange(8, len(data))] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[draw.randrange(8, len(data)) :]
        else:
            at = draw.randrange(8, len(data))
            data[at:at] = draw.randbytes(draw.randint(1, 20))
        ours, theirs = (outcome(bytes(data), pillow=pillow) for pillow in (False, True))
        if ours is None or theirs is None:
            differing += (ours is None) != (theirs is None)
        else:
            np.testing.assert_array_equal(ours, theirs)
    assert differing == 0


@needs_kernel
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (b"\x00" + bytes(30), "missing"),
        (b"".join(b"\x05" + bytes(30) for _ in range(20)), "a filter that is none"),
    ],
)
def test_rows_that_are_not_as_the_header_says(rows: bytes, says: str) -> None:
    """The checksums are right; Pillow has the last word."""
    data = file_of(struct.pack(">IIBBBBB", 30, 20, 8, 0, 0, 0, 0), zlib.compress(rows))
    header = png.read_header(data)
    assert header is not None, says
    assert png.first_rows(data, header, 20) is None
    assert png.first_rows(data, header, 19) is None
    ours, theirs = (outcome(data, pillow=pillow) for pillow in (False, True))
    assert (ours is None) == (theirs is None)


def test_a_header_that_claims_too_much_takes_no_memory() -> None:
    data = file_of(struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0), zlib.compress(b""))
    with pytest.raises(DecodeError, match="more than"):
        Picture(data)


@pytest.mark.parametrize("side", [2**31 - 1, 2**32 - 1, 20_000])
def test_a_mask_that_claims_too_much_is_left_to_pillow(side: int) -> None:
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    assert png.indices(file_of(header, zlib.compress(bytes(1000)))) is None


@needs_kernel
def test_a_file_of_empty_chunks_is_walked_no_further_than_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(png, "_MOST_CHUNKS", 10)
    for number, is_ours in ((7, True), (8, False)):
        data = random_file(1, *[chunk(b"tEXt", b"a\0b")] * number)
        pieces = data.count(b"IDAT")
        assert pieces == 1
        assert (png.read_header(data) is not None) == is_ours
        np.testing.assert_array_equal(decode(data, channels=3), by_pillow(data, "RGB"))


@needs_kernel
def test_pixels_that_inflate_to_more_than_the_image_are_read_no_further() -> None:
    bomb = zlib.compress(bytes(50_000_000))
    data = file_of(struct.pack(">IIBBBBB", 30, 20, 8, 0, 0, 0, 0), bomb, piece=2**20)
    header = png.read_header(data)
    assert header is not None
    assert png.first_rows(data, header, 20) is None
    rows = png.first_rows(data, header, 5)
    assert rows is not None and rows.shape == (5, 30, 1)
