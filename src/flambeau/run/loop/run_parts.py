"""The parts of a run, made from its options before it claims its folder."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset

from flambeau.data.loading.loader import Loader
from flambeau.data.loading.read_ahead import own_order
from flambeau.data.loading.sampler_chain import owners_of, unsaved_generator
from flambeau.data.loading.user_dataloader import UserDataLoader
from flambeau.errors import InputError
from flambeau.parallel.gradient_sync.ddp import Replicas
from flambeau.parallel.gradient_sync.fixed_parts import FixedParts
from flambeau.parallel.gradient_sync.interface import GradientSync
from flambeau.parallel.ranks import Ranks
from flambeau.parallel.shard_layout import Layout, is_sharded
from flambeau.recipes.training.amp_step import AmpStep
from flambeau.recipes.training.ema import EMA
from flambeau.recipes.training.graph_replay import GraphReplay
from flambeau.run.folder.identity import Identity
from flambeau.run.folder.micro_batches_file import MicroBatches
from flambeau.run.folder.published_weights import Best
from flambeau.run.loop.batch_reader import BatchReader
from flambeau.run.loop.evaluation_metrics import EvaluationMetrics
from flambeau.run.loop.lr_schedule import LRSchedule
from flambeau.run.loop.model_builder import check_builder, use_record
from flambeau.run.loop.model_state import check_gradients, check_model, check_shardable
from flambeau.run.loop.progress_bar import ProgressBar
from flambeau.run.loop.rank_checks import BadReports
from flambeau.run.loop.state import ResumableState
from flambeau.run.loop.step_metrics import StepMetrics
from flambeau.run.loop.step_plan import StepPlan
from flambeau.run.options.run_options import RunOptions
from flambeau.run.options.shared_options import SharedOptions

if TYPE_CHECKING:
    from flambeau.parallel.gradient_sync.fsdp import Shards


@dataclass(frozen=True)
class RunParts:
    """What a run is made of, before it touches folder and processes.

    Attributes:
        model: the module inside torch.compile, if the model is compiled.
    """

    model: nn.Module
    shards: "tuple[Shards, Layout] | None"
    amp: AmpStep
    bad: BadReports
    progress: ProgressBar
    reader: BatchReader
    loader: Loader | UserDataLoader
    metrics: EvaluationMetrics
    plan: StepPlan
    schedule: LRSchedule
    identity: Identity


def make_parts(
    model: nn.Module,
    optimizer: Optimizer,
    data: Dataset[Any] | Iterable[Any],
    options: RunOptions,
    ranks: Ranks,
    *,
    folder: Path,
    given: Mapping[str, object] = {},
) -> RunParts:
    """Make the parts; the optimizer's groups get their `initial_lr`.

    The folder may record how many samples fit. `given`: options that differ from their defaults.
    """
    plain: nn.Module = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if isinstance(plain, DistributedDataParallel | nn.DataParallel):
        raise InputError(
            f"the model is wrapped in {type(plain).__name__}: gradients would be averaged twice, in a race\n"
            "Give Run the model itself, model.module: Run averages gradients over the ranks"
        )
    _check_optimizer(plain, optimizer)
    if options.replay_from is None:
        ranks.first(lambda: check_builder(plain, options))
    sharded = is_sharded(plain)
    # Before anything uses the optimizer's parameters: this replaces them by pieces.
    shards = _shards(plain, optimizer, options, ranks) if sharded else None
    amp = AmpStep(
        optimizer,
        precision=options.precision,
        halt=True,
        # Shards clip by the norm over all ranks.
        max_norm=options.clip_norm if options.clip_norm and not sharded else None,
        agree=ranks.worst if ranks.world > 1 else None,
        replay=GraphReplay if ranks.world == 1 and not sharded else None,
    )
    bad = BadReports(ranks)
    progress = ProgressBar(shown=options.bar, silent=not ranks.is_first)
    _check_model(plain, shards, amp.device, options, say=progress.say)
    reader = BatchReader(
        amp.device,
        options,
        ranks=ranks,
        bad=bad,
        sharded=sharded,
        micro_batches=_micro_batches(folder, options, ranks),
        say=progress.say_from_any_rank,
    )
    if options.sampler is None and (order := own_order(data, options.seed)) is not None:
        options = replace(options, sampler=order)
    loader = reader.loader(
        data, accumulate=options.accumulate, on_bad=options.on_bad, sampler=options.sampler
    )
    _check_ready_batches(loader, data, given)
    plan, schedule = _plan(options, loader.batches_per_epoch)
    for group in optimizer.param_groups:
        lr = group["lr"]
        # The schedule writes into a tensor, so its first value is kept as a number.
        group.setdefault("initial_lr", lr.item() if isinstance(lr, Tensor) else lr)
    metrics = EvaluationMetrics(
        options.metrics or {}, device=amp.device, ranks=ranks, classes=options.classes
    )
    return RunParts(
        plain,
        shards,
        amp,
        bad,
        progress,
        reader,
        loader,
        metrics,
        plan,
        schedule,
        Identity.of(options, optimizer, schedule=schedule.name, use=use_record(options)),
    )


def _micro_batches(folder: Path, options: RunOptions, ranks: Ranks) -> MicroBatches:
    """The sizes that have fitted into memory so far, or those of the option."""
    recorded = ranks.first(lambda: MicroBatches.read(folder))
    if options.micro_batch in (None, recorded.training):
        return recorded
    return replace(recorded, step=0, training=options.micro_batch)


def _plan(options: RunOptions, steps_per_epoch: int) -> tuple[StepPlan, LRSchedule]:
    plan = StepPlan(
        steps_per_epoch=steps_per_epoch,
        duration=options.duration,
        extend=options.extend,
        checkpoint_every=options.checkpoint_every,
        log_every=options.log_every,
    )
    schedule = LRSchedule(
        plan, options.schedule, warmup=options.warmup, metric=options.best, mode=options.better
    )
    return plan, schedule


def _check_model(
    model: nn.Module,
    shards: "tuple[Shards, Layout] | None",
    device: torch.device,
    options: RunOptions,
    *,
    say: Callable[[str], None],
) -> None:
    """Refuse a model that no checkpoint could hold; say what the published weights will lack."""
    check_gradients(model)
    if shards is not None:
        check_shardable(model)
    saved = model if shards is None else shards[0].pieces
    rest = check_model(saved, device, averages=bool(options.ema))
    if not rest:
        return
    what = f"'{rest[0]}' of the model is no tensor that a safetensors file holds"
    if isinstance(options.settings, SharedOptions):  # a command, which reads no more than that file
        raise InputError(f"{what}: train it with the class Run, whose checkpoints hold it")
    if options.replay_from is None:
        say(f"{what}: it is in the checkpoints, and will not be in model.safetensors")


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    for what, value, kind, name in (
        ("model", model, nn.Module, "torch.nn.Module"),
        ("optimizer", optimizer, Optimizer, "torch.optim.Optimizer"),
    ):
        if not isinstance(value, kind):
            got = " ".join(repr(value).split())  # an optimizer's repr has many lines
            raise InputError(f"the {what} must be a {name}, got {got:.100}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InputError(
            f"{type(optimizer).__name__} computes the loss several times per step, by a closure, and Run "
            "computes it once per batch: use an optimizer whose step() needs no closure, such as AdamW, or a "
            "loop without Run"
        )
    if "step" in vars(optimizer) and "initial_lr" in optimizer.param_groups[0]:
        raise InputError(
            "the optimizer has a learning-rate scheduler of torch's, and Run sets the rate of each step "
            "itself: leave it out and give schedule=, a name or a function from the step to a factor"
        )
    ours = {id(parameter) for parameter in model.parameters()}
    if ours and ours.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
        raise InputError(
            "the optimizer has none of the model's parameters, so nothing would be trained: make the "
            "optimizer from this model's parameters()"
        )


def _check_ready_batches(
    loader: Loader | UserDataLoader, batches: Any, given: Mapping[str, object]
) -> None:
    """For a ready-made loader: refuse options that it would ignore, and state that no checkpoint can hold."""
    if isinstance(loader, Loader):
        return
    ignored = [
        n
        for n in (
            "batch_size",
            "parts",
            "micro_batch",
            "workers",
            "retry_workers",
            "collate",
            "sampler",
            "on_bad",
        )
        if given.get(n) is not None
    ]
    if ignored:
        raise InputError(
            f"{', '.join(ignored)} would have no effect: the data are a loader, which makes its own batches; "
            "set it there, or give Run the Dataset"
        )
    if not loader.place.is_stateful and (what := unsaved_generator(batches)) is not None:
        raise InputError(
            f"the loader's {what}, whose state is in no checkpoint: leave it out and draw from torch's own "
            "generator, and `seed` of Run decides the order"
        )
    if any(getattr(owner, "persistent_workers", False) for owner in owners_of(batches)):
        raise InputError(
            "the loader has persistent_workers=True, and the state of their generators is in no checkpoint: "
            "leave it out, or give Run the Dataset, with workers="
        )


def _shards(
    model: nn.Module, optimizer: Optimizer, options: RunOptions, ranks: Ranks
) -> "tuple[Shards, Layout]":
    from flambeau.parallel.gradient_sync.fsdp import Shards  # imports what only sharded models need

    if options.parts is not None:
        raise InputError(
            f"parts = {options.parts}: a sharded model adds its gradients in the order of the processes; "
            "leave one of the two out"
        )
    if options.compression != "none":
        raise InputError(f"compression = {options.compression!r} has no effect on a sharded model")
    shards = Shards(model, ranks, max_norm=options.clip_norm or None)
    return shards, shards.adopt(optimizer)


def make_state(
    parts: RunParts, model: nn.Module, optimizer: Optimizer, options: RunOptions
) -> ResumableState:
    """The state before the first step, of the model or this rank's pieces, also for the average."""
    # A trial before the run may have left gradients, which a resume would not have.
    optimizer.zero_grad(set_to_none=True)
    schedule = parts.schedule.saved_objects()
    loader = parts.loader
    for name in schedule.keys() & (options.state or {}).keys():
        raise InputError(f"state[{name!r}]: the schedule is saved by this name; choose another one")
    return ResumableState(
        model=model,
        optimizer=optimizer,
        amp=parts.amp,
        ema=EMA(model, decay=options.ema) if options.ema else None,
        window=StepMetrics(parts.amp.device, in_parts=options.parts is not None),
        best=Best(options.best, options.better),
        user={**(options.state or {}), **schedule},
        data_length=loader.length,
        micro_batch=loader.layout.micro_batch_size if isinstance(loader, Loader) else None,
        place=None if isinstance(loader, Loader) else loader.place,
    )


def share_model(
    parts: RunParts, options: RunOptions, ranks: Ranks, *, compiled: bool
) -> GradientSync | None:
    """Share the model between the processes, as it is now; every rank calls it.

    Except in a replay, options without effect here are named.
    """
    say = parts.progress.say if options.replay_from is None else lambda text: None
    if options.retry_workers and not options.workers:
        say(
            f"retry_workers = {options.retry_workers} has no effect without workers: the data are read in "
            "this process (workers = 0)"
        )
    if parts.shards is not None:
        return parts.shards[0]
    if options.parts is not None:
        fixed = FixedParts(parts.model, ranks, parts=options.parts)
        if compiled and fixed.together is not None:
            raise InputError(
                f"parts = {options.parts}: with SyncBatchNorm a compiled model is cut at each of its layers, "
                "and which pieces torch compiles depends on the process: leave torch.compile out"
            )
        return fixed
    if ranks.world > 1:
        return Replicas(parts.model, ranks, compression=options.compression)
    if options.compression != "none":
        say(f"compression = {options.compression!r} has no effect in one process")
    return None
