"""Masks from a file of polygons as COCO has it, and the table of images and masks that training reads.

Source: the format of instances_train2017.json: images, categories, and annotations whose segmentation is a
list of polygons, [x0, y0, x1, y1, ...], or run lengths column by column, as numbers or as COCO's text.
"""

import contextlib
import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flambeau.data.pack.output_files import (
    hidden_folder,
    locked_folder,
    name_disk_errors,
    remove_folder,
    sync_below,
    sync_file,
    write_whole,
)
from flambeau.data.sources.class_names_file import classes_file
from flambeau.data.sources.masks.mask_classes import names_in
from flambeau.data.sources.masks.mask_file import IGNORED, Mask
from flambeau.errors import DecodeError, InputError, json_object, require_folder, unreadable
from flambeau.images.decode import size_of
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk
from flambeau.regular_file import read_file
from flambeau.terminal import CountBar

_MOST_BYTES = 4 << 30  # of the file; the largest of COCO has 0.5 GB
_MOST_CLASSES = 254  # beside the background and what is ignored
_FARTHEST = 1e6  # pixels, of a corner
_VERSION = 1  # of how outlines are drawn
_ByImage: TypeAlias = dict[int, tuple[dict[str, Any], list[tuple[int, Any]]]]
_BITS = 5  # of a character of COCO's text, with one more that says whether the number goes on


@dataclass(frozen=True)
class CocoMasks:
    """What `masks_of_coco` wrote: the table of images and masks, the file of names, how many."""

    table: Path
    names: Path
    images: int


def masks_of_coco(src: Path, dst: Path, *, show: bool = False) -> CocoMasks:
    """Write NAME.csv, a mask per image below NAME_masks/, and the class names.

    Classes are numbered from 1 by id, 0 is the background, and 255, which is ignored, a crowd. Smaller
    objects lie on top. Images stay where they are. After a kill the same call continues from the hidden
    folder .NAME.csv.packing.

    Args:
        src: the file of polygons; images lie beside it, or in a folder called images or like its last word
            beside it or its folder, as train2017/ for annotations/instances_train2017.json.
    """
    require_folder(dst)
    content, digest = _read(src)
    masks = UnfinishedMasks(dst, f"{_VERSION} {digest}\n")
    numbers, names = _classes(src, content["categories"])
    by_image = _by_image(src, content, numbers)
    names_file = classes_file(dst)
    if names_file.exists() and names_in(names_file).names != names:
        raise InputError(f"{names_file} exists and names other classes\nName another DST")
    files = _mask_files(src, by_image)
    find = _finder(src)
    rows = []
    bar = CountBar(len(by_image), unit="masks", shown=show, is_kept=True)
    with name_disk_errors(dst, dst.parent), masks.open():
        with bar:
            for (file, name), (image, drawn) in zip(files.items(), by_image.values(), strict=True):
                path = find(name)
                size = _size(src, path, image)
                if not masks.has(file):
                    masks.write(file, _drawn(src, path, drawn, size))
                rows.append((_from(dst, path), _from(dst, masks.folder / file)))
                bar.update()
        masks.move()
        if not names_file.exists():
            write_whole(names_file, "".join(f"{value} {name}\n" for value, name in names.items()))
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["path", "mask"])
        table.writerows(rows)
        write_whole(dst, text.getvalue())  # last: what has it is complete
    return CocoMasks(dst, names_file, len(rows))


def _mask_files(src: Path, by_image: _ByImage) -> dict[PurePosixPath, str]:
    """The name of the image of each mask, in their order."""
    files: dict[PurePosixPath, str] = {}
    for image, _ in by_image.values():
        name = _text(src, image, "file_name")
        other = files.setdefault(_relative(src, image).with_suffix(".png"), name)
        if other != name:
            raise InputError(f"{src}: {other} and {name} would have one mask\nRename one of them")
    if len(files) < len(by_image):
        raise InputError(f"{src} names an image twice, with two ids\nName it once")
    return files


def _read(src: Path) -> tuple[dict[str, list[dict[str, Any]]], str]:
    try:
        if src.stat().st_size > _MOST_BYTES:
            raise InputError(f"{src} has more than {_MOST_BYTES >> 30} GiB")
        data = src.read_bytes()
        content = json.loads(data, object_pairs_hook=json_object)
    except OSError as error:
        raise unreadable(src, error) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{src} is no JSON: {str(error)[:200]}") from error
    for name in ("images", "categories", "annotations"):
        entries = content.get(name) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            raise InputError(
                f"{src} has no list {name!r}\nExpected images, categories and annotations, as COCO has them"
            )
    if not content["images"]:
        raise InputError(f"{src} names no image")
    return dict(content), hashlib.sha256(data).hexdigest()


def _classes(
    src: Path, categories: Sequence[dict[str, Any]]
) -> tuple[dict[int, int], dict[int, str]]:
    """The number of each category by its id, and the name of each number."""
    by_id = {_whole(src, one, "id"): _text(src, one, "name") for one in categories}
    if len(by_id) < len(categories):
        raise InputError(f"{src}: two categories have one id\nA category has one of its own")
    if not 0 < len(by_id) <= _MOST_CLASSES:
        raise InputError(f"{src} has {len(by_id)} categories; masks hold 1 to {_MOST_CLASSES}")
    numbers = {category: at for at, category in enumerate(sorted(by_id), start=1)}
    names = {0: "background"} | {at: by_id[category] for category, at in numbers.items()}
    if len({*names.values()}) < len(names):
        raise InputError(f"{src}: two categories have one name, or one is called 'background'")
    return numbers, names


def _by_image(
    src: Path, content: dict[str, list[dict[str, Any]]], numbers: dict[int, int]
) -> _ByImage:
    """The entry of each image by its id, with the numbers and outlines of what is on it."""
    by_image: _ByImage = {}
    for image in content["images"]:
        key = _whole(src, image, "id")
        if key in by_image:
            raise InputError(f"{src}: two images have the id {key}")
        by_image[key] = image, []
    for number, one in enumerate(content["annotations"]):
        key, category = _whole(src, one, "image_id"), _whole(src, one, "category_id")
        if key not in by_image or category not in numbers:
            what = "image" if key not in by_image else "category"
            raise InputError(
                f"{src}: annotation {number} is of {what} {one[f'{what}_id']}, which is not there"
            )
        value = IGNORED if one.get("iscrowd") else numbers[category]
        by_image[key][1].append((value, one.get("segmentation")))
    return by_image


def _size(src: Path, path: Path, image: dict[str, Any]) -> tuple[int, int]:
    """Height and width of an image, which are as the file of polygons says."""
    try:
        size = size_of(read_file(path))
    except OSError as error:
        raise unreadable(path, error) from error
    except DecodeError as error:
        raise InputError(f"{path}: {error}") from error
    claimed = _whole(src, image, "height"), _whole(src, image, "width")
    if claimed != size:
        raise InputError(
            f"{path} is {size[1]} x {size[0]}, and {src} says {claimed[1]} x {claimed[0]}\n"
            "Its outlines would not fit: correct one of the two"
        )
    return size


def _drawn(src: Path, path: Path, drawn: Sequence[tuple[int, Any]], size: tuple[int, int]) -> Mask:
    shapes = []
    for value, outline in drawn:
        inside = _inside(outline, size)
        if inside is None:
            raise InputError(
                f"{src}: an outline on {path.name} is {str(outline)[:60]!r}\n"
                "Expected polygons [[x0, y0, x1, y1, x2, y2, ...], ...], or size and counts of runs"
            )
        shapes.append((int(inside.sum()), value, inside))
    mask = np.zeros(size, np.uint8)
    for _, value, inside in sorted(shapes, key=lambda one: -one[0]):
        mask[inside] = value
    return mask


def _inside(outline: Any, size: tuple[int, int]) -> NDArray[np.bool_] | None:
    """Which pixels an outline holds, (H, W) bool; None if it is none."""
    if isinstance(outline, dict):
        return _of_runs(outline, size)
    if not isinstance(outline, list) or not outline:
        return None
    inside = np.zeros(size, bool)
    for polygon in outline:
        are_numbers = isinstance(polygon, list) and all(
            isinstance(x, int | float) and abs(x) < _FARTHEST for x in polygon
        )
        if not are_numbers or len(polygon) < 6 or len(polygon) % 2:
            return None
        inside |= _in_polygon(np.array(polygon, np.float64).reshape(-1, 2), size)
    return inside


def _in_polygon(corners: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.bool_]:
    """The pixels whose middle lies inside: to their left an odd number of edges crosses their row."""
    x, y = corners.T
    next_x = np.roll(x, -1)
    next_y = np.roll(y, -1)
    turns = np.zeros((size[0], size[1] + 1), np.int32)
    for edge in range(len(corners)):
        low, high = sorted((y[edge], next_y[edge]))
        rows = np.arange(max(0, math.ceil(low - 0.5)), min(size[0], math.ceil(high - 0.5)))
        if len(rows):
            share = (rows + 0.5 - y[edge]) / (next_y[edge] - y[edge])
            at = np.ceil(x[edge] + share * (next_x[edge] - x[edge]) - 0.5)
            np.add.at(turns, (rows, at.clip(0, size[1]).astype(np.int64)), 1)
    inside: NDArray[np.bool_] = turns.cumsum(1)[:, :-1] % 2 == 1
    return inside


def _of_runs(outline: dict[str, Any], size: tuple[int, int]) -> NDArray[np.bool_] | None:
    """Runs of pixels outside and inside in turn, column by column."""
    said = outline.get("counts")
    counts = _numbers_of(said) if isinstance(said, str) else said
    if not isinstance(counts, list) or not all(type(n) is int and n >= 0 for n in counts):
        return None
    if outline.get("size") != [*size] or sum(counts) != size[0] * size[1]:
        return None
    values = np.arange(len(counts)) % 2 == 1
    inside: NDArray[np.bool_] = np.repeat(values, counts).reshape(size[1], size[0]).T
    return inside


def _numbers_of(text: str) -> list[int] | None:
    """COCO's text: numbers in pieces of five bits, least first, from the third on as differences."""
    counts: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > 60:
            return None
        value |= (code & 31) << shift
        shift += _BITS
        if not code & 32:
            value -= (code & 16) << (shift - 4) if code & 16 else 0
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    return counts if not shift else None


def _finder(src: Path) -> Callable[[str], Path]:
    """A function that finds the file of an image."""
    last = src.stem.rpartition("_")[2]
    folders = [
        base / name
        for base in (src.parent, src.parent.parent)
        for name in ("", "images", last, f"images/{last}")
    ]

    def find(name: str) -> Path:
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None:
            raise InputError(
                f"{src} names {name}, which is not there\nLooked for it in {', '.join(map(str, folders))}"
            )
        return path

    return find


def _relative(src: Path, image: dict[str, Any]) -> PurePosixPath:
    name = PurePosixPath(_text(src, image, "file_name"))
    if name.is_absolute() or ".." in name.parts:
        raise InputError(
            f"{src}: image {str(name)!r} lies elsewhere\nName it below a folder of images"
        )
    return name


def _from(dst: Path, path: Path) -> str:
    """A path as the table names it, from its folder."""
    return os.path.relpath(path.absolute(), dst.absolute().parent)


def _whole(src: Path, entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    if type(value) is not int:
        raise InputError(f"{src}: an entry has no whole number {name!r}: {str(entry)[:80]}")
    return value


def _text(src: Path, entry: dict[str, Any], name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or not value.strip() or "\n" in value:
        raise InputError(f"{src}: an entry has no {name!r}: {str(entry)[:80]}")
    return value


_PLAN = "source.txt"
_MASKS = "masks"
_NEXT = "next.png"


class UnfinishedMasks:
    """The masks of NAME.csv, which become the folder NAME_masks; the table is written last.

    `source` changes with whatever decides the masks. InputError: table or folder exists, not made from this
    source.
    """

    def __init__(self, table: Path, source: str) -> None:
        self.folder = table.with_name(f"{table.stem}_masks")
        self._table, self._source = table, source
        self._hidden = hidden_folder(table)
        self._masks = self._hidden / _MASKS
        if table.exists() and not self._masks.exists():  # killed as the last thing was removed
            remove_folder(self._hidden)
        _refuse_existing(table)
        if not self._is_moved():
            _refuse_existing(self.folder)

    def _is_begun(self) -> bool:
        """Whether an earlier start has begun from the same source."""
        plan = self._hidden / _PLAN
        return plan.is_file() and plan.read_text(encoding="utf-8") == self._source

    def _is_moved(self) -> bool:
        return self._is_begun() and self.folder.exists() and not self._masks.exists()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Keep another process out, and what is unfinished when the context is left by an error."""
        with locked_folder(self._hidden, self._table, plan=_PLAN):
            if not self._is_begun():
                remove_folder(self._masks)  # of another source
                self._masks.mkdir()
                write_whole(self._hidden / _PLAN, self._source)
            elif not self._is_moved():
                self._masks.mkdir(exist_ok=True)
            try:
                yield
            except BaseException:
                if self._masks.exists() and not any(self._masks.rglob("*.png")):
                    (self._hidden / _PLAN).unlink()  # nothing that could be continued
                raise
            (self._hidden / _PLAN).unlink()

    def has(self, name: PurePosixPath) -> bool:
        """Whether this start or an earlier one has made a mask."""
        return ((self.folder if self._is_moved() else self._masks) / name).is_file()

    def write(self, name: PurePosixPath, mask: Mask) -> None:
        file = (self.folder if self._is_moved() else self._masks) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        written = io.BytesIO()
        Image.fromarray(mask).save(written, "PNG")
        temporary = self._hidden / _NEXT
        temporary.write_bytes(written.getvalue())
        sync_file(temporary)
        temporary.rename(file)

    def move(self) -> None:
        """Give the folder its name: all masks have been made."""
        if not self._is_moved():
            _refuse_existing(self.folder)
            sync_below(self._masks, at_once=True)
            self._masks.rename(self.folder)
            Disk().sync_folder(self.folder.parent)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} exists\nName another DST, or remove it")
