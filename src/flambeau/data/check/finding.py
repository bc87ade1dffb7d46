"""One kind of problem in the data, and the images that have it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

KINDS = (
    "leaks",
    "groups",
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
"""The worst first."""

WITHOUT_IMAGES = ("classes", "names")
"""Kinds that are not about single images, so that no image can be left out for them."""

HARMFUL = KINDS[: KINDS.index("labels")]
"""Kinds whose images harm a training; a person must decide about the others."""


class Row(NamedTuple):
    """Numbers of images that belong together, or one; and a note on them."""

    images: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """All findings of one kind; `drop`: images to leave out, so that none remains."""

    kind: str
    title: str
    meaning: str
    remedy: str
    count: int
    rows: Sequence[Row]
    drop: frozenset[int] = frozenset()

    def as_dict(self, names: Sequence[str]) -> dict[str, Any]:
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
    """A finding with a row per image, given by number and note, if any.

    Its title follows '1 image' and '3 images' alike.
    """
    rows = [Row((number,), note) for number, note in images]
    if not rows:
        return []
    dropped = frozenset(row.images[0] for row in rows)
    headline = f"{images_text(len(rows))} {title}"
    return [Finding(kind, headline, meaning, remedy, len(rows), rows, dropped)]


def images_text(count: int, what: str = "image") -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"
