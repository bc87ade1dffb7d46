"""Images with any number of labels: targets (N, K) float32 of 1, 0 and NaN for unknown, logits (N, K).

N: images, K: labels. The asymmetric loss: Ridnik et al., "Asymmetric loss for multi-label classification",
ICCV 2021 (arXiv:2009.14119), equations 2 to 5, with its margin of 0.05 and focusing of 4 and 1 (section 4.1).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.data.sources.source import Source
from flambeau.data.sources.targets import separator_of
from flambeau.run.loop.sample_results import SampleResultsMetric
from flambeau.trainer.evaluation.answers import LabelAnswer, Size, answers_table
from flambeau.trainer.evaluation.label_evaluation import (
    LabelEvaluation,
    LabelPredictions,
    label_answers,
)
from flambeau.trainer.evaluation.label_figures import (
    average_precisions,
    best_thresholds,
    counted,
    mean_of_known,
)
from flambeau.trainer.evaluation.reading import Reading
from flambeau.trainer.evaluation.sample_history import SampleHistory, recorded_losses
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.tasks.export_words import ExportWords
from flambeau.trainer.tasks.task import joined
from flambeau.trainer.tasks.whole_image import (
    KeptBatches,
    WholeImage,
    known_facts,
    mean_of_known_targets,
)

_MARGIN = 0.05
_FOCUS = {True: 1.0, False: 4.0}  # exponents of labels that are there, and of those that are not
_PICTURES = 12  # of the images with the highest loss
_MAX_SUSPECTS = 12
_LISTED = 12  # labels, with their counts


@dataclass(frozen=True)
class Multilabel(WholeImage):
    """Several labels per image; see `Task` for what the methods are for.

    Attributes:
        thresholds: probability from which on a label is predicted; None: one half.
        known: share of the training images of which each label is known; None: all.
        kind: training loss; evaluations use the binary cross-entropy.
        is_whole: an evaluation shows the whole image; in earlier versions its middle.
    """

    labels: tuple[str, ...]
    thresholds: tuple[float, ...] | None = None
    known: tuple[float, ...] | None = None
    kind: str = "bce"
    is_whole: bool = False

    losses: ClassVar = ("bce", "asymmetric")
    best_figures: ClassVar = (
        "val_map",
        "val_loss",
        "val_micro_f1",
        "val_macro_f1",
        "val_hamming_loss",
    )
    main_figure: ClassVar = "val_loss"
    default_smoothing: ClassVar = 0.0
    # In a part of an image a thing may be missing whose label stays. With the shift of classes mAP was 0.55
    # in place of 0.68 after 8 epochs, and 0.69 in place of 0.83 after 24 (bench/learning_other_tasks.py).
    crop_scale: ClassVar = 1.0
    export_words: ClassVar = ExportWords(
        outputs_are="labels",
        cpp_name="LABELS",
        answer="probabilities",
        answer_how="sigmoid of the logits; export.json has the threshold of each label",
        compared="probabilities",
        of_logits="logits.sigmoid()",
        example_lines="""\
    rows = zip(preprocessing.classes, probabilities, preprocessing.thresholds)
    labels = [f"{name} {share:.6f}" for name, share, least in rows if share >= least]
    print(f"{file}: {', '.join(labels) or 'no label'}")
""",
    )
    # The loss is a mean over labels, most of which an image has not, so its gradient is smaller. With 1, 4
    # and 10 times the rate of classes small_convnet had a mAP of 0.65, 0.81 and 0.83, a network of one's own
    # with 1, 4 and 12 times 0.51, 0.60 and 0.66 (ten labels, 1,500 images of 40 px, 8 epochs, one run each:
    # data of bench/learning_other_tasks.py). Ten labels are not few, so it is not the best of these.
    lr_share: ClassVar = 4.0
    refuses: ClassVar[Mapping[str, str]] = {
        "balance": "an image may have frequent and rare labels at once: weigh rare ones with --class-weights "
        "auto",
    }

    @staticmethod
    def target_facts(train: Source) -> dict[str, Any]:
        return known_facts(train) | {"whole_images": True}

    @staticmethod
    def balanced_weights(train: Source) -> list[float]:
        """Of images with each label: how many times as many are without."""
        there = (train.labels == 1).sum(0).tolist()
        absent = (train.labels == 0).sum(0).tolist()
        return [no / yes if yes else 1.0 for yes, no in zip(there, absent, strict=True)]

    @staticmethod
    def target_lines(train: Source, settings: Settings) -> list[str]:
        """The labels with their numbers of training images."""
        labels = train.labels
        counts = (labels == 1).sum(0).tolist()
        by_count = sorted(zip(counts, train.classes, strict=True), key=lambda one: -one[0])
        shown = ", ".join(f"{name} {n}" for n, name in by_count[:_LISTED])
        more = f" and {len(by_count) - _LISTED} more" if len(by_count) > _LISTED else ""
        separator = separator_of(train)
        place = "a column each" if separator is None else f"separated by {separator!r}"
        lines = [
            f"several labels per image, {place}: {len(counts)} labels, {sum(counts) / len(labels):.2f} per "
            "image",
            f"training images: {shown}{more}",
        ]
        unknown = int(labels.isnan().sum())
        if unknown:
            lines.append(
                f"{unknown} of {labels.numel()} are unknown, and count in no loss and no figure"
            )
        return lines

    @property
    def num_outputs(self) -> int:
        return len(self.labels)

    def loss(
        self, outputs: Tensor, targets: Tensor, *, smoothing: float, weight: Tensor | None
    ) -> Tensor:
        """Mean of the labels' losses; `weight` is that of labels that are there."""
        wanted = targets.nan_to_num()
        wanted = wanted * (1 - smoothing) + smoothing / 2 if smoothing else wanted
        if self.kind == "asymmetric":
            each = asymmetric_losses(outputs.float(), wanted, weight)
        else:
            each = F.binary_cross_entropy_with_logits(
                outputs.float(), wanted, pos_weight=weight, reduction="none"
            )
        return mean_of_known_targets(each, targets, self.known).mean()

    def _entropies(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The binary cross-entropy of each image, (N,) float32."""
        each = F.binary_cross_entropy_with_logits(
            logits.float(), targets.nan_to_num(), reduction="none"
        )
        return mean_of_known_targets(each, targets, self.known)

    def training_figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """The share of the known labels of each image that were predicted wrongly."""
        return {"train_hamming_loss": _share_wrong(outputs, targets)}

    def evaluation_figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return {"val_loss": self._entropies(outputs, targets)}

    def distillation_loss(self, outputs: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
        """Binary cross-entropy with the teacher's probabilities, both softened, times T squared."""
        soft = (teacher.float() / temperature).sigmoid()
        loss = F.binary_cross_entropy_with_logits(outputs.float() / temperature, soft)
        return loss * temperature**2

    def history(self, num_samples: int, *, fingerprint: str, device: torch.device) -> SampleHistory:
        """The loss of each image, and the label that was furthest from its target."""

        def losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            error = (logits.sigmoid() - targets).abs().nan_to_num()
            return self._entropies(logits, targets), error.argmax(1)

        return SampleHistory(num_samples, fingerprint=fingerprint, device=device, losses=losses)

    def sample_results(self, best: str) -> SampleResultsMetric["LabelResults"]:
        """The probabilities of each image, and the figures that are no means over images."""

        def keep(targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
            return targets, logits.detach().float().sigmoid()

        def figures(results: LabelResults) -> dict[str, float]:
            counts = counted(results.probabilities, results.targets, self._thresholds())
            return {
                "map": mean_of_known(average_precisions(results.probabilities, results.targets)),
                "micro_f1": counts.micro_f1,
                "macro_f1": counts.macro_f1,
                "hamming_loss": counts.hamming_loss,
            }

        return SampleResultsMetric(keep, LabelResults, figures)

    def _thresholds(self) -> Tensor:
        return torch.tensor(self.thresholds or [0.5] * len(self.labels))

    def report_facts(
        self, results: "LabelResults", *, step: int, describe: Callable[[int], str]
    ) -> dict[str, Any]:
        """Figures of each label at its best threshold, and the images with the highest loss."""
        thresholds = best_thresholds(results.probabilities, results.targets)
        shown = torch.tensor(thresholds)
        counts = counted(results.probabilities, results.targets, shown)
        precisions = average_precisions(results.probabilities, results.targets).tolist()
        losses = self._entropies(results.probabilities.logit(1e-7), results.targets)
        worst = losses.argsort(descending=True, stable=True)[:_PICTURES].tolist()
        answers = label_answers(results.probabilities[worst], shown, self.labels)
        return {
            "task": "multilabel",
            "step": step,
            "images": len(results.targets),
            "labels": [*self.labels],
            "thresholds": thresholds,
            "average_precision": [None if math.isnan(p) else p for p in precisions],
            "there": counts.there.tolist(),
            "predicted": counts.predicted.tolist(),
            "right": counts.right.tolist(),
            "known": counts.known.tolist(),
            "mistakes": [
                {
                    "index": int(results.indices[row]),
                    "image": describe(int(results.indices[row])),
                    "label": ", ".join(self._names(results.targets[row])) or "-",
                    "predicted": answer.as_text(),
                    "loss": round(float(losses[row]), 6),
                }
                for row, answer in zip(worst, answers, strict=True)
            ],
            "unsure": [],
        }

    def _names(self, row: Tensor) -> list[str]:
        return [name for name, value in zip(self.labels, row.tolist(), strict=True) if value == 1]

    def suspects(self, run: Path, train: Source) -> list[dict[str, Any]]:
        """The images whose labels the model found less likely than a guess, averaged over the training."""
        found = []
        for one in recorded_losses(run, train, most=_MAX_SUSPECTS) or []:
            if one.loss > math.log(2) and one.other < len(self.labels):
                given = train.labels[one.number]
                label = self.labels[one.other]
                doubt = f"without {label}?" if given[one.other] == 1 else f"and {label}?"
                found.append(
                    {
                        "index": one.number,
                        "image": one.image,
                        "label": ", ".join(self._names(given)) or "-",
                        "predicted": doubt,
                        "loss": round(one.loss, 6),
                    }
                )
        return found

    def mean_of_views(self, outputs: Tensor, mirrored: Tensor) -> Tensor:
        """The logit of the mean probabilities."""
        there = torch.logaddexp(F.logsigmoid(outputs), F.logsigmoid(mirrored))
        absent = torch.logaddexp(F.logsigmoid(-outputs), F.logsigmoid(-mirrored))
        return there - absent

    def mean_of_models(self, outputs: Sequence[Tensor]) -> Tensor:
        """The logit of the mean probabilities."""
        logits = torch.stack([one.float() for one in outputs])
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    def counters(self, device: torch.device, source: Source) -> KeptBatches[LabelEvaluation]:
        return KeptBatches(self._entropies, self._evaluation)

    def _evaluation(
        self,
        indices: Tensor,
        outputs: Tensor,
        targets: Tensor,
        *,
        loss: float,
        reading: Reading,
        describe: Callable[[int], str],
    ) -> LabelEvaluation:
        predictions = LabelPredictions(
            self.labels, indices, targets, outputs.sigmoid(), self._thresholds(), describe
        )
        return LabelEvaluation(loss, reading, predictions)

    def decode(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def agrees(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Whether the same labels reach their thresholds."""
        limits = self._thresholds().to(outputs.device)
        return ((outputs.sigmoid() >= limits) == (reference.sigmoid() >= limits)).all(1)

    def export_facts(self, outputs: Tensor, targets: Tensor | None) -> Mapping[str, Any]:
        return {
            "task": "multilabel",
            "classes": [*self.labels],
            "thresholds": self._thresholds().tolist(),
        }

    def predictions(self, batches: Iterable[tuple[Tensor, Sequence[Size]]]) -> "LabelAnswers":
        shares = joined(batches, self.num_outputs).float().sigmoid()
        return LabelAnswers(self.labels, shares, self._thresholds())

    def answers(self, outputs: Tensor, sizes: Sequence[Size], *, top: int) -> Sequence[LabelAnswer]:
        """The labels of each image that reach their thresholds."""
        return label_answers(outputs.float().sigmoid().cpu(), self._thresholds(), self.labels)

    def answer_columns(self, *, top: int) -> list[str]:
        return LabelAnswer.columns(self.labels)


@dataclass(frozen=True)
class LabelResults:
    """One evaluation, in the order of the data, on the CPU: targets and probabilities (N, K)."""

    indices: Tensor
    targets: Tensor
    probabilities: Tensor


@dataclass(frozen=True, repr=False, eq=False)
class LabelAnswers:
    """What a model says of N images: probabilities (N, K); a label is predicted from its threshold on."""

    names: tuple[str, ...]
    probabilities: Tensor
    thresholds: Tensor

    @property
    def labels(self) -> list[list[str]]:
        """The labels of each image, the most probable first."""
        return [[*answer.labels] for answer in self]

    def __len__(self) -> int:
        return len(self.probabilities)

    def __iter__(self) -> Iterator[LabelAnswer]:
        return iter(label_answers(self.probabilities, self.thresholds, self.names))

    def _repr_html_(self) -> str:
        return answers_table(answer.as_text() for answer in self)

    def __repr__(self) -> str:
        shown = [repr(answer.as_text()) for answer in [*self][:10]]
        return f"LabelAnswers({', '.join(shown)}{', ...' if len(self) > 10 else ''})"


def asymmetric_losses(logits: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    """The asymmetric loss of each label, (N, K), of logits and targets in [0, 1].

    Easy absent labels count little: their probability is lowered by a margin, and their loss multiplied by
    its fourth power. `weight`, (K,), is of present labels.
    """
    share = logits.sigmoid()
    lowered = (share - _MARGIN).clamp(min=0)
    there = (1 - share) ** _FOCUS[True] * F.logsigmoid(logits)
    absent = lowered ** _FOCUS[False] * torch.log1p(-lowered.clamp(max=1 - 1e-6))
    if weight is not None:
        there = there * weight
    return -(targets * there + (1 - targets) * absent)


def _share_wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    """(N,) float32: of the known labels of each image; 0 for an image without any."""
    known = targets.isfinite()
    wrong = ((outputs > 0) != (targets == 1)) & known
    return wrong.sum(1) / known.sum(1).clamp(min=1)
