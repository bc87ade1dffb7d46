"""From Python: `train` trains a model, `load` loads one to call on images, `evaluate` measures it.

The commands `flambeau train`, `predict` and `evaluate` use the same functions.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from flambeau.data.datasets.image_statistics import page_remarks
from flambeau.data.sources.data_names import data_text
from flambeau.data.sources.open_data import open_source
from flambeau.data.sources.source import Source, SubsetSource, left_out_lines
from flambeau.errors import InputError, in_words_of_python, nearest
from flambeau.html_table import html_table
from flambeau.provenance import RUNNING, named_code
from flambeau.recipes.setup.determinism import COMPILER_VARIABLE, use_deterministic
from flambeau.recipes.setup.float32_precision import float32_precision_kept
from flambeau.run.folder.published_weights import published
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.folder.store_run import folder_and_mirror, mirror_again, run_here
from flambeau.run.loop.evaluation_mode import generators_restored
from flambeau.run.loop.training_thread import training_here
from flambeau.run.options.option import declares
from flambeau.run.options.tracker_names import Track, tracker_list
from flambeau.sandbox.inside_trial import folder_for_run
from flambeau.terminal import say as terminal_say
from flambeau.trainer.evaluation.reading import MemberFigures
from flambeau.trainer.parts.data import check_test, target_choice
from flambeau.trainer.parts.device import float32_by_default
from flambeau.trainer.prediction.ensemble import (
    Ensemble,
    Model,
    ensemble_of,
    members_of,
    model_at_size,
    read_model,
)
from flambeau.trainer.prediction.final_test import (
    check_look,
    look_lines,
    looks_file,
    only_look,
    record_look,
    run_to_test,
)
from flambeau.trainer.prediction.pixel_remarks import pixel_remarks
from flambeau.trainer.prediction.predictor import EnsemblePredictor, Predictor, predictor_of
from flambeau.trainer.prediction.trained_images import images_to_test, trained_images
from flambeau.trainer.prediction.trained_model import (
    Trained,
    load_trained,
    readable_batches,
)
from flambeau.trainer.settings.default_folder import default_folder, given_settings
from flambeau.trainer.settings.settings import FIELDS, Settings
from flambeau.trainer.settings.stored_settings import canonical, with_preset
from flambeau.trainer.start import ProgressOptions, start
from flambeau.trainer.tasks.task import AnyEvaluation, Counters

Runs: TypeAlias = list[str] | list[Path] | list[str | Path] | tuple[str | Path, ...]
"""Folders of several runs."""


@dataclass(frozen=True)
class TrainingResult:
    """The outcome of a training.

    Attributes:
        folder: of the run; `load` and `evaluate` take it.
        weights: what model.safetensors holds: averaged, best, or last.
        step: that they are from.
        metrics: of the last evaluation of these weights; None where one was not finite.
    """

    folder: Path
    weights: Literal["ema", "best", "last", "soup"]
    step: int
    metrics: Mapping[str, float | None]

    def _repr_html_(self) -> str:
        rows = {"weights": self.weights, "step": self.step, **self.metrics, "folder": self.folder}
        return html_table("finished run", rows)


def _train(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    fresh: bool = False,
    bar: bool = True,
    track: Track | None = None,
    trust: bool = False,
    **settings: Any,
) -> TrainingResult:
    for name in settings:
        if name not in FIELDS:
            raise TypeError(f"train has no setting {name!r}{nearest(name, FIELDS)}")
    given: dict[str, Any] = {**settings}
    if data is not None:
        given["data"] = str(data)
    with training_here(), in_words_of_python({*FIELDS, "out", "fresh"}), _process_restored():
        folder, mirror = folder_and_mirror(out or "", given.get("mirror"))
        if mirror is not None:
            given["mirror"] = mirror
        trackers = tracker_list(track)
        if track is not None:
            names = (item for item in trackers if isinstance(item, str))
            given["track"] = ",".join(names) or "none"
        functions = [item for item in trackers if not isinstance(item, str)]
        given = with_preset(given)
        chosen = canonical(Settings(**given))
        shown = given_settings(chosen, given)
        folder = folder_for_run(default_folder(chosen, shown) if out is None else folder)
        start(
            chosen,
            shown,
            folder,
            say=terminal_say,
            fresh=fresh,
            trust=trust,
            progress=ProgressOptions(bar, track=functions),
        )
    result = published(RunFolder(folder))
    assert result is not None
    return TrainingResult(folder, result.weights, result.step, result.metrics)


@declares(_train)
def train(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    fresh: bool = False,
    bar: bool = True,
    track: Track | None = None,
    trust: bool = False,
    task: str | None = None,
    target: str | None = None,
    label_separator: str | None = None,
    group: str | None = None,
    split: str | None = None,
    fold: str | None = None,
    subset: float | None = None,
    test: str | None = None,
    ignore_index: int | None = None,
    channels: int | None = None,
    bits: int | None = None,
    image_size: int | None = None,
    eval_size: int | None = None,
    start_size: int | None = None,
    crop: str = "bilinear",
    download: bool = False,
    cache: str | None = None,
    cache_size: str | None = None,
    skip_bad_images: int = 0,
    flip: bool | None = None,
    alternate_flip: bool = False,
    crop_scale: float | None = None,
    padding: int | None = None,
    augment: str = "none",
    color_jitter: float = 0.0,
    random_erasing: float = 0.0,
    shuffle_window: int | None = None,
    balance: str = "none",
    workers: int | None = None,
    retry_workers: int = 0,
    model: str | None = None,
    pretrained: bool = False,
    weights: str | None = None,
    drop_path: float = 0.0,
    recompute: str = "none",
    compile: str = "none",
    ema: float = 0.0,
    freeze: str = "none",
    head_lr: float | None = None,
    layer_decay: float = 1.0,
    teacher: str | None = None,
    teacher_weight: float | None = None,
    temperature: float | None = None,
    qat: bool = False,
    epochs: int | None = None,
    duration: str | None = None,
    batch_size: int | str | None = None,
    early_stop: int = 0,
    best: str | None = None,
    extend: str | None = None,
    accumulate: int = 1,
    optimizer: str | None = None,
    momentum: float | None = None,
    betas: str | None = None,
    fixed_norm: bool = False,
    muon_others: str = "adamw",
    muon_others_lr: float | None = None,
    lr: float | None = None,
    weight_decay: float = 0.0005,
    schedule: str = "cosine",
    milestones: str | None = None,
    gamma: float | None = None,
    warmup: str | None = None,
    patience: int | None = None,
    plateau_factor: float | None = None,
    loss: str | None = None,
    label_smoothing: float | None = None,
    class_weights: str | None = None,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    clip_norm: float = 0.0,
    on_nan: str = "stop",
    precision: str = "auto",
    device: str = "auto",
    portable_bits: int | None = None,
    seed: int = 0,
    verify_steps: str = "0",
    sync_bn: bool = False,
    shard: str = "none",
    parts: int | None = None,
    compression: str = "none",
    stall_timeout: float = 60.0,
    preset: str | None = None,
    checkpoint_every: str = "1ep",
    keep: int = 2,
    log_every: int = 50,
    stop_within: str | None = None,
    mirror: str | None = None,
) -> TrainingResult:
    """Train an image classifier as `flambeau train` does; the same call again continues its run.

    The settings are the command's: `batch_size=64` is `--batch-size 64`, `flip=False` is `--no-flip`.
    Messages go to standard error. What it sets for the process (seeds, deterministic algorithms, threads)
    is restored at the end.

    Args:
        data: as for the command; None trains on the embedded Fashion-MNIST.
        out: the run folder, or an address such as s3://bucket/runs/a; None: as for the command, runs/NAME
            with a hash if settings are given.
        fresh: start again; an existing run is renamed, not deleted.
        bar: show a progress bar on a terminal, and in a notebook a bar and a chart.
        track: trackers that get the lines of metrics.jsonl: names, as for `--track`, or functions of a step
            and its figures, such as `lambda step, figures: print(step, figures)`. None: those of the run.
        trust: run files of code that the folder of the run, or of its teacher, names and this call does not,
            even if nothing shows that you have made that folder here.
        task: what is learned of each image: its class, several labels, numbers, or the class of each pixel
            (None: found from the data; one of classification, multilabel, regression, segmentation).
        target: columns of the table that hold what is learned, separated by commas, such as age,weight (None:
            a column called label, or like it).
        label_separator: what separates the labels in a cell of a table, such as a comma (None: found from the
            cells).
        group: column of the table that says which images stay on one side of the hold-out, such as those of a
            patient.
        split: column of the table that says train, val or test (None: a column called split, or like it).
        fold: which fold of a cross-validation is held out, such as 2/5; the others are trained on (flambeau
            sweep trains all).
        subset: share of the training images that is trained on, of each class; smaller shares lie in larger
            ones (None: all; above 0 and at most 1).
        test: images that are neither trained nor validated on, kept for one test at the end: a share of each
            class such as 10%, or other data.
        ignore_index: the number in masks of pixels that count in no loss and no figure (None: 255, unless it
            has a name; from 0 to 255).
        channels: channels of the images: 1 makes grey and 3 color of any image, another number keeps all that
            the images have, or makes them of the pages of a TIFF (None: 1 or 3 by the images and the model;
            all of them, where they are no color; from 1 to 1024).
        bits: bits per level of the images, 8 or 16: 16 refuses images of 8, and 8 scales those of 16 (None:
            16 if all images looked at have them, else 8).
        image_size: side of the square training images, in pixels (None: from the images, at most 224; from 8
            to 16384).
        eval_size: side of the images in evaluation and prediction, if it differs from image_size (from 8 to
            16384).
        start_size: side of the training images in the first 30 % of the steps, pixels; it grows to
            image_size, which the last 30 % have (progressive resizing) (from 8 to 16384).
        crop: interpolation used when crops are resized, in training and evaluation (one of bilinear,
            bicubic).
        download: download whatever is missing of torchvision:NAME or hf:NAME.
        cache: folder of the local disk for what is fetched from a store (None: `$FLAMBEAU_CACHE`, else
            `~/.cache/flambeau/store`).
        cache_size: most that is kept of it, such as 200GB; what was not used for longest is removed first
            (None: 50GB).
        skip_bad_images: number of unreadable images to replace by others before the run stops with an error
            (at least 0).
        flip: mirror half of the training images at random; turn it off for digits and text (None: yes;
            numbers no).
        alternate_flip: mirror every training image in every other epoch, so that any two epochs show both
            sides of it, in place of half of them at random.
        crop_scale: smallest share of the image area that a random training crop keeps (None: 0.25; masks 0.9;
            labels, numbers 1, whole images; above 0 and at most 1).
        padding: largest random shift of a training image in pixels, for data sets whose images all have one
            small size (None: an eighth of their side; 0 for numbers and for the embedded data; from 0 to 63).
        augment: random operations on training images, applied after crop and flip (one of none, randaugment,
            trivialaugment).
        color_jitter: change brightness, contrast and saturation at random by up to this factor, such as 0.4;
            0 is off (from 0 to 1).
        random_erasing: probability that a rectangle of a training image is erased; 0 is off (from 0 to 1).
        shuffle_window: mix images of neighbouring blocks only, over so many of them, instead of all; 0 is all
            (None: 16384 for more than 32768 images in a store, else all; at least 0).
        balance: draw rare classes more often: full gives every class the same share of an epoch, sqrt goes
            half of the way; images are repeated (one of none, sqrt, full).
        workers: processes that load data, per training process; 0 loads in the training process itself (None:
            0 for small images or on a CPU, else the cores, at most 8; from 0 to 1024).
        retry_workers: how often to restart data workers that crash or hang before the run stops with an error
            (from 0 to 1000).
        model: a timm name, torchvision:NAME, small_convnet, tiny_convnet, speedrun_convnet, or
            FILE.py:FUNCTION (None: small_convnet up to 64 pixels (tiny_convnet for the embedded data), else
            resnet18).
        pretrained: start from the published pretrained weights of the model.
        weights: start from the weights in this file or run; tensors whose names and shapes match are loaded.
        drop_path: probability of stochastic depth, for models that have it; 0 is off (at least 0 and below
            1).
        recompute: modules whose activations are recomputed in the backward pass, such as layer*.* or
            blocks.*: less memory, more time.
        compile: compile the model with torch.compile, in this mode (one of none, default, reduce-overhead,
            max-autotune).
        ema: decay of an exponential moving average of the weights, such as 0.999, which is evaluated and
            published instead of the weights; 0 is off (at least 0 and below 1).
        freeze: parts to freeze, including their BatchNorm statistics: backbone, or names such as
            stem,layer1,*.bn*.
        head_lr: peak learning rate of the last layer, if it differs from lr (above 0).
        layer_decay: factor by which the learning rate falls from each layer to the one before it, such as
            0.75 (above 0 and at most 1).
        teacher: run folder of a teacher model for knowledge distillation: its probabilities are learned
            together with the labels; of several, such as runs/a,runs/b, their mean.
        teacher_weight: weight of the teacher's probabilities in the loss, up to 1; the labels have the rest
            (None: 0.5; above 0 and at most 1).
        temperature: softmax temperature of teacher and student in distillation (None: 4; above 0).
        qat: quantization-aware training: simulate 8-bit rounding from the weights of weights or pretrained
            on, for flambeau export format onnx.
        epochs: length of the training in epochs; short for duration Nep (at least 1).
        duration: length of the training, such as 90ep (epochs) or 5000st (steps) (None: 4ep for the embedded
            data, 30ep, or 10ep with --pretrained or --weights).
        batch_size: images per forward pass, over all processes; auto finds the largest that fits into memory
            and accumulates gradients up to the usual batch, auto:512 up to a batch of 512 (None: 128 for
            small images, 64 for others and the embedded data, less for few; at least 1).
        early_stop: stop after this many epochs without a better value of best; 0 is off (at least 0).
        best: figure of an evaluation that chooses the best weights; of uneven classes val_macro_f1, or
            val_macro_recall, the balanced accuracy (None: classes val_accuracy, several labels val_map,
            numbers val_loss, masks val_miou; one of val_accuracy, val_loss, val_macro_f1, val_macro_recall,
            val_map, val_micro_f1, val_hamming_loss, val_mae, val_rmse, val_r2, val_spearman, val_miou,
            val_dice, val_pixel_accuracy, val_boundary_f1).
        extend: continue a finished run beyond its duration by this much, such as 10ep; 0ep withdraws an
            extension that has not started.
        accumulate: forward passes whose gradients are accumulated into one optimizer step (at least 1).
        optimizer: sgd uses Nesterov momentum; muon updates the inner weight matrices and adamw everything
            else (None: classes and several labels sgd, numbers and masks adamw; one of sgd, adam, adamw,
            nadam, radam, adamax, adagrad, rmsprop, muon).
        momentum: momentum of sgd, rmsprop and muon (None: sgd and rmsprop 0.9, muon 0.95; at least 0 and
            below 1).
        betas: the two betas of adam, adamw, nadam, radam and adamax, such as 0.9,0.98 (None: 0.9,0.999).
        fixed_norm: muon keeps the norm of each of its matrices fixed, in place of weight decay, and lr, such
            as 0.24, is the share of it by which a matrix moves; for models that normalize after each of them.
        muon_others: the optimizer of what muon does not take: biases, norms, the first and the last layer;
            sgd has Nesterov momentum of 0.9 (one of adamw, sgd).
        muon_others_lr: peak learning rate of what muon does not take (None: lr; above 0).
        lr: peak learning rate (None: grows with the batch; at 256: sgd 0.1 (small_convnet 0.4; resnet18 0.4
            and tiny_convnet 1.6, but at most 0.8), adamw 0.001; pretrained or weights a tenth, qat a
            hundredth; above 0).
        weight_decay: weight decay; never applied to biases and normalization layers (at least 0).
        schedule: learning-rate schedule (one of cosine, linear, multistep, exponential, constant, polynomial,
            wsd, one-cycle, cosine-restarts, plateau).
        milestones: for multistep: when the learning rate falls, such as 30ep,60ep or 50%,75% (None: 50%,75%).
        gamma: for multistep and exponential: factor of the learning rate at each milestone, or per epoch
            (None: multistep 0.1, exponential 0.9; above 0 and at most 1).
        warmup: length of the linear warm-up of the learning rate, such as 5%, 2ep or 500st (None: 10%, 25%
            for the embedded data).
        patience: for plateau: epochs without a better value of best before the learning rate falls (None: 3;
            at least 0).
        plateau_factor: for plateau: factor by which the learning rate falls (None: 0.1; above 0 and below 1).
        loss: the loss: cross-entropy for classes; bce or asymmetric for several labels; mse, l1 or huber for
            numbers; cross-entropy, dice or their sum for masks (None: the first of these for the task; one of
            cross-entropy, bce, asymmetric, mse, l1, huber, dice, cross-entropy+dice).
        label_smoothing: label smoothing (None: 0.1 for classes, else 0; at least 0 and below 1).
        class_weights: weight of each class in the loss: auto uses the inverse of its share of the images, or
            for several labels the images without it by those with it; or a JSON file with one number per
            class.
        mixup: alpha of mixup; 0 is off (0 or from 1e-06 to 1e+06).
        cutmix: alpha of CutMix; 0 is off; together with mixup each batch gets one of the two (0 or from 1e-06
            to 1e+06).
        clip_norm: clip the norm of all gradients together to this value; 0 is off (at least 0).
        on_nan: what to do when a loss or gradient is NaN or infinite: stop, or roll back to the last
            checkpoint and halve the learning rate (one of stop, rollback).
        precision: numeric precision of the forward pass; auto uses bf16 where the hardware supports it
            natively (one of auto, fp32, tf32, bf16, fp16).
        device: device to train on, such as cpu, cuda or cuda:1.
        portable_bits: compute with so many threads, and only by operations that give the same bits on every
            x86-64 processor with AVX2 (from 1 to 256).
        seed: seed of sample order, augmentation, initial weights and dropout (at least 0 and below 2**64).
        verify_steps: compute a share of the steps twice, such as 1/100, of several processes once by another
            one, and compare the bits before the optimizer acts, to find a machine that computes wrong; 0 is
            off.
        sync_bn: compute BatchNorm statistics over the batch of all processes (or parts) instead of each one's
            share.
        shard: how weights and optimizer state are distributed: none keeps all on every process, fsdp keeps
            one shard on each (one of none, fsdp).
        parts: compute each step as this many fixed parts, so that the resulting bits do not depend on the
            number of processes (at least 1).
        compression: compression of the gradients that processes exchange (one of none, fp16, bf16, powersgd).
        stall_timeout: seconds without progress after which a hanging process or data worker is reported and
            the job ends; 0 is off (at least 0).
        preset: settings that belong together, by name; flags given beside it take precedence (one of
            speedrun, speedrun95).
        checkpoint_every: interval between checkpoints, such as 1ep or 500st.
        keep: number of latest checkpoints to keep, in addition to the best one (at least 1).
        log_every: optimizer steps per line of metrics.jsonl (at least 1).
        stop_within: seconds between SIGTERM and the kill, such as 30s: the run then writes a checkpoint only
            if that usually takes less time.
        mirror: address such as s3://bucket/runs/a that keeps a copy of the run, from which another machine
            goes on.

    Returns:
        What the run has published, even if it was finished before.

    Raises:
        InputError: whatever the user can fix, such as a folder that holds a run of other settings.
        TypeError: a setting that does not exist.
        Preempted: SIGTERM, SIGUSR1 or SIGINT came, and the run is saved: the same call continues it. At a
            prompt it is KeyboardInterrupt.

    Example:
        >>> result = train("photos/", model="resnet18", epochs=5)  # doctest: +SKIP
        >>> load(result.folder)("cat.jpg")  # doctest: +SKIP
        Predictions('cat' 98.3%)
    """
    raise AssertionError("_train is called instead")


@contextlib.contextmanager
def _process_restored() -> Iterator[None]:
    """Restore the process-wide settings that a training changes; a notebook continues with its own."""
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    for_compiler = os.environ.get(COMPILER_VARIABLE)
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn = torch.backends.cudnn
    threads = torch.get_num_threads()
    switches = cudnn.benchmark, cudnn.deterministic
    try:
        with generators_restored(), float32_precision_kept(), float32_by_default():
            yield
    finally:
        use_deterministic(deterministic[0], warn_only=deterministic[1])
        if for_compiler is None:
            os.environ.pop(COMPILER_VARIABLE, None)
        else:
            os.environ[COMPILER_VARIABLE] = for_compiler
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        cudnn.benchmark, cudnn.deterministic = switches
        torch.set_num_threads(threads)


@overload
def load(
    run: str | Path,
    *,
    image_size: int | None = None,
    trust: bool = False,
    say: Callable[[str], None] | None = None,
) -> Predictor: ...


@overload
def load(
    run: Runs,
    *,
    image_size: int | None = None,
    trust: bool = False,
    say: Callable[[str], None] | None = None,
) -> EnsemblePredictor: ...


@float32_by_default()
def load(
    run: str | Path | Runs,
    *,
    image_size: int | None = None,
    trust: bool = False,
    say: Callable[[str], None] | None = None,
) -> Predictor | EnsemblePredictor:
    """The model of a run, or several as one, to be called on images.

    Args:
        run: folder of a run of `flambeau train`, or of a `Run` with a `builder`; or its address in a store.
            Or a list of at least two that learned the same: the mean of their probabilities or numbers.
        image_size: side of the images for the model, pixels; None for that of the training.
        trust: run the model's file of code that the folder names, even if nothing shows that you have made it
            here; your own runs do not need it.
        say: takes a line that names such a file, and warnings: an unfinished run, a changed file. None:
            standard error, and Python warnings.

    Returns:
        A `Predictor`, or of a list an `EnsemblePredictor`, to call on images.

    Raises:
        InputError: no such run, no weights yet, damaged ones, or a size that the model cannot take.

    Example:
        >>> predictor = load("runs/photos")  # doctest: +SKIP
        >>> predictor("cat.jpg")  # doctest: +SKIP
        Predictions('cat' 98.3%)
    """
    model = _loaded(run, image_size, trust, say)
    return predictor_of(model)


@float32_by_default()
def evaluate(
    run: str | Path | Predictor | EnsemblePredictor | Runs,
    data: str | Path | None = None,
    *,
    test: bool = False,
    again: bool = False,
    image_size: int | None = None,
    flip_tta: bool = False,
    workers: int = 0,
    skip_bad_images: int = 0,
    all_images: bool = False,
    download: bool = False,
    trust: bool = False,
    progress: bool = False,
    say: Callable[[str], None] | None = None,
) -> AnyEvaluation:
    """Measure a model on labelled images, each counted once.

    Args:
        run: folder of a run, or what `load` returned; or a list of folders, as one model, with the figures of
            each, too.
        data: as for `flambeau train`; of it the validation part, else the images that the model was not
            trained on. With `test` where these are now (None: where the run says).
        test: count the images that the run keeps for a test (`test` of `train`), and record it in its folder,
            or its sweep's. Refused a second time.
        again: a second look all the same, recorded as one.
        image_size: as for `load`.
        flip_tta: average each image's probabilities with its mirror image's.
        workers: processes that read; 0 reads in this one.
        skip_bad_images: how many unreadable images to leave out.
        all_images: also those trained on, which the result counts.
        download: download what is missing of a data set by name.
        trust: as for `load`.
        progress: show a bar on a terminal or in a notebook.
        say: as for `load`.

    Returns:
        The figures and the predictions; printing it shows them.

    Raises:
        InputError: an unusable run or data, unknown classes, bad images, or none but those trained on.

    Example:
        >>> evaluation = evaluate("runs/photos", "photos")  # doctest: +SKIP
        >>> evaluation.accuracy, evaluation.classes[0].recall  # doctest: +SKIP
        (0.93, 0.9)
    """
    for name, number in (("workers", workers), ("skip_bad_images", skip_bad_images)):
        if number < 0:
            raise InputError(f"{name} must be at least 0, got {number}")
    if test:
        if not isinstance(run, str | Path) or all_images or download or image_size is not None:
            raise InputError(
                "test=True is of the folder of one run, as it was trained: leave all_images, image_size and "
                "download out"
            )
        folder = run_to_test(run)
        return evaluate_test(
            _loaded(run, None, trust, say),
            [folder],
            data=None if data is None else str(data),
            again=again,
            flip_tta=flip_tta,
            workers=workers,
            skip_bad_images=skip_bad_images,
            trust=trust,
            progress=progress,
            say=say or terminal_say,
        )
    if again or data is None:
        raise InputError(
            "again=True has no effect without test=True: leave it out"
            if again
            else "name the data to evaluate on; test=True counts the images that the run keeps for a test"
        )
    return evaluate_model(
        _loaded(run, image_size, trust, say),
        data,
        flip_tta=flip_tta,
        workers=workers,
        skip_bad_images=skip_bad_images,
        all_images=all_images,
        download=download,
        progress=progress,
        say=say or terminal_say,
    )


@float32_by_default()
def evaluate_test(
    trained: Model,
    runs: Sequence[Path],
    *,
    data: str | None = None,
    again: bool = False,
    flip_tta: bool = False,
    workers: int = 0,
    skip_bad_images: int = 0,
    trust: bool = False,
    progress: bool = False,
    say: Callable[[str], object] = terminal_say,
) -> AnyEvaluation:
    """Look at the images that runs keep for a test, and record it.

    Args:
        trained: the model of the runs.
        runs: folders, several of one trial of a sweep.
        data: where the images are now; None: where the run says.
        again: it is not the first look.

    Raises:
        InputError: the run keeps none, they have changed, or this would be a second look.
    """
    first = members_of(trained)[0]
    file = looks_file(runs[0])
    if first.settings.test is None or first.facts.test_fingerprint is None:
        raise InputError(
            f"{runs[0]} keeps no images for a test: train or sweep with --test 10%, or --test DATA"
        )
    settings: Settings = first.settings
    if data is not None:
        is_share = target_choice(settings).test is not None
        settings = (
            dataclasses.replace(settings, data=data)
            if is_share
            else dataclasses.replace(settings, test=data)
        )
    elif "data" in named_code(stored := vars(settings)):
        folder = RunFolder(runs[0])
        folder.permission(folder.read_existing(), trust=trust, say=say).ask_for(stored, "data")
    with only_look(file):
        check_look(file, again=again)
        evaluation = measure(
            trained,
            check_test(first.facts, settings),
            flip_tta=flip_tta,
            workers=workers,
            skip_bad_images=skip_bad_images,
            progress=progress,
        )
        record_look(file, runs, evaluation)
    if file.parent == runs[0].resolve():
        mirror_again(runs[0], say=say)
    for line in look_lines(file):
        say(line)
    return evaluation


def evaluate_model(
    trained: Model,
    data: str | Path,
    *,
    flip_tta: bool = False,
    workers: int = 0,
    skip_bad_images: int = 0,
    all_images: bool = False,
    download: bool = False,
    progress: bool = False,
    say: Callable[[str], object] = terminal_say,
    keep: Callable[[Tensor, Tensor], object] = lambda logits, targets: None,
) -> AnyEvaluation:
    """As `evaluate`, of a loaded model.

    Args:
        keep: as for `measure`.
    """
    source = open_source(
        Path(data), trained.facts.classes, download=download, choice=trained.choice
    )
    for line in (
        *left_out_lines(source),
        *page_remarks(source, channels=max(one.facts.channels for one in members_of(trained))),
        *(line for one in members_of(trained) for line in pixel_remarks(one, source)),
    ):
        say(line)
    if not trained.knows_its_data:
        say(
            f"which images this model was trained on is not known: all {len(source)} of "
            f"{data_text(data)} count"
        )
    was_trained_on = torch.zeros(len(source), dtype=torch.bool)
    is_tested = torch.zeros(len(source), dtype=torch.bool)
    for one in members_of(trained):
        was_trained_on |= trained_images(one, Path(data), source)
        is_tested |= images_to_test(one, Path(data), source)
    if num_tested := int(is_tested.sum()):
        say(f"{num_tested} images are kept for a test, and left out: --test counts them, once")
    num_trained_on = int(was_trained_on.sum())
    is_left_out = is_tested if all_images else is_tested | was_trained_on
    if is_left_out.any():
        if num_tested == len(source):
            raise InputError(
                f"all images of {data_text(data)} are kept for a test: `flambeau evaluate RUN --test` counts "
                "them, once"
            )
        if is_left_out.all():
            raise InputError(
                f"the model was trained on all {num_trained_on} images of {data_text(data)}: they do not "
                "show what it is worth\nName others, or give --all (all_images=True) to measure it on "
                "these all the same"
            )
        source = SubsetSource(source, (~is_left_out).nonzero()[:, 0])
    return measure(
        trained,
        source,
        flip_tta=flip_tta,
        workers=workers,
        skip_bad_images=skip_bad_images,
        progress=progress,
        keep=keep,
        num_trained_on=num_trained_on,
        counts_trained_on=all_images,
    )


def measure(
    trained: Model,
    source: Source,
    *,
    flip_tta: bool = False,
    workers: int = 0,
    skip_bad_images: int = 0,
    progress: bool = False,
    keep: Callable[[Tensor, Tensor], object] = lambda logits, targets: None,
    **facts: Any,
) -> AnyEvaluation:
    """Like `evaluate`, with a loaded model and a source of its classes.

    Args:
        keep: takes outputs (of several models the joint ones) and targets of each batch.
        facts: further fields of the evaluation.
    """
    loader, bad = read_model(trained, source, workers=workers, skip_bad_images=skip_bad_images)
    counters = trained.facts.task.counters(trained.device, source)
    is_joint = isinstance(trained, Ensemble)
    each = [one.facts.task.counters(one.device, source) for one in members_of(trained) if is_joint]
    for indices, (images, targets) in readable_batches(loader, progress=progress):
        if isinstance(trained, Ensemble):
            outputs = trained.each_logits(images, flip_tta=flip_tta)
            for counter, output, view in zip(each, outputs, trained.view_of, strict=True):
                counter.update(output, targets[view], indices)
            joint = trained.joined(outputs)
            counters.update(joint, targets[trained.reference_view], indices)
            keep(joint, targets[trained.reference_view])
        else:
            logits = trained.logits(images, flip_tta=flip_tta)
            counters.update(logits, targets, indices)
            keep(logits, targets)
    if not counters.indices:
        raise InputError(f"no image could be read; the first one is {source.describe(0)}")
    read = {"num_bad": len(bad.names), "flip_tta": flip_tta, **facts}
    if isinstance(trained, Ensemble):
        read["members"] = tuple(
            MemberFigures.of(name, _alone(counter, one, source, read))
            for name, counter, one in zip(trained.names, each, trained.members, strict=True)
        )
    return counters.evaluation(describe=source.describe, image_size=trained.image_size, **read)


def _alone(
    counter: Counters, member: Trained, source: Source, read: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures of a member of an ensemble."""
    evaluation = counter.evaluation(describe=source.describe, image_size=member.image_size, **read)
    return evaluation.as_dict()


def _loaded(
    run: str | Path | Predictor | EnsemblePredictor | Runs,
    image_size: int | None,
    trust: bool,
    say: Callable[[str], None] | None,
    /,
) -> Model:
    if isinstance(run, Predictor | EnsemblePredictor):
        return model_at_size(run.trained, image_size)
    runs = [run] if isinstance(run, str | Path) else [*run]
    if not isinstance(run, str | Path) and len(runs) < 2:
        raise InputError(
            f"an ensemble is of at least two runs, got {len(runs)}: give the folder itself"
        )
    said: list[str] = []
    trained = ensemble_of(
        [
            (
                str(one),
                load_trained(
                    run_here(one, terminal_say),
                    trust=trust,
                    say=said.append if say is None else say,
                ),
            )
            for one in runs
        ]
    )
    for text in said:
        if text.startswith(RUNNING):
            terminal_say(text)
        else:
            warnings.warn(text, stacklevel=4)  # at the caller of load or evaluate
    return model_at_size(trained, image_size)
