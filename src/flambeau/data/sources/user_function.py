"""Labelled images from a user's function, FILE.py:FUNCTION: any data set, any storage.

`.classes`, `.targets` and `.labels` are attributes as of torchvision's data sets.

The function is called once in each process that reads, because a connection, a lock or the position in an
open file does not survive a fork, and because its result need not be picklable.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from flambeau.data.sources.class_names_file import chosen_labels, named_labels, unlabelled
from flambeau.data.sources.masks.mask_classes import NamedValues
from flambeau.data.sources.masks.masked_source import MaskedSource, Masks
from flambeau.data.sources.source import PixelKind, Source
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import FOUND, TargetChoice, as_learned, refuse_columns
from flambeau.data.sources.user_samples import (
    Label,
    WrongSample,
    class_label,
    classes_of,
    declared,
    image_of,
    is_mask,
    is_source,
    kind_of_pixels,
    labels_of,
    split_sample,
    stored_image,
    stored_mask,
)
from flambeau.data.sources.user_targets import Target, other_targets, target_of
from flambeau.errors import DecodeError, InputError
from flambeau.images.decode import Stored
from flambeau.images.thread_pool import DecodePool
from flambeau.recipes.setup.seeding import cpu_generators_restored, seed_cpu
from flambeau.regular_file import read_file
from flambeau.terminal import CountBar, say
from flambeau.user_code import call_function, first_line, line_of, read_source, running_user_code

_PARTS = {1: ("",), 2: ("training ", "validation ")}
_NUM_PROBED = 8  # samples that are read twice when the data are opened; chosen

# A damaged or missing file; Pillow raises SyntaxError for a PNG. Anything else is an error in the program.
_BAD_IMAGE = (OSError, SyntaxError, Image.DecompressionBombError)
_CONNECTION_ERRORS = (TimeoutError, ConnectionError)  # not the fault of an image


def open_function(
    name: str, *, labelled: bool = True, choice: TargetChoice = FOUND
) -> tuple[Source, Source | None]:
    """The data set of a user's function to train on and, of a pair, to validate on."""
    refuse_columns(Path(name), replace(choice, separator=None))
    returned = _Returned(name)
    if labelled and _has_masks(returned, choice):
        masked = _masked(returned, 0, choice)
        if len(returned.lengths) == 1:
            return masked, None
        return masked, _masked(returned, 1, as_learned(masked, choice))
    train = UserSource(returned, 0, labelled=labelled, choice=choice)
    if len(returned.lengths) == 1:
        return train, None
    return train, UserSource(returned, 1, labelled=labelled, choice=as_learned(train, choice))


def _has_masks(returned: "_Returned", choice: TargetChoice) -> bool:
    """Whether its samples are pairs of an image and a mask."""
    if choice.task is not None:
        return choice.task == "segmentation"
    data = returned.part(0)
    if is_source(data) or labels_of(data, returned.lengths[0]) is not None:
        return False
    try:
        with running_user_code(returned.path):
            label = split_sample(data[0])[1]
            return is_mask(label) and stored_mask(label) is not None
    except Exception:  # of the user's code, which is said where all samples are read
        return False


def _masked(returned: "_Returned", number: int, choice: TargetChoice) -> MaskedSource:
    """One of the data sets as images with masks."""
    images = UserSource(returned, number, labelled=False)
    with running_user_code(returned.path):
        classes = classes_of(returned.part(number))
    named = None
    if classes is not None:
        named = NamedValues(dict(enumerate(classes)), f"{returned.name}: .classes")
    if os.environ.get("RANK", "0") == "0":
        say(f"{images.describe(0)} and all {len(images)} samples are read once for their masks")
    masks = Masks(
        read=images.mask,
        describe=images.describe_mask,
        fingerprint="",
        named=named,
    )
    return MaskedSource(images, masks, choice)


class UserSource:
    """One of the data sets that a user's function returns; `labelled` False accepts samples without labels.

    Samples are read under a lock, which both data sets of a pair share, unless the data set has `thread_safe
    = True` or the methods of a Source; decoding, and files whose path is the sample, need no lock. A fork
    calls the function again, unless the data set has `fork_safe = True`.
    """

    def __init__(
        self,
        returned: "_Returned",
        number: int,
        *,
        labelled: bool = True,
        choice: TargetChoice = FOUND,
    ) -> None:
        self._returned, self._number = returned, number
        self._what = _PARTS[len(returned.lengths)][number]
        data = returned.part(number)
        self._thread_safe = declared(data, "thread_safe")
        with running_user_code(returned.path):
            names = getattr(data, "names", None) if is_source(data) else None
            self._names = None if names is None else list(map(str, names))
            classes = classes_of(data)
            known = labels_of(data, len(self))
            version = getattr(data, "fingerprint", None)
        if known is None and is_source(data):
            raise InputError(
                f"{returned.name}: .labels are not one for each of the {len(self)} {self._what}samples"
            )
        self._has_label_list = known is not None
        self._labelled = labelled or known is not None
        self.task: TaskName = "classification"
        self.separator: str | None = None
        self._targets: list[Target] | None = None  # if they are not classes
        if self._labelled:
            labels = self._read_labels() if known is None else self._plain_labels(known)
            targets = other_targets(labels, classes, choice, self.describe)
            if targets is None:
                self.classes, self.labels = self._classes_and_labels(classes, labels)
            else:
                self._targets = labels
                self.task, self.classes, self.labels, self.separator = targets
        else:
            self.classes, self.labels = unlabelled(len(self), returned.path)
        self._positions = {name: position for position, name in enumerate(self.classes)}
        self.pixel_kind = self._probe()
        self.fingerprint = self._fingerprint(version if isinstance(version, str) else "")

    @property
    def names(self) -> Sequence[str]:
        return self._names or [f"{index:08}" for index in range(len(self))]

    def __len__(self) -> int:
        return self._returned.lengths[self._number]

    def describe(self, index: int) -> str:
        name = f" ({self._names[index]})" if self._names else ""
        return f"{self._returned.name}, {self._what}sample {index}{name}"

    def read(self, index: int) -> Stored:
        return self._read(index, self.pixel_kind)

    def describe_mask(self, index: int) -> str:
        return f"of {self.describe(index)}"

    def mask(self, index: int) -> object:
        """The mask that a sample has beside its image: a file or an array."""
        kept = self._returned.kept_mask((self._number, index))
        if kept is not None:
            return kept
        data = self._returned.part(self._number)
        with self._errors(index), self._lock():
            return stored_mask(split_sample(data[index])[1])

    def _read(self, index: int, kind: PixelKind) -> Stored:
        data = self._returned.part(self._number)
        with self._errors(index):
            with self._lock():
                image = self._image(data, index)
                # It may be lazy, or a buffer that the data set reuses.
                if not isinstance(image, str | os.PathLike):
                    return _stored(image, kind)
            return _stored(image, kind)

    def _lock(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._thread_safe else self._returned.lock

    def _image(self, data: Any, index: int) -> object:
        """The image of a sample; its label is compared with the known one."""
        if is_source(data):
            return data.read(index)
        if not self._labelled:
            sample = data[index]
            self._returned.keep_mask((self._number, index), sample)
            return image_of(sample)
        image, label = split_sample(data[index])
        self._check_label(index, target_of(label))
        return image

    @contextlib.contextmanager
    def _errors(self, index: int) -> Generator[None, None, None]:
        """Add a sample's number and the line of the user's file to errors."""
        try:
            yield
        except (InputError, DecodeError):
            raise
        except WrongSample as error:
            raise InputError(f"{self.describe(index)}: {error}") from error
        except Exception as error:
            line = line_of(self._returned.path, error)
            if isinstance(error, _BAD_IMAGE) and not isinstance(error, _CONNECTION_ERRORS):
                raise DecodeError(f"{_reason(error)}{f' (line {line})' if line else ''}") from error
            where = f", line {line}" if line else ""
            raise InputError(
                f"{self.describe(index)}{where}: {type(error).__name__}: {first_line(error)}"
            ) from error

    # ------------------------------------------------------------ labels

    def _read_labels(self) -> list[Target]:
        """The labels from one pass over the samples."""
        length = len(self)
        labels = dict[int, Target]()
        data = self._returned.part(self._number)
        is_first = os.environ.get("RANK", "0") == "0"
        if is_first:
            say(
                f"{self._returned.name}: reading all {length} {self._what}samples for their labels; "
                "a data set with .targets is spared this"
            )

        def work(index: int) -> None:
            try:
                with self._errors(index):
                    labels[index] = target_of(split_sample(data[index])[1])
            except DecodeError as error:
                raise InputError(
                    f"{self.describe(index)}: {error}\nIts label is not known without it: "
                    "give the data set .targets, one per sample, to allow for bad images"
                ) from error
            bar.update()

        with CountBar(length, unit="samples", shown=is_first) as bar:
            DecodePool(None if self._thread_safe else 1).each(length, work)
        return [labels[index] for index in range(length)]

    def _plain_labels(self, labels: Sequence[object]) -> list[Target]:
        plain = list[Target]()
        for index, label in enumerate(labels):
            with self._errors(index):
                plain.append(target_of(label))
        return plain

    def _classes_and_labels(
        self, classes: Sequence[str] | None, targets: list[Target]
    ) -> tuple[tuple[str, ...], Tensor]:
        labels = list[Label]()
        for index, target in enumerate(targets):
            with self._errors(index):
                labels.append(class_label(target))
        words = isinstance(labels[0], str)
        for index, label in enumerate(labels):
            if isinstance(label, str) != words:
                raise InputError(
                    f"{self.describe(index)}: its label is {label!r}, that of sample 0 {labels[0]!r}\n"
                    "Labels are all numbers, or all names of classes"
                )
        if classes is None:
            return named_labels(labels, Path(self._returned.name), self.describe)
        return chosen_labels(labels, classes, f"{self._returned.name}: .classes", self.describe)

    def _check_label(self, index: int, label: Target) -> None:
        """The labels known before are those trained on, so they must be right."""
        if self._targets is not None:
            known: object = self._targets[index]
            is_same = str(label) == str(known)  # so that NaN is NaN
            shown = repr(known)
        else:
            known = int(self.labels[index])
            is_same = (self._positions.get(label) if isinstance(label, str) else label) == known
            shown = f"{self.classes[known]!r} (class {known})"
        if not is_same:
            before = (
                "in .targets or .labels"
                if self._has_label_list
                else "when all samples were read for it"
            )
            raise WrongSample(
                f"its label is {label!r}, and {before} it is {shown}\n"
                "Make them agree; a sample has the same label each time that it is read"
            )

    # ------------------------------------------------------------ identity

    def _fingerprint(self, of_user: object) -> str:
        """Not of the pixels or the file: a mistake in it may be fixed and the run continued."""
        name = Path(self._returned.name).name
        facts = f"{name} {self._what}{len(self)} {self.classes} {of_user} {self._names}"
        facts += "" if self.pixel_kind == "uint8" else f" {self.pixel_kind}"
        return hashlib.sha256(facts.encode() + self.labels.numpy().tobytes()).hexdigest()

    def _probe(self) -> PixelKind:
        """The kind of the pixels, from some samples.

        Samples that differ from one reading to the next are refused, because a resume could not be exact.
        """
        data = self._returned.part(self._number)
        images = dict[int, object]()
        for index in sorted({k * len(self) // _NUM_PROBED for k in range(_NUM_PROBED)}):
            with contextlib.suppress(DecodeError), self._errors(index), self._lock():
                images[index] = self._image(data, index)
        kinds = set(map(kind_of_pixels, images.values()))
        if declared(data, "float_pixels", default=False):
            kinds.add("unit")
        kind: PixelKind = "float" if "float" in kinds else "unit" if "unit" in kinds else "uint8"
        for index, image in images.items():
            try:
                with self._errors(index):
                    first = _stored(image, kind)
                same = _same(first, self._read(index, kind))
            except DecodeError:
                continue  # a bad image, which is counted later
            if not same:
                raise InputError(
                    f"{self.describe(index)}: its image is another one each time that it is read\n"
                    "Leave random transforms out: flambeau crops, flips and augments, and repeats it exactly"
                )
        return kind


class _Returned:
    """The result of the function in this process; another process calls the function again."""

    def __init__(self, name: str) -> None:
        file, _, function = name.rpartition(":")
        self.path = Path(file).absolute()  # the function may change the folder
        self.name = f"{self.path}:{function}"
        # Read once: edits during a run have no effect.
        self._source = read_source(self.name, what="DATA")
        self._locks: dict[int, threading.Lock] = {}
        self._masks: dict[int, tuple[tuple[int, int], object]] = {}  # by thread
        self._pid = os.getpid()
        self._parts = self._call()
        self.lengths = [self._length(data) for data in self._parts]
        self._fork_safe = all(declared(data, "fork_safe") for data in self._parts)

    def __getstate__(self) -> dict[str, Any]:
        empty = {"_locks": {}, "_pid": 0, "_parts": [], "_fork_safe": False, "_masks": {}}
        return {**self.__dict__, **empty}

    def keep_mask(self, which: tuple[int, int], sample: object) -> None:
        """Keep the mask of a sample of which this thread reads the image, as it reads the mask next."""
        if isinstance(sample, tuple | list) and len(sample) == 2 and is_mask(sample[1]):
            self._masks[threading.get_ident()] = which, stored_mask(sample[1])

    def kept_mask(self, which: tuple[int, int]) -> object | None:
        """The mask that this thread has kept; None if it is of another sample."""
        kept, mask = self._masks.pop(threading.get_ident(), (None, None))
        return mask if kept == which else None

    @property
    def lock(self) -> threading.Lock:
        """One per process: a thread that a fork does not have may hold the parent's."""
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def part(self, number: int) -> Any:
        """One of the data sets; not to be called while holding the lock."""
        if os.getpid() != self._pid and not self._fork_safe:
            with self.lock:
                if os.getpid() != self._pid:
                    self._parts = self._call_again()
                    self._pid = os.getpid()
        return self._parts[number]

    def _call_again(self) -> list[Any]:
        parts = self._call()
        lengths = [self._length(data) for data in parts]
        if lengths != self.lengths:
            before, now = (" and ".join(map(str, counts)) for counts in (self.lengths, lengths))
            raise InputError(
                f"{self.name} has returned {before} samples, and {now} in another process"
                "\nIt must return the same data each time that it is called"
            )
        return parts

    def _call(self) -> list[Any]:
        # Random draws, as by random_split, are the same in each process and on a resume.
        with cpu_generators_restored():
            seed_cpu(0)
            returned = call_function(self.name, what="DATA", source=self._source)
        # random_split returns its parts as a list; any other list holds samples.
        if isinstance(returned, list) and any(isinstance(one, Subset) for one in returned):
            returned = tuple(returned)
        if not isinstance(returned, tuple):
            return [returned]
        if len(returned) != 2:
            raise InputError(
                f"{self.name} has returned {len(returned)} things\n"
                "Return one data set, or a pair: one to train on, one to validate on"
            )
        train, val = returned
        return [train] if val is None else [train, val]

    def _length(self, data: Any) -> int:
        kind = type(data).__name__
        if data is None or isinstance(data, str | bytes):
            problem = "None" if data is None else kind
        elif isinstance(data, Mapping):
            problem = f"a {kind} with {', '.join(map(str, list(data)[:5]))}"
        elif not hasattr(data, "__len__") or isinstance(data, IterableDataset):
            problem = f"{kind}, which has no len()"
        elif not hasattr(data, "__getitem__") and not is_source(data):
            problem = f"{kind}, which has no [index]"
        else:
            with running_user_code(self.path):
                length = len(data)
            if not length:
                raise InputError(f"{self.name} has returned a {kind} without any sample")
            return length
        raise InputError(
            f"{self.name} has returned {problem}\n"
            "Return a data set with len() and [index], or a pair of them: to train on, to validate on"
        )


def _stored(image: object, kind: PixelKind) -> Stored:
    stored = stored_image(image, is_float=kind != "uint8")
    return read_file(stored) if isinstance(stored, Path) else stored


def _same(one: Stored, other: Stored) -> bool:
    if isinstance(one, bytes) or isinstance(other, bytes):
        return type(one) is type(other) and bool(one == other)
    return np.array_equal(one, other)


def _reason(error: BaseException) -> str:
    """Why an image cannot be read; a path keeps its capitals."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower() + (f": {error.filename}" if error.filename else "")
    return first_line(error)
