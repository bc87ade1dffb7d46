"""The training of `flambeau train`, from top to bottom; the loop uses nothing but Run's public verbs."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from flambeau.data.bad_images import BadImages
from flambeau.data.dataset import ImageDataset
from flambeau.data.errors import InputError
from flambeau.data.source import Source
from flambeau.parallel.ranks import join_ranks
from flambeau.recipes.checkpoints.atomic_checkpoint import checkpoint_folders
from flambeau.recipes.data.random_erasing import random_erasing
from flambeau.recipes.models.param_groups import param_groups
from flambeau.recipes.parallel.sync_batchnorm import convert_sync_batchnorm
from flambeau.recipes.setup.determinism import make_deterministic
from flambeau.recipes.setup.seeding import seed_everything
from flambeau.recipes.training.cutmix import cutmix
from flambeau.recipes.training.label_smoothing import cross_entropy
from flambeau.recipes.training.metrics import correct
from flambeau.recipes.training.mixup import mixup
from flambeau.train.config import Settings, as_dict
from flambeau.train.device import pick_device, use_threads
from flambeau.train.models import build_model, check_output
from flambeau.train.resolve import DataFacts, datasets
from flambeau.train.run import Run


@dataclass(frozen=True)
class Training:
    """A run that is ready to go, and what its loop needs."""

    run: Run
    model: nn.Module
    train: ImageDataset
    val: ImageDataset
    normalize: Callable[[Tensor], Tensor]
    loss_of: Callable[[Tensor, Tensor], Tensor]
    bad_images: BadImages


def fit(training: Training) -> None:
    """Train to the end of the run, evaluating after each epoch; the run publishes the weights."""
    run, model, normalize = training.run, training.model, training.normalize
    bad_val_images = training.bad_images.report_to(training.val.describe)
    for _ in run.epochs():
        for images, targets in run.batches():
            run.step(training.loss_of(images, targets))
        for images, targets in run.evaluate(training.val, on_bad=bad_val_images):
            with run.autocast():
                logits = model(normalize(images))
            losses = cross_entropy(logits, targets, reduction="none")
            run.log(val_loss=losses, val_accuracy=correct(logits, targets))


def set_up(
    settings: Settings,
    facts: DataFacts,
    train: Source,
    val: Source,
    *,
    folder: Path,
    bar: bool = True,
    replay_from: Path | None = None,
    before_run: Callable[[], None] = lambda: None,
) -> Training:
    """Make everything that `fit` runs.

    Args:
        settings: resolved: nothing in it is left open.
        facts: of the data.
        train, val: the sources.
        folder: of the run.
        bar: show a progress bar on a terminal.
        replay_from: a checkpoint folder to start from, writing nothing.
        before_run: called when all but the run is made, so when most mistakes have been found.

    Raises:
        InputError: whatever the user can mend.
    """
    make_deterministic(warn_only=True)
    use_threads()
    seed_everything(settings.seed)
    assert settings.batch_size is not None
    assert settings.duration is not None
    ranks = join_ranks()
    train_data, val_data = datasets(settings, facts, train, val)

    shards = settings.shard == "fsdp" and replay_from is None

    def make() -> nn.Module:
        # With a checkpoint the weights are there: no download, which may not be possible any more.
        started = replay_from is not None or checkpoint_folders(folder / "checkpoints")
        # The other ranks get the weights of rank 0.
        pretrained = settings.pretrained and not started and ranks.is_first
        # To be sharded, it goes to the device block by block.
        host = dataclasses.replace(settings, device="cpu") if shards else settings
        model = make_model(host, facts, pretrained=pretrained)
        check_training(model, settings, facts, world=ranks.world)
        return convert_sync_batchnorm(model) if settings.sync_bn and ranks.world > 1 else model

    model = ranks.each(make)
    if shards:
        from flambeau.train.sharding import shard_model

        shard_model(model, ranks, pick_device(settings.device))
    ranks.first(before_run)
    bad_images = BadImages(folder / "bad_images.txt", limit=settings.skip_bad_images)
    run = Run(
        folder,
        model,
        make_optimizer(settings, model),
        train_data,
        duration=settings.duration,
        batch_size=settings.batch_size,
        accumulate=settings.accumulate,
        seed=settings.seed,
        workers=settings.workers or 0,
        precision=settings.precision,  # type: ignore[arg-type]  # Settings has checked the choice
        compression=settings.compression,
        stall_timeout=settings.stall_timeout,
        schedule=settings.schedule,
        warmup=settings.warmup,
        clip_norm=settings.clip_norm,
        ema=settings.ema,
        checkpoint_every=settings.checkpoint_every,
        keep=settings.keep,
        log_every=settings.log_every,
        config=as_dict(settings),
        attachments={"dataset.json": facts.as_json()},
        on_bad=bad_images.report_to(train_data.describe),
        bar=bar,
        replay_from=replay_from,
    )
    normalize = normalizer(facts, run.device)

    def loss_of(images: Tensor, targets: Tensor) -> Tensor:
        x = normalize(images)
        if settings.random_erasing:
            chance = settings.random_erasing
            x = random_erasing(x, generator=torch.default_generator, probability=chance)
        mix = cutmix if settings.cutmix and (run.state.step % 2 or not settings.mixup) else mixup
        alpha = settings.cutmix if mix is cutmix else settings.mixup
        if alpha:
            x, targets = mix(
                x,
                targets,
                alpha=alpha,
                num_classes=len(facts.classes),
                generator=torch.default_generator,
            )
        with run.autocast():
            logits = model(x)
        return cross_entropy(logits, targets, smoothing=settings.label_smoothing)

    return Training(run, model, train_data, val_data, normalize, loss_of, bad_images)


def make_model(settings: Settings, facts: DataFacts, *, pretrained: bool = False) -> nn.Module:
    """The model of a run on its device, in the memory format that convolutions are fastest in."""
    assert settings.model is not None
    shape = _shape(settings, facts)
    model = build_model(settings.model, pretrained=pretrained, **shape)
    check_output(model, **shape)
    return model.to(pick_device(settings.device), memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def make_optimizer(settings: Settings, model: nn.Module) -> Optimizer:
    """The fused optimizer of a run, without decay on biases and norms."""
    assert settings.lr is not None
    groups = param_groups(model, weight_decay=settings.weight_decay)
    if settings.optimizer == "sgd":
        return SGD(groups, lr=settings.lr, momentum=0.9, nesterov=True, fused=True)
    if settings.optimizer == "adam":
        return Adam(groups, lr=settings.lr, fused=True)
    return AdamW(groups, lr=settings.lr, fused=True)


def normalizer(facts: DataFacts, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function from uint8 images (N, C, H, W) to normalised float32 ones, on the device."""
    mean = torch.tensor(facts.mean, device=device).mul_(255).view(1, -1, 1, 1)
    std = torch.tensor(facts.std, device=device).mul_(255).view(1, -1, 1, 1)

    def normalize(images: Tensor) -> Tensor:
        return images.to(torch.float32, memory_format=torch.channels_last).sub_(mean).div_(std)

    return normalize


def check_training(
    model: nn.Module, settings: Settings, facts: DataFacts, *, world: int = 1
) -> None:
    """Refuse a model that cannot train, or not on the smallest batch of an epoch, if that is one image."""
    assert settings.batch_size is not None
    num_images, accumulate = facts.train_samples, settings.accumulate
    lone = num_images % (settings.batch_size * accumulate) == 1
    lone = lone or settings.batch_size < 2 * (1 if settings.sync_bn else world)
    try:
        check_output(model, **_shape(settings, facts), num_images=2 - lone, training=True)
    except InputError as error:
        if not lone or not isinstance(error.__cause__, ValueError):
            raise
        sizes = itertools.count(2 * world)
        good = next(size for size in sizes if num_images % (size * accumulate) != 1)
        raise InputError(
            f"batch_size = {settings.batch_size} leaves a batch of one image{' a process' * (world > 1)}, on "
            f"which this model cannot train: {error.__cause__}\nUse another one, such as --batch-size {good}"
        ) from error


def _shape(settings: Settings, facts: DataFacts) -> dict[str, Any]:
    assert settings.image_size is not None
    return {
        "num_classes": len(facts.classes),
        "channels": facts.channels,
        "image_size": settings.image_size,
    }
