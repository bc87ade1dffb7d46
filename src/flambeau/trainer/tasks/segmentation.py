"""Masks: targets (N, S, S) uint8 classes of the pixels, 255 for none; logits (N, K, S, S).

Dice: Milletari et al., "V-Net", 3DV 2016, section 3, with the probabilities themselves in the denominator.

N: images, K: classes, S: side in pixels, H, W: height and width of an image as it is stored.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.data.sources.masks.mask_file import IGNORED
from flambeau.data.sources.source import Source, mask_of, mask_values
from flambeau.data.transforms.crops import EvalResize
from flambeau.run.loop.sample_results import SampleResultsMetric
from flambeau.trainer.evaluation.answers import MaskAnswer, Size, answers_table
from flambeau.trainer.evaluation.mask_evaluation import MaskEvaluation, MaskPredictions
from flambeau.trainer.evaluation.mask_figures import (
    MaskCounts,
    boundary_f1,
    counted,
    mean_of_defined,
)
from flambeau.trainer.evaluation.mask_pictures import (
    decoded_text,
    encoded_mask,
    mask_picture,
    shown_mask,
)
from flambeau.trainer.evaluation.reading import Reading
from flambeau.trainer.evaluation.sample_history import SampleHistory, recorded_losses
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.tasks.export_words import ExportWords

_PICTURES = 12  # of the images with the lowest intersection over union
_MAX_SUSPECTS = 12
_LISTED = 12  # classes, with their shares
_NAMED = 4  # classes of a single image
_BOUNDARY = "boundary_f1"
_RARE = 0.001  # share of the pixels from which on a line says how to weigh a class; chosen


@dataclass(frozen=True)
class Segmentation:
    """A class for each pixel; see `Task` for what the methods are for.

    Attributes:
        values: each class's number in masks.
        known: share of the training pixels that are not ignored.
        kind: training loss; evaluations use the cross-entropy.
    """

    classes: tuple[str, ...]
    values: tuple[int, ...]
    known: float = 1.0
    kind: str = "cross-entropy"

    losses: ClassVar = ("cross-entropy", "dice", "cross-entropy+dice")
    best_figures: ClassVar = (
        "val_miou",
        "val_loss",
        "val_dice",
        "val_pixel_accuracy",
        "val_boundary_f1",
    )
    main_figure: ClassVar = "val_loss"
    default_smoothing: ClassVar = 0.0
    default_model: ClassVar = "resnet18"
    per_pixel: ClassVar = True
    eval_resize: ClassVar[EvalResize] = "squash"
    default_optimizer: ClassVar = "adamw"
    # mIoU after 3 epochs at a batch of 64, of the network for masks of bench/learning_other_tasks.py and its
    # 1,000 images, one run each: 0.149 by sgd at its rate; by adamw 0.165 at 0.001, 0.185 at 0.002, which
    # this gives, and 0.163 at 0.004.
    adam_lr_share: ClassVar[float | None] = 4.0
    # mIoU after 16 epochs of the same network and images, one run each: 0.285 with crops from 0.25 on, 0.314
    # from 0.5, 0.364 from 0.9, since an evaluation shows images whole: crops show all things larger.
    crop_scale: ClassVar = 0.9
    mirrors: ClassVar = True
    export_words: ClassVar = ExportWords(
        outputs_are="classes of pixels",
        cpp_name="MASKS",
        answer="mask",
        answer_how="the number of the class of each pixel in the masks of the training",
        compared="probabilities",
        of_logits="preprocessing.mask_values[torch.nn.functional.interpolate(\n"
        '        logits[None], pixels.shape[:2], mode="bilinear"\n'
        "    )[0].argmax(0)]",
        example_lines="""\
    shares = preprocessing.shares(mask)  # of (H, W) numbers, which Image.fromarray of Pillow takes
    print(f"{file}: {', '.join(f'{name} {share:.6f}' for name, share in shares.items())}")
""",
        logits_shape="(N, {classes}, {size}, {size}) float32",
        answer_shape="(N, H, W) uint8",
    )
    lr_share: ClassVar = 1.0
    refuses: ClassVar[Mapping[str, str]] = {
        "balance": "an image has pixels of frequent and rare classes at once: weigh rare ones with "
        "--class-weights auto",
        "mixup": "a pixel of two images at once has two classes",
        "cutmix": "it is not made for masks: --random-erasing and --crop-scale vary images, too",
        "start_size": "a mask has one size with its image",
        "augment": "it turns and shifts an image without its mask; --color-jitter varies colors alone",
    }

    @staticmethod
    def target_facts(train: Source) -> dict[str, Any]:
        """The numbers in the masks, and the share of pixels that is known."""
        known = float(train.labels.double().sum(1).mean())
        return {"mask_values": [*mask_values(train)], "known": [known]}

    @staticmethod
    def balanced_weights(train: Source) -> list[float]:
        """1 / (K * share) for a class with that share of the known pixels; 1 on average over the pixels."""
        shares = train.labels.double().mean(0)
        shares = shares / shares.sum()
        there = int((shares > 0).sum())
        return [1 / (there * share) if share else 1.0 for share in shares.tolist()]

    @staticmethod
    def target_lines(train: Source, settings: Settings) -> list[str]:
        """The classes with their shares of the training pixels."""
        shares = train.labels.double().mean(0)
        ignored = 1 - float(shares.sum())
        named = sorted(zip(shares.tolist(), train.classes, strict=True), key=lambda one: -one[0])
        listed = ", ".join(f"{name} {share:.1%}" for share, name in named[:_LISTED])
        more = f" and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
        left = f"; {ignored:.1%} are ignored" if ignored > 5e-5 else ""
        remark = getattr(train, "remark", "")
        lines = [
            f"a class for each pixel, {len(named)} {remark or 'classes'}",
            f"training pixels: {listed}{more}{left}",
        ]
        rare = [name for share, name in named if 0 < share < _RARE]
        if rare and settings.class_weights is None and settings.loss in (None, "cross-entropy"):
            lines.append(
                f"rare: {', '.join(rare[:_LISTED])}; --class-weights auto weighs them more, and "
                "--loss cross-entropy+dice counts classes alike"
            )
        return lines

    @property
    def num_outputs(self) -> int:
        """One logit per class, at each pixel."""
        return len(self.classes)

    def loss(
        self, outputs: Tensor, targets: Tensor, *, smoothing: float, weight: Tensor | None
    ) -> Tensor:
        """Mean over the images of the cross-entropy of their known pixels, of Dice, or of both.

        An image counts by its known pixels over their share in all training images: so a batch's mean is that
        of its parts, however cut.
        """
        losses = torch.zeros(len(outputs), device=outputs.device)
        if self.kind != "dice":
            losses = losses + self._entropies(outputs, targets, smoothing=smoothing, weight=weight)
        if self.kind != "cross-entropy":
            losses = losses + dice_losses(outputs, targets, weight)
        return losses.mean()

    def _entropies(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        smoothing: float = 0.0,
        weight: Tensor | None = None,
    ) -> Tensor:
        """The cross-entropy of each image, (N,) float32."""
        # Rows of pixels: the two-dimensional loss of torch is not deterministic on CUDA.
        rows = logits.float().permute(0, 2, 3, 1).reshape(-1, logits.shape[1])
        each = F.cross_entropy(
            rows,
            targets.reshape(-1).long(),
            weight=weight,
            ignore_index=IGNORED,
            reduction="none",
            label_smoothing=smoothing,
        )
        return each.view(len(logits), -1).mean(1) / self.known

    def shared(self, outputs: Tensor) -> Tensor:
        """Logits, which all models share."""
        return outputs

    def of_shared(self, outputs: Tensor) -> Tensor:
        """Logits, which all models share."""
        return outputs

    def training_figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """The share of the known pixels of each image that are right."""
        known = targets != IGNORED
        right = (outputs.argmax(1) == targets) & known
        share = right.flatten(1).sum(1) / known.flatten(1).sum(1).clamp(min=1)
        return {"train_pixel_accuracy": share}

    def evaluation_figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return {"val_loss": self._entropies(outputs, targets)}

    def loss_towards(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """The cross-entropy with the other probabilities of each pixel."""
        return -(reference.softmax(1) * outputs.float().log_softmax(1)).sum(1).mean()

    def distillation_loss(self, outputs: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
        """The mean divergence of the softened probabilities of the pixels, times T squared."""
        ours = (outputs.float() / temperature).log_softmax(1)
        theirs = (teacher.float() / temperature).log_softmax(1)
        divergence = (theirs.exp() * (theirs - ours)).sum(1)
        return divergence.mean() * temperature**2

    def history(self, num_samples: int, *, fingerprint: str, device: torch.device) -> SampleHistory:

        def losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            each = self._entropies(logits, targets)
            return each, torch.zeros_like(each, dtype=torch.int64)

        return SampleHistory(num_samples, fingerprint=fingerprint, device=device, losses=losses)

    def sample_results(self, best: str) -> SampleResultsMetric["MaskResults"]:
        """What is counted of each image, and its predicted mask in small."""
        with_boundaries = best == f"val_{_BOUNDARY}"

        def keep(targets: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
            predicted = logits.detach().argmax(1)
            num = len(self.classes)
            boundaries = (
                boundary_f1(predicted, targets, num)
                if with_boundaries
                else torch.empty(len(targets), 0, device=targets.device)
            )
            return *counted(predicted, targets, num), boundaries, shown_mask(predicted)

        def make(indices: Tensor, *kept: Tensor) -> MaskResults:
            right, predicted, there, boundaries, shown = kept
            return MaskResults(indices, MaskCounts(right, predicted, there), boundaries, shown)

        def figures(results: MaskResults) -> dict[str, float]:
            counts = results.counts
            values = {
                "miou": mean_of_defined(counts.iou),
                "dice": mean_of_defined(counts.dice),
                "pixel_accuracy": counts.pixel_accuracy,
            }
            if with_boundaries:
                values[_BOUNDARY] = mean_of_defined(results.boundaries.double().nanmean(0))
            return values

        return SampleResultsMetric(keep, make, figures)

    def report_facts(
        self, results: "MaskResults", *, step: int, describe: Callable[[int], str]
    ) -> dict[str, Any]:
        """Figures of each class, and the images with the lowest intersection over union."""
        counts = results.counts
        scores = counts.image_iou
        worst = scores.nan_to_num(2.0).argsort(stable=True)[:_PICTURES].tolist()

        def column(values: Tensor) -> list[float | None]:
            return [None if value != value else value for value in values.tolist()]

        return {
            "task": "segmentation",
            "step": step,
            "images": len(results.indices),
            "classes": [*self.classes],
            "iou": column(counts.iou),
            "dice": column(counts.dice),
            "accuracy": column(counts.accuracy),
            "pixels": counts.there.sum(0).tolist(),
            "predicted": counts.predicted.sum(0).tolist(),
            "mistakes": [
                {
                    "index": int(results.indices[row]),
                    "image": describe(int(results.indices[row])),
                    "label": _shares(self.classes, counts.there[row]),
                    "predicted": f"{_shares(self.classes, counts.predicted[row])} "
                    f"(IoU {scores[row]:.2f})",
                    "mask": encoded_mask(results.shown[row]),
                }
                for row in worst
            ],
            "unsure": [],
        }

    def picture(self, image: Tensor, target: Tensor, sample: dict[str, Any]) -> Tensor:
        """The mask over the image, and beside it the predicted one, if it is known."""
        predicted = decoded_text(sample.pop("mask", None))
        return mask_picture(image, target, predicted)

    def suspects(self, run: Path, train: Source) -> list[dict[str, Any]]:
        """The images whose masks the model found less likely than a guess, averaged over the training."""
        guess = float(np.log(len(self.classes)))
        return [
            {
                "index": one.number,
                "image": one.image,
                "label": _shares(train.classes, train.labels[one.number]),
                "predicted": f"loss {one.loss:.2f}, of a guess {guess:.2f}",
                "loss": round(one.loss, 6),
            }
            for one in recorded_losses(run, train, most=_MAX_SUSPECTS) or []
            if one.loss > guess
        ]

    def mean_of_views(self, outputs: Tensor, mirrored: Tensor) -> Tensor:
        """The logarithm of the mean probabilities, those of the mirror image mirrored back."""
        both = torch.logaddexp(outputs.log_softmax(1), mirrored.flip(-1).log_softmax(1))
        return both - float(np.log(2))

    def mean_of_models(self, outputs: Sequence[Tensor]) -> Tensor:
        """The logarithm of the mean probabilities, from logits that are resized to the largest of them."""
        size = max(one.shape[2:] for one in outputs)
        each = [
            one.float()
            if one.shape[2:] == size
            else F.interpolate(one.float(), size, mode="bilinear", align_corners=False)
            for one in outputs
        ]
        return torch.stack([one.log_softmax(1) for one in each]).logsumexp(0) - float(
            np.log(len(each))
        )

    def counters(self, device: torch.device, source: Source) -> "MaskCounters":
        """What is counted of each image at its own size, and the confusion matrix."""
        return MaskCounters(self, source)

    def decode(self, outputs: Tensor) -> Tensor:
        """Probabilities (N, K, S, S)."""
        return outputs.softmax(1)

    def graph_answer(self, outputs: Tensor, pixels: Tensor) -> Tensor:
        """Class numbers (N, H, W) uint8, from logits at the pixels' size."""
        full = F.interpolate(outputs, pixels.shape[1:3], mode="bilinear", align_corners=False)
        return torch.tensor(self.values, dtype=torch.uint8)[full.argmax(1)]

    def shown_figure(self, value: float) -> str:
        return f"{value:.4f}"

    def agrees(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """Whether 99 of 100 pixels are of the same class."""
        same = outputs.argmax(1) == reference.argmax(1)
        return same.flatten(1).double().mean(1) >= 0.99

    def export_facts(self, outputs: Tensor, targets: Tensor | None) -> Mapping[str, Any]:
        """The names of the classes, and their numbers in masks."""
        return {
            "task": "segmentation",
            "classes": [*self.classes],
            "mask_values": [*self.values],
        }

    def predictions(self, batches: Iterable[tuple[Tensor, Sequence[Size]]]) -> "MaskAnswers":
        """Masks at the size of each image."""
        answers = [one for outputs, sizes in batches for one in self.answers(outputs, sizes, top=1)]
        return MaskAnswers(self.classes, tuple(answers))

    def answers(self, outputs: Tensor, sizes: Sequence[Size], *, top: int) -> Sequence[MaskAnswer]:
        """Each image's mask at its size, from logits resized before the choice of a class."""
        answers = []
        for logits, size in zip(outputs.float(), sizes, strict=True):
            full = F.interpolate(logits[None], size, mode="bilinear", align_corners=False)[0]
            chosen = full.argmax(0)
            counts = torch.bincount(chosen.flatten(), minlength=len(self.classes)).tolist()
            named = sorted(zip(counts, self.classes, strict=True), key=lambda one: -one[0])
            values = torch.tensor(self.values, dtype=torch.uint8, device=chosen.device)
            shares = {name: n / chosen.numel() for n, name in named if n}
            answers.append(MaskAnswer(values[chosen].cpu().numpy(), shares))
        return answers

    def answer_columns(self, *, top: int) -> list[str]:
        return MaskAnswer.columns()


def dice_losses(logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """1 - Dice of each image, (N,): the mean, weighted by `weight`, over the classes in its mask."""
    num = logits.shape[1]
    known = (targets != IGNORED)[:, None]
    classes = torch.arange(num, device=targets.device).view(1, -1, 1, 1)
    wanted = (targets[:, None] == classes).float()
    shares = logits.float().softmax(1) * known
    both = (shares * wanted).sum((2, 3))
    there = wanted.sum((2, 3))
    dice = 2 * both / (shares.sum((2, 3)) + there).clamp(min=1e-6)
    counts = (there > 0).float() * (1.0 if weight is None else weight)
    return ((1 - dice) * counts).sum(1) / counts.sum(1).clamp(min=1e-6)


def _shares(names: Sequence[str], amounts: Tensor) -> str:
    """The classes of an image and their shares of its known pixels, the largest first."""
    total = max(float(amounts.sum()), 1e-12)
    named = sorted(zip(amounts.tolist(), names, strict=True), key=lambda one: -one[0])
    return ", ".join(f"{name} {n / total:.0%}" for n, name in named[:_NAMED] if n) or "-"


@dataclass(frozen=True)
class MaskResults:
    """One evaluation, in the order of the data; all on the CPU.

    Attributes:
        boundaries: (N, K) float32 boundary F1; (N, 0) if not asked for.
        shown: (N, 64, 64) uint8, small predicted masks.
    """

    indices: Tensor
    counts: MaskCounts
    boundaries: Tensor
    shown: Tensor


@dataclass(frozen=True, repr=False, eq=False)
class MaskAnswers:
    """What a model says of N images, with the names of the K classes."""

    names: tuple[str, ...]
    answers: tuple[MaskAnswer, ...]

    @property
    def masks(self) -> list[Any]:
        """For each image (H, W) uint8, the classes' numbers in training masks."""
        return [answer.mask for answer in self.answers]

    def __len__(self) -> int:
        return len(self.answers)

    def __iter__(self) -> Iterator[MaskAnswer]:
        return iter(self.answers)

    def _repr_html_(self) -> str:
        return answers_table(answer.as_text() for answer in self)

    def __repr__(self) -> str:
        shown = [repr(answer.as_text()) for answer in self.answers[:10]]
        return f"MaskAnswers({', '.join(shown)}{', ...' if len(self) > 10 else ''})"


@dataclass
class MaskCounters:
    """What an evaluation counts, on the device, of masks at the size of their images."""

    task: Segmentation
    source: Source
    indices: list[int] = field(default_factory=list)
    _images: list[tuple[Tensor, ...]] = field(default_factory=list)
    _confusion: Tensor | int = 0

    def update(self, outputs: Tensor, targets: Tensor, indices: Sequence[int]) -> None:
        """Count a batch: (N, K, S, S) outputs, (N, S, S) targets and the positions of the images."""
        targets = targets.to(outputs.device)
        losses = self.task.evaluation_figures(outputs, targets)["val_loss"]
        for logits, loss, index in zip(outputs.float(), losses, indices, strict=True):
            mask = mask_of(self.source, index)
            assert mask is not None
            self._count(logits, torch.from_numpy(mask).to(outputs.device)[None], loss)
        self.indices.extend(indices)

    def _count(self, logits: Tensor, mask: Tensor, loss: Tensor) -> None:
        num = len(self.task.classes)
        full = F.interpolate(logits[None], mask.shape[1:], mode="bilinear", align_corners=False)
        predicted = full.argmax(1)
        counts = (*counted(predicted, mask, num), boundary_f1(predicted, mask, num), loss[None])
        self._images.append(counts)
        pairs = (mask.long() * num + predicted)[mask != IGNORED]
        self._confusion = self._confusion + torch.bincount(pairs, minlength=num * num)

    def evaluation(self, *, describe: Callable[[int], str], **facts: Any) -> MaskEvaluation:
        right, predicted, there, boundaries, losses = (
            torch.cat(one).cpu() for one in zip(*self._images, strict=True)
        )
        num = len(self.task.classes)
        predictions = MaskPredictions(
            self.task.classes,
            torch.tensor(self.indices),
            MaskCounts(right, predicted, there),
            losses,
            boundaries,
            describe,
        )
        confusion = torch.as_tensor(self._confusion).cpu().view(num, num)
        reading = Reading(num_images=len(losses), **facts)
        return MaskEvaluation(float(losses.double().mean()), reading, predictions, confusion)
