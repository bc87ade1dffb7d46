"""How the images of an evaluation were read: what all tasks say of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NO_FIGURE = "largest_class_share"  # says something of the data


@dataclass(frozen=True)
class MemberFigures:
    """What one member reaches alone on the same images."""

    run: str
    image_size: int
    figures: Mapping[str, float]

    @classmethod
    def of(cls, run: str, evaluation: Mapping[str, Any]) -> "MemberFigures":
        """From an evaluation's `as_dict`; the loss of numbers is in the member's unit."""
        figures: dict[str, float] = {
            f"{name}_{column['name']}": column[name]
            for column in evaluation.get("columns", ())
            for name in ("mae", "rmse")
            if isinstance(column[name], float)
        }
        if not figures:
            figures = {
                name: value
                for name, value in evaluation.items()
                if isinstance(value, float) and name != _NO_FIGURE
            }
        return cls(run, evaluation["image_size"], figures)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"run": self.run, "image_size": self.image_size, **self.figures}


def member_rows(members: Sequence[MemberFigures]) -> list[list[str]]:
    """As rows of text."""
    rows = []
    for one in members:
        texts = (f"{name} {value:.4g}" for name, value in one.figures.items())
        size = f"{one.image_size} x {one.image_size}"
        rows.append([f"{one.run} alone", f"{', '.join(texts)} ({size})"])
    return rows


def members_in_json(members: Sequence[MemberFigures]) -> dict[str, Any]:
    """The entry of JSON; none of a single model."""
    return {"members": [one.as_dict() for one in members]} if members else {}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The images of an evaluation.

    Attributes:
        num_trained_on: images that the model was trained on.
        counts_trained_on: these count; else they are left out.
        flip_tta: predictions are averaged with those of the mirror image.
        members: of an ensemble, what each reaches alone.
    """

    num_images: int
    num_bad: int
    image_size: int
    flip_tta: bool
    num_trained_on: int = 0
    counts_trained_on: bool = False
    members: tuple[MemberFigures, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "images": self.num_images,
            "bad_images": self.num_bad,
            "trained_on": self.num_trained_on,
            "counts_trained_on": self.counts_trained_on,
            "image_size": self.image_size,
            "flip_tta": self.flip_tta,
            **members_in_json(self.members),
        }

    def rows(self) -> list[list[str]]:
        """As rows of text."""
        left_out = f", {self.num_bad} left out" if self.num_bad else ""
        flipped = ", averaged with their mirror images" if self.flip_tta else ""
        size = f"{self.image_size} x {self.image_size}"
        rows = [["images", f"{self.num_images}{left_out}, {size}{flipped}"]]
        if self.num_trained_on:
            done = "are among them" if self.counts_trained_on else "are left out; --all counts them"
            rows.append(["trained on", f"{self.num_trained_on} {done}"])
        return [*rows, *member_rows(self.members)]
