"""A trained model from a run folder, and the batches to evaluate it on."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from flambeau.data.datasets.bad_images import BadImages
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.loading.batch_layout import BatchLayout
from flambeau.data.loading.loader import Loader, ReadOptions
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.data.sources.source import Source, require_unit
from flambeau.data.sources.targets import TargetChoice
from flambeau.data.sources.wide_source import of_kind
from flambeau.data.transforms.crops import EvalResize, TrainingCrop
from flambeau.errors import InputError
from flambeau.parallel.shard_layout import unsharded
from flambeau.recipes.checkpoints.atomic_checkpoint import latest_checkpoint
from flambeau.run.folder.checkpointer import why_not_loadable
from flambeau.run.folder.published_weights import published
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.folder.store_run import run_here
from flambeau.run.loop.model_builder import build_from_file, model_file_sha256
from flambeau.run.options.option import check_value
from flambeau.terminal import CountBar
from flambeau.trainer.parts.data import DataFacts, with_thresholds
from flambeau.trainer.parts.device import pick_device, use_float32, use_threads
from flambeau.trainer.parts.model import (
    check_claim,
    check_logits,
    check_output,
    make_model,
    normalizer,
    shape_of,
)
from flambeau.trainer.parts.qat_model import qat_model
from flambeau.trainer.prediction.calibration import FILE, Calibration, stored_calibration
from flambeau.trainer.prediction.own_loop import as_torchvision, recorded_use
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import FIELDS
from flambeau.trainer.settings.stored_settings import from_stored
from flambeau.weights.safetensors_file import read_safetensors

BATCH = 64  # images per forward pass; chosen, untested
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_Output = TypeVar("_Output")


class Batches(Protocol):
    """Batches of images, each once and in order: a `Loader`, or several as one."""

    @property
    def length(self) -> int:
        """Number of images."""

    def stream(self, *, epoch: int, position: int, epochs: int) -> Iterator[MicroBatch]:
        """The batches of so many epochs."""


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, and what it needs from its run."""

    model: nn.Module
    settings: ResolvedSettings
    facts: DataFacts
    device: torch.device
    normalize: Callable[[Tensor], Tensor]
    has_fixed_size: bool = False
    """It takes only images of this size: an export."""
    resize: EvalResize = None
    others: tuple[DataFacts, ...] = ()
    """Of an export of several runs, what the others were trained on."""
    calibration: Calibration | None = None
    """By which the logits are divided, of a run of classes that was calibrated."""
    folder: Path | None = None
    """Of the run; None for an export, or a loop of the user's."""
    weights_sha256: str | None = None

    @property
    def knows_its_data(self) -> bool:
        """Whether it is of a run of `flambeau train`, which has noted its data and settings."""
        return self.facts.train_samples > 0

    @property
    def image_size(self) -> int:
        return self.settings.eval_size or self.settings.image_size

    @property
    def choice(self) -> TargetChoice:
        """Which targets of data the model has learned."""
        return self.facts.choice(self.settings)

    @torch.inference_mode()
    def logits(self, images: Tensor, *, flip_tta: bool = False) -> Tensor:
        """Logits (N, classes) float32 of uint8 images (N, C, S, S), as the run itself evaluates.

        With `flip_tta`, the log of the mean probabilities with mirror images.
        """
        images = images.to(self.device)
        logits: Tensor = self.apply(self.model, images).float()
        if flip_tta:
            mirrored = self.apply(self.model, images.flip(-1)).float()
            logits = self.facts.task.mean_of_views(logits, mirrored)
        return logits if self.calibration is None else logits / self.calibration.temperature

    def apply(self, function: Callable[[Tensor], _Output], images: Tensor) -> _Output:
        """Call a function on normalized images, in the precision of evaluations.

        Args:
            function: the model, or one that calls it.
            images: (N, C, S, S) uint8, or float32 in the unit of the training, on the model's device.
        """
        same_device = self.settings.device.startswith(self.device.type)
        precision = self.settings.precision if same_device else "fp32"
        dtype = _DTYPES.get(precision)
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return function(self.normalize(images))


def load_trained(run: str | Path, *, trust: bool = False, say: Callable[[str], None]) -> Trained:
    """Load a run's published weights, or of an unfinished one the newest whole checkpoint.

    Args:
        run: a folder, or its address in a store.
        trust: run its model's file, even if nothing shows that this user has made the run.

    Raises:
        InputError: no run folder, that of a user's loop without a builder, no weights yet, or damaged ones.
        UntrustedCode: the model is in a file that may not be run.
    """
    folder = RunFolder(run_here(run, say))
    stored = folder.read_existing()
    if "builder" in stored or "model" not in stored:
        return _of_own_loop(folder, stored, trust=trust, say=say)
    facts = with_thresholds(DataFacts.read(folder.dataset), folder)
    settings = from_stored(stored, folder.config)
    folder.permission(stored, trust=trust, say=say).ask_for(stored, "model")
    if model_file_sha256(settings.model) != facts.model_file_sha256:
        say(f"{settings.model.rpartition(':')[0]} has changed since the run was started")
    use_threads()
    weights = _weights(folder, say)
    try:
        check_claim(settings.model, weights, **shape_of(settings, facts))
    except InputError as error:
        raise InputError(f"the weights in {folder.path} do not fit the model: {error}") from error
    model = qat_model(
        make_model(dataclasses.replace(settings, device="auto"), facts), settings, facts
    )
    why = why_not_loadable(model, weights)
    if why is not None:
        raise InputError(
            f"the weights in {folder.path} do not fit the model {settings.model}: {why}"
        )
    model.load_state_dict(weights)
    device = next(model.parameters()).device
    if device.type == "cuda":
        use_float32(settings.precision, device)
    return Trained(
        model.eval(),
        settings,
        facts,
        device,
        normalizer(facts, device),
        resize=facts.task.eval_resize,
        calibration=_calibration(folder, facts, say),
        folder=folder.path,
        weights_sha256=None if (result := published(folder)) is None else result.sha256,
    )


def _of_own_loop(
    folder: RunFolder, stored: Mapping[str, Any], *, trust: bool, say: Callable[[str], None]
) -> Trained:
    """The model of a run of the class Run, which has noted how it is made and used."""
    path = folder.path
    settings, facts, resize = recorded_use(path, stored)
    folder.permission(stored, trust=trust, say=say).ask_for(stored, "builder")
    if model_file_sha256(settings.model) != facts.model_file_sha256:
        say(f"{settings.model.rpartition(':')[0]} has changed since the run was started")
    use_threads()
    weights = _weights(folder, say)
    shape = shape_of(settings, facts)
    sizes = {name: size for name, size in shape.items() if name != "per_pixel"}
    model = build_from_file(settings.model, what="builder", **sizes)
    why = why_not_loadable(model, weights)
    if why is not None:
        raise InputError(f"the weights in {path} do not fit the model {settings.model}: {why}")
    model.load_state_dict(weights)
    check_logits(model, **shape)
    # Not in channels_last: the loop has used it as the function makes it.
    device = pick_device(settings.device)
    model = model.to(device).eval()
    if device.type == "cuda":
        use_float32(settings.precision, device)
    return Trained(model, settings, facts, device, as_torchvision(facts, device), resize=resize)


def _calibration(
    folder: RunFolder, facts: DataFacts, say: Callable[[str], None]
) -> Calibration | None:
    """What the run keeps for the weights that were loaded; a line where it keeps something else."""
    if facts.task_name != "classification" or not (folder.path / FILE).exists():
        return None
    result = published(folder)
    found = None if result is None else stored_calibration(folder.path, result.sha256)
    if found is None:
        say(
            f"{folder.path / FILE} is of other weights, or damaged, and not used: `flambeau evaluate "
            "--calibrate` makes it anew"
        )
    return found


def _weights(folder: RunFolder, say: Callable[[str], None]) -> dict[str, Tensor]:
    return read_safetensors(folder.weights) if published(folder) else _newest(folder, say)


def at_size(trained: Trained, image_size: int | None) -> Trained:
    """The model for images of another size than in training; None: the same.

    Raises:
        InputError: a size that the model cannot take.
    """
    if image_size is None or image_size == trained.image_size:
        return trained
    check_value(FIELDS["image_size"], image_size)
    if trained.has_fixed_size:
        raise InputError(
            f"an export is made for images of {trained.image_size} pixels, and image_size = {image_size}\n"
            "Ask the run itself, or leave the size out: the export resizes what it is given"
        )
    facts = trained.facts
    try:
        check_output(
            trained.model,
            **{**shape_of(trained.settings, facts), "image_size": image_size},
        )
    except InputError as error:
        raise InputError(
            f"{trained.settings.model} was trained at {trained.settings.image_size} pixels and cannot take "
            f"image_size = {image_size}: {error}"
        ) from error
    settings = dataclasses.replace(trained.settings, eval_size=image_size)
    resize = trained.resize
    if isinstance(resize, int):  # the same share of the image is kept
        resize = round(resize * image_size / trained.image_size)
    return dataclasses.replace(trained, settings=settings, resize=resize)


def read_for(
    trained: Trained,
    source: Source,
    *,
    workers: int,
    skip_bad_images: int,
    bad: BadImages | None = None,
) -> tuple[Loader, BadImages]:
    """Batches of a source as in an evaluation, each image once and in order.

    Args:
        bad: counts the images that are left out; None: one of its own, up to `skip_bad_images`.

    Returns:
        The loader, of images (N, C, S, S) uint8 or float32 and labels (N,); and the images left out so far.

    Raises:
        InputError: pixels of another unit than in training; while iterating, more than `skip_bad_images`
            unreadable ones.
    """
    source = of_kind(source, trained.facts.pixels, trained.facts.channels)
    require_unit(source, trained.facts.pixels, "the training")
    dataset = ImageDataset(
        source,
        image_size=trained.image_size,
        channels=trained.facts.channels,
        train=False,
        crop=TrainingCrop(interpolation=trained.settings.crop, eval_resize=trained.resize),
        skip_bad=skip_bad_images > 0,
        keep=False,
    )
    bad = BadImages(None, limit=skip_bad_images) if bad is None else bad
    loader = Loader(
        dataset,
        BatchLayout(BATCH),
        shuffle=False,
        reading=ReadOptions(workers, pin_memory=trained.device.type == "cuda"),
        on_bad=bad.report_to(dataset.describe),
    )
    return loader, bad


def readable_batches(loader: Batches, *, progress: bool) -> Iterator[tuple[list[int], Any]]:
    """The indices of the readable images of each batch, and its data; `progress` shows a bar."""
    with CountBar(loader.length, unit="images", shown=progress) as bar:
        for micro in loader.stream(epoch=0, position=0, epochs=1):
            bad = set(map(int, micro.bad))
            indices = [index for index in map(int, micro.indices) if index not in bad]
            if indices:
                yield indices, micro.data
            bar.update(len(micro.indices))


def _newest(folder: RunFolder, say: Callable[[str], None]) -> dict[str, Tensor]:
    checkpoint, damaged = latest_checkpoint(folder.checkpoints)
    for error in damaged:
        say(f"passed over: {error}")
    if checkpoint is None:
        raise InputError(f"{folder.path} has no whole checkpoint yet; start its training again")
    say(f"the run is not finished: these are the weights of {checkpoint.folder.name}")
    files = unsharded(checkpoint.files)
    return safetensors.torch.load(files.get("ema.safetensors", files["model.safetensors"]))
