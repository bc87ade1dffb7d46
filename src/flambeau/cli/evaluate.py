"""`flambeau evaluate`: loss and accuracy of a trained run on labelled data."""

import argparse
import json
import sys
from pathlib import Path

HELP = "measure the model of a run on labelled images"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN DATA and how to read and print."""
    parser.add_argument("folder", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "data",
        metavar="DATA",
        help="what `flambeau train` takes; its validation part counts, if any",
    )
    parser.add_argument(
        "--download", action="store_true", help="fetch what is missing of torchvision:NAME"
    )
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes that read data"
    )
    parser.add_argument(
        "--skip-bad-images", type=int, default=0, metavar="N", help="unreadable images to leave out"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the figures."""
    from flambeau.errors import InputError
    from flambeau.train.inference import evaluate, load_trained

    for name in ("workers", "skip_bad_images"):
        if getattr(arguments, name) < 0:
            raise InputError(
                f"--{name.replace('_', '-')} must be at least 0, got {getattr(arguments, name)}"
            )
    trained = load_trained(Path(arguments.folder), say=_say)
    figures = evaluate(
        trained,
        Path(arguments.data),
        workers=arguments.workers,
        skip_bad_images=arguments.skip_bad_images,
        download=arguments.download,
    )
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(
            "  ".join(
                f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()
            )
        )
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)
