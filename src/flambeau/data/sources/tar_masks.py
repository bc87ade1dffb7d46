"""The masks of a tar's samples: a file beside the image, such as cat.mask.png of cat.jpg."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.data.sources.class_names_file import classes_file
from flambeau.data.sources.masks.mask_classes import names_in
from flambeau.data.sources.masks.masked_source import MaskedSource, Masks
from flambeau.data.sources.source import Source
from flambeau.data.sources.targets import TargetChoice
from flambeau.errors import InputError
from flambeau.recipes.data.tar_shards import TarReader

MASK = "mask.png"
"""The extension that `flambeau pack` writes."""

_MASK = re.compile(
    r"(masks?|seg|segmentation|annotation|label_?map)\.(png|tiff?|bmp|gif|webp|ppm|pgm)"
)


def mask_in(extensions: Sequence[str]) -> str | None:
    """The extension of a sample's mask; None if it has none."""
    return next((name for name in extensions if _MASK.fullmatch(name)), None)


@dataclass(frozen=True)
class _InTar:
    reader: TarReader
    names: tuple[str, ...]

    def read(self, index: int) -> bytes:
        return self.reader.read(index, self.reader.extensions(index)[0])

    def describe(self, index: int) -> str:
        return f"{self.reader.path}, {self.names[index]}"


def masked_tar(
    path: Path,
    images: Source,
    reader: TarReader,
    index: Sequence[Sequence[Any]],
    choice: TargetChoice,
) -> MaskedSource:
    """The images of a tar or zip with their masks, by the columns of `index`, names first.

    InputError: an image without a mask, or masks that are none.
    """
    names = tuple(index[0])
    files = _InTar(reader, names)
    if len(names) != len(images):
        with_mask = {*files.reader.keys}
        missing = next(at for at, key in enumerate(images.names) if key not in with_mask)
        raise InputError(
            f"{images.describe(missing)} has no mask, as other images have: a file beside it such as "
            f"NAME.{MASK}\nAdd it, or leave the image out"
        )
    status = path.stat()
    names_file = classes_file(path)
    masks = Masks(
        read=files.read,
        describe=files.describe,
        fingerprint=hashlib.sha256(repr(index).encode(errors="surrogateescape")).hexdigest(),
        stamp=f"{status.st_size} {status.st_mtime_ns}",
        index=path.with_name(f"{path.name}.masks"),
        named=names_in(names_file) if names_file.is_file() else None,
    )
    return MaskedSource(images, masks, choice)
