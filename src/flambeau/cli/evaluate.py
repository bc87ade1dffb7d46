"""`flambeau evaluate`: the figures of a trained run on labelled data."""

import argparse
import json
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
)
from flambeau.optional_packages import large_import
from flambeau.terminal import print_text, say

if TYPE_CHECKING:
    from flambeau.trainer.tasks.task import AnyEvaluation

HELP = "measure the model of a run or an export on labelled images"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN DATA, how to read, and what to print and write."""
    parser.add_argument("folder", metavar="RUN", help="folder of a run or an export")
    parser.add_argument(
        "data",
        metavar="DATA",
        help="what `flambeau train` takes; its validation part counts, if any, and else what the model was "
        "not trained on",
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


def run(arguments: argparse.Namespace) -> int:
    """Print the figures."""
    with cache_of_flags(arguments, arguments.data):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, workers=0, skip_bad_images=0)
    with large_import():
        from flambeau.exports.exported_model import load_models
        from flambeau.trainer.api import evaluate
        from flambeau.trainer.evaluation.plot_file import check_plot
        from flambeau.trainer.evaluation.predictions_file import SUFFIXES, refuse_existing
        from flambeau.trainer.prediction.predictor import predictor_of

    # Check before an hour of work.
    if arguments.out is not None:
        refuse_existing(arguments.out, suffixes=SUFFIXES, force=arguments.force, remedy="--force")
    if arguments.plot is not None:
        check_plot(arguments.plot, force=arguments.force, remedy="--force")
    evaluation = evaluate(
        predictor_of(
            load_models([arguments.folder, *arguments.others], trust=arguments.trust, say=say)
        ),
        arguments.data,
        image_size=arguments.image_size,
        flip_tta=arguments.flip_tta,
        workers=arguments.workers,
        skip_bad_images=arguments.skip_bad_images,
        all_images=arguments.all,
        download=arguments.download,
        progress=True,
        say=say,
    )
    try:
        text = json.dumps(evaluation.as_dict()) if arguments.json else repr(evaluation)
        print_text(text)
    finally:  # also when the reader of a pipe has gone
        _write(evaluation, arguments)
    return 0


def _write(evaluation: "AnyEvaluation", arguments: argparse.Namespace) -> None:
    if arguments.out is not None:
        evaluation.save_predictions(arguments.out, force=arguments.force)
        say(f"predictions of {len(evaluation.predictions)} images: {arguments.out}")
    if arguments.plot is not None:
        evaluation.plot(arguments.plot, force=arguments.force)
        say(f"{evaluation.picture}: {arguments.plot}")
