"""A trained model out of a run folder, for predictions and evaluations."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from flambeau.data.datasets.bad_images import BadImages
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.loading.loader import Loader
from flambeau.data.sources.open_data import open_source
from flambeau.data.sources.source import Source
from flambeau.errors import InputError
from flambeau.parallel.shard_layout import unsharded
from flambeau.recipes.checkpoints.atomic_checkpoint import latest_checkpoint
from flambeau.recipes.training.label_smoothing import cross_entropy
from flambeau.recipes.training.metrics import MeanOnDevice, correct
from flambeau.train.build.defaults import DataFacts, model_file_sha256
from flambeau.train.build.device import use_float32, use_threads
from flambeau.train.build.network import make_model, normalizer
from flambeau.train.checkpoints.checkpointer import read_weights, why_not_loadable
from flambeau.train.checkpoints.published_weights import published
from flambeau.train.checkpoints.run_folder import RunFolder
from flambeau.train.settings.settings import Settings, from_stored

_BATCH = 64  # images a forward pass; chosen, untested
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, and what it needs to know of its run."""

    model: nn.Module
    settings: Settings
    facts: DataFacts
    device: torch.device
    normalize: Callable[[Tensor], Tensor]

    @torch.inference_mode()
    def logits(self, images: Tensor) -> Tensor:
        """Logits (N, classes) float32 of uint8 images (N, C, S, S), as the run itself evaluates."""
        same_device = self.settings.device.startswith(self.device.type)
        precision = self.settings.precision if same_device else "fp32"
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if precision in _DTYPES:
            context = torch.autocast(self.device.type, _DTYPES[precision])
        with context:
            logits: Tensor = self.model(self.normalize(images.to(self.device)))
        return logits.float()


def load_trained(path: Path, *, say: Callable[[str], None]) -> Trained:
    """Load what a run has published, or its newest whole checkpoint while it is not finished.

    Raises:
        InputError: not a run folder, no weights yet, or damaged ones.
    """
    folder = RunFolder(path)
    stored = folder.read_config() if path.exists() else None
    if stored is None:
        raise InputError(f"{path} is not a run folder: there is no config.toml in it")
    facts = DataFacts.read(folder.dataset)
    settings = from_stored(stored, folder.config)
    assert settings.model is not None
    if model_file_sha256(settings.model) != facts.model_file_sha256:
        say(f"{settings.model.rpartition(':')[0]} has changed since the run was started")
    use_threads()
    model = make_model(dataclasses.replace(settings, device="auto"), facts)
    weights = read_weights(folder.weights) if published(folder) else _newest(folder, say)
    why = why_not_loadable(model, weights)
    if why is not None:
        raise InputError(f"the weights in {path} do not fit the model {settings.model}: {why}")
    model.load_state_dict(weights)
    device = next(model.parameters()).device
    if device.type == "cuda":
        use_float32(settings.precision, device)
    return Trained(model.eval(), settings, facts, device, normalizer(facts, device))


def read_for(
    trained: Trained, source: Source, *, workers: int, skip_bad_images: int
) -> tuple[Loader, BadImages]:
    """Batches of a source as the model is evaluated on them, each image once and in order.

    Returns:
        The loader, of uint8 images (N, C, S, S) and labels (N,); and the images that it has left out so far.

    Raises:
        InputError: while it is iterated: more than `skip_bad_images` cannot be read.
    """
    assert trained.settings.image_size is not None
    dataset = ImageDataset(
        source,
        image_size=trained.settings.image_size,
        channels=trained.facts.channels,
        train=False,
        skip_bad=skip_bad_images > 0,
        keep=False,
    )
    bad = BadImages(None, limit=skip_bad_images)
    loader = Loader(
        dataset, micro_batch_size=_BATCH, workers=workers, shuffle=False,
        pin_memory=trained.device.type == "cuda", on_bad=bad.report_to(dataset.describe),
    )  # fmt: skip
    return loader, bad


def evaluate(
    trained: Trained,
    data: Path,
    *,
    workers: int = 0,
    skip_bad_images: int = 0,
    download: bool = False,
) -> dict[str, float | int]:
    """Loss and accuracy on a labelled data set, each image counted once.

    Raises:
        InputError: data that cannot be opened, classes that the run does not know, bad images.
    """
    source = open_source(data, trained.facts.classes, download=download)
    loader, bad = read_for(trained, source, workers=workers, skip_bad_images=skip_bad_images)
    loss, accuracy, num_images = MeanOnDevice(trained.device), MeanOnDevice(trained.device), 0
    for micro in loader.stream(epoch=0, position=0, epochs=1):
        images, targets = micro.data
        if not len(targets):
            continue
        logits, targets = trained.logits(images), targets.to(trained.device)
        loss.update(cross_entropy(logits, targets, reduction="none"))
        accuracy.update(correct(logits, targets))
        num_images += len(targets)
    if not num_images:
        raise InputError(f"no image in {data} could be read")
    return {
        "loss": float(loss.compute()),
        "accuracy": float(accuracy.compute()),
        "images": num_images,
        "bad_images": len(bad.names),
    }


def _newest(folder: RunFolder, say: Callable[[str], None]) -> dict[str, Tensor]:
    checkpoint, damaged = latest_checkpoint(folder.checkpoints)
    for error in damaged:
        say(f"passed over: {error}")
    if checkpoint is None:
        raise InputError(f"{folder.path} has no whole checkpoint yet; start its training again")
    say(f"the run is not finished: these are the weights of {checkpoint.folder.name}")
    files = unsharded(checkpoint.files)
    return safetensors.torch.load(files.get("ema.safetensors", files["model.safetensors"]))
