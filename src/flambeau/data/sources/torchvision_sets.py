"""Data sets with a name, such as cifar10, through torchvision's classes.

Source: torchvision.datasets, which has the files, their checksums and their addresses. The numbers of images
are those of the data sets' own pages.
"""

import hashlib
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flambeau.data.sources.folder import FileSet
from flambeau.data.sources.source import Source
from flambeau.errors import InputError, nearest

Settings = Mapping[str, Any]
Content = tuple[Any, Any]  # of a part: pixels (N, H, W) or (N, H, W, 3), or N paths; and N labels


class PixelSet:
    """Images in memory, (N, H, W) or (N, H, W, 3) uint8, and N labels, positions in `classes`."""

    def __init__(
        self, title: str, pixels: NDArray[np.uint8], labels: Sequence[int], classes: Sequence[str]
    ) -> None:
        self._title, self._pixels = title, pixels
        self.classes = tuple(classes)
        self.labels = torch.tensor(labels, dtype=torch.int64)

    @property
    def names(self) -> Sequence[str]:
        return [str(index) for index in range(len(self))]

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self._pixels.shape} {self.classes}".encode())
        digest.update(self.labels.numpy().tobytes())
        for image in self._pixels:
            digest.update(image.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._pixels)

    def describe(self, index: int) -> str:
        return f"{self._title}, image {index}"

    def read(self, index: int) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = self._pixels[index]
        return pixels


def open_named(name: str, root: Path, *, download: bool) -> tuple[Source, Source | None]:
    """The images to train on, and any to validate on (the test part, if need be)."""
    name = name.lower().replace("_", "-")
    if name not in _SETS:
        guess = nearest(name, NAMES)
        raise InputError(f"no data set is named {name!r}{guess}\nThose known: {', '.join(NAMES)}")
    known = _SETS[name]
    if known.package and importlib.util.find_spec(known.package) is None:
        raise InputError(
            f"{name} needs the package {known.package}\nInstall it: pip install {known.package}"
        )
    root = root.expanduser().absolute()
    parts = [
        _open_part(name, root, settings, download=download)
        for settings in (known.train, known.val)
        if settings is not None
    ]
    count = sum(map(len, parts))
    if known.num_images and count != known.num_images:
        raise InputError(
            f"{name} in {root} has {count} images instead of {known.num_images}: unpacking was "
            f"interrupted\n{_fetch(name, root, again=True, gave_flag=download)}"
        )
    return parts[0], parts[1] if len(parts) == 2 else None


def _open_part(name: str, root: Path, settings: Settings, *, download: bool) -> Source:
    known = _SETS[name]
    make = getattr(importlib.import_module("torchvision.datasets"), known.class_name)
    try:
        with warnings.catch_warnings():
            # CIFAR's files are pickles of a NumPy of 2009, at which 2.4.0 to 2.4.4 warn (numpy #31177).
            warnings.filterwarnings("ignore", message=r"dtype\(\): align")
            dataset = make(str(root), download=download, **settings)
        return _source(f"{name} {_part(settings)}", root, dataset, known)
    except Exception as error:
        # torchvision has no common exception for missing files, damage and failed downloads.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        missing = [file for file in known.files if not _exists(root / file)]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            problem = f"{name}: {root / missing[0]}{more} not found"
            problem += f", and the download failed: {reason}" if download else ""
        else:
            problem = f"{name} in {root} is damaged: {reason}"
        remedy = _fetch(name, root, again=not missing, gave_flag=download)
        raise InputError(f"{problem}\n{remedy}") from error


def _exists(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises where a folder may not be entered


def _fetch(name: str, root: Path, *, again: bool, gave_flag: bool) -> str:
    """The remedy for missing files, or for damaged ones (`again`)."""
    known = _SETS[name]
    archives = ", ".join(known.archives)
    lies_there = all(_exists(root / archive) for archive in known.archives)
    if gave_flag and not again:
        same = "give the same command again"
        if lies_there:
            return (
                f"{archives} lies in {root}, but is not what its checksum says or could not be unpacked: "
                f"put a whole copy there, or remove it where there is a connection, and {same}"
            )
        proxy = "Look at the connection (behind a proxy, at the variable HTTPS_PROXY)"
        return f"{proxy} and {same}, or fetch {archives} elsewhere and put that into {root}"
    flag = "the same command again" if gave_flag else "--download"
    first = f"Remove it there ({known.files[0]} ...), then give" if again else "Give"
    if lies_there:
        return f"{first} {flag}, which unpacks {archives} that lies there"
    return f"{first} {flag}, which fetches {archives}, or put that into {root} before"


def _part(settings: Settings) -> str:
    if "train" in settings:
        return "train" if settings["train"] else "test"
    return str(settings.get("split", ""))


def _source(title: str, root: Path, dataset: Any, known: "_NamedSet") -> Source:
    content, labels = known.content(dataset)
    # A few names are tuples of synonyms (imagenette).
    classes = [
        name if isinstance(name, str) else name[0] for name in known.classes or dataset.classes
    ]
    labels = np.asarray(labels, np.int64).tolist()
    if not labels or len(content) != len(labels):
        raise ValueError(f"{len(content)} images and {len(labels)} labels in {title}")
    if not 0 <= min(labels) <= max(labels) < len(classes):
        raise ValueError(
            f"labels {min(labels)} to {max(labels)} of {len(classes)} classes in {title}"
        )
    if isinstance(content, np.ndarray):
        return PixelSet(title, content, labels, classes)
    names = [Path(path).relative_to(root).as_posix() for path in content]
    return FileSet(root, names, labels, classes)


# ---------------------------------------------------------------- the content of torchvision's objects


def _data_and_targets(dataset: Any) -> Content:
    return np.asarray(dataset.data), dataset.targets


def _first_columns(dataset: Any) -> Content:
    """QMNIST has eight columns of labels; the first is the digit."""
    return np.asarray(dataset.data), dataset.targets[:, 0]


def _transposed(dataset: Any) -> Content:
    """EMNIST is stored with rows and columns swapped."""
    return np.asarray(dataset.data).transpose(0, 2, 1), dataset.targets


def _channels_first(dataset: Any) -> Content:
    return np.moveaxis(dataset.data, 1, -1), dataset.labels


def _listed(dataset: Any) -> Content:
    """For a class whose loader returns the path of an image."""
    pairs = [dataset[index] for index in range(len(dataset))]
    return [path for path, _ in pairs], [label for _, label in pairs]


def _pets(dataset: Any) -> Content:
    return dataset._images, dataset._labels


def _signs(dataset: Any) -> Content:
    return [path for path, _ in dataset._samples], [label for _, label in dataset._samples]


def _path(path: Any) -> Any:
    return path


# ---------------------------------------------------------------- the data sets


class _NamedSet(NamedTuple):
    """What is needed of a data set besides its class in torchvision."""

    class_name: str  # in torchvision.datasets
    train: Settings
    val: Settings | None  # of the validation part, or the test part if there is none
    content: Callable[[Any], Content]
    files: Sequence[str]  # that must exist, relative to the root
    archives: Sequence[str]  # that are downloaded and unpacked, relative to the root
    num_images: int = 0  # of both parts; 0 if torchvision notices missing ones
    classes: Sequence[str] = ()  # if torchvision has none
    package: str = ""  # needed by torchvision's class


_TRAIN, _TEST = {"train": True}, {"train": False}
_SPLIT_TRAIN, _SPLIT_TEST = {"split": "train"}, {"split": "test"}
_FILES_TRAIN, _FILES_VAL, _FILES_TEST = (
    {"split": split, "loader": _path} for split in ("train", "val", "test")
)
_DIGITS = tuple("0123456789")


_QMNIST = [
    f"QMNIST/raw/qmnist-{part}-{what}"
    for part in ("train", "test")
    for what in ("images-idx3-ubyte", "labels-idx2-int")
]
_CIFAR10_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
_GTSRB_ARCHIVES = ("-Training_fixed", "_Final_Test_Images", "_Final_Test_GT")
_STL10_FILES = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin")
_SVHN = ["train_32x32.mat", "test_32x32.mat"]
_USPS = ["usps.bz2", "usps.t.bz2"]


def _below(folder: str, *names: str) -> list[str]:
    return [f"{folder}/{name}" for name in names]


def _mnist(class_name: str) -> _NamedSet:
    """The four files of LeCun's format in CLASS/raw."""
    files = [
        f"{class_name}/raw/{part}-{what}"
        for part in ("train", "t10k")
        for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    archives = [f"{file}.gz" for file in files]
    return _NamedSet(class_name, _TRAIN, _TEST, _data_and_targets, files, archives)


def _emnist(split: str) -> _NamedSet:
    files = [
        f"EMNIST/raw/emnist-{split}-{part}-{what}"
        for part in ("train", "test")
        for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    train, test = ({**part, "split": split} for part in (_TRAIN, _TEST))
    return _NamedSet("EMNIST", train, test, _transposed, files, ["EMNIST/raw/gzip.zip"])


def _imagenette(size: str, folder: str) -> _NamedSet:
    train, val = ({**part, "size": size} for part in (_FILES_TRAIN, _FILES_VAL))
    return _NamedSet("Imagenette", train, val, _listed, [folder], [f"{folder}.tgz"], 9469 + 3925)


_SETS = {
    "cifar10": _NamedSet(
        "CIFAR10",
        _TRAIN,
        _TEST,
        _data_and_targets,
        _below("cifar-10-batches-py", *_CIFAR10_BATCHES, "test_batch", "batches.meta"),
        ["cifar-10-python.tar.gz"],
    ),
    "cifar100": _NamedSet(
        "CIFAR100",
        _TRAIN,
        _TEST,
        _data_and_targets,
        _below("cifar-100-python", "train", "test", "meta"),
        ["cifar-100-python.tar.gz"],
    ),
    "country211": _NamedSet(
        "Country211",
        _FILES_TRAIN,
        {"split": "valid", "loader": _path},
        _listed,
        ["country211"],
        ["country211.tgz"],
        31650 + 10550,
    ),
    "dtd": _NamedSet(
        "DTD", _FILES_TRAIN, _FILES_VAL, _listed, ["dtd/dtd"], ["dtd/dtd-r1.0.1.tar.gz"]
    ),
    "emnist-balanced": _emnist("balanced"),
    "emnist-digits": _emnist("digits"),
    "eurosat": _NamedSet(
        "EuroSAT",
        {"loader": _path},
        None,
        _listed,
        ["eurosat/2750"],
        ["eurosat/EuroSAT.zip"],
        27000,
    ),
    "fashion-mnist": _mnist("FashionMNIST"),
    "fgvc-aircraft": _NamedSet(
        "FGVCAircraft",
        _FILES_TRAIN,
        _FILES_VAL,
        _listed,
        ["fgvc-aircraft-2013b"],
        ["fgvc-aircraft-2013b.tar.gz"],
    ),
    "flowers102": _NamedSet(
        "Flowers102",
        _FILES_TRAIN,
        _FILES_VAL,
        _listed,
        _below("flowers-102", "jpg", "imagelabels.mat", "setid.mat"),
        _below("flowers-102", "102flowers.tgz", "imagelabels.mat", "setid.mat"),
        package="scipy",
    ),
    "food101": _NamedSet(
        "Food101",
        _FILES_TRAIN,
        _FILES_TEST,
        _listed,
        ["food-101/meta", "food-101/images"],
        ["food-101.tar.gz"],
    ),
    "gtsrb": _NamedSet(
        "GTSRB",
        _SPLIT_TRAIN,
        _SPLIT_TEST,
        _signs,
        ["gtsrb/GTSRB/Training", "gtsrb/GTSRB/Final_Test/Images", "gtsrb/GT-final_test.csv"],
        _below("gtsrb", *(f"GTSRB{name}.zip" for name in _GTSRB_ARCHIVES)),
        26640 + 12630,
        classes=tuple(map(str, range(43))),
    ),
    "imagenette": _imagenette("full", "imagenette2"),
    "imagenette-160": _imagenette("160px", "imagenette2-160"),
    "imagenette-320": _imagenette("320px", "imagenette2-320"),
    "kmnist": _mnist("KMNIST"),
    "mnist": _mnist("MNIST"),
    "oxford-pets": _NamedSet(
        "OxfordIIITPet",
        {"split": "trainval"},
        _SPLIT_TEST,
        _pets,
        ["oxford-iiit-pet/images", "oxford-iiit-pet/annotations"],
        ["oxford-iiit-pet/images.tar.gz", "oxford-iiit-pet/annotations.tar.gz"],
    ),
    "qmnist": _NamedSet(
        "QMNIST", _TRAIN, _TEST, _first_columns, _QMNIST, [f"{file}.gz" for file in _QMNIST]
    ),
    "rendered-sst2": _NamedSet(
        "RenderedSST2",
        _FILES_TRAIN,
        _FILES_VAL,
        _listed,
        ["rendered-sst2"],
        ["rendered-sst2.tgz"],
        6920 + 872,
    ),
    "stl10": _NamedSet(
        "STL10",
        _SPLIT_TRAIN,
        _SPLIT_TEST,
        _channels_first,
        _below("stl10_binary", *_STL10_FILES, "unlabeled_X.bin", "class_names.txt"),
        ["stl10_binary.tar.gz"],
    ),
    "svhn": _NamedSet(
        "SVHN",
        _SPLIT_TRAIN,
        _SPLIT_TEST,
        _channels_first,
        _SVHN,
        _SVHN,
        classes=_DIGITS,
        package="scipy",
    ),
    "usps": _NamedSet("USPS", _TRAIN, _TEST, _data_and_targets, _USPS, _USPS, classes=_DIGITS),
}

NAMES = tuple(_SETS)
