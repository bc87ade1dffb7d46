"""Findings on several labels per image, and on numbers."""

import math
from collections.abc import Iterator

import torch

from flambeau.data.check.finding import Finding, Row, of_single_images
from flambeau.data.sources.source import Source
from flambeau.data.sources.targets import kind_of_targets, target_texts

_FEW = 5  # images of a label that are hardly enough to learn from; chosen
_FAR = 10.0  # times the usual distance from the median: the 99.9th percentile of normal numbers is at 4.9
_MAX_ROWS = 50


def numbered_targets(train: Source, val: Source) -> tuple[list[int], tuple[str, ...]]:
    """A number for each image, equal for equal targets, those to validate on last; and their texts."""
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
            "Some labels are rare, or on no image to validate on",
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
