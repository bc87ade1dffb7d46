"""The settings of `flambeau train`: the one source of its flags, of config.toml and of the docs table.

Torch is not imported here, so that `--help` answers at once.
"""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.errors import InputError, nearest
from flambeau.train.settings.checks import check_ranges, check_takes_effect, check_together
from flambeau.train.settings.durations import parse_duration


def _setting(
    default: Any,
    text: str,
    *,
    group: str,
    auto: str = "",
    choices: tuple[str, ...] = (),
    neutral: bool = False,
) -> Any:
    """A field: its help text, its group, what None resolves to, and whether a resume may change it."""
    metadata = {"help": text, "group": group, "auto": auto, "choices": choices, "neutral": neutral}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Every setting of a training run. None means: chosen from the data, then written down."""

    data: str | None = _setting(
        None, "folder with a sub-folder a class (or train/ and val/), packed images, torchvision:NAME, or "
        "FILE.py:FUNCTION",
        group="data", auto="the embedded Fashion-MNIST", neutral=True,
    )  # fmt: skip
    image_size: int | None = _setting(
        None, "side of the square images", group="data", auto="from the images, at most 224"
    )
    download: bool = _setting(
        False, "fetch what is missing of torchvision:NAME", group="data", neutral=True
    )
    skip_bad_images: int = _setting(
        0, "how many unreadable images to replace instead of stopping", group="data", neutral=True
    )
    flip: bool = _setting(
        True, "mirror half of the training images; not for digits or text", group="data"
    )
    crop_scale: float | None = _setting(
        None, "least share of the area that a training crop keeps", group="data", auto="0.25"
    )
    augment: str = _setting(
        "none", "random operations on training images, after crop and flip",
        group="data", choices=("none", "randaugment", "trivialaugment"),
    )  # fmt: skip
    color_jitter: float = _setting(
        0.0, "change brightness, contrast and saturation by up to this factor, such as 0.4; 0 is off",
        group="data",
    )  # fmt: skip
    random_erasing: float = _setting(
        0.0, "probability that a rectangle of a training image is erased; 0 is off", group="data"
    )
    workers: int | None = _setting(
        None, "processes that read data, for each that trains; 0 reads in the training process",
        group="data", auto="0 for small images or on a CPU, else the cores, at most 8", neutral=True,
    )  # fmt: skip
    model: str | None = _setting(
        None, "a timm name, torchvision:NAME, small_convnet, or FILE.py:FUNCTION",
        group="model", auto="small_convnet up to 64 pixels, else resnet18",
    )  # fmt: skip
    pretrained: bool = _setting(False, "start from published weights", group="model")
    weights: str | None = _setting(
        None, "start from the weights in this file or run, as far as they fit", group="model"
    )
    drop_path: float = _setting(
        0.0, "probability of stochastic depth, of models that have it; 0 is off", group="model"
    )
    recompute: str = _setting(
        "none", "modules that keep no activations, such as layer*.* or blocks.*: less memory, more time",
        group="model", neutral=True,
    )  # fmt: skip
    ema: float = _setting(
        0.0, "decay of the averaged weights, such as 0.999; 0 keeps none", group="model"
    )
    freeze: str = _setting(
        "none", "what is not trained, with its statistics: backbone, or names such as stem,layer1,*.bn*",
        group="fine-tuning",
    )  # fmt: skip
    head_lr: float | None = _setting(
        None, "peak learning rate of the last layer, where it is another", group="fine-tuning"
    )
    layer_decay: float = _setting(
        1.0, "factor of the learning rate from each layer to the one before, such as 0.75",
        group="fine-tuning",
    )  # fmt: skip
    teacher: str | None = _setting(
        None, "folder of a run, whose model's probabilities are learned beside the labels",
        group="fine-tuning",
    )  # fmt: skip
    teacher_weight: float | None = _setting(
        None, "share of the teacher in the loss, up to 1", group="fine-tuning", auto="0.5"
    )
    temperature: float | None = _setting(
        None, "that softens the probabilities of teacher and student", group="fine-tuning", auto="4"
    )
    epochs: int | None = _setting(None, "short for --duration Nep", group="length")
    duration: str | None = _setting(
        None, "such as 90ep or 5000st", group="length",
        auto="16ep for the embedded data, 30ep, or 10ep with --pretrained or --weights",
    )  # fmt: skip
    batch_size: int | None = _setting(
        None,
        "samples a forward pass, of all processes together",
        group="length",
        auto="128 for small images, 64 for others, less for few",
    )
    accumulate: int = _setting(1, "forward passes an optimizer step", group="length")
    optimizer: str = _setting(
        "sgd", "sgd is with Nesterov momentum; muon does the inner weight matrices, adamw the rest",
        group="optimization",
        choices=(
            "sgd", "adam", "adamw", "nadam", "radam", "adamax", "adagrad", "rmsprop", "muon"
        ),
    )  # fmt: skip
    momentum: float | None = _setting(
        None, "of sgd, rmsprop and muon; from 0 to below 1", group="optimization",
        auto="sgd and rmsprop 0.9, muon 0.95",
    )  # fmt: skip
    lr: float | None = _setting(
        None, "peak learning rate", group="optimization",
        auto="grows with the batch; at 256: sgd 0.1 (small_convnet 0.4), adamw 0.001; "
        "pretrained or weights a tenth",
    )  # fmt: skip
    weight_decay: float = _setting(
        5e-4,
        "on weights of two or more dimensions; never on biases and norms",
        group="optimization",
    )
    schedule: str = _setting(
        "cosine", "of the learning rate; multistep divides by 10 at 50%% and 75%%",
        group="optimization",
        choices=(
            "cosine", "linear", "multistep", "constant", "polynomial", "wsd", "one-cycle",
            "cosine-restarts", "plateau",
        ),
    )  # fmt: skip
    warmup: str = _setting("10%", "such as 5%%, 2ep or 500st", group="optimization")
    patience: int | None = _setting(
        None, "for plateau: epochs without a better val_accuracy before the rate falls",
        group="optimization", auto="3",
    )  # fmt: skip
    plateau_factor: float | None = _setting(
        None, "for plateau: what the rate is multiplied by", group="optimization", auto="0.1"
    )
    clip_norm: float = _setting(
        0.0, "clip the norm of the gradient to this; 0 does not", group="optimization"
    )
    label_smoothing: float = _setting(0.1, "from 0 to below 1", group="optimization")
    mixup: float = _setting(0.0, "alpha of mixup; 0 is off", group="optimization")
    cutmix: float = _setting(
        0.0, "alpha of CutMix; 0 is off; with --mixup each batch gets one of the two",
        group="optimization",
    )  # fmt: skip
    on_nan: str = _setting(
        "stop", "where a loss or gradient is not finite; rollback goes on from before with half the rate",
        group="optimization", choices=("stop", "rollback"), neutral=True,
    )  # fmt: skip
    precision: str = _setting(
        "auto", "of the forward pass; auto takes bf16 where the hardware has it natively",
        group="machine", choices=("auto", "fp32", "tf32", "bf16", "fp16"),
    )  # fmt: skip
    device: str = _setting("auto", "such as cpu, cuda or cuda:1", group="machine")
    seed: int = _setting(0, "of everything random", group="machine")
    sync_bn: bool = _setting(
        False, "normalise over the batch of all processes, not over each one's share",
        group="processes",
    )  # fmt: skip
    shard: str = _setting(
        "none", "how the weights are spread over the processes: all on each, or a part on each",
        group="processes", choices=("none", "fsdp"), neutral=True,
    )  # fmt: skip
    compression: str = _setting(
        "none", "of the gradients that processes exchange", group="processes",
        choices=("none", "fp16", "bf16", "powersgd"),
    )  # fmt: skip
    stall_timeout: float = _setting(
        60.0,
        "seconds without progress after which a process or data worker is named and the job ends; 0 is never",
        group="processes", neutral=True,
    )  # fmt: skip
    checkpoint_every: str = _setting(
        "1ep", "such as 1ep or 500st", group="run folder", neutral=True
    )
    keep: int = _setting(
        2, "newest checkpoints kept, besides the best", group="run folder", neutral=True
    )
    log_every: int = _setting(50, "steps a line of metrics.jsonl", group="run folder")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _typed(field, getattr(self, field.name)))
        choices = {f.name: f.metadata["choices"] for f in FIELDS.values() if f.metadata["choices"]}
        check_ranges(self, choices)
        check_together(self)
        check_takes_effect(self)


FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Settings)}


def allowed_types(field: dataclasses.Field[Any]) -> tuple[type, ...]:
    """The types of a setting, without None."""
    hint = field.type
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(t for t in members if isinstance(t, type) and t is not type(None))


def read_config(path: Path) -> dict[str, Any]:
    """The settings that a TOML file holds.

    Raises:
        InputError: no such file, not TOML, an unknown key.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read as TOML: {error}") from error
    _check_keys(values, path)
    return values


def from_stored(values: Mapping[str, Any], path: Path) -> Settings:
    """The settings of a run, from what its config.toml (at `path`) holds.

    Raises:
        InputError: an unknown key or a wrong value: of another version, or edited by hand.
    """
    _check_keys(values, path)
    return Settings(**values)


def as_dict(settings: Settings) -> dict[str, Any]:
    """The settings that are not None."""
    return {k: v for k, v in dataclasses.asdict(settings).items() if v is not None}


def canonical(settings: Settings) -> Settings:
    """The same settings in one spelling: `epochs` as `duration`, durations and paths in full."""
    duration = settings.duration or (f"{settings.epochs}ep" if settings.epochs else None)
    model = settings.model
    if model is not None and ".py:" in model:
        path, _, function = model.rpartition(":")
        model = f"{Path(path).resolve()}:{function}"
    return dataclasses.replace(
        settings,
        data=_full(settings.data),
        teacher=_full(settings.teacher),
        weights=_full(settings.weights),
        model=model,
        epochs=None,
        duration=None if duration is None else str(parse_duration(duration, name="duration")),
        warmup=str(parse_duration(settings.warmup, name="warmup", units="% ep st")),
        checkpoint_every=str(parse_duration(settings.checkpoint_every, name="checkpoint_every")),
    )


def _full(data: str | None) -> str | None:
    """A path in full; a data set by name stays what it is."""
    if data is None or data.startswith("torchvision:"):
        return data
    return str(Path(data).resolve())


def as_toml(values: Mapping[str, Any]) -> bytes:
    """Settings as a TOML document, those that are None left out."""
    import tomli_w

    return tomli_w.dumps({k: v for k, v in values.items() if v is not None}).encode()


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What keeps `wanted` from going on with a run of `stored`, as 'name: stored X, now Y'."""
    found = []
    for name in sorted({*stored, *wanted}):
        field = FIELDS.get(name)
        if field is not None and field.metadata["neutral"]:
            continue
        # What an older version did not know was as it is by default.
        there = stored.get(name, None if field is None else field.default)
        if there != wanted.get(name):
            found.append(f"{name}: {there!r} there, {wanted.get(name)!r} now")
    return found


def _check_keys(values: Mapping[str, Any], path: Path) -> None:
    for key in values:
        if key not in FIELDS:
            raise InputError(f"{path}: unknown key '{key}'{nearest(key, FIELDS)}")


def _typed(field: dataclasses.Field[Any], value: Any) -> Any:
    """The value in the field's type; whole numbers pass as floats, nothing else is converted."""
    if value is None:
        if None is not field.default:
            raise InputError(f"{field.name} needs a value")
        return None
    wanted = allowed_types(field)
    if float in wanted and type(value) is int:
        return float(value)
    if type(value) not in wanted:
        names = " or ".join(
            {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[t]
            for t in wanted
        )
        raise InputError(f"{field.name} must be {names}, got {value!r}")
    if value == "":
        raise InputError(f"{field.name} is empty; give it a value or leave it out")
    if isinstance(value, str) and "\\udc" in ascii(
        value
    ):  # bytes that are no text, as Python holds them
        raise InputError(f"{field.name} must be UTF-8, got {value!r}; rename it")
    return value
