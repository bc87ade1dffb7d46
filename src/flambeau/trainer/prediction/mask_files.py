"""The files of `flambeau predict` for masks: a mask per image as PNG, and the mask over its image."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flambeau.errors import InputError, require_folder
from flambeau.images.all_channels import shown_pixels
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.trainer.evaluation.answers import MaskAnswer
from flambeau.trainer.evaluation.mask_pictures import mask_image, overlay
from flambeau.trainer.prediction.classify_files import Sample


@dataclass(frozen=True)
class MaskFiles:
    """Writes a PNG per image into a folder for masks, one for overlays, or both.

    A file has the image's name and folders; a second one of a name gets a number.

    Args:
        masks: for masks with a palette, whose indices are the numbers in training masks.
        overlays: for images under their masks' colors.
        force: write into folders that hold something, and replace files of the same name.
    """

    masks: Path | None
    overlays: Path | None
    force: bool = False
    _used: set[str] = field(default_factory=set)

    def check(self) -> None:
        """InputError: no folder, or, without `force`, one that holds something."""
        for flag, folder in (("--masks", self.masks), ("--overlays", self.overlays)):
            if folder is None:
                continue
            require_folder(folder)
            if folder.exists() and not folder.is_dir():
                raise InputError(f"{flag} {folder} is there and no folder\nName another one")
            if folder.is_dir() and any(folder.iterdir()) and not self.force:
                raise InputError(
                    f"{flag} {folder} holds files\n"
                    "Name another folder, or give --force, which replaces those of the same names"
                )

    def written(self, answers: Iterable[tuple[Sample, Any]]) -> Iterator[tuple[Sample, Any]]:
        """The same answers, each once its files are written."""
        for sample, answer in answers:
            self._write(sample, answer)
            yield sample, answer

    def _write(self, sample: Sample, answer: MaskAnswer) -> None:
        name = self._new_name(sample)
        if self.masks is not None:
            _write_png(self.masks / name, mask_image(answer.mask))
        if self.overlays is not None:
            pixels = shown_pixels(sample.source.read(sample.index))
            _write_png(self.overlays / name, overlay(_as_8_bits(pixels), answer.mask))

    def _new_name(self, sample: Sample) -> str:
        path = PurePosixPath(sample.name)
        is_below = not path.is_absolute() and ".." not in path.parts
        stem = str((path if is_below else PurePosixPath(path.name)).with_suffix(""))
        name = f"{stem}.png"
        number = 1
        while name in self._used:
            number += 1
            name = f"{stem}-{number}.png"
        self._used.add(name)
        return name


def _as_8_bits(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Floating-point pixels, of any unit, from their least to their greatest value."""
    if pixels.dtype == np.uint8:
        return pixels
    low = pixels.min()
    high = pixels.max()
    scaled: NDArray[np.uint8] = (
        (255 * (pixels - low) / max(high - low, 1e-12)).round().astype(np.uint8)
    )
    return scaled


def _write_png(path: Path, picture: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    picture.save(content, "PNG")
    write_file(path, content.getvalue())
