"""What a run of a user's own loop says of how its model is made and used: `builder` and what goes with it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.data.drop_in.declared_preprocessing import Preprocessing
from flambeau.data.transforms.crops import EvalResize
from flambeau.errors import InputError
from flambeau.run.options.run_options import checked_classes
from flambeau.trainer.parts.data import DataFacts
from flambeau.trainer.settings.resolved_settings import ResolvedSettings, settings_for_use
from flambeau.user_code import is_function


def used_as(
    model: str,
    preprocessing: Preprocessing,
    classes: tuple[str, ...],
    *,
    sha256: str | None = None,
) -> tuple[ResolvedSettings, DataFacts, EvalResize]:
    """What the use of a model without a known training needs.

    Args:
        model: its builder, or what it is called.
        sha256: of the builder's file.
    """
    settings = settings_for_use(
        model, image_size=preprocessing.image_size, crop=preprocessing.interpolation
    )
    facts = DataFacts(
        [*classes],
        preprocessing.channels,
        [*preprocessing.mean],
        [*preprocessing.std],
        train_samples=0,
        val_samples=0,
        train_fingerprint="",
        val_fingerprint="",
        model_file_sha256=sha256,
        pixels=preprocessing.kind,
    )
    return settings, facts, preprocessing.resize


def recorded_use(
    path: Path, stored: Mapping[str, Any]
) -> tuple[ResolvedSettings, DataFacts, EvalResize]:
    """What a run's config.toml says of its model; nothing is run.

    Raises:
        InputError: it says nothing, or was edited.
    """
    if "builder" not in stored:
        raise InputError(
            f"{path} is of a training loop of your own (the class Run), and does not say how its model is "
            'made\nGive Run builder="FILE.py:FUNCTION", preprocess= and classes= and start the script again: '
            "a finished run trains no further and notes them; or make the model yourself, and take the "
            f"weights of `flambeau convert {path} NAME.pth`"
        )
    builder = stored["builder"]
    sha256 = stored.get("builder_sha256")
    try:
        if not isinstance(builder, str) or not is_function(builder):
            raise InputError(f"builder = {builder!r:.80} is not FILE.py:FUNCTION")
        if not isinstance(stored.get("preprocess"), Mapping):
            raise InputError("it has no preprocess")
        preprocessing = Preprocessing.of(stored["preprocess"])
        classes = stored.get("classes")
        return used_as(
            builder,
            preprocessing,
            checked_classes(classes if isinstance(classes, list) else ()),
            sha256=sha256 if isinstance(sha256, str) else None,
        )
    except InputError as error:
        raise InputError(f"{path / 'config.toml'} was edited: {error}") from error


def as_torchvision(facts: DataFacts, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function from images (N, C, H, W), uint8 or float32, to normalized float32 ones, on the device.

    Of 8 bits to the same bits as torchvision's ToTensor and Normalize, and contiguous, as from a DataLoader.
    """
    mean, std = (
        torch.tensor(one, dtype=torch.float32, device=device).view(1, -1, 1, 1)
        for one in (facts.mean, facts.std)
    )

    def normalize(images: Tensor) -> Tensor:
        x = images.contiguous()
        x = x if x.dtype == torch.float32 else x.float().div_(255)
        return x.sub(mean).div_(std)

    return normalize
