"""Folders of images and their masks: pairs of files by their names, and the parts that they belong to."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from flambeau.data.sources.class_names_file import IMAGE_FOLDERS, TARGET_FOLDERS
from flambeau.data.sources.fingerprint import sampled_content
from flambeau.data.sources.folder import FileSet, class_folders, images_below
from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.listing import PARTS
from flambeau.data.sources.masks.mask_classes import VOC_CLASSES, NamedValues, names_beside
from flambeau.data.sources.masks.masked_source import MaskedSource, masks_in_files
from flambeau.data.sources.source import Source
from flambeau.data.sources.targets import TargetChoice
from flambeau.errors import InputError

_IMAGES = (*IMAGE_FOLDERS, "img_dir")
_MASKS = (
    "segmentationclass",
    "masks",
    "mask",
    "ann_dir",
    *TARGET_FOLDERS,
)  # in the order of preference
_VOC = "ImageSets/Segmentation"
# What the name of a mask may have after that of its image, as in Carvana's 1_mask.gif.
_SUFFIX = re.compile(
    r"[-_. ]?(mask|masks|seg|segmentation|label|labels|gt|annotation|trimap)$", re.I
)


class MaskedFiles(FileSet):
    """Images in files, relative to a folder; what is not read of it is in `left_out`."""

    def __init__(self, root: Path, names: Sequence[str], left_out: LeftOut) -> None:
        super().__init__(root, names, [0] * len(names), ("",))
        self.left_out = (left_out,)

    @cached_property
    def content_sample(self) -> str:
        return sampled_content(len(self), self.file_at)


@dataclass(frozen=True)
class MaskPairs:
    """Files that belong together: names relative to `root`, with slashes.

    Attributes:
        parts: train, val or test of each; None if the folder does not say.
        left_out: images without a mask, and other files.
        named: what the masks' numbers are, if the folder says it.
    """

    root: Path
    images: tuple[str, ...]
    masks: tuple[str, ...]
    parts: tuple[str, ...] | None
    left_out: LeftOut
    named: NamedValues | None
    index: Path


def mask_pairs(root: Path, *, wanted: bool = False) -> MaskPairs | None:
    """The images of a folder with their masks; None if it does not look like that.

    It has images/ (img/, JPEGImages/ ...) and masks/ (annotations/, labels/, SegmentationClass/ ...), with
    files of equal names at equal places, and train/ and val/ below or above both; or it is Pascal VOC.
    InputError: a mask without an image; or no such folder, if masks are `wanted`.
    """
    folders = _folders(root)
    below = class_folders(root)
    if folders is None and len(below) == 1 and below[0].name.lower() not in PARTS:
        root = below[0]  # as VOCdevkit/VOC2012
        folders = _folders(root)
    if folders is None:
        if wanted:
            raise InputError(
                f"{root} has no folders of images and masks\n"
                "Expected images/ and masks/ with files of equal names, train/ and val/ of such, or the "
                "folder of Pascal VOC or ADE20K"
            )
        return None
    voc = _voc_lists(root)
    others = LeftOut(str(root))
    pairs: list[tuple[str, str]] = []
    for images, masks in folders:
        pairs += _pairs_of(root, images, masks, others, listed=voc, wanted=wanted)
    if not pairs:
        return None
    pairs.sort()
    parts = tuple(_part(image, voc) for image, _ in pairs)
    named = names_beside(root) or (
        names_beside(root.parent) if root.name.lower() in PARTS else None
    )
    if named is None and voc is not None:
        named = NamedValues(dict(enumerate(VOC_CLASSES)), "Pascal VOC")
    return MaskPairs(
        root,
        images=tuple(image for image, _ in pairs),
        masks=tuple(mask for _, mask in pairs),
        parts=parts if "train" in parts and "" not in parts else None,
        left_out=others,
        named=named,
        index=root / folders[0][1],
    )


def open_pairs(pairs: MaskPairs, choice: TargetChoice) -> tuple[Source, Sequence[str] | None]:
    """The source of such files, and the part of each image."""
    root = pairs.root.absolute()
    images = MaskedFiles(root, pairs.images, pairs.left_out)
    masks = masks_in_files(
        [root / name for name in pairs.masks],
        pairs.masks,
        index=root / pairs.index.relative_to(pairs.root),
        named=pairs.named,
    )
    return MaskedSource(images, masks, choice), pairs.parts


def _folders(root: Path) -> list[tuple[str, str]] | None:
    """Folders of images with those of their masks, relative to the root; None if there are none."""
    here = _images_and_masks(root)
    if here is not None:
        return [here]
    found = []
    for folder in sorted(class_folders(root)):
        if folder.name.lower() in PARTS and (below := _images_and_masks(folder)) is not None:
            found.append((f"{folder.name}/{below[0]}", f"{folder.name}/{below[1]}"))
    return found or None


def _images_and_masks(root: Path) -> tuple[str, str] | None:
    names = {folder.name.lower(): folder.name for folder in class_folders(root)}
    images = next((names[name] for name in _IMAGES if name in names), None)
    if images is None:
        return None
    masks = (names[name] for name in _MASKS if name in names)
    return next(((images, name) for name in masks if images_below(root / name)[0]), None)


def _pairs_of(
    root: Path,
    images: str,
    masks: str,
    others: LeftOut,
    *,
    listed: Mapping[str, str] | None,
    wanted: bool,
) -> list[tuple[str, str]]:
    """Images of a folder with the masks of their names; the others are counted."""
    image_names, more = images_below(root / images)
    mask_names, still_more = images_below(root / masks)
    others.counts += more.counts + still_more.counts
    for key in (_path_key, _suffix_key, _name_key):
        by_key = {key(name): name for name in image_names}
        pairs = {by_key[key(name)]: name for name in mask_names if key(name) in by_key}
        if pairs:
            break
    if not wanted and all(_is_jpeg(mask) for mask in pairs.values()):
        return []  # no numbers of classes
    if not pairs:
        raise InputError(
            f"{root / masks}/{mask_names[0]} and the other {len(mask_names) - 1} masks have no image of "
            f"their name in {root / images}\nExpected files of equal names, but for their endings"
        )
    lone = next((name for name in mask_names if key(name) not in by_key), None)
    if lone is not None and listed is None:
        raise InputError(
            f"{root / masks}/{lone} has no image of its name in {root / images}\n"
            "Add the image, or remove the mask"
        )
    for folder, names in ((images, image_names), (masks, mask_names)):
        _require_one_each(root / folder, names, key, {*map(key, pairs)})
    if listed is not None:
        pairs = {image: mask for image, mask in pairs.items() if _stem(image) in listed}
    for name in image_names:
        if name not in pairs:
            others.add(f"{PurePosixPath(name).suffix} without a mask")
    return [(f"{images}/{image}", f"{masks}/{mask}") for image, mask in pairs.items()]


def _require_one_each(
    folder: Path, names: Sequence[str], key: Callable[[str], str], used: Container[str]
) -> None:
    """InputError for two files of a folder that would belong to one of the other."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(key(name), name)
        if other != name and key(name) in used:
            raise InputError(
                f"{folder}/{name} and {other} have one name but for their endings or folders, so which "
                "belongs to which image or mask is unknown\nRename or remove one of them"
            )


def _path_key(name: str) -> str:
    return name.removesuffix(PurePosixPath(name).suffix)


def _suffix_key(name: str) -> str:
    return _SUFFIX.sub("", _path_key(name))


def _name_key(name: str) -> str:
    return _suffix_key(PurePosixPath(name).name)


def _is_jpeg(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in (".jpg", ".jpeg")


def _stem(name: str) -> str:
    return PurePosixPath(name).stem


def _part(image: str, listed: Mapping[str, str] | None) -> str:
    """The part of the data that an image belongs to; '' if nothing says so."""
    if listed is not None:
        return listed[_stem(image)]
    above = PurePosixPath(image).parts[:-1]
    return next((PARTS[name.lower()] for name in above if name.lower() in PARTS), "")


def _voc_lists(root: Path) -> dict[str, str] | None:
    """The part of each image that the lists of Pascal VOC name; None without these lists."""
    parts: dict[str, str] = {}
    for part in ("val", "train"):
        path = root / _VOC / f"{part}.txt"
        if not path.is_file():
            return None
        try:
            parts |= dict.fromkeys(path.read_text(encoding="utf-8").split(), part)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read: {error}") from error
    return parts
