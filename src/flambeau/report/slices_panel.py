"""Several runs: the figure that chooses the best weights, against each setting that differs between them."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flambeau.report import svg
from flambeau.report.markup import escaped
from flambeau.report.reported_run import ReportedRun

_WIDTH = 240
_HEIGHT = 180  # of a plot, px
_LEFT = 54
_BOTTOM = 26
_MOST = 12  # settings that are drawn
_LOG_FROM = 30.0  # times between the least and the greatest value
_LONGEST = 14  # columns of a value below the plot
_NO_SETTINGS = {"seed", "fold", "data"}


def slices(runs: Sequence[ReportedRun], differing: Sequence[str], words: Mapping[str, str]) -> str:
    """A scatter for each setting, or '' if fewer than three runs have a figure in common.

    Args:
        differing: settings that differ between runs.
    """
    figure = str(runs[0].settings.get("best", "val_accuracy"))
    points = [(run, value) for run in runs if (value := _figure(run, figure)) is not None]
    names = [name for name in differing if name not in _NO_SETTINGS][:_MOST]
    if len(points) < 3 or not names:
        return ""
    shown = "".join(
        f"<figure>{_slice(name, figure, points)}</figure>"
        for name in names
        if _is_drawn(name, points)
    )
    said = escaped(words["slices_caption"].format(figure=figure))
    return f'<p class="soft">{said}</p><div class="slices">{shown}</div>\n' if shown else ""


def _figure(run: ReportedRun, name: str) -> float | None:
    """Of the published weights, else the last one of a run that goes on or was stopped."""
    value = run.figures.get(name)
    if value is None and name in run.series:
        value = run.series[name].values[-1]
    return value if value is not None and math.isfinite(value) else None


def _is_drawn(name: str, points: Sequence[tuple[ReportedRun, float]]) -> bool:
    return len({_text(run.settings.get(name)) for run, _ in points}) > 1


def _slice(name: str, figure: str, points: Sequence[tuple[ReportedRun, float]]) -> str:
    given = [run.settings.get(name) for run, _ in points]
    places, ticks = _places(given)
    least = min(value for _, value in points)
    span = (max(value for _, value in points) - least) or 1.0

    def y(value: float) -> float:
        return 10 + (1 - (value - least) / span) * (_HEIGHT - _BOTTOM - 20)

    def x(place: float) -> float:
        return _LEFT + 8 + place * (_WIDTH - _LEFT - 26)

    foot = _HEIGHT - _BOTTOM
    parts = [svg.element("line", class_="grid", x1=_LEFT, y1=foot, x2=_WIDTH - 8, y2=foot)]
    for value in (least, least + span):
        parts.append(svg.label(_LEFT - 6, y(value) + 4, f"{value:.4g}", text_anchor="end"))
    for place, text in ticks:
        anchor = "start" if place == 0 else "end" if place == 1 else "middle"
        parts.append(svg.label(x(place), foot + 15, text[:_LONGEST], text_anchor=anchor))
    for place, one, (run, value) in zip(places, given, points, strict=True):
        circle = svg.element(
            "circle",
            class_="point",
            cx=x(place),
            cy=y(value),
            r=3.0,
            stroke_dasharray=None if run.state == "finished" else "2 1",
        )
        said = f"{run.name}: {name} = {_text(one)}, {figure} = {value:.5g}"
        parts.append(svg.titled(said, circle))
    label = f"{figure} / {name}"
    picture = svg.inline("plot", _WIDTH, _HEIGHT, parts, label=label)
    return f"<figcaption>{escaped(name)}</figcaption>{picture}"


def _places(given: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Where each value lies, from 0 to 1, and what is written below: numbers by size, others by name."""
    numbers = [float(one) for one in given if _is_number(one)]
    if len(numbers) == len(given) and min(numbers) < max(numbers):
        is_log = min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_FROM
        scaled = [math.log(one) for one in numbers] if is_log else numbers
        low = min(scaled)
        span = max(scaled) - low
        ends = [(0.0, f"{min(numbers):.4g}"), (1.0, f"{max(numbers):.4g}")]
        return [(one - low) / span for one in scaled], ends
    texts = [_text(one) for one in given]
    distinct = sorted(set(texts))
    place = {text: k / max(1, len(distinct) - 1) for k, text in enumerate(distinct)}
    shown = [distinct[0], distinct[-1]] if len(distinct) > 3 else distinct
    return [place[text] for text in texts], [(place[text], text) for text in dict.fromkeys(shown)]


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < 1e300 and math.isfinite(value)  # type: ignore[arg-type]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
