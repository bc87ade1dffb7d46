"""Classes that are much rarer than others, or in one part alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flambeau.data.check.finding import Finding, Row

_UNEVEN = 10  # times as many images in the largest class as in the smallest; chosen
_FEW = 5  # images of a class that are hardly enough to learn from; chosen


def class_findings(train: Tensor, val: Tensor, classes: Sequence[str]) -> list[Finding]:
    """What is wrong with the numbers of images.

    Args:
        train, val: (N,) labels.
        classes: their names.
    """
    counts = torch.bincount(train, minlength=len(classes)).tolist()
    val_counts = torch.bincount(val, minlength=len(classes)).tolist()
    order = sorted(range(len(classes)), key=counts.__getitem__)
    least, most = order[0], order[-1]
    rows = []
    if counts[most] >= _UNEVEN * max(counts[least], 1):
        large = f"{classes[most]}: {counts[most]:,} to train on"
        rows.append(Row((), f"{large}; {classes[least]}: {counts[least]:,}"))
    rows += [Row((), f"{classes[k]}: {counts[k]} to train on") for k in order if counts[k] < _FEW]
    rows += [
        Row((), f"{name}: none to validate on")
        for name, count in zip(classes, val_counts, strict=True)
        if not count
    ]
    if not rows:
        return []
    return [
        Finding(
            "classes",
            "The classes are uneven",
            "The accuracy is mostly that of the large classes; what is not validated on is not known.",
            "Give train --balance or --class-weights, look at the figures of each class, or add images.",
            len(rows),
            rows,
        )
    ]
