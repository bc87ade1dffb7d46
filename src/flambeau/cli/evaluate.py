"""`flambeau evaluate`: the figures of a trained run on labelled data."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flambeau.cli.reading_flags import (
    add_cache_flags,
    add_flip_tta,
    add_others,
    add_reading_flags,
    add_trust,
    cache_of_flags,
    check_at_least,
    check_no_run,
    say_calibrated,
)
from flambeau.cli.table import print_json
from flambeau.errors import InputError
from flambeau.optional_packages import large_import
from flambeau.terminal import print_text, say

if TYPE_CHECKING:
    from flambeau.trainer.prediction.calibrated_evaluation import Calibrating
    from flambeau.trainer.prediction.ensemble import Model
    from flambeau.trainer.tasks.task import AnyEvaluation

HELP = "measure the model of a run or an export on labelled images"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN DATA, how to read, and what to print and write."""
    parser.add_argument(
        "folder", metavar="RUN", help="folder of a run or an export; with --test also of a sweep"
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="?",
        help="what `flambeau train` takes; its validation part counts, if any, and else what the model was "
        "not trained on; with --test only where its images are now, if they have moved",
    )
    add_others(parser)
    add_reading_flags(parser)
    add_cache_flags(parser)
    add_flip_tta(parser)
    add_trust(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="count the images that the model was trained on, too; without it they are left out",
    )
    _add_purposes(parser)
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.csv", help="write the prediction of each image"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the confusion matrix; of several labels precision and recall, of numbers the predicted "
        "against the given ones (.png, .pdf or .svg; needs matplotlib)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the files of --out and --plot if they exist"
    )


def _add_purposes(parser: argparse.ArgumentParser) -> None:
    """What an evaluation leaves in the run: a look at its test, or a calibration."""
    parser.add_argument(
        "--test",
        action="store_true",
        help="count the images that the run, or the best run of the sweep, keeps for a test, and record it; "
        "refused a second time",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="with --test: look a second time all the same; it is recorded, and said in the report",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="of a run of classes, or of several by --with: fit the temperature of the probabilities on "
        "these images, and keep it in the run, for predict, evaluate and export",
    )
    parser.add_argument(
        "--coverage",
        type=float,
        metavar="SHARE",
        help="with --calibrate: let predict name a set of classes that has the right one for this share of "
        "new images, such as 0.9",
    )
    parser.add_argument(
        "--adaptive",
        action="store_true",
        help="with --coverage: sets that are larger for hard images and smaller for easy ones",
    )


def run(arguments: argparse.Namespace) -> int:
    with cache_of_flags(arguments, arguments.data):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, workers=0, skip_bad_images=0)
    check_no_run(arguments.data)
    _check_calibrate(arguments)
    _check_test(arguments)
    with large_import():
        from flambeau.exports.load_export import load_models
        from flambeau.trainer.evaluation.plot_file import check_plot
        from flambeau.trainer.evaluation.predictions_file import SUFFIXES, refuse_existing
        from flambeau.trainer.prediction.calibrated_evaluation import Calibrating
        from flambeau.trainer.prediction.ensemble import model_at_size

    # Check before an hour of work.
    if arguments.out is not None:
        refuse_existing(arguments.out, suffixes=SUFFIXES, force=arguments.force, remedy="--force")
    if arguments.plot is not None:
        check_plot(arguments.plot, force=arguments.force, remedy="--force")
    folders = [arguments.folder, *arguments.others]
    if arguments.test:
        folders = _tested_runs(arguments.folder)
    model = model_at_size(
        load_models(folders, trust=arguments.trust, say=say), arguments.image_size
    )
    calibrating = (
        Calibrating.of(model, arguments.folder, arguments.coverage, adaptive=arguments.adaptive)
        if arguments.calibrate
        else None
    )
    if calibrating is None:
        say_calibrated(model)
    evaluation = _evaluated(arguments, model, folders, calibrating)
    calibration = None if calibrating is None else calibrating.write(say=say)
    try:
        figures = evaluation.as_dict()
        if calibration is not None:
            figures["calibration"] = asdict(calibration)
        if arguments.json:
            print_json([figures])
        else:
            print_text(repr(evaluation))
        for line in [] if calibration is None else calibration.lines():
            say(line)
    finally:  # also when the reader of a pipe has gone
        _write(evaluation, arguments)
    return 0


def _evaluated(
    arguments: argparse.Namespace,
    model: "Model",
    folders: list[str],
    calibrating: "Calibrating | None",
) -> "AnyEvaluation":
    from flambeau.trainer.api import evaluate_model, evaluate_test
    from flambeau.trainer.prediction.calibrated_evaluation import keep_nothing

    reading = {
        "flip_tta": arguments.flip_tta,
        "workers": arguments.workers,
        "skip_bad_images": arguments.skip_bad_images,
    }
    if arguments.test:
        return evaluate_test(
            model,
            list(map(Path, folders)),
            data=arguments.data,
            again=arguments.again,
            trust=arguments.trust,
            progress=True,
            say=say,
            **reading,
        )
    return evaluate_model(
        model if calibrating is None else calibrating.trained,
        arguments.data,
        all_images=arguments.all,
        download=arguments.download,
        progress=True,
        say=say,
        keep=keep_nothing if calibrating is None else calibrating.keep,
        **reading,
    )


def _check_calibrate(arguments: argparse.Namespace) -> None:
    """Refuse flags that do not go with --calibrate, or are without effect."""
    coverage = arguments.coverage
    if coverage is not None and not arguments.calibrate:
        raise InputError("--coverage has no effect without --calibrate: give both, or leave it out")
    if arguments.adaptive and coverage is None:
        raise InputError("--adaptive has no effect without --coverage: give both, or leave it out")
    if coverage is not None and not 0 < coverage < 1:
        raise InputError(f"--coverage must be above 0 and below 1, such as 0.9, got {coverage:g}")
    if not arguments.calibrate:
        return
    given = {
        "--all": arguments.all,
        "--flip-tta": arguments.flip_tta,
        "--image-size": arguments.image_size,
    }
    for flag in (name for name, value in given.items() if value):
        raise InputError(
            f"--calibrate and {flag} do not go together: the temperature is kept for a run as it answers "
            "without further flags, on images that it was not trained on"
        )


def _check_test(arguments: argparse.Namespace) -> None:
    """Refuse flags that do not go with --test, or are without effect."""
    if not arguments.test:
        if arguments.again:
            raise InputError("--again has no effect without --test: give both, or leave it out")
        if arguments.data is None:
            raise InputError(
                "name the data to evaluate on: flambeau evaluate RUN DATA; --test counts the images that the "
                "run keeps for a test"
            )
        return
    given = {
        "--with": arguments.others,
        "--all": arguments.all,
        "--image-size": arguments.image_size,
        "--download": arguments.download,
        "--calibrate": arguments.calibrate,
    }
    for flag in (name for name, value in given.items() if value):
        raise InputError(
            f"--test and {flag} do not go together: the test is of one run, as it was trained, on the images "
            "that it keeps for it"
        )


def _tested_runs(folder: str) -> list[str]:
    """The run, or those of the best trial of a sweep."""
    from flambeau.experiments.sweep_reader import STORED, best_runs
    from flambeau.trainer.prediction.final_test import run_to_test

    if (Path(folder) / STORED).is_file():
        return list(map(str, best_runs(Path(folder))))
    return [str(run_to_test(folder))]


def _write(evaluation: "AnyEvaluation", arguments: argparse.Namespace) -> None:
    if arguments.out is not None:
        evaluation.save_predictions(arguments.out, force=arguments.force)
        say(f"predictions of {len(evaluation.predictions)} images: {arguments.out}")
    if arguments.plot is not None:
        evaluation.plot(arguments.plot, force=arguments.force)
        say(f"{evaluation.picture}: {arguments.plot}")
