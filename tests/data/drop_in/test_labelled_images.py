"""What a transform of images gets, and what `fast` makes of torchvision's."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import v2

from flambeau import InputError, wrap

RANDOM = v2.Compose(
    [v2.RandomResizedCrop(32, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()]
)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Smooth color images: JPEG, turned JPEG, grey JPEG, PNG, PNG with alpha, palette and BMP."""
    y, x = np.mgrid[0:90, 0:120]
    levels = np.stack([x * 2, y * 2, 255 - x], axis=2).astype(np.uint8)
    image = Image.fromarray(levels)
    alpha = Image.fromarray(np.dstack([levels, x.astype(np.uint8) * 2]))
    folder = tmp_path / "photos" / "one"
    folder.mkdir(parents=True)
    image.save(folder / "a.jpg", quality=95)
    turned = Image.Exif()
    turned[0x0112] = 6
    image.save(folder / "b.jpg", quality=95, exif=turned)
    image.convert("L").save(folder / "c.jpg", quality=95)
    image.save(folder / "d.png")
    alpha.save(folder / "e.png")
    image.convert("P").save(folder / "f.png")
    image.save(folder / "g.bmp")
    return folder.parent


def read(photos: Path, transform: Any, **settings: Any) -> list[Tensor]:
    batches = wrap(photos, transform, batch_size=1, shuffle=False, **settings)
    return [x[0] for x, _ in batches]


def test_an_image_is_rgb_and_upright(photos: Path) -> None:
    def pixels(image: Image.Image) -> Tensor:
        assert image.mode == "RGB"
        return torch.from_numpy(np.array(image))

    for path, got in zip(sorted(photos.rglob("*.*")), read(photos, pixels), strict=True):
        image = ImageOps.exif_transpose(Image.open(path))
        if image.mode == "RGBA":
            image.load()
            below = Image.new("RGB", image.size, "white")
            below.paste(image, mask=image.getchannel("A"))
            image = below
        expected = np.asarray(image.convert("RGB"), np.int16)
        assert got.shape == expected.shape
        assert np.abs(got.numpy().astype(np.int16) - expected).max() <= 2


def test_transforms_of_torchvision_give_nearly_pils_pixels(photos: Path) -> None:
    steps = v2.Compose([v2.Resize(48, antialias=True), v2.CenterCrop(40), v2.PILToTensor()])

    def by_pil(image: Image.Image) -> Any:
        return steps(Image.fromarray(np.array(image)))

    for got, expected in zip(read(photos, steps), read(photos, by_pil), strict=True):
        assert got.dtype == torch.uint8 and got.shape == expected.shape == (3, 40, 40)
        assert (got.float() - expected.float()).abs().mean() < 1


def test_random_ones_depend_on_seed_epoch_and_index_alone(photos: Path) -> None:
    here = read(photos, RANDOM, seed=3)
    for workers in (0, 2):
        torch.manual_seed(workers)
        again = read(photos, RANDOM, seed=3, workers=workers)
        assert all(map(torch.equal, here, again))
    other = read(photos, RANDOM, seed=4)
    assert not any(map(torch.equal, here, other))
    batches = wrap(photos, RANDOM, batch_size=1, shuffle=False, seed=3)
    (_, second) = [[x[0] for x, _ in batches] for _ in range(2)]
    assert not any(map(torch.equal, here, second))


@pytest.mark.parametrize("ending", ["jpg", "png"])
@pytest.mark.parametrize("workers", [0, 1])
def test_damage_is_named_where_the_crop_is_not(tmp_path: Path, ending: str, workers: int) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, {"jpg": "JPEG", "png": "PNG"}[ending])
    path = tmp_path / "photos" / "one" / f"a.{ending}"
    path.parent.mkdir(parents=True)
    path.write_bytes(stream.getvalue()[:-2000])
    top = v2.Compose([v2.FiveCrop(8), v2.Lambda(lambda crops: v2.PILToTensor()(crops[0]))])
    for transform in (RANDOM, top):
        with pytest.raises(InputError, match=rf"one/a\.{ending}: .*\nRepair or remove it"):
            read(tmp_path / "photos", transform, workers=workers)
