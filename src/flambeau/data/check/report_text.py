"""What a check has found, as a person reads it."""

from collections.abc import Iterator, Sequence

from flambeau.data.check.check_data import DataCheck
from flambeau.data.check.finding import Finding, Row, images_text

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
