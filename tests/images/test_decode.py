"""Pixels against Pillow's or NumPy's own arithmetic, and thousands of damaged files."""

import io
import itertools
import random
import threading
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, ImageSequence

from flambeau.errors import DecodeError, UnsupportedImage
from flambeau.images.decode import MAX_PIXELS, Picture, decode
from flambeau.images.jpeg.headers import read_header
from flambeau.images.jpeg.scan_segments import segment
from flambeau.images.native import kernel as native

needs_kernel = pytest.mark.skipif(native.kernel() is None, reason=native.kernel_status())
RGB = np.random.default_rng(0).integers(0, 256, (13, 17, 3), dtype=np.uint8)
GREY = RGB[:, :, 0]


def encode(image, kind, **settings):
    buffer = io.BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


def photo(height, width):
    """Smooth, as photographs are: a JPEG keeps it."""
    y, x = np.mgrid[:height, :width]
    planes = [x * 255 / width, y * 255 / height, (x + y) * 255 / (height + width)]
    return Image.fromarray(np.stack(planes, axis=2).astype(np.uint8))


def with_orientation(value):
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_lossless_files_come_back_exactly(kind):
    settings = {"lossless": True} if kind == "WEBP" else {}
    color = decode(encode(Image.fromarray(RGB), kind, **settings), channels=3)
    np.testing.assert_array_equal(color, RGB)
    assert color.dtype == np.uint8
    assert color.flags.writeable
    assert color.flags.c_contiguous
    if kind != "WEBP":
        grey = decode(encode(Image.fromarray(GREY), kind), channels=1)
        np.testing.assert_array_equal(grey, GREY[:, :, None])


def test_color_and_grey_convert_into_each_other():
    data = encode(Image.fromarray(RGB), "PNG")
    luma = (RGB @ np.array([0.299, 0.587, 0.114])).round()  # ITU-R 601
    assert np.abs(decode(data, channels=1)[:, :, 0] - luma).max() <= 1
    grey = encode(Image.fromarray(GREY), "PNG")
    np.testing.assert_array_equal(decode(grey, channels=3), np.repeat(GREY[:, :, None], 3, axis=2))


def test_palette_and_two_levels():
    palette = Image.fromarray(RGB).quantize(16)
    expected = np.array(palette.convert("RGB"))
    for kind in ("PNG", "GIF", "BMP", "TIFF"):
        np.testing.assert_array_equal(decode(encode(palette, kind), channels=3), expected)
    bits = GREY > 127
    data = encode(Image.fromarray(bits), "PNG")
    np.testing.assert_array_equal(decode(data, channels=1)[:, :, 0], bits * np.uint8(255))


def test_cmyk():
    ink = np.full((8, 8, 4), (0, 255, 255, 0), np.uint8)  # magenta and yellow: red
    for data in (
        encode(Image.frombytes("CMYK", (8, 8), ink.tobytes()), "TIFF"),
        encode(Image.frombytes("CMYK", (8, 8), ink.tobytes()), "JPEG", quality=100),
    ):
        assert np.abs(decode(data, channels=3).astype(int) - (255, 0, 0)).max() <= 2
        assert np.abs(decode(data, channels=1).astype(int) - 76).max() <= 2  # 0.299 * 255


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(kind):
    levels = np.array([[0, 128, 129, 255, 256, 257], [1000, 32767, 32768, 65279, 65407, 65535]])
    data = encode(Image.fromarray(levels.astype(np.uint16)), kind)
    expected = np.floor(levels * 255 / 65535 + 0.5)
    np.testing.assert_array_equal(decode(data, channels=1)[:, :, 0], expected)
    np.testing.assert_array_equal(decode(data, channels=3)[:, :, 2], expected)


def test_sixteen_bit_ppm_and_big_endian_tiff():
    levels = np.array([[0, 257, 65535]], np.uint16)
    ppm = b"P5 3 1 65535\n" + levels.astype(">u2").tobytes()
    assert decode(ppm, channels=1).ravel().tolist() == [0, 1, 255]
    entries = [(256, 3), (257, 1), (258, 16), (259, 1), (262, 1), (273, 200), (277, 1), (278, 1)]
    entries.append((279, 6))
    table = b"".join(
        tag.to_bytes(2, "big") + b"\0\3\0\0\0\1" + value.to_bytes(2, "big") + b"\0\0"
        for tag, value in entries
    )
    tiff = b"MM\0*\0\0\0\x08" + len(entries).to_bytes(2, "big") + table + bytes(4)
    tiff = tiff.ljust(200, b"\0") + levels.astype(">u2").tobytes()
    assert decode(tiff, channels=1).ravel().tolist() == [0, 1, 255]


def test_pixels_without_a_defined_brightness_are_refused():
    with pytest.raises(DecodeError, match="floating-point"):
        decode(encode(Image.fromarray(GREY.astype(np.float32)), "TIFF"), channels=1)
    for value in (-1, 65536):
        with pytest.raises(DecodeError, match="32-bit"):
            decode(encode(Image.fromarray(np.full((2, 2), value, np.int32)), "TIFF"), channels=1)
    fits = decode(encode(Image.fromarray(np.full((2, 2), 65535, np.int32)), "TIFF"), channels=1)
    assert (fits == 255).all()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparent_parts_are_laid_over_white(kind):
    alpha = np.zeros((13, 17, 1), np.uint8)
    alpha[:, 8:] = 255
    alpha[0, 0] = 51  # a fifth
    settings = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    pixels = decode(
        encode(Image.fromarray(np.concatenate([RGB, alpha], axis=2)), kind, **settings), channels=3
    )
    np.testing.assert_array_equal(pixels[:, 8:], RGB[:, 8:])
    assert (pixels[1:, :8] == 255).all()
    assert np.abs(pixels[0, 0] - (0.2 * RGB[0, 0] + 0.8 * 255)).max() <= 1


def test_every_kind_of_transparency():
    grey_alpha = np.stack([GREY, np.zeros_like(GREY)], axis=2)
    palette = Image.fromarray(RGB).quantize(4)
    for image, settings in (
        (Image.frombytes("LA", (17, 13), grey_alpha.tobytes()), {}),
        (palette, {"transparency": bytes(4)}),
        (Image.new("RGB", (5, 4), (1, 2, 3)), {"transparency": (1, 2, 3)}),
        (Image.new("L", (5, 4), 9), {"transparency": 9}),
    ):
        for channels in (1, 3):
            assert (decode(encode(image, "PNG", **settings), channels=channels) == 255).all()
    index = palette.getpixel((0, 0))
    gif = decode(encode(palette, "GIF", transparency=index), channels=3)
    assert (gif[np.array(palette) == index] == 255).all()
    assert not (gif == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied(kind, orientation):
    data = encode(photo(12, 20), kind, exif=with_orientation(orientation))
    expected = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    np.testing.assert_array_equal(decode(data, channels=3), expected)
    size = (12, 20) if orientation < 5 else (20, 12)
    assert expected.shape[:2] == size
    assert (Picture(data).height, Picture(data).width) == size


def test_damaged_exif_does_not_spoil_the_pixels():
    image = photo(16, 16)
    for exif in (
        b"",
        b"II*\0",
        b"II*\0\xff\xff\xff\xff",
        b"MM\0*\0\0\0\x08\xff\xff",
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0",  # orientation 99
        b"nonsense",
    ):
        data = encode(image, "JPEG", exif=b"Exif\0\0" + exif)
        np.testing.assert_array_equal(
            decode(data, channels=3), decode(encode(image, "JPEG"), channels=3)
        )


def test_a_jpeg_is_decoded_no_smaller_than_min_side():
    data = encode(photo(104, 144), "JPEG", quality=95)
    full = decode(data, channels=3)
    assert full.shape == (104, 144, 3)
    for min_side, scale in [(105, 1), (53, 1), (52, 2), (27, 2), (26, 4), (14, 4), (13, 8), (1, 8)]:
        height, width = 104 // scale, 144 // scale
        small = decode(data, channels=3, min_side=min_side)
        assert small.shape == (height, width, 3)
        blocks = Image.fromarray(full).resize((width, height), Image.Resampling.BOX)
        assert np.abs(small.astype(int) - np.array(blocks)).mean() < 3
    assert decode(data, channels=1, min_side=52).shape == (52, 72, 1)
    odd = encode(photo(101, 143), "JPEG")  # the sides of a smaller one are rounded up
    assert decode(odd, channels=3, min_side=50).shape == (51, 72, 3)
    assert decode(encode(photo(100, 140), "PNG"), channels=3, min_side=10).shape == (100, 140, 3)


def test_a_color_jpeg_as_grey_is_its_luma():
    data = encode(photo(40, 60), "JPEG", quality=95)
    by_color = np.array(Image.fromarray(decode(data, channels=3)).convert("L"))
    assert np.abs(decode(data, channels=1)[:, :, 0].astype(int) - by_color).max() <= 2


def test_of_several_images_the_first_counts():
    frames = [Image.fromarray(RGB).quantize(8), Image.fromarray(255 - RGB).quantize(8)]
    for kind in ("GIF", "PNG", "TIFF", "WEBP"):
        settings = {"lossless": True} if kind == "WEBP" else {}
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **settings)
        assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(data))))) == 2
        np.testing.assert_array_equal(decode(data, channels=3), np.array(frames[0].convert("RGB")))
    mpo = encode(photo(16, 24), "MPO", save_all=True, append_images=[photo(16, 24).rotate(180)])
    np.testing.assert_array_equal(
        decode(mpo, channels=3), decode(encode(photo(16, 24), "JPEG"), channels=3)
    )
    assert decode(mpo, channels=3, min_side=8).shape == (8, 12, 3)


def facts(data):
    """What the header says."""
    picture = Picture(data)
    return picture.height, picture.width, picture.grey


def test_grey_is_told_from_color():
    grey_palette = Image.new("P", (4, 3))
    grey_palette.putpalette([0, 0, 0, 90, 90, 90])
    color_palette = Image.new("P", (4, 3))
    color_palette.putpalette([0, 0, 0, 90, 91, 90])
    for image, kind, grey in (
        (Image.new("L", (4, 3)), "PNG", True),
        (Image.new("1", (4, 3)), "TIFF", True),
        (Image.new("LA", (4, 3)), "PNG", True),
        (Image.new("I;16", (4, 3)), "PNG", True),
        (Image.new("L", (4, 3)), "JPEG", True),
        (grey_palette, "PNG", True),
        (color_palette, "PNG", False),
        (color_palette, "BMP", False),
        (Image.new("RGB", (4, 3)), "JPEG", False),
        (Image.new("RGBA", (4, 3)), "WEBP", False),
    ):
        assert facts(encode(image, kind)) == (3, 4, grey)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"<html>not found</html>", "this is a web page"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a JPEG, PNG"),
        (encode(photo(40, 40), "JPEG")[:-300], "(?i)truncated"),
        (encode(photo(40, 40), "PNG")[:-50], "(?i)truncated"),
        (encode(photo(40, 40), "BMP")[:-1], "truncated"),
    ],
)
def test_unusable_bytes_are_a_decode_error(data, reason):
    with pytest.raises(DecodeError, match=reason) as caught:
        decode(data, channels=3)
    assert "\n" not in str(caught.value)
    assert "0x" not in str(caught.value)  # no address of an object of Pillow


def png_claiming(width, height):
    def chunk(name, body):
        check = zlib.crc32(name + body).to_bytes(4, "big")
        return len(body).to_bytes(4, "big") + name + body + check

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    pixels = chunk(b"IDAT", zlib.compress(b""))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize("width", [MAX_PIXELS // 9000 + 1, 1_000_000])
def test_a_decompression_bomb_is_refused_from_its_header(width):
    data = png_claiming(width, 9000)
    for look in (Picture, lambda data: decode(data, channels=1)):
        with pytest.raises(DecodeError, match=f"pixels are more than {MAX_PIXELS}"):
            look(data)


IN_SILENCE = """
import pathlib, sys
from flambeau.images.decode import decode
from flambeau.errors import DecodeError, UnsupportedImage

bad = 0
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        decode(path.read_bytes(), channels=1)
    except DecodeError as error:
        bad += 1
print(bad, "bad")
"""


def test_nothing_is_printed_of_damaged_tiffs_and_large_images(tmp_path, run_python):
    """In a process of its own: libtiff writes past Python, and here warnings are errors."""
    rng = np.random.default_rng(0)
    kinds = {"tiff_lzw": photo(30, 40), "tiff_adobe_deflate": photo(30, 40), "jpeg": photo(32, 48)}
    kinds |= {"group4": photo(30, 40).convert("1"), "group3": photo(30, 40).convert("1")}
    for kind, image in kinds.items():
        data = encode(image, "TIFF", compression=kind)
        for k in range(20):
            damaged = bytearray(data)
            for at in rng.integers(8, len(data), 4):
                damaged[at] = rng.integers(256)
            (tmp_path / f"{kind}{k}").write_bytes(damaged)
    (tmp_path / "large").write_bytes(b"P5 10000 9000 255 " + bytes(90_000_000))
    ran = run_python("-c", IN_SILENCE, tmp_path)
    assert ran.returncode == 0
    assert int(ran.stdout.split()[0]) > 20
    assert ran.stderr == ""


def test_a_program_may_refuse_large_images_with_pillows_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with pytest.raises(DecodeError, match="exceeds"):
            Picture(b"P5 10000 9000 255 ")


def test_damaged_metadata_is_no_warning():
    data = bytearray(encode(photo(16, 16), "TIFF", dpi=(72, 72)))
    entry = data.index((282).to_bytes(2, "little") + b"\5\0")  # XResolution, one rational
    data[entry + 8 : entry + 12] = (len(data) - 4).to_bytes(4, "little")  # where 4 of 8 bytes are
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    assert caught, "the file does not provoke the warning that this test is about"
    assert decode(bytes(data), channels=3).shape == (16, 16, 3)  # warnings are errors here


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_part_is_that_of_the_whole(kind, channels):
    data = encode(photo(45, 61), kind)
    whole = decode(data, channels=channels)
    for box in ((0, 0, 45, 61), (44, 60, 1, 1), (3, 5, 20, 30), (30, 0, 15, 61)):
        top, left, height, width = box
        part = Picture(data).pixels(box, channels=channels)
        np.testing.assert_array_equal(part, whole[top : top + height, left : left + width])


@needs_kernel
def test_a_segmented_jpeg_is_one_as_any_other(monkeypatch):
    plain = encode(photo(150, 200), "JPEG", exif=with_orientation(6))
    data = segment(plain)
    assert read_header(data).segmented
    assert not read_header(plain).segmented
    for has_kernel in (True, False):
        if not has_kernel:
            monkeypatch.setattr(native, "kernel", lambda: None)
        for box in ((0, 0, 50, 37), (31, 20, 9, 17), (49, 36, 1, 1)):
            for channels, eighths in itertools.product((1, 3), (8, 4, 2)):
                part = Picture(plain).pixels(box, channels=channels, scale_eighths=eighths)
                found = Picture(data).pixels(box, channels=channels, scale_eighths=eighths)
                np.testing.assert_array_equal(found, part)
        with pytest.raises(DecodeError):
            decode(data[: len(data) // 2], channels=3)


@needs_kernel
def test_a_tiny_segmented_jpeg_is_scaled_like_another():
    for height, width in ((5, 6), (5, 90)):
        plain = encode(photo(height, width), "JPEG")
        np.testing.assert_array_equal(
            decode(segment(plain), channels=3, min_side=1), decode(plain, channels=3, min_side=1)
        )


def test_a_cmyk_jpeg_is_scaled_by_pillow():
    data = encode(photo(80, 120).convert("CMYK"), "JPEG")
    picture = Picture(data)
    assert picture.scale_eighths_for(80, 120, least=20) == 2
    small = decode(data, channels=3, min_side=20)
    assert small.shape == (20, 30, 3)
    part = Picture(data).pixels((5, 6, 7, 8), channels=3, scale_eighths=2)
    np.testing.assert_array_equal(part, small[5:12, 6:14])


def test_how_much_smaller_a_picture_may_be_decoded():
    jpeg = Picture(encode(photo(104, 144), "JPEG"))
    for side, eighths in [(105, 8), (53, 8), (52, 4), (27, 4), (26, 2), (14, 2), (13, 1), (1, 1)]:
        assert jpeg.scale_eighths_for(104, 144, least=side) == eighths
    assert Picture(encode(photo(104, 144), "PNG")).scale_eighths_for(104, 144, least=1) == 8
    assert Picture(RGB).scale_eighths_for(13, 17, least=1) == 8
    for scale_eighths in (0, 3, 16):
        with pytest.raises(ValueError, match="scale_eighths must be 1, 2, 4 or 8"):
            jpeg.pixels(channels=3, scale_eighths=scale_eighths)


def test_pixels_of_a_source():
    assert facts(RGB) == (13, 17, False)
    assert facts(GREY) == facts(GREY[:, :, None]) == (13, 17, True)
    np.testing.assert_array_equal(decode(RGB, channels=3), RGB)
    np.testing.assert_array_equal(decode(GREY, channels=1)[:, :, 0], GREY)
    np.testing.assert_array_equal(decode(GREY[:, :, None], channels=3)[:, :, 1], GREY)
    luma = (RGB @ np.array([0.299, 0.587, 0.114])).round()
    assert np.abs(decode(RGB, channels=1)[:, :, 0] - luma).max() <= 1
    levels = GREY.astype(np.uint16) * 257
    np.testing.assert_array_equal(decode(levels, channels=1)[:, :, 0], GREY)
    clear = np.dstack([RGB, np.zeros_like(GREY)])
    assert (decode(clear, channels=3) == 255).all()
    view = RGB[::-1, 2:9]  # of any strides, and read-only
    view.flags.writeable = False
    np.testing.assert_array_equal(decode(view, channels=3), view)
    assert decode(view, channels=3).flags.writeable


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(5, np.uint8), r"an array of shape \(5,\)"),
        (np.zeros((5, 5, 0), np.uint8), r"an array of shape \(5, 5, 0\)"),
        (np.zeros((5, 5, 1025), np.uint8), r"an array of shape \(5, 5, 1025\)"),
        (np.zeros((5, 5), np.float64), "an array of float64"),
        (np.zeros((0, 5), np.uint8), "no pixel at all"),
        (np.broadcast_to(np.uint8(0), (14_000, 14_000)), "14000 x 14000 pixels are more than"),
    ],
)
def test_arrays_that_are_no_image(array, reason):
    for look in (Picture, lambda data: decode(data, channels=1)):
        with pytest.raises(DecodeError, match=reason):
            look(array)


@pytest.mark.parametrize("array", [np.zeros((5, 5, 2), np.uint8), np.zeros((5, 5, 4), np.float32)])
def test_no_grey_or_color_is_made_of_other_channels(array):
    count = array.shape[2]
    np.testing.assert_array_equal(decode(array, channels=count), array)
    for channels in (1, 3):
        with pytest.raises(UnsupportedImage, match=rf"\(5, 5, {count}\): grey or color is \(H, W"):
            decode(array, channels=channels)
    with pytest.raises(UnsupportedImage, match=f"{count} channels, where 7 are wanted"):
        decode(array, channels=7)


def test_a_jpeg_that_libjpeg_turbo_leaves_is_judged_by_pillow():
    data = encode(photo(40, 40), "JPEG")
    without_end = data[:-2]  # all pixels are there; Pillow reads it, and so must we
    expected = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    try:
        with Image.open(io.BytesIO(without_end)) as image:
            image.load()
    except OSError:
        with pytest.raises(DecodeError):
            decode(without_end, channels=3)
    else:
        np.testing.assert_array_equal(decode(without_end, channels=3), expected)


@pytest.mark.parametrize(
    ("settings", "rule"), [({"channels": 0}, "channels must be from 1 to 1024, got 0")]
)
def test_wrong_settings_are_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        decode(b"", **settings)
    with pytest.raises(ValueError, match="min_side must be at least 1, got 0"):
        decode(b"", channels=3, min_side=0)


def seeds_of_fuzzing():
    image = Image.fromarray(RGB)
    exif = with_orientation(6)
    yield encode(image, "JPEG", exif=exif)
    yield encode(image, "JPEG", progressive=True)
    yield encode(image.convert("CMYK"), "JPEG")
    yield encode(image, "MPO", save_all=True, append_images=[image.rotate(180)])
    yield encode(image, "PNG", exif=exif)
    yield encode(image.quantize(16), "PNG", transparency=b"\0\x80")
    yield encode(Image.fromarray(GREY.astype(np.uint16) * 257), "PNG")
    yield encode(image, "PNG", save_all=True, append_images=[image.rotate(90)])
    yield encode(image, "WEBP", exif=exif)
    yield encode(image.convert("RGBA"), "WEBP", lossless=True)
    yield encode(image.quantize(16), "GIF", transparency=3)
    yield encode(image, "BMP")
    yield encode(image.quantize(16), "BMP")
    yield encode(image, "TIFF")
    yield encode(image, "PPM")


def damaged(data, rng):
    data = bytearray(data)
    start = rng.randrange(len(data))
    match rng.randrange(8):
        case 0:
            del data[start:]
        case 1:
            del data[start : start + rng.randrange(1, 30)]
        case 2:
            data[start:start] = rng.randbytes(rng.randrange(1, 8))
    reach = 60 if rng.random() < 0.5 else len(data)  # headers are where it hurts
    for _ in range(rng.choice([1, 1, 2, 4, 8]) if data else 0):
        data[rng.randrange(min(len(data), reach))] = rng.choice([0, 255, rng.randrange(256)])
    return bytes(data)


def test_of_damaged_files_nothing_but_pixels_or_a_decode_error_comes_out():
    rng = random.Random(0)
    outcomes = {"pixels": 0, "error": 0}
    for whole, _ in itertools.product(list(seeds_of_fuzzing()), range(250)):
        data = damaged(whole, rng)
        channels = rng.choice([1, 3])
        try:
            pixels = decode(data, channels=channels, min_side=rng.choice([None, 1, 4]))
        except DecodeError as error:
            outcomes["error"] += 1
            assert str(error)
        else:
            outcomes["pixels"] += 1
            assert pixels.dtype == np.uint8
            assert pixels.shape[2:] == (channels,)
            assert pixels.size
        try:
            facts(data)
        except DecodeError as error:
            assert str(error)
    assert min(outcomes.values()) > 500


def test_threads_may_decode_at_once_and_leave_other_warnings_alone():
    data = encode(photo(64, 64), "JPEG")
    expected = decode(data, channels=3)
    before = [each for each in warnings.filters if each[2] is not UserWarning]
    wrong = []

    def work():
        for _ in range(50):
            if not np.array_equal(decode(data, channels=3), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [each for each in warnings.filters if each[2] is not UserWarning] == before
    with pytest.raises(UserWarning, match="mine"):
        warnings.warn("mine", UserWarning, stacklevel=1)
