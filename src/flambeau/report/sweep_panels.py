"""A sweep in a report: the importance of its settings, curves as bands by setting, folds side by side."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flambeau.report import svg
from flambeau.report.markup import escaped, table
from flambeau.report.reported_run import ReportedRun

_WIDTH = 400
_HEIGHT = 220  # of a chart, px
_LEFT = 54
_RIGHT = 10
_TOP = 8
_BOTTOM = 40
_MOST_SETTINGS = 8  # that have a chart
_MOST_BANDS = 5  # of a chart: more values of numbers are put together, and other ones are left out
_MOST_TRIALS = 20  # in the table of folds
_QUARTILES_FROM = 4  # runs; of fewer the least and the greatest are shown


@dataclass(frozen=True)
class ReportedSweep:
    """What a report shows of a sweep beside its runs; texts may come from anywhere.

    Attributes:
        figure: what was compared.
        is_max: more of it is better.
        folds: of the cross-validation; 0 without.
        choices: searched settings, by run in the report.
        places: numbers of trial and fold (or None), by run in the report.
        importance: content of importance.json.
        test: looks at the test part, as text, if any.
    """

    figure: str
    is_max: bool = True
    folds: int = 0
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    places: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    importance: Mapping[str, Any] = field(default_factory=dict)
    test: str | None = None


# ---------------------------------------------------------------- importance


def importance(sweep: ReportedSweep, words: Mapping[str, str]) -> str:
    """Each setting's share, or why there is none; '' without the file."""
    how = sweep.importance.get("how")
    rows = sweep.importance.get("settings")
    if not isinstance(how, str) or not isinstance(rows, list):
        return ""
    said = f'<p class="soft">{escaped(how)}</p>\n'
    known = [one for one in rows if isinstance(one, dict) and _number(one.get("share")) is not None]
    if not known:
        return said
    shown = [
        (
            one.get("name"),
            words["beyond chance" if one.get("is_beyond_chance") is True else "chance"],
            f"{_number(one['share']):.0%}",
        )
        for one in known
    ]
    return table((words["name"], "", words["importance"]), shown, numbers=1) + said


# ---------------------------------------------------------------- bands


@dataclass(frozen=True)
class _Band:
    """The runs with one value of a setting, or with values of one range.

    Attributes:
        points: epoch, median, lower and upper end, and number of runs.
    """

    name: str
    points: tuple[tuple[float, float, float, float, int], ...]


def bands(sweep: ReportedSweep, runs: Sequence[ReportedRun], words: Mapping[str, str]) -> str:
    """A chart for each searched setting; '' where no run has evaluated the figure twice."""
    names = dict.fromkeys(name for choice in sweep.choices.values() for name in choice)
    charts = [
        chart
        for name in names
        if (found := _bands_of(name, sweep, runs)) and (chart := _chart(name, found, sweep, words))
    ][:_MOST_SETTINGS]
    if not charts:
        return ""
    said = escaped(words["bands_caption"].format(figure=sweep.figure))
    return f'<p class="soft">{said}</p><div class="charts">{"".join(charts)}</div>\n'


def _bands_of(name: str, sweep: ReportedSweep, runs: Sequence[ReportedRun]) -> list[_Band]:
    """The bands of a setting; none if it has one value, or too many without an order."""
    curves = [
        (sweep.choices[run.name][name], run.series[sweep.figure])
        for run in runs
        if name in sweep.choices.get(run.name, {}) and sweep.figure in run.series
    ]
    groups: dict[str, list[dict[float, float]]] = {}
    labels = _labels([value for value, _ in curves])
    if labels is None:
        return []
    for label, (_, series) in sorted(
        zip(labels, curves, strict=True), key=lambda pair: _order(pair[1][0])
    ):
        places = series.epochs or tuple(map(float, series.steps))
        points = {
            at: value for at, value in zip(places, series.values, strict=True) if value is not None
        }
        groups.setdefault(label, []).append(points)
    found = [_Band(label, _points(several)) for label, several in groups.items()]
    is_curve = any(len(one.points) > 1 for one in found)
    return found if len(found) > 1 and is_curve else []


def _labels(values: Sequence[Any]) -> list[str] | None:
    """The name of the band of each value: the value, or of many numbers one of three ranges."""
    distinct = sorted({_text(value) for value in values})
    if len(distinct) <= _MOST_BANDS:
        return [_text(value) for value in values]
    numbers = [_number(value) for value in values]
    known = sorted(number for number in numbers if number is not None)
    if len(known) < len(values):
        return None
    third = len(known) / 3
    parts = [known[round(k * third) : round((k + 1) * third)] for k in range(3)]
    names = [f"{part[0]:.4g} … {part[-1]:.4g}" for part in parts]
    return [
        names[sum(number > part[-1] for part in parts[:2])]
        for number in numbers
        if number is not None
    ]


def _points(several: Sequence[Mapping[float, float]]) -> tuple[Any, ...]:
    rows = []
    for at in sorted({at for points in several for at in points}):
        values = sorted(points[at] for points in several if at in points)
        low, high = values[0], values[-1]
        if len(values) >= _QUARTILES_FROM:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        rows.append((at, statistics.median(values), low, high, len(values)))
    return tuple(rows)


def _chart(
    name: str, found: Sequence[_Band], sweep: ReportedSweep, words: Mapping[str, str]
) -> str:
    across = [at for band in found for at, *_ in band.points]
    along = [end for band in found for _, _, low, high, _ in band.points for end in (low, high)]
    first = min(across)
    last = max(across)
    least = min(along)
    most = max(along)

    def x(at: float) -> float:
        share = (at - first) / ((last - first) or 1.0)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (most - value) / ((most - least) or 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    foot = _HEIGHT - _BOTTOM
    parts = [svg.element("line", class_="grid", x1=_LEFT, y1=foot, x2=_WIDTH - _RIGHT, y2=foot)]
    for value in dict.fromkeys((least, most)):
        parts.append(svg.label(_LEFT - 6, y(value) + 4, f"{value:.4g}", text_anchor="end"))
    for at, anchor in ((first, "start"), (last, "end")):
        parts.append(svg.label(x(at), foot + 15, f"{at:.4g}", text_anchor=anchor))
    parts.append(
        svg.label((x(first) + x(last)) / 2, foot + 30, words["epoch"], text_anchor="middle")
    )
    for number, band in enumerate(found):
        kind = f"band band{number}"
        top = [(x(at), y(high)) for at, _, _, high, _ in band.points]
        under = [(x(at), y(low)) for at, _, low, _, _ in reversed(band.points)]
        line_points = [(x(at), y(middle)) for at, middle, *_ in band.points]
        area = svg.element("polygon", class_=f"{kind} area", points=_path([*top, *under]))
        line = svg.element("polyline", class_=f"{kind} line", points=_path(line_points))
        parts.append(svg.titled(f"{name} = {band.name}", area, line))
    said = "; ".join(_said(band) for band in found)
    label = f"{sweep.figure} / {words['epoch']}, {name}: {said}"
    picture = svg.inline("plot", _WIDTH, _HEIGHT, parts, label=label)
    rows = []
    for number, band in enumerate(found):
        at, middle, low, high, count = band.points[-1]
        key = f'<span class="swatch band{number}"></span>{escaped(band.name)}'
        cells = (f"{at:.4g}", f"{middle:.4g}", f"{low:.4g}", f"{high:.4g}", str(count))
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        rows.append(f'<tr><th scope="row">{key}</th>{numbers}</tr>')
    heads = (name, words["epoch"], words["median"], words["low"], words["high"], "n")
    head = "".join(f'<th scope="col">{escaped(one)}</th>' for one in heads)
    below = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<figure class="bands"><h3>{escaped(name)}</h3>{picture}{below}</figure>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _said(band: _Band) -> str:
    _, middle, low, high, count = band.points[-1]
    return f"{band.name}: {middle:.4g} ({low:.4g} … {high:.4g}, n = {count})"


# ---------------------------------------------------------------- folds


def folds(sweep: ReportedSweep, runs: Sequence[ReportedRun], words: Mapping[str, str]) -> str:
    """The figure of each trial in each fold, best trials first; '' without folds."""
    if not sweep.folds:
        return ""
    found: dict[int, dict[int, list[float]]] = {}
    for run in runs:
        trial, fold = sweep.places.get(run.name, (0, None))
        value = run.figures.get(sweep.figure)
        if fold is not None and value is not None:
            found.setdefault(trial, {}).setdefault(fold, []).append(value)
    means = {
        trial: {fold: statistics.fmean(values) for fold, values in by_fold.items()}
        for trial, by_fold in found.items()
    }
    whole = [trial for trial, by_fold in means.items() if len(by_fold) == sweep.folds]
    if not whole:
        return ""
    sign = -1 if sweep.is_max else 1
    whole.sort(key=lambda trial: (sign * statistics.fmean(means[trial].values()), trial))
    choices = {sweep.places[name][0]: choice for name, choice in sweep.choices.items()}
    numbers = range(1, sweep.folds + 1)
    rows = []
    for trial in whole[:_MOST_TRIALS]:
        values = [means[trial][fold] for fold in numbers]
        text = " ".join(f"{name}={_text(one)}" for name, one in choices.get(trial, {}).items())
        summary = (statistics.fmean(values), statistics.stdev(values))
        rows.append((trial, text, *(f"{one:.4f}" for one in (*values, *summary))))
    heads = (
        words["trial"],
        words["settings"],
        *(f"{words['fold']} {number}" for number in numbers),
        words["mean"],
        words["std"],
    )
    said = words["folds_caption"].format(figure=sweep.figure)
    return table(heads, rows, numbers=sweep.folds + 2, caption=said)


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 and math.isfinite(value) else None  # type: ignore[arg-type]


def _order(value: object) -> tuple[bool, float, str]:
    number = _number(value)
    return number is None, number or 0.0, _text(value)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
