"""The options of `Run` besides model, optimizer and data, as one value."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from flambeau.data.loading.batch_plan import Order
from flambeau.errors import InputError, nearest
from flambeau.recipes.training.plateau import ReduceOnPlateau
from flambeau.train.settings.config_file import as_toml, parse_toml
from flambeau.train.settings.durations import parse_seconds
from flambeau.train.settings.field_checks import check_value, typed
from flambeau.train.settings.named_schedule import NamedSchedule
from flambeau.train.settings.settings import FIELDS
from flambeau.train.settings.track import Track, tracker_list

DEFAULT_BEST = "val_accuracy"
"""The figure that chooses the best checkpoint where none is named."""
OnBad = Callable[[Sequence[int]], None]
"""Takes the indices of samples that a data set could not read."""
Explain = Callable[[Any, Sequence[str], int], Iterable[object]]
"""Takes the data of a batch, what the data set calls its samples, and the number of steps before it."""


_LOWER_IS_BETTER = {
    "loss", "error", "err", "perplexity", "ppl", "mse", "rmse", "mae", "mape", "nll", "bce", "wer", "cer",
    "fid", "lpips", "kl", "entropy", "divergence", "distance", "brier", "ece", "regret", "negative",
}  # fmt: skip
_HIGHER_IS_BETTER = {  # 'f' and 'top' of f1 and top5
    "accuracy", "acc", "top", "correct", "auc", "auroc", "precision", "recall", "sensitivity", "specificity",
    "f", "map", "iou", "miou", "dice", "jaccard", "bleu", "rouge", "psnr", "ssim", "score", "kappa", "mcc",
    "correlation", "likelihood", "reward",
}  # fmt: skip
_DURATIONS = {"duration", "extend", "warmup", "checkpoint_every"}  # parse_duration says what one is
_TRACK = "names of trackers, or functions of a step and its figures"
_SAMPLER = "one of flambeau.recipes.data.samplers, or anything with len() and order(epoch)"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run, which `Run` takes by name.

    Those that `flambeau train` has too take the same values, and a resume may change the same ones.

    Args:
        duration: such as '90ep' or '5000st'.
        extend: train a finished run on, for so much more than `duration`, such as '10ep'; the schedule is
            that of a run of the whole length.
        batch_size: samples per forward pass (of a Dataset), of all processes together.
        accumulate: forward passes per optimizer step. The last batch of an epoch may be smaller; each part
            is weighted so that the gradient is that of the mean loss over the whole batch.
        parts: cut each step's `batch_size` samples (of a Dataset) into so many parts, which are computed one
            by one, as by so many processes: any number of processes then gives the same bits.
        micro_batch: fewer samples per forward pass (of a Dataset), where memory is short: a step still has
            `batch_size * accumulate`, and a resume may change it. None is what has fitted so far.
        seed: of sample order, augmentation and dropout.
        workers: processes that read a Dataset, for each process that trains.
        retry_workers: how often workers that died or stalled are started again in the run, with the same
            batches, before it ends.
        precision: of `autocast()`: 'fp32', 'bf16' or 'fp16'.
        schedule: a name of `flambeau train --schedule`, with gamma or milestones as a NamedSchedule
            (train/settings/named_schedule.py); or a function from the step (from 0) to the multiplier of the
            learning rate; 'plateau', or a ReduceOnPlateau, needs `best` once per epoch.
        warmup: such as '5%', '2ep', '500st'; for the named schedules.
        compression: of the gradients that processes exchange: 'none', 'fp16', 'bf16' or 'powersgd'.
        clip_norm: clip the norm of all gradients together to this; 0 does not.
        ema: decay of averaged weights, which are then evaluated and published; 0 keeps none.
        checkpoint_every: such as '1ep' or '500st'.
        keep: newest checkpoints kept, besides the best.
        log_every: steps per line of metrics.jsonl.
        metrics: what is no mean, by name: objects with update, compute and reset, such as torchmetrics'.
            In an evaluation `run.log(NAME=(logits, targets))` updates the one of that name.
        best: the metric of `run.evaluate` that chooses the best checkpoint.
        best_mode: 'max' or 'min', what is better; None reads it from the name: 'val_loss' is 'min'.
        config: what else identifies the run, in TOML's types; it stands in a table of its own in config.toml,
            and a resume with another value is refused.
        attachments: files for the folder of a new run, by name.
        state: objects with state_dict and load_state_dict that belong to the run.
        collate: makes a batch of a list of samples (of a Dataset).
        sampler: one of flambeau.recipes.data.samplers, or anything with `len()` and `order(epoch)`: the
            samples of an epoch (of a Dataset), instead of a permutation of all.
        on_bad: called with the indices of samples that the dataset could not read.
        on_nan: what to do where a loss or gradient was NaN or infinite: 'stop', or 'rollback' to the newest
            checkpoint and continue with half the learning rate, three times at most.
        explain: called with the data of a bad batch, what the dataset calls its samples and the number of
            steps before it, the weights and generators as they were; says where it goes wrong. See
            recipes/debugging/first_not_finite.py.
        settings: of a command of your own, which hold the options above as well: they stand in config.toml in
            place of these.
        stop_within: such as '30s': what is left after SIGTERM, SIGUSR1 or SIGINT before the process is
            killed. A checkpoint is written then only if those before took less; None always writes one.
        stall_timeout: seconds without progress after which a process of several, or a worker that still
            reads the same sample, is named and the job ends; 0 waits for ever.
        bar: show a progress bar on a terminal, and in a notebook a bar and a chart.
        track: trackers that get the lines of metrics.jsonl, by name ('tensorboard', 'tensorboard:histograms',
            'tensorboard:graph', 'wandb', 'mlflow', 'csv'), or functions of a step and its figures; none stops
            or delays the run.
        replay_from: a checkpoint folder: start there, and write nothing anywhere.

    Raises:
        InputError: a value of another type, or out of range.
    """

    duration: str
    extend: str | None = None
    batch_size: int = 64
    accumulate: int = 1
    parts: int | None = None
    micro_batch: int | None = None
    seed: int = 0
    workers: int = 0
    retry_workers: int = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    schedule: str | NamedSchedule | Callable[[int], float] | ReduceOnPlateau = dataclasses.field(
        default="constant",
        metadata={"what": "a name, a NamedSchedule, a function of the step, or a ReduceOnPlateau"},
    )
    warmup: str = "0st"
    compression: str = "none"
    clip_norm: float = 0.0
    ema: float = 0.0
    checkpoint_every: str = "1ep"
    keep: int = 2
    log_every: int = 50
    metrics: Mapping[str, Any] | None = None
    best: str = DEFAULT_BEST
    best_mode: Literal["max", "min"] | None = None
    on_nan: str = "stop"
    stop_within: str | None = None
    stall_timeout: float = 60.0
    sampler: Order | None = dataclasses.field(default=None, metadata={"what": _SAMPLER})
    collate: Callable[[list[Any]], Any] | None = None
    state: Mapping[str, Any] | None = None
    on_bad: OnBad | None = None
    explain: Explain | None = None
    config: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None
    attachments: Mapping[str, bytes] | None = None
    bar: bool = True
    track: Track | None = dataclasses.field(default=None, metadata={"what": _TRACK})
    replay_from: str | Path | None = None

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            if option.name in _DURATIONS:
                continue
            value = typed(option, getattr(self, option.name))
            object.__setattr__(self, option.name, value)
            if option.name in FIELDS and isinstance(value, (int, float)):
                check_value(FIELDS[option.name], value)
        if self.micro_batch is not None and self.micro_batch < 1:
            raise InputError(f"micro_batch must be at least 1, got {self.micro_batch}")
        if self.parts is not None:
            self._check_parts()
        if self.stop_within is not None:
            parse_seconds(self.stop_within, name="stop_within")
        for name in ("compression", "on_nan"):
            check_value(FIELDS[name], getattr(self, name))
        for name in ("config", "settings"):
            for key, value in (getattr(self, name) or {}).items():
                _check_storable(f"{name}[{key!r}]", key, value)
        for key, value in (self.state or {}).items():
            if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
                raise InputError(
                    f"state[{key!r}] must be an object with state_dict and load_state_dict, to be saved and "
                    f"put back; got {value!r:.100}"
                )
        for key, value in (self.attachments or {}).items():
            if not isinstance(key, str) or Path(key).name != key or not isinstance(value, bytes):
                raise InputError(
                    f"attachments must be bytes by the plain name of a file, got {key!r}: {value!r:.50}"
                )
        object.__setattr__(self, "track", tracker_list(self.track))
        object.__setattr__(self, "best_mode", self.better)

    def _check_parts(self) -> None:
        """Refuse what would not be the same for any number of processes."""
        parts = f"parts = {self.parts}"
        if self.parts is not None and self.parts > self.batch_size:
            raise InputError(
                f"{parts}: each part of a step needs a sample, and batch_size = {self.batch_size}"
            )
        if self.accumulate > 1:
            raise InputError(
                f"{parts} are the forward passes of a step, and accumulate = {self.accumulate} are, too: "
                f"give batch_size={self.batch_size * self.accumulate}, and leave accumulate out"
            )
        if self.micro_batch is not None:
            raise InputError(f"{parts} are the forward passes of a step: leave micro_batch out")
        if self.compression != "none":
            raise InputError(
                f"{parts}: compression = {self.compression!r} rounds what processes exchange, so the bits "
                "depend on their number; leave one of the two out"
            )
        for name, metric in (self.metrics or {}).items():
            if not getattr(metric, "any_order", False):
                raise InputError(
                    f"{parts}: metrics[{name!r}] gets the samples in an order that depends on the number of "
                    "processes; log means instead, or give it any_order = True if it sorts them or counts"
                )

    @property
    def better(self) -> Literal["max", "min"]:
        """Which values of `best` are better.

        Raises:
            InputError: neither `best_mode` nor the name tells.
        """
        if self.best_mode is not None:
            return self.best_mode
        words = set(re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.best).lower()))
        low, high = not words.isdisjoint(_LOWER_IS_BETTER), not words.isdisjoint(_HIGHER_IS_BETTER)
        if low != high:
            return "min" if low else "max"
        raise InputError(
            f"best = {self.best!r} does not tell whether more or less of it is better: give "
            "best_mode='max' or best_mode='min', or is the name misspelt?"
        )

    @classmethod
    def of(cls, options: "RunKeywords") -> "RunOptions":
        """The options that were given to `Run` by name.

        Raises:
            TypeError: there is none of that name, or no duration.
        """
        known = [option.name for option in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                hint = (
                    "; the length is duration='8ep'" if "epochs" in name else nearest(name, known)
                )
                raise TypeError(f"Run has no argument {name!r}{hint}")
        if "duration" not in options:
            raise TypeError("Run needs a duration, such as duration='90ep' or '5000st'")
        return cls(**options)


def _check_storable(what: str, key: object, value: object) -> None:
    """Refuse what config.toml cannot hold, or could not be compared with on a resume.

    Raises:
        InputError: it is.
    """
    if value is None and isinstance(key, str):
        return  # left out
    try:
        toml = as_toml({key: value})  # type: ignore[dict-item]
        is_equal = parse_toml(toml) == parse_toml(toml)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{what} cannot stand in config.toml, which takes texts, numbers, true and false, dates, and "
            f"lists and dicts of them by name: {error}"
        ) from error
    if not is_equal:
        raise InputError(f"{what} holds NaN, which equals nothing: no resume would be recognised")


class RunKeywords(TypedDict, total=False):
    """The fields of RunOptions as keyword arguments, for type checkers and editors."""

    duration: str
    extend: str | None
    batch_size: int
    accumulate: int
    parts: int | None
    micro_batch: int | None
    seed: int
    workers: int
    retry_workers: int
    precision: Literal["fp32", "bf16", "fp16"]
    schedule: str | NamedSchedule | Callable[[int], float] | ReduceOnPlateau
    warmup: str
    compression: str
    clip_norm: float
    ema: float
    checkpoint_every: str
    keep: int
    log_every: int
    metrics: Mapping[str, Any] | None
    best: str
    best_mode: Literal["max", "min"] | None
    on_nan: str
    stop_within: str | None
    stall_timeout: float
    sampler: Order | None
    collate: Callable[[list[Any]], Any] | None
    state: Mapping[str, Any] | None
    on_bad: OnBad | None
    explain: Explain | None
    config: Mapping[str, Any] | None
    settings: Mapping[str, Any] | None
    attachments: Mapping[str, bytes] | None
    bar: bool
    track: Track | None
    replay_from: str | Path | None
