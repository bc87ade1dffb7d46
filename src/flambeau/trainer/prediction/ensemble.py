"""Several trained models that answer as one: the mean of their probabilities, or of their numbers.

Each member gets its own preprocessing of the same image, and computes as in its own run.

N: images, C: channels, K: classes, S: side in pixels.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flambeau.data.datasets.bad_images import BadImages
from flambeau.data.loading.loader import Loader
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.data.sources.source import Source
from flambeau.data.sources.targets import TargetChoice
from flambeau.data.transforms.crops import EvalResize
from flambeau.errors import InputError
from flambeau.trainer.parts.data import DataFacts
from flambeau.trainer.prediction.calibration import Calibration, of_several, stored_calibration
from flambeau.trainer.prediction.trained_model import Batches, Trained, at_size, read_for
from flambeau.trainer.settings.resolved_settings import ResolvedSettings


@dataclass(frozen=True)
class Ensemble:
    """Trained models of the same targets, with what `Trained` has; see `ensemble_of`.

    Attributes:
        members: at least two.
        names: of their folders.
        calibration: divides the joint logits, of runs calibrated together.
    """

    members: tuple[Trained, ...]
    names: tuple[str, ...]
    calibration: Calibration | None = None

    @cached_property
    def reference(self) -> Trained:
        """Whose unit and size joint outputs have: the first member with the largest images."""
        return max(self.members, key=lambda one: one.image_size)

    @cached_property
    def facts(self) -> DataFacts:
        """The reference's; a label's threshold is the members' mean."""
        facts = self.reference.facts
        if facts.task_name != "multilabel":
            return facts
        chosen = [one.facts.thresholds or [0.5] * len(facts.classes) for one in self.members]
        means = [statistics.fmean(column) for column in zip(*chosen, strict=True)]
        return dataclasses.replace(facts, thresholds=means)

    @property
    def settings(self) -> ResolvedSettings:
        return self.reference.settings

    @property
    def device(self) -> torch.device:
        return self.reference.device

    @property
    def resize(self) -> EvalResize:
        return self.reference.resize

    @property
    def image_size(self) -> int:
        return self.reference.image_size

    @property
    def choice(self) -> TargetChoice:
        return self.facts.choice(self.settings)

    @property
    def knows_its_data(self) -> bool:
        return all(one.knows_its_data for one in self.members)

    @property
    def has_fixed_size(self) -> bool:
        return any(one.has_fixed_size for one in self.members)

    @property
    def model(self) -> nn.ModuleList:
        """The networks, in the order of the members."""
        return nn.ModuleList(one.model for one in self.members)

    @cached_property
    def view_of(self) -> tuple[int, ...]:
        """Of each member the number of its preprocessing; members with the same one share it."""
        kinds = [_preprocessing(one) for one in self.members]
        known = list(dict.fromkeys(kinds))
        return tuple(known.index(kind) for kind in kinds)

    @property
    def viewers(self) -> tuple[Trained, ...]:
        """The first member of each preprocessing."""
        return tuple(
            self.members[self.view_of.index(number)] for number in range(max(self.view_of) + 1)
        )

    @property
    def reference_view(self) -> int:
        """The number of the reference's preprocessing."""
        at = next(k for k, one in enumerate(self.members) if one is self.reference)
        return self.view_of[at]

    def logits(self, images: "Tensor | Sequence[Tensor]", *, flip_tta: bool = False) -> Tensor:
        """Joint outputs (N, K), or (N, K, S, S), float32, in the unit of the reference.

        Args:
            images: (N, C, S, S) for all, or a tensor for each preprocessing.
        """
        return self.joined(self.each_logits(images, flip_tta=flip_tta))

    def each_logits(
        self, images: "Tensor | Sequence[Tensor]", *, flip_tta: bool = False
    ) -> list[Tensor]:
        """The outputs of each member."""
        views = self.view_of
        given = [images] * len(views) if isinstance(images, Tensor) else [images[k] for k in views]
        return [
            one.logits(x, flip_tta=flip_tta) for one, x in zip(self.members, given, strict=True)
        ]

    @torch.inference_mode()
    def joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """One output of those of the members."""
        return joint_function(self)([one.to(self.device) for one in outputs])


Model: TypeAlias = "Trained | Ensemble"


def joint_function(ensemble: Ensemble) -> Callable[[Sequence[Tensor]], Tensor]:
    """What makes one output of those of all members; traceable, and holds none of their weights."""
    tasks = [one.facts.task for one in ensemble.members]
    reference = ensemble.facts.task
    calibration = ensemble.calibration
    temperature = None if calibration is None else calibration.temperature

    def joint(outputs: Sequence[Tensor]) -> Tensor:
        shared = [task.shared(one) for task, one in zip(tasks, outputs, strict=True)]
        found = reference.of_shared(reference.mean_of_models(shared))
        return found if temperature is None else found / temperature

    return joint


def ensemble_of(members: Sequence[tuple[str, Trained]]) -> Model:
    """The models as one; a single one as it is.

    Args:
        members: names of folders, and their models.

    Raises:
        InputError: they learned other things, or a folder is named twice.
    """
    (first, reference), *others = members
    if not others:
        return reference
    names = [name for name, _ in members]
    twice = next((name for k, name in enumerate(names) if name in names[:k]), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice: an ensemble is of different runs")
    for name, other in others:
        why = _other_targets(reference.facts, other.facts)
        if why is not None:
            raise InputError(
                f"{name} cannot answer together with {first}: {why}\nAn ensemble is of runs that learned the "
                "same classes, in the same order"
            )
    ensemble = Ensemble(tuple(one for _, one in members), tuple(names))
    return dataclasses.replace(ensemble, calibration=_calibration(ensemble))


def calibration_key(ensemble: Ensemble) -> tuple[str, str] | None:
    """File and key of a joint calibration; None unless all are finished runs here."""
    facts = []
    for one in ensemble.members:
        if one.folder is None or one.weights_sha256 is None:
            return None
        own = one.calibration
        facts.append((one.weights_sha256, 1.0 if own is None else own.temperature))
    return of_several(facts)


def _calibration(ensemble: Ensemble) -> Calibration | None:
    """What the folder of a member keeps for all of them together."""
    key = calibration_key(ensemble)
    if key is None or ensemble.facts.task_name != "classification":
        return None
    name, sha256 = key
    for one in ensemble.members:
        assert one.folder is not None
        found = stored_calibration(one.folder, sha256, name=name)
        if found is not None:
            return found
    return None


def model_at_size(model: Model, image_size: int | None) -> Model:
    """As `at_size`, of each member."""
    if isinstance(model, Trained):
        return at_size(model, image_size)
    members = tuple(at_size(one, image_size) for one in model.members)
    return dataclasses.replace(model, members=members)


def members_of(model: Model) -> tuple[Trained, ...]:
    """The members of an ensemble; a model itself."""
    return (model,) if isinstance(model, Trained) else model.members


def viewers_of(model: Model, images: "Tensor | Sequence[Tensor]") -> list[tuple[Trained, Tensor]]:
    """A model of each preprocessing, with what it was given."""
    if isinstance(model, Trained):
        assert isinstance(images, Tensor)
        return [(model, images)]
    return [*zip(model.viewers, images, strict=True)]


def read_model(
    model: Model, source: Source, *, workers: int, skip_bad_images: int
) -> tuple[Batches, BadImages]:
    """As `read_for`; of an ensemble, images and targets are tuples, of one for each preprocessing."""
    if isinstance(model, Trained):
        return read_for(model, source, workers=workers, skip_bad_images=skip_bad_images)
    bad = BadImages(None, limit=skip_bad_images)
    loaders = [
        read_for(one, source, workers=workers, skip_bad_images=skip_bad_images, bad=bad)[0]
        for one in model.viewers
    ]
    return JointLoader(loaders), bad


@dataclass(frozen=True)
class JointLoader:
    """Loaders of the same images, batch by batch; what one cannot read is left out of all."""

    loaders: Sequence[Loader]

    @property
    def length(self) -> int:
        return self.loaders[0].length

    def stream(self, *, epoch: int, position: int, epochs: int) -> Iterator[MicroBatch]:
        """As `Loader.stream`; `data` is a tuple of images and one of targets."""
        streams = [
            loader.stream(epoch=epoch, position=position, epochs=epochs) for loader in self.loaders
        ]
        for parts in zip(*streams, strict=True):
            bad = sorted({int(index) for part in parts for index in part.bad})
            kept = [_kept(part, bad) for part in parts]
            images, targets = zip(*kept, strict=True)
            yield parts[0]._replace(data=(images, targets), bad=bad)


def _kept(part: MicroBatch, bad: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The images and targets of a batch without those that another loader could not read."""
    images, targets = part.data
    if len(bad) == len(part.bad):
        return images, targets
    left = {int(index) for index in part.bad}
    here = [int(index) for index in part.indices if int(index) not in left]
    rows = [row for row, index in enumerate(here) if index not in bad]
    return images[rows], targets[rows]


def _preprocessing(trained: Trained) -> tuple[Any, ...]:
    facts = trained.facts
    crop = trained.settings.crop
    return trained.image_size, trained.resize, crop, facts.channels, facts.pixels


def _other_targets(ours: DataFacts, theirs: DataFacts) -> str | None:
    """The first difference between what two models have learned, for a message; None without one."""
    if theirs.task_name != ours.task_name:
        return f"it is of a {theirs.task_name} task, and the other of {ours.task_name}"
    if len(theirs.classes) != len(ours.classes):
        return f"it has {len(theirs.classes)} outputs, and the other {len(ours.classes)}"
    for number, (a, b) in enumerate(zip(theirs.classes, ours.classes, strict=True)):
        if a != b:
            return f"its output {number} is {a!r}, and that of the other is {b!r}"
    if theirs.mask_values != ours.mask_values:
        return (
            f"its masks have the numbers {theirs.mask_values}, and the other's {ours.mask_values}"
        )
    return None
