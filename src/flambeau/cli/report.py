"""`flambeau report`: runs as one HTML file, to look at in a browser, to keep, to send."""

import argparse
import contextlib
import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from flambeau.cli.reading_flags import printed
from flambeau.errors import InputError
from flambeau.terminal import say

if TYPE_CHECKING:
    from flambeau.report.reported_run import ReportedRun

HELP = "runs as one HTML file: curves, results, settings and what differs between them"

_MOST_RUNS = 200  # in one file
_MOST_BYTES = 2**28  # of metrics.jsonl that are read, from its end: some two million lines
_LONGEST_LINE = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, the file, and its language."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="the folder of a run, or one that holds runs: all of them then; runs that differ in their seed "
        "alone are shown as one line, with their spread",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="(default: report.html in the folder of the run; here, for several)",
    )
    parser.add_argument("--zh", action="store_true", help="a report in Chinese")
    parser.add_argument(
        "--force", action="store_true", help="replace FILE even if it is no report of flambeau"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file and say where it is."""
    from flambeau.report.page import report_page
    from flambeau.report.words import CHINESE, ENGLISH
    from flambeau.version import __version__

    folders = list(_folders(arguments.runs))
    if len(folders) > _MOST_RUNS:
        raise InputError(
            f"{len(folders)} runs are too many for one report, {_MOST_RUNS} at most: name fewer of them"
        )
    out = arguments.out or (
        folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    )
    _check_out(out, force=arguments.force)
    names = _names(folders)
    runs = [_read(folder, names[folder]) for folder in folders]
    page = report_page(runs, words=CHINESE if arguments.zh else ENGLISH, version=__version__)
    _write(out, page)
    print(printed(str(out)))
    return 0


def _folders(words: Sequence[str]) -> Iterator[Path]:
    """Each run once, in the order given."""
    from flambeau.train.checkpoints.run_summary import Search

    seen = set[Path]()
    for word in words:
        root = Path(word)
        if not root.is_dir():
            what = "is not a folder" if root.exists() else "does not exist"
            raise InputError(f"{root} {what}; name the folder of a run, or one that holds runs")
        search = Search(root)
        found = sorted(search)
        if not found:
            raise InputError(f"no runs in {root}; a run is a folder with a config.toml")
        if search.is_cut:
            say(f"not all folders below {root} were looked into; name one of them")
        for path in found:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def _names(folders: Sequence[Path]) -> dict[Path, str]:
    """The last part of each path, or as much of it as tells them apart."""
    # Bytes that are no text cannot stand in the page.
    readable = {f: os.fsencode(f.resolve()).decode(errors="backslashreplace") for f in folders}
    parts = {folder: Path(path).parts for folder, path in readable.items()}
    for length in range(1, max(map(len, parts.values())) + 1):
        names = {folder: "/".join(part[-length:]) for folder, part in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return readable


def _read(folder: Path, name: str) -> "ReportedRun":
    from flambeau.report.reported_run import ReportedRun, read_series
    from flambeau.terminal import clock
    from flambeau.train.checkpoints.run_summary import summarize

    summary = summarize(folder, name=name)
    result = _stored(folder / "result.json")
    data = dict(_stored(folder / "dataset.json"))
    if isinstance(classes := data.get("classes"), list):
        data["classes"] = len(classes)
    data = {key: value for key, value in data.items() if value not in (None, "")}
    facts = {
        "data": summary.data,
        "model": summary.model,
        "step": None if summary.step is None else f"{summary.step}/{summary.steps or '?'}",
        summary.metric or "best": None if summary.best is None else f"{summary.best:.4f}",
        "time": None if summary.seconds is None else clock(summary.seconds),
    }
    figures = result.get("metrics")
    with _lines(folder / "metrics.jsonl") as lines:
        series = read_series(lines, steps_per_epoch=summary.steps_per_epoch)
    return ReportedRun(
        name=name, state=summary.state, why=summary.why,
        facts={label: text for label, text in facts.items() if text is not None},
        settings=summary.config, environment=_stored(folder / "environment.json"), data=data,
        figures=_numbers(figures) if isinstance(figures, dict) else {}, series=series,
    )  # fmt: skip


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    }


def _stored(path: Path) -> Mapping[str, Any]:
    """A table of a run, empty where it is absent or cannot be read: `flambeau verify` says why."""
    from flambeau.train.checkpoints.json_file import json_file

    try:
        found = json_file(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def _lines(path: Path) -> Iterator[Iterator[bytes]]:
    """The lines of a file, of a very long one the last of them; none where it cannot be read."""
    file: BinaryIO = io.BytesIO()
    with contextlib.suppress(OSError):
        file = path.open("rb") if path.is_file() else file
    with file:
        start = max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES)
        file.seek(start)
        if start:
            file.readline(_LONGEST_LINE)
        yield iter(lambda: file.readline(_LONGEST_LINE), b"")


def _check_out(path: Path, *, force: bool) -> None:
    """Refuse to replace what is no report."""
    from flambeau.report.page import GENERATOR

    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out {path}: a report is an HTML file; name it such as report.html")
    if not path.parent.is_dir():
        raise InputError(f"--out {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise InputError(f"--out {path} is a folder; name a file in it: {path / 'report.html'}")
    if path.exists() and not force:
        head = b""
        with contextlib.suppress(OSError), path.open("rb") as file:
            head = file.read(2**12)
        if f'content="{GENERATOR}"'.encode() not in head:
            raise InputError(f"{path} exists and is no report of flambeau; --force replaces it")


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a browser may be reading the last one."""
    content = text.encode(errors="backslashreplace")
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=".report-", suffix=".tmp", delete=False
        ) as file:
            temporary = Path(file.name)
            try:
                file.write(content)
                file.close()
                temporary.chmod(0o644)
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:  # which names the temporary file, or none
        raise OSError(error.errno, error.strerror, str(path)) from error
