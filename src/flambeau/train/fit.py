"""The training of `flambeau train`, from top to bottom; the loop uses nothing but Run's public verbs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flambeau.data.datasets.bad_images import BadImages
from flambeau.data.datasets.device_dataset import DeviceDataset
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.sources.source import Source
from flambeau.parallel.ranks import Ranks, join_ranks
from flambeau.recipes.checkpoints.atomic_checkpoint import checkpoint_folders
from flambeau.recipes.parallel.sync_batchnorm import convert_sync_batchnorm
from flambeau.recipes.setup.determinism import make_deterministic
from flambeau.recipes.setup.seeding import seed_everything
from flambeau.recipes.training.label_smoothing import cross_entropy
from flambeau.recipes.training.metrics import correct
from flambeau.recipes.training.plateau import ReduceOnPlateau
from flambeau.train.build.class_balance import balanced_sampler
from flambeau.train.build.compiled_model import compiled, warm_up
from flambeau.train.build.data import DataFacts, datasets
from flambeau.train.build.device import pick_device, use_float32, use_threads
from flambeau.train.build.fine_tuning import (
    freeze_parts,
    load_weights,
    parameter_groups,
    recompute_parts,
    report,
)
from flambeau.train.build.model import check_training, make_model, normalizer
from flambeau.train.build.optimizer import new_optimizer
from flambeau.train.evaluation.sample_history import SampleHistory
from flambeau.train.loop.nan_guard import explain
from flambeau.train.loss import TrainingLoss, make_teacher
from flambeau.train.run import Run
from flambeau.train.settings.config_file import as_dict
from flambeau.train.settings.fields import parse_betas
from flambeau.train.settings.named_schedule import NamedSchedule
from flambeau.train.settings.resolved_settings import ResolvedSettings
from flambeau.train.settings.run_options import RunKeywords


@dataclass(frozen=True)
class Training:
    """A run that is ready to go, and what its loop needs."""

    run: Run
    model: nn.Module
    train: ImageDataset | DeviceDataset
    val: ImageDataset | DeviceDataset
    normalize: Callable[[Tensor], Tensor]
    loss_of: TrainingLoss
    early_stop: int
    bad_images: BadImages


def fit(training: Training) -> None:
    """Train to the end of the run, evaluating after each epoch; the run publishes the weights."""
    run, model, normalize = training.run, training.model, training.normalize
    history: SampleHistory = run.state.user["sample_history"]
    bad_val_images = training.bad_images.report_to(training.val.describe)
    for _ in run.epochs():
        for images, targets in run.batches():
            loss, logits = training.loss_of.with_logits(images, targets, step=run.state.step)
            if logits is not None:
                run.log(train_accuracy=correct(logits, targets))
                assert run.state.micro is not None
                history.note(run.state.micro, logits, targets)
            run.step(loss)
        for images, targets in run.evaluate(training.val, on_bad=bad_val_images):
            with run.autocast():
                logits = model(normalize(images))
            losses = cross_entropy(logits, targets, reduction="none")
            run.log(val_loss=losses, val_accuracy=correct(logits, targets))
        if 0 < training.early_stop <= run.epochs_since_best:
            num, best = run.epochs_since_best, run.state.best.metrics.get("val_accuracy")
            than = "" if best is None else f" than {best:.4f}"
            last = "last epoch" if num == 1 else f"last {num} epochs"
            run.progress.say(f"no better val_accuracy in the {last}{than}")
            run.stop()
    if run.result is not None:
        history.save(run.folder.path)


def set_up(
    settings: ResolvedSettings,
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
        settings: of the run.
        facts: of the data.
        train, val: the sources.
        folder: of the run.
        bar: show a progress bar on a terminal.
        replay_from: a checkpoint folder to start from, writing nothing.
        before_run: called when all but the run is made, so when most mistakes have been found.

    Raises:
        InputError: whatever the user can fix.
    """
    device = pick_device(settings.device)
    set_up_torch(settings, device)
    ranks = join_ranks()
    train_data, val_data = datasets(settings, facts, train, val)
    model, lines = new_model(settings, facts, ranks, folder=folder, replay_from=replay_from)
    optimizer = ranks.each(lambda: make_optimizer(settings, model))
    # Before Run, which may put pieces into the optimizer in the place of the model's parameters.
    lines += report(settings, model, optimizer)
    normalize = normalizer(facts, device)
    data = train_data, val_data
    called, loss_of, compile_line = make_loss(
        model, settings, facts, data, ranks, normalize=normalize
    )
    bad_images = BadImages(folder / "bad_images.txt", limit=settings.skip_bad_images)
    ranks.first(before_run)

    def explain_batch(batch: Any, names: Sequence[str], step: int) -> list[str]:
        with torch.compiler.set_stance("force_eager"):  # hooks see nothing inside a compiled model
            return explain(model, lambda: loss_of(*batch, step=step), names)

    options: RunKeywords = {
        **run_options(settings), "attachments": {"dataset.json": facts.as_json()}, "explain": explain_batch,
        "on_bad": bad_images.report_to(train_data.describe), "state": new_history(facts, ranks, device),
        "sampler": balanced_sampler(settings, train.labels), "bar": bar, "replay_from": replay_from,
    }  # fmt: skip
    run = Run(folder, called, optimizer, train_data, **options)
    for line in [*(lines if run.state.step == 0 else ()), *compile_line]:
        run.progress.say(line)
    return Training(run, called, *data, normalize, loss_of, settings.early_stop, bad_images)


def make_loss(
    model: nn.Module,
    settings: ResolvedSettings,
    facts: DataFacts,
    data: tuple[ImageDataset | DeviceDataset, ImageDataset | DeviceDataset],
    ranks: Ranks,
    *,
    normalize: Callable[[Tensor], Tensor],
) -> tuple[nn.Module, TrainingLoss, list[str]]:
    """The model as the loop calls it, its loss, and a line on what compiling took, if it was compiled."""
    device = pick_device(settings.device)
    teacher = ranks.each(lambda: make_teacher(settings, facts, device))
    called = compiled(model, settings)
    loss_of = TrainingLoss(
        called, settings, facts, device=device, normalize=normalize, teacher=teacher
    )
    if called is model:
        return called, loss_of, []
    seconds = ranks.each(
        lambda: warm_up(
            called, settings, data, ranks, loss_of=functools.partial(loss_of, step=0),
            logits_of=lambda images: called(normalize(images)), device=device,
        )
    )  # fmt: skip
    return called, loss_of, [f"the model was compiled in {seconds:.0f} s"]


def set_up_torch(settings: ResolvedSettings, device: torch.device) -> None:
    """Set what belongs to the process: determinism, float32 precision, threads and seeds."""
    make_deterministic(warn_only=True)
    use_float32(settings.precision, device)
    use_threads()
    seed_everything(settings.seed)


def new_model(
    settings: ResolvedSettings,
    facts: DataFacts,
    ranks: Ranks,
    *,
    folder: Path,
    replay_from: Path | None,
) -> tuple[nn.Module, list[str]]:
    """The model before its first step, frozen, recomputed and sharded as the settings say; lines to print.

    Rank 0 alone loads weights; the others get them from it later.
    """
    # With a checkpoint the weights are there: no download, which may have become impossible.
    started = replay_from is not None or checkpoint_folders(folder / "checkpoints")
    loads = not started and ranks.is_first
    shards = settings.shard == "fsdp" and replay_from is None
    # To be sharded, it goes to the device block by block.
    placed = dataclasses.replace(settings, device="cpu") if shards else settings
    lines: list[str] = []

    def make() -> nn.Module:
        model = make_model(placed, facts, pretrained=settings.pretrained and loads)
        if settings.weights is not None and loads:
            lines.append(load_weights(model, settings.weights))
        check_training(model, settings, facts, world=ranks.world)
        if settings.sync_bn and ranks.world > 1:
            model = convert_sync_batchnorm(model)
        elif settings.sync_bn:
            lines.append("sync_bn has no effect in one process")
        freeze_parts(model, settings.freeze)
        recompute_parts(model, settings.recompute)
        return model

    model = ranks.each(make)
    if shards:
        from flambeau.parallel.fsdp import shard_model

        shard_model(model, ranks, pick_device(settings.device))
    return model, lines


def new_history(facts: DataFacts, ranks: Ranks, device: torch.device) -> dict[str, SampleHistory]:
    """What the run notes of each sample, as an object that its checkpoints hold."""
    history = SampleHistory(
        facts.train_samples,
        fingerprint=facts.train_fingerprint,
        device=device,
        is_alone=ranks.world == 1,
    )
    return {"sample_history": history}


def run_options(settings: ResolvedSettings) -> RunKeywords:
    """The options of `Run` that are settings too, and all settings for config.toml."""
    return {
        "duration": settings.duration, "extend": settings.extend, "batch_size": settings.batch_size,
        "accumulate": settings.accumulate, "seed": settings.seed, "workers": settings.workers,
        "retry_workers": settings.retry_workers,
        "stop_within": settings.stop_within,
        "precision": settings.autocast, "warmup": settings.warmup,
        "compression": settings.compression, "clip_norm": settings.clip_norm, "ema": settings.ema,
        "checkpoint_every": settings.checkpoint_every, "keep": settings.keep,
        "log_every": settings.log_every, "on_nan": settings.on_nan,
        "stall_timeout": settings.stall_timeout, "schedule": make_schedule(settings),
        "settings": as_dict(settings),
    }  # fmt: skip


def make_optimizer(settings: ResolvedSettings, model: nn.Module) -> Optimizer:
    """The optimizer of a run."""
    groups = parameter_groups(settings, model)
    return new_optimizer(
        settings.optimizer, model, groups, lr=settings.lr, momentum=settings.momentum,
        betas=parse_betas(settings.betas),
    )  # fmt: skip


def make_schedule(settings: ResolvedSettings) -> str | NamedSchedule | ReduceOnPlateau:
    """What `Run` takes as the schedule."""
    if settings.plateau is None:
        return settings.named_schedule()
    patience, factor = settings.plateau
    return ReduceOnPlateau(mode="max", patience=patience, factor=factor)
