"""Names that betray a bad split: equal names in both parts, names of copies, and groups that were divided."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from flambeau.data.check.finding import Finding, Row, images_text
from flambeau.data.sources.folder import IMAGE_SUFFIXES

# What programs and people append to the name of an image that was made from another one.
_MADE_OF = re.compile(
    r"(?:[ _.-]*\((?:\d+|copy)\)|[ _.-]+(?:copy|aug\w*|flip\w*|mirror\w*|rot\w*|crop\w*|resized?|small|"
    r"bright\w*|noise\w*|blur\w*|dup\w*|副本)(?:[ _.-]*\d+)*)$",
    re.IGNORECASE,
)
# 'video03_frame0012': the name of the group, and the number of the image.
_NUMBERED = re.compile(
    r"(.*?)[ _.-]*(?:frame|img|image|slice|view|shot|f|s)?[ _.-]*(\d+)$", re.IGNORECASE
)
_WIDE = 0.2  # share of all images, or of a class, that is too many for one recording; chosen
_SPARSE = (
    10  # times as many numbers as images: selected from a collection, not from a recording; chosen
)
_DIGITS = 10  # longer numbers are hashes and times
# Of the validation images; if more share names, the numbers begin again in each folder.
_EVERYWHERE = 0.5


def name_findings(
    names: Sequence[str], labels: Sequence[int], is_val: NDArray[np.bool_]
) -> list[Finding]:
    """Findings from the names of the files; names that are no paths are ignored."""
    stems = list(map(_stem, names))
    groups, num_cut = _groups_in_both(stems, labels, is_val)
    clues_and_rows = [
        ("the name of a copy, and the image that it is called after", list(_made_of(stems))),
        ("the same name in both parts", _in_both(stems, is_val)),
        ("one recording, person or place in both parts", groups),
    ]
    rows = [Row(row.images, f"{what}{row.note}") for what, some in clues_and_rows for row in some]
    if not rows:
        return []
    clues = [f"{len(some):,} times {what}" for what, some in clues_and_rows[:2] if some]
    if num_cut:
        clues.append(
            f"{images_text(num_cut, 'validation image')} of groups that are trained on, too"
        )
    return [
        Finding(
            "names",
            f"Names say that parts may not be independent: {'; '.join(clues)}",
            "Frames of one video, or images of one patient, are nearly alike: on both sides they make the "
            "figures too good, and no comparison of pixels finds all of them.",
            "Split by recording, person or place, not by image.",
            len(rows),
            rows,
        )
    ]


def _stem(name: str) -> str:
    path = PurePath(name)
    return path.stem if path.suffix.lower() in IMAGE_SUFFIXES else ""


def _made_of(stems: Sequence[str]) -> Iterator[Row]:
    by_stem: dict[str, int] = {}
    for number, stem in enumerate(stems):
        by_stem.setdefault(stem.lower(), number)
    for number, stem in enumerate(stems):
        origin = _MADE_OF.sub("", stem).lower()
        if stem and origin and origin != stem.lower() and origin in by_stem:
            yield Row((number, by_stem[origin]))


def _in_both(stems: Sequence[str], is_val: NDArray[np.bool_]) -> list[Row]:
    train = {stem: n for n, stem in enumerate(stems) if stem and not is_val[n]}
    rows = [
        Row((n, train[stem]))
        for n, stem in enumerate(stems)
        if is_val[n] and stem in train and _is_distinctive(stem)
    ]
    return rows if len(rows) <= _EVERYWHERE * max(int(is_val.sum()), 1) else []


def _is_distinctive(stem: str) -> bool:
    """Whether it is more than a number, which may begin again in each folder."""
    return len(re.sub(r"(?i)img|image|frame|photo|pic|dsc|[\W\d_]", "", stem)) > 1 or (
        len(re.sub(r"\D", "", stem)) > 6
    )


def _groups_in_both(
    stems: Sequence[str], labels: Sequence[int], is_val: NDArray[np.bool_]
) -> tuple[list[Row], int]:
    """Groups of numbered names that are in both parts; and how many validation images they have."""
    members: dict[str, list[int]] = defaultdict(list)
    positions: dict[str, list[int]] = defaultdict(list)
    for number, stem in enumerate(stems):
        match = _NUMBERED.fullmatch(stem)
        if match is not None and re.search(r"\d", match[1]) and len(match[2]) < _DIGITS:
            members[match[1].lower()].append(number)
            positions[match[1].lower()].append(int(match[2]))
    sizes = Counter(labels)
    groups = {
        key: group
        for key, group in members.items()
        if len(group) > 1
        and max(positions[key]) - min(positions[key]) < _SPARSE * len(group)
        and not _is_wide(group, labels, sizes, len(stems))
    }
    cut = {
        key: group for key, group in groups.items() if len({bool(is_val[n]) for n in group}) == 2
    }
    return list(_rows_of(cut, is_val)), sum(int(is_val[group].sum()) for group in cut.values())


def _rows_of(groups: Mapping[str, list[int]], is_val: NDArray[np.bool_]) -> Iterator[Row]:
    for key, group in groups.items():
        val = [number for number in group if is_val[number]]
        train = [number for number in group if not is_val[number]]
        yield Row(
            (val[0], train[0]), f": {key}, {len(train):,} to train on, {len(val):,} to validate on"
        )


def _is_wide(
    group: Sequence[int], labels: Sequence[int], sizes: Mapping[int, int], total: int
) -> bool:
    """Whether it is not a recording but a class, or the numbering of all images."""
    counts = Counter(labels[number] for number in group)
    label, most = counts.most_common(1)[0]
    return len(group) > _WIDE * total or (sizes[label] > 10 and most > _WIDE * sizes[label])
