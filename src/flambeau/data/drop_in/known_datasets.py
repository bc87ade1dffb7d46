"""Which parts of a data set are known: its classes, and its transforms."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import DatasetFolder, folder
from torchvision.datasets.folder import default_loader, pil_loader

from flambeau.data.drop_in.interception import plan_for
from flambeau.data.drop_in.sample_context import OWN, READING, SAMPLES, SEEDED
from flambeau.data.drop_in.transform_kinds import (
    COMPOSED,
    has_code_of_its_own,
    is_from_timm,
    is_one_of,
    settings_of,
)

_MOST_DEPTH = 8


@dataclass(frozen=True)
class Takeover:
    """What flambeau does of a data set's work; samples read by the `code` of classes are unknown."""

    taken: tuple[str, ...]
    left: tuple[str, ...]
    code: tuple[str, ...]
    pipelines: int

    @property
    def is_complete(self) -> bool:
        """Whether only known code runs for a sample."""
        return bool(self.taken) and not self.left and not self.code

    def describe(self, counts: Counter[str]) -> str:
        """One sentence for `report`: what was done so far, or is planned."""
        number = counts[SAMPLES]
        left = self.left
        if not number:
            ours = ", ".join(self.taken) or "and each Compose of torchvision that is called"
            words = f"to be taken over: reading, {ours}"
        else:
            done = [*dict.fromkeys((READING, *self.taken, *counts))]
            ours = ", ".join(
                _times(name, counts[name], number)
                for name in done
                if counts[name] and name not in (SAMPLES, OWN, SEEDED)
            )
            words = f"taken over in {number} samples: {ours}"
            if not ours:
                why = (
                    "their code seeds a generator before a Compose, whose draws must follow from it"
                    if counts[SEEDED]
                    else "none of their images was opened by PIL and given, alone or with its mask, to a "
                    "Compose of torchvision"
                )
                words = f"nothing was taken over in {number} samples: {why}"
            left = tuple(dict.fromkeys((*left, *(one for one in self.taken if not counts[one]))))
            if counts[OWN]:
                left = (*left, _times(OWN, counts[OWN], 0))
        if left:
            words += f"; as they are: {', '.join(left)}"
        if self.code:
            words += f"; the code of {', '.join(self.code)} runs as it is"
        return words


def _times(name: str, count: int, samples: int) -> str:
    return name if count == samples else f"{name} ({count} times)"


def inspect_dataset(dataset: Any) -> Takeover:
    """Find what can be taken over; no sample is read."""
    taken: list[str] = []
    left: list[str] = []
    code: list[str] = []
    pipelines: set[int] = set()
    for part in parts_of(dataset):
        if not _is_known(part):
            code.append(type(part).__name__)
        for transform in _transforms(part):
            pipelines.add(id(transform))
            for compose in _composes_in(transform):
                plan = plan_for(compose)
                taken += [] if plan is None else plan.taken
                left += [type(compose).__name__] if plan is None else plan.left
            # A class derived from Compose, or one that does more than call its Compose, has its own code.
            if not is_one_of(transform, *COMPOSED) and not _only_passes_on(transform):
                left.append(type(transform).__name__)
    names = [tuple(dict.fromkeys(one)) for one in (taken, left, code)]
    return Takeover(names[0], names[1], names[2], len(pipelines))


def settings_of_dataset(dataset: Any) -> list[Any]:
    """What its transforms are made of now."""
    found = []
    for part in parts_of(dataset):
        for transform in _transforms(part):
            found.append(transform)
            for compose in _composes_in(transform):
                found += settings_of(compose)
    return found


def parts_of(dataset: Any, depth: int = 0) -> Iterator[Any]:
    """The data sets inside Subset and ConcatDataset."""
    if type(dataset) is Subset and depth < _MOST_DEPTH:
        yield from parts_of(dataset.dataset, depth + 1)
    elif type(dataset) is ConcatDataset and depth < _MOST_DEPTH:
        for part in dataset.datasets:
            yield from parts_of(part, depth + 1)
    else:
        yield dataset


def _is_known(dataset: Any) -> bool:
    """Whether torchvision's or timm's own code reads its samples: open, convert, transform."""
    if getattr(dataset, "target_transform", None) is not None:
        return False
    if is_from_timm(dataset, "ImageDataset"):
        return is_from_timm(dataset.reader, "ReaderImageFolder") and not dataset.load_bytes
    if type(dataset).__getitem__ is not DatasetFolder.__getitem__:
        return False
    return dataset.loader in (
        default_loader,
        pil_loader,
        folder.pil_loader,
    )  # the last may be replaced


def _transforms(dataset: Any) -> Iterator[Any]:
    """Its attribute `transform`, and each Compose under another name."""
    attributes = vars(dataset) if hasattr(dataset, "__dict__") else {}
    seen: list[Any] = []
    for name, value in attributes.items():
        named = name == "transform" and value is not None
        if (named or isinstance(value, COMPOSED)) and value not in seen:
            seen.append(value)
            yield value


def _composes_in(transform: Any) -> list[Any]:
    """A Compose itself, or those in an object around it, like the presets of torchvision's scripts."""
    if isinstance(transform, COMPOSED):
        return [transform]
    return [one for one in getattr(transform, "__dict__", {}).values() if isinstance(one, COMPOSED)]


class _PassesOn:
    """Its `__call__` is what `_only_passes_on` compares code with."""

    inner: Any

    def __call__(self, image: Any) -> Any:
        return self.inner(image)


def _only_passes_on(transform: Any) -> bool:
    """Whether calling it is only `self.NAME(image)` for a Compose: no code that could draw."""
    code = getattr(type(transform).__call__, "__code__", None)
    if code is None or code.co_code != _PassesOn.__call__.__code__.co_code:
        return False
    inner = getattr(transform, code.co_names[0], None)
    return is_one_of(inner, *COMPOSED) and not has_code_of_its_own(transform)
