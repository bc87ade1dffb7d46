"""The predictions of each image of an evaluation, and what a report shows of them.

N: images, C: classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flambeau.recipes.training.calibration_error import CalibrationError

PICTURES = 12
"""How many mistakes, and least certain right answers, a report shows."""
_MAX_PAIRS = 5000  # of confused classes
Results = TypeVar("Results")


@dataclass(frozen=True)
class SampleResults:
    """One evaluation, in the order of the data; all on the CPU.

    Attributes:
        predicted: (N,) int64, the most probable class.
        confidence: (N,) float32, its probability.
        of_target: (N,) float32, the probability of the right class.
    """

    indices: Tensor
    targets: Tensor
    predicted: Tensor
    confidence: Tensor
    of_target: Tensor


def class_results(targets: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """The fields of `SampleResults` after the indices, of a batch: targets (N,), logits (N, C)."""
    shares = logits.detach().float().softmax(1)
    confidence, predicted = shares.max(1)
    of_target = shares.gather(1, targets.unsqueeze(1)).squeeze(1)
    return targets, predicted, confidence, of_target


class SampleResultsMetric(Generic[Results]):
    """Keeps something of each image of an evaluation; one of the `metrics` of `Run`.

    Nothing waits for the device before the end.

    Args:
        keep: from targets and outputs of a batch to tensors of N rows.
        make: puts indices and what was kept of all images together, sorted and on the CPU.
        figures: of a complete evaluation, by name.
    """

    any_order = True  # compute() sorts

    def __init__(
        self,
        keep: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        make: Callable[..., Results],
        figures: Callable[[Results], dict[str, float]],
    ) -> None:
        self._keep, self._make, self._figures = keep, make, figures
        self._batches: list[tuple[Tensor, ...]] = []
        self.last: Results | None = None
        """Of the last complete evaluation, on the first process."""

    def update(self, indices: Tensor, targets: Tensor, outputs: Tensor) -> None:
        self._batches.append((indices, *self._keep(targets, outputs)))

    def compute(self) -> dict[str, float]:
        """Sets `last`, and returns its figures."""
        indices, *others = (torch.cat(parts).cpu() for parts in zip(*self._batches, strict=True))
        order = indices.argsort()
        self.last = self._make(indices[order], *(values[order] for values in others))
        return self._figures(self.last)

    def reset(self) -> None:
        self._batches.clear()

    def state_dict(self) -> dict[str, list[tuple[Tensor, ...]]]:
        return {"batches": list(self._batches)}

    def merge(self, state: Mapping[str, list[tuple[Tensor, ...]]]) -> None:
        self._batches += state["batches"]


def results_of_classes(
    figures: Callable[[SampleResults], dict[str, float]] = lambda _: {},
) -> SampleResultsMetric[SampleResults]:
    """Keeps the prediction of each image of an evaluation of classes: logits (N, C), labels (N,)."""
    return SampleResultsMetric(class_results, SampleResults, figures)


def evaluation_facts(
    results: SampleResults, classes: Sequence[str], *, step: int, describe: Callable[[int], str]
) -> dict[str, Any]:
    """The content of evaluation.json: counts of classes, calibration, and images worth looking at."""
    targets, predicted = results.targets, results.predicted
    right = predicted == targets
    num = len(classes)
    pairs, counts = (targets * num + predicted)[~right].unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True)[:_MAX_PAIRS]
    confused = zip(pairs[order].tolist(), counts[order].tolist(), strict=True)
    calibration = CalibrationError()
    calibration.update_confidence(results.confidence, right)
    bins = [values.tolist() for values in calibration.per_bin().values()]
    sure = right.nonzero().flatten()
    mistakes = (~right).nonzero().flatten()
    mistakes = mistakes[results.confidence[mistakes].argsort(descending=True, stable=True)]
    unsure = sure[results.of_target[sure].argsort(stable=True)]

    def samples(rows: Tensor) -> list[dict[str, Any]]:
        return [
            {
                "index": int(results.indices[k]),
                "image": describe(int(results.indices[k])),
                "label": int(targets[k]),
                "predicted": int(predicted[k]),
                "probability": round(float(results.confidence[k]), 6),
                "of_label": round(float(results.of_target[k]), 6),
            }
            for k in rows[:PICTURES].tolist()
        ]

    def count(of: Tensor) -> list[int]:
        return torch.bincount(of, minlength=num).tolist()

    return {
        "step": step,
        "images": len(targets),
        "classes": list(classes),
        "labels": count(targets),
        "predicted": count(predicted),
        "right": count(targets[right]),
        "confused": [[pair // num, pair % num, times] for pair, times in confused],
        "calibration": [(k, *row) for k, row in enumerate(zip(*bins, strict=True)) if row[0]],
        "calibration_error": float(calibration.compute()),
        "mistakes": samples(mistakes),
        "unsure": samples(unsure),
    }
