"""`flambeau predict`: what a trained run says of images."""

import argparse
import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from flambeau.terminal import print_text, printable, say

if TYPE_CHECKING:
    from flambeau.trainer.evaluation.answers import Answer
    from flambeau.trainer.prediction.classify_files import Sample

HELP = "say what the model of a run or an export sees in images"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", metavar="RUN", help="folder of a run or an export")
    add(
        "what",
        metavar="WHAT",
        nargs="+",
        help="image files, folders of images at any depth, or packed images, torchvision:NAME, "
        "hf:NAME and FILE.py:FUNCTION as `flambeau evaluate` takes them; no labels are needed",
    )
    add(
        "--top",
        type=int,
        default=5,
        metavar="N",
        help="classes to name, of a classifier (default: 5)",
    )
    add_others(parser)
    add_reading_flags(parser)
    add_cache_flags(parser)
    add_flip_tta(parser)
    add_trust(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one JSON object per image")
    output.add_argument(
        "--out", type=Path, metavar="FILE.csv", help="write a row per image, and print none"
    )
    for flag, what in (
        ("--masks", "masks as PNG, numbered as in training"),
        ("--overlays", "masks over images"),
    ):
        add(flag, type=Path, metavar="FOLDER", help=f"of a run of masks, write {what}")
    add("--force", action="store_true", help="replace the files of --out, --masks and --overlays")


def run(arguments: argparse.Namespace) -> int:
    with cache_of_flags(arguments, *arguments.what):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, top=1, workers=0, skip_bad_images=0)
    check_no_run(*arguments.what)
    files = (arguments.out, arguments.masks, arguments.overlays)
    if arguments.force and not any(files):
        raise InputError("--force replaces the file of --out: give --out FILE.csv, or leave it out")
    with large_import():
        from flambeau.exports.load_export import load_models
        from flambeau.trainer.evaluation.predictions_file import SUFFIXES, refuse_existing
        from flambeau.trainer.prediction.classify_files import predict, sets_of
        from flambeau.trainer.prediction.ensemble import model_at_size
        from flambeau.trainer.prediction.mask_files import MaskFiles

    if arguments.out is not None:
        refuse_existing(arguments.out, suffixes=SUFFIXES, force=arguments.force, remedy="--force")
    folders = [arguments.folder, *arguments.others]
    trained = model_at_size(
        load_models(folders, trust=arguments.trust, say=say), arguments.image_size
    )
    say_calibrated(trained)
    writer = MaskFiles(arguments.masks, arguments.overlays, arguments.force)
    if (arguments.masks or arguments.overlays) and not trained.facts.task.per_pixel:
        raise InputError(
            f"{arguments.folder} is of a {trained.facts.task_name} task, and --masks and --overlays are for "
            "segmentation: leave them out"
        )
    writer.check()
    predictions = predict(
        trained,
        [Path(what) for what in arguments.what],
        top=arguments.top,
        workers=arguments.workers,
        skip_bad_images=arguments.skip_bad_images,
        download=arguments.download,
        flip_tta=arguments.flip_tta,
        progress=arguments.out is not None or not sys.stdout.isatty(),
        say=say,
    )
    with contextlib.closing(predictions):  # ends its workers in any case
        written = predictions if not trained.facts.task.per_pixel else writer.written(predictions)
        if arguments.out is not None:
            columns = trained.facts.task.answer_columns(top=arguments.top)
            sets = [] if sets_of(trained) is None else ["set"]
            _write(written, arguments, [*columns, *sets])
            return 0
        for sample, answer in written:
            if arguments.json:
                print_json([_facts(sample, answer)], readable=True)
            else:
                print_text(printable(f"{sample.image}: {answer.as_text()}"))  # one line per image
    return 0


def _write(
    predictions: "Iterable[tuple[Sample, Answer]]",
    arguments: argparse.Namespace,
    columns: Sequence[str],
) -> None:
    from flambeau.trainer.evaluation.predictions_file import predictions_file

    num_images = 0
    columns = ["path", "label", *columns]
    with predictions_file(arguments.out, columns, force=arguments.force) as add:
        for sample, answer in predictions:
            add([sample.image, sample.label or "", *answer.cells()])
            num_images += 1
    say(f"predictions of {num_images} images: {arguments.out}")


def _facts(sample: "Sample", answer: "Answer") -> dict[str, Any]:
    row: dict[str, Any] = {"image": sample.image}
    if sample.packed is not None:
        row |= {"source": sample.packed, "index": sample.index, "name": sample.name}
    if sample.label is not None:
        row["label"] = sample.label
    return row | answer.as_dict()
