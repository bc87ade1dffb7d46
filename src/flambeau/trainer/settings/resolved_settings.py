"""The settings of an existing run, in which nothing is left open."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, cast

from flambeau.trainer.settings.settings import FIELDS, Settings


def _resolved(name: str, default: Any = dataclasses.MISSING) -> Any:
    """A field that is not left open; `default` is for runs of versions that had not this setting."""
    return dataclasses.field(default=default, metadata=FIELDS[name].metadata, kw_only=True)


@dataclass(frozen=True)
class ResolvedSettings(Settings):
    """The settings of an existing run, as in config.toml: nothing is left open.

    None: a setting without effect in the run, such as a temperature without a teacher.
    """

    task: str = _resolved("task", "classification")
    image_size: int = _resolved("image_size")
    workers: int = _resolved("workers")
    model: str = _resolved("model")
    duration: str = _resolved("duration")
    warmup: str = _resolved("warmup", "10%")
    flip: bool = _resolved("flip", True)
    optimizer: str = _resolved("optimizer", "sgd")
    batch_size: int = _resolved("batch_size")
    best: str = _resolved("best", "val_accuracy")
    lr: float = _resolved("lr")
    loss: str = _resolved("loss", "cross-entropy")
    label_smoothing: float = _resolved("label_smoothing", 0.1)

    @property
    def autocast(self) -> Literal["fp32", "bf16", "fp16"]:
        """The precision of the forward pass; tf32 is float32 with other kernels for products."""
        return "fp32" if self.precision == "tf32" else cast(Any, self.precision)

    @property
    def plateau(self) -> tuple[int, float] | None:
        """Patience in epochs and factor, with the schedule 'plateau'."""
        if self.patience is None or self.plateau_factor is None:
            return None
        return self.patience, self.plateau_factor

    @property
    def distillation(self) -> tuple[str, float, float] | None:
        """The teacher, its weight in the loss and the temperature, with a teacher."""
        if self.teacher is None or self.teacher_weight is None or self.temperature is None:
            return None
        return self.teacher, self.teacher_weight, self.temperature


def settings_for_use(model: str, *, image_size: int, crop: str = "bilinear") -> ResolvedSettings:
    """The settings of a model without a known training, whose own mean nothing."""
    return ResolvedSettings(
        model=model,
        image_size=image_size,
        crop=crop,
        precision="fp32",
        device="auto",
        workers=0,
        duration="1ep",
        batch_size=64,
        lr=0.1,
    )
