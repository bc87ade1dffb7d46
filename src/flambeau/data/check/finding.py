"""One kind of thing that is wrong with the data, and the images that it is wrong with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

KINDS = (
    "leaks",
    "contradictions",
    "unreadable",
    "blank",
    "copies",
    "near-copies",
    "labels",
    "classes",
    "names",
    "exposure",
    "tiny",
    "odd",
    "endings",
)
"""The gravest first."""

WITHOUT_IMAGES = ("classes", "names")
"""Kinds that say nothing of single images, so that none can be left out for it."""

HARMFUL = KINDS[: KINDS.index("labels")]
"""Kinds whose images a training is better without; of the others a person decides."""


class Row(NamedTuple):
    """Images that belong together, by their numbers, or one; and what is to be said of them."""

    images: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """What was found of one kind.

    Attributes:
        kind: its name, such as 'leaks'; `--drop` takes it.
        title: a sentence with the count in it.
        meaning: why it matters.
        remedy: what to do about it.
        count: of what the title counts.
        rows: all of it, the worst or the first ones first.
        drop: numbers of the images to leave out, so that nothing of it remains.
    """

    kind: str
    title: str
    meaning: str
    remedy: str
    count: int
    rows: Sequence[Row]
    drop: frozenset[int] = frozenset()

    def as_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """As JSON holds it; `names` are those of all images."""
        return {
            "kind": self.kind,
            "title": self.title,
            "count": self.count,
            "found": [
                {"images": [names[number] for number in row.images], "note": row.note}
                for row in self.rows
            ],
            "drop": [names[number] for number in sorted(self.drop)],
        }


def of_single_images(
    kind: str, title: str, meaning: str, remedy: str, images: Iterable[tuple[int, str]]
) -> list[Finding]:
    """A finding with a row per image and its note, or none where there are no images.

    Args:
        kind, meaning, remedy: as of `Finding`.
        title: the same, behind the number of images.
        images: number and note.
    """
    rows = [Row((number,), note) for number, note in images]
    if not rows:
        return []
    dropped = frozenset(row.images[0] for row in rows)
    headline = f"{images_text(len(rows))} {title}"
    return [Finding(kind, headline, meaning, remedy, len(rows), rows, dropped)]


def images_text(count: int, what: str = "image") -> str:
    """1 image, 1,200 images.

    Example:
        >>> images_text(1200), images_text(1, "pair")
        ('1,200 images', '1 pair')
    """
    return f"{count:,} {what}{'s' * (count != 1)}"
