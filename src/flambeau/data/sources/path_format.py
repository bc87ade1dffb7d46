"""The format of a path, and the sources that read it."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from flambeau.data.sources.arrays.array_roles import is_of_labels
from flambeau.data.sources.arrays.array_source import open_arrays
from flambeau.data.sources.folder import FolderSource, class_folders, images_below
from flambeau.data.sources.listing import ListingSource, has_columns, open_listing, split
from flambeau.data.sources.lmdb_file import LMDBSource
from flambeau.data.sources.masks.mask_folders import mask_pairs, open_pairs
from flambeau.data.sources.masks.masked_source import MaskedSource
from flambeau.data.sources.packed_formats import FORMATS, KIND_OF_ENDING
from flambeau.data.sources.recordio_file import RecordSource
from flambeau.data.sources.source import ConcatSource, Source, parts_of
from flambeau.data.sources.tables.arrow_file import open_arrow
from flambeau.data.sources.tables.hugging_face import open_saved
from flambeau.data.sources.tables.parquet_file import open_parquet
from flambeau.data.sources.tar_file import open_tar
from flambeau.data.sources.targets import FOUND, TargetChoice, kind_of_targets, require_classes
from flambeau.data.sources.tfrecord_file import TFRecordSource
from flambeau.errors import DamagedData, InputError
from flambeau.images.stand_ins import stand_in_at

# TensorFlow's train.tfrecord-00000-of-00010, and train-00000-of-00010.tfrecord.
_SHARD = re.compile(r"-\d+-of-(\d+)(?=$|\.\w+$)")

# Lower case; of several validation folders the first in this list is used.
TRAIN_FOLDERS = ("train", "training")
VAL_FOLDERS = ("val", "valid", "validation", "test", "testing")


def kind_of_name(name: str) -> str | None:
    """The format that the name of a file says, also of a shard; else None."""
    return KIND_OF_ENDING.get(Path(_SHARD.sub("", name)).suffix.lower())


def shard_total(name: str) -> int | None:
    """The number of shards that the name of one says; None if it says none."""
    match = _SHARD.search(name)
    return None if match is None else int(match[1])


def part_of_name(name: str) -> str:
    """The word of TRAIN_FOLDERS or VAL_FOLDERS in a packed file's name, or ''."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((word for word in words if word in (*TRAIN_FOLDERS, *VAL_FOLDERS)), "")


def kind_of(path: Path) -> str | None:
    """The format of a file, or a folder that is one data set (LMDB, N5, Zarr, Hugging Face), if any."""
    kind = kind_of_name(path.name)
    if path.is_dir():
        if kind is not None and FORMATS[kind].is_folder:
            return kind
        files = (
            (form.kind, path / name) for form in FORMATS.values() for name in form.folder_files
        )
        return next((kind for kind, file in files if file.is_file()), None)
    return kind if path.is_file() and kind is not None and not FORMATS[kind].is_folder else None


def shards_in(folder: Path) -> list[Path]:
    """The files of one packed format in a folder without class folders, by name."""
    if class_folders(folder):
        return []
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    sharded = {form.kind for form in FORMATS.values() if form.is_sharded}
    shards = [path for path in paths if kind_of(path) in sharded and not _holds_labels(path)]
    kinds = sorted({str(kind_of(path)) for path in shards})
    if len(kinds) > 1:
        raise InputError(
            f"{folder} holds files of several formats: {', '.join(kinds)}\n"
            "Name one of the files, or leave only those of one format"
        )
    return shards


def whole_name(shard: Path) -> Path:
    """The name of a set of shards: photos.tar for photos-00000-of-00004.tar; other paths stay."""
    return shard.with_name(_SHARD.sub("", shard.name))


def shards_of(path: Path) -> list[Path]:
    """All shards of a set's whole name, if no such file exists."""
    if path.exists() or not path.parent.is_dir():
        return []
    shards = sorted(p for p in path.parent.iterdir() if p != path and whole_name(p) == path)
    totals = {int(match[1]) for p in shards if (match := _SHARD.search(p.name))}
    if shards and totals != {len(shards)}:
        raise InputError(
            f"{path} is a set of {max(totals)} shards, of which {len(shards)} are here: "
            f"{shards[0].name} ...\n"
            "Bring the others, or name one of the files"
        )
    return shards


def _holds_labels(path: Path) -> bool:
    """Whether a .npy file holds the labels of another one beside it."""
    return kind_of(path) == "npy" and is_of_labels(path.stem)


def open_path(
    path: Path, *, labelled: bool = True, choice: TargetChoice = FOUND
) -> tuple[Source, Source | None]:
    """The images of a path, or those to train and to validate on if the data say which.

    A path is a file of a format, a folder of its shards, their whole name, or a folder with a metadata.csv of
    labels, with images and masks, or with one sub-folder per class. `labelled` False: all packed images are
    of class ''.
    """
    kind = kind_of(path)
    if kind is not None:
        return _split_by_column(_open_kind(path, kind, labelled, choice))
    labels = labels_beside(path, choice) if path.is_dir() else None
    if labels is not None:
        return open_listing(labels, labelled=labelled, whole_folder=True, choice=choice)
    masked = open_masked(path, choice)
    if masked is not None:
        return masked
    shards = shards_of(path) or shards_in(path)
    if shards:
        return open_shards(shards, labelled=labelled, choice=choice)
    require_classes(path, choice)
    return FolderSource(path), None


def open_shard(
    path: Path, *, labelled: bool = True, choice: TargetChoice = FOUND, copies: Path
) -> tuple[Source, Source | None]:
    """As `open_path`, of one file of several: a column of parts divides all together.

    What is made to read it lies in `copies`; beside it only the class names are read.
    """
    return _open_kind(path, str(kind_of(path)), labelled, choice, copies)


def open_masked(path: Path, choice: TargetChoice) -> tuple[Source, Source | None] | None:
    """As `open_path`, of a folder of images and masks; None for another one."""
    if not path.is_dir() or choice.task == "classification":
        return None
    pairs = mask_pairs(path, wanted=choice.task == "segmentation")
    if pairs is None:
        return None
    if choice.task not in (None, "segmentation"):
        raise InputError(
            f"{path} has targets for segmentation, and not for {choice.task}\nLeave --task out"
        )
    if choice.flag is not None and not choice.of_others:
        raise InputError(f"{path} has no columns, so {choice.flag} has no effect: leave it out")
    source, parts = open_pairs(pairs, choice)
    return split(source, parts)


def open_shards(
    paths: Sequence[Path], *, labelled: bool = True, choice: TargetChoice = FOUND
) -> tuple[Source, Source | None]:
    """As `open_path`, for files of one format that belong together; at least one."""
    opened = [_open_kind(path, str(kind_of(path)), labelled, choice) for path in paths]
    if len(opened) == 1:
        return _split_by_column(opened[0])
    for path, (_, val) in zip(paths, opened, strict=True):
        if val is not None:
            raise InputError(
                f"{path} has a validation part of its own and stands among other files\n"
                "Name one of them, or put it into a folder of its own"
            )
    sources = [source for source, _ in opened]
    masked = [source for source in sources if isinstance(source, MaskedSource)]
    if len(masked) == len(sources):
        MaskedSource.share_classes(masked, choice)
    return _split_by_column((ConcatSource(sources), None))


def _split_by_column(opened: tuple[Source, Source | None]) -> tuple[Source, Source | None]:
    """The parts that a column of a table says, of one file or of all shards together."""
    source, val = opened
    return opened if val is not None else split(source, parts_of(source))


def _open_kind(
    path: Path, kind: str, labelled: bool, choice: TargetChoice, copies: Path | None = None
) -> tuple[Source, Source | None]:
    if path.is_file() and not path.stat().st_size:
        raise DamagedData(f"{path} is empty\nCopy or make it again")
    try:
        return _open(path, kind, labelled, choice, copies)
    except InputError as error:
        other = stand_in_at(path)
        if other is None:
            raise
        raise InputError(f"{path} is {other}") from error


def _open(
    path: Path, kind: str, labelled: bool, choice: TargetChoice, copies: Path | None
) -> tuple[Source, Source | None]:
    if kind == "listing":
        return open_listing(path, labelled=labelled, choice=choice)
    if kind == "arrow" and path.is_dir():
        return open_saved(path, labelled=labelled, choice=choice)
    if kind == "parquet":
        return open_parquet(path, labelled=labelled, choice=choice, copies=copies), None
    if kind == "arrow":
        alone = copies is not None
        return open_arrow(path, labelled=labelled, choice=choice, alone=alone), None
    if not choice.of_others and (choice.group is not None or choice.split is not None):
        raise InputError(
            f"{path}: --group and --split name columns of a table (.csv, .tsv, .parquet, .arrow, hf:NAME)\n"
            "Write a .csv with path, label and these columns"
        )
    if kind in _VECTORS:
        return _VECTORS[kind](path, labelled=labelled, choice=choice), None
    if kind in ("tar", "zip"):
        return open_tar(path, labelled=labelled, choice=choice, is_zip=kind == "zip")
    require_classes(path, choice)
    if kind == "lmdb":
        return LMDBSource(path, labelled=labelled), None
    return open_arrays(path, kind, labelled=labelled)


_VECTORS: dict[str, Callable[..., Source]] = {"rec": RecordSource, "tfrecord": TFRecordSource}


_OTHERS = ("metadata.jsonl", "metadata.parquet")  # which `datasets` reads, too
_CLASSES = "move it elsewhere if the folders are the classes"


def labels_beside(folder: Path, choice: TargetChoice = FOUND) -> Path | None:
    """A folder's metadata.csv if it has the images' labels; None if the folders have them.

    InputError if they contradict each other, or its kind is not read.
    """
    for name in _OTHERS:
        other = folder / name
        if other.is_file() and images_below(folder)[0]:
            raise InputError(
                f"{other} may hold the labels of the images beside it, and is not read\n"
                f"Write it as metadata.csv with the columns file_name and label, or {_CLASSES}"
            )
    path = folder / "metadata.csv"
    if not path.is_file() or not has_columns(path, choice):
        return None
    if len(class_folders(folder)) < 2:
        return path
    listing = ListingSource(path, choice=choice)
    if kind_of_targets(listing).is_table or listing.mask_names is not None:
        return path
    labels = listing.labels.tolist()
    folders = [PurePosixPath(name).parent.parts for name in listing.names]
    pairs = {(above[:1], label) for above, label in zip(folders, labels, strict=True)}
    if len(pairs) == len({above for above, _ in pairs}) == len({label for _, label in pairs}):
        return None
    for index, (above, label) in enumerate(zip(folders, labels, strict=True)):
        if listing.classes[label] not in above:
            raise InputError(
                f"{listing.describe(index)} is of class {listing.classes[label]!r}, and lies in the folder "
                f"{'/'.join(above) or '.'}\nTrain on the file, {path}, or {_CLASSES}"
            )
    return None
