"""The figures of an evaluation of predicted masks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from flambeau.html_table import html_grid, html_table
from flambeau.trainer.evaluation.confusion_plot import plot_confusion
from flambeau.trainer.evaluation.mask_figures import MaskCounts, mean_of_defined
from flambeau.trainer.evaluation.predictions_file import predictions_file
from flambeau.trainer.evaluation.reading import Reading
from flambeau.trainer.evaluation.text_table import finite, four_digits, text_table

_SHOWN = 40  # classes; if there are more, the text shows the worst ones


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One class of an evaluation of masks; None where undefined.

    Attributes:
        iou: intersection over union of its pixels, over all images.
        dice: F1 of its pixels.
        accuracy: share of its pixels that were predicted as it.
        boundary_f1: mean over the images in which it has a boundary.
        pixels, predicted: known pixels of it, and predicted as it.
        images: with it.
    """

    name: str
    iou: float | None
    dice: float | None
    accuracy: float | None
    boundary_f1: float | None
    pixels: int
    predicted: int
    images: int


@dataclass(frozen=True, repr=False, eq=False)
class MaskPredictions:
    """What was counted of each evaluated image, in the order of the data.

    Attributes:
        indices: (N,) int64, positions in the data.
        losses: (N,) float32.
        boundary_f1: (N, K) float32, NaN where a class has no boundary.
    """

    names: Sequence[str]
    indices: Tensor
    counts: MaskCounts
    losses: Tensor
    boundary_f1: Tensor
    describe: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[str, float, float]]:
        """For each image its name, its mean intersection over union, and its loss."""
        rows = zip(
            self.indices.tolist(),
            self.counts.image_iou.tolist(),
            self.losses.tolist(),
            strict=True,
        )
        for index, iou, loss in rows:
            yield self.describe(index), iou, loss

    def __repr__(self) -> str:
        return f"<predictions of {len(self)} images>"


@dataclass(frozen=True, repr=False, eq=False)
class MaskEvaluation:
    """The result of `evaluate` for masks, at the size of their images, for `print`.

    Ignored pixels count in no figure.

    Attributes:
        loss: mean cross-entropy, at the model's input size.
        confusion: (K, K) int64, pixels by class and predicted class.
    """

    loss: float
    reading: Reading
    predictions: MaskPredictions
    confusion: Tensor
    picture = "confusion matrix of the pixels"
    """What `plot` draws."""

    @cached_property
    def classes(self) -> tuple[ClassFigures, ...]:
        """The figures of each class, in the order of the model's outputs."""
        counts = self.predictions.counts
        columns = zip(
            self.predictions.names,
            counts.iou.tolist(),
            counts.dice.tolist(),
            counts.accuracy.tolist(),
            self.predictions.boundary_f1.double().nanmean(0).tolist(),
            counts.there.sum(0).tolist(),
            counts.predicted.sum(0).tolist(),
            (counts.there > 0).sum(0).tolist(),
            strict=True,
        )
        return tuple(
            ClassFigures(
                name,
                iou=finite(iou),
                dice=finite(dice),
                accuracy=finite(accuracy),
                boundary_f1=finite(boundary),
                pixels=pixels,
                predicted=predicted,
                images=images,
            )
            for name, iou, dice, accuracy, boundary, pixels, predicted, images in columns
        )

    @property
    def miou(self) -> float:
        """Mean intersection over union, over the classes that are in a mask or a prediction."""
        return mean_of_defined(self.predictions.counts.iou)

    @property
    def dice(self) -> float:
        """Mean F1 of the pixels, over the same classes."""
        return mean_of_defined(self.predictions.counts.dice)

    @property
    def pixel_accuracy(self) -> float:
        """Share of the known pixels that are right."""
        return self.predictions.counts.pixel_accuracy

    @property
    def boundary_f1(self) -> float:
        """How well boundaries agree: the mean over images of each class, then over classes."""
        return mean_of_defined(self.predictions.boundary_f1.double().nanmean(0))

    @property
    def num_images(self) -> int:
        """Counted, each once."""
        return self.reading.num_images

    def as_dict(self) -> dict[str, Any]:
        """All but the predictions, as JSON; None for what is not a number."""
        return {
            "task": "segmentation",
            "loss": finite(self.loss),
            "miou": finite(self.miou),
            "dice": finite(self.dice),
            "pixel_accuracy": finite(self.pixel_accuracy),
            "boundary_f1": finite(self.boundary_f1),
            **self.reading.as_dict(),
            "classes": [asdict(one) for one in self.classes],
        }

    def save_predictions(self, path: str | Path, *, force: bool = False) -> None:
        """Write a CSV file: path, mean intersection over union and loss of each image."""
        with predictions_file(Path(path), ["path", "iou", "loss"], force=force) as add:
            for image, iou, loss in self.predictions:
                add([image, "" if iou != iou else f"{iou:.6f}", f"{loss:.6f}"])

    def plot(self, path: str | Path, *, force: bool = False) -> None:
        """Draw the confusion matrix, as `plot_confusion`."""
        self.plot_confusion(path, force=force)

    def plot_confusion(self, path: str | Path, *, force: bool = False) -> None:
        """Write the confusion matrix of the pixels as a picture."""
        plot_confusion(self.confusion, self.predictions.names, Path(path), force=force)

    def _repr_html_(self) -> str:
        figures = {
            "images": self.num_images,
            "loss": self.loss,
            "mean IoU": finite(self.miou),
            "mean Dice": finite(self.dice),
            "pixel accuracy": finite(self.pixel_accuracy),
            "boundary F1": finite(self.boundary_f1),
        }
        heads = ("class", "IoU", "Dice", "accuracy", "boundary F1", "images")
        rows = [
            (one.name, one.iou, one.dice, one.accuracy, one.boundary_f1, one.images)
            for one in self._worst()
        ]
        return html_table("evaluation of masks", figures) + html_grid(heads, rows)

    def __repr__(self) -> str:
        rows = [
            *self.reading.rows(),
            ["loss", f"{self.loss:.4f}"],
            ["mean IoU", four_digits(finite(self.miou))],
            ["mean Dice", four_digits(finite(self.dice))],
            ["pixel accuracy", four_digits(finite(self.pixel_accuracy))],
            ["boundary F1", four_digits(finite(self.boundary_f1))],
        ]
        return f"{text_table([], rows, left=2, longest=200)}\n\n{self._class_table()}"

    def _worst(self) -> Sequence[ClassFigures]:
        """All classes, or of many those with the lowest intersection over union."""
        if len(self.classes) <= _SHOWN:
            return self.classes
        return sorted(self.classes, key=lambda one: (one.iou is None, one.iou))[:_SHOWN]

    def _class_table(self) -> str:
        shown = self._worst()
        many = f"the {_SHOWN} classes with the lowest IoU, of {len(self.classes)}\n"
        title = many if len(self.classes) > _SHOWN else ""
        rows = [
            [
                one.name,
                four_digits(one.iou),
                four_digits(one.dice),
                four_digits(one.accuracy),
                four_digits(one.boundary_f1),
                str(one.pixels),
                str(one.images),
            ]
            for one in shown
        ]
        heads = ["class", "IoU", "Dice", "accuracy", "boundary F1", "pixels", "images"]
        return title + text_table(heads, rows, left=1)
