"""The confusion matrix of the report, or for many classes the pairs that are confused most."""

from collections.abc import Mapping

from flambeau.report import svg
from flambeau.report.evaluated import Evaluated
from flambeau.report.markup import escaped, percent, table
from flambeau.terminal import text_width

MATRIX_CLASSES = 40  # most classes for which the whole matrix is drawn
_PAIRS = 30  # pairs of confused classes, if there are too many classes for a matrix
_CELL = 22  # side of a cell of the matrix, px
_MARGIN = 4  # px
_NAME = 14  # longest name beside the matrix, columns of text


def confusion(answers: Evaluated, words: Mapping[str, str]) -> str:
    """The panel as HTML."""
    if len(answers.classes) <= MATRIX_CLASSES:
        return _matrix(answers, words)
    rows = (
        (answers.classes[a], answers.classes[b], times, percent(times, answers.labels[a]))
        for a, b, times in answers.confused[:_PAIRS]
    )
    heads = (words["label"], words["predicted"], words["images"], words["of_label"])
    return table(heads, rows, numbers=2, caption=words["pairs"])


def _matrix(answers: Evaluated, words: Mapping[str, str]) -> str:
    counts = {(k, k): right for k, right in enumerate(answers.right)}
    counts |= {(a, b): times for a, b, times in answers.confused}
    names = [_shortened(name) for name in answers.classes]
    left = 8 * max(map(text_width, names), default=0) + _MARGIN
    parts = []
    for k, name in enumerate(names):
        at = round(left + k * _CELL + _CELL * 0.7)
        to = left - _MARGIN
        parts.append(svg.label(to, at, name, text_anchor="end"))
        parts.append(svg.label(0, 0, name, transform=f"translate({at} {to}) rotate(-90)"))
    for (label, answer), times in sorted(counts.items()):
        if times:
            share = min(1.0, times / max(1, answers.labels[label]))
            said = f"{answers.classes[label]} → {answers.classes[answer]}: {times}"
            kind = "right" if label == answer else "wrong"
            x = left + answer * _CELL
            y = left + label * _CELL
            parts.append(_cell(x, y, times, share=share, kind=kind, said=said))
    size = left + len(answers.classes) * _CELL + _MARGIN
    said = escaped(words["confusion_caption"])
    picture = svg.inline("matrix", size, size, parts, label=words["confusion"])
    return (
        f'<p class="soft">{said}</p><div class="scroll" tabindex="0" role="group" aria-label="{said}">'
        f"{picture}</div>\n"
    )


def _shortened(name: str) -> str:
    """A name that fits beside the matrix."""
    if text_width(name) <= _NAME:
        return name
    while text_width(name) > _NAME - 1:
        name = name[:-1]
    return f"{name}…"


def _cell(x: int, y: int, times: int, *, share: float, kind: str, said: str) -> str:
    """A cell of the matrix, with its count if that fits."""
    number = ""
    if times < 1000:
        style = "count strong" if share > 0.5 else "count"
        middle = x + _CELL / 2 - 0.5
        number = svg.label(middle, y + _CELL * 0.66, str(times), class_=style, text_anchor="middle")
    side = _CELL - 1
    opacity = 0.08 + 0.92 * share
    cell = svg.element("rect", class_=kind, x=x, y=y, width=side, height=side, fill_opacity=opacity)
    return svg.titled(said, cell, number)
