"""`flambeau env`: what a run would use here, to read or to paste into a bug report."""

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

HELP = "report versions, devices and usable CPUs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--json`."""
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; the exit code."""
    from flambeau.data.images.jpeg.region_decode import jpeg_decoder
    from flambeau.data.images.native.kernel import kernel_status
    from flambeau.recipes.setup.environment import environment
    from flambeau.version import __version__

    images = {"jpeg": jpeg_decoder(), "kernel": kernel_status()}
    report = {"flambeau": __version__, **environment(), "images": images}
    text = json.dumps(report, indent=2) if arguments.json else _table(report)
    print(text, flush=True)  # flushed here, where `| head` is handled by the command
    return 0


def _table(report: Mapping[str, Any]) -> str:
    rows = list(_rows(report))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:{width}}  {text}".rstrip() for label, text in rows)


def _rows(report: Mapping[str, Any], indent: str = "") -> Iterator[tuple[str, str]]:
    for name, value in report.items():
        label = indent + name.replace("_", " ")
        if isinstance(value, Mapping):
            yield label, ""
            yield from _rows(value, indent + "  ")
        else:
            yield label, _words(value)


def _words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
