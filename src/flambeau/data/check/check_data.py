"""All checks of labelled images before a training."""

import functools
import os
import time
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.check.copy_findings import SamePictures, copy_findings, same_pictures
from flambeau.data.check.finding import KINDS, Finding, Row, images_text
from flambeau.data.check.fine_detail import with_equal_detail
from flambeau.data.check.image_facts import ImageFacts, measure_images
from flambeau.data.check.name_clues import name_findings
from flambeau.data.check.single_images import single_image_findings
from flambeau.data.check.target_findings import (
    label_findings,
    mask_findings,
    number_findings,
    numbered_targets,
)
from flambeau.data.datasets.image_statistics import several_pages
from flambeau.data.sources.source import (
    ConcatSource,
    Source,
    file_of,
    left_out_columns,
    left_out_counts,
)
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import groups_of, kind_of_targets, task_of
from flambeau.data.sources.wide_source import found_format, of_kind
from flambeau.terminal import CountBar

_UNEVEN = 10  # times as many images in the largest class as in the smallest; chosen
_FEW = 5  # images of a class that are hardly enough to learn from; chosen


@dataclass(frozen=True)
class DataCheck:
    """The result for `train`, then `val`; `leaked`: numbers within `val` that training shows, too."""

    train: Source
    val: Source
    source: Source
    is_val: NDArray[np.bool_]
    names: Sequence[str]
    leaked: Sequence[int]
    findings: Sequence[Finding]
    read_s: float
    compared_s: float

    def with_findings(self, more: Sequence[Finding]) -> "DataCheck":
        """With more findings, in the order of KINDS."""
        findings = sorted([*self.findings, *more], key=lambda finding: KINDS.index(finding.kind))
        return replace(self, findings=findings)

    def to_drop(self, kinds: Collection[str]) -> frozenset[int]:
        """Numbers of the images to leave out, so that no finding of these kinds remains."""
        return frozenset[int]().union(*(f.drop for f in self.findings if f.kind in kinds))

    def as_dict(self) -> dict[str, Any]:
        several, looked_at = several_pages(self.train, self.val)
        return {
            "images": len(self.source),
            "train": len(self.train),
            "val": len(self.val),
            "classes": len(self.train.classes),
            "left_out": left_out_counts(self.source),
            "columns_left_out": left_out_columns(self.source),
            "several_pages": {"images": several, "looked_at": looked_at},
            "read_s": round(self.read_s, 3),
            "compared_s": round(self.compared_s, 3),
            "findings": [finding.as_dict(self.names) for finding in self.findings],
        }


def check_data(
    train: Source, val: Source, path: Path, *, threads: int | None = None, progress: bool = False
) -> DataCheck:
    """Read every image once, compare all, and check classes and names, relative to `path`.

    `train` and `val` are as from `open_sources`.
    """
    format_ = found_format(train)
    train, val = (of_kind(source, *format_) for source in (train, val))
    source = ConcatSource([train, val])
    is_val = np.arange(len(source)) >= len(train)
    names = short_names(source, path)
    start = time.perf_counter()
    with CountBar(len(source), unit="images read", shown=progress) as bar:
        facts = measure_images(source, threads=threads, advance=bar.update)
    middle = time.perf_counter()
    with CountBar(len(source), unit="images compared", shown=progress) as bar:
        same = same_pictures(
            facts,
            is_val,
            advance=bar.update,
            confirmed=functools.partial(with_equal_detail, source, threads=threads),
        )
    end = time.perf_counter()
    findings = all_findings(same, facts, names, train, val)
    leaked = sorted(number - len(train) for number in same.leaked)
    return DataCheck(
        train, val, source, is_val, names, leaked, findings, middle - start, end - middle
    )


def all_findings(
    same: SamePictures,
    facts: ImageFacts,
    names: Sequence[str],
    train: Source,
    val: Source,
    *,
    by_name: bool = True,
) -> list[Finding]:
    """Findings on copies, images, classes and, with `by_name`, names, in the order of KINDS."""
    labels, texts = numbered_targets(train, val)
    is_val = np.arange(len(labels)) >= len(train)
    findings = [
        *copy_findings(same, labels, texts, facts, is_val, task_of(train)),
        *single_image_findings(facts, names),
    ]
    findings += _TARGET_FINDINGS[task_of(train)](train, val)
    findings += group_findings(groups_of(train), groups_of(val))
    if by_name and not kind_of_targets(train).is_table:
        findings += name_findings(names, labels, is_val)
    return sorted(findings, key=lambda finding: KINDS.index(finding.kind))


def _class_findings(train: Source, val: Source) -> list[Finding]:
    return class_findings(train.labels, val.labels, train.classes)


_TARGET_FINDINGS: dict[TaskName, Callable[[Source, Source], list[Finding]]] = {
    "classification": _class_findings,
    "multilabel": lambda train, val: [*_alike_names(train.classes), *label_findings(train, val)],
    "regression": number_findings,
    "segmentation": lambda train, val: [*_alike_names(train.classes), *mask_findings(train, val)],
}
"""What looks wrong with targets themselves."""


def group_findings(train: Sequence[str] | None, val: Sequence[str] | None) -> list[Finding]:
    """Groups with images on both sides; validation numbers follow training ones."""
    if train is None or val is None:
        return []
    both = {*train} & {*val}
    rows = []
    for name in sorted(both):
        trained = [number for number, group in enumerate(train) if group == name]
        measured = [len(train) + number for number, group in enumerate(val) if group == name]
        note = f"{name}: {len(trained):,} to train on, {len(measured):,} to validate on"
        rows.append(Row((measured[0], trained[0]), note))
    if not rows:
        return []
    return [
        Finding(
            "groups",
            f"{images_text(len(rows), 'group')} with images on both sides of the split",
            "The figures are those of things that were trained on, and new ones may be worse.",
            "--out leaves their training images out; or correct the column that says which part.",
            len(rows),
            rows,
            frozenset(number for number, group in enumerate(train) if group in both),
        )
    ]


def class_findings(train: Tensor, val: Tensor, classes: Sequence[str]) -> list[Finding]:
    """Classes that are much rarer than others, or missing in validation; parts are (N,) labels."""
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
    findings = _alike_names(classes)
    if not rows:
        return findings
    return [
        *findings,
        Finding(
            "classes",
            "The classes are uneven",
            "The accuracy is mostly that of the large classes; classes without validation images are not "
            "measured.",
            "Give train --balance or --class-weights, look at the figures of each class, or add images.",
            len(rows),
            rows,
        ),
    ]


def _alike_names(classes: Sequence[str]) -> list[Finding]:
    """Classes whose names are one for a reader: `Cat` and `cat`, or one accent written in two ways."""
    spellings: dict[str, list[str]] = {}
    for name in classes:
        key = " ".join(unicodedata.normalize("NFKC", name).casefold().replace("_", " ").split())
        spellings.setdefault(key, []).append(name)
    rows = []
    for names in spellings.values():
        # Of those that look the same only their codes tell the difference.
        look_same = len({unicodedata.normalize("NFC", name) for name in names}) < len(names)
        if len(names) > 1:
            rows.append(Row((), " and ".join(map(ascii if look_same else repr, names))))
    if not rows:
        return []
    return [
        Finding(
            "classes",
            "Names of classes are alike, but for case, spaces or how accents are written",
            "They may be one class, whose images the model then tells apart by chance.",
            "Put the images of one class into one folder, or give the classes other names.",
            len(rows),
            rows,
        )
    ]


def short_names(source: Source, path: Path) -> list[str]:
    """The images' paths relative to the data, or positions."""
    folder = f"{path.absolute() if path.is_dir() else path.absolute().parent}{os.sep}"
    names = []
    for number in range(len(source)):
        file = file_of(source, number)
        name = source.describe(number) if file is None else os.fsdecode(file.absolute())
        names.append(name.removeprefix(folder).encode(errors="backslashreplace").decode())
    return names
