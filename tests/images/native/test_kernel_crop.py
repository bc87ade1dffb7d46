"""The training crop by the C kernel against the same crop in steps, without it."""

import io

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.transforms.crops import TrainingCrop, train_image
from flambeau.errors import DecodeError
from flambeau.images.decode import Picture
from flambeau.images.jpeg.scan_segments import segment
from flambeau.images.native import kernel as native

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (90, 130, 3), dtype=np.uint8)
SCALE = (0.08, 1.0)

FOUND = native.kernel()
pytestmark = pytest.mark.skipif(FOUND is None or not FOUND.uses_avx2, reason=native.kernel_status())


def encoded(kind, pixels=PIXELS, **settings):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **settings)
    return buffer.getvalue()


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded("JPEG", exif=exif)


def images():
    yield from (simplejpeg.encode_jpeg(PIXELS, colorsubsampling=s) for s in ("444", "422", "420"))
    yield segment(encoded("JPEG", quality=95), interval_px=16)
    yield from (turned(orientation) for orientation in (3, 6))
    yield from (encoded("JPEG", PIXELS[:, :, 0]), encoded("PNG"), encoded("PNG", PIXELS[:, :, 1]))
    yield from (PIXELS, PIXELS[:, :, :1], np.asfortranarray(PIXELS), PIXELS.astype(np.uint16) * 257)


@pytest.fixture
def taken(monkeypatch):
    """For each crop whether the kernel has made it."""
    answers, resize_part = [], Picture.resize_part

    def spy(*arguments, **settings):
        answers.append(resize_part(*arguments, **settings))
        return answers[-1]

    monkeypatch.setattr(Picture, "resize_part", spy)
    return answers


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_pixels_are_those_of_the_crop_in_steps(channels, interpolation, taken, monkeypatch):
    found, stored = [], list(images())  # some of them are made by the kernel

    def crop(seed):
        return TrainingCrop(seed > 0, SCALE, interpolation=interpolation)

    for seed in range(6):
        for data in stored:
            out = torch.zeros(24, 24, channels, dtype=torch.uint8)
            train_image(data, seed, 24, crop=crop(seed), out=out)
            found.append(out.numpy())
    assert len(taken) == len(found)
    assert all(taken)
    monkeypatch.setattr(native, "kernel", lambda: None)
    for k, (seed, data) in enumerate((seed, data) for seed in range(6) for data in stored):
        expected = train_image(data, seed, 24, channels=channels, crop=crop(seed))
        np.testing.assert_array_equal(found[k], expected)
    assert len({out.tobytes() for out in found}) > 20  # not all the same


def test_what_the_kernel_leaves_to_others(taken, monkeypatch):
    with pytest.raises(DecodeError):
        train_image(encoded("JPEG")[:-700], 1, 24, channels=3)
    with pytest.raises(DecodeError):
        train_image(b"no image", 1, 24, channels=3)
    monkeypatch.setattr(FOUND, "uses_avx2", False)  # torch and libjpeg-turbo are faster then
    train_image(PIXELS, 1, 24)
    monkeypatch.setattr(native, "kernel", lambda: None)
    train_image(PIXELS, 1, 24)
    assert taken == [False, False]


class Source:
    classes, fingerprint = ("a", "b"), "none"

    def __init__(self):
        self.images = [*images(), encoded("JPEG", progressive=True)]
        self.labels = torch.arange(len(self.images)) % 2
        self.names = list(map(str, range(len(self.images))))

    def __len__(self):
        return len(self.images)

    def describe(self, index):
        return self.names[index]

    def read(self, index):
        return self.images[index]


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_are_the_same_with_and_without_the_kernel(threads, taken, monkeypatch):
    dataset = ImageDataset(Source(), image_size=40, channels=3, train=True, threads=threads)
    indices = torch.arange(len(dataset))
    (ours, _), bad = dataset.batch(indices, indices * 7 + 1)
    assert sum(taken) == len(dataset)
    monkeypatch.setattr(native, "kernel", lambda: None)
    (theirs, _), _ = dataset.batch(indices, indices * 7 + 1)
    assert torch.equal(ours, theirs)
    assert not bad
