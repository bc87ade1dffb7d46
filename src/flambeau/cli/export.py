"""`flambeau export`: the model of a run as one graph from pixels to probabilities, and each step's effect."""

import argparse
from pathlib import Path

from flambeau.cli.reading_flags import (
    add_cache_flags,
    add_others,
    add_trust,
    cache_of_flags,
)
from flambeau.cli.table import print_json, print_table
from flambeau.terminal import say

HELP = (
    "write the model of a run as ONNX, torch.export or compiled, with what that did to its answers"
)

_FORMATS = ("torch-export", "onnx", "aoti", "safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", metavar="RUN", help="folder of the run")
    add_others(parser)
    add("--out", type=Path, metavar="DIR", required=True, help="folder to make")
    add(
        "--format",
        choices=_FORMATS,
        default="torch-export",
        help="torch-export: a graph for any torch; onnx: one file for ONNX Runtime and others; aoti: "
        "compiled for this kind of processor, for Python and C++; safetensors: weights alone (default: "
        "torch-export)",
    )
    _add_steps(parser.add_argument_group("steps"))
    images = parser.add_argument_group("images")
    images.add_argument(
        "--data",
        type=Path,
        metavar="DATA",
        help="labelled images to measure on (default: the run's validation data)",
    )
    images.add_argument(
        "--calibrate",
        type=Path,
        metavar="DATA",
        help="images for the ranges of int8 (default: the run's training data)",
    )
    images.add_argument(
        "--images", type=int, default=1000, metavar="N", help="how many at most (default: 1000)"
    )
    add_cache_flags(images)
    add("--json", action="store_true", help="all figures as one JSON object")
    add_trust(parser)


def _add_steps(steps: "argparse._ArgumentGroup") -> None:
    add = steps.add_argument
    add(
        "--fold",
        action="store_true",
        help="BatchNorm into the layer before it, where that is exact",
    )
    add(
        "--reparameterize",
        action="store_true",
        help="blocks of several branches (RepVGG, MobileOne ...) into one convolution each",
    )
    add(
        "--prune",
        type=float,
        metavar="SHARE",
        help="remove this share of the channels, and fine-tune what is left",
    )
    add(
        "--fine-tune",
        metavar="DURATION",
        help="how long to train after --prune and for qat, such as 3ep or 500st (default: 1ep)",
    )
    add(
        "--quantize",
        choices=("int8", "dynamic", "qat", "fp16", "bf16"),
        help="int8: weights and activations, ranges measured on images; dynamic: weights of linear layers; "
        "qat: int8 with ranges and weights trained for it; fp16, bf16: the network in half the bits",
    )
    add(
        "--min-agreement",
        type=float,
        default=0.99,
        metavar="SHARE",
        help="refuse a step that gives the run's class on fewer of the images (default: 0.99)",
    )
    add("--allow-slower", action="store_true", help="keep a step that takes longer than before")


def run(arguments: argparse.Namespace) -> int:
    data = [arguments.data, arguments.calibrate]
    if arguments.cache is not None or arguments.cache_size is not None:
        from flambeau.run.folder.run_folder import RunFolder
        from flambeau.run.folder.store_run import run_here

        data.append(RunFolder(run_here(arguments.folder)).read_existing().get("data"))
    with cache_of_flags(arguments, *data):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from flambeau.exports.export_run import Measuring, export_run
    from flambeau.exports.step_figures import as_rows, as_table
    from flambeau.exports.steps import ExportPlan

    figures = export_run(
        Path(arguments.folder),
        arguments.out,
        ExportPlan(
            arguments.format,
            fold=arguments.fold,
            reparameterize=arguments.reparameterize,
            prune=arguments.prune,
            fine_tune=arguments.fine_tune,
            quantize=arguments.quantize,
            min_agreement=arguments.min_agreement,
            allow_slower=arguments.allow_slower,
        ),
        Measuring(arguments.data, arguments.calibrate, arguments.images),
        others=arguments.others,
        trust=arguments.trust,
        say=say,
    )
    if arguments.json:
        print_json([{"out": str(arguments.out), "steps": as_rows(figures)}])
    else:
        head, *rows = as_table(figures)
        print_table(head, rows, right=head[1:])
    say(f"{arguments.out}: model, preprocessing, example and model card")
    return 0
