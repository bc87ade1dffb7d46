"""Kinds of TIFF against the pixels that tifffile wrote, and against files made by hand."""

import io
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flambeau.errors import DecodeError, UnsupportedImage
from flambeau.images.decode import Picture, decode

HEIGHT, WIDTH = 35, 37
LAYOUTS: list[dict[str, Any]] = [{}, {"tile": (16, 16)}, {"rowsperstrip": 7}]
COMPRESSIONS: list[dict[str, Any]] = [{}, {"compression": "lzw", "predictor": True}]
COMPRESSIONS += [{"compression": "packbits"}, {"compression": "zstd"}]
EXTRA = {
    "RGB with alpha": ("unassalpha",),
    "RGB with associated alpha": ("assocalpha",),
    "RGB and infrared": ("unspecified",),
    "grey with alpha": ("unassalpha",),
    "grey with associated alpha": ("assocalpha",),
    "grey and another": ("unspecified",),
}
KINDS = ["grey", "white is zero", "RGB", "CMYK", "palette", "CIELab", "YCbCr", *EXTRA]


def written(pixels: NDArray[Any], **settings: Any) -> bytes:
    pytest.importorskip("imagecodecs")  # tifffile compresses by it
    file = io.BytesIO()
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(file, pixels, metadata=None, **settings)
    return file.getvalue()


def made(kind: str, dtype: str, planes: str, settings: dict[str, Any]) -> tuple[bytes, Any]:
    """A file, and its levels 0 .. 255 as (H, W) or (H, W, 3), or None if they have no defined one."""
    rng = np.random.default_rng(len(kind))
    white = np.iinfo(dtype).max
    samples = {"CMYK": 4, "RGB": 3, "CIELab": 3, "YCbCr": 3}.get(kind, 1)
    samples = (3 if "RGB" in kind else 1) + 1 if kind in EXTRA else samples
    shape = (HEIGHT, WIDTH, samples) if samples > 1 else (HEIGHT, WIDTH)
    x_HWC = rng.integers(0, white + 1, shape).astype(dtype)
    share = x_HWC / white
    wanted: Any = 255 * share
    photometric = {"white is zero": "miniswhite", "CMYK": "separated"}.get(kind, kind.lower())
    if kind in EXTRA:
        settings = settings | {"extrasamples": EXTRA[kind]}
        photometric = "rgb" if "RGB" in kind else "minisblack"
        color, alpha = share[..., :-1], share[..., -1:]
        if "associated" in kind:
            x_HWC[..., :-1] = np.minimum(x_HWC[..., :-1], x_HWC[..., -1:])
            wanted = 255 * (x_HWC[..., :-1] / white + 1 - alpha)
        else:
            wanted = 255 * (color * alpha + 1 - alpha)
        wanted = None if "and" in kind else wanted.squeeze()
    elif kind == "grey":
        photometric = "minisblack"
    elif kind == "white is zero":
        wanted = 255 - wanted
    elif kind == "CMYK":
        wanted = 255 * (1 - share[..., :3]) * (1 - share[..., 3:])
    elif kind == "palette":
        table = rng.integers(0, 256, (3, white + 1)).astype("u2") * 257
        wanted = np.moveaxis(table[:, x_HWC], 0, 2) / 257
        settings = settings | {"colormap": table}
    elif kind == "YCbCr":
        luma, blue, red = np.moveaxis(x_HWC * (255 / white), 2, 0)
        blue, red = blue - 128, red - 128
        rgb = [luma + 1.402 * red, luma - 0.344136 * blue - 0.714136 * red, luma + 1.772 * blue]
        wanted = np.stack(rgb, 2).clip(0, 255)
    elif kind == "CIELab":
        wanted = None
    if samples > 1 and planes == "separate":
        x_HWC = np.ascontiguousarray(np.moveaxis(x_HWC, 2, 0))
    if samples > 1:
        settings = settings | {"planarconfig": planes}
    return written(x_HWC, photometric=photometric, **settings), wanted


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in KINDS for dtype in ("u1", "u2")] + [("grey", "i1")],
)
def test_a_kind_is_read_as_it_was_written_or_refused_by_name(kind: str, dtype: str) -> None:
    read = 0
    for planes in ("contig", "separate"):
        for order in "<>":
            for layout in LAYOUTS:
                for compression in COMPRESSIONS:
                    settings = {"byteorder": order, **layout, **compression}
                    data, wanted = made(kind, dtype, planes, settings)
                    try:
                        got = decode(data, channels=3).astype(float)
                    except DecodeError as error:
                        assert "a TIFF of " in str(error)
                        continue
                    assert wanted is not None
                    wanted = wanted if wanted.ndim == 3 else wanted[:, :, None]
                    assert np.abs(got - wanted).max() <= 3, (planes, settings)
                    read += 1
    is_usual = dtype == "u1" and kind not in ("CIELab", "RGB and infrared", "grey and another")
    assert read or not is_usual


@pytest.mark.parametrize("bits", [1, 2, 4, 12])
@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
def test_packed_bits(bits: int, photometric: str) -> None:
    levels = np.random.default_rng(bits).integers(0, 1 << bits, (HEIGHT, WIDTH))
    data = written(
        levels.astype("u1" if bits <= 8 else "u2"), photometric=photometric, bitspersample=bits
    )
    wanted = levels * (255 / ((1 << bits) - 1))
    if photometric == "miniswhite":
        wanted = 255 - wanted
    if (bits, photometric) == (12, "miniswhite"):
        with pytest.raises(UnsupportedImage, match="WhiteIsZero"):
            decode(data, channels=1)
    else:
        assert np.abs(decode(data, channels=1)[:, :, 0] - wanted).max() <= 0.51


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("planes", ["contig", "separate"])
@pytest.mark.parametrize("compression", [None, "lzw"])
def test_all_16_bits_come_back_or_none_are_promised(
    order: str, planes: str, compression: str | None
) -> None:
    for samples in (1, 3):
        levels = np.random.default_rng(0).integers(0, 65536, (HEIGHT, WIDTH, samples)).astype("u2")
        pixels = levels if samples == 3 else levels[:, :, 0]
        settings: dict[str, Any] = {"byteorder": order, "compression": compression}
        if samples == 3:
            settings |= {"photometric": "rgb", "planarconfig": planes}
            pixels = (
                pixels if planes == "contig" else np.ascontiguousarray(np.moveaxis(pixels, 2, 0))
            )
        data = written(pixels, **settings)
        if samples == 3 and planes == "separate":
            with pytest.raises(DecodeError):
                Picture(data).levels()
        else:
            np.testing.assert_array_equal(Picture(data).levels(), levels)


def by_hand(tags: dict[int, Sequence[int]], pixels: bytes) -> bytes:
    """A TIFF of one strip; each value is a LONG, which readers take for any integer tag."""
    tags = {256: [3], 257: [1], 259: [1], 278: [1], 279: [len(pixels)], 273: [0], **tags}
    at = 8 + 2 + 12 * len(tags) + 4
    later = b""
    table = b""
    tags[273] = [at + sum(4 * len(values) for values in tags.values() if len(values) > 1)]
    for tag, values in sorted(tags.items()):
        body = struct.pack(f"<{len(values)}I", *values)
        place = body if len(values) == 1 else struct.pack("<I", at + len(later))
        later += body if len(values) > 1 else b""
        table += struct.pack("<HHI", tag, 4, len(values)) + place
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + table + bytes(4) + later + pixels


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ({258: [8] * 4, 262: [2], 277: [4]}, "RGB, 8 bits, 4 samples per pixel is"),
        ({258: [8] * 4, 262: [5], 277: [4], 332: [2]}, "inks that are not CMYK"),
        ({258: [8], 262: [3], 277: [1], 320: [*range(256)] * 3}, "a color table of 8 bits"),
        ({258: [8] * 3, 262: [2], 277: [3], 259: [50002]}, "compressed by JPEG XL"),
        ({258: [8] * 3, 262: [6], 277: [3], 530: [2, 2]}, "YCbCr"),
        ({258: [8], 262: [32803], 277: [1]}, "CFA"),
    ],
)
def test_what_pillow_misreads_or_does_not_know_is_named(
    tags: dict[int, Sequence[int]], words: str
) -> None:
    with pytest.raises(DecodeError, match=words):
        decode(by_hand(tags, bytes(range(12))), channels=3)


def test_high_bytes_first_in_a_bigtiff() -> None:
    data = written(np.zeros((9, 9), "u1"), bigtiff=True, byteorder=">")
    with pytest.raises(UnsupportedImage, match="BigTIFF"):
        decode(data, channels=1)
