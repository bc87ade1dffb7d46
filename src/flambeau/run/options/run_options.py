"""The options of `Run`, apart from model, optimizer and data."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flambeau.data.drop_in.declared_preprocessing import Preprocessing
from flambeau.data.loading.batch_plan import Order
from flambeau.data.stores.address import mirror_address
from flambeau.errors import InputError, nearest
from flambeau.recipes.training.plateau import ReduceOnPlateau
from flambeau.run.options.advice import Advice
from flambeau.run.options.better_figure import DEFAULT_BEST, better_by_name
from flambeau.run.options.durations import parse_duration, parse_seconds, parse_share
from flambeau.run.options.named_schedule import NamedSchedule
from flambeau.run.options.option import AT_LEAST_1, CONTROL, Range, check_value, option, typed
from flambeau.run.options.shared_options import SharedOptions
from flambeau.run.options.toml_file import as_toml, parse_toml
from flambeau.run.options.tracker_names import Track, tracker_list
from flambeau.user_code import is_function

OnBad = Callable[[Sequence[int]], None]
"""Takes the indices of samples that a data set could not read."""
Explain = Callable[[Any, Sequence[str], int], Iterable[object]]
"""Takes the data of a batch, the data set's names of its samples, and the number of steps before it."""
_DURATIONS = {"duration", "extend", "warmup", "checkpoint_every"}  # checked by parse_duration


@dataclass(frozen=True, kw_only=True)
class RunOptions(SharedOptions):
    """The options of a run, which `Run` takes by name and documents.

    Those of `flambeau train` take the same values, and a resume may change the same ones.

    Raises:
        InputError: a value of another type, or out of range.
    """

    duration: str = option(
        dataclasses.MISSING,
        'length of the run, such as "90ep" (epochs) or "5000st" (steps)',
        '运行的长度，例如 "90ep"（epoch）或 "5000st"（步）',
        group="length",
    )
    batch_size: int = option(
        64,
        "samples per forward pass of a `Dataset`, over all processes",
        "`Dataset` 每次前向传播的样本数，所有进程合计",
        group="length",
        range=AT_LEAST_1,
    )
    micro_batch: int | None = option(
        None,
        "fewer samples per forward pass than `batch_size`, [where memory is short](#out-of-memory); a step "
        "keeps `batch_size * accumulate`",
        "比 `batch_size` 更小的每次前向传播样本数，[用于内存不足时](#内存不足)；一步仍是 "
        "`batch_size * accumulate` 个样本",
        group="length",
        auto=("what has fitted so far", "至今放得下的数目"),
        range=AT_LEAST_1,
        may_change=True,
    )
    workers: int = option(
        0,
        "processes that load a `Dataset`, per training process",
        "每个训练进程用来加载 `Dataset` 的进程数",
        group="data",
        range=Range(0, 1024),
        may_change=True,
    )
    sampler: Order | None = option(
        None,
        "one of the [samplers](recipes/samplers.md) or anything with `len()` and `order(epoch)`: "
        "the samples of an epoch of a `Dataset`; without it, a permutation of all",
        "[采样器](recipes/samplers.md)之一，或任何带有 `len()` 和 `order(epoch)` 的对象："
        "`Dataset` 一个 epoch 的样本；不设置则是全部样本的一个排列",
        group="data",
        kind="one of flambeau.recipes.data.samplers, or anything with len() and order(epoch)",
    )
    collate: Callable[[list[Any]], Any] | None = option(
        None,
        "makes a batch of a list of samples of a `Dataset`",
        "把 `Dataset` 的一列样本合成一个批次",
        group="data",
        auto=("torch's", "torch 自带的"),
    )
    on_bad: OnBad | None = option(
        None,
        "called with the indices of samples that the `Dataset` could not read",
        "以 `Dataset` 无法读取的样本的下标调用",
        group="data",
        may_change=True,
    )
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        'precision of `autocast()`: "fp32", "bf16" or "fp16"',
        '`autocast()` 的精度："fp32"、"bf16" 或 "fp16"',
        group="optimization",
    )
    schedule: str | NamedSchedule | Callable[[int], float] | ReduceOnPlateau = option(
        "constant",
        "learning-rate schedule: a [name of `--schedule`](schedules.md), a function from the step (from "
        "0) to a "
        "factor of the learning rate, or a [`ReduceOnPlateau`](recipes/plateau.md) that watches `best`",
        "学习率调度：[`--schedule` 的名称](schedules.md)、从步数（从 0 起）到学习率系数的函数，或"
        "关注 `best` 的 [`ReduceOnPlateau`](recipes/plateau.md)",
        group="optimization",
        kind="a name, a NamedSchedule, a function of the step, or a ReduceOnPlateau",
    )
    warmup: str = option(
        "0st",
        'length of the linear warm-up of a named schedule, such as "5%", "2ep" or "500st"',
        '按名称给出的调度的线性预热长度，例如 "5%"、"2ep" 或 "500st"',
        group="optimization",
    )
    explain: Explain | None = option(
        None,
        "called with the batch of a step that was not finite, the names of its samples and the "
        "number of steps before it, with weights and generators as they were then; what it "
        "returns is in the message: see [`first_not_finite`](recipes/first_not_finite.md)",
        "以出现非有限值的那一步的批次、样本名称和此前的步数调用，此时权重和随机数生成器与当时相"
        "同；返回值写入错误信息，见 [`first_not_finite`](recipes/first_not_finite.md)",
        group="optimization",
        may_change=True,
    )
    metrics: Mapping[str, Any] | None = option(
        None,
        "[metrics of evaluations that are not means](#metrics-that-are-no-means), by name: "
        "objects with `update`, `compute` and `reset`, such as those of torchmetrics",
        "[评估中不是平均值的指标](#不是均值的指标)，按名称给出：带有 `update`、`compute` 和 `reset` 的对象，"
        "例如 torchmetrics 的指标",
        group="run folder",
    )
    best: str = option(
        DEFAULT_BEST,
        "which figure of `run.evaluate` chooses the best checkpoint",
        "用 `run.evaluate` 的哪个指标选出最好的检查点",
        group="run folder",
    )
    best_mode: Literal["max", "min"] | None = option(
        None,
        '"max" or "min", which values of `best` are better; a name with loss, error, perplexity and the like '
        'means "min", one with accuracy, f1, auc and the like "max"; any other name needs it',
        '"max" 或 "min"，`best` 越大还是越小越好；名称含 loss、error、perplexity 等为 "min"，含 '
        'accuracy、f1、auc 等为 "max"，其他名称需要给出',
        group="run folder",
        auto=("by the name", "由名称决定"),
    )
    config: Mapping[str, Any] | None = option(
        None,
        "what else identifies the run, in TOML's types; it is a table of its own in "
        "`config.toml`, and a resume with another value is refused",
        "还有什么标识这个运行，取 TOML 的类型；它在 `config.toml` 中自成一表，以不同的值恢复会报错",
        group="run folder",
    )
    builder: str | None = option(
        None,
        "function FILE.py:FUNCTION that makes the model again, for [what uses the finished "
        "run](#using-what-a-run-has-made): `flambeau.load`, `predict`, `evaluate`, `features`, `export`; it "
        "needs `preprocess` and `classes`",
        "重新构建模型的函数 FILE.py:FUNCTION，供[使用训练结果](#使用训练的结果)的 `flambeau.load`、"
        "`predict`、`evaluate`、`features`、`export` 使用；需要同时给出 `preprocess` 和 `classes`",
        group="run folder",
        may_change=True,
    )
    preprocess: Mapping[str, Any] | Callable[..., Any] | None = option(
        None,
        "with `builder`: how an image becomes the input of the model: a dict of `image_size`, `mean`, `std`, "
        "`resize`, `interpolation` and `pixels`, or the transform of torchvision or timm that an evaluation "
        "uses",
        "与 `builder` 一起：图像如何变成模型的输入：由 `image_size`、`mean`、`std`、`resize`、"
        "`interpolation` 和 `pixels` 组成的 dict，或评估所用的 torchvision 或 timm 变换",
        group="run folder",
        may_change=True,
        kind="a dict, or a transform of torchvision or timm",
    )
    classes: Sequence[str] | None = option(
        None,
        "names of the classes, in the order of the logits: with `builder`, and in the "
        "[report](#in-the-report)",
        "类别的名称，按 logits 的顺序：与 `builder` 一起使用，并用于[报告](#在报告中)",
        group="run folder",
        may_change=True,
        kind="a list of names",
    )
    settings: Mapping[str, Any] | SharedOptions | None = option(
        None,
        "settings of a command of your own that include the options above: `config.toml` holds them instead",
        "你自己的命令的设置，其中包含以上选项：`config.toml` 保存的是它们",
        group="run folder",
    )
    advice: Advice | None = option(
        None,
        "sentences that messages advise, in the words of a command of your own",
        "错误信息中的建议，用你自己的命令的措辞",
        group="run folder",
        auto=("those of Python", "Python 的措辞"),
        may_change=True,
    )
    attachments: Mapping[str, bytes] | None = option(
        None,
        "files to write into the folder of a new run: bytes by file name",
        "写入新运行目录的文件：文件名到字节",
        group="run folder",
        may_change=True,
    )
    state: Mapping[str, Any] | None = option(
        None,
        "objects with `state_dict` and `load_state_dict` to save in checkpoints and restore, by name",
        "随检查点保存和恢复的对象，带有 `state_dict` 和 `load_state_dict`，按名称给出",
        group="run folder",
    )
    track: Track | None = option(
        None,
        '[trackers](tracking.md#from-a-run-of-flambeau) by name, such as "tensorboard,csv", and '
        "functions of a step and its figures; none of them stops or delays the run",
        '[跟踪器](tracking.md#从-flambeau-的运行)的名称，例如 "tensorboard,csv"，以及接收步数和指标的函数；'
        "它们都不会中断或拖慢运行",
        group="run folder",
        may_change=True,
        kind="names of trackers, or functions of a step and its figures",
    )
    bar: bool = option(
        True,
        "show a [progress bar](train.md#on-the-terminal) on a terminal, and in a notebook a bar and a chart",
        "在终端显示[进度条](train.md#在终端上)，在 notebook 中显示进度条和曲线图",
        group="run folder",
        may_change=True,
    )
    replay_from: str | Path | None = option(
        None,
        "a checkpoint folder to start from, writing nothing anywhere",
        "从这个检查点目录开始，不写入任何文件",
        group="run folder",
        may_change=True,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name in _DURATIONS:
                continue
            value = typed(field, getattr(self, field.name))
            check_value(field, value)
            object.__setattr__(self, field.name, value)
        if parse_duration(self.duration, name="duration").amount <= 0:
            raise InputError(f"duration must be above 0, got {self.duration!r}")
        if self.parts is not None:
            self._check_parts()
        if self.stop_within is not None:
            parse_seconds(self.stop_within, name="stop_within")
        parse_share(self.verify_steps, name="verify_steps")
        if self.mirror is not None:
            mirror_address(self.mirror)
        for name in ("config", "settings"):
            values = getattr(self, name)
            for key, value in values.items() if isinstance(values, Mapping) else ():
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
        self._check_use()
        object.__setattr__(self, "track", tracker_list(self.track))
        object.__setattr__(self, "best_mode", self.better)

    def _check_use(self) -> None:
        """Check what a finished run is used with, and put it into one form."""
        if self.preprocess is not None:
            object.__setattr__(self, "preprocess", Preprocessing.of(self.preprocess))
        if self.classes is not None:
            object.__setattr__(self, "classes", checked_classes(self.classes))
        names = ("builder", "preprocess", "classes")
        missing = [name for name in names if getattr(self, name) is None]
        is_alone = missing == ["builder", "preprocess"]  # the names are for the report
        if 0 < len(missing) < len(names) and not is_alone:
            raise InputError(
                f"builder, preprocess and classes belong together: a finished run is used with all three; "
                f"give {' and '.join(missing)}, too"
            )
        if self.builder is None:
            return
        path, separator, function = self.builder.rpartition(":")
        if not is_function(self.builder) or not separator or not function.isidentifier():
            raise InputError(
                f"builder = {self.builder!r} is not FILE.py:FUNCTION, such as model.py:build"
            )
        object.__setattr__(self, "builder", f"{Path(path).resolve()}:{function}")

    def _check_parts(self) -> None:
        """Refuse what would depend on the number of processes."""
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
        """Whether higher or lower values of `best` are better.

        Raises:
            InputError: neither `best_mode` nor the name says it.
        """
        if self.best_mode is not None:
            return self.best_mode
        if (mode := better_by_name(self.best)) is not None:
            return mode
        raise InputError(
            f"best = {self.best!r} does not tell whether more or less of it is better: give "
            "best_mode='max' or best_mode='min', or is the name misspelt?"
        )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "RunOptions":
        """The options given to `Run` by name; TypeError for unknown names."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                hint = (
                    "; the length is duration='8ep'" if "epochs" in name else nearest(name, known)
                )
                raise TypeError(f"Run has no argument {name!r}{hint}")
        return cls(**given)


def checked_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """The names of the classes.

    Raises:
        InputError: none, no texts, or one twice.
    """
    names = () if isinstance(classes, str) else tuple(classes)
    for name in names:
        if not isinstance(name, str) or not name or CONTROL.search(name):
            raise InputError(f"classes must be names, without line breaks; got {name!r:.80}")
        if names.count(name) > 1:
            raise InputError(f"classes has {name!r} twice: one name per logit, in their order")
    if not names:
        raise InputError(f"classes must be a list of names, one per logit, got {classes!r:.80}")
    return names


def _check_storable(what: str, key: object, value: object) -> None:
    """Raise InputError for a value that config.toml cannot hold, or that never equals itself."""
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
