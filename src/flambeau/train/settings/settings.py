"""The settings of `flambeau train`: the one source of its flags, of config.toml and of the docs table.

Torch is not imported here, so that `--help` answers at once.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from flambeau.errors import InputError
from flambeau.train.settings.contradictions import check_contradictions
from flambeau.train.settings.durations import parse_duration, parse_seconds
from flambeau.train.settings.field_checks import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    SHARE,
    SHARE_ABOVE_0,
    SHARE_BELOW_1,
    Range,
    check_value,
    parse_batch_size,
    parse_betas,
    setting,
    typed,
)
from flambeau.train.settings.named_schedule import NamedSchedule
from flambeau.train.settings.track import TRACKERS, tracker_list

BETAS = ("adam", "adamw", "nadam", "radam", "adamax")
"""The optimizers that have betas."""
MOMENTUM = {"sgd": 0.9, "rmsprop": 0.9, "muon": 0.95}
"""The momentum of the optimizers that have one, where it is left open."""
_TAKEN_BY = (  # a setting, and the values of another one with which it has an effect
    ("patience", "schedule", ("plateau",)), ("plateau_factor", "schedule", ("plateau",)),
    ("momentum", "optimizer", MOMENTUM), ("betas", "optimizer", BETAS),
)  # fmt: skip
_ALPHA = Range(1e-6, 1e6, or_zero=True)  # beyond, a Beta(alpha, alpha) cannot be drawn


@dataclass(frozen=True)
class Settings:
    """Every setting of a training run, as given. None means: chosen from the data."""

    data: str | None = setting(
        None, "folder with a sub-folder per class (or train/ and val/), packed images, torchvision:NAME, "
        "hf:NAME, or FILE.py:FUNCTION",
        group="data", auto="the embedded Fashion-MNIST", neutral=True,
    )  # fmt: skip
    image_size: int | None = setting(
        None, "side of the square images", group="data", range=Range(8, 2**14),
        auto="from the images, at most 224",
    )  # fmt: skip
    eval_size: int | None = setting(
        None, "side of the images in evaluations and predictions, if it is to be another", group="data",
        range=Range(8, 2**14),
    )  # fmt: skip
    crop: str = setting(
        "bilinear", "filter by which crops are resized, in evaluations too", group="data",
        choices=("bilinear", "bicubic"),
    )  # fmt: skip
    download: bool = setting(
        False, "fetch what is missing of torchvision:NAME or hf:NAME", group="data", neutral=True
    )
    skip_bad_images: int = setting(
        0, "how many unreadable images to replace instead of stopping", group="data",
        range=AT_LEAST_0, neutral=True,
    )  # fmt: skip
    flip: bool = setting(
        True, "mirror half of the training images; not for digits or text", group="data"
    )
    crop_scale: float | None = setting(
        None, "least share of the area that a training crop keeps", group="data",
        range=SHARE_ABOVE_0, auto="0.25",
    )  # fmt: skip
    padding: int | None = setting(
        None, "pixels by which images of one small size are moved each way, at most",
        group="data", range=Range(0, 63),
        auto="an eighth of their side; 0 for the embedded data",
    )  # fmt: skip
    augment: str = setting(
        "none", "random operations on training images, after crop and flip",
        group="data", choices=("none", "randaugment", "trivialaugment"),
    )  # fmt: skip
    color_jitter: float = setting(
        0.0, "change brightness, contrast and saturation by up to this factor, such as 0.4; 0 is off",
        group="data", range=SHARE,
    )  # fmt: skip
    random_erasing: float = setting(
        0.0,
        "probability that a rectangle of a training image is erased; 0 is off",
        group="data",
        range=SHARE,
    )
    balance: str = setting(
        "none", "draw the classes of an epoch evenly (full), or half of the way (sqrt), with repetitions",
        group="data", choices=("none", "sqrt", "full"),
    )  # fmt: skip
    workers: int | None = setting(
        None, "processes that read data, for each that trains; 0 reads in the training process",
        group="data", range=Range(0, 1024), neutral=True,
        auto="0 for small images or on a CPU, else the cores, at most 8",
    )  # fmt: skip
    retry_workers: int = setting(
        0, "how often data workers that died or stalled are started again before the run ends",
        group="data", range=Range(0, 1000), neutral=True,
    )  # fmt: skip
    model: str | None = setting(
        None, "a timm name, torchvision:NAME, small_convnet, tiny_convnet, or FILE.py:FUNCTION",
        group="model",
        auto="small_convnet up to 64 pixels (tiny_convnet for the embedded data), else resnet18",
    )  # fmt: skip
    pretrained: bool = setting(False, "start from published weights", group="model")
    weights: str | None = setting(
        None, "start from the weights in this file or run, as far as they fit", group="model"
    )
    drop_path: float = setting(
        0.0,
        "probability of stochastic depth, of models that have it; 0 is off",
        group="model",
        range=SHARE_BELOW_1,
    )
    recompute: str = setting(
        "none", "modules that keep no activations, such as layer*.* or blocks.*: less memory, more time",
        group="model", neutral=True,
    )  # fmt: skip
    compile: str = setting(
        "none", "let torch.compile make kernels for the model, in this mode", group="model",
        choices=("none", "default", "reduce-overhead", "max-autotune"), bare="default", neutral=True,
    )  # fmt: skip
    ema: float = setting(
        0.0,
        "decay of the averaged weights, such as 0.999; 0 keeps none",
        group="model",
        range=SHARE_BELOW_1,
    )
    freeze: str = setting(
        "none", "what is not trained, with its statistics: backbone, or names such as stem,layer1,*.bn*",
        group="fine-tuning",
    )  # fmt: skip
    head_lr: float | None = setting(
        None,
        "peak learning rate of the last layer, if it is different",
        group="fine-tuning",
        range=ABOVE_0,
    )
    layer_decay: float = setting(
        1.0, "factor of the learning rate from each layer to the one before, such as 0.75",
        group="fine-tuning", range=SHARE_ABOVE_0,
    )  # fmt: skip
    teacher: str | None = setting(
        None, "folder of a run, whose model's probabilities are learned beside the labels",
        group="fine-tuning",
    )  # fmt: skip
    teacher_weight: float | None = setting(
        None,
        "share of the teacher in the loss, up to 1",
        group="fine-tuning",
        range=SHARE_ABOVE_0,
        auto="0.5",
    )
    temperature: float | None = setting(
        None, "that softens the probabilities of teacher and student", group="fine-tuning",
        range=ABOVE_0, auto="4",
    )  # fmt: skip
    qat: bool = setting(
        False, "quantization-aware training: round to 8 bits from --weights or --pretrained on, for "
        "flambeau export --format onnx", group="fine-tuning",
    )  # fmt: skip
    epochs: int | None = setting(None, "short for --duration Nep", group="length", range=AT_LEAST_1)
    duration: str | None = setting(
        None, "such as 90ep or 5000st", group="length",
        auto="5ep for the embedded data, 30ep, or 10ep with --pretrained or --weights",
    )  # fmt: skip
    extend: str | None = setting(
        None, "train a finished run on, for so much more than its duration, such as 10ep; 0ep takes one back "
        "of which nothing is trained", group="length", neutral=True,
    )  # fmt: skip
    batch_size: int | str | None = setting(
        None, "samples per forward pass, of all processes together; auto finds out how many fit into memory "
        "and accumulates the rest of a step, auto:512 of a step of 512", group="length", range=AT_LEAST_1,
        auto="128 for small images, 64 for others and the embedded data, less for few",
    )  # fmt: skip
    early_stop: int = setting(
        0, "end the run after this many epochs without a better val_accuracy; 0 never does",
        group="length", range=AT_LEAST_0,
    )  # fmt: skip
    accumulate: int = setting(
        1, "forward passes per optimizer step", group="length", range=AT_LEAST_1
    )
    optimizer: str = setting(
        "sgd", "sgd is with Nesterov momentum; muon does the inner weight matrices, adamw the rest",
        group="optimization",
        choices=(
            "sgd", "adam", "adamw", "nadam", "radam", "adamax", "adagrad", "rmsprop", "muon"
        ),
    )  # fmt: skip
    momentum: float | None = setting(
        None, "of sgd, rmsprop and muon; from 0 to below 1", group="optimization", range=SHARE_BELOW_1,
        auto="sgd and rmsprop 0.9, muon 0.95",
    )  # fmt: skip
    betas: str | None = setting(
        None, "of adam, adamw, nadam, radam and adamax, such as 0.9,0.98: of the averages of the gradient "
        "and of its square", group="optimization", auto="0.9,0.999",
    )  # fmt: skip
    lr: float | None = setting(
        None, "peak learning rate", group="optimization", range=ABOVE_0,
        auto="grows with the batch; at 256: sgd 0.1 (small_convnet 0.4, tiny_convnet 1.6), adamw 0.001; "
        "pretrained or weights a tenth, qat a hundredth",
    )  # fmt: skip
    weight_decay: float = setting(
        5e-4,
        "on weights of two or more dimensions; never on biases and norms",
        group="optimization",
        range=AT_LEAST_0,
    )
    schedule: str = setting(
        "cosine", "of the learning rate",
        group="optimization",
        choices=(
            "cosine", "linear", "multistep", "exponential", "constant", "polynomial", "wsd",
            "one-cycle", "cosine-restarts", "plateau",
        ),
    )  # fmt: skip
    milestones: str | None = setting(
        None, "for multistep: when the rate falls, such as 30ep,60ep or 50%%,75%%", group="optimization",
        auto="50%%,75%%",
    )  # fmt: skip
    gamma: float | None = setting(
        None, "for multistep and exponential: the factor of the rate at each milestone, or per epoch",
        group="optimization", range=SHARE_ABOVE_0, auto="multistep 0.1, exponential 0.9",
    )  # fmt: skip
    warmup: str = setting("10%", "such as 5%%, 2ep or 500st", group="optimization")
    patience: int | None = setting(
        None, "for plateau: epochs without a better val_accuracy before the rate falls",
        group="optimization", range=AT_LEAST_0, auto="3",
    )  # fmt: skip
    plateau_factor: float | None = setting(
        None, "for plateau: what the rate is multiplied by", group="optimization",
        range=Range(0, 1, above_low=True, below_high=True), auto="0.1",
    )  # fmt: skip
    clip_norm: float = setting(
        0.0, "clip the norm of the gradient to this; 0 does not", group="optimization",
        range=AT_LEAST_0,
    )  # fmt: skip
    label_smoothing: float = setting(
        0.1, "from 0 to below 1", group="optimization", range=SHARE_BELOW_1
    )
    class_weights: str | None = setting(
        None, "weight of each class in the loss: auto takes the inverse of its share of the images; "
        "or a JSON file with a number for each class", group="optimization",
    )  # fmt: skip
    mixup: float = setting(0.0, "alpha of mixup; 0 is off", group="optimization", range=_ALPHA)
    cutmix: float = setting(
        0.0, "alpha of CutMix; 0 is off; with --mixup each batch gets one of the two",
        group="optimization", range=_ALPHA,
    )  # fmt: skip
    on_nan: str = setting(
        "stop", "where a loss or gradient is not finite; rollback resumes a checkpoint with half the rate",
        group="optimization", choices=("stop", "rollback"), neutral=True,
    )  # fmt: skip
    precision: str = setting(
        "auto", "of the forward pass; auto takes bf16 where the hardware has it natively",
        group="machine", choices=("auto", "fp32", "tf32", "bf16", "fp16"),
    )  # fmt: skip
    device: str = setting("auto", "such as cpu, cuda or cuda:1", group="machine")
    seed: int = setting(
        0, "of everything random", group="machine", range=Range(0, 2**64, below_high=True)
    )
    parts: int | None = setting(
        None, "cut each step into so many parts, computed one by one, so that any number of processes gives "
        "the same bits", group="processes", range=AT_LEAST_1,
    )  # fmt: skip
    sync_bn: bool = setting(
        False, "normalise over the batch of all processes or parts, not over each one's share",
        group="processes",
    )  # fmt: skip
    shard: str = setting(
        "none", "how the weights are spread over the processes: all on each, or a part on each",
        group="processes", choices=("none", "fsdp"), neutral=True,
    )  # fmt: skip
    compression: str = setting(
        "none", "of the gradients that processes exchange", group="processes",
        choices=("none", "fp16", "bf16", "powersgd"),
    )  # fmt: skip
    stop_within: str | None = setting(
        None, "after SIGTERM write a checkpoint only if one takes less than this, such as 30s",
        group="run folder", neutral=True,
    )  # fmt: skip
    stall_timeout: float = setting(
        60.0,
        "seconds without progress after which a process or data worker is named and the job ends; 0 is never",
        group="processes", range=AT_LEAST_0, neutral=True,
    )  # fmt: skip
    checkpoint_every: str = setting("1ep", "such as 1ep or 500st", group="run folder", neutral=True)
    keep: int = setting(
        2,
        "newest checkpoints kept, besides the best",
        group="run folder",
        range=AT_LEAST_1,
        neutral=True,
    )
    log_every: int = setting(
        50, "steps per line of metrics.jsonl", group="run folder", range=AT_LEAST_1
    )
    track: str = setting(
        "none", "trackers that get the lines of metrics.jsonl too, one or several with commas: "
        f"{', '.join(TRACKERS)}", group="run folder", neutral=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = typed(field, getattr(self, field.name))
            check_value(field, value)
            object.__setattr__(self, field.name, value)
        self._check_contradictions()
        self._check_durations()
        self._check_effects()

    def _check_contradictions(self) -> None:
        """Refuse settings that contradict each other."""
        if self.epochs is not None and self.duration is not None:
            raise InputError(
                f"epochs = {self.epochs} and duration = {self.duration!r} contradict each other: "
                "give one of them"
            )
        if self.balance != "none" and self.class_weights == "auto":
            raise InputError(
                f"balance = {self.balance!r} and class_weights = 'auto' both make up for rare classes: "
                "give one of them"
            )
        if self.pretrained and self.weights is not None:
            raise InputError("pretrained and weights contradict each other: give one of them")
        if self.qat and not self.pretrained and self.weights is None:
            raise InputError("qat starts from trained weights: give --weights RUN or --pretrained")
        model = self.model or ""
        if self.pretrained and (model in ("small_convnet", "tiny_convnet") or ".py:" in model):
            raise InputError(
                "pretrained needs a timm or torchvision model: there are no published weights of "
                f"{model}"
            )

    def _check_durations(self) -> None:
        """Refuse durations that are none, and a warm-up as long as the run."""
        warmup = parse_duration(self.warmup, name="warmup", units="% ep st")
        if self.duration is not None:
            length = parse_duration(self.duration, name="duration")
            if length.amount <= 0:
                raise InputError(f"duration must be above 0, got {self.duration!r}")
            if warmup.unit == length.unit and warmup.amount >= length.amount:
                raise InputError(
                    f"warmup = {self.warmup!r} is not shorter than duration = {self.duration!r}"
                )
        if warmup.unit == "%" and warmup.amount >= 100:
            raise InputError(f"warmup = {self.warmup!r} leaves nothing of the run")
        if self.extend is not None:
            parse_duration(self.extend, name="extend")
        if self.stop_within is not None:
            parse_seconds(self.stop_within, name="stop_within")
        if parse_duration(self.checkpoint_every, name="checkpoint_every").amount <= 0:
            raise InputError(f"checkpoint_every must be above 0, got {self.checkpoint_every!r}")

    def named_schedule(self) -> NamedSchedule:
        """The schedule with its numbers; refuses those that it does not take."""
        milestones = None if self.milestones is None else self.milestones.split(",")
        return NamedSchedule(self.schedule, gamma=self.gamma, milestones=milestones)

    def _check_effects(self) -> None:
        """Refuse settings of something that is not chosen."""
        for name, of, takers in _TAKEN_BY:
            if getattr(self, name) is not None and getattr(self, of) not in takers:
                raise InputError(
                    f"{name} has no effect with {of} = {getattr(self, of)!r}: leave it out"
                )
        if parse_batch_size(self.batch_size).finds and self.accumulate > 1:
            raise InputError(
                f"batch_size = {self.batch_size!r} finds out how much to accumulate: leave "
                f"accumulate = {self.accumulate} out, and name the samples of a step, as in 'auto:512'"
            )
        self.named_schedule()
        tracker_list(self.track)
        parse_betas(self.betas)
        for name in ("teacher_weight", "temperature"):
            if getattr(self, name) is not None and self.teacher is None:
                raise InputError(f"{name} has no effect without a teacher: leave it out")
        check_contradictions(self)


FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Settings)}
