"""The findings of a check as text."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flambeau.data.check.check_data import DataCheck, all_findings, short_names
from flambeau.data.check.copy_findings import exact_copies
from flambeau.data.check.finding import Finding, Row, images_text
from flambeau.data.check.stored_images import measure_stored
from flambeau.data.datasets.image_statistics import page_remarks
from flambeau.data.sources.source import (
    ConcatSource,
    Source,
    left_out_lines,
    pixel_kind,
    stacked_channels,
)
from flambeau.data.sources.targets import task_of
from flambeau.images.channels import shown_text
from flambeau.terminal import printable

_SLOW = "A training waits for 2 % of its time, and a minute at most; flambeau check reads all."
_SHOWN = 5  # examples of a finding; --json has all


def report_lines(check: DataCheck) -> Iterator[str]:
    count = len(check.source)
    ms = (check.read_s + check.compared_s) / count * 1000
    yield (
        f"{images_text(count)} {_targets_text(check.train)}: {len(check.train):,} to train on, "
        f"{len(check.val):,} to validate on; {ms:.2g} ms per image"
    )
    yield from left_out_lines(check.source)
    yield from page_remarks(check.train, check.val)
    if not check.findings:
        yield "Nothing was found."
    for finding in check.findings:
        yield ""
        yield from _finding_lines(finding, check.names)


def _targets_text(source: Source) -> str:
    """What is learned of the images, such as 'of 10 classes'."""
    num = len(source.classes)
    task = task_of(source)
    plural = "" if num == 1 else "s"
    if task == "multilabel":
        return f"of {num} label{plural}"
    if task == "regression":
        return f"with {num} number{plural} each"
    return f"of {num} classes"


class ReportItem(NamedTuple):
    """A finding in a run's report; `kind` '': it is none."""

    kind: str
    title: str
    lines: list[str]


def quick_findings(
    train: Source, val: Source, path: Path | None, *, seconds: float
) -> list[ReportItem]:
    """Findings at little cost, of `check_data`: on classes, names (with a path), and images almost without
    decoding them.

    Images take about `seconds`; a last line counts those not read.
    """
    source = ConcatSource([train, val])
    is_val = np.arange(len(source)) >= len(train)
    names = short_names(source, path or Path.cwd())
    facts = measure_stored(source, pixel_kind(train), seconds=seconds)
    copies = exact_copies(facts, is_val)
    findings = [
        ReportItem(
            one.kind, one.title, [line.strip() for line in [*_finding_lines(one, names)][1:]]
        )
        for one in all_findings(copies, facts, names, train, val, by_name=path is not None)
    ]
    findings += [ReportItem("", line, []) for line in left_out_lines(source)]
    channels = stacked_channels(train)
    if channels is not None:
        findings.append(ReportItem("", f"pictures show {shown_text(channels)}", []))
    left = len(source) - int(facts.is_read.sum()) - len(facts.problems)
    if left:
        findings.append(
            ReportItem("", f"{left:,} of {images_text(len(source))} were not looked at", [_SLOW])
        )
    return findings


def _finding_lines(finding: Finding, names: Sequence[str]) -> Iterator[str]:
    yield f"{finding.kind}: {finding.title}"
    yield f"  {finding.meaning}"
    for row in finding.rows[:_SHOWN]:
        yield f"    {printable(_row_text(row, names))}"
    if len(finding.rows) > _SHOWN:
        yield f"    ... and {len(finding.rows) - _SHOWN:,} more (--json lists all)"
    yield f"  To do: {finding.remedy}"


def _row_text(row: Row, names: Sequence[str]) -> str:
    images = " = ".join(names[number] for number in row.images)
    if not images or not row.note:
        return images or row.note
    return f"{images} ({row.note})" if len(row.images) > 1 else f"{images}: {row.note}"
