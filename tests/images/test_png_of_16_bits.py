"""PNG files of 16 bits with transparency, against the specification by hand; texts of any size."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from flambeau.images.decode import Picture, decode
from flambeau.images.wide_levels import wide_levels


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(levels: NDArray[Any], *more: bytes, after: bytes = b"") -> bytes:
    """A PNG of 16 bits, (H, W, 1, 2, 3 or 4), without filters."""
    height, width, channels = levels.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    parts = [chunk(b"IHDR", header), *more, chunk(b"IDAT", zlib.compress(rows)), after]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_color_that_is_transparent_is_white(channels: int) -> None:
    levels = np.random.default_rng(0).integers(0, 60000, (4, 5, channels))
    hidden = levels[1, 2]
    levels[3, 3] = hidden
    near = hidden.copy()
    near[0] += 1  # another color, and the same in 8 bits
    levels[0, 0] = near
    data = png(levels, chunk(b"tRNS", struct.pack(f">{channels}H", *hidden)))
    wanted = np.repeat(levels * 255 / 65535, 3 // channels, axis=2)
    wanted[[1, 3], [2, 3]] = 255
    assert np.abs(decode(data, channels=3) - wanted).max() <= 1
    part = Picture(data).pixels((1, 1, 3, 3), channels=3)
    assert np.abs(part - wanted[1:, 1:4]).max() <= 1


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_all_16_bits_come_back(channels: int) -> None:
    levels = np.random.default_rng(0).integers(0, 65536, (4, 5, channels))
    data = png(levels)
    got = wide_levels(lambda: Image.open(io.BytesIO(data)))
    if channels == 4:
        alpha = levels[:, :, 3:] / 65535
        assert np.abs(got - (levels[:, :, :3] * alpha + 65535 * (1 - alpha))).max() <= 0.5 + 1e-9
    else:
        np.testing.assert_array_equal(got, levels)


LARGE = b"x" * 3_000_000  # Pillow refuses more than one megabyte, and 64 of all


@pytest.mark.parametrize(
    "text",
    [
        chunk(b"iCCP", b"profile\0\0" + zlib.compress(LARGE)),
        chunk(b"zTXt", b"Comment\0\0" + zlib.compress(LARGE)),
        chunk(b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(LARGE)),
        chunk(b"tEXt", b"Comment\0" + LARGE) * 30,
    ],
    ids=["iCCP", "zTXt", "iTXt", "tEXt"],
)
@pytest.mark.parametrize("is_after", [False, True])
def test_texts_and_profiles_of_any_size_are_passed_over(text: bytes, is_after: bool) -> None:
    levels = np.full((3, 4, 1), 257 * 7)
    data = png(levels, after=text) if is_after else png(levels, text)
    assert (decode(data, channels=1) == 7).all()


def xmp(orientation: int, *, size: int) -> bytes:
    return (
        b"<x:xmpmeta xmlns:x='adobe:ns:meta/' xmlns:tiff='http://ns.adobe.com/tiff/1.0/'>"
        b"<rdf:RDF xmlns:rdf='http://www.w3.org/1999/02/22-rdf-syntax-ns#'>"
        b'<rdf:Description tiff:Orientation="%d"/>'
        % orientation
        + b" " * size
        + b"</rdf:RDF></x:xmpmeta>"
    )


def test_the_orientation_in_a_large_xmp_counts() -> None:
    for size in (100, 3_000_000):
        body = b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(6, size=size))
        assert Picture(png(np.zeros((3, 4, 1)), chunk(b"iTXt", body))).height == 4


def test_the_orientation_in_a_compressed_text_counts() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = exif.tobytes().removeprefix(b"Exif\0\0")
    text = f"\nexif\n{len(raw):8}\n{raw.hex()}\n"
    info = PngImagePlugin.PngInfo()
    info.add_text("Raw profile type exif", text, zip=True)
    file = io.BytesIO()
    Image.new("L", (4, 3)).save(file, "PNG", pnginfo=info)
    assert Picture(file.getvalue()).height == 4
