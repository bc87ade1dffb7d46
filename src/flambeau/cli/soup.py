"""`flambeau soup`: one model whose weights are the average of those of several runs."""

import argparse
from pathlib import Path

from flambeau.cli.reading_flags import add_cache_flags, add_trust, cache_of_flags, check_at_least
from flambeau.cli.table import print_json
from flambeau.optional_packages import large_import
from flambeau.terminal import print_text, say

HELP = "average the weights of several runs into one model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "runs",
        metavar="RUN",
        nargs="+",
        help="folders of finished runs of one network on the same data, begun from the same weights",
    )
    add("--out", type=Path, metavar="DIR", required=True, help="folder to make: a finished run")
    add("--workers", type=int, default=0, metavar="N", help="processes that read data")
    add_cache_flags(parser)
    add("--json", action="store_true", help="all figures as one JSON object")
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    data = []
    if arguments.cache is not None or arguments.cache_size is not None:
        from flambeau.run.folder.run_folder import RunFolder
        from flambeau.run.folder.store_run import run_here

        data.append(RunFolder(run_here(arguments.runs[0])).read_existing().get("data"))
    with cache_of_flags(arguments, *data):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, workers=0)
    with large_import():
        from flambeau.trainer.soup import make_soup

    soup = make_soup(
        arguments.runs, arguments.out, workers=arguments.workers, trust=arguments.trust, say=say
    )
    if arguments.json:
        print_json([soup.as_dict()])
        return 0
    runs = ", ".join(soup.taken)
    print_text(
        f"{soup.took} soup of {len(soup.taken)} of {len(soup.runs)} runs ({runs}): "
        f"{soup.figure} {soup.value:.4f}, of the best run alone {soup.best.value:.4f}"
    )
    say(f"chosen on the held-out images, so on others the gain ({soup.gain:+.4f}) may be smaller")
    say(f"{arguments.out}: a finished run, whose soup.json names what it is made of")
    return 0
