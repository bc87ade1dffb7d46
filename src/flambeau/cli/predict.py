"""`flambeau predict`: classes of image files, by a trained run."""

import argparse
import json
import sys
from pathlib import Path

HELP = "classify images with the model of a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN IMAGE... and how to print."""
    parser.add_argument("folder", metavar="RUN", help="folder of the run")
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image files")
    parser.add_argument(
        "--top", type=int, default=5, metavar="N", help="classes to name (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object an image")


def run(arguments: argparse.Namespace) -> int:
    """Print the classes of each image."""
    from flambeau.data.errors import InputError
    from flambeau.train.trained import load_trained, predict

    if arguments.top < 1:
        raise InputError(f"--top must be at least 1, got {arguments.top}")
    trained = load_trained(Path(arguments.folder), say=_say)
    for path, ranking in predict(trained, [Path(p) for p in arguments.images], top=arguments.top):
        if arguments.json:
            classes = [{"class": name, "probability": round(share, 6)} for name, share in ranking]
            print(
                json.dumps({"image": str(path), "classes": classes}, ensure_ascii=False), flush=True
            )
        else:
            print(
                f"{path}: " + ", ".join(f"{name} {share:.1%}" for name, share in ranking),
                flush=True,
            )
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)
