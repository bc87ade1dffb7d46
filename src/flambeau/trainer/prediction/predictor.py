"""A trained model that is called on images as a program or a notebook has them.

N: images, C: channels or classes, S: side in pixels, H: height, W: width.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from flambeau.data.sources.source import PixelKind
from flambeau.data.sources.user_samples import pil_pixels
from flambeau.data.sources.wide_source import COLORS, in_kind
from flambeau.data.transforms.crops import eval_image
from flambeau.errors import DecodeError, InputError, unreadable
from flambeau.images.all_channels import all_channels
from flambeau.images.decode import Picture, Stored, decode, size_of
from flambeau.regular_file import read_file
from flambeau.trainer.evaluation.answers import Size
from flambeau.trainer.parts.device import float32_by_default
from flambeau.trainer.prediction.ensemble import Ensemble, Model
from flambeau.trainer.prediction.trained_model import BATCH, Trained

Images: TypeAlias = "str | Path | Image.Image | NDArray[Any] | Tensor | Sequence[Images]"
"""One image or several: paths of files, PIL images, uint8 arrays (H, W), (H, W, C) or (N, H, W, C), uint8
tensors (H, W), (C, H, W) or (N, C, H, W); or a list of these. Arrays and tensors are float32 for a run that
was trained on floating-point pixels, and uint16, or such levels as float32, for one on 16-bit images."""


class Predictor:
    """A trained model with the preprocessing of its run.

    Args:
        trained: from `load_trained`.

    Attributes:
        trained: the model with settings, data facts, and device.
        model: the network, in evaluation mode, on its device.
        classes: names, in the order of its outputs.
        image_size: side of its images, pixels.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.model: nn.Module = trained.model
        self.classes = tuple(trained.facts.classes)
        self.image_size = trained.image_size

    @float32_by_default()
    def __call__(self, images: Images, *, flip_tta: bool = False) -> Any:
        """Predict, 64 images at a time.

        Args:
            images: one or several; see `Images`.
            flip_tta: average the probabilities of each image and its mirror image.

        Returns:
            A prediction for each image, in their order; for a single image, one. `Predictions` of classes,
            `LabelAnswers` of several labels, `NumberAnswers` of numbers, `MaskAnswers` of masks.

        Raises:
            InputError: an image that cannot be read, or a shape or dtype that no image has.
            TypeError: something else than images.
        """
        flat = _flat(images)

        def batches() -> Iterator[tuple[Tensor, list[Size]]]:
            for at in range(0, len(flat), BATCH):
                pixels, sizes = self._pixels(flat[at : at + BATCH], at)
                yield self.trained.logits(pixels, flip_tta=flip_tta).cpu(), sizes

        return _with_sets(self.trained, self.trained.facts.task.predictions(batches()))

    @float32_by_default()
    def preprocess(self, images: Images) -> Tensor:
        """The input of `model`: images as for a call, resized, cropped and normalized as in an evaluation.

        Returns:
            (N, C, S, S) float32 on the device of the model.

        Raises:
            InputError, TypeError: as for a call.
        """
        flat = _flat(images)
        pixels, _ = self._pixels(flat, 0)
        return self.trained.normalize(pixels.to(self.trained.device))

    def __repr__(self) -> str:
        trained = self.trained
        return (
            f"Predictor({trained.settings.model}, {len(self.classes)} classes, "
            f"{self.image_size} x {self.image_size}, on {trained.device})"
        )

    def _pixels(self, images: Sequence[Any], first: int) -> tuple[Tensor, list[Size]]:
        """(N, C, S, S) uint8, or float32 for a run of such pixels; of masks the size of each image.

        Args:
            images: single ones.
            first: the number of the first of them, for messages.
        """
        sizes = list[Size]()
        per_pixel = self.trained.facts.task.per_pixel
        channels = self.trained.facts.channels
        size = self.image_size
        kind = self.trained.facts.pixels
        dtype = torch.uint8 if kind == "uint8" else torch.float32
        x_NHWC = torch.empty(len(images), size, size, channels, dtype=dtype)
        for k, image in enumerate(images):
            try:
                stored = _stored_image(image, channels, kind)
                if per_pixel:
                    sizes.append(size_of(stored))
                eval_image(
                    stored,
                    size,
                    channels=channels,
                    interpolation=self.trained.settings.crop,
                    resize=self.trained.resize,
                    out=x_NHWC[k],
                )
            except DecodeError as error:
                name = image if isinstance(image, str | Path) else f"image {first + k}"
                raise InputError(f"{name}: {error}") from error
        return x_NHWC.permute(0, 3, 1, 2), sizes


class EnsemblePredictor:
    """Trained models that answer as one, by the mean of their probabilities or numbers.

    Each has the preprocessing of its run.

    Args:
        trained: from `ensemble_of`.

    Attributes:
        trained: the models with their settings.
        members: a `Predictor` of each.
        classes: names, in the order of the outputs.
    """

    def __init__(self, trained: Ensemble) -> None:
        self.trained = trained
        self.members = tuple(map(Predictor, trained.members))
        self.classes = tuple(trained.facts.classes)

    @float32_by_default()
    def __call__(self, images: Images, *, flip_tta: bool = False) -> Any:
        """Predict as `Predictor` does, with the same arguments and answers."""
        flat = _flat(images)
        readers = [Predictor(one) for one in self.trained.viewers]

        def batches() -> Iterator[tuple[Tensor, list[Size]]]:
            for at in range(0, len(flat), BATCH):
                part = flat[at : at + BATCH]
                views, sizes = zip(*(reader._pixels(part, at) for reader in readers), strict=True)
                yield self.trained.logits(views, flip_tta=flip_tta).cpu(), sizes[0]

        return _with_sets(self.trained, self.trained.facts.task.predictions(batches()))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.members))
        return f"EnsemblePredictor({shown})"


def predictor_of(model: Model) -> Predictor | EnsemblePredictor:
    """A function of images, of a model or of several."""
    return Predictor(model) if isinstance(model, Trained) else EnsemblePredictor(model)


def _with_sets(model: Model, predictions: Any) -> Any:
    """With the prediction sets of a model that has some."""
    calibration = model.calibration
    if calibration is None or calibration.threshold is None:
        return predictions
    sets = calibration.named_sets(predictions.logits, predictions.names)
    return dataclasses.replace(predictions, sets=tuple(sets))


def _flat(images: Images) -> list[Any]:
    """One entry per image."""
    if isinstance(images, Tensor | np.ndarray):
        return list(images) if images.ndim == 4 else [images]
    if isinstance(images, str | Path | Image.Image):
        return [images]
    if isinstance(images, Sequence) and not isinstance(images, bytes):
        return [one for part in images for one in _flat(part)]
    raise TypeError(
        "images are paths, PIL images, uint8 arrays (H, W, C), uint8 tensors (C, H, W), both of floats for a "
        f"run of such, or a list of these; got {type(images).__name__}"
    )


def _stored_image(image: Any, channels: int, kind: PixelKind) -> Stored:
    if channels not in COLORS:
        return in_kind(all_channels(_any_channels(image), channels), kind)
    return _stored(image) if kind == "uint8" else _stored_float(image, channels, kind)


def _any_channels(image: Any) -> Stored:
    """An image of channels that are no color, as it is given."""
    if isinstance(image, Tensor):
        if image.ndim != 3:
            raise DecodeError(f"a tensor of shape {tuple(image.shape)}: an image is (C, H, W)")
        image = image.detach().permute(1, 2, 0).cpu().numpy()
    if not isinstance(image, np.ndarray):
        return _read(Path(image)) if isinstance(image, str | Path) else _of_pil(image)
    if image.dtype.kind == "f":
        return np.ascontiguousarray(image, np.float32)
    return image


def _stored(image: Any) -> Stored:
    if isinstance(image, str | Path):
        return _read(Path(image))
    if isinstance(image, Image.Image):
        return _of_pil(image)
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8:
            raise DecodeError(
                f"an array of {image.dtype}: values are uint8, 0 to 255; of floats in [0, 1] pass "
                "(255 * x).round().astype('uint8')"
            )
        return image
    if image.dtype != torch.uint8:
        raise DecodeError(
            f"a tensor of {image.dtype}: values are uint8, 0 to 255, not yet normalized; of floats in [0, 1] "
            "pass (255 * x).round().to(torch.uint8)"
        )
    return _rows_first(image)


def _rows_first(image: Tensor) -> NDArray[Any]:
    """(H, W, C) of (H, W) or (C, H, W)."""
    if image.ndim == 2:
        image = image[None]
    if image.ndim != 3 or image.shape[0] not in (1, 3, 4):
        raise DecodeError(
            f"a tensor of shape {tuple(image.shape)}: an image is (C, H, W), C 1, 3 or 4 (the last one alpha)"
        )
    return np.ascontiguousarray(image.detach().permute(1, 2, 0).cpu().numpy())


def _stored_float(image: Any, channels: int, kind: PixelKind) -> Stored:
    """Floating-point pixels unchanged; 16-bit ones as levels, or 8-bit ones as k / 255, as in training."""
    if kind == "uint16" and str(getattr(image, "dtype", "")).endswith("uint16"):
        return Picture(_rows_first(image) if isinstance(image, Tensor) else image).levels()
    if isinstance(image, Tensor | np.ndarray) and "float" in str(image.dtype):
        if isinstance(image, Tensor):
            image = image.detach().cpu()
            image = (image.permute(1, 2, 0) if image.ndim == 3 else image).float().numpy()
        return np.ascontiguousarray(image, np.float32)
    if kind == "uint16":
        return Picture(_stored(image)).levels()
    if kind == "float":
        raise DecodeError(
            "8-bit pixels, and the run was trained on floating-point ones beyond 0 .. 1: pass arrays or "
            "tensors of float32 that have been through the same transforms"
        )
    return decode(_stored(image), channels=channels).astype(np.float32) / np.float32(255)


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise InputError(
            f"{path} is a folder: give the paths of its images, or let `flambeau predict` read them"
        )
    if not path.exists():
        raise InputError(f"{path} does not exist")
    try:
        return read_file(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _of_pil(image: Image.Image) -> NDArray[Any]:
    """Its pixels, upright, as if read from a file."""
    if image.mode == "F":
        raise DecodeError("floating-point pixels have no defined brightness")
    try:
        return pil_pixels(image)
    except (OSError, SyntaxError) as error:  # PIL reads the file only now
        raise DecodeError(" ".join(str(error).split()) or type(error).__name__) from error
