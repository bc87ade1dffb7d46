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
from PIL import Image, ImageFile

from flambeau.errors import DecodeError, InputError
from flambeau.images.decode import decode
from flambeau.images.jpeg import region_decode, scan_segments
from flambeau.images.jpeg.headers import read_header
from flambeau.images.jpeg.scan_segments import CannotSegment, is_segmented, segment
from flambeau.images.native import kernel as native
from flambeau.images.pixels import Box, Pixels

PHOTOS = Path(__file__).parents[4] / "shared" / "datasets" / "photos.tar"
PACKED = Path(__file__).parents[2] / "fixtures" / "version_0_1" / "segmented.jpg"
needs_kernel = pytest.mark.skipif(native.kernel() is None, reason=native.kernel_status())
SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")


@pytest.fixture(params=["kernel", "without"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How regions are decoded: by the kernel's index, or as those of any JPEG. Cutting needs the kernel."""
    if native.kernel() is None:
        pytest.skip(native.kernel_status())
    if request.param == "without":
        monkeypatch.setattr(region_decode, "decode_by_kernel", lambda *_, **__: False)
    return str(request.param)


def decode_region(data: bytes, box: Box, *, eighths: int = 8, channels: int = 3) -> Pixels:
    header = read_header(data)
    assert header is not None and header.segmented
    pixels = region_decode.decode_region(
        data, header, box, scale_eighths=eighths, channels=channels
    )
    assert pixels is not None
    return pixels


def refusal(data: bytes, box: Box) -> int:
    """The code by which the kernel refuses it; then it is read as any other JPEG."""
    kernel, out = native.kernel(), np.empty((*box[2:], 3), np.uint8)
    assert kernel is not None
    with pytest.raises(native.KernelError) as caught:
        kernel.decode_region(data, box, out, scale_eighths=8)
    return caught.value.code


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    """Smooth colors, edges and noise: all of what the entropy coder meets."""
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


def whole(data: bytes, eighths: int = 8, channels: int = 3) -> Pixels:
    """The whole image by libjpeg-turbo."""
    height, width = (-(-side * eighths // 8) for side in simplejpeg.decode_jpeg_header(data)[:2])
    colors = "RGB" if channels == 3 else "GRAY"
    pixels: Pixels = simplejpeg.decode_jpeg(data, colors, min_height=height, min_width=width)
    assert pixels.shape == (height, width, channels)
    return pixels


def boxes(height: int, width: int, count: int, seed: int) -> Iterator[Box]:
    """Random ones, and the corners and the whole."""
    rng = np.random.default_rng(seed)
    yield from ((0, 0, height, width), (0, 0, 1, 1), (height - 1, width - 1, 1, 1))
    for _ in range(count):
        h, w = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
        yield int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w


def assert_boxes_are_equal(data: bytes, count: int, *, seed: int = 0) -> None:
    for eighths in (8, 4, 2, 1):
        if eighths < 8 and min(whole(data).shape[:2]) < 8:
            continue  # nobody asks for it
        for channels in (3, 1):
            full = whole(data, eighths, channels)
            for box in boxes(*full.shape[:2], count, seed):
                top, left, h, w = box
                got = decode_region(data, box, eighths=eighths, channels=channels)
                np.testing.assert_array_equal(
                    got, full[top : top + h, left : left + w], f"{box} at {eighths}/8, {channels}"
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
                decode_region(cut, (top, left, h, w)), full[top : top + h, left : left + w]
            )


def interval_of(data: bytes) -> int:
    at = data.index(b"\xff\xdd\0\4")
    return int(struct.unpack_from(">H", data, at + 4)[0])


@needs_kernel
def test_index_says_where_the_segments_are() -> None:
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


@needs_kernel
def test_index_of_several_parts() -> None:
    y, x = np.mgrid[:1440, :1440]
    image = ((x // 8 * 7 + y // 8 * 3) % 256).astype(np.uint8)[:, :, None]
    data = segment(simplejpeg.encode_jpeg(image, 50, "GRAY", "Gray"), interval_px=8)
    assert data.count(b"FLAMBEAU\0\1\0\2") == data.count(b"FLAMBEAU\0\1\1\2") == 1
    got = decode_region(data, (1300, 900, 140, 160), channels=1)
    np.testing.assert_array_equal(got, whole(data, channels=1)[1300:, 900:1060])


@needs_kernel
def test_metadata_stays_and_what_follows_goes() -> None:
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


@needs_kernel
def test_segmenting_again_changes_nothing() -> None:
    data = jpeg(60, 200, "422")
    cut = segment(data)
    assert is_segmented(cut) and not is_segmented(data)
    assert segment(cut) == cut
    assert segment(segment(data, interval_px=16)) == cut


def test_a_file_of_an_earlier_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read with and without the kernel, and written by it byte for byte."""
    data = PACKED.read_bytes()
    assert_boxes_are_equal(data, 5)
    if native.kernel() is not None:
        assert segment(data) == data
        assert segment(jpeg(90, 140, "420", quality=60)) == data
    monkeypatch.setattr(native, "kernel", lambda: None)
    assert_boxes_are_equal(data, 5)


def test_without_the_kernel_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernel", lambda: None)
    monkeypatch.setattr(native, "kernel_status", lambda: "not built: no C compiler was found")
    with pytest.raises(
        InputError, match=r"needs .* C kernel, which is not built: .*\nInstall .* wheel"
    ):
        segment(GOOD)


@needs_kernel
def test_progressive_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 20)
    image = picture(70, 150)
    files = [
        by_pillow(image, progressive=True, subsampling=s, quality=q, restart_marker_blocks=r)
        for s, q, r in [(0, 100, 0), (1, 60, 5), (2, 85, 0)]
    ]
    files.append(by_pillow(image[:, :, 0], progressive=True))
    for data in files:
        cut = segment(data)
        assert b"\xff\xc2\0" not in cut[:1000] and b"\xff\xc0\0" in cut[:1000]
        np.testing.assert_array_equal(whole(cut), whole(data))
        assert_boxes_are_equal(cut, 2)


def test_threads(path: str) -> None:
    cut = segment(jpeg(120, 300, "420"))
    full = whole(cut)
    chosen = list(boxes(120, 300, 60, 3))
    with ThreadPoolExecutor(4) as pool:
        for (top, left, h, w), got in zip(
            chosen, pool.map(lambda box: decode_region(cut, box), chosen), strict=True
        ):
            np.testing.assert_array_equal(got, full[top : top + h, left : left + w])


def cmyk() -> bytes:
    file = io.BytesIO()
    Image.new("CMYK", (20, 20)).save(file, "JPEG")
    return file.getvalue()


GOOD = jpeg(40, 120, "420")


@needs_kernel
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
def test_refused_files(data: bytes) -> None:
    with pytest.raises(CannotSegment) as error:
        segment(data)
    assert 5 < len(str(error.value)) < 120
    assert not is_segmented(data)


@needs_kernel
@pytest.mark.parametrize(
    "box", [(0, 0, 41, 1), (0, 0, 1, 121), (-1, 0, 5, 5), (0, 116, 5, 5), (3, 3, 0, 5)]
)
def test_refused_boxes(box: Box) -> None:
    assert refusal(segment(GOOD), box) == native.BAD_BOX


def test_refused_interval() -> None:
    for interval_px in (0, 4097):
        with pytest.raises(ValueError, match="interval_px"):
            segment(GOOD, interval_px=interval_px)


@needs_kernel
def test_damage_is_noticed() -> None:
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
        assert refusal(data, (0, 0, 60, 300)) in (native.DAMAGED, native.BAD_HEADER)


@needs_kernel
def test_a_wrong_index_does_no_harm() -> None:
    """A tool may have written the data anew and copied the index: the file is read as any other JPEG."""
    cut = segment(jpeg(60, 300, "420"))
    index = cut.index(b"FLAMBEAU") + 12
    for entry in (b"\xff\xff", b"\0\1"):
        data = cut[:index] + entry + cut[index + 2 :]
        assert is_segmented(data)
        np.testing.assert_array_equal(decode(data, channels=3), whole(cut))


@needs_kernel
def test_damage_elsewhere_does_not_matter() -> None:
    """Only the segments under the box are looked at."""
    cut = segment(jpeg(200, 600, "420"))
    expected = decode_region(cut, (0, 0, 60, 100))
    spoilt = cut[:-400] + bytes(398) + cut[-2:]
    np.testing.assert_array_equal(decode_region(spoilt, (0, 0, 60, 100)), expected)
    assert refusal(spoilt, (100, 500, 100, 100)) == native.DAMAGED


def test_every_short_file_is_refused(path: str) -> None:
    cut = segment(jpeg(16, 40, "420", quality=10))
    for size in range(len(cut)):
        with pytest.raises(DecodeError):
            decode(cut[:size], channels=3)


def test_reasons_for_every_code() -> None:
    codes = {native.BAD_HEADER, native.UNSUPPORTED, native.DAMAGED}
    assert codes == set(scan_segments._REASONS)
