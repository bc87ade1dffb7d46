"""TIFF files of several samples per pixel against the arrays that tifffile wrote."""

import io
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flambeau.errors import DecodeError, UnsupportedImage
from flambeau.images.all_channels import all_channels, stored_channels
from flambeau.images.decode import Picture, decode

HEIGHT, WIDTH = 35, 37
LAYOUTS: list[dict[str, Any]] = [{}, {"tile": (16, 32)}, {"rowsperstrip": 7}]
COMPRESSIONS: list[dict[str, Any]] = [
    {},
    {"compression": "lzw"},
    {"compression": "lzw", "predictor": True},
    {"compression": "zlib", "predictor": True},
    {"compression": "packbits"},
    {"compression": "zstd", "predictor": True},
]
KINDS: list[dict[str, Any]] = [{"byteorder": "<"}, {"byteorder": ">"}, {"bigtiff": True}]


def written(x_HWC: NDArray[Any], planes: str = "contig", **settings: Any) -> bytes:
    tifffile = pytest.importorskip("tifffile")
    if settings.get("compression"):
        pytest.importorskip("imagecodecs")  # tifffile compresses by it
    if planes == "separate":
        x_HWC = np.ascontiguousarray(np.moveaxis(x_HWC, 2, 0))
    file = io.BytesIO()
    settings = {"photometric": "minisblack", **settings}
    tifffile.imwrite(file, x_HWC, metadata=None, planarconfig=planes, **settings)
    return file.getvalue()


def noise(dtype: str, channels: int) -> NDArray[Any]:
    rng = np.random.default_rng(channels)
    return rng.integers(0, np.iinfo(dtype).max, (HEIGHT, WIDTH, channels)).astype(dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
@pytest.mark.parametrize("planes", ["contig", "separate"])
def test_all_samples_are_those_in_the_file(
    planes: str, compression: dict[str, Any], kind: dict[str, Any]
) -> None:
    for dtype in ("u1", "u2"):
        for channels in (2, 4, 13):
            for layout in LAYOUTS:
                x_HWC = noise(dtype, channels)
                data = written(x_HWC, planes, **layout, **compression, **kind)
                found = stored_channels(data)
                assert (found.channels, found.are_no_color) == (channels, True)
                assert found.is_wide == (dtype == "u2")
                got = all_channels(data, channels)
                assert got.dtype == dtype
                np.testing.assert_array_equal(got, x_HWC)


def test_an_alpha_is_no_channel_unless_it_is_asked_for() -> None:
    x_HWC = noise("u1", 4)
    for extra, are_no_color in (("unassalpha", False), ("unspecified", True)):
        data = written(x_HWC, photometric="rgb", extrasamples=(extra,))
        assert stored_channels(data).are_no_color == are_no_color
        np.testing.assert_array_equal(all_channels(data, 4), x_HWC)
        if are_no_color:
            with pytest.raises(UnsupportedImage, match="4 samples per pixel"):
                Picture(data)
        else:
            assert decode(data, channels=3).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("compression", [None, "lzw"])
def test_color_in_planes_has_all_16_bits_as_channels(compression: str | None) -> None:
    """As color Pillow gives 8 bits of it, or other pixels, which is refused."""
    x_HWC = noise("u2", 4)
    data = written(
        x_HWC, "separate", photometric="rgb", extrasamples=("unassalpha",), compression=compression
    )
    found = stored_channels(data)
    assert (found.channels, found.are_no_color, found.has_wide_samples) == (4, False, True)
    if compression is not None:
        assert not found.is_wide
        assert not Picture(data).wide
    np.testing.assert_array_equal(all_channels(data, 4), x_HWC)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_it_is_turned_upright(orientation: int) -> None:
    x_HWC = noise("u2", 4)
    tag = (274, 3, 1, orientation, True)
    got = all_channels(written(x_HWC, extratags=[tag]), 4)
    x = x_HWC.transpose(1, 0, 2) if orientation >= 5 else x_HWC
    if orientation in (2, 3, 6, 7):
        x = x[:, ::-1]
    if orientation in (3, 4, 7, 8):
        x = x[::-1]
    np.testing.assert_array_equal(got, x)


def test_another_number_of_channels_is_refused() -> None:
    data = written(noise("u1", 4))
    with pytest.raises(DecodeError, match="an image of 4 channels, where 5 are wanted"):
        all_channels(data, 5)


# ---------------------------------------------------------------- what is refused


def tiff(width: int, height: int, samples: int, more: dict[int, int] | None = None) -> bytes:
    """A file of a header, which may claim anything, and ten bytes of pixels."""
    tags = {
        256: width,
        257: height,
        258: 8,
        259: 1,
        262: 1,
        273: 8,
        277: samples,
        278: height,
        279: 10,
        **(more or {}),
    }
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items())]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return struct.pack("<2sHI", b"II", 42, 18) + bytes(10) + directory


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (tiff(5, 1, 60_000), "60000 channels are more than 1024"),
        (tiff(60_000, 60_000, 4), "60000 x 60000 x 4 samples are more than 178956970"),
        (tiff(2**31, 2**31, 1000), "samples are more than 178956970"),
        (tiff(4000, 4000, 7), "4000 x 4000 x 7 samples are more than its"),
        (tiff(4000, 4000, 7, {259: 5}), "4000 x 4000 x 7 samples are more than its"),
        (tiff(0, 5, 4), "no pixel at all"),
        (tiff(1, 2, 4, {258: 12}), "samples of 8 or of 16 bits are read"),
        (tiff(1, 2, 4, {258: 32, 339: 3}), "samples of 8 or of 16 bits are read"),
        (tiff(1, 2, 4, {339: 2}), "whole numbers without a sign are read"),
        (tiff(1, 2, 4, {259: 7}), "compressed by LZW, Deflate, PackBits or ZSTD are read"),
        (tiff(1, 2, 4, {317: 2}), "predictor 2 is not read"),
    ],
)
def test_what_is_refused_by_name_before_memory_is_taken(data: bytes, reason: str) -> None:
    tracemalloc.start()
    try:
        for read in (stored_channels, lambda data: all_channels(data, 4)):
            with pytest.raises(UnsupportedImage, match=reason):
                read(data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "more", [{279: 0}, {279: 10**6}, {273: 10**6}, {278: 1}, {278: 0}, {322: 0, 323: 16, 324: 8}]
)
def test_parts_that_are_not_there(more: dict[int, int]) -> None:
    with pytest.raises(DecodeError):
        all_channels(tiff(1, 2, 5, more), 5)


def test_damaged_files_give_pixels_of_that_shape_or_an_error() -> None:
    rng = np.random.default_rng(0)
    files = [
        written(noise(dtype, 5), planes, **layout, **compression)
        for dtype, planes, layout, compression in (
            ("u1", "contig", {}, {}),
            ("u2", "contig", {"tile": (16, 16)}, {"compression": "lzw", "predictor": True}),
            ("u2", "separate", {"rowsperstrip": 7}, {"compression": "zlib", "predictor": True}),
            ("u1", "separate", {"tile": (16, 32)}, {"compression": "zstd"}),
        )
    ]
    outcomes = {"pixels": 0, "error": 0}
    for number in range(400):
        data = bytearray(files[number % len(files)])
        if number % 5 == 0:
            del data[int(rng.integers(8, len(data))) :]
        # Half of the damage is in the directory, at one of the ends of the file.
        low, high = ((0, len(data)), (max(0, len(data) - 400), len(data)), (0, 400))[number % 3]
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(low, min(high, len(data))))] = int(rng.integers(256))
        try:
            stored_channels(bytes(data))
            x_HWC = all_channels(bytes(data), 5)
        except DecodeError as error:
            assert str(error)
            outcomes["error"] += 1
        else:
            assert x_HWC.shape[2] == 5
            assert x_HWC.dtype in (np.uint8, np.uint16)
            outcomes["pixels"] += 1
    assert min(outcomes.values()) > 40, outcomes
