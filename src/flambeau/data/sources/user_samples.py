"""Attributes and samples of a user's data set, converted to those of a source; others are refused."""

import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

from flambeau.data.sources.masks.mask_file import decoded_mask
from flambeau.data.sources.source import PixelKind
from flambeau.errors import DecodeError
from flambeau.images.channels import channels_axis
from flambeau.images.decode import Stored
from flambeau.images.exif_orientation import UPRIGHT, info_orientation, turn_upright
from flambeau.images.pixels import MAX_CHANNELS, float_to_uint8
from flambeau.regular_file import read_file

Label = int | str
"""The number of a class, or its name."""

_PAIR = "Return the pair (image, label)"
_AS_STORED = (
    "Return images as they are stored, without Normalize and random transforms: "
    "flambeau crops, augments and normalizes them"
)
_ALL_FLOAT = "Give the data set `float_pixels = True` where all are such, or return all as uint8"
_UNIT = (-0.25, 1.25)  # 0 .. 1, and what a bicubic filter makes of its ends; chosen
_DTYPES = "uint8, uint16, float16, float32 or float64"
_KINDS = (
    "Return the bytes of an image file, its path, a PIL image, an array (H, W[, C]) or a tensor (C, H, W) "
    f"of {_DTYPES}"
)
# bfloat16 and float8 are too coarse to tell neighbouring k / 255 apart.
_PIXELS = (torch.uint8, torch.uint16, torch.float16, torch.float32, torch.float64)


class WrongSample(TypeError):
    """A sample of the wrong type: two lines, the second with what to return instead."""


def is_source(data: object) -> bool:
    """Whether it has the methods of a Source, and not those of a Dataset."""
    return hasattr(data, "read") and hasattr(data, "labels") and not hasattr(data, "__getitem__")


def declared(data: Any, name: str, *, default: bool | None = None) -> bool:
    """A boolean attribute of a data set, or of all data sets inside a Subset or ConcatDataset."""
    if isinstance(data, Subset):
        return declared(data.dataset, name, default=default)
    if isinstance(data, ConcatDataset):
        return all(declared(part, name, default=default) for part in data.datasets)
    return bool(getattr(data, name, is_source(data) if default is None else default))


def labels_of(data: Any, length: int) -> list[Any] | None:
    """The list of labels of a data set, if it has one label per sample."""
    if isinstance(data, Subset):
        inner = labels_of(data.dataset, len(data.dataset))  # type: ignore[arg-type]  # it has a length
        return None if inner is None else [inner[index] for index in data.indices]
    if isinstance(data, ConcatDataset):
        parts = [labels_of(part, len(part)) for part in data.datasets]  # type: ignore[arg-type]
        return None if None in parts else [label for part in parts for label in part or []]
    for name in ("targets", "labels"):
        labels: Any = getattr(data, name, None)
        if isinstance(labels, torch.Tensor | np.ndarray):
            is_flat = np.prod(labels.shape) == length  # (N, 1), too
            labels = (labels.reshape(-1) if is_flat else labels).tolist() if labels.ndim else None
        is_list = hasattr(labels, "__len__") and not isinstance(labels, str | bytes | Mapping)
        if is_list and len(labels) == length:
            return list(labels)
    return None


def classes_of(data: Any) -> list[str] | None:
    """Class names; several names of one class, as in ImageNet, are joined."""
    if isinstance(data, Subset):
        return classes_of(data.dataset)
    if isinstance(data, ConcatDataset):
        parts = [classes_of(part) for part in data.datasets]
        if any(part != parts[0] for part in parts):
            raise ValueError("the parts of a ConcatDataset have different .classes")
        return parts[0]
    classes = getattr(data, "classes", None)
    if not isinstance(classes, Iterable) or isinstance(classes, str | Mapping):
        return None
    return [", ".join(map(str, n)) if isinstance(n, tuple | list) else str(n) for n in classes]


def split_sample(sample: object) -> tuple[object, object]:
    """The image and the label of a sample; WrongSample if it is no pair."""
    if isinstance(sample, Mapping):
        keys = list(sample)
        hint = ", such as (row['image'], row['label'])" if {"image", "label"} <= set(keys) else ""
        raise WrongSample(
            f"it is a {type(sample).__name__} with {', '.join(map(str, keys[:5]))}\n{_PAIR}{hint}"
        )
    if isinstance(sample, torch.Tensor | np.ndarray):
        raise WrongSample(f"it is {_what(sample)}\n{_PAIR}; of arrays, list(zip(images, labels))")
    if not isinstance(sample, tuple | list):
        raise WrongSample(f"it is {_what(sample)}\n{_PAIR}")
    if len(sample) != 2:
        raise WrongSample(f"it is a {type(sample).__name__} of {len(sample)}\n{_PAIR}")
    return sample[0], sample[1]


def image_of(sample: object) -> object:
    """The image of a sample with or without a label."""
    is_pair = isinstance(sample, tuple | list) and len(sample) == 2
    return split_sample(sample)[0] if is_pair or isinstance(sample, Mapping) else sample


def is_mask(label: object) -> bool:
    """Whether what stands beside an image is a mask: a picture, or whole numbers (H, W)."""
    if isinstance(label, Image.Image):
        return True
    if not isinstance(label, torch.Tensor | np.ndarray):
        return False
    height_and_width = [side for side in label.shape if side > 1]
    is_float = str(label.dtype).removeprefix("torch.").startswith(("float", "bfloat", "complex"))
    return len(height_and_width) == 2 and not is_float


def stored_mask(label: object) -> bytes | NDArray[Any]:
    """A sample's mask as bytes of a file, or its own array; WrongSample if neither."""
    if isinstance(label, str | os.PathLike):
        return read_file(Path(os.fsdecode(label)))
    if isinstance(label, torch.Tensor):
        label = label.as_subclass(torch.Tensor).detach().cpu().numpy()
    if isinstance(label, Image.Image):
        return decoded_mask(label)
    if isinstance(label, bytes):
        return label
    if isinstance(label, np.ndarray):
        return label.copy()  # it may be a buffer that the data set reuses
    raise WrongSample(
        f"its mask is {_what(label)}\nReturn numbers of classes (H, W) as an array, a tensor or a PIL image, "
        "or the path or bytes of a PNG file"
    )


def class_label(label: object) -> Label:
    """The label of a sample as an int or a str; WrongSample if it is neither."""
    if isinstance(label, str):
        return str(label)
    plain = label
    if isinstance(label, torch.Tensor | np.ndarray | np.generic) and np.prod(label.shape) == 1:
        plain = label.item()
    if isinstance(plain, str):
        return plain
    try:
        return operator.index(plain)  # type: ignore[arg-type]  # TypeError is the answer
    except TypeError:
        raise WrongSample(
            f"its label is {_what(label)}\nReturn the number of the class (of a one-hot vector its argmax), "
            "or its name"
        ) from None


def kind_of_pixels(image: object) -> PixelKind:
    """The kind of an image's pixels; floats that are all k / 255 count as 8-bit."""
    if isinstance(image, torch.Tensor) and image.dtype in _PIXELS:
        image = image.as_subclass(torch.Tensor).detach().cpu().numpy()
    if not isinstance(image, np.ndarray) or image.dtype.kind != "f" or not image.size:
        return "uint8"
    if not np.isfinite(image).all():
        return "uint8"  # reading it raises an error
    try:
        float_to_uint8(image)
    except ValueError:
        return "unit" if _UNIT[0] <= image.min() and image.max() <= _UNIT[1] else "float"
    return "uint8"


def stored_image(image: object, *, is_float: bool = False) -> Stored | Path:
    """A sample's image as a source returns it, float32 with `is_float`, or the path of its file.

    Raises:
        WrongSample: no image; floating-point pixels that are not all k / 255; or, with `is_float`, no array
            or tensor of such pixels.
        DecodeError: a PIL image without a defined brightness, or pixels that are not finite.
    """
    if is_float:
        return _of_floats(image)
    if isinstance(image, bytes):
        return image
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        return Path(os.fsdecode(image))
    if isinstance(image, Image.Image):
        return pil_pixels(image)
    if isinstance(image, torch.Tensor):
        return _of_array(_rows_first(image), what=_what(image))
    if isinstance(image, np.ndarray):
        return _of_array(image, what=_what(image))
    none = "; where an image cannot be read, raise an OSError" if image is None else ""
    raise WrongSample(f"its image is {_what(image)}\n{_KINDS}{none}")


def pil_pixels(image: Image.Image) -> NDArray[Any]:
    """Pixels, upright: PIL keeps the EXIF orientation until an image is transposed."""
    image.load()  # a PNG may have it after its pixels; a TIFF is turned here
    orientation = UPRIGHT if image.format == "TIFF" else info_orientation(image.info)
    if image.mode == "F":
        raise WrongSample(
            "its image is a PIL image of floating-point pixels\nReturn them as an array: np.asarray(image)"
        )
    if image.mode.startswith("I"):
        levels = np.asarray(image)
        if levels.min() < 0 or levels.max() > 65535:
            raise DecodeError("32-bit pixels beyond 0 .. 65535 have no defined brightness")
        return turn_upright(levels.astype(np.uint16), orientation)
    if image.mode == "1":
        image = image.convert("L")
    elif image.has_transparency_data:
        image = image.convert("RGBA")  # 'P' and 'LA' too
    elif image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    return np.ascontiguousarray(turn_upright(np.asarray(image), orientation))


def _of_floats(image: object) -> NDArray[np.float32]:
    """(H, W) or (H, W, C) float32."""
    what = _what(image)
    array: Any = _rows_first(image) if isinstance(image, torch.Tensor) else image
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        raise WrongSample(
            f"its image is {what}, and others have floating-point pixels\nReturn the same type for all"
        )
    if not _is_image(array):
        raise WrongSample(
            f"its image is {what}\nFloating-point pixels are (C, H, W) as a tensor, (H, W, C) "
            "as an array, or (H, W)"
        )
    if not np.isfinite(array).all():
        raise DecodeError("its floating-point pixels are not all finite")
    return np.ascontiguousarray(array, np.float32)


def _rows_first(tensor: torch.Tensor) -> NDArray[Any]:
    """As an array, (C, H, W) as (H, W, C)."""
    if tensor.dtype not in _PIXELS:
        raise WrongSample(
            f"its image is {_what(tensor)}\n{_other_dtype(is_float=tensor.is_floating_point())}"
        )
    plain = tensor.as_subclass(torch.Tensor).detach().cpu()  # torchvision has tensor subclasses
    if plain.ndim == 3:
        if plain.shape[0] > MAX_CHANNELS or channels_axis(tuple(plain.shape)) == 2:
            raise WrongSample(f"its image is {_what(tensor)}\n{_KINDS}")
        plain = plain.permute(1, 2, 0)
    array: NDArray[Any] = plain.numpy()
    return array


def _of_array(array: NDArray[Any], *, what: str) -> Stored:
    """Pixels, or the bytes of a file; `what` describes the original, for an error."""
    if array.dtype not in (np.uint8, np.uint16) and array.dtype.kind != "f":
        raise WrongSample(f"its image is {what}\n{_other_dtype(is_float=False)}")
    if array.ndim == 1 and array.dtype == np.uint8:
        return array.tobytes()  # of a file, as from torchvision.io.read_file and np.fromfile
    if not _is_image(array):
        raise WrongSample(f"its image is {what}\n{_KINDS}")
    if array.dtype.kind == "f":
        try:
            return float_to_uint8(array)
        except ValueError as error:
            remedy = f", as those looked at before were\n{_ALL_FLOAT}"
            if not np.isfinite(array).all():
                remedy = f"\n{_AS_STORED}"
            raise WrongSample(f"its image is {what}: {error}{remedy}") from error
    return np.ascontiguousarray(array)


def _is_image(array: NDArray[Any]) -> bool:
    """Whether it may be (H, W) or (H, W, C): by its sides it is not (C, H, W)."""
    if array.ndim != 3:
        return array.ndim == 2
    return array.shape[2] <= MAX_CHANNELS and channels_axis(array.shape) != 0


def _other_dtype(*, is_float: bool) -> str:
    so = "such as image.float(), which keeps these values" if is_float else "as they are stored"
    return f"Return pixels of {_DTYPES}, {so}"


def _what(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a {dtype} {kind} of shape {tuple(value.shape)}"
    if value is None:
        return "None"
    text = repr(value) if isinstance(value, bool | int | float) else ""
    return f"{text or 'of type'} {'' if text else type(value).__name__}".strip()
