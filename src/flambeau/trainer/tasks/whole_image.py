"""What tasks have in common whose model answers for a whole image, and not for each of its pixels."""

from typing import Any, ClassVar

from torch import Tensor

from flambeau.data.transforms.crops import CROP_SCALE, EvalResize
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
        """The whole image, where training shows it: what is cut off may have been counted or named."""
        return "squash" if self.is_whole else None

    def loss_towards(self: Task, outputs: Tensor, reference: Tensor) -> Tensor:
        """The loss towards the decoded outputs of another model."""
        return self.loss(outputs, self.decode(reference), smoothing=0.0, weight=None)

    def picture(self, image: Tensor, target: Tensor, sample: dict[str, Any]) -> Tensor:
        """The image itself."""
        return image

    def graph_answer(self: Task, outputs: Tensor, pixels: Tensor) -> Tensor:
        """The decoded outputs."""
        return self.decode(outputs)
