"""What of a data set is understood: its classes, and the transforms that are found in it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import DatasetFolder, folder
from torchvision.datasets.folder import default_loader, pil_loader

from flambeau.data.drop_in.interception import plan_for
from flambeau.data.drop_in.transform_kinds import COMPOSED, is_timms

_MOST_DEPTH = 8


@dataclass(frozen=True)
class TakenOver:
    """What we do of a data set's work.

    Attributes:
        taken: names of transforms that we do.
        left: names of transforms that are called as they are.
        code: classes whose own code reads the samples; nothing is known of it.
        pipelines: how many different ones samples go through.
    """

    taken: tuple[str, ...]
    left: tuple[str, ...]
    code: tuple[str, ...]
    pipelines: int

    @property
    def is_complete(self) -> bool:
        """Nothing but what we know runs for a sample."""
        return bool(self.taken) and not self.left and not self.code

    def describe(self) -> str:
        """What is taken over and what is not, in one sentence."""
        ours = ", ".join(self.taken) or "and each Compose of torchvision that is called"
        words = f"taken over: reading, {ours}"
        if self.left:
            words += f"; as they are: {', '.join(self.left)}"
        if self.code:
            words += f"; the code of {', '.join(self.code)} runs as it is"
        return words


def taken_over(dataset: Any) -> TakenOver:
    """Look through a data set; nothing of it is read."""
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
            # What is derived from a Compose, or does more around one than call it, has code of its own.
            if type(transform) not in COMPOSED and not _only_passes_on(transform):
                left.append(type(transform).__name__)
    names = [tuple(dict.fromkeys(found)) for found in (taken, left, code)]
    return TakenOver(names[0], names[1], names[2], len(pipelines))


def parts_of(dataset: Any, depth: int = 0) -> Iterator[Any]:
    """The data sets that a data set is made of."""
    if type(dataset) is Subset and depth < _MOST_DEPTH:
        yield from parts_of(dataset.dataset, depth + 1)
    elif type(dataset) is ConcatDataset and depth < _MOST_DEPTH:
        for part in dataset.datasets:
            yield from parts_of(part, depth + 1)
    else:
        yield dataset


def _is_known(dataset: Any) -> bool:
    """Whether its reading is torchvision's own, or timm's: open, convert, transform."""
    if getattr(dataset, "target_transform", None) is not None:
        return False
    if is_timms(dataset, "ImageDataset"):
        return is_timms(dataset.reader, "ReaderImageFolder") and not dataset.load_bytes
    if type(dataset).__getitem__ is not DatasetFolder.__getitem__:
        return False
    return dataset.loader in (default_loader, pil_loader, folder.pil_loader)  # the last may be ours


def _transforms(dataset: Any) -> Iterator[Any]:
    """What is called `transform` in it, or is a whole pipeline under another name."""
    own = vars(dataset) if hasattr(dataset, "__dict__") else {}
    seen: list[Any] = []
    for name, value in own.items():
        named = name == "transform" and value is not None
        if (named or isinstance(value, COMPOSED)) and value not in seen:
            seen.append(value)
            yield value


def _composes_in(transform: Any) -> list[Any]:
    """A Compose itself, or what an object around it calls, like the presets of torchvision's scripts."""
    if isinstance(transform, COMPOSED):
        return [transform]
    return [one for one in getattr(transform, "__dict__", {}).values() if isinstance(one, COMPOSED)]


class _PassesOn:
    """What the code of such an object is compared with."""

    inner: Any

    def __call__(self, image: Any) -> Any:
        return self.inner(image)


def _only_passes_on(transform: Any) -> bool:
    """Whether calling it is `self.NAME(image)` for a Compose, whatever NAME is: no code that could draw."""
    code = getattr(type(transform).__call__, "__code__", None)
    if code is None or code.co_code != _PassesOn.__call__.__code__.co_code:
        return False
    inner = getattr(transform, code.co_names[0], None)
    return type(inner) in COMPOSED
