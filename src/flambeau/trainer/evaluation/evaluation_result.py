"""The figures of an evaluation: as attributes, as one JSON object, and as text for people."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flambeau.html_table import html_grid, html_table
from flambeau.trainer.evaluation.answers import Ranking
from flambeau.trainer.evaluation.confusion_plot import plot_confusion
from flambeau.trainer.evaluation.predictions_file import predictions_file
from flambeau.trainer.evaluation.reading import MemberFigures, member_rows, members_in_json
from flambeau.trainer.evaluation.text_table import finite, four_digits, text_table

_SHOWN = 20  # classes; if there are more, the text shows the worst ones


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One class of an evaluation.

    Attributes:
        precision: share of the images predicted as this class that are of it; 0 if it has images and was
            never predicted; None with neither.
        recall: share of its images that were predicted as it; None without images.
        f1: the harmonic mean of the two; None with neither images nor predictions.
        support: images of the class.
        predicted: images predicted as it.
    """

    name: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int
    predicted: int


@dataclass(frozen=True, repr=False, eq=False)
class ImagePredictions:
    """The predictions of each evaluated image, in the order of the data.

    Attributes:
        indices: (N,) int64, positions in the data.
        ranked: (N, K) int64, the most probable classes; K is 5, or C if that is less.
        probabilities: (N, K) float32, of these.
        describe: the name of the image at a position: its path, or its file and position in it.
    """

    names: Sequence[str]
    indices: Tensor
    labels: Tensor
    ranked: Tensor
    probabilities: Tensor
    describe: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[str, str, list[tuple[str, float]]]]:
        """For each image its name, its label, and (class, probability) pairs."""
        for index, label, ranked, shares in zip(
            self.indices.tolist(),
            self.labels.tolist(),
            self.ranked.tolist(),
            self.probabilities.tolist(),
            strict=True,
        ):
            pairs = [(self.names[k], share) for k, share in zip(ranked, shares, strict=True)]
            yield self.describe(index), self.names[label], pairs

    def __repr__(self) -> str:
        return f"<predictions of {len(self)} images>"


@dataclass(frozen=True, repr=False, eq=False)
class Evaluation:
    """The result of `evaluate`, for `print`.

    Attributes:
        loss: mean cross-entropy, without label smoothing.
        accuracy: share of the images whose most probable class is the label (top-1).
        top5_accuracy: share with the label among the five most probable; None up to 5 classes.
        macro_precision, macro_recall, macro_f1: means over the classes that have images.
        calibration_error: expected calibration error; see the recipe calibration_error.
        auroc: area under the ROC curve of two classes; None with more, or without images of both.
        num_bad: unreadable images, left out.
        num_trained_on: images that the model was trained on.
        counts_trained_on: these count; else they are left out.
        image_size: side of the model's input, pixels.
        flip_tta: probabilities are averaged with those of the mirror image.
        confusion: (C, C) int64 counts on the CPU: rows are labels, columns predicted classes.
        members: of an ensemble, what each reaches alone.
    """

    loss: float
    accuracy: float
    top5_accuracy: float | None
    macro_precision: float
    macro_recall: float
    macro_f1: float
    calibration_error: float
    calibration_bins: int
    auroc: float | None
    num_images: int
    num_bad: int
    image_size: int
    flip_tta: bool
    classes: tuple[ClassFigures, ...]
    confusion: Tensor
    predictions: ImagePredictions
    num_trained_on: int = 0
    counts_trained_on: bool = False
    members: tuple[MemberFigures, ...] = ()
    picture = "confusion matrix"
    """What `plot` draws."""

    @property
    def largest_class(self) -> ClassFigures:
        """The one with the most images: who always says it has its share as accuracy."""
        return max(self.classes, key=lambda one: one.support)

    def as_dict(self) -> dict[str, Any]:
        """All but the predictions, as JSON; None for what is not a number."""
        return {
            "loss": finite(self.loss),
            "accuracy": self.accuracy,
            "images": self.num_images,
            "bad_images": self.num_bad,
            "trained_on": self.num_trained_on,
            "counts_trained_on": self.counts_trained_on,
            "largest_class_share": self.largest_class.support / self.num_images,
            "top5_accuracy": self.top5_accuracy,
            "macro_precision": self.macro_precision,
            "macro_recall": self.macro_recall,
            "macro_f1": self.macro_f1,
            "calibration_error": finite(self.calibration_error),
            "calibration_bins": self.calibration_bins,
            "auroc": self.auroc,
            "image_size": self.image_size,
            "flip_tta": self.flip_tta,
            **members_in_json(self.members),
            "classes": [asdict(one) for one in self.classes],
            "confusion": self.confusion.tolist(),
        }

    def save_predictions(self, path: str | Path, *, force: bool = False) -> None:
        """Write a CSV file with a row per image; see `predictions_file`."""
        columns = ["path", "label", *Ranking.columns(self.predictions.ranked.shape[1])]
        with predictions_file(Path(path), columns, force=force) as add:
            for image, label, pairs in self.predictions:
                add([image, label, *Ranking(pairs).cells()])

    def plot(self, path: str | Path, *, force: bool = False) -> None:
        """Draw the confusion matrix, as `plot_confusion`."""
        self.plot_confusion(path, force=force)

    def plot_confusion(self, path: str | Path, *, force: bool = False) -> None:
        """Draw the confusion matrix; see `flambeau.trainer.evaluation.confusion_plot`."""
        names = [one.name for one in self.classes]
        plot_confusion(self.confusion, names, Path(path), force=force)

    def _repr_html_(self) -> str:
        figures = {
            "images": self.num_images,
            "loss": self.loss,
            "accuracy": self.accuracy,
            "top-5 accuracy": self.top5_accuracy,
            "macro F1": self.macro_f1,
            "calibration error": self.calibration_error,
            "AUROC": self.auroc,
        }
        rows = [[one.name, one.precision, one.recall, one.f1, one.support] for one in self._shown()]
        heads = ["class", "precision", "recall", "F1", "images"]
        return html_table("evaluation", figures) + html_grid(heads, rows)

    def __repr__(self) -> str:
        shown = [self._figures(), self._class_table()]
        if len(self.classes) <= _SHOWN:
            shown.append(self._confusion_table())
        elif self.accuracy < 1:
            shown.append(self._worst_confusions())
        return "\n\n".join(shown)

    def _figures(self) -> str:
        left_out = f", {self.num_bad} left out" if self.num_bad else ""
        flipped = ", averaged with their mirror images" if self.flip_tta else ""
        largest = self.largest_class
        share = largest.support / self.num_images
        rows = [
            [
                "images",
                f"{self.num_images}{left_out}, {self.image_size} x {self.image_size}{flipped}",
            ],
            ["loss", f"{self.loss:.4f}"],
            ["accuracy", f"{self.accuracy:.4f}  (always {largest.name!r}: {share:.4f})"],
        ]
        if self.num_trained_on:
            done = "are among them" if self.counts_trained_on else "are left out; --all counts them"
            rows.insert(1, ["trained on", f"{self.num_trained_on} {done}"])
        if self.top5_accuracy is not None:
            rows.append(["top-5 accuracy", f"{self.top5_accuracy:.4f}"])
        rows += [
            ["macro precision", f"{self.macro_precision:.4f}"],
            ["macro recall", f"{self.macro_recall:.4f}"],
            ["macro F1", f"{self.macro_f1:.4f}"],
            ["calibration error", f"{self.calibration_error:.4f} ({self.calibration_bins} bins)"],
        ]
        if self.auroc is not None:
            rows.append(["AUROC", f"{self.auroc:.4f}"])
        rows += member_rows(self.members)
        return text_table([], rows, left=2, longest=200)

    def _shown(self) -> Sequence[ClassFigures]:
        """All classes, or of many the worst."""
        worst = sorted(self.classes, key=lambda one: math.inf if one.f1 is None else one.f1)
        return worst[:_SHOWN] if len(worst) > _SHOWN else self.classes

    def _class_table(self) -> str:
        shown = self._shown()
        title = ""
        if len(shown) < len(self.classes):
            title = f"the {_SHOWN} classes with the lowest F1, of {len(self.classes)}\n"
        rows = [
            [
                one.name,
                four_digits(one.precision),
                four_digits(one.recall),
                four_digits(one.f1),
                str(one.support),
            ]
            for one in shown
        ]
        return title + text_table(["class", "precision", "recall", "F1", "images"], rows, left=1)

    def _confusion_table(self) -> str:
        names = [one.name for one in self.classes]
        head = names
        if max(map(len, names)) > 8:  # long names only before the rows
            names = [f"{name} ({k})" for k, name in enumerate(names)]
            head = [f"({k})" for k in range(len(names))]
        rows = [
            [name, *map(str, row)] for name, row in zip(names, self.confusion.tolist(), strict=True)
        ]
        title = "confusion matrix: a row per label, a column per predicted class\n"
        return title + text_table(["", *head], rows, left=1)

    def _worst_confusions(self) -> str:
        wrong = self.confusion.clone().fill_diagonal_(0)
        labels, predicted = wrong.nonzero(as_tuple=True)
        counts, order = wrong[labels, predicted].sort(descending=True, stable=True)
        rows = []
        for count, pair in zip(counts[:_SHOWN].tolist(), order[:_SHOWN].tolist(), strict=True):
            label = self.classes[int(labels[pair])]
            other = self.classes[int(predicted[pair])].name
            rows.append([label.name, other, str(count), f"{count / label.support:.1%}"])
        title = f"the most frequent confusions, of {len(counts)}\n"
        return title + text_table(["label", "predicted", "images", "of the class"], rows, left=2)
