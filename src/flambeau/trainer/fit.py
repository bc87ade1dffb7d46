"""The training of `flambeau train`, from top to bottom: what is built, and the loop over its epochs."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flambeau.data.check.report_text import quick_findings
from flambeau.data.datasets.bad_images import BadImages
from flambeau.data.datasets.device_dataset import DeviceDataset, WithIndices
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.sources.source import Source, has_unit
from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks, join_ranks
from flambeau.recipes.checkpoints.atomic_checkpoint import checkpoint_folders
from flambeau.recipes.parallel.sync_batchnorm import convert_sync_batchnorm
from flambeau.recipes.setup.determinism import make_deterministic
from flambeau.recipes.setup.freed_memory import keep_freed_memory
from flambeau.recipes.setup.seeding import seed_everything
from flambeau.recipes.training.plateau import ReduceOnPlateau
from flambeau.run.loop.nan_guard import explain
from flambeau.run.options.named_schedule import NamedSchedule
from flambeau.run.options.shared_options import SharedOptions
from flambeau.run.options.tracker_names import LineFunction
from flambeau.run.run import Run
from flambeau.trainer.evaluation.sample_history import SampleHistory
from flambeau.trainer.loss import TrainingLoss, make_teacher
from flambeau.trainer.parts.auto_batch_size import find_micro_batch
from flambeau.trainer.parts.compiled_model import compiled, warm_up
from flambeau.trainer.parts.data import DataFacts, Prepared, datasets
from flambeau.trainer.parts.device import pick_device, use_float32, use_threads
from flambeau.trainer.parts.epoch_order import epoch_sampler
from flambeau.trainer.parts.fine_tuning import (
    freeze_parts,
    load_weights,
    normalization_lines,
    parameter_groups,
    recompute_parts,
    report,
)
from flambeau.trainer.parts.model import check_training, make_model, normalizer
from flambeau.trainer.parts.optimizer import new_optimizer
from flambeau.trainer.parts.portable_bits import refused_operations, require_portable_bits
from flambeau.trainer.parts.qat_model import qat_model
from flambeau.trainer.prediction.sample_images import RANGE_IMAGES, read_images
from flambeau.trainer.prediction.trained_model import Trained
from flambeau.trainer.report_data import ReportData
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import BY_FLAGS, parse_betas
from flambeau.trainer.tasks.task import Task

_FIRST_IMAGES = 2000
"""For `init_from_images`; more patches change the whitening filters little."""
Datasets = tuple[ImageDataset | DeviceDataset, ImageDataset | DeviceDataset]
"""For training and for evaluation."""


@dataclass(frozen=True)
class Training:
    run: Run
    task: Task
    model: nn.Module
    train: ImageDataset | DeviceDataset
    val: ImageDataset | DeviceDataset
    normalize: Callable[[Tensor], Tensor]
    loss_of: TrainingLoss
    early_stop: int
    best: str
    bad_images: BadImages
    evaluations: ReportData | None  # None in a replay, which writes nothing
    ranks: Ranks


def fit(training: Training) -> None:
    """Train to the end, with an evaluation after each epoch; the run publishes the weights."""
    run, model, normalize = training.run, training.model, training.normalize
    bad_val_images = training.bad_images.report_to(training.val.describe)
    training.loss_of.keeps_inputs = True
    task = training.task
    for _ in run.epochs():
        for _ in run.steps(lambda batch: batch_loss(training, *batch)):
            pass
        for images, targets, indices in run.evaluate(
            WithIndices(training.val), on_bad=bad_val_images
        ):
            with run.halving():
                with run.autocast():
                    logits = model(normalize(images))
                run.log(**task.evaluation_figures(logits, targets))
                if training.evaluations is not None:
                    run.log(val=(indices, targets, logits))
        stops = 0 < training.early_stop <= run.epochs_since_best
        if stops:
            num = run.epochs_since_best
            best = run.state.best.metrics.get(training.best)
            than = "" if best is None else f" than {best:.4f}"
            last = "last epoch" if num == 1 else f"last {num} epochs"
            run.progress.say(f"no better {training.best} in the {last}{than}")
            run.stop()
        is_last = stops or run.state.step >= run.plan.total_steps
        if training.evaluations is not None:
            _keep_for_report(training, training.evaluations, is_last=is_last)


def batch_loss(training: Training, images: Tensor, targets: Tensor) -> Tensor:
    """The loss of the current batch; logs its figures, and the loss of each image."""
    run = training.run
    loss, logits = training.loss_of.with_logits(images, targets, step=run.state.step)
    if logits is not None:
        run.log(**training.task.training_figures(logits, targets))
        history: SampleHistory = run.state.user["sample_history"]
        history.note(run.state.micro, logits, targets, step=run.state.step)
    return loss


def _keep_for_report(training: Training, evaluations: ReportData, *, is_last: bool) -> None:
    """Keep the evaluation and the first batch for the report that the run writes at its end."""
    run = training.run
    history: SampleHistory = run.state.user["sample_history"]
    if is_last:
        history.settle_ranks(training.ranks)
    if training.loss_of.inputs is not None:
        evaluations.add_first_batch(training.loss_of.inputs, say=run.progress.say)
        training.loss_of.inputs = None
    evaluations.add(
        step=run.state.step,
        published=run.state.results()[0].step,
        end=history if is_last else None,
        say=run.progress.say,
    )


def set_up(
    prepared: Prepared,
    *,
    folder: Path,
    bar: bool = True,
    replay_from: Path | None = None,
    micro_batch: int | Literal["auto"] | None = None,
    before_run: Callable[[], None] = lambda: None,
    track: Sequence[LineFunction] = (),
) -> Training:
    """Make everything that `fit` runs.

    Args:
        replay_from: a checkpoint folder to start from, writing nothing.
        micro_batch: samples per forward pass, if fewer than set; 'auto' finds how many fit.
        before_run: called when all but the run is made, so after most errors.
    """
    settings = prepared.settings
    facts = prepared.facts
    train = prepared.train
    device = set_up_torch(settings)
    ranks = join_ranks()
    data = train_data, _ = datasets(prepared)
    model, lines = new_model(settings, facts, train, ranks, folder=folder, replay_from=replay_from)
    optimizer = ranks.each(lambda: make_optimizer(settings, model))
    lines += report(
        settings, model, optimizer
    )  # before Run, which may replace parameters by pieces
    normalize = normalizer(facts, device)
    called, loss_of = make_loss(model, settings, facts, ranks, normalize=normalize)
    micro_batch, more_lines = try_batches(
        called,
        loss_of,
        optimizer,
        settings,
        data,
        ranks,
        normalize=normalize,
        micro_batch=micro_batch,
    )
    bad_images = BadImages(folder / "bad_images.txt", limit=settings.skip_bad_images)
    evaluations = None if replay_from else _run_evaluations(folder, ranks, data, facts, settings)
    ranks.first(before_run)
    options: dict[str, Any] = {
        **run_options(settings),
        "attachments": {"dataset.json": facts.as_json()},
        "on_bad": bad_images.report_to(train_data.describe),
        "explain": lambda batch, names, step: explain(
            model, lambda: loss_of(*batch, step=step), names
        ),
        "sampler": epoch_sampler(settings, train, streams=facts.shuffle_streams),
        "bar": bar,
        "replay_from": replay_from,
        "track": [settings.track, *track],
        "state": new_history(facts, device),
        "micro_batch": micro_batch,
        "best": settings.best,
        "metrics": {} if evaluations is None else {"val": evaluations.metric},
    }
    run = Run(folder, called, optimizer, train_data, **options)
    lines += loss_of.plan_sizes(run.plan.total_steps)  # now: what was tried above has the full size
    for line in [*(lines if run.state.step == 0 else ()), *more_lines]:
        run.progress.say(line)
    return Training(
        run,
        facts.task,
        called,
        *data,
        normalize,
        loss_of,
        settings.early_stop,
        settings.best,
        bad_images,
        evaluations,
        ranks,
    )


def _run_evaluations(
    folder: Path, ranks: Ranks, data: Datasets, facts: DataFacts, settings: ResolvedSettings
) -> ReportData:
    train, val = data
    data_path = None if settings.data is None else Path(settings.data)
    return ReportData(
        folder if ranks.is_first else None,
        train,
        val,
        facts.task,
        best=settings.best,
        normalized_by=(facts.mean, facts.std),
        has_unit=has_unit(facts.pixels),
        check_data=functools.partial(quick_findings, train.source, val.source, data_path),
    )


def make_loss(
    model: nn.Module,
    settings: ResolvedSettings,
    facts: DataFacts,
    ranks: Ranks,
    *,
    normalize: Callable[[Tensor], Tensor],
) -> tuple[nn.Module, TrainingLoss]:
    """The model as the loop calls it (compiled if set), and its loss."""
    device = pick_device(settings.device)
    teacher = ranks.each(lambda: make_teacher(settings, facts, device))
    called = compiled(model, settings)
    loss_of = TrainingLoss(
        called, settings, facts, device=device, normalize=normalize, teacher=teacher
    )
    return called, loss_of


def try_batches(
    model: nn.Module,
    loss_of: TrainingLoss,
    optimizer: Optimizer,
    settings: ResolvedSettings,
    data: Datasets,
    ranks: Ranks,
    *,
    normalize: Callable[[Tensor], Tensor],
    micro_batch: int | Literal["auto"] | None,
) -> tuple[int | None, list[str]]:
    """Find how many samples fit for `micro_batch` 'auto', and compile the model for its batch sizes."""
    device = pick_device(settings.device)
    first_loss = functools.partial(loss_of, step=0)
    lines: list[str] = []
    if micro_batch == "auto":
        with torch.compiler.set_stance("force_eager"):  # otherwise each size would be compiled
            micro_batch, line = find_micro_batch(
                model, optimizer, settings, data[0], ranks, loss_of=first_loss, device=device
            )
        lines.append(line)
    if settings.compile == "none":
        return micro_batch, lines
    seconds, fitting = warm_up(
        model,
        settings,
        data,
        ranks,
        micro_batch=micro_batch,
        loss_of=first_loss,
        logits_of=lambda images: model(normalize(images)),
        device=device,
    )
    line = f"the model was compiled in {seconds:.0f} s"
    if fitting < (micro_batch or settings.batch_size):
        micro_batch = fitting
        line += f", for micro-batches of {fitting} samples: more do not fit into memory"
    return micro_batch, [*lines, line]


def set_up_torch(settings: ResolvedSettings) -> torch.device:
    """Set determinism, float32 precision, threads, memory and seeds of the process; returns the device."""
    device = pick_device(settings.device)
    make_deterministic(warn_only=True)
    use_float32(settings.precision, device)
    if settings.portable_bits is not None:
        require_portable_bits(settings.portable_bits, world=join_ranks().world)
    use_threads(settings.portable_bits)
    if device.type == "cpu":
        keep_freed_memory()
    seed_everything(settings.seed)
    return device


def new_model(
    settings: ResolvedSettings,
    facts: DataFacts,
    train: Source,
    ranks: Ranks,
    *,
    folder: Path,
    replay_from: Path | None,
) -> tuple[nn.Module, list[str]]:
    """The model before its first step, frozen, recomputed and sharded as set, and lines for the user.

    Only rank 0 loads weights, and shares them later.
    """
    # A checkpoint has the weights: do not download them, which may have become impossible.
    started = replay_from is not None or checkpoint_folders(folder / "checkpoints")
    loads = not started and ranks.is_first
    shards = settings.shard == "fsdp" and replay_from is None
    # A model to be sharded moves to the device block by block.
    on_device = dataclasses.replace(settings, device="cpu") if shards else settings
    lines: list[str] = []

    def make() -> nn.Module:
        model = make_model(on_device, facts, pretrained=settings.pretrained and loads)
        if settings.weights is not None and loads:
            lines.append(load_weights(model, settings.weights))
            lines.extend(normalization_lines(settings.weights, facts))
        inputs = functools.partial(_first_inputs, model, settings, facts, train)
        if settings.weights is None and loads:
            init_from_images(model, inputs, preset=settings.preset)
        model = qat_model(model, settings, facts, inputs if loads else None)
        with refused_operations() if settings.portable_bits else contextlib.nullcontext():
            check_training(model, settings, facts, world=settings.parts or ranks.world)
        if settings.sync_bn and max(ranks.world, settings.parts or 1) > 1:
            model = convert_sync_batchnorm(model)
        elif settings.sync_bn:
            lines.append("sync_bn has no effect in one process")
        freeze_parts(model, settings.freeze)
        recompute_parts(model, settings.recompute)
        return model

    model = ranks.each(make)
    if shards:
        from flambeau.parallel.gradient_sync.fsdp import shard_model

        shard_model(model, ranks, pick_device(settings.device))
    return model, lines


def init_from_images(
    model: nn.Module, inputs: Callable[[int], list[Tensor]], *, preset: str | None = None
) -> None:
    """Give training images to a model with a method of this name.

    InputError: the preset is for such models, and this is none.
    """
    initialize = getattr(model, "init_from_images", None)
    if initialize is not None:
        initialize(torch.cat(inputs(_FIRST_IMAGES)))
    elif preset is not None:
        raise InputError(
            f"preset = {preset!r} is for a model that begins with what it sees (init_from_images), such as "
            "speedrun_convnet: leave --model or the preset out"
        )


def _first_inputs(
    model: nn.Module,
    settings: ResolvedSettings,
    facts: DataFacts,
    train: Source,
    num_images: int = RANGE_IMAGES,
) -> list[Tensor]:
    """Batches of normalized images, spread over the training images."""
    device = pick_device(settings.device)
    settings = dataclasses.replace(settings, eval_size=None)
    trained = Trained(model, settings, facts, device, normalizer(facts, device))
    return read_images(trained, train, num_images).normalized(trained)


def new_history(facts: DataFacts, device: torch.device) -> dict[str, SampleHistory]:
    history = facts.task.history(
        facts.train_samples, fingerprint=facts.train_fingerprint, device=device
    )
    return {"sample_history": history}


def run_options(settings: ResolvedSettings) -> dict[str, Any]:
    """The options of `Run` that are settings too, and all settings for config.toml."""
    shared = {
        field.name: getattr(settings, field.name) for field in dataclasses.fields(SharedOptions)
    }
    return {
        **shared,
        "duration": settings.duration,
        "batch_size": settings.batch_size,
        "workers": settings.workers,
        "precision": settings.autocast,
        "warmup": settings.warmup,
        "schedule": make_schedule(settings),
        "track": settings.track,
        "settings": settings,
        "advice": BY_FLAGS,
    }


def make_optimizer(settings: ResolvedSettings, model: nn.Module) -> Optimizer:
    groups = parameter_groups(settings, model)
    return new_optimizer(
        settings.optimizer,
        model,
        groups,
        lr=settings.lr,
        momentum=settings.momentum,
        betas=parse_betas(settings.betas),
        fixed_norm=settings.fixed_norm,
    )


def make_schedule(settings: ResolvedSettings) -> str | NamedSchedule | ReduceOnPlateau:
    if settings.plateau is None:
        return settings.named_schedule()
    patience, factor = settings.plateau
    return ReduceOnPlateau(mode="max", patience=patience, factor=factor)
