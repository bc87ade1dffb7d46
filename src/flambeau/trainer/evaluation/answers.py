"""What a model says of one image: as text, as JSON, and as cells of a table."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flambeau.html_table import html_grid

Size = tuple[int, int]
"""Height and width of an image as it is stored."""


class Answer(Protocol):
    """What a model says of one image."""

    def as_text(self) -> str:
        """In a line, for people."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""

    def cells(self) -> list[str]:
        """In the columns that its task names."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The most probable classes of an image, as (class, probability), the most probable first."""

    classes: Sequence[tuple[str, float]]
    chosen: Sequence[str] | None = None
    """The classes of its prediction set, if the run has such sets."""

    def as_text(self) -> str:
        ranked = ", ".join(f"{name} {share:.1%}" for name, share in self.classes)
        if self.chosen is None:
            return ranked
        return f"{ranked}; set: {', '.join(self.chosen) or 'no class'}"

    def as_dict(self) -> dict[str, Any]:
        ranked = [{"class": name, "probability": round(share, 6)} for name, share in self.classes]
        chosen = {} if self.chosen is None else {"set": [*self.chosen]}
        return {"classes": ranked, **chosen}

    def cells(self) -> list[str]:
        chosen = [] if self.chosen is None else ["|".join(self.chosen)]
        return [part for name, share in self.classes for part in (name, f"{share:.6f}")] + chosen

    @staticmethod
    def columns(num: int) -> list[str]:
        """The names of its cells: predicted, probability, predicted_2, probability_2 ..."""
        rest = [f"{what}_{k}" for k in range(2, num + 1) for what in ("predicted", "probability")]
        return ["predicted", "probability", *rest]


@dataclass(frozen=True, slots=True)
class LabelAnswer:
    """The labels of an image.

    Attributes:
        labels: those that reach their threshold, the most probable first.
    """

    labels: Sequence[str]
    probabilities: dict[str, float]

    def as_text(self) -> str:
        if self.labels:
            return ", ".join(f"{name} {self.probabilities[name]:.1%}" for name in self.labels)
        nearest = max(self.probabilities, key=self.probabilities.__getitem__)
        return f"no label ({nearest} {self.probabilities[nearest]:.1%})"

    def as_dict(self) -> dict[str, Any]:
        shares = {name: round(share, 6) for name, share in self.probabilities.items()}
        return {"labels": [*self.labels], "probabilities": shares}

    def cells(self) -> list[str]:
        return ["|".join(self.labels), *(f"{share:.6f}" for share in self.probabilities.values())]

    @staticmethod
    def columns(names: Sequence[str]) -> list[str]:
        """The names of its cells: predicted, and the probability of each label."""
        return ["predicted", *(f"probability_{name}" for name in names)]


@dataclass(frozen=True, slots=True)
class NumberAnswer:
    """The numbers of an image, by column, in the unit of the data."""

    values: dict[str, float]

    def as_text(self) -> str:
        return ", ".join(f"{name} {value:.6g}" for name, value in self.values.items())

    def as_dict(self) -> dict[str, Any]:
        return {"values": {name: float(f"{value:.7g}") for name, value in self.values.items()}}

    def cells(self) -> list[str]:
        return [f"{value:.7g}" for value in self.values.values()]

    @staticmethod
    def columns(names: Sequence[str]) -> list[str]:
        return [f"predicted_{name}" for name in names]


@dataclass(frozen=True, slots=True)
class MaskAnswer:
    """The class of each pixel of an image.

    Attributes:
        mask: (H, W) uint8, of the stored image: the classes' numbers in the training masks.
        shares: of the pixels, by class that occurs, the largest first.
    """

    mask: NDArray[np.uint8]
    shares: dict[str, float]

    def as_text(self) -> str:
        return ", ".join(f"{name} {share:.1%}" for name, share in self.shares.items())

    def as_dict(self) -> dict[str, Any]:
        height, width = self.mask.shape
        shares = {name: round(share, 6) for name, share in self.shares.items()}
        return {"height": height, "width": width, "shares": shares}

    def cells(self) -> list[str]:
        largest = next(iter(self.shares))
        return [largest, f"{self.shares[largest]:.6f}"]

    @staticmethod
    def columns() -> list[str]:
        """The names of its cells: the class of most pixels, and its share of them."""
        return ["largest_class", "share"]


_IN_NOTEBOOK = 20  # answers


def answers_table(texts: Iterable[str]) -> str:
    """HTML of a model's answer per image number, for a notebook; of many the first."""
    rows = [[number, text] for number, text in enumerate(itertools.islice(texts, _IN_NOTEBOOK + 1))]
    more = [["...", ""]] if len(rows) > _IN_NOTEBOOK else []
    return html_grid(["image", "answer"], [*rows[:_IN_NOTEBOOK], *more])
