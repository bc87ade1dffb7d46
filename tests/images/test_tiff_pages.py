"""Pages of a TIFF are the channels of one image where so many are wanted: tifffile's numbers."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flambeau.errors import DecodeError, UnsupportedImage
from flambeau.images.all_channels import all_channels, stored_channels

tifffile = pytest.importorskip("tifffile")


def file_of(*pages: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    big = {name: settings.pop(name) for name in ("bigtiff", "byteorder") if name in settings}
    with tifffile.TiffWriter(file, **big) as writer:
        for page in pages:
            writer.write(page, photometric="minisblack", metadata=None, **settings)
    return file.getvalue()


def noise(count: int, kind: str = "u2") -> Any:
    top = 256 if kind == "u1" else 65536
    return np.random.default_rng(count).integers(0, top, (count, 21, 34)).astype(kind)


@pytest.mark.parametrize("kind", ["u1", "u2"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"byteorder": ">"}, {"bigtiff": True}, {"compression": "zlib"}, {"tile": (16, 16)}],
)
def test_pages_are_channels(kind: str, settings: dict[str, Any]) -> None:
    for count in (2, 4, 7):
        pages = noise(count, kind)
        data = file_of(*pages, **settings)
        found = stored_channels(data)
        assert (found.channels, found.pages, found.are_no_color) == (1, count, False)
        assert found.can_give(count) and found.can_give(1) and not found.can_give(count + 1)
        pixels = all_channels(data, count)
        assert pixels.dtype == kind
        np.testing.assert_array_equal(pixels, np.moveaxis(pages, 0, 2))
        np.testing.assert_array_equal(all_channels(data, 1)[:, :, 0], pages[0])
        with pytest.raises(DecodeError, match=f"1 channel, where {count + 1} are wanted"):
            all_channels(data, count + 1)


def test_each_page_is_turned_upright() -> None:
    pages = noise(3, "u1")
    data = file_of(*pages, extratags=[(274, "H", 1, 6, True)])
    first = np.asarray(Image.open(io.BytesIO(data)))
    assert first.shape == (34, 21)
    pixels = all_channels(data, 3)
    np.testing.assert_array_equal(pixels[:, :, 0], first)
    np.testing.assert_array_equal(pixels, np.rot90(np.moveaxis(pages, 0, 2), -1))


def test_pages_that_differ_are_refused() -> None:
    one, other = noise(2, "u1")
    for pages, message in (
        ((one, other[:9]), "its page 2 has 34 x 9 pixels of 8 bits, and the first one 34 x 21"),
        ((one, noise(1)[0]), "its page 2 has 34 x 21 pixels of 16 bits, and the first one"),
    ):
        with pytest.raises(DecodeError, match=message):
            all_channels(file_of(*pages), 2)
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        writer.write(one, photometric="minisblack")
        writer.write(np.stack([one] * 3, 2), photometric="rgb")
    with pytest.raises(UnsupportedImage, match="its page 2 is not grey"):
        all_channels(file.getvalue(), 2)


def test_pages_of_color_are_images_of_their_own() -> None:
    file = io.BytesIO()
    pages = [Image.effect_noise((9, 8), 90).convert("RGB") for _ in range(2)]
    pages[0].save(file, "tiff", save_all=True, append_images=pages[1:])
    found = stored_channels(file.getvalue())
    assert (found.channels, found.pages) == (3, 1)
    assert not found.can_give(6)


def test_a_damaged_page_is_a_bad_image() -> None:
    data = file_of(*noise(4, "u1"), compression="zlib")
    for cut in range(20, len(data), 97):
        try:
            pixels = all_channels(data[:cut], 4)
        except DecodeError:
            continue
        np.testing.assert_array_equal(pixels, np.moveaxis(noise(4, "u1"), 0, 2))


def test_more_pages_than_channels_are_counted_no_further() -> None:
    found = stored_channels(file_of(*np.zeros((1100, 2, 2), np.uint8)))
    assert found.pages == 1025
