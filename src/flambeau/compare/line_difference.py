"""Compares the figures in metrics.jsonl of two runs, without torch, line by line up to a limit."""

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flambeau.errors import InputError, unreadable
from flambeau.run.folder.json_file import finite_number, metrics_row

_MAX_BYTES = 2**28  # of a file: some two million lines
_LONGEST_LINE = 2**20
_MAX_SPEEDS = 100_000
_MAX_LINES_OF_STEP = 1000  # a run writes one per step, and one for each evaluation
_MAX_NAMES = 200  # figures in the table
NO_FIGURES = {"step", "epoch", "images_per_s", "data_wait"}


@dataclass(frozen=True)
class FigureDifference:
    step: int
    name: str
    values: tuple[Any, Any]

    @property
    def change(self) -> float | None:
        """The second value minus the first; None if they are not numbers."""
        first, second = map(finite_number, self.values)
        return None if first is None or second is None else second - first


@dataclass
class MetricLines:
    """How the figures of two files compare.

    Attributes:
        identical_steps: the last step up to which all are equal.
        first: the first that differs.
        last: by name the figures of the last common lines: step, and both values.
        speeds: median images_per_s of each.
    """

    steps: tuple[int, int] = (0, 0)
    num_figures: int = 0
    identical_steps: int = 0
    first: FigureDifference | None = None
    last: dict[str, tuple[int, Any, Any]] = field(default_factory=dict)
    speeds: tuple[float | None, float | None] = (None, None)
    rollbacks: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ((), ())  # type: ignore[assignment]
    is_cut: bool = False

    @property
    def is_same(self) -> bool:
        """No common figure differs, and both end at the same step."""
        return self.first is None and self.steps[0] == self.steps[1]

    def as_json(self) -> dict[str, Any]:
        first = self.first
        return {
            "identical_steps": self.identical_steps,
            "num_figures": self.num_figures,
            "steps": list(self.steps),
            "first_difference": None if first is None else asdict(first) | {"change": first.change},
        }


def compare_lines(left: Path, right: Path) -> MetricLines:
    """Compare the figures that both files have at the same step.

    Training lines are means since the line before: those over other steps (another `log_every`) are not
    compared.
    """
    files = _Lines(left), _Lines(right)
    result = MetricLines()
    for step, groups in _joined(*files):
        common = [key for key in groups[0] if key in groups[1]]
        same = True
        for key in common:
            rows = groups[0][key], groups[1][key]
            for name in [name for name in rows[0] if name in rows[1]]:
                values = rows[0][name], rows[1][name]
                result.num_figures += 1
                if name in result.last or len(result.last) < _MAX_NAMES:
                    result.last[name] = (step, *values)
                if values[0] != values[1]:
                    same = False
                    result.first = result.first or FigureDifference(step, name, values)
        if result.first is None and common and same:
            result.identical_steps = step
    result.steps = files[0].step, files[1].step
    result.speeds = files[0].speed, files[1].speed
    result.rollbacks = files[0].rollbacks, files[1].rollbacks
    result.is_cut = files[0].is_cut or files[1].is_cut
    return result


_Group = dict[tuple[Any, ...], dict[str, Any]]


class _Lines:
    """Iterates a file as (step, figures by the kind of their line)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.step = 0
        self.is_cut = False
        self.rollbacks: list[dict[str, Any]] = []
        self._speeds: list[float] = []

    @property
    def speed(self) -> float | None:
        return statistics.median(self._speeds) if self._speeds else None

    def __iter__(self) -> Iterator[tuple[int, _Group]]:
        before = 0
        for step, rows in itertools.groupby(self._rows(), key=lambda row: int(row["step"])):
            if step < self.step:
                continue  # no run writes steps out of order
            group: _Group = {}
            self.step = step
            for row in itertools.islice(rows, _MAX_LINES_OF_STEP):
                figures = {name: value for name, value in row.items() if name not in NO_FIGURES}
                key: tuple[Any, ...] = ("evaluation", len(group))
                if "images_per_s" in row:
                    key, before = ("training", before), step
                    speed = finite_number(row["images_per_s"])
                    if speed is not None and len(self._speeds) < _MAX_SPEEDS:
                        self._speeds.append(speed)
                elif "bad_step" in row:
                    key = ("rollback", len(group))
                    self.rollbacks.append(row)
                group[key] = figures
            yield step, group

    def _rows(self) -> Iterator[dict[str, Any]]:
        try:
            if not self._path.is_file():
                if self._path.exists():
                    raise InputError(f"{self._path} is not a file; give the folder of a run")
                return
            with self._path.open("rb") as file:
                while line := file.readline(_LONGEST_LINE):
                    if file.tell() > _MAX_BYTES:
                        self.is_cut = True
                        return
                    row = metrics_row(line)
                    if row is not None:
                        yield row
        except OSError as error:
            raise unreadable(self._path, error) from error


def _joined(left: _Lines, right: _Lines) -> Iterator[tuple[int, tuple[_Group, _Group]]]:
    """The steps that both have; both files are read to their ends."""
    sides = iter(left), iter(right)
    heads = [next(side, None) for side in sides]
    while heads[0] is not None or heads[1] is not None:
        steps = [math.inf if head is None else head[0] for head in heads]
        if heads[0] is not None and heads[1] is not None and steps[0] == steps[1]:
            yield heads[0][0], (heads[0][1], heads[1][1])
        low = min(steps)
        for number, side in enumerate(sides):
            if steps[number] == low:
                heads[number] = next(side, None)


def markdown_table(lines: MetricLines, names: tuple[str, str]) -> str:
    """Both runs' figures in a table, for a comment on a pull request."""
    first = lines.first
    if first is not None:
        change = "" if first.change is None else f" ({first.change:+.3g})"
        both = " and ".join(map(figure_text, first.values))
        head = f"**First difference at step {first.step}**: {cell(first.name)} {both}{change}"
        if lines.identical_steps:
            head += f"; identical for {lines.identical_steps} steps before"
    else:
        head = f"**Identical for {lines.identical_steps} steps** ({lines.num_figures} figures)"
    ends = lines.steps
    if ends[0] != ends[1]:
        head += f"; the runs end at steps {ends[0]} and {ends[1]}"
    rows = [f"| | {cell(names[0])} | {cell(names[1])} | change |", "|---|---:|---:|---:|"]
    for name, (step, *values) in lines.last.items():
        distance = FigureDifference(step, name, (values[0], values[1])).change
        moved = "same" if values[0] == values[1] else "" if distance is None else f"{distance:+.3g}"
        texts = " | ".join(map(figure_text, values))
        rows.append(f"| {cell(name)}, step {step} | {texts} | {moved} |")
    speeds = lines.speeds
    if speeds[0] and speeds[1]:
        share = f"{100 * (speeds[1] / speeds[0] - 1):+.1f} %"
        rows.append(f"| images/s, median | {speeds[0]:.1f} | {speeds[1]:.1f} | {share} |")
    return "\n".join([head, "", *rows])


def figure_text(value: Any) -> str:
    """A figure with all digits, to show any difference; anything else as a cell."""
    number = finite_number(value)
    return cell("NaN" if value is None else value) if number is None else repr(number)


def cell(value: object) -> str:
    """Text from a file, shortened and with its markup escaped."""
    text = str(value)[:80]
    return "".join(
        f"\\{letter}" if letter in "|<>`*_[]\\" else letter if letter.isprintable() else "?"
        for letter in text
    )
