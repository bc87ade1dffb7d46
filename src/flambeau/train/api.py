"""From Python: `train` trains a model, `load` gives it to call on images, `evaluate` its figures.

What the commands `flambeau train`, `predict` and `evaluate` do is done by the same functions.
"""

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from flambeau.data.sources.open_data import open_source
from flambeau.data.sources.source import Source
from flambeau.errors import InputError, nearest
from flambeau.html_table import html_table
from flambeau.provenance import RUNNING
from flambeau.recipes.setup.float32_precision import float32_precision_kept
from flambeau.recipes.training.auroc import AUROC
from flambeau.recipes.training.calibration_error import CalibrationError
from flambeau.recipes.training.confusion_matrix import ConfusionMatrix
from flambeau.recipes.training.label_smoothing import cross_entropy
from flambeau.recipes.training.metrics import MeanOnDevice, correct
from flambeau.sandbox.inside import folder_for_run
from flambeau.terminal import CountBar
from flambeau.terminal import say as terminal_say
from flambeau.train.checkpoints.published_weights import published
from flambeau.train.checkpoints.run_folder import RunFolder
from flambeau.train.evaluation.figures import ClassFigures, Evaluation, ImagePredictions
from flambeau.train.loop.evaluation_mode import generators_restored
from flambeau.train.prediction.predictor import Predictor
from flambeau.train.prediction.trained_model import Trained, at_size, load_trained, read_for
from flambeau.train.settings.config_file import canonical
from flambeau.train.settings.default_folder import default_folder, told_settings
from flambeau.train.settings.keyword_types import SettingsKeywords
from flambeau.train.settings.settings import FIELDS, Settings
from flambeau.train.settings.track import Track, tracker_list
from flambeau.train.start_or_resume import Shown, start

_TOP = 5
# Classes: of more, the table (8 bytes a cell) is kept on the host; chosen, untested.
_ON_DEVICE = 4096


@dataclass(frozen=True)
class TrainingResult:
    """What a training has come to.

    Attributes:
        folder: of the run; `load` and `evaluate` take it.
        weights: which ones were published in model.safetensors: the averaged, the best, or the last.
        step: at which they were.
        metrics: of the last evaluation of exactly these weights; None where one was not finite.
    """

    folder: Path
    weights: Literal["ema", "best", "last"]
    step: int
    metrics: Mapping[str, float | None]

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        rows = {"weights": self.weights, "step": self.step, **self.metrics, "folder": self.folder}
        return html_table("finished run", rows)


def train(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    fresh: bool = False,
    bar: bool = True,
    track: Track | None = None,
    trust: bool = False,
    **settings: Unpack[SettingsKeywords],
) -> TrainingResult:
    """Train an image classifier as `flambeau train` does; the same call again continues its run.

    What it says goes to standard error. What it sets for the process (seeds, deterministic algorithms,
    threads) is afterwards as it was.

    Args:
        data: what the command takes; None trains on the embedded Fashion-MNIST.
        out: the run folder; None is that of the command: runs/NAME, and a hash if settings are given.
        fresh: start again; an existing run is renamed, not deleted.
        bar: show a progress bar on a terminal, and in a notebook a bar and a chart.
        track: what gets the lines of metrics.jsonl: names of trackers, as for `--track`, or functions of a
            step and its figures, such as `lambda step, figures: print(step, figures)`. None for those of the
            run.
        trust: run the files of code that the folder of the run, or of its teacher, names and this call does
            not, also where nothing shows that you have made that folder here.
        settings: the command's flags: `batch_size=64` is `--batch-size 64`, `flip=False` is `--no-flip`.

    Returns:
        What the run has published, also where it was finished before.

    Raises:
        InputError: whatever the user can fix; a folder that holds a run of other settings, say.
        TypeError: a setting that there is not.
        Preempted: SIGTERM, SIGUSR1 or SIGINT came, and the run is saved: the same call continues it. At a
            prompt KeyboardInterrupt.

    Example:
        >>> result = train("photos/", model="resnet18", epochs=5)  # doctest: +SKIP
        >>> load(result.folder)("cat.jpg")  # doctest: +SKIP
        Predictions('cat' 98.3%)
    """
    for name in settings:
        if name not in FIELDS:
            raise TypeError(f"train has no setting {name!r}{nearest(name, FIELDS)}")
    given: dict[str, Any] = {**settings}
    if data is not None:
        given["data"] = str(data)
    with _in_words_of_python(), _process_restored():
        trackers = tracker_list(track)
        if track is not None:
            names = (item for item in trackers if isinstance(item, str))
            given["track"] = ",".join(names) or "none"
        functions = [item for item in trackers if not isinstance(item, str)]
        chosen = canonical(Settings(**given))
        told = told_settings(chosen, given)
        folder = folder_for_run(default_folder(chosen, told) if out is None else Path(out))
        start(
            chosen,
            told,
            folder,
            say=terminal_say,
            fresh=fresh,
            trust=trust,
            shown=Shown(bar, track=functions),
        )
    result = published(RunFolder(folder))
    assert result is not None
    return TrainingResult(folder, result.weights, result.step, result.metrics)


@contextlib.contextmanager
def _in_words_of_python() -> Iterator[None]:
    """Errors name the arguments of `train`, where those of the command would name its flags."""
    try:
        yield
    except InputError as error:
        text = re.sub(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)", _as_argument, str(error))
        raise type(error)(text) from error


def _as_argument(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    return f"{name}=" if name in FIELDS or name in ("out", "fresh") else flag[0]


@contextlib.contextmanager
def _process_restored() -> Iterator[None]:
    """What a training sets for the whole process is put back; a notebook goes on with its own."""
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    switches = cudnn.benchmark, cudnn.deterministic
    try:
        with generators_restored(), float32_precision_kept():
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        cudnn.benchmark, cudnn.deterministic = switches
        torch.set_num_threads(threads)


def load(
    run: str | Path,
    *,
    image_size: int | None = None,
    trust: bool = False,
    say: Callable[[str], None] | None = None,
) -> Predictor:
    """The model of a run, to be called on images.

    Args:
        run: folder of a run of `flambeau train`.
        image_size: side of the images as the model shall see them, pixels; None for that of the training.
        trust: run the file of code that the folder names as its model, also where nothing shows that you
            have made the folder here; of your own runs it is not needed.
        say: takes a line that names such a file, and one where the weights are not those of a finished run,
            or the file of the model has changed; None for standard error and for a warning.

    Returns:
        A function of images; see `Predictor`.

    Raises:
        InputError: not such a run, no weights yet, damaged ones, or a size that the model cannot take.

    Example:
        >>> predictor = load("runs/photos")  # doctest: +SKIP
        >>> predictor("cat.jpg")  # doctest: +SKIP
        Predictions('cat' 98.3%)
    """
    return Predictor(_loaded(run, image_size, trust, say))


def evaluate(
    run: str | Path | Predictor,
    data: str | Path,
    *,
    image_size: int | None = None,
    flip_tta: bool = False,
    workers: int = 0,
    skip_bad_images: int = 0,
    download: bool = False,
    trust: bool = False,
    progress: bool = False,
    say: Callable[[str], None] | None = None,
) -> Evaluation:
    """Measure a model on labelled images, each counted once.

    Args:
        run: folder of a run, or what `load` gave.
        data: what `flambeau train` takes; its validation part counts, if any.
        image_size: as of `load`.
        flip_tta: average the probabilities of each image and its mirror image.
        workers: processes that read; 0 reads in this one.
        skip_bad_images: how many unreadable images to leave out.
        download: fetch what is missing of a data set by name.
        trust: as of `load`.
        progress: show a bar on a terminal or in a notebook.
        say: as of `load`.

    Returns:
        The figures and the predictions; printing it shows them.

    Raises:
        InputError: a run or data that cannot be used, classes that the run does not know, bad images.

    Example:
        >>> evaluation = evaluate("runs/photos", "photos")  # doctest: +SKIP
        >>> evaluation.accuracy, evaluation.classes[0].recall  # doctest: +SKIP
        (0.93, 0.9)
    """
    for name, number in (("workers", workers), ("skip_bad_images", skip_bad_images)):
        if number < 0:
            raise InputError(f"{name} must be at least 0, got {number}")
    trained = _loaded(run, image_size, trust, say)
    source = open_source(Path(data), trained.facts.classes, download=download)
    return measure(
        trained, source, flip_tta=flip_tta, workers=workers, skip_bad_images=skip_bad_images,
        progress=progress,
    )  # fmt: skip


def measure(
    trained: Trained,
    source: Source,
    *,
    flip_tta: bool = False,
    workers: int = 0,
    skip_bad_images: int = 0,
    progress: bool = False,
) -> Evaluation:
    """The same of a model that is loaded, on a source of its classes."""
    loader, bad = read_for(trained, source, workers=workers, skip_bad_images=skip_bad_images)
    counters = _Counters.of(trained)
    with CountBar(len(source), unit="images", shown=progress) as bar:
        for micro in loader.stream(epoch=0, position=0, epochs=1):
            images, targets = micro.data
            if len(targets):
                left_out = set(map(int, micro.bad))
                indices = [index for index in map(int, micro.indices) if index not in left_out]
                logits = trained.logits(images, flip_tta=flip_tta)
                counters.update(logits, targets, indices)
            bar.update(len(micro.indices))
    if not counters.indices:
        raise InputError(f"no image could be read; the first one is {source.describe(0)}")
    return counters.evaluation(
        describe=source.describe,
        num_bad=len(bad.names),
        image_size=trained.image_size,
        flip_tta=flip_tta,
    )


def _loaded(
    run: str | Path | Predictor,
    image_size: int | None,
    trust: bool,
    say: Callable[[str], None] | None,
    /,
) -> Trained:
    if isinstance(run, Predictor):
        return at_size(run.trained, image_size)
    said: list[str] = []
    trained = load_trained(Path(run), trust=trust, say=said.append if say is None else say)
    for text in said:
        if text.startswith(RUNNING):
            terminal_say(text)
        else:
            warnings.warn(text, stacklevel=3)  # at the line that has called load or evaluate
    return at_size(trained, image_size)


@dataclass(frozen=True)
class _Counters:
    """What is counted of each batch, on the device of the model."""

    names: tuple[str, ...]
    loss: MeanOnDevice
    top5: MeanOnDevice
    confusion: ConfusionMatrix
    calibration: CalibrationError
    auroc: AUROC
    labels: list[Tensor]
    ranked: list[Tensor]
    probabilities: list[Tensor]
    indices: list[int]

    @classmethod
    def of(cls, trained: Trained) -> "_Counters":
        names, device = tuple(trained.facts.classes), trained.device
        table_device = device if len(names) <= _ON_DEVICE else torch.device("cpu")
        return cls(
            names,
            loss=MeanOnDevice(device),
            top5=MeanOnDevice(device),
            confusion=ConfusionMatrix(len(names), device=table_device),
            calibration=CalibrationError(device=device),
            auroc=AUROC(),
            labels=[],
            ranked=[],
            probabilities=[],
            indices=[],
        )

    def update(self, logits: Tensor, targets: Tensor, indices: list[int]) -> None:
        on_device = targets.to(logits.device)
        self.loss.update(cross_entropy(logits, on_device, reduction="none"))
        predicted = logits.argmax(1).to(self.confusion.device)
        self.confusion.update(predicted, targets.to(self.confusion.device))
        self.calibration.update(logits, on_device)
        if len(self.names) > _TOP:
            self.top5.update(correct(logits, on_device, k=_TOP))
        elif len(self.names) == 2:
            self.auroc.update(logits, on_device)
        ranked = logits.topk(min(_TOP, len(self.names))).indices
        self.ranked.append(ranked)
        self.probabilities.append(logits.softmax(1).gather(1, ranked))
        self.labels.append(targets)
        self.indices.extend(indices)

    def evaluation(self, *, describe: Callable[[int], str], **facts: Any) -> Evaluation:
        """All figures, read from the device."""
        total = {name: float(value) for name, value in self.confusion.compute().items()}
        each = {name: value.tolist() for name, value in self.confusion.per_class().items()}
        auroc = float(self.auroc.compute()) if len(self.names) == 2 else None
        predictions = ImagePredictions(
            self.names,
            torch.tensor(self.indices),
            torch.cat(self.labels),
            torch.cat(self.ranked).cpu(),
            torch.cat(self.probabilities).cpu(),
            describe,
        )
        return Evaluation(
            loss=float(self.loss.compute()),
            accuracy=total["accuracy"],
            top5_accuracy=float(self.top5.compute()) if len(self.names) > _TOP else None,
            macro_precision=total["macro_precision"],
            macro_recall=total["macro_recall"],
            macro_f1=total["macro_f1"],
            calibration_error=float(self.calibration.compute()),
            calibration_bins=self.calibration.num_bins,
            auroc=None if auroc is None or math.isnan(auroc) else auroc,
            num_images=len(predictions),
            classes=tuple(_class_figures(name, k, each) for k, name in enumerate(self.names)),
            confusion=self.confusion.counts.cpu(),
            predictions=predictions,
            **facts,
        )


def _class_figures(name: str, number: int, each: dict[str, list[Any]]) -> ClassFigures:
    def figure(what: str) -> float | None:
        value: float = each[what][number]
        return None if math.isnan(value) else value

    return ClassFigures(
        name,
        precision=figure("precision"),
        recall=figure("recall"),
        f1=figure("f1"),
        support=each["support"][number],
        predicted=each["predicted"][number],
    )
