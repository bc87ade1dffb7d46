"""The kinds of targets: one class per image, several labels, numbers, or masks; each is a class here.

N: images, K: labels, columns of numbers, or classes of pixels.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flambeau.data.sources.target_names import TaskName
from flambeau.errors import InputError


class TargetKind(Protocol):
    """What is done with targets of a kind.

    `is_table`: rows of float32, not class numbers; `has_it`: how a message says that an image has one.
    """

    @property
    def is_table(self) -> bool: ...

    @property
    def has_it(self) -> str: ...

    def texts(self, names: Sequence[str], labels: Tensor) -> list[str]:
        """The targets of each image as text."""

    def cells(
        self, names: Sequence[str], labels: Tensor, separator: str | None
    ) -> tuple[list[str], list[list[str]]]:
        """The heads of the columns of a table, and the cells of each image."""

    def has(self, labels: Tensor, number: int) -> Tensor:
        """(N,) bool: which images have the target of this number."""

    def strata(self, labels: Tensor) -> list[int]:
        """Groups of images of which each part of a split gets its share."""

    def renumbered(self, labels: Tensor, positions: Tensor, num: int, absent: float) -> Tensor:
        """The targets at new `positions` of each class, label or column among `num`, -1 for one that no image
        has.

        `absent` is the value of a label without an old place.
        """

    def require_learnable(self, names: Sequence[str], labels: Tensor, where: str) -> None:
        """InputError if nothing can be learned from the targets of training images."""

    def require_in_training(self, train: Any, val: Any) -> None:
        """InputError if images to validate on have what no image to train on has."""


class OneClass:
    """(N,) int64 class numbers."""

    is_table = False
    has_it = "is of class"

    def texts(self, names: Sequence[str], labels: Tensor) -> list[str]:
        return [names[label] for label in labels.tolist()]

    def cells(
        self, names: Sequence[str], labels: Tensor, separator: str | None
    ) -> tuple[list[str], list[list[str]]]:
        return ["label"], [[text] for text in self.texts(names, labels)]

    def has(self, labels: Tensor, number: int) -> Tensor:
        return labels == number

    def strata(self, labels: Tensor) -> list[int]:
        return list(labels.tolist())

    def renumbered(self, labels: Tensor, positions: Tensor, num: int, absent: float) -> Tensor:
        return positions[labels]

    def require_learnable(self, names: Sequence[str], labels: Tensor, where: str) -> None:
        counts = torch.bincount(labels, minlength=len(names))
        if int((counts > 0).sum()) < 2:
            only = names[int(counts.argmax())]
            raise InputError(
                f"{where} holds one class only, {only!r}; a classifier needs two or more"
            )

    def require_in_training(self, train: Any, val: Any) -> None:
        num = len(train.classes)
        lost = torch.bincount(val.labels, minlength=num)[:num] > 0
        lost &= torch.bincount(train.labels, minlength=num)[:num] == 0
        if lost.any():
            number = int(lost.nonzero()[0])
            image = val.describe(int(self.has(val.labels, number).nonzero()[0]))
            raise InputError(
                f"{image} is of class {train.classes[number]!r}, and no image to train on is\n"
                "Move one of it to the training part, or leave it out"
            )


class SeveralLabels:
    """(N, K) float32: 1, 0, or NaN for unknown."""

    is_table = True
    has_it = "has the label"

    def texts(self, names: Sequence[str], labels: Tensor) -> list[str]:
        """The names of its labels; '?name' for an unknown one."""
        return ["|".join(self._words(names, row)) for row in labels.tolist()]

    def _words(self, names: Sequence[str], row: Sequence[float]) -> list[str]:
        return [
            f"?{name}" if math.isnan(value) else name
            for name, value in zip(names, row, strict=True)
            if value != 0
        ]

    def cells(
        self, names: Sequence[str], labels: Tensor, separator: str | None
    ) -> tuple[list[str], list[list[str]]]:
        if separator is None:
            return [*names], _number_cells(labels)
        rows = [self._words(names, row) for row in labels.tolist()]
        return ["labels"], [[separator.join(words)] for words in rows]

    def has(self, labels: Tensor, number: int) -> Tensor:
        return labels[:, number] == 1

    def strata(self, labels: Tensor) -> list[int]:
        return _rarest(labels == 1)

    def renumbered(self, labels: Tensor, positions: Tensor, num: int, absent: float) -> Tensor:
        return _columns_moved(labels, positions, num, absent)

    def require_learnable(self, names: Sequence[str], labels: Tensor, where: str) -> None:
        if not ((labels == 1).any(0) & (labels == 0).any(0)).any():
            raise InputError(
                f"{where}: no label is on some images and not on others: nothing to learn"
            )

    def require_in_training(self, train: Any, val: Any) -> None:
        lost = _only_in_validation(self, train, val)
        if lost is not None:
            image, name = lost
            raise InputError(
                f"{image} has the label {name!r}, and no image to train on has it\n"
                "Move one with it to the training part, or remove the label"
            )


class Numbers:
    """(N, K) float32, NaN where one is missing."""

    is_table = True
    has_it = "has the number"

    def texts(self, names: Sequence[str], labels: Tensor) -> list[str]:
        return [" ".join(map(repr, row)) for row in labels.tolist()]

    def cells(
        self, names: Sequence[str], labels: Tensor, separator: str | None
    ) -> tuple[list[str], list[list[str]]]:
        return [*names], _number_cells(labels)

    def has(self, labels: Tensor, number: int) -> Tensor:
        return labels[:, number].isfinite()

    def strata(self, labels: Tensor) -> list[int]:
        return [0] * len(labels)

    def renumbered(self, labels: Tensor, positions: Tensor, num: int, absent: float) -> Tensor:
        return _columns_moved(labels, positions, num, absent)

    def require_learnable(self, names: Sequence[str], labels: Tensor, where: str) -> None:
        for name, column in zip(names, labels.T, strict=True):
            known = column[column.isfinite()].unique()
            if len(known) < 2:
                only = f"is always {float(known[0]):g}" if len(known) else "has no number"
                raise InputError(
                    f"{where}: column {name!r} {only} in the images to train on: nothing to learn\n"
                    "Name other columns with --target"
                )

    def require_in_training(self, train: Any, val: Any) -> None:
        pass  # any number may follow


class PixelClasses:
    """(N, K) float32, the share of each class in the pixels of a mask; see `masks.masked_source`."""

    is_table = True
    has_it = "has pixels of class"

    def texts(self, names: Sequence[str], labels: Tensor) -> list[str]:
        return [
            "|".join(f"{name} {share:.6g}" for name, share in zip(names, row, strict=True) if share)
            for row in labels.tolist()
        ]

    def cells(
        self, names: Sequence[str], labels: Tensor, separator: str | None
    ) -> tuple[list[str], list[list[str]]]:
        raise InputError("masks do not stand in a table of labels")

    def has(self, labels: Tensor, number: int) -> Tensor:
        return labels[:, number] > 0

    def strata(self, labels: Tensor) -> list[int]:
        return _rarest(labels > 0)

    def renumbered(self, labels: Tensor, positions: Tensor, num: int, absent: float) -> Tensor:
        return _columns_moved(labels, positions, num, absent=0.0)

    def require_learnable(self, names: Sequence[str], labels: Tensor, where: str) -> None:
        used = [name for name, there in zip(names, (labels > 0).any(0), strict=True) if there]
        if len(used) < 2:
            only = f"of one class only, {used[0]!r}" if used else "of no class"
            raise InputError(
                f"{where}: the pixels of all masks to train on are {only}: nothing to learn"
            )

    def require_in_training(self, train: Any, val: Any) -> None:
        lost = _only_in_validation(self, train, val)
        if lost is not None:
            image, name = lost
            raise InputError(
                f"{image} has pixels of class {name!r}, and no image to train on has any\n"
                "Move one with it to the training part, or give the class another number"
            )


def _rarest(has: Tensor) -> list[int]:
    """The rarest target of each of N images, of (N, K) bool; K without any."""
    rarity = torch.where(has, has.sum(0), len(has) + 1)
    return torch.where(has.any(1), rarity.argmin(1), has.shape[1]).tolist()


def _only_in_validation(kind: TargetKind, train: Any, val: Any) -> tuple[str, str] | None:
    """An image to validate on, and what it has that no image to train on has."""
    for at, name in enumerate(train.classes):
        there = kind.has(val.labels, at)
        if there.any() and not kind.has(train.labels, at).any():
            return val.describe(int(there.nonzero()[0])), name
    return None


def _columns_moved(labels: Tensor, positions: Tensor, num: int, absent: float) -> Tensor:
    table = torch.full((len(labels), num), absent)
    known = positions >= 0
    table[:, positions[known]] = labels[:, known]
    return table


def _number_cells(labels: Tensor) -> list[list[str]]:
    return [
        ["" if math.isnan(value) else f"{value:.9g}" for value in row] for row in labels.tolist()
    ]


KINDS: dict[TaskName, TargetKind] = {
    "classification": OneClass(),
    "multilabel": SeveralLabels(),
    "regression": Numbers(),
    "segmentation": PixelClasses(),
}
"""By the task that they are for."""
