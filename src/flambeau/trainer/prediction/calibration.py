"""What `flambeau evaluate --calibrate` keeps in a run: a temperature, and the threshold of prediction sets.

Sources: Guo et al., "On calibration of modern neural networks", ICML 2017, section 4.2 (temperature); Sadinle
et al., "Least ambiguous set-valued classifiers with bounded error levels", JASA 2019, and Angelopoulos and
Bates, "A gentle introduction to conformal prediction", 2021 (arXiv:2107.07511), section 1 (sets).
The score of an image is one minus the probability of its label; or, of adaptive sets (Romano et al.,
"Classification with valid and adaptive coverage", NeurIPS 2020, without its random numbers), the sum of the
probabilities of the classes that are more probable than its label: such a set is never empty, and covers at
least the images whose label is the most probable class. A set has the classes whose score is at most a
quantile of these. The share of new images whose set has their label is then at least the coverage, on average
over the images that chose the quantile, if all are drawn alike.

N: images, C: classes.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.errors import InputError
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.recipes.training.calibration_error import CalibrationError
from flambeau.recipes.training.label_smoothing import cross_entropy
from flambeau.run.folder.json_file import finite_number, json_table
from flambeau.trainer.tasks.classification import fitted_temperature

FILE = "calibration.json"
_ROUNDED = (
    1e-6  # an image of the calibration is exactly at the limit, and other devices round otherwise
)


@dataclass(frozen=True)
class Calibration:
    """A temperature, and what it was made of.

    Attributes:
        weights_sha256: of its weights.
        temperature: logits are divided by it.
        images: on which it was fitted.
        loss_before, loss_after: mean cross-entropy of these.
        error_before, error_after: expected calibration error of these, in 15 bins.
        coverage, adaptive: of prediction sets, if asked for.
        threshold: a set has the classes of at least this probability; an adaptive one those before which more
            probable classes have at most this together.
    """

    weights_sha256: str
    temperature: float
    images: int
    loss_before: float
    loss_after: float
    error_before: float
    error_after: float
    coverage: float | None = None
    threshold: float | None = None
    adaptive: bool = False

    def lines(self) -> list[str]:
        """For the user."""
        texts = [
            f"calibrated on {self.images} images: temperature {self.temperature:.4g}; loss "
            f"{self.loss_before:.4f} to {self.loss_after:.4f}, calibration error {self.error_before:.4f} to "
            f"{self.error_after:.4f}",
            "these figures are of the images that chose the temperature: they are not independent",
        ]
        if self.coverage is not None:
            which = (
                f"the most probable classes, until they have more than {self.threshold:.4f} together"
                if self.adaptive
                else f"every class of at least {self.threshold:.4f}"
            )
            texts.append(f"sets of classes for {self.coverage:.4g} of all new images: {which}")
        return texts

    def write(self, run: Path, *, name: str = FILE) -> None:
        """Write the file of a run, whole or not at all."""
        write_file(run / name, json.dumps(asdict(self), indent=2).encode() + b"\n")

    def sets(self, logits: Tensor) -> Tensor:
        """(N, C) bool: each image's set of classes, from calibrated logits (N, C)."""
        assert self.threshold is not None
        limit = self.threshold if self.adaptive else 1 - self.threshold
        return class_scores(logits.double().softmax(1), adaptive=self.adaptive) <= limit + _ROUNDED

    def named_sets(self, logits: Tensor, classes: Sequence[str]) -> list[tuple[str, ...]]:
        """The classes in the set of each image, the most probable first."""
        rows = zip(logits.cpu(), self.sets(logits).cpu(), strict=True)
        return [
            tuple(
                classes[k] for k in row.argsort(descending=True, stable=True).tolist() if inside[k]
            )
            for row, inside in rows
        ]


def fitted(
    logits: Tensor,
    labels: Tensor,
    *,
    weights_sha256: str,
    coverage: float | None,
    adaptive: bool = False,
) -> Calibration:
    """Fit temperature and threshold.

    Args:
        logits: (N, C), of a model that is not calibrated.
        labels: (N,) int64.
        weights_sha256: of its weights.
        coverage, adaptive: of prediction sets; None: none.

    Raises:
        InputError: too few images for the coverage.
    """
    temperature = fitted_temperature(logits, labels)
    scaled = logits.double() / temperature
    return Calibration(
        weights_sha256,
        temperature,
        len(labels),
        loss_before=float(cross_entropy(logits.double(), labels)),
        loss_after=float(cross_entropy(scaled, labels)),
        error_before=_error(logits, labels),
        error_after=_error(scaled, labels),
        coverage=coverage,
        threshold=None
        if coverage is None
        else set_threshold(scaled.softmax(1), labels, coverage, adaptive=adaptive),
        adaptive=adaptive,
    )


def class_scores(probabilities: Tensor, *, adaptive: bool) -> Tensor:
    """(N, C): how far each class is from being in the set of its image."""
    if not adaptive:
        return 1 - probabilities
    ordered = torch.sort(probabilities, dim=1, descending=True, stable=True)
    before = torch.zeros_like(ordered.values)
    before[:, 1:] = ordered.values[:, :-1].cumsum(1)
    return torch.empty_like(before).scatter(1, ordered.indices, before)


def set_threshold(
    probabilities: Tensor, labels: Tensor, coverage: float, *, adaptive: bool = False
) -> float:
    """The least probability of a class in a prediction set; of an adaptive one its largest sum.

    Of N images the score of the label exceeds it in floor((N + 1) * (1 - coverage)) - 1.

    Args:
        probabilities: (N, C) float64.
        labels: (N,) int64.
        coverage: above 0 and below 1.

    Raises:
        InputError: too few images.

    Example:
        >>> import torch
        >>> shares = torch.linspace(0.1, 0.9, 9).double()
        >>> round(set_threshold(torch.stack([shares, 1 - shares], 1), torch.zeros(9).long(), 0.8), 6)
        0.2
    """
    num = len(labels)
    # Rounded, as (N + 1) * (1 - coverage) may be off a whole number by the last bit.
    rank = math.floor(round((num + 1) * (1 - coverage), 9))
    if rank < 1:
        least = math.ceil(round(1 / (1 - coverage), 9)) - 1
        raise InputError(
            f"{num} images are too few for sets of coverage {coverage:g}: at least {least} are needed"
        )
    scores = class_scores(probabilities, adaptive=adaptive).gather(1, labels[:, None])[:, 0]
    limit = float(scores.sort(descending=True).values[rank - 1])
    return limit if adaptive else 1 - limit


def of_several(members: Sequence[tuple[str, float]]) -> tuple[str, str]:
    """The file's name for several runs that answer together, in the folder of one, and its key.

    Args:
        members: SHA-256 of weights, and own temperature; in any order.
    """
    parts = sorted(f"{sha256} {temperature!r}" for sha256, temperature in members)
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"calibration-{key[:8]}.json", key


def stored_calibration(
    run: Path, weights_sha256: str | None, *, name: str = FILE
) -> Calibration | None:
    """What the run keeps for these weights, if plausible."""
    kept = json_table(run / name)
    known = Calibration.__dataclass_fields__
    if kept.keys() != known.keys() or kept["weights_sha256"] != weights_sha256:
        return None
    others = ("weights_sha256", "adaptive")
    numbers = {name: finite_number(kept[name]) for name in known if name not in others}
    lacking = [name for name, value in numbers.items() if value is None]
    if type(kept["adaptive"]) is not bool or lacking not in ([], ["coverage", "threshold"]):
        return None
    if not (numbers["temperature"] or 0) > 0:
        return None
    values: dict[str, Any] = dict(kept)
    return Calibration(**values)


def _error(logits: Tensor, labels: Tensor) -> float:
    error = CalibrationError()
    error.update(logits, labels)
    return float(error.compute())
