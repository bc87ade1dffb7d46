"""Writes the outputs of a model's layers for the images of a data set into a file.

N: images, C: channels, H: height, W: width, T: tokens, S: side of the images in pixels.
"""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from torch import Tensor, nn

from flambeau.data.datasets.image_statistics import mean_std
from flambeau.data.sources.data_names import data_text
from flambeau.data.sources.folder import classes_above, images_below
from flambeau.data.sources.open_data import open_parts, open_unlabelled
from flambeau.data.sources.path_format import kind_of, shards_in
from flambeau.data.sources.source import PixelKind, Source
from flambeau.data.sources.targets import kind_of_targets, target_texts
from flambeau.data.sources.wide_source import found_format, of_kind
from flambeau.errors import InputError
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.recipes.models.classifier_head import find_head
from flambeau.recipes.models.feature_extractor import feature_extractor
from flambeau.run.loop.model_builder import model_file_sha256
from flambeau.trainer.evaluation.feature_file import feature_file
from flambeau.trainer.evaluation.predictions_file import refuse_existing
from flambeau.trainer.parts.data import DataFacts
from flambeau.trainer.parts.device import pick_device, use_threads
from flambeau.trainer.parts.fine_tuning import load_weights, weights_normalization
from flambeau.trainer.parts.model import (
    IMAGENET,
    SMALL,
    TINY,
    make_model,
    normalizer,
    pretrained_normalization,
)
from flambeau.trainer.parts.pixel_lines import adapted_line
from flambeau.trainer.prediction.trained_model import Trained, read_for, readable_batches
from flambeau.trainer.settings.resolved_settings import settings_for_use
from flambeau.user_code import is_function

HEAD_INPUT = "features"
"""The name of the input of the classifier head, if no layers are named."""
LABELS = "labels"
"""The name of the images' classes in a .safetensors file."""
Extract = Callable[[Tensor], dict[str, Any]]


def require_weights(name: str, *, pretrained: bool, weights: str | None) -> None:
    """InputError for a model by name that would have random values, or weights without effect."""
    if name in (SMALL, TINY):
        raise InputError(
            f"{name} has no published weights: name the folder of the run that trained it"
        )
    is_user_code = is_function(name)
    if pretrained and is_user_code:
        raise InputError(
            "--pretrained has no effect: the weights are those that the function returns"
        )
    if not (pretrained or weights or is_user_code):
        raise InputError(
            f"{name} would have random values: give --pretrained or --weights FILE, or name a run"
        )


def named_model(
    name: str,
    source: Source,
    *,
    image_size: int,
    pretrained: bool = False,
    weights: str | None = None,
    say: Callable[[str], None],
) -> Trained:
    """A model by name, with published weights or those of a file.

    Args:
        name: as for --model of `flambeau train`; FILE.py:FUNCTION returns it with its weights.
        source: images that are neither grey nor color are read with all channels, and normalized by their own
            mean and deviation; the first layer of published weights is adapted.
        weights: a file or run, as far as they fit.

    Raises:
        InputError: no such model or weights, weights for other channels, or none, which would leave random
            values.
    """
    require_weights(name, pretrained=pretrained, weights=weights)
    is_user_code = is_function(name)
    published = None if is_user_code or ":" in name else timm.get_pretrained_cfg(name)
    channels, mean, std, kind = _pixels(
        name, source, pretrained=pretrained, weights=weights, say=say
    )
    num_classes = published.num_classes if published is not None else 1000
    facts = DataFacts(
        [str(number) for number in range(num_classes)],
        channels,
        mean,
        std,
        0,
        0,
        "",
        "",
        model_file_sha256(name),
        pixels=kind,
    )
    settings = settings_for_use(name, image_size=image_size)
    use_threads()
    model = make_model(settings, facts, pretrained=pretrained, any_output=is_user_code)
    if weights is not None:
        say(load_weights(model, weights, needs=_first_layer(model)))
    device = pick_device(settings.device)
    return Trained(model.eval(), settings, facts, device, normalizer(facts, device))


def _pixels(
    name: str,
    source: Source,
    *,
    pretrained: bool,
    weights: str | None,
    say: Callable[[str], None],
) -> tuple[int, list[float], list[float], PixelKind]:
    """The channels of the images, the mean and deviation by which they are normalized, and their kind."""
    kind, stacked = found_format(source)
    if stacked is None:
        learned_with = None if weights is None else weights_normalization(weights, channels=3)
        published = None if is_function(name) else pretrained_normalization(name, channels=3)
        mean, std = learned_with or published or IMAGENET
        return 3, [*mean], [*std], "uint8"
    mean, std = mean_std(of_kind(source, kind, stacked), channels=stacked)
    say(f"images of {stacked} channels, normalized by their own mean and deviation")
    if pretrained:
        say(adapted_line(name, stacked))
    return stacked, mean, std, kind


def _first_layer(model: nn.Module) -> str | None:
    """The name of the weights that see the channels of the images, as far as it can be known."""
    layers = model.named_modules()
    first = next((name for name, m in layers if isinstance(m, nn.Conv2d)), None)
    return None if first is None else f"{first}.weight".lstrip(".")


def open_images(
    path: Path,
    classes: Sequence[str] | None,
    *,
    part: Literal["train", "val"] | None = None,
    download: bool = False,
    say: Callable[[str], object],
) -> Source:
    """The images of a data set in its order, with any labels.

    Args:
        classes: of the model; None: the names of the images' folders.
        part: of data with two; None: the validation part, or all if there is one.
    """
    if part is not None:
        train, val = open_parts(path, download=download)
        if val is None:
            raise InputError(
                f"{data_text(path)} is not in two parts: leave --part out, and all of it is read"
            )
        return train if part == "train" else val
    if classes is None:
        is_folder = path.is_dir() and kind_of(path) is None and not shards_in(path)
        names = images_below(path)[0] if is_folder else []
        classes = sorted({above[-1] for above in classes_above(path, names) if above})
    (given,) = open_unlabelled([path], classes, download=download, say=say)
    return given.source


@dataclass(frozen=True)
class WrittenFeatures:
    """The result of `write_features`.

    Attributes:
        shapes: of one image's features, by layer.
    """

    num_images: int
    shapes: dict[str, tuple[int, ...]]
    images: Path


def write_features(
    trained: Trained,
    source: Source,
    out: Path,
    *,
    layers: Sequence[str] = (),
    pool: bool = False,
    workers: int = 0,
    skip_bad_images: int = 0,
    force: bool = False,
    about: dict[str, str] | None = None,
) -> WrittenFeatures:
    """Write the outputs of layers for every image, in the order of the source, and the list of the images.

    Images are prepared as in an evaluation. Both files are written whole or not at all.

    Args:
        out: NAME.npy for one layer, or NAME.safetensors with a float32 tensor (N, ...) for each, and int64
            labels (N,), -1 for none, or float32 (N, K) of several labels or numbers; the list is NAME.csv
            with path and label.
        layers: names as in `named_modules()`; none: the input of the classifier head.
        pool: the mean over H and W of (N, C, H, W), and over T of (N, T, C).

    Raises:
        InputError: an unknown layer, or an output that is no tensor with a row per image; an existing file;
            an unreadable image.
        OSError: the disk is full or failing.
    """
    listing = out.with_suffix(".csv")
    refuse_existing(listing, suffixes=(".csv",), force=force, remedy="--force")
    if LABELS in layers:
        raise InputError(
            f"a layer cannot be called {LABELS!r}, which are the classes of the images"
        )
    extract = _extractor(trained.model, layers)
    names, numbers = _labels(source)
    metadata = dict(about or {}) | ({"classes": json.dumps(names)} if names else {})
    loader, _ = read_for(trained, source, workers=workers, skip_bad_images=skip_bad_images)
    has_labels = out.suffix.lower() == ".safetensors" and bool(names)
    kept: list[int] = []
    shapes: dict[str, tuple[int, ...]] = {}
    with feature_file(out, len(source), about=metadata, force=force) as add:
        for indices, (images, _) in readable_batches(loader, progress=True):
            outputs = trained.apply(extract, images.to(trained.device))
            features = _rows(outputs, len(indices), pool=pool)
            shapes = {name: tuple(feature.shape[1:]) for name, feature in features.items()}
            rows = {LABELS: numbers[indices].numpy()} if has_labels else {}
            add(rows | {name: feature.cpu().numpy() for name, feature in features.items()})
            kept += indices
        if not kept:
            raise InputError(f"none of the {len(source)} images could be read")
        write_file(listing, _listing(source, kept))
    return WrittenFeatures(len(kept), shapes, listing)


def _labels(source: Source) -> tuple[list[str], Tensor]:
    """The names of the classes, and for each image the position among them; -1 for class ''.

    Of several labels per image, and of numbers, their names and values.
    """
    if kind_of_targets(source).is_table:
        return [*source.classes], source.labels
    names = [name for name in source.classes if name]
    positions = torch.full((len(source.classes),), -1)
    positions[[bool(name) for name in source.classes]] = torch.arange(len(names))
    return names, positions[source.labels]


def _extractor(model: nn.Module, layers: Sequence[str]) -> Extract:
    """A function from images to the outputs of layers, with errors in the user's terms."""
    try:
        extract = feature_extractor(model, layers) if layers else _head_input(model)
    except ValueError as error:
        remedy = "" if layers else "\nName layers with --layers; `flambeau inspect` lists them"
        raise InputError(f"--layers: {error}{remedy}") from error

    @torch.inference_mode()
    def outputs_of(images: Tensor) -> dict[str, Any]:
        try:
            return extract(images)
        except (RuntimeError, TypeError) as error:
            if not str(error).startswith("layer "):
                raise
            raise InputError(f"--layers: {error}") from error

    return outputs_of


def _head_input(model: nn.Module) -> Extract:
    name = find_head(model).layers[0]
    head = model.get_submodule(name)

    def extract(images: Tensor) -> dict[str, Any]:
        features: dict[str, Any] = {}

        def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            features[HEAD_INPUT] = inputs[0].clone()

        with head.register_forward_pre_hook(keep):
            model(images)
        if not features:
            raise InputError(f"{name!r} did not run: name layers with --layers")
        return features

    return extract


def _rows(outputs: dict[str, Any], num_images: int, *, pool: bool) -> dict[str, Tensor]:
    """As they are written: float32, a row per image."""
    rows = {}
    for name, output in outputs.items():
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise InputError(
                f"--layers: {name!r} gives a {kind}, no tensor: name a layer inside of it"
            )
        if output.ndim == 0 or len(output) != num_images:
            raise InputError(
                f"--layers: {name!r} gives {tuple(output.shape)} for {num_images} images, not a row for "
                "each: name the layer around it"
            )
        rows[name] = _pooled(output.float()) if pool else output.float()
    if pool and all(output.ndim < 3 for output in outputs.values()):
        raise InputError("--pool has no effect: there are no maps; leave it out")
    return rows


def _pooled(features: Tensor) -> Tensor:
    if features.ndim == 4:
        return features.mean((2, 3))
    return features.mean(1) if features.ndim == 3 else features


def _listing(source: Source, kept: Sequence[int]) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["path", "label"])
    texts = target_texts(source)
    rows.writerows([source.describe(index), texts[index]] for index in kept)
    return text.getvalue().encode(errors="backslashreplace")
