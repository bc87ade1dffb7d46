"""Labelled images that are stored as arrays: .npz, .npy, HDF5, N5, Zarr and .pth files.

N: images, H: height, W: width, C: channels.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from flambeau.data.sources.arrays.array_roles import TRAIN_PARTS, VAL_PARTS, names_by_part
from flambeau.data.sources.arrays.hdf5_file import open_hdf5
from flambeau.data.sources.arrays.npy_pth import (
    Array,
    RefusedRows,
    Rows,
    open_npy,
    open_npz,
    open_pth,
)
from flambeau.data.sources.arrays.tensorstore_file import (
    open_store,
    store_fingerprint,
    store_sample,
)
from flambeau.data.sources.class_names_file import (
    chosen_labels,
    classes_file,
    named_labels,
    unlabelled,
)
from flambeau.data.sources.fingerprint import file_fingerprint
from flambeau.data.sources.source import Source
from flambeau.errors import DamagedData, InputError, unreadable
from flambeau.images.channels import channels_axis
from flambeau.images.decode import Stored
from flambeau.images.pixels import MAX_CHANNELS, MAX_PIXELS, float_to_uint8

_OPEN: Mapping[str, Callable[[Path], dict[str, Rows]]] = {
    "npz": open_npz,
    "npy": open_npy,
    "hdf5": open_hdf5,
    "n5": open_store,
    "zarr": open_store,
    "pth": open_pth,
}
_MAX_IMAGES = 1 << 27  # more than in any collection of images
_NUM_PROBED = 16  # images whose floating-point pixels are checked when a source is opened


def open_arrays(path: Path, kind: str, *, labelled: bool = True) -> tuple[Source, Source | None]:
    """The images of a file of arrays: all, or to train and to validate on."""
    try:
        arrays = _opened(path, kind, labelled)
        named = _named(arrays, path)
        parts = [part for part, roles in named.items() if _needed(labelled) <= roles.keys()]
        train = next((part for part in (*TRAIN_PARTS, "") if part in parts), None)
        val = next((part for part in VAL_PARTS if part in parts), None)
        if train is None:
            train, val = val or "", None
        return (
            ArraySource(path, kind, train, arrays, labelled=labelled),
            None if val is None else ArraySource(path, kind, val, arrays, labelled=labelled),
        )
    except OSError as error:
        is_whole = error.errno is not None or isinstance(error, UnfitPixels)
        raise (InputError if is_whole else DamagedData)(str(unreadable(path, error))) from error


class ArraySource:
    """Images of one part of a file of arrays.

    Images are (N, H, W), (N, H, W, C) or (N, C, H, W) of uint8, uint16 or floating-point numbers that are
    exactly k / 255 (see `float_to_uint8`); or N image files of decode.FORMATS, as byte strings, arrays of
    uint8, or one array of uint8 with offsets. Labels are N numbers or words.
    """

    def __init__(
        self, path: Path, kind: str, part: str, arrays: Mapping[str, Rows], *, labelled: bool = True
    ) -> None:
        self.path = path
        self._key = (path, kind, part, labelled)
        named = _named(arrays, path)
        roles = named.get(part, {})
        if not _needed(labelled) <= roles.keys():
            raise _missing(arrays, path, labelled)
        self._name = roles["images"]
        self._images: Rows = arrays[self._name]
        if "offsets" in roles:
            self._images = _ByteSlices(
                f"{path}: {self._name}", self._images, arrays[roles["offsets"]]
            )
        self._check_images()
        if labelled:
            self.classes, self.labels = self._labels(arrays, named, part)
        else:
            self.classes, self.labels = unlabelled(len(self), path)
        self.fingerprint = self._fingerprint(part)

    def _labels(
        self, arrays: Mapping[str, Rows], named: Mapping[str, Mapping[str, str]], part: str
    ) -> tuple[tuple[str, ...], Tensor]:
        path = self.path
        roles = named[part]
        label_rows = arrays[roles["labels"]]
        if isinstance(label_rows, RefusedRows):
            label_rows.read(0, 1)  # raises the reason
        if label_rows.shape[:1] != (len(self),):
            raise InputError(
                f"{path}: {self._name} has {len(self)} images, {roles['labels']} is of shape "
                f"{label_rows.shape}\nSave one label per image; the first axis of both counts the images"
            )
        labels = read_labels(label_rows, f"{path}: {roles['labels']}")
        known = [arrays[named[k]["classes"]] for k in (part, *named) if "classes" in named[k]]
        # Names that are as many as the images are those of the images.
        names = next((rows for rows in known if rows.shape[:1] != (len(self),)), None)
        return classes_and_labels(path, labels, names, self.describe)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the file itself: handles and maps cannot be sent, and memory should not be.
        return _reopened, (*self._key, self.fingerprint)

    @property
    def names(self) -> Sequence[str]:
        return [str(index) for index in range(len(self))]

    def __len__(self) -> int:
        return self._images.shape[0]

    def describe(self, index: int) -> str:
        return f"{self.path}, {self._name}[{index}]"

    def read(self, index: int) -> Stored:
        item = self._images.read(index, index + 1)[0]
        if isinstance(item, bytes):
            return bytes(item)
        if item.ndim < 2:
            if item.dtype.kind != "V" and item.dtype != np.uint8:
                raise UnfitPixels(f"bytes of an image as {item.dtype}; expected uint8")
            return bytes(item.tobytes())
        if item.ndim == 3 and _layout(item.shape) == "CHW":
            item = np.moveaxis(item, 0, -1)
        if item.dtype.kind == "f":
            try:
                return float_to_uint8(item)
            except ValueError as error:
                raise UnfitPixels(f"{error}; save uint8 images, not normalized ones") from error
        if not _holds_pixels(item.dtype):
            raise UnfitPixels(f"pixels of {item.dtype}; expected uint8 or uint16")
        return np.ascontiguousarray(item, item.dtype.newbyteorder("="))

    def _check_images(self) -> None:
        shape, dtype = self._images.shape, self._images.dtype
        what = f"{self.path}: {self._name} of shape {shape}, {dtype}"
        if isinstance(self._images, RefusedRows):
            self._images.read(0, 1)  # raises the reason
        if not shape or not shape[0]:
            raise InputError(f"{what}: there are no images in it")
        if shape[0] > _MAX_IMAGES:
            raise InputError(f"{what}: no file has so many images; at most {_MAX_IMAGES} are read")
        if math.prod(shape[1:]) > 4 * MAX_PIXELS:
            raise InputError(f"{what}: no image has so many pixels; at most {MAX_PIXELS} are read")
        self._images.read(
            0, 1
        )  # an array that must be loaded whole is loaded here, before any fork
        if len(shape) == 1 and (dtype.kind not in "SVO" or dtype.names):  # records
            raise InputError(f"{what}: these are no images; expected (N, H, W) or (N, H, W, C)")
        if len(shape) == 2:
            raise InputError(
                f"{what}: rows of pixels have no height and width\n"
                "Save it as images.reshape(N, H, W), or images.reshape(N, C, H, W)"
            )
        if len(shape) > 2 and not _holds_pixels(dtype):
            raise InputError(
                f"{what}: pixels must be uint8 or uint16\n"
                "Where all are 0 .. 255, save images.astype('uint8')"
            )
        try:
            if len(shape) > 2:
                _layout(shape[1:])
            if dtype.kind in "fO":
                count = min(len(self), _NUM_PROBED)
                for index in (k * len(self) // count for k in range(count)):
                    self.read(index)
        except UnfitPixels as error:
            raise InputError(f"{what}: {error}") from error

    def _fingerprint(self, part: str) -> str:
        labels = hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()
        facts = f"{part} {self._name} {self._images.shape} {labels} {self.classes}"
        if self.path.is_dir():
            return store_fingerprint(self.path / self._name, facts)
        return file_fingerprint(self.path, facts)

    @cached_property
    def content_sample(self) -> str:
        return store_sample(self.path / self._name) if self.path.is_dir() else ""


class UnfitPixels(OSError):
    """Pixels of a shape or type that is no image, though the file is undamaged."""


class _ByteSlices:
    """Image files in one array of bytes, with the offsets of each and of the end of the last."""

    def __init__(self, what: str, data: Rows, offsets: Rows) -> None:
        if len(data.shape) != 1 or data.dtype != np.uint8 or len(offsets.shape) != 1:
            raise InputError(f"{what} has offsets, so it must be one-dimensional, of uint8")
        self._data = data
        bounds = offsets.read(0, offsets.shape[0])
        self.shape = (len(bounds) - 1,)
        self.dtype = np.dtype(object)
        if (
            bounds.dtype.kind not in "ui"
            or not len(bounds)
            or (np.diff(bounds.astype(np.int64)) < 0).any()
            or not 0 <= int(bounds[0]) <= int(bounds[-1]) <= data.shape[0]
        ):
            raise InputError(
                f"{what}: the offsets are no places in it\n"
                f"Expected N + 1 integers that grow from 0 to {data.shape[0]}"
            )
        self._bounds = bounds.astype(np.int64)

    def read(self, start: int, stop: int) -> Array:
        items = np.empty(stop - start, object)
        for number in range(start, stop):
            items[number - start] = self._data.read(*self._bounds[number : number + 2].tolist())
        return items


def _opened(path: Path, kind: str, labelled: bool) -> dict[str, Rows]:
    return open_npy(path, labelled=labelled) if kind == "npy" else _OPEN[kind](path)


def _needed(labelled: bool) -> set[str]:
    return {"images", "labels"} if labelled else {"images"}


def _reopened(path: Path, kind: str, part: str, labelled: bool, fingerprint: str) -> ArraySource:
    try:
        source = ArraySource(path, kind, part, _opened(path, kind, labelled), labelled=labelled)
    except OSError as error:
        raise unreadable(path, error) from error
    if source.fingerprint != fingerprint:
        raise InputError(f"{path} has changed since it was opened\nStart again")
    return source


def _named(arrays: Mapping[str, Rows], path: Path) -> dict[str, dict[str, str]]:
    try:
        return names_by_part(arrays)
    except ValueError as error:
        raise InputError(f"{path}: {error}\nGive all but one of them another name") from error


def _missing(arrays: Mapping[str, Rows], path: Path, labelled: bool) -> InputError:
    there = ", ".join(f"{name} {rows.shape} {rows.dtype}" for name, rows in arrays.items())
    return InputError(
        f"{path} has no images{' with labels' * labelled} by a known name; it has "
        f"{there[:500] or 'no arrays'}\n"
        f"Name them images (or x, data){' and labels (or y, targets)' * labelled}; "
        "of parts train_images, val_images ..."
    )


def _holds_pixels(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or (dtype.kind == "u" and dtype.itemsize <= 2)


def _layout(shape: tuple[int, ...]) -> str:
    """'HW', 'HWC' or 'CHW': the channels are at one of the ends; see `channels_axis`."""
    if len(shape) == 2:
        return "HW"
    if len(shape) != 3:
        raise UnfitPixels(
            f"{shape} is no shape of an image; expected (H, W), (H, W, C) or (C, H, W)"
        )
    axis = channels_axis(shape)
    if axis is None:
        raise UnfitPixels(
            f"the channels of {shape} may be at either end\nSave square images, or return them from a "
            "function in a file, FILE.py:FUNCTION, as arrays (H, W, C) or tensors (C, H, W)"
        )
    if shape[axis] > MAX_CHANNELS:
        raise UnfitPixels(f"{shape[axis]} channels of {shape}; at most {MAX_CHANNELS} are read")
    return "CHW" if axis == 0 else "HWC"


_AT_ONCE = 1 << 22  # numbers of one-hot rows


def read_labels(rows: Rows, what: str) -> list[int] | list[str]:
    """All labels of an array: (N,) or (N, 1) whole numbers of any type or words; or (N, classes) one-hot."""
    if len(rows.shape) == 2 and rows.shape[1] > 1 and rows.dtype.kind in "iufb":
        return _of_one_hot(rows, what)
    if len(rows.shape) > 1 and max(rows.shape[1:]) > 1:
        raise InputError(
            f"{what} has shape {rows.shape}; expected one number, word or one-hot row per image"
        )
    labels = rows.read(0, rows.shape[0]).reshape(-1) if rows.shape else np.empty(0, object)
    if labels.dtype.kind in "SUO":
        return _words(labels.tolist(), what)
    if labels.dtype.kind == "f":
        wrong = (labels != np.trunc(labels)).nonzero()[0]  # NaN too
        if len(wrong):
            raise InputError(
                f"{what}[{wrong[0]}] is {labels[wrong[0]]}\nA label is the number of a class: 0, 1, 2, ..."
            )
    elif labels.dtype.kind not in "iub":
        raise InputError(f"{what} is {labels.dtype}; expected numbers or words")
    if labels.dtype.kind in "fu" and labels.size and labels.max() > np.iinfo(np.int64).max:
        raise InputError(
            f"{what} has {labels.max()}\nA label is the number of a class: 0, 1, 2, ..."
        )
    return [int(label) for label in labels.tolist()]


def _of_one_hot(rows: Rows, what: str) -> list[int]:
    count, width = rows.shape
    step = max(1, _AT_ONCE // width)
    labels: list[int] = []
    for start in range(0, count, step):
        vectors = rows.read(start, min(start + step, count))
        wrong = ((vectors != 0).sum(1) != 1) | ((vectors == 1).sum(1) != 1)
        if wrong.any():
            at = int(wrong.argmax())
            raise InputError(
                f"{what}[{start + at}] is no one-hot row: {vectors[at].tolist()!s:.60}\n"
                "A row has a single 1, in the place of the image's class, and zeros"
            )
        labels += vectors.argmax(1).tolist()
    return labels


def classes_and_labels(
    path: Path, labels: list[int] | list[str], names: Rows | None, describe: Callable[[int], str]
) -> tuple[tuple[str, ...], Tensor]:
    """Class names, and the labels as positions in them.

    A classes file beside the arrays has priority: users can write it to correct names.
    """
    if names is None or len(names.shape) != 1 or classes_file(path).exists():
        return named_labels(labels, path, describe)
    classes = tuple(_words(names.read(0, names.shape[0]).tolist(), f"{path}: the class names"))
    return chosen_labels(labels, classes, str(path), describe)


def _words(values: list[object], what: str) -> list[str]:
    words = []
    for value in values:
        try:
            word = value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            raise InputError(f"{what}: {value!r} is not UTF-8 text") from error
        if not isinstance(word, str):
            raise InputError(f"{what}: {value!r:.60} is no text")
        words.append(word)
    return words
