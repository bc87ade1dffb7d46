"""Findings on several labels per image, on numbers, and on masks."""

import math
from collections.abc import Iterator

import torch

from flambeau.data.check.finding import Finding, Row, of_single_images
from flambeau.data.sources.source import Source, mask_problem
from flambeau.data.sources.targets import kind_of_targets, target_texts

_FEW = 5  # images of a label that are hardly enough to learn from; chosen
_FAR = 10.0  # times the usual distance from the median: the 99.9th percentile of normal numbers is at 4.9
_MAX_ROWS = 50
_MOST_ALONE = 0.2  # of the images, if masks of one class are to be looked at; chosen


def numbered_targets(train: Source, val: Source) -> tuple[list[int], tuple[str, ...]]:
    """A number per image, equal for equal targets, validation last; and their texts."""
    if not kind_of_targets(train).is_table:
        return [*train.labels.tolist(), *val.labels.tolist()], train.classes
    texts = [text or "no label" for text in (*target_texts(train), *target_texts(val))]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return [numbers[text] for text in texts], tuple(numbers)


def label_findings(train: Source, val: Source) -> list[Finding]:
    """Labels that are rare, or on no image to validate on."""
    rows = [Row((), text) for text in _label_texts(train, val)]
    if not rows:
        return []
    return [
        Finding(
            "classes",
            "Some labels or classes are rare, or on no image to validate on",
            "Of a handful of images nothing is learned, and what no image to validate on has is not "
            "measured.",
            "Add images, or leave these labels out.",
            len(rows),
            rows,
        )
    ]


def number_findings(train: Source, val: Source) -> list[Finding]:
    """Numbers far from all others."""
    return of_single_images(
        "labels",
        "with a number far from all others",
        "A typing error, another unit, or a rare case; the squared error weighs it most.",
        "Look at them, and correct them; train --loss huber weighs them less.",
        _outliers(train, val),
    )


def mask_findings(train: Source, val: Source) -> list[Finding]:
    """Masks that cannot be used, that are empty, or of one class alone, and rare classes."""
    labels = torch.cat([train.labels, val.labels])
    problems = [
        (number, why)
        for number in range(len(labels))
        if (why := _mask_problem(train, val, number)) is not None
    ]
    bad = {number for number, _ in problems}
    known = labels.sum(1)
    empty = [number for number in (known == 0).nonzero()[:, 0].tolist() if number not in bad]
    alone = ((labels > 0).sum(1) == 1).nonzero()[:, 0].tolist()
    if len(alone) > _MOST_ALONE * len(labels):  # as in data in which most images are empty
        alone = []
    return [
        *of_single_images(
            "labels",
            "with a mask that cannot be used",
            "It is damaged, or of another size than its image, and training ends there.",
            "Correct the mask, or leave the image out.",
            iter(problems),
        ),
        *of_single_images(
            "labels",
            "with a mask that is empty",
            "All of its pixels are ignored, so nothing is learned from it.",
            "Correct the mask, or leave the image out.",
            ((number, "all pixels are ignored") for number in empty),
        ),
        *of_single_images(
            "labels",
            "with a mask of one class",
            "Right for an image without any object; a mask that was forgotten looks the same.",
            "Look at them.",
            ((number, train.classes[int(labels[number].argmax())]) for number in alone),
        ),
        *label_findings(train, val),
    ]


def _mask_problem(train: Source, val: Source, number: int) -> str | None:
    is_val = number >= len(train)
    return mask_problem(val if is_val else train, number - is_val * len(train))


def _label_texts(train: Source, val: Source) -> Iterator[str]:
    for at, name in enumerate(train.classes):
        count = int(kind_of_targets(train).has(train.labels, at).sum())
        if count < _FEW:
            yield f"{name}: {count} to train on"
        if not kind_of_targets(val).has(val.labels, at).any():
            yield f"{name}: none to validate on"


def _outliers(train: Source, val: Source) -> Iterator[tuple[int, str]]:
    """Images by number, the farthest first, by the median absolute deviation from the median."""
    labels = torch.cat([train.labels, val.labels]).double()
    found = []
    for at, name in enumerate(train.classes):
        values = labels[:, at]
        middle = float(values.nanmedian())
        usual = float((values - middle).abs().nanmedian())
        if not usual:  # most numbers are equal
            continue
        for number in ((values - middle).abs() > _FAR * usual).nonzero()[:, 0].tolist():
            value = float(values[number])
            note = f"{name} {value:.6g}, and the median is {middle:.6g}"
            found.append((math.fabs(value - middle) / usual, number, note))
    for _, number, note in sorted(found, reverse=True)[:_MAX_ROWS]:
        yield number, note
