"""How the images of an evaluation were read: what all tasks say of it."""

from dataclasses import dataclass
from typing import Any

from flambeau.trainer.evaluation.members import MemberFigures, member_rows, members_in_json


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The images of an evaluation.

    Attributes:
        num_images: counted, each once.
        num_bad: left out, because they cannot be read.
        num_trained_on: images of the data that the model was trained on.
        counts_trained_on: they are counted; else they are left out.
        image_size: side of the images as the model saw them, pixels.
        flip_tta: each image and its mirror image were predicted, and the predictions averaged.
        members: of an ensemble, what each member reaches alone.
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
