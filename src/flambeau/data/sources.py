"""From what the user calls DATA to labelled images to train on, to validate on, or to evaluate on.

从用户给出的 DATA 得到用于训练、验证或评估的有标签图像。

Source: own.
"""

import difflib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from flambeau.data.errors import InputError
from flambeau.data.folder_source import IMAGE_SUFFIXES, FolderSource, class_folders
from flambeau.data.record_source import RecordSource

EMBEDDED = Path(__file__).parent / "embedded" / "fashion_mnist_train.rec"

_EXPECTED = (
    "a folder with a sub-folder of images a class (or train/ and val/ of such), or a .rec file"
)

# Lower case; of several validation folders the first in this list is taken.
_TRAIN_FOLDERS = ("train", "training")
_VAL_FOLDERS = ("val", "valid", "validation", "test", "testing")


class Source(Protocol):
    """Labelled images by number; can be pickled, and used after a fork and in threads.

    Attributes:
        classes: their names; a label is a position in them.
        labels: (N,) int64 on the CPU.
        names: what identifies an image within the source, even if others are added.
        fingerprint: hexadecimal SHA-256 of what identifies the data at little cost; a moved but unchanged
            source keeps it.
    """

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def labels(self) -> Tensor: ...

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def describe(self, index: int) -> str:
        """What to call an image in a message: its path, or its file and place in it."""

    def read(self, index: int) -> bytes:
        """The encoded image; OSError where it cannot be read."""


class SubsetSource:
    """Some images of a source, in the order given; optionally with the class numbers of another source.

    Args:
        source: what to take them from.
        indices: (M,) int64, positions in it.
        classes: names of which the labels shall be positions; by default the source's own.

    Raises:
        ValueError: an image's class is not among `classes`.
    """

    def __init__(
        self, source: Source, indices: Tensor, *, classes: tuple[str, ...] | None = None
    ) -> None:
        self._source, self._indices = source, indices
        self.classes = source.classes if classes is None else classes
        self.labels = source.labels[indices]
        if self.classes != source.classes:
            number = {name: label for label, name in enumerate(self.classes)}
            renumbered = torch.tensor([number.get(name, -1) for name in source.classes])
            unknown = self.labels[renumbered[self.labels] < 0]
            if len(unknown):
                raise ValueError(f"class {source.classes[int(unknown[0])]!r} is not in classes")
            self.labels = renumbered[self.labels]

    @property
    def names(self) -> Sequence[str]:
        names = self._source.names
        return [names[index] for index in self._indices.tolist()]

    @property
    def fingerprint(self) -> str:
        chosen = f"{self._source.fingerprint} {self._indices.tolist()} {self.classes}"
        return hashlib.sha256(chosen.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def describe(self, index: int) -> str:
        return self._source.describe(int(self._indices[index]))

    def read(self, index: int) -> bytes:
        return self._source.read(int(self._indices[index]))


def open_sources(
    path: Path | None, *, holdout: float = 0.1, seed: int = 0
) -> tuple[Source, Source]:
    """The images to train on and those to validate on.

    Where DATA has no validation part, a share of each class is held out (see `hold_out`).

    Args:
        path: a folder with a sub-folder a class, or with train/ and one of val/, valid/, validation/, test/;
            a .rec file (NAME_train.rec brings NAME_val.rec along); None: the embedded Fashion-MNIST.
        holdout: share of each class to hold out, above 0 and below 1.
        seed: of the choice of what is held out.

    Returns:
        Training and validation source, both with the classes of the training source.

    Raises:
        InputError: whatever is wrong with the data.
    """
    path = EMBEDDED if path is None else path
    _require(path)
    train_path, val_path = _folders_of(path) if path.is_dir() else _records_of(path)
    train = _source(train_path)
    counts = torch.bincount(train.labels, minlength=len(train.classes))
    if isinstance(train, FolderSource) and not counts.all():
        empty = [name for name, count in zip(train.classes, counts, strict=True) if not count]
        raise InputError(
            f"{train_path} has class folders without any image: {', '.join(empty[:5])}\n"
            f"Remove them, or add images that end in {' '.join(IMAGE_SUFFIXES)}"
        )
    if int((counts > 0).sum()) < 2:
        only = train.classes[int(counts.argmax())]
        raise InputError(
            f"{train_path} holds one class only, {only!r}; a classifier needs two or more"
        )
    if val_path is None:
        return hold_out(train, share=holdout, seed=seed)
    return train, _with_classes(_source(val_path), train.classes, f"{val_path}", f"{train_path}")


def open_source(path: Path, classes: Sequence[str]) -> Source:
    """Images to evaluate a model on that knows certain classes.

    Args:
        path: a folder with a sub-folder a class, a folder with val/ (valid/, validation/, test/) of such, or
            a .rec file; all its images count.
        classes: the model's class names, in the order of its outputs.

    Returns:
        A source with exactly these classes; some may have no image.

    Raises:
        InputError: a class that the model does not know, or whatever else is wrong with the data.
    """
    _require(path)
    if path.is_dir():
        parts = {
            k: folder for k, folder in _sub_folders(path).items() if folder.name not in classes
        }
        path = next((parts[name] for name in _VAL_FOLDERS if name in parts), path)
    return _with_classes(_source(path), tuple(classes), f"{path}", "the model")


def hold_out(source: Source, *, share: float, seed: int) -> tuple[Source, Source]:
    """Split a source into two, class by class, by the hashes of its images' names.

    Of a class of n images round(n * share) are held out, at least one; a single image is kept.
    An image's hash depends on the seed and its own name alone, and the smallest hashes of a class are held
    out: an image that is added or removed moves at most one other of its class to the other side.

    Args:
        source: any.
        share: of each class, above 0 and below 1.
        seed: any integer.

    Returns:
        What is kept and what is held out, each in the order of the source.

    Raises:
        ValueError: share is out of range.
        InputError: no class has two images.
    """
    if not 0 < share < 1:
        raise ValueError(f"the share to hold out must be above 0 and below 1, got {share}")
    hashes = [
        hashlib.sha256(f"{seed}\n{name}".encode(errors="surrogateescape")).digest()
        for name in source.names
    ]
    members: dict[int, list[int]] = {}
    for index, label in enumerate(source.labels.tolist()):
        members.setdefault(label, []).append(index)
    held = torch.zeros(len(source), dtype=torch.bool)
    for of_class in members.values():
        if len(of_class) > 1:
            count = min(max(1, round(len(of_class) * share)), len(of_class) - 1)
            held[sorted(of_class, key=hashes.__getitem__)[:count]] = True
    if not held.any():
        raise InputError(
            f"no class has two images, so none can be held out to validate on (the first image is "
            f"{source.describe(0)})\nAdd images, or give a folder with train/ and val/"
        )
    return SubsetSource(source, (~held).nonzero()[:, 0]), SubsetSource(source, held.nonzero()[:, 0])


def _require(path: Path) -> None:
    try:
        if path.is_dir() or (path.is_file() and path.suffix.lower() == ".rec"):
            return
        if path.exists():
            problem = f"{path} is neither a folder nor a .rec file"
        elif not path.parent.is_dir():
            problem = f"{path} does not exist, nor does its folder {path.parent}"
        else:
            siblings = [entry.name for entry in path.parent.iterdir()]
            near = difflib.get_close_matches(path.name, siblings, n=1)
            guess = f"; did you mean {path.parent / near[0]}?" if near else ""
            problem = f"{path} does not exist{guess}"
    except OSError as error:
        problem = f"{path} cannot be read: {(error.strerror or str(error)).lower()}"
    raise InputError(f"{problem}\nExpected {_EXPECTED}")


def _sub_folders(path: Path) -> dict[str, Path]:
    """By name in lower case."""
    return {folder.name.lower(): folder for folder in class_folders(path)}


def _folders_of(path: Path) -> tuple[Path, Path | None]:
    folders = _sub_folders(path)
    train = next((folders[name] for name in _TRAIN_FOLDERS if name in folders), None)
    val = next((folders[name] for name in _VAL_FOLDERS if name in folders), None)
    # A lone train/ is a class by that name, unless it has sub-folders and nothing stands beside it.
    if train and (val or (len(folders) == 1 and _sub_folders(train))):
        return train, val
    return path, None


def _records_of(path: Path) -> tuple[Path, Path | None]:
    val_path = path.with_name(path.stem.removesuffix("_train") + "_val" + path.suffix)
    return path, val_path if path.stem.endswith("_train") and val_path.exists() else None


def _source(path: Path) -> Source:
    return FolderSource(path) if path.is_dir() else RecordSource(path)


def _with_classes(source: Source, classes: tuple[str, ...], where: str, owner: str) -> Source:
    if source.classes == classes:
        return source
    present = [source.classes[label] for label in sorted(set(source.labels.tolist()))]
    unknown = [name for name in present if name not in classes]
    if unknown:
        near = difflib.get_close_matches(unknown[0], classes, n=1, cutoff=0.0)[0]
        raise InputError(
            f"{where} has class {unknown[0]!r}, which {owner} lacks; the nearest there is {near!r}\n"
            f"Rename or remove it, so that its classes are among the {len(classes)} known ones"
        )
    return SubsetSource(source, torch.arange(len(source)), classes=classes)
