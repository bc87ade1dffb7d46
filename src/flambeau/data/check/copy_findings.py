"""Copies: within a part of the data, between training and validation, and with different labels."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flambeau.data.check.finding import Finding, Row, images_text
from flambeau.data.check.image_facts import ImageFacts
from flambeau.data.check.near_copies import NearPair, near_pairs
from flambeau.data.check.single_images import is_blank
from flambeau.data.sources.target_names import TaskName

_CUT = 0.04  # share of a picture that counts as a crop; the alignment is no more exact
_OF_A_GROUP = 8  # images named in a row


@dataclass(frozen=True)
class SamePictures:
    """Images that show the same picture.

    Attributes:
        groups: images with equal pixels.
        pairs: other images of the same picture; the first of a group stands for it.
        leaked: validation images that training shows, too, and the most similar one there.
    """

    groups: Sequence[Sequence[int]]
    pairs: Sequence[NearPair]
    leaked: dict[int, int]


def same_pictures(
    facts: ImageFacts,
    is_val: NDArray[np.bool_],
    *,
    advance: Callable[[int], object],
    confirmed: Callable[[Sequence[NearPair]], Sequence[NearPair]] = list,
) -> SamePictures:
    """Compare all images with each other, except blank ones.

    `confirmed` returns the pairs that are alike at full size.
    """
    by_picture = _by_hash(facts)
    groups = [group for group in by_picture if len(group) > 1]
    firsts = np.array([group[0] for group in by_picture], np.int64)
    advance(len(facts.width) - len(firsts))
    pairs = [
        pair._replace(first=int(firsts[pair.first]), second=int(firsts[pair.second]))
        for pair in near_pairs(facts.small[firsts], facts.chroma[firsts], advance=advance)
    ]
    pairs = list(confirmed(pairs))
    members = {group[0]: group for group in groups}
    leaked: dict[int, int] = {}
    for group in groups:
        _note_leaks(leaked, group, is_val)
    for pair in sorted(pairs, key=lambda pair: -pair.likeness):
        both = [number for end in pair[:2] for number in members.get(end, [end])]
        _note_leaks(leaked, both, is_val)
    return SamePictures(groups, pairs, leaked)


def exact_copies(facts: ImageFacts, is_val: NDArray[np.bool_]) -> SamePictures:
    """The images that are equal by `facts.pixel_hash` only."""
    groups = [group for group in _by_hash(facts) if len(group) > 1]
    leaked: dict[int, int] = {}
    for group in groups:
        _note_leaks(leaked, group, is_val)
    return SamePictures(groups, [], leaked)


def _by_hash(facts: ImageFacts) -> list[list[int]]:
    """Numbers of the images to compare, grouped by equal pixels."""
    compared = np.flatnonzero(facts.is_read & ~is_blank(facts))
    by_picture: dict[int, list[int]] = defaultdict(list)
    for number, key in zip(compared.tolist(), facts.pixel_hash[compared].tolist(), strict=True):
        by_picture[key].append(number)
    return list(by_picture.values())


def _note_leaks(leaked: dict[int, int], same: Sequence[int], is_val: NDArray[np.bool_]) -> None:
    train = next((number for number in same if not is_val[number]), None)
    for number in same:
        if train is not None and is_val[number]:
            leaked.setdefault(number, train)


def copy_findings(
    same: SamePictures,
    labels: Sequence[int],
    classes: Sequence[str],
    facts: ImageFacts,
    is_val: NDArray[np.bool_],
    task: TaskName,
) -> list[Finding]:
    """Leaks, contradictions, copies and near copies.

    One image of each picture is kept, a validation image if there is one; of contradictory copies none.
    """
    wrong = [group for group in same.groups if len({labels[number] for number in group}) > 1]
    contradicting = frozenset(number for group in wrong for number in group)
    first_of = {number: group[0] for group in same.groups for number in group}
    alike = {frozenset(pair[:2]): pair for pair in same.pairs}

    def how(one: int, other: int) -> str:
        ends = frozenset(first_of.get(number, number) for number in (one, other))
        if len(ends) == 2:
            return _how(alike[ends], facts)
        is_file = facts.file_hash[one] and facts.file_hash[one] == facts.file_hash[other]
        return "the same file" if is_file else "the same pixels"

    leaks = [Row((val, train), how(val, train)) for val, train in sorted(same.leaked.items())]
    keepers = _keepers(same, first_of, is_val)
    gone = {number: kept for number, kept in keepers.items() if number not in contradicting}
    of_leaks = frozenset(n for n, kept in gone.items() if is_val[kept] and not is_val[n])
    within = _within(same.groups, is_val)
    near = [pair for pair in same.pairs if is_val[pair.first] == is_val[pair.second]]
    accused = [pair for pair in same.pairs if _has_same_target(pair, task)]
    in_groups = {n for group in within for n in group[1:]}
    findings = (
        _leaks(leaks, of_leaks, int(is_val.sum())),
        _contradictions(wrong, accused, labels, classes, facts, contradicting),
        _copies(within, frozenset(n for n in gone if n in in_groups)),
        _near(near, facts, frozenset(n for n in gone if n not in in_groups) - of_leaks),
    )
    return [finding for finding in findings if finding.rows]


def _keepers(
    same: SamePictures, first_of: dict[int, int], is_val: NDArray[np.bool_]
) -> dict[int, int]:
    """For each superfluous image the one that is kept, of which it is a direct copy, not a copy of a copy.

    Exact copies are one picture, of which at most one image is kept.
    """
    near: dict[int, set[int]] = defaultdict(set)
    for pair in same.pairs:
        near[pair.first].add(pair.second)
        near[pair.second].add(pair.first)
    images = {*first_of, *near}
    kept: dict[int, int] = {}  # by picture
    keeper: dict[int, int] = {}
    for number in sorted(images, key=lambda number: (not is_val[number], number)):
        picture = first_of.get(number, number)
        originals = [kept[other] for other in (picture, *near[picture]) if other in kept]
        if originals:
            keeper[number] = min(originals, key=lambda other: (not is_val[other], other))
        else:
            kept[picture] = number
    return keeper


def _within(groups: Sequence[Sequence[int]], is_val: NDArray[np.bool_]) -> list[list[int]]:
    parts = [[n for n in group if is_val[n] == part] for group in groups for part in (False, True)]
    return [part for part in parts if len(part) > 1]


def _leaks(rows: Sequence[Row], drop: frozenset[int], num_val: int) -> Finding:
    share = f"{len(rows) / max(num_val, 1):.1%}"
    return Finding(
        "leaks",
        f"{images_text(len(rows), 'validation image')} ({share}) can be seen in training, too",
        "Their accuracy is that of memory, so the figures of a run are too good.",
        f"Take {images_text(len(drop), 'training image')} out, as --out does.",
        len(rows),
        rows,
        drop,
    )


def _has_same_target(pair: NearPair, task: TaskName) -> bool:
    """Whether images that show the same picture must have the same target: a part need not show all of it."""
    if task == "classification":
        return True
    is_whole = pair.cut < _CUT
    return is_whole and (task == "multilabel" or (task == "regression" and not pair.is_mirrored))


def _contradictions(
    wrong: Sequence[Sequence[int]],
    pairs: Sequence[NearPair],
    labels: Sequence[int],
    classes: Sequence[str],
    facts: ImageFacts,
    drop: frozenset[int],
) -> Finding:
    def labels_of(numbers: Sequence[int]) -> str:
        return " and ".join(dict.fromkeys(classes[labels[number]] for number in numbers))

    near = [pair for pair in pairs if labels[pair.first] != labels[pair.second]]
    rows = [Row(tuple(group[:_OF_A_GROUP]), labels_of(group)) for group in wrong]
    rows += [Row(pair[:2], f"{labels_of(pair[:2])}; {_how(pair, facts)}") for pair in near]
    return Finding(
        "contradictions",
        f"{images_text(len(rows), 'picture')} {'has' if len(rows) == 1 else 'have'} two labels or more",
        "At most one of them is right, and the loss of the others never goes away.",
        "Correct them. Of copies to the last pixel --out leaves out all, of others the training image.",
        len(rows),
        rows,
        drop,
    )


def _copies(groups: Sequence[Sequence[int]], drop: frozenset[int]) -> Finding:
    count = sum(len(group) - 1 for group in groups)
    verb = "is a copy" if count == 1 else "are copies"
    rows = []
    for group in groups:
        num_more = len(group) - _OF_A_GROUP
        note = f"and {num_more:,} more" if num_more > 0 else ""
        rows.append(Row(tuple(group[:_OF_A_GROUP]), note))
    return Finding(
        "copies",
        f"{images_text(count)} {verb} of another one in the same part",
        "A picture counts as often as it is there, in training and in the figures.",
        "Keep one of each, as --out does, unless the weight is meant.",
        count,
        rows,
        drop,
    )


def _near(pairs: Sequence[NearPair], facts: ImageFacts, drop: frozenset[int]) -> Finding:
    shown = sorted(pairs, key=lambda pair: -pair.likeness)
    verb = "shows" if len(pairs) == 1 else "show"
    return Finding(
        "near-copies",
        f"{images_text(len(pairs), 'pair')} of images in the same part {verb} the same picture",
        "Resized, compressed again, cropped or mirrored, it counts as often as it is there.",
        "Keep one of each, as --out does; of a few dozen look at all of them.",
        len(pairs),
        [Row(pair[:2], _how(pair, facts)) for pair in shown],
        drop,
    )


def _how(pair: NearPair, facts: ImageFacts) -> str:
    first, second = pair[:2]
    what = ["mirrored"] * pair.is_mirrored
    if pair.cut >= _CUT:
        what.append(f"{1 - pair.cut:.0%} of it")
    sizes = [(facts.width[number], facts.height[number]) for number in (first, second)]
    if not what and sizes[0] != sizes[1]:
        what.append("resized")
    return f"{', '.join(what) or 'nearly the same pixels'}; likeness {pair.likeness:.3f}"
