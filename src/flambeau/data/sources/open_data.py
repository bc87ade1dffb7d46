"""Opens DATA, in all its forms, as labelled images to train on, to validate on, or to predict on."""

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from flambeau.data.sources.data_names import (
    check_download,
    data_home,
    data_text,
    is_named,
    refuse_address,
)
from flambeau.data.sources.folder import (
    IMAGE_SUFFIXES,
    FileSet,
    FolderSource,
    class_folders,
    classes_above,
    images_below,
)
from flambeau.data.sources.folds import split, subset_of, without_test
from flambeau.data.sources.masks.mask_folders import mask_pairs
from flambeau.data.sources.open_store import open_address, open_evaluated
from flambeau.data.sources.packed_formats import endings_of
from flambeau.data.sources.path_format import (
    TRAIN_FOLDERS,
    VAL_FOLDERS,
    kind_of,
    labels_beside,
    open_masked,
    open_path,
    open_shards,
    part_of_name,
    shards_in,
    shards_of,
    whole_name,
)
from flambeau.data.sources.source import HELD_OUT, ConcatSource, Source, SubsetSource
from flambeau.data.sources.tables.hugging_face import open_hub
from flambeau.data.sources.targets import (
    FOUND,
    TargetChoice,
    as_learned,
    groups_of,
    kind_of_targets,
    lost_name,
    require_classes,
    target_texts,
    task_of,
)
from flambeau.data.sources.torchvision_sets import NAMES, open_named
from flambeau.data.sources.user_function import open_function
from flambeau.data.stores.address import is_address
from flambeau.data.stores.block_cache import CacheOptions
from flambeau.data.stores.store import StoreFault
from flambeau.errors import InputError, unreadable
from flambeau.images.stand_ins import stand_in_at
from flambeau.user_code import is_function

EMBEDDED = Path(__file__).parents[1] / "embedded" / "fashion_mnist_train.rec"

_ENDINGS = endings_of("files", "both", "pixels", "paths")
_EXPECTED = (
    "a folder with one sub-folder of images per class (or train/ and val/ of such), or packed images: "
    f"{_ENDINGS}"
)

_TO_PREDICT = f"an image, a folder of images, or packed images: {_ENDINGS}"


def open_sources(
    path: Path | None,
    *,
    holdout: float = HELD_OUT,
    seed: int = 0,
    download: bool = False,
    choice: TargetChoice = FOUND,
    groups_may_cross: bool = False,
    cache: CacheOptions | None = None,
) -> tuple[Source, Source]:
    """The images to train and to validate on.

    Without a validation part, a share of each class is held out (see `hold_out`), or the fold of `choice`.
    The test share of `choice` is in neither.

    Args:
        path: a folder with one sub-folder per class, or with train/ and one of val/, valid/, validation/,
            test/; one of images/ and masks/ (see `mask_pairs`); packed images (NAME_train.EXT with its
            NAME_val.EXT), or a folder of such files; torchvision:NAME (see `open_named`) in $FLAMBEAU_DATA or
            ~/.cache/flambeau/data, or torchvision:NAME:FOLDER; hf:NAME or hf:NAME:CONFIG of Hugging Face; an
            address of shards in a store (see `open_address`); None: the embedded Fashion-MNIST.
        groups_may_cross: a group on both sides is not refused.
    """
    path = EMBEDDED if path is None else path
    train, val = open_parts(path, download=download, choice=choice, cache=cache)
    if isinstance(train, FolderSource):
        _require_images(train)
    kind = kind_of_targets(train)
    kind.require_learnable(train.classes, train.labels, data_text(path))
    train = without_test(train, choice)
    if val is None or choice.fold is not None:  # with folds a part to validate on is for the end
        train, val = split(train, choice, share=holdout, seed=seed)
    else:
        kind.require_in_training(train, val)
    if not groups_may_cross:
        require_apart(train, val)
    return subset_of(train, choice), val


def require_apart(train: Source, val: Source, purpose: str = "validate") -> None:
    """Refuse a group with images on both sides."""
    groups = groups_of(train)
    others = groups_of(val)
    if groups is None or others is None:
        return
    first = {group: index for index, group in reversed([*enumerate(groups)])}
    for index, group in enumerate(others):
        if group in first:
            raise InputError(
                f"{val.describe(index)} is to {purpose} on and of the group {group!r}, as is "
                f"{train.describe(first[group])} to train on\nKeep a group on one side, or leave --group out"
            )


def _require_images(train: FolderSource) -> None:
    """Refuse class folders without any image."""
    counts = torch.bincount(train.labels, minlength=len(train.classes))
    empty = [name for name, count in zip(train.classes, counts, strict=True) if not count]
    if empty:
        raise InputError(
            f"{train.folder} has class folders without any image: {', '.join(empty[:5])}\n"
            f"Remove them, or add images that end in {' '.join(IMAGE_SUFFIXES)}"
        )


def open_parts(
    path: Path,
    *,
    download: bool = False,
    choice: TargetChoice = FOUND,
    cache: CacheOptions | None = None,
) -> tuple[Source, Source | None]:
    """The images to train on, and to validate on if DATA have such a part, with equal classes."""
    if is_address(path):
        named: tuple[Source, Source | None] | None = open_address(path, choice=choice, cache=cache)
    else:
        named = _open_named(path, download=download, choice=choice)
    if named is None:
        _require(path)
    train, val = _parts_of(only_folder(path), choice) if named is None else named
    _require_task(train, path, choice)
    if val is not None:
        if task_of(val) != task_of(train):
            raise InputError(
                f"{val.describe(0)} and {train.describe(0)}: the images to validate on have targets for "
                f"{task_of(val)}, and those to train on for {task_of(train)}\nSay which with --task"
            )
        val = with_classes(val, train.classes, "the training part")
    return train, val


def _require_task(source: Source, path: Path, choice: TargetChoice) -> None:
    if choice.task not in (None, task_of(source)):
        raise InputError(
            f"{data_text(path)} has targets for {task_of(source)}, and not for {choice.task}\n"
            "Name the columns that are meant with --target, or leave --task out"
        )


def open_source(
    path: Path,
    classes: Sequence[str],
    *,
    download: bool = False,
    choice: TargetChoice = FOUND,
    cache: CacheOptions | None = None,
) -> Source:
    """Images on which to evaluate a model with the given classes.

    Args:
        path: as for `open_sources`; of data with a validation part only that is used.

    Returns:
        A source with exactly these classes; some may have no image.
    """
    check_download(download, path)
    if is_address(path):
        named: tuple[Source, Source | None] | None = open_evaluated(
            path, choice=choice, cache=cache
        )
    else:
        named = _open_named(path, download=download, choice=choice)
    if named is not None:
        _require_task(named[0], path, choice)
        return with_classes(named[1] or named[0], tuple(classes), "the model")
    _require(path)
    path = only_folder(path)
    source, val = _evaluated(_val_folder(path, classes) if path.is_dir() else path, choice=choice)
    _require_task(source, path, choice)
    return with_classes(source if val is None else val, tuple(classes), "the model")


class Unlabelled(NamedTuple):
    """Images to predict on.

    Attributes:
        packed: packed images, listing or data set as the user named it; None for single files, whose names
            are their paths.
    """

    source: Source
    packed: Path | None


def open_unlabelled(
    paths: Sequence[Path],
    classes: Sequence[str],
    *,
    download: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> list[Unlabelled]:
    """Images to predict on, in the order given, with any labels.

    Args:
        paths: each an image file; a folder with images at any depth; or what else `open_source` accepts, of
            which any validation part is used.
        classes: the model's. An image has a label if a folder above it is called like one; labels of packed
            images may be of other classes.
    """
    check_download(download, *paths)
    opened = []
    for is_image, group in groupby(paths, _is_single_image):
        if is_image:
            names = list(map(str, group))
            files = FileSet(Path(), names, [0] * len(names), [""])
            opened.append(Unlabelled(files, None))
        else:
            opened += [_open_unlabelled(path, classes, download, say) for path in group]
    return opened


def _open_named(
    path: Path, *, download: bool, labelled: bool = True, choice: TargetChoice = FOUND
) -> tuple[Source, Source | None] | None:
    """A data set by name, or of a user's function; None for a path."""
    if is_function(path):
        return open_function(str(path), labelled=labelled, choice=choice)
    if path.suffix == ".py" and path.is_file():
        raise InputError(f"{path} is a Python file; say which function: {path}:FUNCTION")
    if not is_named(path):
        return None
    kind, _, name = str(path).partition(":")
    if kind == "hf":
        return open_hub(name, download=download, labelled=labelled, choice=choice)
    require_classes(path, choice)
    name, _, folder = name.partition(":")
    return open_named(name, Path(folder) if folder else data_home(), download=download)


def _is_single_image(path: Path) -> bool:
    """Whether it is a file of no packed format; if it is no image, reading it fails, as in a folder."""
    if is_address(path) or is_named(path) or not os.path.exists(path):  # noqa: PTH110 - which may raise
        return False
    return not path.is_dir() and kind_of(path) is None and path.suffix != ".py"


def _open_unlabelled(
    path: Path, classes: Sequence[str], download: bool, say: Callable[[str], object]
) -> Unlabelled:
    parts = _open_named(path, download=download, labelled=False)
    if is_address(path):
        parts = _open_evaluated(path, open_evaluated, say)
    if parts is None:
        _require(path, _TO_PREDICT)
        kind = kind_of(path)
        packed: Path | None = path
        if kind is None and path.is_dir():
            packed = _packed_in(path, classes)
        if packed is None:
            return Unlabelled(_open_images(path, classes, say), None)
        parts = _open_packed(packed, say)
    source, val = parts
    source = source if val is None else val
    if kind_of_targets(source).is_table:  # its targets are only shown beside predictions
        source = SubsetSource(source, torch.arange(len(source)), shown=target_texts(source))
    return Unlabelled(source, path)


def _open_packed(path: Path, say: Callable[[str], object]) -> tuple[Source, Source | None]:
    """Packed images with their labels; without labels if those could not be trained on."""
    if kind_of(path) == "listing":
        return open_path(path, labelled=False)
    return _open_evaluated(path, _evaluated, say)


def _open_evaluated(
    path: Path,
    evaluated: Callable[..., tuple[Source, Source | None]],
    say: Callable[[str], object],
) -> tuple[Source, Source | None]:
    try:
        return evaluated(path)
    except StoreFault:
        raise
    except InputError as error:
        opened = evaluated(path, labelled=False)
        say(f"{data_text(path)} is read without labels: {str(error).splitlines()[0]}")
        return opened


def _packed_in(folder: Path, classes: Sequence[str]) -> Path | None:
    """The folder with the packed files: this one, or its val/; None for a folder of images."""
    folders = (folder, _val_folder(folder, classes), only_folder(folder))
    packed = next((path for path in folders if kind_of(path) or shards_in(path)), None)
    if packed is not None:
        names, _ = images_below(folder)
        if names:
            raise InputError(
                f"{folder} holds images ({len(names)}, such as {names[0]}) and packed files in {packed}\n"
                "Name what is meant: the packed files, or the images"
            )
    return packed


def _open_images(folder: Path, classes: Sequence[str], say: Callable[[str], object]) -> FileSet:
    names, others = images_below(folder)
    pairs = None
    with contextlib.suppress(InputError):  # pairs that are not clear matter to a training alone
        pairs = mask_pairs(folder)
    if pairs is not None:  # masks are no images to predict on
        masks = {*pairs.masks}
        names = [name for name in names if name not in masks]
        say(f"{folder}: {len(pairs.masks)} masks are left out")
    if not names:
        listed = f" (found: {others.endings})" if others.counts else ""
        raise InputError(
            f"{folder} holds no image{listed}\n"
            f"Expected files that end in {' '.join(IMAGE_SUFFIXES)}, at any depth"
        )
    if others.counts:
        say(others.line)
    number = {name: label for label, name in enumerate(classes)}
    labels = [
        next((number[name] for name in above if name in number), len(classes))
        for above in classes_above(folder, names)
    ]
    return FileSet(folder, names, labels, (*classes, ""))


def _require(path: Path, expected: str = _EXPECTED) -> None:
    refuse_address(path)
    try:
        if path.is_dir() or kind_of(path) is not None or shards_of(path):
            return
        other = stand_in_at(path)
        if other is not None:
            raise InputError(f"{path} is {other}")
        if path.exists():
            problem = f"{path} is neither a folder nor a file of packed images"
        elif not path.parent.is_dir():
            problem = f"{path} does not exist, nor does its folder {path.parent}"
        else:
            near = _nearest(path)
            guess = f"; did you mean {near}?" if near is not None else ""
            if path.name.lower() in NAMES:
                guess = f"; did you mean torchvision:{path.name.lower()}?"
            problem = f"{path} does not exist{guess}"
    except OSError as error:
        problem = str(unreadable(path, error))
    raise InputError(f"{problem}\nExpected {expected}")


def _nearest(path: Path) -> Path | None:
    """What lies beside a path that is not there and was perhaps meant: a folder, or packed images."""
    siblings = [one for one in path.parent.iterdir() if one.is_dir() or kind_of(one) is not None]
    beside = {whole_name(one) for one in siblings}
    train = path.with_stem(f"{path.stem}_train")  # as `pack` calls that part
    if train in beside:
        return train
    names = sorted(entry.name for entry in beside)
    return next((path.parent / one for one in difflib.get_close_matches(path.name, names, 1)), None)


def _val_folder(path: Path, classes: Sequence[str]) -> Path:
    """The validation folder in a folder, unless its name is a class; else the folder itself."""
    parts = {k: folder for k, folder in _sub_folders(path).items() if folder.name not in classes}
    return next((parts[name] for name in VAL_FOLDERS if name in parts), path)


def _sub_folders(path: Path) -> dict[str, Path]:
    """Sub-folders by name in lower case."""
    return {folder.name.lower(): folder for folder in class_folders(path)}


def _folders_of(path: Path) -> tuple[Path, Path | None]:
    folders = _sub_folders(path)
    train = next((folders[name] for name in TRAIN_FOLDERS if name in folders), None)
    val = next((folders[name] for name in VAL_FOLDERS if name in folders), None)
    # A lone train/ is a class of that name, unless it has sub-folders or packed files.
    if train and (val or (len(folders) == 1 and (_sub_folders(train) or shards_in(train)))):
        return train, val
    return path, None


def _parts_of(path: Path, choice: TargetChoice) -> tuple[Source, Source | None]:
    def everything(path: Path, choice: TargetChoice) -> Source:
        return _all_of(open_path(path, choice=choice))

    if not path.is_dir() or kind_of(path) is not None:
        val_path = _beside(path)
        source, val = open_path(path, choice=choice)
        if val_path is None:
            return source, val
        return source, everything(val_path, as_learned(source, choice))
    if labels_beside(path, choice) is not None:
        return open_path(path, choice=choice)
    if (masked := open_masked(path, choice)) is not None:
        return masked
    train_path, val_path = _folders_of(path)
    if val_path is not None:
        source = everything(train_path, choice)
        return source, everything(val_path, as_learned(source, choice))
    train, val_shards = _shard_parts(train_path)
    if train and val_shards:
        source = _all_of(open_shards(train, choice=choice))
        return source, _all_of(open_shards(val_shards, choice=as_learned(source, choice)))
    return open_path(train_path, choice=choice)


def _evaluated(
    path: Path, *, labelled: bool = True, choice: TargetChoice = FOUND
) -> tuple[Source, Source | None]:
    """As `open_path`; of a folder with packed files for training and validation only the latter."""
    train, val = _shard_parts(path) if path.is_dir() and kind_of(path) is None else ([], [])
    if train and val:
        return _all_of(open_shards(val, labelled=labelled, choice=choice)), None
    return open_path(path, labelled=labelled, choice=choice)


def only_folder(path: Path) -> Path:
    """A folder's only sub-folder, if it holds packed files, like data/ on the Hub; else the path."""
    if not path.is_dir() or kind_of(path) is not None:
        return path
    below = class_folders(path)
    is_part = len(below) == 1 and below[0].name.lower() in (*TRAIN_FOLDERS, *VAL_FOLDERS)
    return below[0] if len(below) == 1 and not is_part and shards_in(below[0]) else path


def _shard_parts(folder: Path) -> tuple[list[Path], list[Path]]:
    """The packed files of a folder whose names say training, and those that say validation."""
    parts: dict[str, list[Path]] = {}
    for shard in shards_in(folder):
        parts.setdefault(part_of_name(shard.name), []).append(shard)
    train = next((parts[name] for name in TRAIN_FOLDERS if name in parts), [])
    return train, next((parts[name] for name in VAL_FOLDERS if name in parts), [])


def _all_of(parts: tuple[Source, Source | None]) -> Source:
    """Both parts together: within a part of the data, everything is used."""
    train, val = parts
    return train if val is None else ConcatSource([train, val])


def _beside(path: Path) -> Path | None:
    """The file or folder to validate on beside NAME_train.EXT, NAME-train.EXT or train.EXT."""
    stem = path.name.removesuffix(path.suffix)
    if re.search(r"(?:^|[_-])train$", stem):
        for name in VAL_FOLDERS:
            beside = path.with_name(stem.removesuffix("train") + name + path.suffix)
            if beside.exists():
                return beside
    return None


def with_classes(source: Source, classes: tuple[str, ...], owner: str) -> Source:
    """A source with other class numbers; InputError if `classes` lacks one of an image."""
    if source.classes == classes:
        return source
    name = lost_name(source, source.labels, classes)
    if name is not None:
        kind = kind_of_targets(source)
        there = kind.has(source.labels, source.classes.index(name))
        index = int(there.nonzero()[0])
        near = difflib.get_close_matches(name, classes, n=1, cutoff=0.0)[0]
        raise InputError(
            f"{source.describe(index)} {kind.has_it} {name!r}, which {owner} lacks; "
            f"the nearest there is {near!r}\n"
            f"Rename or remove it, so that its classes are among the {len(classes)} known ones"
        )
    return SubsetSource(source, torch.arange(len(source)), classes=classes)
