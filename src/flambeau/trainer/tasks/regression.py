"""Numbers: targets (N, K) float32 in the unit of the data, NaN where one is missing; outputs standardized.

N: images, K: columns.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.data.sources.source import Source
from flambeau.run.loop.sample_results import SampleResultsMetric
from flambeau.trainer.evaluation.answers import NumberAnswer, Size, answers_table
from flambeau.trainer.evaluation.number_evaluation import NumberEvaluation, NumberPredictions
from flambeau.trainer.evaluation.number_figures import figures_of_column, mean_figure
from flambeau.trainer.evaluation.reading import Reading
from flambeau.trainer.evaluation.sample_history import SampleHistory, recorded_losses
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.tasks.export_words import ExportWords
from flambeau.trainer.tasks.task import joined
from flambeau.trainer.tasks.whole_image import (
    KeptBatches,
    WholeImage,
    constants,
    known_facts,
    mean_of_known_targets,
)

_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
}
_PICTURES = 12  # of the images with the highest loss
_MAX_SUSPECTS = 12
_FAR = 9.0  # squared standard deviations from which on a number looks wrong; chosen
_MAX_POINTS = 2000  # of the scatter in the report
_SAME = 0.01  # standard deviations within which two predictions agree; chosen


@dataclass(frozen=True)
class Regression(WholeImage):
    """Numbers of each image; see `Task` for what the methods are for.

    Attributes:
        mean, std: of the training images, by column.
        known: share of the training images that have each number; None: all.
        kind: loss of training and evaluation.
        is_whole: an evaluation shows the whole image; in earlier versions its middle.
    """

    columns: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    known: tuple[float, ...] | None = None
    kind: str = "mse"
    is_whole: bool = False

    losses: ClassVar = tuple(_LOSSES)
    best_figures: ClassVar = ("val_loss", "val_mae", "val_rmse", "val_r2", "val_spearman")
    main_figure: ClassVar = "val_loss"
    default_smoothing: ClassVar = 0.0
    default_optimizer: ClassVar = "adamw"
    # Mean error of an angle and of a count after 6 epochs of small_convnet at a batch of 64, on 1,000 images
    # of bench/learning_other_tasks.py, one run each: 19.8 and 0.090 by sgd at its rate; by adamw 21.4 and
    # 0.124 at 0.00025, 16.4 and 0.077 at 0.001, 14.8 and 0.066 at 0.002, which this gives, 14.2 and 0.061 at
    # 0.004. Of resnet18 after 4 epochs: 28.9 by sgd, 23.0 by adamw. The root: Malladi et al., "On the SDEs
    # and scaling rules for adaptive gradient algorithms", NeurIPS 2022.
    adam_lr_share: ClassVar[float | None] = 4.0
    crop_scale: ClassVar = 1.0
    mirrors: ClassVar = False
    export_words: ClassVar = ExportWords(
        outputs_are="numbers",
        cpp_name="NUMBERS",
        answer="values",
        answer_how="the logits in the unit of the data",
        compared="values",
        of_logits="logits.numpy() * preprocessing.target_std + preprocessing.target_mean",
        example_lines="""\
    numbers = [f"{name} {value:.6g}" for name, value in zip(preprocessing.classes, values)]
    print(f"{file}: {', '.join(numbers)}")
""",
    )
    # The gradient of a squared error grows with the error: at the rate of classes small_convnet diverges, and
    # at 0.1, 0.25 and 0.5 of it R2 is 0.98, 0.94 and 0.42 after 4 epochs (2,700 images of 56 px, one run).
    lr_share: ClassVar = 0.1
    refuses: ClassVar[Mapping[str, str]] = {
        "balance": "there are no classes to draw more often",
        "class_weights": "there are no classes to weigh",
        "label_smoothing": "numbers are not smoothed",
        "cutmix": "a number of a whole image does not follow from pieces of two; --mixup averages both",
    }

    @staticmethod
    def target_facts(train: Source) -> dict[str, Any]:
        """Mean and standard deviation of each column, and which share is known."""
        facts = known_facts(train) | {"whole_images": True}
        given = [column[column.isfinite()].double() for column in train.labels.T]
        facts["target_mean"] = [float(values.mean()) for values in given]
        facts["target_std"] = [float(values.std(correction=0)) for values in given]
        return facts

    @staticmethod
    def balanced_weights(train: Source) -> list[float]:
        """There is nothing to balance: `class_weights` is refused before."""
        raise AssertionError("numbers have no classes")

    @staticmethod
    def target_lines(train: Source, settings: Settings) -> list[str]:
        lines = []
        for name, column in zip(train.classes, train.labels.T, strict=True):
            given = column[column.isfinite()].double()
            missing = len(column) - len(given)
            left = f"; {missing} images have none" if missing else ""
            lines.append(
                f"numbers to learn, {name}: {given.min():.6g} to {given.max():.6g}, mean {given.mean():.6g}, "
                f"standard deviation {given.std(correction=0):.6g}{left}"
            )
        if not settings.flip and settings.crop_scale in (None, 1.0) and not settings.padding:
            lines.append(
                "whole images, as a mirror image or a part may have other numbers: if yours stay the same, "
                f"--flip and {'--crop-scale 0.25' if settings.crop_scale else '--padding 4'} vary them"
            )
        return lines

    @property
    def num_outputs(self) -> int:
        return len(self.columns)

    def loss(
        self, outputs: Tensor, targets: Tensor, *, smoothing: float, weight: Tensor | None
    ) -> Tensor:
        """Mean loss of the standardized numbers; `smoothing` and `weight` are refused before."""
        return self._losses(outputs, targets).mean()

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(N,) float32."""
        wanted = self._standardized(targets)
        each = _LOSSES[self.kind](outputs.float(), wanted.nan_to_num(), reduction="none")
        return mean_of_known_targets(each, targets, self.known)

    def _standardized(self, targets: Tensor) -> Tensor:
        mean, std = (constants(one, targets.device) for one in (self.mean, self.std))
        return (targets - mean) / std

    def shared(self, outputs: Tensor) -> Tensor:
        """Numbers in the unit of the data: each model standardizes by its own training images."""
        return self.decode(outputs)

    def of_shared(self, outputs: Tensor) -> Tensor:
        """Standardized numbers."""
        return self._standardized(outputs)

    def training_figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return {}

    def evaluation_figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return {"val_loss": self._losses(outputs, targets)}

    def distillation_loss(self, outputs: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
        """The loss with the teacher's numbers in place of those of the data."""
        return _LOSSES[self.kind](outputs.float(), teacher.float())

    def history(self, num_samples: int, *, fingerprint: str, device: torch.device) -> SampleHistory:
        """The squared error of each image, and the column with the largest."""

        def losses(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            error = (outputs.float() - self._standardized(targets)).square().nan_to_num()
            return error.amax(1), error.argmax(1)

        return SampleHistory(num_samples, fingerprint=fingerprint, device=device, losses=losses)

    def sample_results(self, best: str) -> SampleResultsMetric["NumberResults"]:
        """The numbers of each image, and the figures that are no means over images."""

        def keep(targets: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
            return targets, outputs.detach().float()

        def make(indices: Tensor, targets: Tensor, outputs: Tensor) -> NumberResults:
            return NumberResults(indices, targets, self.decode(outputs))

        def figures(results: NumberResults) -> dict[str, float]:
            columns = zip(self.columns, results.predicted.T, results.targets.T, strict=True)
            each = [figures_of_column(*column) for column in columns]
            return {name: mean_figure(each, name) for name in ("mae", "rmse", "r2", "spearman")}

        return SampleResultsMetric(keep, make, figures)

    def report_facts(
        self, results: "NumberResults", *, step: int, describe: Callable[[int], str]
    ) -> dict[str, Any]:
        """Figures of each column, points of the scatter, and the images with the largest error."""
        columns = zip(self.columns, results.predicted.T, results.targets.T, strict=True)
        figures = [figures_of_column(*column) for column in columns]
        error = self._standardized(results.predicted) - self._standardized(results.targets)
        distance = error.abs().nan_to_num().amax(1)
        worst = distance.argsort(descending=True, stable=True)[:_PICTURES].tolist()
        shown = torch.linspace(0, len(distance) - 1, min(_MAX_POINTS, len(distance))).long()
        return {
            "task": "regression",
            "step": step,
            "images": len(distance),
            "columns": [
                {
                    "name": one.name,
                    "images": one.num_images,
                    "mae": one.mae,
                    "rmse": one.rmse,
                    "r2": one.r2,
                    "spearman": one.spearman,
                    "points": _pairs(results.targets[shown, at], results.predicted[shown, at]),
                }
                for at, one in enumerate(figures)
            ],
            "mistakes": [
                {
                    "index": int(results.indices[row]),
                    "image": describe(int(results.indices[row])),
                    "label": self._text(results.targets[row]),
                    "predicted": self._text(results.predicted[row]),
                    "loss": round(float(distance[row]), 6),
                }
                for row in worst
            ],
            "unsure": [],
        }

    def _text(self, row: Tensor) -> str:
        given = zip(self.columns, row.tolist(), strict=True)
        return NumberAnswer({k: v for k, v in given if v == v}).as_text() or "-"

    def suspects(self, run: Path, train: Source) -> list[dict[str, Any]]:
        """The images whose numbers the model was far from, averaged over the training."""
        return [
            {
                "index": one.number,
                "image": one.image,
                "label": self._text(train.labels[one.number]),
                "predicted": f"{self.columns[one.other]}?",
                "loss": round(one.loss, 6),
            }
            for one in recorded_losses(run, train, most=_MAX_SUSPECTS) or []
            if one.loss > _FAR and one.other < len(self.columns)
        ]

    def mean_of_views(self, outputs: Tensor, mirrored: Tensor) -> Tensor:
        return (outputs + mirrored) / 2

    def mean_of_models(self, outputs: Sequence[Tensor]) -> Tensor:
        return torch.stack([*outputs]).mean(0)

    def counters(self, device: torch.device, source: Source) -> KeptBatches[NumberEvaluation]:
        return KeptBatches(self._losses, self._evaluation)

    def _evaluation(
        self,
        indices: Tensor,
        outputs: Tensor,
        targets: Tensor,
        *,
        loss: float,
        reading: Reading,
        describe: Callable[[int], str],
    ) -> NumberEvaluation:
        predictions = NumberPredictions(
            self.columns, indices, targets, self.decode(outputs), describe
        )
        return NumberEvaluation(loss, reading, predictions)

    def decode(self, outputs: Tensor) -> Tensor:
        """Numbers (N, K) in the unit of the data."""
        mean, std = (torch.tensor(one, device=outputs.device) for one in (self.mean, self.std))
        return outputs.float() * std + mean

    def agrees(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Whether all numbers differ by at most a hundredth of their standard deviation."""
        return ((outputs - reference).abs() <= _SAME).all(1)

    def export_facts(self, outputs: Tensor, targets: Tensor | None) -> Mapping[str, Any]:
        """The names of the columns, and what makes numbers of the outputs."""
        return {
            "task": "regression",
            "classes": [*self.columns],
            "target_mean": [*self.mean],
            "target_std": [*self.std],
        }

    def predictions(self, batches: Iterable[tuple[Tensor, Sequence[Size]]]) -> "NumberAnswers":
        """Numbers in the unit of the data."""
        return NumberAnswers(self.columns, self.decode(joined(batches, self.num_outputs)))

    def answers(
        self, outputs: Tensor, sizes: Sequence[Size], *, top: int
    ) -> Sequence[NumberAnswer]:
        return [*NumberAnswers(self.columns, self.decode(outputs.cpu()))]

    def answer_columns(self, *, top: int) -> list[str]:
        return NumberAnswer.columns(self.columns)


@dataclass(frozen=True)
class NumberResults:
    """One evaluation, in the order of the data and its units, (N, K); all on the CPU."""

    indices: Tensor
    targets: Tensor
    predicted: Tensor


@dataclass(frozen=True, repr=False, eq=False)
class NumberAnswers:
    """What a model says of N images: values (N, K) on the CPU, in the unit of the data."""

    names: tuple[str, ...]
    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[NumberAnswer]:
        for row in self.values.tolist():
            yield NumberAnswer(dict(zip(self.names, row, strict=True)))

    def _repr_html_(self) -> str:
        return answers_table(answer.as_text() for answer in self)

    def __repr__(self) -> str:
        shown = [repr(answer.as_text()) for answer in [*self][:10]]
        return f"NumberAnswers({', '.join(shown)}{', ...' if len(self) > 10 else ''})"


def _pairs(given: Tensor, predicted: Tensor) -> list[tuple[float, float]]:
    pairs = zip(given.tolist(), predicted.tolist(), strict=True)
    return [pair for pair in pairs if all(value == value for value in pair)]
