"""The figures of each member of an ensemble, beside those of all together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NO_FIGURE = "largest_class_share"  # says something of the data


@dataclass(frozen=True)
class MemberFigures:
    """What one member reaches alone on the same images.

    Attributes:
        image_size: side of the images as it saw them, pixels.
        figures: by their names in JSON.
    """

    run: str
    image_size: int
    figures: Mapping[str, float]

    @classmethod
    def of(cls, run: str, evaluation: Mapping[str, Any]) -> "MemberFigures":
        """From the `as_dict` of an evaluation; the loss of numbers is in a unit of the member's own."""
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
