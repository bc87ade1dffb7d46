"""All that is found wrong with the data of a training, before it trains."""

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flambeau.data.check.class_balance import class_findings
from flambeau.data.check.finding import KINDS, Finding
from flambeau.data.check.image_facts import ImageFacts, look_at
from flambeau.data.check.name_clues import name_findings
from flambeau.data.check.same_pictures import SamePictures, copy_findings, same_pictures
from flambeau.data.check.single_images import single_image_findings
from flambeau.data.sources.source import ConcatSource, Source, file_of
from flambeau.terminal import CountBar


@dataclass(frozen=True)
class DataCheck:
    """What was found.

    Attributes:
        train, val: the images.
        source: both, those to train on first.
        is_val: (N,) bool.
        names: of all images, as short as they tell them apart.
        leaked: numbers within `val` of the images that can be seen in training.
        findings: in the order of KINDS.
        read_s, compared_s: seconds that the two passes took.
    """

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
        """With others in their places."""
        findings = sorted([*self.findings, *more], key=lambda finding: KINDS.index(finding.kind))
        return replace(self, findings=findings)

    def to_drop(self, kinds: Collection[str]) -> frozenset[int]:
        """Numbers of the images to leave out, so that nothing of these kinds remains."""
        return frozenset[int]().union(*(f.drop for f in self.findings if f.kind in kinds))

    def as_dict(self) -> dict[str, Any]:
        """As one JSON object holds it."""
        return {
            "images": len(self.source),
            "train": len(self.train),
            "val": len(self.val),
            "classes": len(self.train.classes),
            "read_s": round(self.read_s, 3),
            "compared_s": round(self.compared_s, 3),
            "findings": [finding.as_dict(self.names) for finding in self.findings],
        }


def check_data(
    train: Source,
    val: Source,
    path: Path,
    *,
    threads: int | None = None,
    progress: bool = False,
) -> DataCheck:
    """Read every image once, compare all with each other, and look at classes and names.

    Args:
        train, val: as `open_sources` opens them, so that what `train` holds out is the validation part.
        path: of the data, below which images are called by the rest of their paths.
        threads: that read; None for one per usable CPU.
        progress: show bars on a terminal.
    """
    source = ConcatSource([train, val])
    is_val = np.arange(len(source)) >= len(train)
    names = short_names(source, path)
    start = time.perf_counter()
    with CountBar(len(source), unit="images read", shown=progress) as bar:
        facts = look_at(source, threads=threads, advance=bar.update)
    middle = time.perf_counter()
    with CountBar(len(source), unit="images compared", shown=progress) as bar:
        same = same_pictures(facts, is_val, advance=bar.update)
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
    """Of copies, single images, classes and, with `by_name`, names, in the order of KINDS."""
    labels = [*train.labels.tolist(), *val.labels.tolist()]
    is_val = np.arange(len(labels)) >= len(train)
    findings = [
        *copy_findings(same, labels, train.classes, facts, is_val),
        *single_image_findings(facts, names),
        *class_findings(train.labels, val.labels, train.classes),
        *(name_findings(names, labels, is_val) if by_name else ()),
    ]
    return sorted(findings, key=lambda finding: KINDS.index(finding.kind))


def short_names(source: Source, path: Path) -> list[str]:
    """What to call the images: their paths below the data, or their places in them."""
    folder = f"{path.absolute() if path.is_dir() else path.absolute().parent}{os.sep}"
    names = []
    for number in range(len(source)):
        file = file_of(source, number)
        name = source.describe(number) if file is None else os.fsdecode(file.absolute())
        names.append(name.removeprefix(folder).encode(errors="backslashreplace").decode())
    return names
