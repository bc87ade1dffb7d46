"""More than 5,000 damaged images of several formats through a data set: each bad one is named, once."""

import io
import random

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.errors import DecodeError
from flambeau.images.decode import Picture, decode
from flambeau.images.jpeg.scan_segments import segment
from flambeau.images.native import kernel as native

PIXELS = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
PIXELS[8:30, 8:40] = 90  # a flat part: short codes, and runs in all formats
EACH = 430  # mutants of each original


def encoded(kind, image=None, **settings):
    buffer = io.BytesIO()
    (image or Image.fromarray(PIXELS)).save(buffer, kind, **settings)
    return buffer.getvalue()


def oriented():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def originals():
    image = Image.fromarray(PIXELS)
    palette = image.quantize(16)
    plain = encoded("JPEG", subsampling=0)
    return {
        "JPEG 4:2:0 turned": encoded("JPEG", exif=oriented()),
        "JPEG 4:4:4 restarts": encoded("JPEG", subsampling=0, restart_marker_blocks=2),
        "JPEG progressive": encoded("JPEG", progressive=True),
        "JPEG segmented": segment(plain, interval_px=16) if native.kernel() else plain,
        "JPEG grey": encoded("JPEG", image.convert("L")),
        "PNG": encoded("PNG"),
        "PNG palette": encoded("PNG", palette, transparency=b"\0\x80"),
        "WebP": encoded("WEBP", exif=oriented()),
        "WebP lossless": encoded("WEBP", image.convert("RGBA"), lossless=True),
        "BMP": encoded("BMP", palette),
        "GIF": encoded("GIF", palette, transparency=3),
        "TIFF": encoded("TIFF", compression="tiff_lzw"),
    }


def mutant(data, rng):
    """Bits turned, bytes replaced, removed, put in, repeated; or the end cut off."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        # Half of the damage is done near the start: that is where lengths and sizes are.
        at = rng.randrange(min(len(data), 700) if rng.random() < 0.5 else len(data))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice([0, 255, 0xD8, 0xD9, 0xDA, 0xC0, rng.randrange(256)])
            case 2:
                del data[at : at + rng.randrange(1, 40)]
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 10))
            case 4:
                data[at:at] = data[at : at + rng.randrange(1, 60)]
            case 5 if rng.random() < 0.2:
                del data[at + 1 :]
        data = data or bytearray(1)
    return bytes(data)


class Mutants:
    """A source of them."""

    classes, fingerprint = ("a", "b"), "none"

    def __init__(self):
        rng = random.Random(0)
        self.images = [mutant(data, rng) for data in originals().values() for _ in range(EACH)]
        self.labels = torch.arange(len(self.images)) % 2
        self.names = list(map(str, range(len(self.images))))

    def __len__(self):
        return len(self.images)

    def describe(self, index):
        return f"mutant {index}"

    def read(self, index):
        return self.images[index]


@pytest.fixture(scope="module")
def mutants():
    return Mutants()


def is_bad(data):
    try:
        pixels = decode(data, channels=3)
    except DecodeError as error:
        assert str(error)
        assert "\n" not in str(error)
        return True
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3
    assert pixels.size
    return False


def test_there_are_more_than_5000_of_which_a_good_part_is_bad(mutants):
    assert len(mutants) > 5000
    for kind, name in enumerate(originals()):
        bad = sum(map(is_bad, mutants.images[kind * EACH : (kind + 1) * EACH]))
        assert 20 < bad < EACH, name


def test_every_bad_file_is_named_once_in_evaluation(mutants):
    dataset = ImageDataset(
        mutants, image_size=20, channels=3, train=False, skip_bad=True, threads=2
    )
    named, num_images = [], 0
    for indices in torch.arange(len(mutants)).split(256):
        (images, targets), bad = dataset.batch(indices, torch.zeros_like(indices))
        assert len(images) == len(targets) == len(indices) - len(bad)
        num_images += len(images)
        named += bad
    assert len(named) == len(set(named)) == len(mutants) - num_images
    # What a part is decoded from is judged as the whole; where a size is damaged the part may be nothing.
    whole = {index for index, data in enumerate(mutants.images) if is_bad(data)}
    assert len(whole ^ set(named)) < 0.005 * len(mutants)


def test_every_bad_file_is_named_once_in_training(mutants):
    dataset = ImageDataset(mutants, image_size=20, channels=1, train=True, skip_bad=True, threads=2)
    named = []
    for indices in torch.arange(len(mutants)).split(256):
        (images, _), bad = dataset.batch(indices, indices + 5)
        assert images.shape == (len(indices), 1, 20, 20)
        named += bad
    assert len(named) == len(set(named))
    assert 500 < len(named) < len(mutants)


def test_the_kernel_is_no_other_judge(mutants, monkeypatch):
    """Neither of what is usable nor of the pixels."""
    if native.kernel() is None:
        pytest.skip(native.kernel_status())
    kinds = [
        list(originals()).index(f"JPEG {name}")
        for name in ("4:2:0 turned", "4:4:4 restarts", "segmented", "grey")
    ]
    images = [
        data for kind in kinds for data in mutants.images[kind * EACH : (kind + 1) * EACH : 2]
    ]

    def results():
        for data in images:
            try:
                yield decode(data, channels=3)
            except DecodeError:
                yield None

    with_kernel = list(results())
    monkeypatch.setattr(native, "kernel", lambda: None)
    for ours, theirs in zip(with_kernel, results(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_headers_alone(mutants):
    for data in mutants.images:
        try:
            picture = Picture(data)
            assert isinstance(picture.grey, bool)
        except DecodeError as error:
            assert str(error)
        else:
            assert min(picture.height, picture.width) > 0


def jpeg_claiming(height, width):
    data = encoded("JPEG")
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + data[at + 4 :]


@pytest.mark.parametrize("sides", [(65_000, 65_000), (20_000, 8_948)])
def test_a_jpeg_that_claims_to_be_huge_is_refused_from_its_header(sides):
    for look in (Picture, lambda data: decode(data, channels=3, min_side=8)):
        with pytest.raises(DecodeError, match=f"{sides[1]} x {sides[0]} pixels are more than"):
            look(jpeg_claiming(*sides))
