"""The figures of an evaluation of several labels per image."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from flambeau.errors import InputError
from flambeau.html_table import html_grid, html_table
from flambeau.trainer.evaluation.answers import LabelAnswer
from flambeau.trainer.evaluation.label_figures import (
    LabelCounts,
    average_precisions,
    counted,
    mean_of_known,
)
from flambeau.trainer.evaluation.predictions_file import predictions_file
from flambeau.trainer.evaluation.reading import Reading
from flambeau.trainer.evaluation.target_plots import plot_precision_recall
from flambeau.trainer.evaluation.text_table import finite, four_digits, text_table

_SHOWN = 40  # labels; if there are more, the text shows the worst ones


@dataclass(frozen=True, slots=True)
class LabelFigures:
    """One label of an evaluation.

    Attributes:
        threshold: probability from which on it is predicted.
        average_precision: None for a label that no image has.
        precision: share of the images predicted to have it that do; None if never predicted.
        recall: share of its images that were predicted; None if no image has it.
        f1: their harmonic mean; None if no image has it and none was predicted to.
        known: images of which it is known whether they have it.
    """

    name: str
    threshold: float
    average_precision: float | None
    precision: float | None
    recall: float | None
    f1: float | None
    support: int
    predicted: int
    known: int


@dataclass(frozen=True, repr=False, eq=False)
class LabelPredictions:
    """The predictions of each evaluated image, in the order of the data.

    Attributes:
        indices: (N,) int64, positions in the data.
        labels: (N, K) float32: 1, 0, or NaN for unknown.
        thresholds: (K,); a label is predicted from its threshold on.
    """

    names: Sequence[str]
    indices: Tensor
    labels: Tensor
    probabilities: Tensor
    thresholds: Tensor
    describe: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[str, list[str], LabelAnswer]]:
        """For each image its name, its labels, and the answer of the model."""
        answers = label_answers(self.probabilities, self.thresholds, self.names)
        rows = zip(self.indices.tolist(), self.labels.tolist(), answers, strict=True)
        for index, row, answer in rows:
            labels = [name for name, value in zip(self.names, row, strict=True) if value == 1]
            yield self.describe(index), labels, answer

    def __repr__(self) -> str:
        return f"<predictions of {len(self)} images>"


def label_answers(
    probabilities: Tensor, thresholds: Tensor, names: Sequence[str]
) -> list[LabelAnswer]:
    """The answers of (N, K) probabilities."""
    reached = (probabilities >= thresholds).tolist()
    answers = []
    for row, is_reached in zip(probabilities.tolist(), reached, strict=True):
        shares = dict(zip(names, row, strict=True))
        labels = [name for name, yes in zip(names, is_reached, strict=True) if yes]
        answers.append(LabelAnswer(sorted(labels, key=lambda name: -shares[name]), shares))
    return answers


@dataclass(frozen=True, repr=False, eq=False)
class LabelEvaluation:
    """The result of `evaluate` for several labels per image, for `print`.

    Unknown labels count in no figure.

    Attributes:
        loss: mean binary cross-entropy.
    """

    loss: float
    reading: Reading
    predictions: LabelPredictions
    picture = "precision and recall"
    """What `plot` draws."""

    @cached_property
    def counts(self) -> LabelCounts:
        """How often each label is there, and was predicted."""
        said = self.predictions
        return counted(said.probabilities, said.labels, said.thresholds)

    @cached_property
    def average_precisions(self) -> Tensor:
        """(K,) float64; NaN for a label that no image has."""
        return average_precisions(self.predictions.probabilities, self.predictions.labels)

    @property
    def map(self) -> float:
        """Mean average precision, over the labels that some image has."""
        return mean_of_known(self.average_precisions)

    @property
    def micro_f1(self) -> float:
        """F1 of all labels together."""
        return self.counts.micro_f1

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the labels that some image has, or was predicted to have."""
        return self.counts.macro_f1

    @property
    def hamming_loss(self) -> float:
        """Share of the known labels that were predicted wrongly."""
        return self.counts.hamming_loss

    @property
    def num_images(self) -> int:
        """Counted, each once."""
        return self.reading.num_images

    @cached_property
    def labels(self) -> tuple[LabelFigures, ...]:
        """The figures of each label, in the order of the model's outputs."""
        counts = self.counts
        columns = zip(
            self.predictions.names,
            self.predictions.thresholds.tolist(),
            self.average_precisions.tolist(),
            counts.f1.tolist(),
            counts.there.tolist(),
            counts.predicted.tolist(),
            counts.right.tolist(),
            counts.known.tolist(),
            strict=True,
        )
        return tuple(
            LabelFigures(
                name,
                threshold=threshold,
                average_precision=finite(precision),
                precision=right / predicted if predicted else None,
                recall=right / there if there else None,
                f1=finite(f1),
                support=there,
                predicted=predicted,
                known=known,
            )
            for name, threshold, precision, f1, there, predicted, right, known in columns
        )

    def as_dict(self) -> dict[str, Any]:
        """All but the predictions, as JSON; None for what is not a number."""
        return {
            "task": "multilabel",
            "loss": finite(self.loss),
            "map": finite(self.map),
            "micro_f1": finite(self.micro_f1),
            "macro_f1": finite(self.macro_f1),
            "hamming_loss": finite(self.hamming_loss),
            **self.reading.as_dict(),
            "labels": [asdict(one) for one in self.labels],
        }

    def save_predictions(self, path: str | Path, *, force: bool = False) -> None:
        """Write a CSV file: path, labels, predicted, and the probability of each label."""
        columns = ["path", "labels", *LabelAnswer.columns(self.predictions.names)]
        with predictions_file(Path(path), columns, force=force) as add:
            for image, labels, answer in self.predictions:
                add([image, "|".join(labels), *answer.cells()])

    def plot(self, path: str | Path, *, force: bool = False) -> None:
        """Draw precision and recall of each label."""
        said = self.predictions
        plot_precision_recall(
            said.probabilities, said.labels, said.thresholds, said.names, Path(path), force=force
        )

    def plot_confusion(self, path: str | Path, *, force: bool = False) -> None:
        """Refused with InputError: each label is a question of its own."""
        raise InputError(
            f"{path}: several labels per image have no confusion matrix\n"
            "Give .plot, which draws precision and recall of each label"
        )

    def _repr_html_(self) -> str:
        figures = {
            "images": self.num_images,
            "loss": self.loss,
            "mean average precision": finite(self.map),
            "micro F1": finite(self.micro_f1),
            "macro F1": finite(self.macro_f1),
            "Hamming loss": self.hamming_loss,
        }
        rows = [
            [one.name, one.average_precision, one.precision, one.recall, one.f1, one.support]
            for one in self._shown()
        ]
        heads = ["label", "AP", "precision", "recall", "F1", "images"]
        return html_table("evaluation of several labels", figures) + html_grid(heads, rows)

    def __repr__(self) -> str:
        rows = [
            *self.reading.rows(),
            ["loss", f"{self.loss:.4f}"],
            ["mean average precision", four_digits(finite(self.map))],
            ["micro F1", four_digits(finite(self.micro_f1))],
            ["macro F1", four_digits(finite(self.macro_f1))],
            ["Hamming loss", f"{self.hamming_loss:.4f}"],
        ]
        return f"{text_table([], rows, left=2, longest=200)}\n\n{self._label_table()}"

    def _shown(self) -> Sequence[LabelFigures]:
        """All labels, or of many the worst."""
        many = len(self.labels) > _SHOWN
        return sorted(self.labels, key=_precision_or_last)[:_SHOWN] if many else self.labels

    def _label_table(self) -> str:
        shown = self._shown()
        title = ""
        if len(shown) < len(self.labels):
            title = (
                f"the {_SHOWN} labels with the lowest average precision, of {len(self.labels)}\n"
            )
        rows = [
            [
                one.name,
                four_digits(one.average_precision),
                four_digits(one.precision),
                four_digits(one.recall),
                four_digits(one.f1),
                f"{one.threshold:.3f}",
                str(one.support),
            ]
            for one in shown
        ]
        heads = ["label", "AP", "precision", "recall", "F1", "from", "images"]
        return title + text_table(heads, rows, left=1)


def _precision_or_last(one: LabelFigures) -> float:
    return math.inf if one.average_precision is None else one.average_precision
