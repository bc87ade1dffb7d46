"""Segmented JPEGs against libjpeg-turbo (simplejpeg) and Pillow: pixels, structure, damage, refusals."""

import io
import re
import struct
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageFile

from flambeau.data.images.jpeg import scan_segments as segments
from flambeau.data.images.jpeg.scan_segments import (
    CannotSegment,
    decode_region,
    is_segmented,
    segment,
)
from flambeau.data.images.native import kernel as native
from flambeau.errors import DecodeError

Pixels = NDArray[np.uint8]
PHOTOS = Path(__file__).parents[5] / "shared" / "datasets" / "photos.tar"
SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")


@pytest.fixture(params=["kernel", "python"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to do it; the one without the kernel is forced by hiding it."""
    if request.param == "python":
        monkeypatch.setattr(native, "kernel", lambda: None)
    elif native.kernel() is None:
        pytest.skip(native.kernel_status())
    return str(request.param)


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    """Smooth colours, edges and noise: all of what the entropy coder meets."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([128 + 100 * np.sin(x / 23 + k) * np.cos(y / (17 + k)) for k in range(3)], -1)
    smooth[(x // 31 + y // 29) % 5 == 0] = (250, 10, 60)
    noise = rng.normal(0, 40, smooth.shape) * ((x + y) // 40 % 2)[:, :, None]
    return np.ascontiguousarray((smooth + noise).clip(0, 255).astype(np.uint8))


def jpeg(height: int, width: int, sampling: str, *, quality: int = 85, seed: int = 0) -> bytes:
    image = picture(height, width, seed)
    if sampling == "Gray":
        return bytes(simplejpeg.encode_jpeg(image[:, :, :1].copy(), quality, "GRAY", "Gray"))
    return bytes(simplejpeg.encode_jpeg(image, quality, "RGB", sampling))


def by_pillow(image: Pixels, **settings: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", **settings)
    return file.getvalue()


def whole(data: bytes, scale: int = 8, channels: int = 3) -> Pixels:
    """The whole image by libjpeg-turbo."""
    height, width = (-(-side * scale // 8) for side in simplejpeg.decode_jpeg_header(data)[:2])
    colours = "RGB" if channels == 3 else "GRAY"
    pixels: Pixels = simplejpeg.decode_jpeg(data, colours, min_height=height, min_width=width)
    assert pixels.shape == (height, width, channels)
    return pixels


def boxes(height: int, width: int, count: int, seed: int) -> Iterator[tuple[int, int, int, int]]:
    """Random ones, and the corners and the whole."""
    rng = np.random.default_rng(seed)
    yield from ((0, 0, height, width), (0, 0, 1, 1), (height - 1, width - 1, 1, 1))
    for _ in range(count):
        h, w = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
        yield int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w


def assert_boxes_are_equal(data: bytes, count: int, *, seed: int = 0) -> None:
    for scale in (8, 4, 2, 1):
        for channels in (3, 1):
            full = whole(data, scale, channels)
            for box in boxes(*full.shape[:2], count, seed):
                top, left, h, w = box
                got = decode_region(data, *box, scale=scale, channels=channels)  # type: ignore[arg-type]
                np.testing.assert_array_equal(
                    got, full[top : top + h, left : left + w], f"{box} at {scale}/8, {channels}"
                )


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_boxes_are_those_of_the_whole_image(sampling: str, path: str) -> None:
    for seed, (height, width) in enumerate([(131, 203), (64, 128), (9, 250), (77, 8), (21, 3)]):
        data = jpeg(height, width, sampling, quality=(30, 85, 100)[seed % 3], seed=seed)
        cut = segment(data, interval_px=(64, 16, 32, 8, 200)[seed])
        np.testing.assert_array_equal(whole(cut), whole(data))
        assert_boxes_are_equal(cut, 7, seed=seed)


@pytest.mark.parametrize("sampling", ["420", "444", "Gray"])
@pytest.mark.parametrize("columns", [31, 23, 13])
def test_segments_that_wrap_into_the_next_row(columns: int, sampling: str, path: str) -> None:
    """A prime number of MCUs: no interval near the wanted one divides the row."""
    unit = 16 if sampling == "420" else 8
    data = jpeg(90, unit * columns - 5, sampling)
    cut = segment(data, interval_px=4 * unit if columns > 13 else 5 * unit)
    assert columns % interval_of(cut)
    assert_boxes_are_equal(cut, 12)


@pytest.mark.parametrize("settings", [{"keep_rgb": True}, {"subsampling": 2}, {"quality": 100}])
def test_files_of_pillow(settings: dict[str, object], path: str) -> None:
    image = picture(70, 150)
    data = by_pillow(image, restart_marker_blocks=3, **settings)
    cut = segment(data)
    assert_boxes_are_equal(cut, 4)
    for pixels in (whole(cut), np.asarray(Image.open(io.BytesIO(cut)))):
        np.testing.assert_array_equal(pixels, np.asarray(Image.open(io.BytesIO(data))))


def test_photographs(path: str) -> None:
    if not PHOTOS.exists():
        pytest.skip("needs ../shared/datasets/photos.tar")
    count = 12 if path == "kernel" else 2
    with tarfile.open(PHOTOS) as tar:
        members = [m for m in tar if m.isfile()][: 20 * count : 20]
        photos = [tar.extractfile(m).read() for m in members]  # type: ignore[union-attr]
    cuts = [segment(photo) for photo in photos]
    assert sum(map(len, cuts)) < 1.05 * sum(map(len, photos))
    for seed, (photo, cut) in enumerate(zip(photos, cuts, strict=True)):
        full = whole(photo)
        for top, left, h, w in boxes(*full.shape[:2], 8, seed):
            np.testing.assert_array_equal(
                decode_region(cut, top, left, h, w), full[top : top + h, left : left + w]
            )


def interval_of(data: bytes) -> int:
    at = data.index(b"\xff\xdd\0\4")
    return int(struct.unpack_from(">H", data, at + 4)[0])


def test_index_says_where_the_segments_are(path: str) -> None:
    data = segment(jpeg(100, 500, "420"))
    scan = re.search(rb"\xff\xda\0\x0c.{10}", data, re.DOTALL)
    assert scan is not None
    pieces = re.split(
        rb"\xff[\xd0-\xd9]", data[scan.end() :]
    )  # naive: no other marker is in a scan
    name = data.index(b"FLAMBEAU\0\1")
    size = struct.unpack_from(">H", data, name - 2)[0]
    entries = data[name + 12 : name + size - 2]
    assert [len(piece) for piece in pieces[:-1]] == list(np.frombuffer(entries, ">u2"))
    assert pieces[-1] == b""
    assert interval_of(data) == 4  # 64 pixels
    assert len(pieces) - 1 == 7 * 32 / 4


def test_index_of_several_parts(path: str) -> None:
    y, x = np.mgrid[:1440, :1440]
    image = ((x // 8 * 7 + y // 8 * 3) % 256).astype(np.uint8)[:, :, None]
    data = segment(simplejpeg.encode_jpeg(image, 50, "GRAY", "Gray"), interval_px=8)
    assert data.count(b"FLAMBEAU\0\1\0\2") == data.count(b"FLAMBEAU\0\1\1\2") == 1
    got = decode_region(data, 1300, 900, 140, 160, channels=1)
    np.testing.assert_array_equal(got, whole(data, channels=1)[1300:, 900:1060])


def test_metadata_stays_and_what_follows_goes(path: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = by_pillow(picture(40, 90), exif=exif, icc_profile=b"not a real one", comment=b"words")
    mpf = b"\xff\xe2" + struct.pack(">H", 12) + b"MPF\0" + b"offsets"[:6]
    cut = segment(data[:2] + mpf + data[2:] + b"a preview")
    assert cut == segment(data)
    image = Image.open(io.BytesIO(cut))
    assert image.getexif()[0x0112] == 6
    assert (image.info["icc_profile"], image.info["comment"]) == (b"not a real one", b"words")
    assert cut.endswith(b"\xff\xd9")


def test_segmenting_again_changes_nothing(path: str) -> None:
    data = jpeg(60, 200, "422")
    cut = segment(data)
    assert is_segmented(cut) and not is_segmented(data)
    assert segment(cut) == cut
    assert segment(segment(data, interval_px=16)) == cut


def test_both_ways_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.kernel() is None:
        pytest.skip(native.kernel_status())
    files = [jpeg(50, 180, s, quality=q) for s in SAMPLINGS for q in (20, 100)]
    by_kernel = [segment(data, interval_px=32) for data in files]
    monkeypatch.setattr(native, "kernel", lambda: None)
    assert [segment(data, interval_px=32) for data in files] == by_kernel


def test_progressive_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 20)
    image = picture(70, 150)
    files = [
        by_pillow(image, progressive=True, subsampling=s, quality=q, restart_marker_blocks=r)
        for s, q, r in [(0, 100, 0), (1, 60, 5), (2, 85, 0)]
    ]
    files.append(by_pillow(image[:, :, 0], progressive=True))
    if native.kernel() is not None:
        for data in files:
            cut = segment(data)
            assert b"\xff\xc2\0" not in cut[:1000] and b"\xff\xc0\0" in cut[:1000]
            np.testing.assert_array_equal(whole(cut), whole(data))
            assert_boxes_are_equal(cut, 2)
    monkeypatch.setattr(native, "kernel", lambda: None)
    with pytest.raises(CannotSegment, match="progressive"):
        segment(files[0])


def test_threads(path: str) -> None:
    cut = segment(jpeg(120, 300, "420"))
    full = whole(cut)
    chosen = list(boxes(120, 300, 60, 3))
    with ThreadPoolExecutor(4) as pool:
        for (top, left, h, w), got in zip(
            chosen, pool.map(lambda box: decode_region(cut, *box), chosen), strict=True
        ):
            np.testing.assert_array_equal(got, full[top : top + h, left : left + w])


def cmyk() -> bytes:
    file = io.BytesIO()
    Image.new("CMYK", (20, 20)).save(file, "JPEG")
    return file.getvalue()


GOOD = jpeg(40, 120, "420")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8",
        b"\x89PNG\r\n\x1a\n",
        cmyk(),
        GOOD[:-200],
        GOOD[:-2] + b"\0\0\xff\xd9",  # more data than the image has
        GOOD.replace(b"\xff\xda", b"\xff\xd9"),
        GOOD.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc1\0\x11\x0c"),  # 12 bits
        GOOD.replace(b"\xff\xc0\0\x11", b"\xff\xc9\0\x11"),  # arithmetic coding
        GOOD.replace(b"\0\x28\0\x78\x03", b"\xff\xff\xff\xff\x03"),  # too many pixels
    ],
)
def test_refused_files(data: bytes, path: str) -> None:
    with pytest.raises(CannotSegment) as error:
        segment(data)
    assert 5 < len(str(error.value)) < 120
    assert not is_segmented(data)


@pytest.mark.parametrize(
    "box", [(0, 0, 41, 1), (0, 0, 1, 121), (-1, 0, 5, 5), (0, 116, 5, 5), (3, 3, 0, 5)]
)
def test_refused_boxes(box: tuple[int, int, int, int], path: str) -> None:
    with pytest.raises(ValueError, match="no box of") as error:
        decode_region(segment(GOOD), *box)
    assert not isinstance(error.value, DecodeError)


def test_refused_settings(path: str) -> None:
    cut = segment(GOOD)
    with pytest.raises(ValueError, match="interval_px"):
        segment(GOOD, interval_px=0)
    with pytest.raises(ValueError, match="scale"):
        decode_region(cut, 0, 0, 1, 1, scale=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no box of"):
        decode_region(segment(jpeg(7, 7, "444")), 0, 0, 1, 1, scale=4)
    for out in (np.zeros((5, 5, 1), np.uint8), np.zeros((5, 10, 3), np.uint8)[:, ::2]):
        with pytest.raises(ValueError, match="out must be"):
            decode_region(cut, 0, 0, 5, 5, out=out)
    with pytest.raises(DecodeError, match="index"):
        decode_region(GOOD, 0, 0, 5, 5)


def test_into_an_array(path: str) -> None:
    cut = segment(GOOD)
    out = np.zeros((10, 20, 3), np.uint8)
    assert decode_region(cut, 4, 6, 10, 20, out=out) is out
    np.testing.assert_array_equal(out, whole(cut)[4:14, 6:26])


def test_damage_is_named(path: str) -> None:
    cut = segment(jpeg(60, 300, "420"))
    index, scan = cut.index(b"FLAMBEAU") + 12, cut.index(b"\xff\xda") + 14
    first_marker = cut.index(b"\xff\xd0", scan)
    damaged = [
        cut[:-1],
        cut[: scan + 50],
        cut[:index] + b"\xff\xff" + cut[index + 2 :],  # a length
        cut[: index - 1] + b"\2" + cut[index:],  # number of parts
        cut[: first_marker + 1] + b"\xd3" + cut[first_marker + 2 :],  # order of the segments
        cut.replace(b"\xff\xdd\0\4\0\4", b"\xff\xdd\0\4\0\5"),  # another restart interval
    ]
    for data in damaged:
        with pytest.raises(DecodeError, match=r"damaged|index"):
            decode_region(data, 0, 0, 60, 300)


def test_damage_elsewhere_does_not_matter(path: str) -> None:
    """Only the segments under the box are looked at."""
    cut = segment(jpeg(200, 600, "420"))
    expected = decode_region(cut, 0, 0, 60, 100)
    spoilt = cut[:-400] + bytes(398) + cut[-2:]
    np.testing.assert_array_equal(decode_region(spoilt, 0, 0, 60, 100), expected)
    with pytest.raises(DecodeError):
        decode_region(spoilt, 100, 500, 100, 100)


def test_every_short_file_is_refused(path: str) -> None:
    cut = segment(jpeg(16, 40, "420", quality=10))
    for size in range(len(cut)):
        with pytest.raises(DecodeError):
            decode_region(cut[:size], 0, 0, 16, 40)


def test_reasons_for_every_code() -> None:
    codes = {native.BAD_HEADER, native.NO_INDEX, native.UNSUPPORTED, native.DAMAGED}
    assert codes == set(segments._REASONS)
