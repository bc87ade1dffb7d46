"""Images of one class each: labels (N,) int64, logits (N, C).

N: images, C: classes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from flambeau.data.sources.source import Source
from flambeau.recipes.training.auroc import AUROC
from flambeau.recipes.training.calibration_error import CalibrationError
from flambeau.recipes.training.confusion_matrix import ConfusionMatrix
from flambeau.recipes.training.distillation import distillation_loss
from flambeau.recipes.training.label_smoothing import cross_entropy
from flambeau.recipes.training.metrics import MeanOnDevice, correct
from flambeau.run.loop.sample_results import (
    SampleResults,
    SampleResultsMetric,
    evaluation_facts,
    results_of_classes,
)
from flambeau.trainer.evaluation.answers import Ranking, Size, answers_table
from flambeau.trainer.evaluation.evaluation_result import ClassFigures, Evaluation, ImagePredictions
from flambeau.trainer.evaluation.sample_history import SampleHistory, recorded_losses
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.tasks.export_words import ExportWords
from flambeau.trainer.tasks.task import joined
from flambeau.trainer.tasks.whole_image import WholeImage

_TOP = 5
_MAX_SUSPECTS = 12  # labels that look wrong, in the report
# Classes: of more, the table (8 bytes a cell) is kept on the host; chosen, untested.
_ON_DEVICE = 4096
_TEMPERATURES = (0.05, 20.0)
_SEARCH_STEPS = 60  # each leaves 0.62 of the interval: far below what a data set can tell


@dataclass(frozen=True)
class Classification(WholeImage):
    """The task of `flambeau train`; see `Task` for what the methods are for."""

    classes: tuple[str, ...]

    losses: ClassVar = ("cross-entropy",)
    best_figures: ClassVar = ("val_accuracy", "val_loss", "val_macro_f1", "val_macro_recall")
    main_figure: ClassVar = "val_accuracy"
    default_smoothing: ClassVar = 0.1
    export_words: ClassVar = ExportWords(
        outputs_are="classes",
        cpp_name="CLASSES",
        answer="probabilities",
        answer_how="softmax of the logits",
        compared="probabilities",
        of_logits="logits.softmax(0)",
        example_lines="""\
    best = probabilities.argmax()
    print(f"{file}: {preprocessing.classes[best]} {probabilities[best]:.6f}")
""",
    )
    lr_share: ClassVar = 1.0
    refuses: ClassVar[Mapping[str, str]] = {}

    @staticmethod
    def target_facts(train: Source) -> dict[str, Any]:
        return {}

    @staticmethod
    def balanced_weights(train: Source) -> list[float]:
        """scikit-learn's 'balanced': N / (C * n) for a class with n of the N images; 1 on average."""
        counts = torch.bincount(train.labels, minlength=len(train.classes))
        there = int((counts > 0).sum())
        return [len(train.labels) / (there * n) if n else 1.0 for n in counts.tolist()]

    @staticmethod
    def target_lines(train: Source, settings: Settings) -> list[str]:
        return class_lines(settings, train.labels, train.classes)

    @property
    def num_outputs(self) -> int:
        return len(self.classes)

    def loss(
        self, outputs: Tensor, targets: Tensor, *, smoothing: float, weight: Tensor | None
    ) -> Tensor:
        """Cross-entropy with labels (N,), or with probabilities (N, C) of mixed images."""
        return cross_entropy(outputs, targets, smoothing=smoothing, weight=weight)

    def distillation_loss(self, outputs: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
        """The divergence of the softened probabilities."""
        return distillation_loss(outputs, teacher, temperature=temperature)

    def training_figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Whether each image was classified correctly."""
        return {"train_accuracy": correct(outputs, targets)}

    def evaluation_figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """The loss of each image, without smoothing, and whether it was classified correctly."""
        losses = cross_entropy(outputs, targets, reduction="none")
        return {"val_loss": losses, "val_accuracy": correct(outputs, targets)}

    def history(self, num_samples: int, *, fingerprint: str, device: torch.device) -> SampleHistory:
        """The losses of each image, from which suspect labels are found."""

        def losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            other = logits.scatter(1, targets[:, None], -torch.inf).argmax(1)
            return cross_entropy(logits, targets, reduction="none"), other

        return SampleHistory(num_samples, fingerprint=fingerprint, device=device, losses=losses)

    def sample_results(self, best: str) -> SampleResultsMetric[SampleResults]:
        """The most probable class of each image, its probability, and that of the label."""
        name = best.removeprefix("val_")

        def figures(results: SampleResults) -> dict[str, float]:
            if not name.startswith("macro_"):
                return {}
            matrix = ConfusionMatrix(len(self.classes))
            matrix.update(results.predicted, results.targets)
            return {name: float(matrix.compute()[name])}

        return results_of_classes(figures)

    def report_facts(
        self, results: SampleResults, *, step: int, describe: Callable[[int], str]
    ) -> dict[str, Any]:
        """Counts of classes, confusions, calibration, mistakes and uncertain images."""
        return evaluation_facts(results, self.classes, step=step, describe=describe)

    def suspects(self, run: Path, train: Source) -> list[dict[str, Any]]:
        """The images whose label the model found less likely than a guess, averaged over the training."""
        labels = train.labels.tolist()
        return [
            {
                "index": one.number,
                "image": one.image,
                "label": labels[one.number],
                "predicted": one.other if one.other < len(self.classes) else labels[one.number],
                "probability": 0.0,
                "of_label": math.exp(-one.loss),
            }
            for one in recorded_losses(run, train, most=_MAX_SUSPECTS) or []
            if one.loss > math.log(len(self.classes))
        ]

    def mean_of_views(self, outputs: Tensor, mirrored: Tensor) -> Tensor:
        """The logarithm of the mean probabilities."""
        both = torch.logaddexp(outputs.log_softmax(1), mirrored.log_softmax(1))
        return both - math.log(2)

    def mean_of_models(self, outputs: Sequence[Tensor]) -> Tensor:
        """The logarithm of the mean probabilities."""
        each = torch.stack([one.float().log_softmax(1) for one in outputs])
        return each.logsumexp(0) - math.log(len(outputs))

    def counters(self, device: torch.device, source: Source) -> "ClassCounters":
        """Confusion matrix, calibration, AUROC and the best classes of each image."""
        return ClassCounters.of(self.classes, device)

    def decode(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def shown_figure(self, value: float) -> str:
        return f"{value:.2%}"

    def agrees(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Whether the most probable class is the same."""
        return outputs.argmax(1) == reference.argmax(1)

    def export_facts(self, outputs: Tensor, targets: Tensor | None) -> Mapping[str, Any]:
        """The names of the classes, and the temperature that calibrates the probabilities."""
        return {
            "classes": list(self.classes),
            "temperature": None if targets is None else fitted_temperature(outputs, targets),
        }

    def predictions(self, batches: Iterable[tuple[Tensor, Sequence[Size]]]) -> "Predictions":
        return Predictions(self.classes, joined(batches, self.num_outputs))

    def answers(self, outputs: Tensor, sizes: Sequence[Size], *, top: int) -> Sequence[Ranking]:
        return [Ranking(pairs) for pairs in rankings(outputs, self.classes, top)]

    def answer_columns(self, *, top: int) -> list[str]:
        return Ranking.columns(min(top, len(self.classes)))


@dataclass(frozen=True, repr=False, eq=False)
class Predictions:
    """What a model says of N images: logits (N, C) float32 on the CPU, and the names in their order.

    Attributes:
        sets: classes of each image's prediction set, the most probable first; None without `flambeau evaluate
            --calibrate --coverage`.
    """

    names: tuple[str, ...]
    logits: Tensor
    sets: tuple[tuple[str, ...], ...] | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The most probable class of each image."""
        return tuple(self.names[k] for k in self.logits.argmax(1).tolist())

    @property
    def probabilities(self) -> Tensor:
        """(N, C) float32 on the CPU."""
        return self.logits.softmax(1)

    def top(self, num: int = 5) -> list[list[tuple[str, float]]]:
        """Of each image the most probable classes as (class, probability), at most all."""
        return rankings(self.logits, self.names, num)

    def __len__(self) -> int:
        return len(self.logits)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """(class, probability) of each image."""
        for [best] in self.top(1):
            yield best

    def _repr_html_(self) -> str:
        pairs = (", ".join(f"{name} {share:.1%}" for name, share in best) for best in self.top(3))
        return answers_table(pairs)

    def __repr__(self) -> str:
        shown = [f"{name!r} {share:.1%}" for name, share in list(self)[:10]]
        return f"Predictions({', '.join(shown)}{', ...' if len(self) > 10 else ''})"


def rankings(logits: Tensor, classes: Sequence[str], top: int) -> list[list[tuple[str, float]]]:
    """The most probable classes of each of (N, C) logits."""
    # By logits: two probabilities may be rounded to the same number.
    best = logits.topk(min(top, len(classes))).indices
    shares = logits.softmax(1).gather(1, best)
    return [
        [(classes[label], share) for label, share in zip(*row, strict=True)]
        for row in zip(best.tolist(), shares.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class ClassCounters:
    """What is counted of each batch, on the device of the model."""

    names: tuple[str, ...]
    loss: MeanOnDevice
    top5: MeanOnDevice
    confusion: ConfusionMatrix
    calibration: CalibrationError
    auroc: AUROC
    labels: list[Tensor]
    ranked: list[Tensor]
    probabilities: list[Tensor]
    indices: list[int]

    @classmethod
    def of(cls, names: tuple[str, ...], device: torch.device) -> "ClassCounters":
        table_device = device if len(names) <= _ON_DEVICE else torch.device("cpu")
        return cls(
            names,
            loss=MeanOnDevice(device),
            top5=MeanOnDevice(device),
            confusion=ConfusionMatrix(len(names), device=table_device),
            calibration=CalibrationError(device=device),
            auroc=AUROC(),
            labels=[],
            ranked=[],
            probabilities=[],
            indices=[],
        )

    def update(self, outputs: Tensor, targets: Tensor, indices: Sequence[int]) -> None:
        """Count a batch: (N, C) logits, (N,) labels and the positions of the images."""
        logits = outputs
        on_device = targets.to(logits.device)
        self.loss.update(cross_entropy(logits, on_device, reduction="none"))
        predicted = logits.argmax(1).to(self.confusion.device)
        self.confusion.update(predicted, targets.to(self.confusion.device))
        self.calibration.update(logits, on_device)
        if len(self.names) > _TOP:
            self.top5.update(correct(logits, on_device, k=_TOP))
        elif len(self.names) == 2:
            self.auroc.update(logits, on_device)
        ranked = logits.topk(min(_TOP, len(self.names))).indices
        self.ranked.append(ranked)
        self.probabilities.append(logits.softmax(1).gather(1, ranked))
        self.labels.append(targets)
        self.indices.extend(indices)

    def evaluation(self, *, describe: Callable[[int], str], **facts: Any) -> Evaluation:
        total = {name: float(value) for name, value in self.confusion.compute().items()}
        each = {name: value.tolist() for name, value in self.confusion.per_class().items()}
        auroc = float(self.auroc.compute()) if len(self.names) == 2 else None
        predictions = ImagePredictions(
            self.names,
            torch.tensor(self.indices),
            torch.cat(self.labels),
            torch.cat(self.ranked).cpu(),
            torch.cat(self.probabilities).cpu(),
            describe,
        )
        return Evaluation(
            loss=float(self.loss.compute()),
            accuracy=total["accuracy"],
            top5_accuracy=float(self.top5.compute()) if len(self.names) > _TOP else None,
            macro_precision=total["macro_precision"],
            macro_recall=total["macro_recall"],
            macro_f1=total["macro_f1"],
            calibration_error=float(self.calibration.compute()),
            calibration_bins=self.calibration.num_bins,
            auroc=None if auroc is None or math.isnan(auroc) else auroc,
            num_images=len(predictions),
            classes=tuple(_class_figures(name, k, each) for k, name in enumerate(self.names)),
            confusion=self.confusion.counts.cpu(),
            predictions=predictions,
            **facts,
        )


def _class_figures(name: str, number: int, each: dict[str, list[Any]]) -> ClassFigures:
    def figure(what: str) -> float | None:
        value: float = each[what][number]
        return None if math.isnan(value) else value

    return ClassFigures(
        name,
        precision=figure("precision"),
        recall=figure("recall"),
        f1=figure("f1"),
        support=each["support"][number],
        predicted=each["predicted"][number],
    )


def fitted_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T from 0.05 to 20 of the least cross-entropy of softmax(logits / T); above 1 if the model is too
    sure.

    It is convex in 1 / T, so a golden-section search finds it.
    Source: Guo et al., "On calibration of modern neural networks", ICML 2017, section 4.2.
    """
    logits = logits.double()

    def loss(inverse: float) -> float:
        return float(cross_entropy(logits * inverse, labels))

    low = 1 / _TEMPERATURES[1]
    high = 1 / _TEMPERATURES[0]
    golden = (5**0.5 - 1) / 2
    for _ in range(_SEARCH_STEPS):
        left = high - golden * (high - low)
        right = low + golden * (high - low)
        low, high = (low, right) if loss(left) <= loss(right) else (left, high)
    return 2 / (low + high)


_UNEVEN = 5  # ratio of the largest to the smallest class from which a line says so; chosen
_LISTED = 12  # classes, with their counts


def class_lines(settings: Settings, labels: Tensor, classes: Sequence[str]) -> list[str]:
    """The number of training images per class, and what can be done if that is uneven."""
    counts = torch.bincount(labels, minlength=len(classes))
    by_count = sorted(zip(counts.tolist(), classes, strict=True), key=lambda one: -one[0])
    (most, largest), (least, smallest) = by_count[0], by_count[-1]
    if most == least:
        return [f"{len(classes)} classes of {most} training images each"]
    if len(classes) <= _LISTED:
        lines = ["training images: " + ", ".join(f"{name} {n}" for n, name in by_count)]
    else:
        lines = [
            f"{len(classes)} classes of {least} ({smallest}) to {most} ({largest}) training images"
        ]
    without = [name for n, name in by_count if not n]
    if without:
        more = f" and {len(without) - _LISTED} more" if len(without) > _LISTED else ""
        lines.append(f"no training image of {', '.join(without[:_LISTED])}{more}")
    rarest, name = next((n, name) for n, name in reversed(by_count) if n)
    is_unbalanced = settings.balance == "none" and settings.class_weights is None
    if most >= _UNEVEN * rarest and is_unbalanced:
        lines.append(
            f"the classes are uneven: {largest} has {most / rarest:.0f} times the images of {name}; "
            "--balance sqrt (or full) draws rare ones more often, --class-weights auto weighs them more"
        )
    return lines
