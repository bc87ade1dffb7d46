"""Image files to the input of the model in this folder: reading with Pillow, resizing with NumPy.

The model needs only `read_image`; the rest is in its graph. `prepare` is the same resizing and cropping in
NumPy, equal to the bit, for batches of images of different sizes and for ports to other languages.

H, W: height and width as decoded, C: channels, S: side of the images as the network sees them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")


class Preprocessing:
    """Makes the input of one model from images.

    Args:
        folder: of the export, with export.json.

    Attributes:
        classes: names, in the order of the logits.
        size: S.
    """

    def __init__(self, folder: str | Path) -> None:
        about = json.loads((Path(folder) / "export.json").read_text(encoding="utf-8"))
        self.classes: list[str] = about["classes"]
        self.size = about["image_size"]
        self.channels = len(about["mean"])
        self.interpolation, self.shorter = about["interpolation"], about["resized_shorter_side"]
        self.mean, self.std = (np.float32(about[name]) for name in ("mean", "std"))

    def read_image(self, file: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The pixels of an image file, upright: (H, W, C) uint8, and its full height and width: (2,) int64.

        A large JPEG is decoded at 1/2, 1/4 or 1/8 of its size. Transparent parts are laid over white.
        """
        with Image.open(file, formats=FORMATS) as opened:
            width, height = opened.size
            turned = opened.getexif().get(0x0112, 1) in (5, 6, 7, 8)
            size = None  # a JPEG of phones
            is_jpeg = opened.format in ("JPEG", "MPO")
            for eighths in (1, 2, 4) if is_jpeg else ():
                if min(width, height) * eighths >= 8 * self.shorter:
                    size = (width * eighths // 8, height * eighths // 8)
                    break
            opened.draft("L" if self.channels == 1 else None, size)
            image = self._converted(ImageOps.exif_transpose(opened))
        pixels = np.asarray(image).reshape(image.height, image.width, self.channels)
        if size is None:
            height, width = pixels.shape[:2]
        elif turned:
            width, height = height, width
        return pixels, np.array([height, width], np.int64)

    def _converted(self, image: Image.Image) -> Image.Image:
        if image.mode == "F":
            raise ValueError("floating-point pixels have no defined brightness")
        if image.mode.startswith("I"):  # 16 bits: 65535 becomes 255
            levels = np.asarray(image).astype(np.int64)
            if levels.min() < 0 or levels.max() > 65535:
                raise ValueError("32-bit pixels beyond 0 .. 65535 have no defined brightness")
            image = Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))
        if image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        mode = "L" if self.channels == 1 else "RGB"
        return image if image.mode == mode else image.convert("RGB").convert(mode)

    def prepare(self, pixels: NDArray[np.uint8], full_size: Any) -> NDArray[np.uint8]:
        """Resize the shorter side of an image from `read_image` and crop the centre: (S, S, C) uint8."""
        full = [int(side) for side in full_size]
        middle = [min(side, 8 * min(full) + side % 2) for side in full]
        shorter = self.size if full == [self.size, self.size] else self.shorter
        filters = []
        for axis in (0, 1):
            scale = 8
            if pixels.shape[axis] != full[axis]:
                scale = next(k for k in (4, 2, 1) if pixels.shape[axis] == -(-full[axis] * k // 8))
            begin = round((full[axis] - middle[axis]) / 2)
            first, behind = ((2 * at * scale + 8) // 16 for at in (begin, begin + middle[axis]))
            is_shorter = middle[axis] <= middle[1 - axis]
            length = shorter if is_shorter else shorter * middle[axis] // middle[1 - axis]
            filters.append(self._filter(first, behind - first, length, pixels.shape[axis]))
        (rows, row_one), (columns, column_one) = filters
        x = _rounded(columns @ pixels.astype(np.float64), column_one)
        x = _rounded(np.tensordot(rows, x, axes=1), row_one)
        return x.astype(np.uint8)

    def normalize(self, prepared: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The input of the network itself, (1, C, S, S) float32, from `prepare`; the graph includes this."""
        x = (prepared.astype(np.float32) - self.mean * np.float32(255)) / (
            self.std * np.float32(255)
        )
        return np.ascontiguousarray(x.transpose(2, 0, 1)[None])

    def _filter(
        self, begin: int, length: int, resized: int, total: int
    ) -> tuple[NDArray[np.float64], float]:
        """Integer weights (S, total) of the centred S resized positions in float64, and that for 1.0."""
        reach = 2 if self.interpolation == "bicubic" else 1
        scale = length / resized
        stretch = max(scale, 1.0)
        centre = (scale * (np.arange(resized) + 0.5))[:, None]
        low = np.maximum(np.trunc(centre - stretch * reach + 0.5), 0)
        high = np.minimum(np.trunc(centre + stretch * reach + 0.5), length)
        k = (np.arange(total) - begin)[None]
        weights = self._kernel((k - centre + 0.5) * (1 / stretch)) * ((k >= low) & (k < high))
        weights = weights / weights.sum(1, keepdims=True)
        largest = weights.max()
        bits = 0
        while bits < 22 and int(0.5 + largest * 2 ** (bits + 1)) < 2**15:
            bits += 1
        first = round((resized - self.size) / 2)
        weights = weights[first : first + self.size] * 2.0**bits
        return np.trunc(np.where(weights < 0, weights - 0.5, weights + 0.5)), 2.0**bits

    def _kernel(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        x = np.abs(x)
        if self.interpolation != "bicubic":
            return np.maximum(1 - x, 0)
        near = (1.5 * x - 2.5) * x * x + 1
        far = (((x - 5) * x + 8) * x - 4) * -0.5
        return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _rounded(sums: NDArray[np.float64], one: float) -> NDArray[np.float64]:
    return np.clip(np.floor((sums + one / 2) / one), 0, 255)
