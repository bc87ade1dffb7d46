"""The parts of a page that show a run of several labels per image, of numbers, or of masks."""

import math
from collections.abc import Callable, Mapping, Sequence

from flambeau.report import svg
from flambeau.report.evaluated import (
    EvaluatedLabels,
    EvaluatedMasks,
    EvaluatedNumbers,
    NumberColumn,
    TargetSample,
)
from flambeau.report.markup import escaped, percent, table
from flambeau.report.panels import picture_item

_WORST = 100  # most labels in the table
_PLOT = 240  # side of a scatter, px

Words = Mapping[str, str]
Answers = EvaluatedLabels | EvaluatedNumbers | EvaluatedMasks


def sections(answers: Answers, words: Words) -> dict[str, str]:
    """The content of each section."""
    shown = {"pictures": _pictures(answers, words)}
    if isinstance(answers, EvaluatedLabels):
        return {**shown, "labels": _labels(answers, words)}
    if isinstance(answers, EvaluatedMasks):
        return {**shown, "classes": _classes(answers, words)}
    return {**shown, "columns": _columns(answers, words)}


def _pictures(answers: Answers, words: Words) -> str:
    parts = []
    worst = "lowest_iou" if isinstance(answers, EvaluatedMasks) else "highest_loss"
    for kind, samples in ((worst, answers.mistakes), ("suspects", answers.suspects)):
        if samples:
            shown = "".join(_picture(one, words) for one in samples)
            parts.append(f'<h3>{escaped(words[kind])}</h3><ul class="pictures">{shown}</ul>\n')
    return "".join(parts)


def _picture(sample: TargetSample, words: Words) -> str:
    said = f"{sample.predicted}; {words['label']}: {sample.label}"
    return picture_item(said, sample.image, sample.picture)


def _labels(answers: EvaluatedLabels, words: Words) -> str:
    """Average precision, precision, recall and F1 of each label, the worst first."""
    rows = []
    for k, name in enumerate(answers.labels):
        there = answers.there[k]
        said = answers.predicted[k]
        right = answers.right[k]
        score = answers.average_precision[k]
        f1 = 2 * right / (there + said) if there + said else math.nan
        cells = (
            name,
            there,
            "-" if score is None else f"{score:.1%}",
            percent(right, there),
            percent(right, said),
            "-" if math.isnan(f1) else f"{f1:.1%}",
            f"{answers.thresholds[k]:.3f}",
        )
        rows.append((math.inf if score is None else score, cells))
    rows.sort(key=lambda row: row[0])
    heads = (
        words["label"],
        words["images"],
        words["average_precision"],
        words["recall"],
        words["precision"],
        "F1",
        words["threshold"],
    )
    many = words["worst"].format(shown=_WORST, all=len(rows)) if len(rows) > _WORST else ""
    return table(heads, (cells for _, cells in rows[:_WORST]), numbers=6, caption=many)


def _classes(answers: EvaluatedMasks, words: Words) -> str:
    """Intersection over union, Dice and recall of each class, the worst first."""
    ranked = sorted(answers.classes, key=lambda one: math.inf if one.iou is None else one.iou)
    rows = [
        (
            one.name,
            one.pixels,
            *(
                "-" if value is None else f"{value:.1%}"
                for value in (one.iou, one.dice, one.accuracy)
            ),
        )
        for one in ranked[:_WORST]
    ]
    heads = (words["class"], words["pixels"], "IoU", "Dice", words["recall"])
    number = len(answers.classes)
    many = words["worst"].format(shown=_WORST, all=number) if number > _WORST else ""
    return table(heads, rows, numbers=4, caption=many)


def _columns(answers: EvaluatedNumbers, words: Words) -> str:
    """The figures of each column, and the predicted numbers against the given ones."""
    rows = [
        (one.name, one.images, *map(_short, (one.mae, one.rmse, one.r2, one.spearman)))
        for one in answers.columns
    ]
    heads = (words["column"], words["images"], words["mae"], "RMSE", "R2", "Spearman")
    shown = [table(heads, rows, numbers=5)]
    for one in answers.columns:
        if one.points:
            shown.append(f"<h3>{escaped(one.name)}</h3>{_scatter(one, words)}\n")
    return "".join(shown)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _scatter(column: NumberColumn, words: Words) -> str:
    """Predicted numbers (upwards) against those of the data (to the right)."""
    values = [value for point in column.points for value in point]
    least = min(values)
    most = max(values)
    span = (most - least) or 1.0
    low = 44
    high = _PLOT - 10

    def at(value: float) -> float:
        return (value - least) / span * (high - low)

    def x(value: float) -> float:
        return low + at(value)

    def y(value: float) -> float:
        return high - at(value)

    line = svg.element("line", class_="grid", x1=x(least), y1=y(least), x2=x(most), y2=y(most))
    parts = [line, *_ticks((least, (least + most) / 2, most), x, y, low)]
    for given, predicted in column.points:
        point = svg.element("circle", class_="point", cx=x(given), cy=y(predicted), r=2.0)
        parts.append(svg.titled(f"{given:.5g}: {predicted:.5g}", point))
    label = words["scatter_caption"].format(name=column.name)
    picture = svg.inline("plot", _PLOT + 20, _PLOT + 20, parts, label=label)
    return f"<p>{escaped(label)}</p>{picture}"


def _ticks(
    values: Sequence[float],
    x: Callable[[float], float],
    y: Callable[[float], float],
    low: int,
) -> list[str]:
    parts = []
    for value in values:
        parts.append(svg.label(low - 6, y(value) + 4, f"{value:.4g}", text_anchor="end"))
        parts.append(svg.label(x(value), _PLOT + 14, f"{value:.4g}", text_anchor="middle"))
    return parts
