"""Reads evaluation.json of a run and checks everything in it.

C: classes.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

_PICTURE = re.compile(r"data:image/(jpeg|png);base64,[A-Za-z0-9+/]{1,60000}={0,2}")
_MOST_CLASSES = 100_000
_MOST_PAIRS = 100_000
_MOST_SAMPLES = 50  # of a kind
_MOST_COLUMNS = 1000  # of numbers
_MOST_POINTS = 5000  # of a scatter


@dataclass(frozen=True)
class Sample:
    """An image in the report.

    Attributes:
        image: its path, or its file and number in it.
        label, predicted: indices of classes.
        probability: of the predicted class.
        of_label: of the label.
        picture: 'data:image/...', or None.
    """

    image: str
    label: int
    predicted: int
    probability: float
    of_label: float
    picture: str | None


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of a run.

    Attributes:
        step: of the weights.
        classes: C names.
        labels, predicted, right: C counts: images of each class, predicted as it, and both.
        confused: (label, predicted, count), the most frequent first.
        calibration: (index of the bin, images, mean confidence, accuracy) without empty bins; 15 bins of
            equal width.
        calibration_error: expected calibration error.
        mistakes: wrong predictions, the most confident first.
        unsure: right predictions, the least certain first.
        suspects: training images whose label looks wrong, the worst first: `predicted` is what the model
            prefers, `of_label` the label's mean probability over the training.
        findings: titles of the data check, with their lines.
    """

    step: int
    classes: Sequence[str]
    labels: Sequence[int]
    predicted: Sequence[int]
    right: Sequence[int]
    confused: Sequence[tuple[int, int, int]]
    calibration: Sequence[tuple[int, int, float, float]]
    calibration_error: float
    mistakes: Sequence[Sample]
    unsure: Sequence[Sample]
    suspects: Sequence[Sample] = ()
    findings: Sequence[tuple[str, Sequence[str]]] = ()

    @property
    def largest_class(self) -> tuple[str, float]:
        """The class of most images and its share: the accuracy of who always says it."""
        most = max(self.labels)
        return self.classes[self.labels.index(most)], most / max(1, sum(self.labels))


@dataclass(frozen=True)
class TargetSample:
    """An image in the report of labels or numbers.

    Attributes:
        image: its path, or its file and number in it.
        label, predicted: as text.
        picture: 'data:image/...', or None.
    """

    image: str
    label: str
    predicted: str
    picture: str | None


@dataclass(frozen=True)
class EvaluatedLabels:
    """An evaluation of a run of several labels per image.

    Attributes:
        step: of the weights.
        labels: K names.
        there, predicted, right: K counts: images with each label, predicted to have it, and both.
        average_precision: by label; None where no image has it.
        thresholds: from which on labels are predicted.
        mistakes: images with the highest loss.
        suspects, findings: as of `Evaluated`.
    """

    step: int
    labels: Sequence[str]
    there: Sequence[int]
    predicted: Sequence[int]
    right: Sequence[int]
    average_precision: Sequence[float | None]
    thresholds: Sequence[float]
    mistakes: Sequence[TargetSample]
    suspects: Sequence[TargetSample] = ()
    findings: Sequence[tuple[str, Sequence[str]]] = ()

    largest_class: ClassVar[None] = None


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers: its figures, and pairs of a number and the predicted one."""

    name: str
    images: int
    mae: float | None
    rmse: float | None
    r2: float | None
    spearman: float | None
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class EvaluatedNumbers:
    """An evaluation of a run of numbers; see `EvaluatedLabels`."""

    step: int
    columns: Sequence[NumberColumn]
    mistakes: Sequence[TargetSample]
    suspects: Sequence[TargetSample] = ()
    findings: Sequence[tuple[str, Sequence[str]]] = ()

    largest_class: ClassVar[None] = None


@dataclass(frozen=True)
class MaskClass:
    """A class of pixels: its figures, and how many known pixels are of it, and predicted as it."""

    name: str
    pixels: int
    predicted: int
    iou: float | None
    dice: float | None
    accuracy: float | None


@dataclass(frozen=True)
class EvaluatedMasks:
    """An evaluation of a run of masks; see `EvaluatedLabels`."""

    step: int
    classes: Sequence[MaskClass]
    mistakes: Sequence[TargetSample]
    suspects: Sequence[TargetSample] = ()
    findings: Sequence[tuple[str, Sequence[str]]] = ()

    largest_class: ClassVar[None] = None


AnyEvaluated = Evaluated | EvaluatedLabels | EvaluatedNumbers | EvaluatedMasks


def evaluated(content: object) -> AnyEvaluated | None:
    """The content of a file; None if it is not what a run writes."""
    if not isinstance(content, Mapping):
        return None
    try:
        read = _READERS.get(content.get("task"), _evaluated)
        return read(content)
    except (KeyError, TypeError, ValueError):
        return None


def _labels(content: Mapping[str, Any]) -> EvaluatedLabels:
    labels = [_text(name) for name in _list(content["labels"], _MOST_CLASSES)]

    def column(name: str) -> list[Any]:
        values = _list(content[name], len(labels))
        return values if len(values) == len(labels) else _refuse()

    scores = column("average_precision")
    return EvaluatedLabels(
        _count(content["step"]),
        labels,
        there=[_count(value) for value in column("there")],
        predicted=[_count(value) for value in column("predicted")],
        right=[_count(value) for value in column("right")],
        average_precision=[None if value is None else _share(value) for value in scores],
        thresholds=[_share(value) for value in column("thresholds")],
        mistakes=_target_samples(content["mistakes"]),
        suspects=_target_samples(content.get("suspects", [])),
        findings=_findings(content.get("findings", [])),
    )


def _numbers(content: Mapping[str, Any]) -> EvaluatedNumbers:
    def optional(value: object) -> float | None:
        return None if value is None else _number(value)

    columns = [
        NumberColumn(
            _text(one["name"]),
            _count(one["images"]),
            mae=optional(one["mae"]),
            rmse=optional(one["rmse"]),
            r2=optional(one["r2"]),
            spearman=optional(one["spearman"]),
            points=[(_number(x), _number(y)) for x, y in _list(one["points"], _MOST_POINTS)],
        )
        for one in _list(content["columns"], _MOST_COLUMNS)
    ]
    return EvaluatedNumbers(
        _count(content["step"]),
        columns,
        mistakes=_target_samples(content["mistakes"]),
        suspects=_target_samples(content.get("suspects", [])),
        findings=_findings(content.get("findings", [])),
    )


def _masks(content: Mapping[str, Any]) -> EvaluatedMasks:
    names = [_text(name) for name in _list(content["classes"], _MOST_CLASSES)]

    def column(name: str) -> list[Any]:
        values = _list(content[name], len(names))
        return values if len(values) == len(names) else _refuse()

    def shares(name: str) -> list[float | None]:
        return [None if value is None else _share(value) for value in column(name)]

    counts = ([_count(value) for value in column(name)] for name in ("pixels", "predicted"))
    figures = map(shares, ("iou", "dice", "accuracy"))
    return EvaluatedMasks(
        _count(content["step"]),
        [MaskClass(*row) for row in zip(names, *counts, *figures, strict=True)],
        mistakes=_target_samples(content["mistakes"]),
        suspects=_target_samples(content.get("suspects", [])),
        findings=_findings(content.get("findings", [])),
    )


def _target_samples(value: object) -> list[TargetSample]:
    return [
        TargetSample(
            _text(one["image"])[:1000],
            _text(one["label"])[:1000],
            _text(one["predicted"])[:1000],
            _picture(one.get("picture")),
        )
        for one in _list(value, _MOST_SAMPLES)
    ]


def _evaluated(content: Mapping[str, Any]) -> Evaluated:
    classes = [_text(name) for name in _list(content["classes"], _MOST_CLASSES)]
    num = len(classes)

    def counts(name: str) -> list[int]:
        values = [_count(value) for value in _list(content[name], num)]
        return values if len(values) == num else _refuse()

    def number_of_class(value: object) -> int:
        return number if (number := _count(value)) < num else _refuse()

    def samples(name: str, *, missing: Any = None) -> list[Sample]:
        return [
            Sample(
                _text(one["image"])[:1000],
                number_of_class(one["label"]),
                number_of_class(one["predicted"]),
                _share(one["probability"]),
                _share(one["of_label"]),
                _picture(one.get("picture")),
            )
            for one in _list(content.get(name, missing), _MOST_SAMPLES)
        ]

    pairs = (_list(pair, 3) for pair in _list(content["confused"], _MOST_PAIRS))
    bins = (_list(one, 4) for one in _list(content["calibration"], 15))
    return Evaluated(
        _count(content["step"]),
        classes,
        counts("labels"),
        counts("predicted"),
        counts("right"),
        [(number_of_class(a), number_of_class(b), _count(times)) for a, b, times in pairs],
        [(min(_count(k), 14), _count(n), _share(c), _share(a)) for k, n, c, a in bins],
        _share(content["calibration_error"]),
        samples("mistakes"),
        samples("unsure"),
        samples("suspects", missing=[]),
        _findings(content.get("findings", [])),
    )


_READERS: dict[Any, Callable[[Mapping[str, Any]], AnyEvaluated]] = {
    "multilabel": _labels,
    "regression": _numbers,
    "segmentation": _masks,
}
"""By task."""


def _findings(value: object) -> list[tuple[str, list[str]]]:
    """Titles with their lines, cut to a few short ones."""
    pairs = (_list(one, 2) for one in _list(value, 20))
    return [
        (_text(title)[:500], [_text(line)[:1000] for line in _list(lines, 20)])
        for title, lines in pairs
    ]


def _refuse() -> NoReturn:
    raise ValueError


def _text(value: object) -> str:
    return value if isinstance(value, str) else _refuse()


def _list(value: object, most: int) -> list[Any]:
    return value if isinstance(value, list) and len(value) <= most else _refuse()


def _count(value: object) -> int:
    """A count, which may be stored as a floating-point number."""
    number = _number(value)
    return int(number) if 0 <= number < 2**53 else _refuse()


def _share(value: object) -> float:
    number = _number(value)
    return number if 0 <= number <= 1.001 else _refuse()


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 2**53:
        return _refuse()
    return float(value)


def _picture(value: object) -> str | None:
    return value if isinstance(value, str) and _PICTURE.fullmatch(value) else None
