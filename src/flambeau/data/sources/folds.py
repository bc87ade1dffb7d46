"""Cross-validation: the images of a source in parts of equal size, each of which is validated on once."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flambeau.data.sources.fold_name import Fold
from flambeau.data.sources.source import Source, SubsetSource, hold_out
from flambeau.data.sources.targets import TargetChoice, groups_of, kind_of_targets, task_of
from flambeau.errors import InputError

_TEST_SEED = 1  # of the hashes; the images to validate on have 0


def fold_sources(source: Source, fold: Fold) -> tuple[Source, Source]:
    """The other folds' images to train on, and this one's to validate on."""
    number, of = fold
    held = torch.from_numpy(folds_of(source, of) == number - 1)
    return tuple(SubsetSource(source, part.nonzero()[:, 0]) for part in (~held, held))  # type: ignore[return-value]


def without_test(source: Source, choice: TargetChoice) -> Source:
    """The images without those that `choice` keeps for a test."""
    return source if choice.test is None else _tested(source, choice.test)[0]


def part_to_test(source: Source, choice: TargetChoice) -> Source:
    """The images that `without_test` leaves out."""
    assert choice.test is not None
    return _tested(source, choice.test)[1]


def _tested(source: Source, share: float) -> tuple[Source, Source]:
    """As `hold_out`, by other hashes than those of the images to validate on."""
    return hold_out(source, share=share, seed=_TEST_SEED, purpose="test")


def split(source: Source, choice: TargetChoice, **how: Any) -> tuple[Source, Source]:
    """A source without a validation part, divided by the fold of `choice`, else by `hold_out`."""
    if choice.fold is not None:
        return fold_sources(source, choice.fold)
    return hold_out(source, **how)


def subset_of(source: Source, choice: TargetChoice) -> Source:
    """The share of images that `choice` names, at least one per class; smaller ones lie in larger.

    It depends on image names alone, by other hashes than `hold_out`.
    """
    if choice.subset is None or choice.subset == 1.0:
        return source
    members: dict[int, list[int]] = {}
    for index, stratum in enumerate(kind_of_targets(source).strata(source.labels)):
        members.setdefault(stratum, []).append(index)
    kept: list[int] = []
    for found in members.values():
        count = max(1, round(len(found) * choice.subset))
        kept += sorted(found, key=lambda index: _hash(f"subset {source.names[index]}"))[:count]
    return SubsetSource(source, torch.tensor(sorted(kept)))


def folds_of(source: Source, folds: int) -> NDArray[np.int64]:
    """(N,) int64: the fold of each image, from 0.

    Every fold gets its share of each class (of several labels an image's rarest; numbers are one class), by
    hashes of the image names alone. Groups go as a whole, largest first, each to the fold where class shares
    stay most even; as many groups as folds are the folds, by name.
    """
    strata = kind_of_targets(source).strata(source.labels)
    groups = groups_of(source)
    if task_of(source) == "classification":
        _require_class_in_each(source, strata, groups, folds)
    elif len(source) < folds:
        raise InputError(f"{len(source)} images, and {folds} folds: each needs one")
    if groups is None:
        return _by_class(strata, source.names, folds)
    return _by_group(strata, groups, folds)


def _by_class(strata: Sequence[int], names: Sequence[str], folds: int) -> NDArray[np.int64]:
    found = np.empty(len(strata), np.int64)
    members: dict[int, list[int]] = {}
    for index, stratum in enumerate(strata):
        members.setdefault(stratum, []).append(index)
    place = 0  # goes on from class to class, so that the sizes of folds differ by one at most
    for stratum in sorted(members):
        for index in sorted(members[stratum], key=lambda index: _hash(names[index])):
            found[index] = place % folds
            place += 1
    return found


def _by_group(strata: Sequence[int], groups: Sequence[str], folds: int) -> NDArray[np.int64]:
    sizes = Counter(groups)
    if len(sizes) < folds:
        raise InputError(
            f"{len(sizes)} groups, and {folds} folds: each needs a group; give fewer --folds"
        )
    numbers = {stratum: number for number, stratum in enumerate(sorted(set(strata)))}
    counts = {group: np.zeros(len(numbers)) for group in sizes}
    for stratum, group in zip(strata, groups, strict=True):
        counts[group][numbers[stratum]] += 1
    if len(sizes) == folds:
        fold_of = {group: fold for fold, group in enumerate(sorted(sizes))}
    else:
        _require_fitting(sizes, folds, len(groups))
        fold_of = _most_even(counts, folds)
    return np.array([fold_of[group] for group in groups], np.int64)


def _most_even(counts: dict[str, NDArray[np.float64]], folds: int) -> dict[str, int]:
    """The fold of each group, by the images of each class in it."""
    totals = np.sum([*counts.values()], axis=0)
    filled = np.zeros((folds, len(totals)))
    fold_of: dict[str, int] = {}
    order = sorted(
        counts, key=lambda group: (-counts[group].max(), -counts[group].sum(), _hash(group))
    )
    for group in order:
        spreads = []
        for fold in range(folds):
            filled[fold] += counts[group]
            spreads.append(((filled / totals).std(0).mean(), filled[fold].sum(), fold))
            filled[fold] -= counts[group]
        best = min(spreads)[2]
        filled[best] += counts[group]
        fold_of[group] = best
    return fold_of


def _require_fitting(sizes: Counter[str], folds: int, total: int) -> None:
    largest, size = sizes.most_common(1)[0]
    if size > math.ceil(total / folds):
        raise InputError(
            f"group {largest!r} has {size} of {total} images, more than one of {folds} folds holds: give "
            "fewer --folds, or as many groups as folds"
        )


def _require_class_in_each(
    source: Source, strata: Sequence[int], groups: Sequence[str] | None, folds: int
) -> None:
    """Refuse a class that some fold would be without."""
    what = "image" if groups is None else "group"
    places: dict[int, set[object]] = {}
    for index, stratum in enumerate(strata):
        places.setdefault(stratum, set()).add(index if groups is None else groups[index])
    for stratum, found in sorted(places.items()):
        if len(found) < folds:
            count = f"{len(found)} {what}{'' if len(found) == 1 else 's'}"
            raise InputError(
                f"class {source.classes[stratum]!r} has {count}, and there are {folds} folds: one would be "
                "without it; give fewer --folds, or leave the class out"
            )


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()
