"""`flambeau report`: runs as one HTML file, to view in a browser, to keep, to send."""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from flambeau.cli.table import print_json
from flambeau.cli.written_file import check_page
from flambeau.data.stores.address import is_address
from flambeau.errors import InputError
from flambeau.run.folder.store_run import run_here
from flambeau.terminal import print_text, say
from flambeau.version import __version__

HELP = "runs as one HTML file: curves, results, settings and what differs between them"

_MAX_RUNS = 200  # in one file
_WATCH_S = 5  # between reloads of a watched page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "runs",
        metavar="RUN",
        nargs="+",
        help="the folder of a run, or one that holds runs: all of them then; runs that differ in their seed "
        "alone are shown as one line, with their spread",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="(default: report.html in the folder of the run; here, for several)",
    )
    add("--zh", action="store_true", help="a report in Chinese")
    add(
        "--watch",
        metavar="PORT",
        nargs="?",
        type=int,
        const=0,
        help="write nothing, and show it at http://localhost:PORT/ while the runs go on, until Ctrl-C",
    )
    add("--force", action="store_true", help="replace FILE even if it is no report of flambeau")
    add("--json", action="store_true", help="one JSON object, for programs")


def run(arguments: argparse.Namespace) -> int:
    if arguments.watch is not None:
        return _watch(arguments)
    from flambeau.run.folder.report_file import write_page

    folders = _chosen(arguments.runs)
    is_one = len(folders) == 1 and not is_address(arguments.runs[0])
    out = arguments.out or (folders[0] / "report.html" if is_one else Path("report.html"))
    check_page(
        "--out", out, example="report.html", instead="--force replaces it", force=arguments.force
    )
    write_page(out, _page(folders, zh=arguments.zh, links_from=out.parent))
    if arguments.json:
        print_json([{"file": str(out), "runs": list(map(str, folders))}], readable=True)
    else:
        print_text(str(out))
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from flambeau.report.live import server

    if arguments.out is not None or arguments.force or arguments.json:
        raise InputError("--watch writes no file: leave out --out, --force and --json")
    if not 0 <= arguments.watch < 2**16:
        raise InputError(f"--watch {arguments.watch}: a port is a number from 1 to 65535")
    _chosen(arguments.runs)  # refuse wrong input now

    def page() -> str:
        return _page(_chosen(arguments.runs), zh=arguments.zh, watch_s=_WATCH_S)

    try:
        watching = server(page, port=arguments.watch)
    except OSError as error:
        raise InputError(
            f"--watch {arguments.watch}: {error.strerror}; choose another port, or none for one that is free"
        ) from error
    with watching:
        print_text(f"http://localhost:{watching.server_address[1]}/")
        say("Ctrl-C ends it")
        try:
            watching.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def _page(
    folders: Sequence[Path], *, zh: bool, links_from: Path | None = None, watch_s: int | None = None
) -> str:
    """The report of these runs; `links_from` is the folder of the page, which links to their reports."""
    from flambeau.report.page import report_page
    from flambeau.report.words import CHINESE, ENGLISH
    from flambeau.run.folder.report_file import link_to, read_run
    from flambeau.run.folder.sweep_for_report import read_sweep

    names = _names(folders)
    sweep = read_sweep(folders, names)
    runs = [read_run(folder, names[folder]) for folder in folders]
    if links_from is not None and len(runs) > 1:
        runs = [link_to(run, folder, links_from) for run, folder in zip(runs, folders, strict=True)]
    words = CHINESE if zh else ENGLISH
    return report_page(runs, words=words, version=__version__, watch_s=watch_s, sweep=sweep)


def _chosen(words: Sequence[str]) -> list[Path]:
    """The runs that were named; InputError: none, or more than a report can show."""
    folders = list(_folders(words))
    if len(folders) > _MAX_RUNS:
        raise InputError(
            f"{len(folders)} runs are too many for one report, {_MAX_RUNS} at most: name fewer of them"
        )
    return folders


def _folders(words: Sequence[str]) -> Iterator[Path]:
    from flambeau.run.folder.summary import Search

    seen = set[Path]()
    for word in words:
        root = run_here(word, say)
        if not root.is_dir():
            what = "is not a folder" if root.exists() else "does not exist"
            raise InputError(f"{root} {what}; name the folder of a run, or one that holds runs")
        search = Search(root)
        runs = sorted(search)
        if not runs:
            raise InputError(f"no runs in {root}; a run is a folder with a config.toml")
        if search.is_cut:
            say(f"not all folders below {root} were looked into; name one of them")
        for path in runs:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def _names(folders: Sequence[Path]) -> dict[Path, str]:
    """The last part of each path, or as much of it as makes them different."""
    # The page cannot hold bytes that are no text.
    readable = {f: os.fsencode(f.resolve()).decode(errors="backslashreplace") for f in folders}
    parts = {folder: Path(path).parts for folder, path in readable.items()}
    for length in range(1, max(map(len, parts.values())) + 1):
        names = {folder: "/".join(part[-length:]) for folder, part in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return readable
