"""What can be set for speed: in `flambeau train` by its flags, in any script from outside."""

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flambeau.images.native.kernel import kernel
from flambeau.recipes.setup.environment import native_bf16, usable_cpus
from flambeau.recipes.setup.freed_memory import KEEP_FREED, can_keep_freed

_MICRO_BATCHES = 2, 4, 8  # parts that a forward pass is split into; chosen
_WAITS = 0.02  # with less waiting for data, more workers gain almost nothing; chosen
_LARGER_BATCHES = 2, 4  # times the samples of a step; chosen
_LARGER_SIDE = 8 / 7  # of images that are stored for crops: the common 256 for 224

Choice = Mapping[str, str]
"""Levers that are set, with their values; all others are as the user has them."""


@dataclass(frozen=True)
class Setting:
    """One value of a lever.

    Attributes:
        words: flags of `flambeau train`.
        change: of a script, see `watch/changes.py`.
        environment: variables.
        samples: of a step, relative to the original: costs are per sample.
        packs: flags of `flambeau pack` for a copy of the data for the trial, if any.
        advice: how to get it, if another training: reported, never chosen.
    """

    value: str
    words: tuple[str, ...] = ()
    change: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    samples: float = 1.0
    packs: tuple[str, ...] | None = None
    advice: str = ""


@dataclass(frozen=True)
class Lever:
    """Something that can be set to several values.

    Attributes:
        settings: tried in order, until one is slower than the one before.
        is_rounding: results differ by more than float32 rounding, so the loss is checked.
        reference: full precision, whose loss is compared with.
        costs_start: it delays the first step, which must pay off.
    """

    name: str
    settings: tuple[Setting, ...]
    is_rounding: bool = False
    reference: Setting | None = None
    costs_start: bool = False

    def setting(self, value: str) -> Setting:
        known = (*self.settings, *filter(None, [self.reference]))
        return next(one for one in known if one.value == value)


@dataclass(frozen=True)
class TrainFacts:
    """What the first trial shows about a run of `flambeau train`; None if unknown."""

    batch_size: int
    accumulate: int = 1
    workers: int | None = None
    data_wait: float | None = None
    image_size: int | None = None


@dataclass(frozen=True)
class LoaderFacts:
    """What the first trial shows about the DataLoader of a script.

    Attributes:
        repeats: each worker of its iterable data set gives every sample.
        shared: iterable data sets that split them; see `watch/worker_shares.py`.
    """

    repeats: bool
    shared: tuple[str, ...] = ()
    num_workers: int | None = None
    is_used: bool = True


TrialFacts = TrainFacts | LoaderFacts | None
"""Of `flambeau train`, of a script with a DataLoader, or unknown."""


def levers_of_train(
    given: Sequence[str],
    *,
    objective: str,
    device: torch.device,
    run: TrainFacts | None = None,
    folder: str | None = None,
) -> list[Lever]:
    """Levers of `flambeau train` that its arguments, `given`, do not set; `folder` is that of its images."""
    levers = _train_levers(objective, device, run)
    if run is not None and folder is not None and objective == "throughput":
        levers.append(Lever("packed copy", _packed_settings(run, folder)))
    if run is not None and not _is_given("parts", given):  # parts already split a step
        levers += _batch_levers(objective, run)
    free = [one for one in levers if not any(_is_given(name, given) for name in _flags_of(one))]
    return [one for one in free if one.settings]


def _flags(name: str, *values: str) -> tuple[Setting, ...]:
    return tuple(Setting(value, words=(f"--{name}", value)) for value in values)


def _flags_of(lever: Lever) -> set[str]:
    words = {word.removeprefix("--") for one in lever.settings for word in one.words[::2]}
    return words | {lever.name}


def _train_levers(objective: str, device: torch.device, run: TrainFacts | None) -> list[Lever]:
    # `auto` takes bf16 where that is native, else fp16 on a GPU and fp32 on a CPU.
    others = {"cuda": ["tf32", "fp16"]} if native_bf16(device) else {"cuda": ["fp32"]}
    values = others.get(device.type, ["fp32"] if native_bf16(device) else [])
    (full,) = _flags("precision", "fp32")
    rounding = Lever("precision", _flags("precision", *values), is_rounding=True, reference=full)
    if objective == "memory":
        return [rounding, Lever("recompute", _flags("recompute", "*"))]
    compiled = _flags("compile", "default") if _can_compile(device) else ()
    # Threads first: too many for the CPUs cost most of all, and hide the gain of everything else.
    levers = [
        Lever("threads", _threads(device)),
        Lever("workers", _flags("workers", *_worker_counts(run))),
        rounding,
        Lever("compile", compiled, costs_start=True),
    ]
    if _is_fed(run):  # trials of the model promise more than those of its data
        levers.append(levers.pop(1))
    return levers


def _batch_levers(objective: str, run: TrainFacts) -> list[Lever]:
    """Smaller forward passes for the same step; and larger steps, which are only reported."""

    def setting(value: str, size: int, accumulate: int, **other: Any) -> Setting:
        words = ("--batch-size", f"{size}", "--accumulate", f"{accumulate}")
        return Setting(value, words=words, **other)

    parts = [
        (run.batch_size // count, run.accumulate * count)
        for count in _MICRO_BATCHES
        if run.batch_size % count == 0 and run.batch_size > count
    ]
    micro = tuple(setting(f"{size} x {count}", size, count) for size, count in parts)
    # Batch norm sees fewer images at once, so the loss is checked.
    levers = [Lever("micro-batch", micro, is_rounding=True)]
    if objective == "throughput":
        advice = "another training, so it is not chosen"
        sizes = [(times, run.batch_size * times) for times in _LARGER_BATCHES]
        larger = tuple(
            setting(f"{size}", size, run.accumulate, samples=times, advice=advice)
            for times, size in sizes
        )
        levers.append(Lever("batch", larger))
    return levers


def _packed_settings(run: TrainFacts, folder: str) -> tuple[Setting, ...]:
    """The same images in one file, and smaller ones, if the run waits for data."""
    if run.data_wait is None or _is_fed(run):
        return ()
    copies: dict[str, tuple[str, ...]] = {"same pixels": ("--segments",) if kernel() else ()}
    if run.image_size is not None:
        side = f"{round(run.image_size * _LARGER_SIDE)}"
        copies[f"resized to {side}"] = ("--resize", side)
    file = f"{Path(folder).resolve().name}.tfrecord"
    return tuple(
        Setting(value, packs=flags, advice=shlex.join(["flambeau", "pack", folder, file, *flags]))
        for value, flags in copies.items()
    )


def levers_of_script(device: torch.device, loader: LoaderFacts | None = None) -> list[Lever]:
    """What can be changed in any script from outside."""

    def switch(name: str, change: str) -> Lever:
        return Lever(name, (Setting("yes", change={change: True}),))

    is_cuda = device.type == "cuda"
    keeps_freed = Setting("yes", environment=KEEP_FREED)
    rounding: tuple[Setting, ...] = ()
    if native_bf16(device):
        rounding = (Setting("bf16", change={"autocast": "bfloat16"}),)
        if is_cuda:
            rounding = (Setting("tf32", change={"tf32": True}), *rounding)
    foreach = Setting("foreach", change={"foreach": True})
    fused = Setting("fused", change={"fused": True})
    levers = [
        Lever("threads", _threads(device)),
        *_worker_levers(loader),
        Lever("keep freed memory", (keeps_freed,) if can_keep_freed() and not is_cuda else ()),
        *([switch("pin memory", "pin")] if is_cuda and (loader is None or loader.is_used) else []),
        Lever("optimizer", (foreach, fused)),
        switch("channels_last", "channels_last"),
        *([switch("cudnn.benchmark", "cudnn_benchmark")] if is_cuda else []),
        Lever("precision", rounding, is_rounding=True),
    ]
    if _can_compile(device):
        compiled = Setting("yes", change={"compile": True})
        levers.append(Lever("compile", (compiled,), costs_start=True))
    return [one for one in levers if one.settings]


def _worker_levers(loader: LoaderFacts | None) -> list[Lever]:
    """Their number, unless that changes which samples are read; whether they persist and read ahead."""
    facts = LoaderFacts(repeats=False) if loader is None else loader
    if not facts.is_used:
        return []
    levers = []
    if not facts.repeats:
        counts = tuple(
            Setting(count, change={"workers": int(count), "shared": list(facts.shared)})
            for count in _worker_counts(None)
            if count != f"{facts.num_workers}"
        )
        stay = Setting("yes", change={"persistent": True})
        levers = [Lever("workers", counts), Lever("persistent workers", (stay,))]
    ahead = tuple(Setting(f"{count}", change={"prefetch": count}) for count in (4, 8))
    levers.append(Lever("prefetch", ahead))
    # Without workers nothing persists and nothing reads ahead.
    return levers[:1] if facts.num_workers == 0 and not facts.repeats else levers


def _can_compile(device: torch.device) -> bool:
    return device.type == "cuda" or shutil.which("g++") is not None


def _is_fed(run: TrainFacts | None) -> bool:
    return run is not None and run.data_wait is not None and run.data_wait < _WAITS


def _worker_counts(run: TrainFacts | None) -> list[str]:
    """0 and powers of two up to twice the CPUs, without the present number and those that cannot help."""
    counts = [0]
    while (count := max(1, 2 * counts[-1])) <= 2 * usable_cpus():
        counts.append(count)
    now = None if run is None else run.workers
    most = counts[-1]
    if now is not None and _is_fed(run):
        most = 2 * now  # as other levers may make the model faster
    return [f"{count}" for count in counts if count != now and count <= most]


def _threads(device: torch.device) -> tuple[Setting, ...]:
    """Fewer threads for the model leave CPUs to the workers; on a GPU the model needs none."""
    cpus = usable_cpus()
    if device.type != "cpu" or cpus < 2:
        return ()
    return tuple(
        Setting(f"{count}", environment={"OMP_NUM_THREADS": f"{count}"}, change={"threads": count})
        for count in dict.fromkeys((cpus - 1, max(1, cpus // 2)))
    )


def _is_given(name: str, given: Sequence[str]) -> bool:
    flag = "--" + name.replace("_", "-")
    return any(word == flag or word.startswith(f"{flag}=") for word in given)
