"""Image files to the input of the model in this folder: reading with Pillow, resizing with NumPy.

The model needs only `read_image`; the rest is in its graph. `prepare` is the same resizing and cropping in
NumPy, equal to the bit, for batches of images of different sizes and for ports to other languages.

H, W: height and width as decoded, C: channels, S: side of the images as the network sees them.
"""

import io
import json
import sys
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
WHITE = 65535
_OTHER = "B" if sys.byteorder == "little" else "L"
# Pillow's names of levels of 16 bits in color, and of the same with the bytes the other way round.
_SWAPPED = {
    f"{mode};16{order}": f"{mode};16{other}"
    for mode in ("RGB", "RGBA")
    for order, other in (("B", "L"), ("L", "B"), ("N", _OTHER))
}

Pixels: TypeAlias = NDArray[np.uint8] | NDArray[np.float32]


class Preprocessing:
    """Makes the input of one model from images.

    Args:
        folder: of the export, with export.json.

    Attributes:
        classes: names, in the order of the logits.
        thresholds: of several labels, probability from which on each is predicted.
        target_mean, target_std: of numbers, what makes them of logits.
        mask_values: of masks, each class's number.
        sets: coverage and threshold of prediction sets, if any.
        size: S.
        is_wide: images are float32: levels 0 .. 65535 of 16 bits, or other numbers.
        is_float: these are numbers of arrays, not levels of image files.
    """

    def __init__(self, folder: str | Path) -> None:
        about = json.loads((Path(folder) / "export.json").read_text(encoding="utf-8"))
        self.classes: list[str] = about["classes"]
        self.thresholds: list[float] = about.get("thresholds", [])
        self.target_mean = np.float32(about.get("target_mean", []))
        self.target_std = np.float32(about.get("target_std", []))
        self.mask_values = np.array(about.get("mask_values", []), np.uint8)
        self.sets: dict[str, Any] | None = about.get("sets")
        self.size = about["image_size"]
        self.channels = len(about["mean"])
        self.is_wide = about["pixels"] != "uint8"
        self.is_float = about["pixels"] not in ("uint8", "uint16")
        self.interpolation, self.shorter = about["interpolation"], about["resized_shorter_side"]
        self.squashes = about.get("squash", False)
        self.mean, self.std = (np.float32(about[name]) for name in ("mean", "std"))

    def set_of(self, probabilities: Any) -> list[str]:
        """An image's prediction set, the most probable class first.

        Args:
            probabilities: (K,), of all classes.
        """
        if self.sets is None:
            raise ValueError("this model was exported without sets of classes")
        shares = np.asarray(probabilities, np.float64)
        order = np.argsort(-shares, kind="stable")
        ranked = shares[order]
        limit = self.sets["threshold"]
        before = np.cumsum(ranked) - ranked
        # An image of the calibration is exactly at the limit; other runtimes round otherwise.
        inside = before <= limit + 1e-6 if self.sets["adaptive"] else ranked >= limit - 1e-6
        return [self.classes[k] for k in order[inside]]

    def shares(self, mask: Any) -> dict[str, float]:
        """The share of each class that occurs in a mask (H, W)."""
        counts = np.bincount(np.asarray(mask).ravel(), minlength=256)
        named = zip(self.classes, self.mask_values, strict=True)
        total = counts.sum()
        return {name: counts[value] / total for name, value in named if counts[value]}

    def read_image(self, file: Any) -> tuple[Pixels, NDArray[np.int64]]:
        """The pixels of an image file, upright: (H, W, C), and its full height and width: (2,) int64.

        uint8, or float32 if `is_wide`. A large JPEG is decoded at 1/2, 1/4 or 1/8 of its size. Transparent
        parts are laid over white. Other channels than grey or color, and images if `is_float`, come as an
        array (H, W, C) or .npy.
        """
        if self.is_float or self.channels not in (1, 3):
            return self._of_array(file)
        data = file.read() if hasattr(file, "read") else Path(file).read_bytes()
        if self.is_wide:
            levels = self._in_channels(_levels(data).astype(np.float32))
            return levels, np.array(levels.shape[:2], np.int64)
        with _opened(data) as opened:
            if "transparency" in opened.info and _is_wide(opened):  # a level of 16 bits, not of 8
                hidden = _levels(data)
                hidden = hidden >> 8 if hidden.shape[2] == 3 else _scaled(hidden, WHITE)
                pixels = self._of_8_bits(Image.fromarray(hidden.astype(np.uint8).squeeze()), 255)
                return pixels, np.array(pixels.shape[:2], np.int64)
            width, height = opened.size
            turned = opened.getexif().get(0x0112, 1) in (5, 6, 7, 8)
            size = None  # a JPEG of phones
            is_jpeg = opened.format in ("JPEG", "MPO")
            for eighths in (1, 2, 4) if is_jpeg else ():
                if min(width, height) * eighths >= 8 * self.shorter:
                    size = (width * eighths // 8, height * eighths // 8)
                    break
            opened.draft("L" if self.channels == 1 else None, size)
            pixels = self._of_8_bits(ImageOps.exif_transpose(opened), _white(opened))
        if size is None:
            height, width = pixels.shape[:2]
        elif turned:
            width, height = height, width
        return pixels, np.array([height, width], np.int64)

    def _of_array(self, file: Any) -> tuple[Pixels, NDArray[np.int64]]:
        if isinstance(file, str | Path) and Path(file).suffix == ".npy":
            file = np.load(file, allow_pickle=False)
        if not isinstance(file, np.ndarray):
            of = "floating-point numbers" if self.is_float else f"{self.channels} channels"
            raise ValueError(
                f"{file}: the model takes images of {of}, which are not read from image files here; read it, "
                "as by tifffile.imread, and give the array (H, W, C), or save it as .npy"
            )
        dtype: Any = np.uint16 if self.is_wide else np.uint8
        if self.is_float:
            dtype = np.float32
            file = file[:, :, None] if file.ndim == 2 else file
            file = file.astype(np.float32) if file.dtype.kind == "f" else file
        if file.ndim != 3 or file.shape[2] != self.channels or file.dtype != dtype:
            raise ValueError(
                f"an array of shape {file.shape}, {file.dtype}; the model takes (H, W, {self.channels}) of "
                f"{np.dtype(dtype)}"
            )
        pixels: Any = np.ascontiguousarray(file, np.float32 if self.is_wide else np.uint8)
        return pixels, np.array(pixels.shape[:2], np.int64)

    def _in_channels(self, levels: NDArray[np.float32]) -> NDArray[np.float32]:
        if levels.shape[2] == self.channels:
            return levels
        if self.channels == 3:
            return np.repeat(levels, 3, axis=2)
        return levels @ np.array([[0.299], [0.587], [0.114]], np.float32)

    def _of_8_bits(self, image: Image.Image, white: int) -> NDArray[np.uint8]:
        if image.mode == "F":
            raise ValueError("floating-point pixels have no defined brightness")
        if image.mode.startswith("I"):  # 16 bits: 65535 becomes 255
            image = Image.fromarray(_scaled(_within_16_bits(image), white).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("LA") if image.mode == "La" else image  # grey times alpha
            page = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(page, image.convert("RGBA"))
        mode = "L" if self.channels == 1 else "RGB"
        image = image if image.mode == mode else image.convert("RGB").convert(mode)
        return np.asarray(image).reshape(image.height, image.width, self.channels)

    def prepare(self, pixels: Pixels, full_size: Any) -> Pixels:
        """Resize the shorter side of an image from `read_image` and crop the centre: (S, S, C).

        If it `squashes`, both sides are resized to S.
        """
        full = [int(side) for side in full_size]
        longest = max(full) if self.squashes else 8 * min(full)
        middle = [min(side, longest + side % 2) for side in full]
        shorter = self.size if full == [self.size, self.size] else self.shorter
        filters = []
        for axis in (0, 1):
            scale = 8
            if pixels.shape[axis] != full[axis]:
                scale = next(k for k in (4, 2, 1) if pixels.shape[axis] == -(-full[axis] * k // 8))
            begin = round((full[axis] - middle[axis]) / 2)
            first, behind = ((2 * at * scale + 8) // 16 for at in (begin, begin + middle[axis]))
            is_shorter = self.squashes or middle[axis] <= middle[1 - axis]
            length = shorter if is_shorter else shorter * middle[axis] // middle[1 - axis]
            filters.append(self._filter(first, behind - first, length, pixels.shape[axis]))
        (rows, row_one), (columns, column_one) = filters
        if self.is_wide:
            return np.tensordot(rows, columns @ pixels.astype(np.float64), axes=1).astype(
                np.float32
            )
        x = _rounded(columns @ pixels.astype(np.float64), column_one)
        x = _rounded(np.tensordot(rows, x, axes=1), row_one)
        return x.astype(np.uint8)

    def normalize(self, prepared: Pixels) -> NDArray[np.float32]:
        """The network's input, (1, C, S, S) float32, from `prepare`; the graph includes this."""
        scale = np.float32(1 if self.is_wide else 255)
        x = (prepared.astype(np.float32) - self.mean * scale) / (self.std * scale)
        return np.ascontiguousarray(x.transpose(2, 0, 1)[None])

    def _filter(
        self, begin: int, length: int, resized: int, total: int
    ) -> tuple[NDArray[np.float64], float]:
        """Weights (S, total) of the centred S resized positions in float64, and that for 1.0.

        They are integers for 8 bits, and fractions for levels of 16.
        """
        reach = 2 if self.interpolation == "bicubic" else 1
        scale = length / resized
        stretch = max(scale, 1.0)
        centre = (scale * (np.arange(resized) + 0.5))[:, None]
        low = np.maximum(np.trunc(centre - stretch * reach + 0.5), 0)
        high = np.minimum(np.trunc(centre + stretch * reach + 0.5), length)
        k = (np.arange(total) - begin)[None]
        weights = self._kernel((k - centre + 0.5) * (1 / stretch)) * ((k >= low) & (k < high))
        weights = weights / weights.sum(1, keepdims=True)
        first = round((resized - self.size) / 2)
        if self.is_wide:
            return weights[first : first + self.size], 1.0
        largest = weights.max()
        bits = 0
        while bits < 22 and int(0.5 + largest * 2 ** (bits + 1)) < 2**15:
            bits += 1
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


def _opened(data: bytes) -> ImageFile.ImageFile:
    """An image that Pillow reads to the pixels that are in the file."""
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if isinstance(image, TiffImageFile) and _is_misread(image.tag_v2):
        color, bits, samples = (image.tag_v2.get(tag) for tag in (262, 258, 277))
        raise ValueError(
            f"a TIFF of color {color}, bits {bits} and {samples} samples per pixel, laid out or coded in a "
            "way that is not read here; save it as PNG, grey or RGB"
        )
    return image


def _is_misread(tags: Any) -> bool:
    """Whether Pillow gives other pixels than are in a TIFF; found by comparison with tifffile."""
    # 0: white is zero, 1: grey, 2: RGB, 3: palette, 5: CMYK, 6: YCbCr, 8: CIELab
    color = tags.get(262, 0)
    bits = tags.get(258, (1,))
    samples = tags.get(277, len(bits))
    alpha = tags.get(338, ())[:1]
    spare = samples - {2: 3, 5: 4, 6: 3, 8: 3, 9: 3, 10: 3, 34892: 3}.get(color, 1)
    is_separate = tags.get(284, 1) == 2 and samples > 1
    is_plain = tags.get(259, 1) == 1
    return any(
        (
            color == 0 and max(bits) > 8,
            color == 8 or (color == 5 and tags.get(332, 1) != 1),
            color == 3 and 0 < max(tags.get(320, (0,))) < 256,
            max(tags.get(339, (1,))) == 2 and max(bits) <= 8,
            spare > 1 or (spare == 1 and alpha not in ((1,), (2,), (999,))),
            color == 6 and tags.get(530) != (1, 1) and is_plain and samples > 1,
            is_separate and (color in (0, 1, 3) or (max(bits) > 8 and is_plain)),
        )
    )


def _white(image: Image.Image) -> int:
    """The greatest level of an image of more than 8 bits; Pillow gives 12 bits of a TIFF as they are."""
    if isinstance(image, TiffImageFile) and max(image.tag_v2.get(258, (1,))) == 12:
        return 4095
    return WHITE


def _scaled(levels: NDArray[np.int64], white: int) -> NDArray[np.int64]:
    return (levels * 255 + white // 2) // white


def _layout(image: ImageFile.ImageFile) -> str:
    args = image.tile[0].args if image.tile else ""
    return str(args[0] if isinstance(args, tuple) else args)


def _is_wide(image: ImageFile.ImageFile) -> bool:
    """Whether its levels have 16 bits, all of which can be read."""
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    if tags.get(284, 1) == 2 and tags.get(277, 1) > 1:  # of planes Pillow keeps the high bytes
        return False
    return image.mode.startswith("I") or _layout(image) in _SWAPPED


def _levels(data: bytes) -> NDArray[np.int64]:
    """The levels of an image of 16 bits, upright, with transparent parts over white: (H, W, 1 or 3)."""
    with _opened(data) as opened:
        if not _is_wide(opened):
            raise ValueError("8 bits per level, and the training images have 16")
        layout = _layout(opened)
        hidden = opened.info.get("transparency")
        levels = _within_16_bits(ImageOps.exif_transpose(opened))
    if levels.ndim == 2:
        levels = levels[:, :, None]
    else:  # high bytes; decoded in the other order, Pillow gives the low ones
        with _opened(data) as opened:
            for number, tile in enumerate(opened.tile):
                swapped = _SWAPPED[layout]
                args = (swapped, *tile.args[1:]) if isinstance(tile.args, tuple) else swapped
                opened.tile[number] = tile._replace(args=args)
            levels = levels << 8 | np.asarray(ImageOps.exif_transpose(opened))
    if hidden is not None:
        levels[(levels == hidden).all(2)] = WHITE
    if levels.shape[2] == 4:
        alpha = levels[:, :, 3:]
        levels = (levels[:, :, :3] * alpha + WHITE * (WHITE - alpha) + WHITE // 2) // WHITE
    return levels


def _within_16_bits(image: Image.Image) -> NDArray[np.int64]:
    levels = np.asarray(image).astype(np.int64)
    if levels.min() < 0 or levels.max() > WHITE:
        raise ValueError("32-bit pixels beyond 0 .. 65535 have no defined brightness")
    return levels
