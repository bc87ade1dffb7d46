"""`flambeau features`: outputs of a model's layers for the images of a data set, in one file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flambeau.cli.reading_flags import (
    add_cache_flags,
    add_reading_flags,
    add_trust,
    cache_of_flags,
    check_at_least,
)
from flambeau.cli.table import print_json
from flambeau.data.stores.address import is_address
from flambeau.errors import InputError
from flambeau.optional_packages import large_import
from flambeau.terminal import print_text, say
from flambeau.user_code import is_function

if TYPE_CHECKING:
    from flambeau.data.sources.source import Source
    from flambeau.trainer.prediction.trained_model import Trained

HELP = "write the features of images by a run or a pretrained model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="RUN|MODEL",
        help="the folder of a run; or a name as --model of train takes it, with --pretrained or --weights, "
        "or FILE.py:FUNCTION that returns a model with its weights",
    )
    add(
        "data",
        metavar="DATA",
        help="an image, a folder of images, or what else `flambeau predict` takes",
    )
    add(
        "out",
        type=Path,
        metavar="OUT",
        help="FILE.npy for one layer, FILE.safetensors with a tensor for each; the list of the images is "
        "FILE.csv",
    )
    add(
        "--layers",
        metavar="NAMES",
        help="names with commas between, such as layer3,avgpool; `flambeau inspect` lists them "
        "(default: what goes into the classifier head)",
    )
    add(
        "--pool",
        action="store_true",
        help="the mean over height and width of maps, and over the tokens of a transformer",
    )
    add("--pretrained", action="store_true", help="published weights, of a MODEL")
    add("--weights", metavar="FILE", help="weights of a file or run, of a MODEL")
    add(
        "--part",
        choices=("train", "val"),
        help="which part of data that have two (default: val; all of other data)",
    )
    add_reading_flags(parser)
    add_cache_flags(parser)
    add_trust(parser)
    add("--force", action="store_true", help="replace the files if they exist")
    add("--json", action="store_true", help="one JSON object, for programs")


def run(arguments: argparse.Namespace) -> int:
    with cache_of_flags(arguments, arguments.data):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, workers=0, skip_bad_images=0)
    layers = _layers(arguments.layers)
    with large_import():
        from flambeau.data.datasets.image_statistics import page_remarks
        from flambeau.trainer.evaluation.feature_file import SUFFIXES
        from flambeau.trainer.evaluation.predictions_file import refuse_existing
        from flambeau.trainer.prediction.features import write_features

    # Check before an hour of work.
    refuse_existing(arguments.out, suffixes=SUFFIXES, force=arguments.force, remedy="--force")
    _keep_inputs(arguments)
    if len(layers) > 1 and arguments.out.suffix.lower() == ".npy":
        raise InputError(
            f"{arguments.out} holds one layer, and {len(layers)} are named: let it end in .safetensors"
        )
    trained, source = _model_and_images(arguments)
    for line in page_remarks(source, channels=trained.facts.channels):
        say(line)
    written = write_features(
        trained,
        source,
        arguments.out,
        layers=layers,
        pool=arguments.pool,
        workers=arguments.workers,
        skip_bad_images=arguments.skip_bad_images,
        force=arguments.force,
        about={"model": arguments.model, "data": arguments.data},
    )
    if arguments.json:
        facts = {
            "file": str(arguments.out),
            "list": str(written.images),
            "images": written.num_images,
        }
        shapes = {name: [written.num_images, *shape] for name, shape in written.shapes.items()}
        print_json([{**facts, "shapes": shapes}], readable=True)
        return 0
    for name, shape in written.shapes.items():
        print_text(f"{name}: {' x '.join(map(str, (written.num_images, *shape)))} float32")
    say(f"features of {written.num_images} images: {arguments.out}, their list: {written.images}")
    return 0


def _model_and_images(arguments: argparse.Namespace) -> "tuple[Trained, Source]":
    from flambeau.trainer.prediction.features import named_model, open_images

    is_run = is_address(arguments.model) or Path(arguments.model).is_dir()
    run = _trained_run(arguments) if is_run else None
    size = 0 if is_run else _size_of_named_model(arguments)
    source = open_images(
        Path(arguments.data),
        None if run is None else run.facts.classes,
        part=arguments.part,
        download=arguments.download,
        say=say,
    )
    if run is not None:
        return run, source
    model = named_model(
        arguments.model,
        source,
        image_size=size,
        pretrained=arguments.pretrained,
        weights=arguments.weights,
        say=say,
    )
    return model, source


def _keep_inputs(arguments: argparse.Namespace) -> None:
    """Refuse to overwrite an input, even with --force."""
    for path in (arguments.out, arguments.out.with_suffix(".csv")):
        for given in (arguments.data, arguments.weights):
            if given and path.exists() and Path(given).exists() and path.samefile(given):
                raise InputError(
                    f"{path} would be written over, and {given} is read\nName another OUT"
                )


def _layers(given: str | None) -> list[str]:
    if given is None:
        return []
    layers = [name.strip() for name in given.split(",")]
    if "" in layers:
        raise InputError(f"--layers {given!r} has an empty name in it")
    for name in layers:
        if layers.count(name) > 1:
            raise InputError(f"--layers names {name} twice")
    return layers


def _trained_run(arguments: argparse.Namespace) -> "Trained":
    from flambeau.trainer.prediction.trained_model import at_size, load_trained

    for flag in ("pretrained", "weights"):
        if getattr(arguments, flag):
            raise InputError(f"--{flag} is for a MODEL: {arguments.model} is a run and has its own")
    return at_size(
        load_trained(arguments.model, trust=arguments.trust, say=say), arguments.image_size
    )


def _size_of_named_model(arguments: argparse.Namespace) -> int:
    """The side of the images of a model by its name; InputError if it has no weights."""
    from flambeau.inspection.model_catalog import DEFAULT_SIZE, catalog_entry
    from flambeau.run.options.option import check_value
    from flambeau.trainer.prediction.features import require_weights
    from flambeau.trainer.settings.settings import FIELDS

    if arguments.pretrained and arguments.weights:
        raise InputError("--pretrained and --weights contradict each other: give one of them")
    size: int | None = arguments.image_size
    if size is None:
        known = None if is_function(arguments.model) else catalog_entry(arguments.model).input_size
        size = known or DEFAULT_SIZE
    check_value(FIELDS["image_size"], size)
    require_weights(arguments.model, pretrained=arguments.pretrained, weights=arguments.weights)
    return size
