"""Regions of JPEGs against a full decode by Pillow, which has a libjpeg-turbo of its own."""

import io
import pickle
import random
import threading

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from flambeau.images.jpeg.headers import read_header
from flambeau.images.jpeg.region_decode import (
    SCALES_EIGHTHS,
    decode_by_kernel,
    decode_region,
    scaled,
)
from flambeau.images.jpeg.scan_segments import segment
from flambeau.images.native import kernel as native

SAMPLINGS = ["444", "422", "420", "440", "411"]


def photo(height, width, seed=0):
    """Waves and some noise: every row, column and color differs."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 9 + k) + np.cos(y / 7 - k) for k in range(3)]
    noise = np.random.default_rng(seed).normal(0, 8, (height, width, 3))
    return np.clip(np.stack(waves, 2) * 50 + 128 + noise, 0, 255).astype(np.uint8)


def by_pillow(data, *, eighths=8, channels=3):
    with Image.open(io.BytesIO(data)) as image:
        size = (image.width * eighths // 8, image.height * eighths // 8) if eighths < 8 else None
        image.draft("L" if channels == 1 else None, size)
        pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], channels)


def encode(pixels, sampling="420", **settings):
    """By Pillow, which can do more than simplejpeg: progressive, restart markers."""
    buffer = io.BytesIO()
    grey = {"L": True}.get(Image.fromarray(pixels.squeeze()).mode)
    chroma = {} if grey else {"subsampling": {"444": 0, "422": 1, "420": 2}[sampling]}
    Image.fromarray(pixels.squeeze()).save(buffer, "JPEG", **chroma, **settings)
    return buffer.getvalue()


@pytest.fixture(params=["kernel", "simplejpeg"])
def library(request, monkeypatch):
    if request.param == "kernel":
        if native.kernel() is None:
            pytest.skip(native.kernel_status())
    else:
        monkeypatch.setattr(native, "kernel", lambda: None)
    return request.param


def boxes(height, width, rng):
    yield 0, 0, height, width
    yield height - 1, width - 1, 1, 1
    for _ in range(12):
        top, left = rng.randrange(height), rng.randrange(width)
        yield top, left, rng.randint(1, height - top), rng.randint(1, width - left)


def check_regions(data, *, channels=3, seed=0):
    header, rng = read_header(data), random.Random(seed)
    for eighths in SCALES_EIGHTHS:
        if eighths * min(header.height, header.width) < 8:
            continue  # Pillow refuses, and nobody asks for it
        whole = by_pillow(data, eighths=eighths, channels=channels)
        size = scaled(header.height, eighths), scaled(header.width, eighths)
        assert whole.shape == (*size, channels)
        for box in boxes(*whole.shape[:2], rng):
            top, left, height, width = box
            region = decode_region(data, header, box, scale_eighths=eighths, channels=channels)
            np.testing.assert_array_equal(
                region, whole[top : top + height, left : left + width], f"{eighths} {box}"
            )


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_region_is_that_of_the_full_decode(library, sampling):
    for number, size in enumerate([(131, 203), (64, 96), (33, 17), (8, 8), (1, 1), (1, 70)]):
        data = simplejpeg.encode_jpeg(photo(*size), quality=90, colorsubsampling=sampling)
        check_regions(data, seed=number)
        check_regions(data, channels=1, seed=number)


@pytest.mark.parametrize(
    "settings",
    [
        {"progressive": True},
        {"restart_marker_blocks": 5},
        {"restart_marker_rows": 1},
        {"optimize": True},
        {"quality": 30},
        {"keep_rgb": True},
    ],
    ids=str,
)
def test_every_kind_of_usual_jpeg(library, settings):
    data = encode(photo(90, 121), "444" if "keep_rgb" in settings else "420", **settings)
    check_regions(data)
    check_regions(data, channels=1)


def test_grey(library):
    data = encode(photo(70, 83)[:, :, 0])
    assert read_header(data).channels == 1
    check_regions(data)
    check_regions(data, channels=1)


def test_a_header_says_what_pillow_says():
    for size in [(1, 1), (37, 300), (512, 8)]:
        for sampling, (down, across) in {
            "444": (8, 8), "422": (8, 16), "420": (16, 16), "440": (16, 8), "411": (8, 32),
        }.items():  # fmt: skip
            data = simplejpeg.encode_jpeg(photo(*size), colorsubsampling=sampling)
            header = read_header(data)
            assert (header.width, header.height) == Image.open(io.BytesIO(data)).size
            assert (header.unit_height, header.unit_width) == (down, across)
            assert header.channels == 3
            assert header.orientation == 1
            assert header.sequential
            assert data[header.height_at : header.height_at + 2] == size[0].to_bytes(2, "big")
            assert data[header.scan_at : header.scan_at + 2] == b"\xff\xda"
    assert not read_header(encode(photo(9, 9), progressive=True)).sequential


def test_rows_below_the_region_are_not_decoded(monkeypatch):
    decoded = []

    def spy(data, *arguments, **settings):
        pixels = simplejpeg_decode(data, *arguments, **settings)
        decoded.append(pixels.shape)
        return pixels

    simplejpeg_decode = simplejpeg.decode_jpeg
    monkeypatch.setattr(native, "kernel", lambda: None)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", spy)
    data = encode(photo(320, 100), "420")
    for (top, height), eighths, rows in [
        ((0, 14), 8, 16), ((0, 15), 8, 32), ((100, 60), 8, 176), ((300, 20), 8, 320), ((0, 6), 4, 8),
    ]:  # fmt: skip
        decode_region(
            data, read_header(data), (top, 0, height, 9), scale_eighths=eighths, channels=3
        )
        assert decoded.pop()[0] == rows
    data = encode(photo(320, 100), progressive=True)
    decode_region(data, read_header(data), (0, 0, 14, 9), scale_eighths=8, channels=3)
    assert decoded.pop()[0] == 320


def test_what_is_left_to_pillow():
    plain = encode(photo(40, 40))
    sof = plain.index(b"\xff\xc0")
    exif = Image.Exif()
    exif[0x0112] = 6
    twice = encode(photo(40, 40), exif=exif)
    at = twice.index(b"Exif\0\0") - 4
    segment = twice[at : at + 2 + int.from_bytes(twice[at + 2 : at + 4], "big")]
    for data in (
        b"",
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n" + bytes(20),
        plain[: sof + 5],
        encode_cmyk(),
        twice[:2] + segment + twice[2:],  # EXIF in two parts
        *(plain[: sof + 1] + bytes([kind]) + plain[sof + 2 :] for kind in (0xC3, 0xC9, 0xCA, 0xCB)),
        plain[: sof + 4] + b"\x0c" + plain[sof + 5 :],  # 12 bits
        plain[: sof + 5] + b"\0\0" + plain[sof + 7 :],  # no height: it comes after the first scan
        plain[: sof + 11] + b"\0" + plain[sof + 12 :],  # a component of no size
    ):
        assert read_header(data) is None
    assert read_header(twice).orientation == 6
    assert read_header(plain) is not None


def encode_cmyk():
    buffer = io.BytesIO()
    Image.fromarray(photo(16, 16)).convert("CMYK").save(buffer, "JPEG")
    return buffer.getvalue()


def test_a_file_that_is_cut_short_is_not_decoded(library):
    data = encode(photo(120, 120))
    header = read_header(data)
    for settings in ({}, {"progressive": True}):
        data = encode(photo(120, 120), **settings)
        header = read_header(data)
        # Behind the end of the image there may be anything: phones put films there.
        assert (
            decode_region(data + b"film", header, (0, 0, 8, 8), scale_eighths=8, channels=3)
            is not None
        )
        for end in range(header.scan_at + 14, len(data), 97):
            assert (
                decode_region(data[:end], header, (0, 0, 8, 8), scale_eighths=8, channels=3) is None
            )
    thumbnail = (
        b"\xff\xe1" + (10).to_bytes(2, "big") + b"thumb\0\xff\xd9"
    )  # its end is not the image's
    data = data[:2] + thumbnail + data[2:]
    assert (
        decode_region(data, read_header(data), (0, 0, 8, 8), scale_eighths=8, channels=3)
        is not None
    )
    assert (
        decode_region(data[:-9], read_header(data), (0, 0, 8, 8), scale_eighths=8, channels=3)
        is None
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_an_error_before_the_last_row_is_not_passed_over(library, channels):
    """After something to warn of, simplejpeg returns memory that nobody has written, without a word."""
    data = encode(photo(60, 90), progressive=True)
    header = read_header(data)
    at = data.index(b"\xff\xda", header.scan_at + 14)  # the second scan
    # Two bytes too many, and a marker that does not exist.
    data = data[:at] + b"ab" + b"\xff\xb1" + data[at + 2 :]
    with pytest.raises(OSError, match="broken data"):
        by_pillow(data, channels=channels)
    for eighths in SCALES_EIGHTHS:
        box = (0, 0, scaled(60, eighths), scaled(90, eighths))
        assert decode_region(data, header, box, scale_eighths=eighths, channels=channels) is None


def test_a_header_that_contradicts_the_pixels_does_no_harm(library):
    rng = random.Random(0)
    for sampling in SAMPLINGS:
        whole = simplejpeg.encode_jpeg(photo(50, 60), colorsubsampling=sampling)
        for _ in range(150):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(read_header(whole).scan_at + 12)] = rng.randrange(256)
            header = read_header(bytes(data))
            if header is None or header.height * header.width > 1 << 22:
                continue
            for eighths in SCALES_EIGHTHS:
                size = scaled(header.height, eighths), scaled(header.width, eighths)
                for box in ((0, 0, *size), (size[0] // 2, size[1] // 2, 1, 1)):
                    region = decode_region(
                        bytes(data), header, box, scale_eighths=eighths, channels=3
                    )
                    assert region is None or region.shape == (*box[2:], 3)


def test_a_damaged_header_does_not_spoil_the_next_file(library):
    good = encode(photo(20, 20))
    header = read_header(good)
    data = bytearray(good)
    data[header.scan_at + 5] = 186  # a component that the header does not know
    for _ in range(3):
        assert read_header(bytes(data)) is not None
        assert decode_region(bytes(data), header, (0, 0, 8, 8), scale_eighths=8, channels=3) is None
        assert decode_region(good, header, (0, 0, 8, 8), scale_eighths=8, channels=3) is not None


def test_threads_decode_at_once(library):
    datas = [encode(photo(90, 90, seed)) for seed in range(4)]
    expected = [by_pillow(data)[20:60, 30:80] for data in datas]
    wrong = []

    def work(k):
        for _ in range(40):
            region = decode_region(
                datas[k], read_header(datas[k]), (20, 30, 40, 50), scale_eighths=8, channels=3
            )
            if not np.array_equal(region, expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_the_kernel_takes_and_what_it_leaves(monkeypatch):
    kernel = native.kernel()
    if kernel is None or not kernel.uses_avx2:
        pytest.skip(native.kernel_status())

    def takes(data, box=(3, 5, 40, 30), eighths=8):
        out = np.empty((*box[2:], 3), np.uint8)
        done = decode_by_kernel(data, read_header(data), box, out, scale_eighths=eighths)
        if done:
            top, left, height, width = box
            whole = by_pillow(data, eighths=eighths)
            np.testing.assert_array_equal(out, whole[top : top + height, left : left + width])
        return done

    plain = encode(photo(90, 90), quality=95)  # of long codes
    assert takes(plain) and takes(plain, (0, 0, 45, 45), 4) and takes(plain + b"film")
    assert takes(encode(photo(90, 90), restart_marker_blocks=1))
    assert not takes(encode(photo(90, 90), progressive=True))
    assert not takes(plain, (0, 0, 91, 8))  # beyond the image
    for marker in (
        b"\xff\xd0",
        b"\xff\x5c",
        b"\xff\xff",
    ):  # where none belongs: libjpeg is the judge
        assert not takes(plain[:-90] + marker + plain[-90:], (0, 0, 2, 2))
    table = plain.index(b"\xff\xc4\0\x1f\0") + 4  # of DC: Annex K's, of 12 codes
    full = b"\0\x20" + plain[table : table + 9] + b"\2" + plain[table + 10 : table + 29] + b"\x0c"
    # One code more, of ones only, which libjpeg does not allow.
    assert not takes(plain[: table - 2] + full + plain[table + 29 :])
    monkeypatch.setattr(kernel, "uses_avx2", False)  # then it is slower than libjpeg-turbo
    assert not takes(plain)
    assert takes(segment(plain))


def test_a_header_can_be_pickled():
    header = read_header(encode(photo(20, 20)))
    assert pickle.loads(pickle.dumps(header)) == header
