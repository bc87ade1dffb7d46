"""`flambeau verify`: are the checkpoints of a run whole, and would a resume be exact."""

import argparse
from pathlib import Path

HELP = "check every checkpoint of a run, and whether a resume would be exact"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN."""
    parser.add_argument("folder", metavar="RUN", help="folder of the run")


def run(arguments: argparse.Namespace) -> int:
    """Print one line a checkpoint and one on resuming; 1 if anything is damaged or would not be exact."""
    from flambeau.train.inspection import inspect_run

    report = inspect_run(Path(arguments.folder))
    for line in report.lines:
        print(line)
    return 0 if report.good else 1
