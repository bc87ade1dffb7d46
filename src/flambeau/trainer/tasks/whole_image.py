"""What tasks have in common whose model answers for a whole image, and not for each of its pixels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from flambeau.data.sources.source import Source
from flambeau.data.transforms.crops import CROP_SCALE, EvalResize
from flambeau.errors import InputError
from flambeau.trainer.evaluation.reading import Reading
from flambeau.trainer.tasks.task import Task


class WholeImage:
    """A base of such tasks; see `Task` for what the methods are for."""

    default_model: ClassVar = None
    per_pixel: ClassVar = False
    default_optimizer: ClassVar = "sgd"
    adam_lr_share: ClassVar[float | None] = None
    crop_scale: ClassVar = CROP_SCALE[0]
    mirrors: ClassVar = True
    is_whole: bool = False

    @property
    def eval_resize(self) -> EvalResize:
        """The whole image, where training shows it: what is cut off may count."""
        return "squash" if self.is_whole else None

    def loss_towards(self: Task, outputs: Tensor, reference: Tensor) -> Tensor:
        """The loss towards the decoded outputs of another model."""
        return self.loss(outputs, self.decode(reference), smoothing=0.0, weight=None)

    def shared(self, outputs: Tensor) -> Tensor:
        """Logits, which all models share."""
        return outputs

    def of_shared(self, outputs: Tensor) -> Tensor:
        """Logits, which all models share."""
        return outputs

    def shown_figure(self, value: float) -> str:
        """The main figure as text."""
        return f"{value:.4f}"

    def picture(self, image: Tensor, target: Tensor, sample: dict[str, Any]) -> Tensor:
        """The image itself."""
        return image

    def graph_answer(self: Task, outputs: Tensor, pixels: Tensor) -> Tensor:
        """The decoded outputs."""
        return self.decode(outputs)


Result = TypeVar("Result")


@dataclass(frozen=True)
class KeptBatches(Generic[Result]):
    """Outputs, losses and targets of each image, on the device, for figures that need all at once.

    N: images, K: outputs.

    Args:
        losses: of a batch, (N,), from outputs and targets on one device.
        result: the evaluation from (indices, outputs, targets), on the CPU, the mean loss, how images were
            read, and their names.
    """

    losses: Callable[[Tensor, Tensor], Tensor]
    result: Callable[..., Result]
    indices: list[int] = field(default_factory=list)
    _batches: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def update(self, outputs: Tensor, targets: Tensor, indices: Sequence[int]) -> None:
        """Count a batch: (N, K) outputs, (N, K) targets and the positions of the images."""
        losses = self.losses(outputs, targets.to(outputs.device))
        self._batches.append((outputs.float(), targets, losses))
        self.indices.extend(indices)

    def evaluation(self, *, describe: Callable[[int], str], **facts: Any) -> Result:
        """All figures, read from the device."""
        outputs, targets, losses = (
            torch.cat(one).cpu() for one in zip(*self._batches, strict=True)
        )
        return self.result(
            torch.tensor(self.indices),
            outputs,
            targets,
            loss=float(losses.double().mean()),
            reading=Reading(num_images=len(outputs), **facts),
            describe=describe,
        )


_constants: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


def mean_of_known_targets(losses: Tensor, targets: Tensor, known: Sequence[float] | None) -> Tensor:
    """The mean loss of each image, (N,): an unknown target (NaN) counts as nothing, a known one for its
    column.

    A column of which a third is `known` counts three times there, so that columns weigh the same, and the
    mean over images is that of a batch's parts.
    """
    if known is None:
        return losses.mean(1)
    scale = 1 / constants(tuple(known), losses.device)
    return torch.where(targets.isfinite(), losses * scale, 0.0).mean(1)


def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers (K,) float32 on a device, copied once: a copy in each step would wait for it."""
    kept = _constants.get((values, device))
    if kept is not None:
        return kept
    with torch.inference_mode(False):
        made = torch.tensor(values, device=device)
    if type(made) is Tensor:  # not one without data, of an estimate of memory
        _constants[values, device] = made
    return made


def known_facts(train: Source) -> dict[str, Any]:
    """Each column's share of known training images, as `known`; None if all are.

    InputError: a column of which nothing is known.
    """
    is_known = train.labels.isfinite()
    shares = is_known.double().mean(0).tolist()
    for column, share in zip(train.classes, shares, strict=True):
        if not share:
            raise InputError(
                f"{column!r} is unknown for all images to train on: nothing to learn\n"
                "Name other columns with --target"
            )
    return {"known": None if is_known.all() else shares}
