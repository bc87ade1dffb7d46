"""Orientation in XMP and in ImageMagick's EXIF profiles: files are turned as Pillow's exif_transpose does."""

import io
import random
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from flambeau.data.sources.user_samples import stored_image
from flambeau.errors import DecodeError
from flambeau.images.decode import Picture, decode
from flambeau.images.exif_orientation import exif_orientation, info_orientation

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def exif_with(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def xmp_with(orientation, *, element=False):
    if element:
        words = f"<rdf:Description><tiff:Orientation>{orientation}</tiff:Orientation>"
    else:
        words = f'<rdf:Description tiff:Orientation="{orientation}">'
    return f"<x:xmpmeta>{words}</rdf:Description></x:xmpmeta>".encode()


def encoded(kind, **settings):
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, kind, **settings)
    return buffer.getvalue()


def tiff(xmp, tag=None):
    tags = {700: xmp} if tag is None else {700: xmp, 0x0112: tag}
    return encoded("TIFF", tiffinfo=tags)


def png(name, value, *, how="zTXt", behind=False):
    """A PNG with a text."""
    data, key = encoded("PNG"), name.encode() + b"\0"
    body = {
        "tEXt": lambda: key + value,
        "zTXt": lambda: key + b"\0" + zlib.compress(value),
        "iTXt": lambda: key + b"\0\0\0\0" + value,
        "iTXt compressed": lambda: key + b"\1\0\0\0" + zlib.compress(value),
        "eXIf": lambda: value,
    }[how]()
    chunk = how[:4].encode() + body
    chunk = struct.pack(">I", len(body)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    at = data.index(b"IEND" if behind else b"IDAT") - 4
    return data[:at] + chunk + data[at:]


def raw_profile(exif):
    return f"\nexif\n{len(exif):8}\n{exif.hex()}\n".encode()


XMP_NAME = "XML:com.adobe.xmp"
RAW_NAME = "Raw profile type exif"
FILES = {
    "JPEG": lambda n: encoded("JPEG", xmp=xmp_with(n)),
    "JPEG, an element": lambda n: encoded("JPEG", xmp=xmp_with(n, element=True)),
    "JPEG, EXIF wins": lambda n: encoded("JPEG", xmp=xmp_with(n), exif=exif_with(8)),
    "JPEG, EXIF without it": lambda n: encoded(
        "JPEG", xmp=xmp_with(n), exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"
    ),
    "JPEG, progressive": lambda n: encoded("JPEG", xmp=xmp_with(n), progressive=True),
    "WebP": lambda n: encoded("WEBP", xmp=xmp_with(n), lossless=True),
    "WebP, EXIF wins": lambda n: encoded("WEBP", xmp=xmp_with(n), exif=exif_with(3)),
    "PNG, iTXt": lambda n: png(XMP_NAME, xmp_with(n), how="iTXt"),
    "PNG, compressed": lambda n: png(XMP_NAME, xmp_with(n), how="iTXt compressed"),
    "PNG, tEXt": lambda n: png(XMP_NAME, xmp_with(n), how="tEXt"),
    "PNG, behind": lambda n: png(XMP_NAME, xmp_with(n), how="iTXt", behind=True),
    "PNG, EXIF behind": lambda n: png("", exif_with(n)[6:], how="eXIf", behind=True),
    "PNG, profile": lambda n: png(RAW_NAME, raw_profile(exif_with(n))),
    "PNG, profile in tEXt": lambda n: png(RAW_NAME, raw_profile(exif_with(n)), how="tEXt"),
    "PNG, profile behind": lambda n: png(RAW_NAME, raw_profile(exif_with(n)), behind=True),
    "PNG, profile APP1": lambda n: png("Raw profile type APP1", raw_profile(exif_with(n))),
    "TIFF": lambda n: tiff(xmp_with(n)),
    "TIFF, compressed": lambda n: encoded(
        "TIFF", compression="tiff_lzw", tiffinfo={700: xmp_with(n)}
    ),
    "TIFF, the tag wins": lambda n: tiff(xmp_with(n), tag=6),
    "TIFF, turned by its tag": lambda n: tiff(xmp_with(6), tag=n),
}


def pillow_reads_xmp():
    return Image.open(io.BytesIO(FILES["JPEG"](6))).getexif().get(0x0112) == 6


needs_new_pillow = pytest.mark.skipif(
    not pillow_reads_xmp(), reason="this Pillow reads XMP of PNGs alone"
)


@needs_new_pillow
@pytest.mark.parametrize("orientation", [0, *range(1, 10)])
@pytest.mark.parametrize("name", FILES)
def test_what_pillow_turns_is_turned(name, orientation):
    data = FILES[name](orientation)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    picture = Picture(data)
    assert (picture.height, picture.width) == expected.shape[:2]
    np.testing.assert_array_equal(decode(data, channels=3), expected)
    part = picture.pixels((1, 2, 3, 4), channels=3)
    np.testing.assert_array_equal(part, expected[1:4, 2:6])
    with Image.open(io.BytesIO(data)) as image:  # as a data set of the user's may give it
        np.testing.assert_array_equal(stored_image(image), expected)


def pillow_says(exif, xmp):
    image = Image.new("L", (1, 1))
    image.info |= {"exif": exif} | ({"xmp": xmp} if xmp else {})
    return image.getexif().get(0x0112, 1)


@needs_new_pillow
def test_every_type_of_number_in_both_byte_orders():
    """Against Pillow, which takes the first of several, and XMP only where there is no tag at all."""
    compared = 0
    for order, head in (("<", b"II*\0"), (">", b"MM\0*"), (">", b"MM*\0"), ("<", b"II\0*")):
        for kind in [*range(18), 300]:
            for count in (0, 1, 2, 3, 70000, 2**32 - 1):
                for value in (b"\6\0\0\0", b"\0\6\0\6", b"\0\0\0\6", struct.pack(order + "f", 6)):
                    entry = struct.pack(order + "HHI", 0x0112, kind, count) + value
                    tail = struct.pack(order + "HI", 1, 0)
                    exif = head + struct.pack(order + "I", 8) + tail[:2] + entry + tail[2:]
                    for xmp in (b"", xmp_with(3)):
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            expected = pillow_says(exif, xmp)
                        good = expected in range(1, 9)
                        assert exif_orientation(exif, xmp) == (expected if good else 1), exif
                        compared += good and expected != 1
    assert compared > 300


def test_damaged_texts_mean_upright_or_a_bad_image():
    for text in ("", "\n\n\n", "\nexif\n 8\nzz", "\nexif\n 8\n4", "\nexif\n\n" + "00" * 9):
        assert info_orientation({"Raw profile type exif": text}) == 1
    for xmp in (b"tiff:Orientation", 'tiff:Orientation="', b'tiff:Orientation="\xff', ("6",), 6):
        assert info_orientation({"xmp": xmp}) == 1
    rng = random.Random(0)
    originals = [FILES[name](6) for name in FILES]
    for k in range(2000):
        data = bytearray(originals[k % len(originals)])
        for _ in range(rng.choice([1, 1, 5])):
            data[rng.randrange(len(data))] = rng.choice([0, 255, rng.randrange(256)])
        try:
            picture = Picture(bytes(data))
            assert picture.pixels(channels=3).shape == (picture.height, picture.width, 3)
        except DecodeError as error:
            assert str(error)


def test_a_text_that_inflates_without_end_is_cut_off_and_the_image_is_read():
    picture = Picture(png(RAW_NAME, b"\n\n\n" + b"0" * (PngImagePlugin.MAX_TEXT_MEMORY + 1)))
    assert picture.pixels(channels=3).shape == (picture.height, picture.width, 3)
