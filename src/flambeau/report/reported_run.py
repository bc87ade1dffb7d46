"""What a report shows of a run, and the charts of several runs."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flambeau.report.evaluated import AnyEvaluated

MOST_POINTS = 1500  # per line: more than a screen has columns


@dataclass(frozen=True)
class Series:
    """One figure over the steps.

    Attributes:
        steps: completed optimizer steps, increasing.
        epochs: the same in epochs; empty if unknown.
        values: None if not finite.
    """

    steps: tuple[int, ...]
    epochs: tuple[float, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Event:
    """An event of a run, such as its start.

    Attributes:
        time: in UTC.
        step: completed optimizer steps.
        text: what happened.
        peak_memory_bytes: None if the event has none.
    """

    time: str
    step: str
    text: str
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class ReportedRun:
    """A run as a report shows it; texts may come from anywhere and are escaped.

    Attributes:
        name: unique in a report.
        state: such as 'finished'.
        why: the reason for some states.
        facts: label and text, at the top.
        environment: nested as stored, as is `data`.
        figures: of the published weights.
        series: by name, such as 'train_loss'.
        model: its class, `parameters`, `trained`, and `parts` of [name, class, parameters, trained].
        evaluated: predictions of its weights, if kept.
        first_batch: 'data:image/jpeg...', training images as the model saw them.
        bad_images: how many were unreadable, and the first names.
        link: relative URL of its report, quoted.
    """

    name: str
    state: str
    why: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    series: Mapping[str, Series] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = ()
    evaluated: AnyEvaluated | None = None
    first_batch: str | None = None
    bad_images: tuple[int, tuple[str, ...]] = (0, ())
    link: str | None = None


def read_series(lines: Iterable[bytes], *, steps_per_epoch: int | None) -> dict[str, Series]:
    """The figures of metrics.jsonl by name; invalid lines are skipped.

    Args:
        lines: of the file.
        steps_per_epoch: None if unknown.
    """
    points: dict[str, dict[int, float | None]] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the torn last line of a run that was killed
        if not isinstance(row, dict) or not _is_step(row.get("step")):
            continue
        for name, value in _numbers(row):
            points.setdefault(name, {})[row["step"]] = value
    series = {}
    for name, values in points.items():
        if all(value is None for value in values.values()):
            continue
        steps = sorted(values)
        epochs = [step / steps_per_epoch for step in steps] if steps_per_epoch else []
        series[name] = Series(tuple(steps), tuple(epochs), tuple(values[step] for step in steps))
    return series


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _numbers(row: Mapping[str, Any]) -> Iterable[tuple[str, float | None]]:
    for name, value in row.items():
        if name in ("step", "epoch"):
            continue
        for part, one in enumerate(value) if isinstance(value, list) else [(None, value)]:
            label = name if part is None else f"{name} {part}"
            if one is None:
                yield label, None
            elif isinstance(one, int | float) and not isinstance(one, bool):
                yield label, float(one) if abs(one) < 1e300 and math.isfinite(one) else None


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """At most `most` points: the extremes of each stretch, so that no peak is lost."""
    length = len(series.steps)
    if length <= most:
        return series
    size = math.ceil(length / (most // 2 - 1))
    kept = {0, length - 1}
    for start in range(0, length, size):
        stretch = enumerate(series.values[start : start + size], start)
        known = [(value, k) for k, value in stretch if value is not None]
        if known:
            kept |= {min(known)[1], max(known)[1]}
    order = sorted(kept)
    epochs = tuple(series.epochs[k] for k in order) if series.epochs else ()
    return Series(
        tuple(series.steps[k] for k in order), epochs, tuple(series.values[k] for k in order)
    )


def seed_groups(runs: Sequence[ReportedRun]) -> list[list[ReportedRun]]:
    """Groups of runs that differ only in their seed, in order."""
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        others = {name: value for name, value in run.settings.items() if name != "seed"}
        key = json.dumps([others, run.data], sort_keys=True, default=str)
        groups.setdefault(key if "seed" in run.settings else f"alone {len(groups)}", []).append(run)
    return list(groups.values())


@dataclass(frozen=True)
class Line:
    """A line of a chart: one run, or the mean of several seeds.

    Attributes:
        run: the first of a group; the page shows and hides lines by it.
        name: for the legend.
        spread: least and greatest value at each point; None for one run.
        color, dash: indices; a run's lines share a color.
    """

    run: str
    name: str
    series: Series
    spread: tuple[tuple[float, float] | None, ...] | None
    color: int
    dash: int


@dataclass(frozen=True)
class Chart:
    """Lines that belong together, such as the loss in training and in evaluations."""

    title: str
    lines: tuple[Line, ...]
    may_be_log: bool


def charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """A chart per figure; train_ and val_ of one name share it, as do all groups' rates."""
    titles: dict[str, list[str]] = {}
    for run in runs:
        for name in run.series:
            names = titles.setdefault(_title(name), [])
            if name not in names:
                names.append(name)
    drawn = []
    for title, names in titles.items():
        lines = tuple(
            line
            for color, group in enumerate(seed_groups(runs))
            for dash, name in enumerate(sorted(names))
            for line in _lines(group, name, color=color, dash=dash, alone=len(names) == 1)
        )
        drawn.append(Chart(title, lines, may_be_log=_positive(lines)))
    order = ["loss", "accuracy"]
    drawn.sort(key=lambda chart: order.index(chart.title) if chart.title in order else len(order))
    return drawn


def _title(name: str) -> str:
    for start in ("train_", "val_"):
        name = name.removeprefix(start)
    return "learning_rate" if name.startswith("learning_rates ") else name


def _positive(lines: Sequence[Line]) -> bool:
    values = (value for line in lines for value in line.series.values)
    least = (pair and pair[0] for line in lines for pair in line.spread or ())
    return all(value is None or value > 0 for value in (*values, *least))


def _lines(
    group: Sequence[ReportedRun], name: str, *, color: int, dash: int, alone: bool
) -> Iterable[Line]:
    several = [run.series[name] for run in group if name in run.series]
    if not several:
        return
    what = "" if alone else f" {name}"
    same = len({series.steps for series in several}) == 1
    if len(several) == 1 or not same:
        for run in group:
            if name in run.series:
                yield Line(
                    group[0].name, f"{run.name}{what}", thinned(run.series[name]), None, color, dash
                )
        return
    columns = [
        [value for value in column if value is not None]
        for column in zip(*(series.values for series in several), strict=True)
    ]
    means = tuple(math.fsum(column) / len(column) if column else None for column in columns)
    mean = thinned(Series(several[0].steps, several[0].epochs, means))
    ends = {
        step: (min(c), max(c)) if c else None
        for step, c in zip(several[0].steps, columns, strict=True)
    }
    yield Line(
        group[0].name,
        f"{group[0].name}{what}, n = {len(several)}",
        mean,
        tuple(ends[step] for step in mean.steps),
        color,
        dash,
    )
