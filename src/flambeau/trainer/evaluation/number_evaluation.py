"""The figures of an evaluation of predicted numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from flambeau.errors import InputError
from flambeau.html_table import html_grid, html_table
from flambeau.trainer.evaluation.answers import NumberAnswer
from flambeau.trainer.evaluation.number_figures import NumberFigures, figures_of_column
from flambeau.trainer.evaluation.predictions_file import predictions_file
from flambeau.trainer.evaluation.reading import Reading
from flambeau.trainer.evaluation.target_plots import plot_numbers
from flambeau.trainer.evaluation.text_table import finite, four_digits, text_table


@dataclass(frozen=True, repr=False, eq=False)
class NumberPredictions:
    """The predictions of each evaluated image, in the order of the data and in its units.

    Attributes:
        indices: (N,) int64, positions in the data.
        numbers: (N, K) float32, NaN where one is missing.
    """

    names: Sequence[str]
    indices: Tensor
    numbers: Tensor
    predicted: Tensor
    describe: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[str, dict[str, float], NumberAnswer]]:
        """For each image its name, its numbers by column (NaN: missing), and the answer of the model."""
        rows = zip(
            self.indices.tolist(), self.numbers.tolist(), self.predicted.tolist(), strict=True
        )
        for index, numbers, predicted in rows:
            answer = NumberAnswer(dict(zip(self.names, predicted, strict=True)))
            yield self.describe(index), dict(zip(self.names, numbers, strict=True)), answer

    def __repr__(self) -> str:
        return f"<predictions of {len(self)} images>"


@dataclass(frozen=True, repr=False, eq=False)
class NumberEvaluation:
    """The result of `evaluate` for numbers, for `print`.

    Attributes:
        loss: the training's, of standardized numbers.
    """

    loss: float
    reading: Reading
    predictions: NumberPredictions
    picture = "predicted and given numbers"
    """What `plot` draws."""

    @cached_property
    def columns(self) -> tuple[NumberFigures, ...]:
        """The figures of each column, in its unit."""
        said = self.predictions
        columns = zip(said.names, said.predicted.T, said.numbers.T, strict=True)
        return tuple(figures_of_column(*column) for column in columns)

    @property
    def num_images(self) -> int:
        """Counted, each once."""
        return self.reading.num_images

    def as_dict(self) -> dict[str, Any]:
        """All but the predictions, as JSON; None for what is not a number."""
        return {
            "task": "regression",
            "loss": finite(self.loss),
            **self.reading.as_dict(),
            "columns": [asdict(one) for one in self.columns],
        }

    def save_predictions(self, path: str | Path, *, force: bool = False) -> None:
        """Write a CSV file: path, the numbers, and the predicted ones."""
        names = self.predictions.names
        columns = ["path", *names, *NumberAnswer.columns(names)]
        with predictions_file(Path(path), columns, force=force) as add:
            for image, numbers, answer in self.predictions:
                given = [f"{value:.7g}" if value == value else "" for value in numbers.values()]
                add([image, *given, *answer.cells()])

    def plot(self, path: str | Path, *, force: bool = False) -> None:
        """Draw the predicted numbers against the given ones."""
        said = self.predictions
        plot_numbers(said.numbers, said.predicted, said.names, Path(path), force=force)

    def plot_confusion(self, path: str | Path, *, force: bool = False) -> None:
        """Refused with InputError: numbers are not confused."""
        raise InputError(
            f"{path}: numbers have no confusion matrix\n"
            "Give .plot, which draws the predicted numbers against the given ones"
        )

    def _repr_html_(self) -> str:
        figures = {"images": self.num_images, "loss": self.loss}
        rows = [
            [one.name, _number(one.mae), _number(one.rmse), one.r2, one.spearman, one.num_images]
            for one in self.columns
        ]
        heads = ["column", "mean abs. error", "RMSE", "R2", "Spearman", "images"]
        return html_table("evaluation of numbers", figures) + html_grid(heads, rows)

    def __repr__(self) -> str:
        rows = [*self.reading.rows(), ["loss", f"{self.loss:.4f}"]]
        table = [
            [
                one.name,
                _number(one.mae),
                _number(one.rmse),
                four_digits(one.r2),
                four_digits(one.spearman),
                str(one.num_images),
            ]
            for one in self.columns
        ]
        heads = ["column", "mean abs. error", "RMSE", "R2", "Spearman", "images"]
        shown = text_table(heads, table, left=1)
        return f"{text_table([], rows, left=2, longest=200)}\n\n{shown}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"
