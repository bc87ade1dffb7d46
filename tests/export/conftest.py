"""Image files as they come, and runs to export."""

import contextlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flambeau.cli.command import main
from flambeau.exports import step_figures

NastyImages = Callable[..., Iterator[tuple[str, bytes]]]

_SIDES = (1, 2, 7, 8, 24, 32, 33, 100, 257, 512, 800)
_ORIENTATIONS = range(1, 9)


@pytest.fixture(autouse=True)
def _one_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_figures, "_ROUNDS", range(1, 2))


@pytest.fixture(scope="session")
def nasty_images() -> NastyImages:
    """The function `_nasty_images`."""
    return _nasty_images


@pytest.fixture(scope="session")
def exported_run(
    tmp_path_factory: pytest.TempPathFactory,
    kept_process: Callable[[], contextlib.AbstractContextManager[None]],
) -> Path:
    """A finished run on photographs, in float32."""
    root = tmp_path_factory.mktemp("exported")
    generator = np.random.default_rng(5)
    for label, name in enumerate(("stripes", "waves", "tiles")):
        (root / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = _pattern(generator, 40 + number, 50 - number)[:, :, [label] * 3]
            Image.fromarray(pixels).save(root / "photos" / name / f"{number}.png")
    words = (
        "--model small_convnet --image-size 32 --batch-size 16 --precision fp32 --epochs 4 --out"
    )
    with kept_process():
        assert main(["train", str(root / "photos"), *words.split(), str(root / "run")]) == 0
    return root / "run"


def _nasty_images(count: int, *, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Names with an ending, and the bytes of files that every reader here takes."""
    generator = np.random.default_rng(seed)
    kinds = list(_KINDS.items())
    for number in range(count):
        name, make = kinds[number % len(kinds)]
        height, width = (
            int(generator.choice(_SIDES)) + int(generator.integers(0, 5)) for _ in "hw"
        )
        if number % 17 == 0:
            height, width = 3, 700  # of which only the middle is seen
        image = Image.fromarray(_pattern(generator, height, width))
        exif = Image.Exif()
        exif[0x0112] = int(generator.choice(_ORIENTATIONS))
        file = BytesIO()
        make(image, file, exif, generator)
        ending = name.rpartition(".")[2]
        yield f"{number:04}-{name.rpartition('.')[0]}.{ending}", file.getvalue()


def _pattern(generator: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Smooth areas, edges and some noise, (height, width, 3) uint8."""
    y, x = np.mgrid[:height, :width]
    a, b, c = generator.uniform(0.01, 0.4, 3)
    planes = [
        127 + 120 * np.sin(a * x + c * y),
        (b * 20 * x) % 256,
        255.0 * ((x // 9 + y // 7) % 2),
    ]
    noise = generator.integers(0, 20, (height, width, 3))
    return np.clip(np.stack(planes, 2) + noise, 0, 255).astype(np.uint8)


def _alpha(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    levels = generator.integers(0, 256, (image.height, image.width), dtype=np.uint8)
    image = image.convert("RGBA")
    image.putalpha(Image.fromarray(levels))
    return image


def _sixteen_bits(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257 + 3)


_KINDS = {
    "plain.jpg": lambda i, f, e, g: i.save(f, "JPEG", quality=85, exif=e),
    "progressive.jpg": lambda i, f, e, g: i.save(f, "JPEG", progressive=True, exif=e),
    "full-color.jpg": lambda i, f, e, g: i.save(f, "JPEG", subsampling=0, quality=95, exif=e),
    "half-color.jpg": lambda i, f, e, g: i.save(f, "JPEG", subsampling=1, exif=e),
    "grey.jpg": lambda i, f, e, g: i.convert("L").save(f, "JPEG", exif=e),
    "cmyk.jpg": lambda i, f, e, g: i.convert("CMYK").save(f, "JPEG", exif=e),
    "rgb.png": lambda i, f, e, g: i.save(f, "PNG", exif=e),
    "grey.png": lambda i, f, e, g: i.convert("L").save(f, "PNG"),
    "alpha.png": lambda i, f, e, g: _alpha(i, g).save(f, "PNG"),
    "grey-alpha.png": lambda i, f, e, g: _alpha(i, g).convert("LA").save(f, "PNG"),
    "palette.png": lambda i, f, e, g: i.quantize(17).save(f, "PNG"),
    "clear-palette.png": lambda i, f, e, g: i.quantize(5).save(f, "PNG", transparency=2),
    "two-colors.png": lambda i, f, e, g: i.convert("1").save(f, "PNG"),
    "sixteen.png": lambda i, f, e, g: _sixteen_bits(i).save(f, "PNG"),
    "sixteen.tiff": lambda i, f, e, g: _sixteen_bits(i).save(f, "TIFF"),
    "rgb.tiff": lambda i, f, e, g: i.save(f, "TIFF", compression="tiff_lzw"),
    "cmyk.tiff": lambda i, f, e, g: i.convert("CMYK").save(f, "TIFF"),
    "rgb.bmp": lambda i, f, e, g: i.save(f, "BMP"),
    "moving.gif": lambda i, f, e, g: i.save(f, "GIF", save_all=True, append_images=[i.rotate(180)]),
    "lossy.webp": lambda i, f, e, g: i.save(f, "WEBP", quality=70, exif=e),
    "alpha.webp": lambda i, f, e, g: _alpha(i, g).save(f, "WEBP", lossless=True),
    "rgb.ppm": lambda i, f, e, g: i.save(f, "PPM"),
}
