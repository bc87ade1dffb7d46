"""What a check has found, as a person reads it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from flambeau.data.check.check_data import DataCheck, short_names
from flambeau.data.check.class_balance import class_findings
from flambeau.data.check.finding import Finding, Row, images_text
from flambeau.data.check.name_clues import name_findings
from flambeau.data.sources.source import ConcatSource, Source

_SHOWN = 5  # examples of a finding; --json has all


def report_lines(check: DataCheck) -> Iterator[str]:
    """The lines of the report."""
    count = len(check.source)
    ms = (check.read_s + check.compared_s) / count * 1000
    yield (
        f"{images_text(count)} of {len(check.train.classes)} classes: {len(check.train):,} to train on, "
        f"{len(check.val):,} to validate on; {ms:.2g} ms per image"
    )
    if not check.findings:
        yield "Nothing was found."
    for finding in check.findings:
        yield ""
        yield from _finding_lines(finding, check.names)


def without_reading(train: Source, val: Source, path: Path | None) -> list[tuple[str, list[str]]]:
    """What classes and names alone tell, which costs a training nothing.

    Args:
        train, val, path: as of `check_data`; without a path no name is looked at.

    Returns:
        Of each finding its title, and the lines that follow it.
    """
    source, names = ConcatSource([train, val]), list[str]()
    findings = class_findings(train.labels, val.labels, source.classes)
    if path is not None:
        names = short_names(source, path)
        is_val = np.arange(len(source)) >= len(train)
        findings += name_findings(names, source.labels.tolist(), is_val)
    lines = ((finding.title, [*_finding_lines(finding, names)][1:]) for finding in findings)
    return [(title, [line.strip() for line in rest]) for title, rest in lines]


def _finding_lines(finding: Finding, names: Sequence[str]) -> Iterator[str]:
    yield f"{finding.kind}: {finding.title}"
    yield f"  {finding.meaning}"
    for row in finding.rows[:_SHOWN]:
        yield f"    {_row_text(row, names)}"
    if len(finding.rows) > _SHOWN:
        yield f"    ... and {len(finding.rows) - _SHOWN:,} more (--json lists all)"
    yield f"  To do: {finding.remedy}"


def _row_text(row: Row, names: Sequence[str]) -> str:
    images = " = ".join(names[number] for number in row.images)
    if not images or not row.note:
        return images or row.note
    return f"{images} ({row.note})" if len(row.images) > 1 else f"{images}: {row.note}"
