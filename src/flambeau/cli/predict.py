"""`flambeau predict`: classes of images, by a trained run."""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flambeau.train.inference import Sample

HELP = "classify images with the model of a run"

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN WHAT... and how to read and print."""
    parser.add_argument("folder", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "what",
        metavar="WHAT",
        nargs="+",
        help="image files, folders of images at any depth, or packed images, torchvision:NAME and "
        "FILE.py:FUNCTION as `flambeau evaluate` takes them; no labels are needed",
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="N", help="classes to name (default: 5)"
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
    parser.add_argument("--json", action="store_true", help="one JSON object per image")


def run(arguments: argparse.Namespace) -> int:
    """Print the classes of each image."""
    from flambeau.errors import InputError
    from flambeau.train.inference import load_trained, predict

    for name, least in (("top", 1), ("workers", 0), ("skip_bad_images", 0)):
        if getattr(arguments, name) < least:
            raise InputError(
                f"--{name.replace('_', '-')} must be at least {least}, got {getattr(arguments, name)}"
            )
    trained = load_trained(Path(arguments.folder), say=_say)
    predictions = predict(
        trained,
        [Path(what) for what in arguments.what],
        top=arguments.top,
        workers=arguments.workers,
        skip_bad_images=arguments.skip_bad_images,
        download=arguments.download,
        say=_say,
    )
    with contextlib.closing(predictions):  # and so its workers end, whatever happens here
        for sample, ranking in predictions:
            print(
                _as_json(sample, ranking) if arguments.json else _as_text(sample, ranking),
                flush=True,
            )
    return 0


def _as_json(sample: "Sample", ranking: Sequence[tuple[str, float]]) -> str:
    row: dict[str, Any] = {"image": sample.image}
    if sample.packed is not None:
        row |= {"source": sample.packed, "index": sample.index, "name": sample.name}
    if sample.label is not None:
        row["label"] = sample.label
    row["classes"] = [{"class": name, "probability": round(share, 6)} for name, share in ranking]
    line = json.dumps(row, ensure_ascii=False)
    # What the terminal lacks, or bytes of a path that are no text, come as escapes that JSON reads back.
    return line if _printed(line) == line else json.dumps(row)


def _as_text(sample: "Sample", ranking: Sequence[tuple[str, float]]) -> str:
    image = _CONTROL.sub(lambda found: repr(found[0])[1:-1], sample.image)  # one line per image
    return _printed(f"{image}: " + ", ".join(f"{name} {share:.1%}" for name, share in ranking))


def _printed(text: str) -> str:
    """As standard output can show it."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
