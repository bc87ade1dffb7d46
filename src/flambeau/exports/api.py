"""From Python: `export` writes any image classifier as a folder that needs neither flambeau nor its class.

N: images, C: channels, S: side of the images in pixels, K: classes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flambeau.data.drop_in.declared_preprocessing import Preprocessing
from flambeau.data.sources.open_data import open_source
from flambeau.errors import InputError, in_words_of_python, nearest
from flambeau.exports.export_run import check_out, write_export
from flambeau.exports.formats.all_formats import FORMATS
from flambeau.exports.served_model import why_not_one_graph
from flambeau.exports.step_figures import StepFigures, as_rows
from flambeau.exports.steps import ExportPlan, Steps
from flambeau.html_table import html_table
from flambeau.parallel.shard_layout import is_sharded
from flambeau.run.options.run_options import checked_classes
from flambeau.terminal import say as terminal_say
from flambeau.trainer.parts.device import float32_by_default
from flambeau.trainer.parts.model import check_logits
from flambeau.trainer.prediction.ensemble import Ensemble, Model
from flambeau.trainer.prediction.own_loop import as_torchvision, used_as
from flambeau.trainer.prediction.predictor import EnsemblePredictor, Images, Predictor
from flambeau.trainer.prediction.sample_images import RANGE_IMAGES, SampleImages, read_images
from flambeau.trainer.prediction.trained_model import Trained
from flambeau.user_code import first_line

Example: TypeAlias = "Images | tuple[Tensor, Tensor] | list[Tensor]"
"""Images to measure on: labelled ones by a path or name as `flambeau evaluate` takes them; a batch of a
DataLoader, (N, C, S, S) floating, alone or with labels (N,); or a list of image files, PIL images or uint8
arrays, as what `flambeau.load` returns takes them."""

_MOST = 1000  # images of a folder, as in `flambeau export`
_QUANTIZE = ("int8", "dynamic", "fp16", "bf16")
_WHOLE = 0.02  # levels of 255 that float32 may be off after normalization and back; measured: 1e-4


@dataclass(frozen=True, repr=False)
class ExportResult:
    """What `export` has written.

    Attributes:
        folder: of the export.
        steps: the figures of the model and of each step, as export.json has them.
    """

    folder: Path
    steps: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, folder: Path, figures: Sequence[StepFigures]) -> "ExportResult":
        """The result with the figures of all steps."""
        return cls(folder, tuple(as_rows(figures)))

    def __repr__(self) -> str:
        last = self.steps[-1]
        return (
            f"ExportResult({self.folder}: {last['step']}, {last['bytes'] / 1e6:.2f} MB, same answer on "
            f"{last['agreement']:.2%} of the images)"
        )

    def _repr_html_(self) -> str:
        rows = {
            str(one["step"]): f"same answer {one['agreement']:.2%}, {one['bytes'] / 1e6:.2f} MB"
            for one in self.steps
        }
        return html_table("export", {**rows, "folder": self.folder})


@float32_by_default()
def export(
    model: nn.Module | Predictor | EnsemblePredictor,
    example: Example,
    out: str | Path,
    *,
    preprocess: Mapping[str, Any] | Callable[..., Any] | None = None,
    classes: Sequence[str] | None = None,
    format: str = "torch-export",
    fold: bool = False,
    reparameterize: bool = False,
    quantize: str | None = None,
    calibrate: "Example | None" = None,
    min_agreement: float = 0.99,
    allow_slower: bool = False,
    say: Callable[[str], None] | None = None,
) -> ExportResult:
    """Export an image classifier as `flambeau export`: image file in, probabilities out.

    Every step is measured on `example`: answers, size and time. If one changes too many answers, or costs
    time, nothing is written.

    Args:
        model: from normalized images (N, C, S, S) to logits (N, K); exported in evaluation mode, in float32;
            not changed. Or what `flambeau.load` returned, which knows `preprocess` and `classes`; of several
            runs one graph.
        example: images to measure on, the more the better: a path as for `flambeau evaluate`; a batch of your
            DataLoader, (N, C, S, S) alone or with labels (N,); or a list of image files, PIL images or uint8
            arrays.
        out: the folder to make.
        preprocess: from image to input: a dict of `image_size`, `mean`, `std`, `resize`, `interpolation` and
            `pixels`, or torchvision's or timm's transform of an evaluation.
        classes: names, in the order of the logits.
        format: torch-export, onnx (one file for ONNX Runtime and others) or aoti (compiled for this kind of
            processor); of a named model also safetensors.
        fold: BatchNorm into the layer before it.
        reparameterize: blocks of branches into one convolution each.
        quantize: int8 (weights and activations), dynamic (weights of linear layers), fp16 or bf16.
        calibrate: images for the ranges of int8, as `example`; None: the first 256 of `example`.
        min_agreement: least share of the images that must keep their class.
        allow_slower: keep a step that takes longer than before.
        say: takes lines on progress; None: standard error.

    Returns:
        The folder and the figures of each step.

    Raises:
        InputError: model, preprocessing and example do not fit, `out` exists, a step is refused, or the
            format cannot be written for this model or here.

    Example:
        >>> from torchvision.models import resnet18, ResNet18_Weights  # doctest: +SKIP
        >>> weights = ResNet18_Weights.DEFAULT  # doctest: +SKIP
        >>> export(  # doctest: +SKIP
        ...     resnet18(weights=weights), "photos", "shipped", preprocess=weights.transforms(),
        ...     classes=weights.meta["categories"], format="onnx",
        ... )
    """
    plan = ExportPlan(
        format,
        fold=fold,
        reparameterize=reparameterize,
        quantize=quantize,
        min_agreement=min_agreement,
        allow_slower=allow_slower,
    )
    with in_words_of_python(export.__annotations__, (*FORMATS, *_QUANTIZE)):
        _check_plan(plan, calibrate)
        check_out(Path(out))
        whole = _trained(model, preprocess, classes, format)
        if isinstance(whole, Ensemble):
            plan.check_of_several()
        trained = whole.reference if isinstance(whole, Ensemble) else whole
        images = _sample(trained, example, "example", most=_MOST)
        ranges = None
        if plan.measures_ranges:
            ranges = _sample(
                trained, example if calibrate is None else calibrate, "calibrate", most=RANGE_IMAGES
            )
        subject = "run" if isinstance(model, Predictor) else "model"
        subject = "ensemble" if isinstance(whole, Ensemble) else subject
        steps = Steps(whole, plan, images, ranges, None, say or terminal_say, subject)
        return ExportResult.of(Path(out), write_export(steps, Path(out)))


def _check_plan(plan: ExportPlan, calibrate: object) -> None:
    for name, value, known in (
        ("format", plan.format, tuple(FORMATS)),
        ("quantize", plan.quantize, (None, *_QUANTIZE)),
    ):
        if value not in known:
            words = [word for word in known if word is not None]
            raise InputError(
                f"{name} must be one of {', '.join(words)}, got {value!r}{nearest(str(value), words)}"
            )
    plan.check()
    if calibrate is not None and not plan.measures_ranges:
        raise InputError(
            "--calibrate is for the ranges of --quantize int8: give that, or leave it out"
        )


def _trained(
    model: nn.Module | Predictor | EnsemblePredictor,
    preprocess: Mapping[str, Any] | Callable[..., Any] | None,
    classes: Sequence[str] | None,
    format_name: str,
) -> Model:
    """The model in the form of that of a run."""
    if isinstance(model, EnsemblePredictor):
        why = why_not_one_graph(model.trained)
        if why is not None:
            raise InputError(
                f"these runs do not fit into one graph: {why}\nExport each of them, or train them with the "
                "same image_size and crop"
            )
        for member in model.members:
            _of_predictor(member, preprocess, classes, format_name)
        return model.trained
    if isinstance(model, Predictor):
        return _of_predictor(model, preprocess, classes, format_name)
    if not isinstance(model, nn.Module):
        raise InputError(
            "model must be a torch.nn.Module, or what flambeau.load(RUN) returned; got "
            f"{type(model).__name__}"
        )
    missing = [
        name for name, given in (("preprocess", preprocess), ("classes", classes)) if given is None
    ]
    if preprocess is None or classes is None:
        raise InputError(
            f"give {' and '.join(missing)}, too: the export reads image files and names their classes\n"
            "preprocess is the transform of your evaluation, or a dict of image_size, mean and std; classes "
            "is a list of names in the order of the logits"
        )
    if isinstance(model, DistributedDataParallel | nn.DataParallel) or is_sharded(model):
        raise InputError(
            f"the model is distributed ({type(model).__name__}): give the whole one, such as model.module"
        )
    if format_name == "safetensors":
        raise InputError(
            "--format safetensors holds weights alone, and no name stands for the class of this model\n"
            "Take --format torch-export, which holds the graph"
        )
    plain: nn.Module = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    FORMATS[format_name].require(type(plain).__name__)
    settings, facts, resize = used_as(
        type(plain).__name__, Preprocessing.of(preprocess), checked_classes(classes)
    )
    try:
        own = copy.deepcopy(plain).eval().float()
    except (RuntimeError, TypeError) as error:  # tensors with a history, locks, generators
        raise InputError(
            f"the model cannot be copied, which keeps yours as it is: {first_line(error)}\n"
            "Give one that copy.deepcopy takes, such as a new one with the same state_dict"
        ) from error
    check_logits(
        own,
        num_classes=facts.task.num_outputs,
        channels=facts.channels,
        image_size=settings.image_size,
    )
    device = next((p.device for p in own.parameters()), torch.device("cpu"))
    return Trained(own, settings, facts, device, as_torchvision(facts, device), resize=resize)


def _of_predictor(
    model: Predictor, preprocess: object, classes: object, format_name: str
) -> Trained:
    for name, given in (("preprocess", preprocess), ("classes", classes)):
        if given is not None:
            raise InputError(f"{name} is that of the run: leave it out")
    if model.trained.has_fixed_size:
        raise InputError("this model is an export already: load its run, and export that")
    if model.trained.settings.qat and format_name != "onnx":
        raise InputError("the run was trained with qat: take --format onnx, which has its integers")
    FORMATS[format_name].require(model.trained.settings.model)
    return model.trained


def _sample(trained: Trained, example: Any, name: str, *, most: int) -> SampleImages:
    """The images of an example as the network sees them, before normalization."""
    if isinstance(example, str | Path):
        return read_images(
            trained, open_source(Path(example), trained.facts.classes, choice=trained.choice), most
        )
    labels = None
    if _is_batch(example):
        example, labels = example
    is_input = isinstance(example, Tensor) and example.is_floating_point() and example.ndim == 4
    if is_input and trained.facts.pixels == "uint8":
        x_NCHW = example.detach().float().cpu()
        _check_shape(trained, tuple(x_NCHW.shape), name)
    else:
        x_NCHW = Predictor(trained).preprocess(example).cpu()
    if not len(x_NCHW):
        raise InputError(f"{name} has no image")
    x_NHWC = _levels(trained, x_NCHW, name)[:most].permute(0, 2, 3, 1).contiguous()
    if labels is not None:
        _check_labels(labels, len(x_NCHW), len(trained.facts.classes), name)
        labels = labels[:most].cpu().long()
    return SampleImages(x_NHWC, labels, len(x_NCHW))


def _is_batch(example: Any) -> bool:
    """Whether it is a batch of a DataLoader: images and labels."""
    return (
        isinstance(example, tuple | list)
        and len(example) == 2
        and all(isinstance(one, Tensor) for one in example)
        and example[0].ndim == 4
        and example[1].ndim == 1
    )


def _check_shape(trained: Trained, shape: tuple[int, ...], name: str) -> None:
    side = trained.image_size
    wanted = trained.facts.channels, side, side
    if shape[1:] != wanted:
        raise InputError(
            f"{name} has the shape {shape}, and preprocess says (N, {', '.join(map(str, wanted))}): the "
            "number of channels is that of mean, and S is image_size"
        )


def _check_labels(labels: Tensor, num_images: int, num_classes: int, name: str) -> None:
    is_whole = not labels.is_floating_point() and labels.dtype != torch.bool
    if len(labels) != num_images or not is_whole:
        raise InputError(
            f"the labels of {name} must be ({num_images},) whole numbers, got {tuple(labels.shape)} "
            f"{labels.dtype}"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise InputError(
            f"the labels of {name} go from {int(labels.min())} to {int(labels.max())}, and classes has "
            f"{num_classes} names"
        )


def _levels(trained: Trained, x_NCHW: Tensor, name: str) -> Tensor:
    """The pixels (N, C, S, S) of normalized images: uint8, or levels of 16 bits.

    A graph takes the pixels of image files, so an input of the model that none of them gives shows that mean
    and std are not those by which it was made.
    """
    facts = trained.facts
    mean, std = (
        torch.tensor(one, dtype=torch.float64).view(1, -1, 1, 1) for one in (facts.mean, facts.std)
    )
    x = x_NCHW.double() * std + mean
    if facts.pixels == "uint16":
        return x.round().float()
    if facts.pixels != "uint8":
        return x.float()
    x = x * 255
    levels = x.round()
    off = (x - levels).abs().max()
    if not off <= _WHOLE or levels.min() < 0 or levels.max() > 255:
        raise InputError(
            f"{name} is not what preprocess makes of images of 8 bits: by its mean and std the levels go "
            f"from {float(x.min()):.4g} to {float(x.max()):.4g}, and one is {float(off):.2g} off a whole "
            "number\n"
            "Give the mean and std by which the batch was normalized; if it was resized or changed as "
            "floating-point numbers, give image files instead"
        )
    return levels.to(torch.uint8)
