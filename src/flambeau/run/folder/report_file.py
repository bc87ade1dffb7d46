"""Reads a run folder for a report, and writes the report in it; without torch.

What cannot be read, or is not what a run writes, is left out: `flambeau verify` says why.
"""

import base64
import contextlib
import dataclasses
import io
import os
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from flambeau.report.evaluated import evaluated
from flambeau.report.page import GENERATOR, report_page
from flambeau.report.reported_run import Event, ReportedRun, read_series
from flambeau.report.words import ENGLISH
from flambeau.run.folder.json_file import finite_number, json_row, json_table
from flambeau.run.folder.summary import summarize, sweep_of
from flambeau.terminal import clock
from flambeau.unfinished_file import unfinished
from flambeau.version import __version__

_MAX_BYTES = 2**28  # read from the end of metrics.jsonl: some two million lines
_MAX_EVENT_BYTES = 2**22
_MAX_EVENTS = 500
_MAX_LINE_BYTES = 2**20
_MAX_PICTURE_BYTES = 2**20
_MAX_BAD = 20  # unreadable images that are named


def read_run(folder: Path, name: str) -> ReportedRun:
    summary = summarize(folder, name=name)
    result = json_table(folder / "result.json")
    data = dict(json_table(folder / "dataset.json"))
    if isinstance(classes := data.get("classes"), list):
        data["classes"] = len(classes)
    data = {key: value for key, value in data.items() if value not in (None, "")}
    environment = dict(json_table(folder / "environment.json"))
    model = environment.pop("model", None)
    events = list(_events(folder / "events.jsonl"))
    memory = next((e.peak_memory_bytes for e in reversed(events) if e.peak_memory_bytes), None)
    seen = evaluated(json_table(folder / "evaluation.json"))
    largest = None if seen is None else seen.largest_class
    facts = {
        "data": summary.data,
        "model": summary.model,
        "step": None if summary.step is None else f"{summary.step}/{summary.steps or '?'}",
        summary.metric or "best": None if summary.best is None else f"{summary.best:.4f}",
        "largest class": None if largest is None else "{1:.4f} ({0})".format(*largest),
        "test": _looked_at_by(folder.resolve()),
        "time": None if summary.seconds is None else clock(summary.seconds),
        "memory": None if memory is None else f"{memory / 2**20:.0f} MiB",
    }
    figures = result.get("metrics")
    with _lines(folder / "metrics.jsonl", _MAX_BYTES) as lines:
        series = read_series(lines, steps_per_epoch=summary.steps_per_epoch)
    return ReportedRun(
        name=name,
        state=summary.state,
        why=summary.why,
        facts={label: text for label, text in facts.items() if text is not None},
        settings=summary.config,
        environment=environment,
        data=data,
        figures=_numbers(figures) if isinstance(figures, dict) else {},
        series=series,
        model=model if isinstance(model, dict) else {},
        events=events[-_MAX_EVENTS:],
        evaluated=seen,
        first_batch=_jpeg(folder / "first_batch.jpg"),
        bad_images=_bad_images(folder / "bad_images.txt"),
    )


def _looked_at_by(run: Path) -> str | None:
    """As `looked_at`, of a run; that of a sweep records the looks of all its trials."""
    sweep = sweep_of(run)
    if sweep is None:
        return looked_at(json_table(run / "test.json"))
    return looked_at(json_table(sweep / "test.json"), by=f"{run.parent.name}/{run.name}")


def looked_at(record: Mapping[str, Any], *, by: str | None = None) -> str | None:
    """What the first look at test images found, and the number of looks.

    Args:
        by: a run that takes part in the look, as the record names it; None: any.
    """
    looks = record.get("looks")
    if not isinstance(looks, list):
        return None
    look = next((one for one in looks if isinstance(one, dict) and _is_by(by, one)), None)
    if look is None:
        return None
    value, low, high = (finite_number(look.get(name)) for name in ("value", "low", "high"))
    if value is None:
        return None
    interval = "" if low is None or high is None else f" (95 %: {low:.4f} to {high:.4f})"
    return f"{look.get('figure')} {value:.4f}{interval}, n = {look.get('images')}, touched: {len(looks)}"


def _is_by(run: str | None, look: Mapping[str, Any]) -> bool:
    runs = look.get("runs")
    return run is None or (isinstance(runs, list) and run in runs)


def link_to(run: ReportedRun, folder: Path, page_folder: Path) -> ReportedRun:
    """The run with a link to its own report, if it has one."""
    path = folder / "report.html"
    if not is_report(path):
        return run
    try:
        relative = os.fsencode(os.path.relpath(path, page_folder))
    except ValueError:  # on another drive
        return run
    return dataclasses.replace(run, link=f"./{urllib.parse.quote(relative)}")


def write_run_report(folder: Path, *, say: Callable[[str], None]) -> None:
    """Write report.html into a run folder; a failure is printed and does not end the run."""
    path = folder / "report.html"
    try:
        if path.exists() and not is_report(path):
            return  # a file of the user's
        name = folder.resolve().name.encode(errors="backslashreplace").decode()
        write_page(path, report_page([read_run(folder, name)], words=ENGLISH, version=__version__))
    except Exception as error:
        say(f"{path} could not be written: {type(error).__name__}: {error}")


def is_report(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return f'content="{GENERATOR}"'.encode() in file.read(2**12)
    return False


def write_page(path: Path, text: str) -> None:
    """Write a report whole or not at all: a browser may be reading the last one."""
    content = text.encode(errors="backslashreplace")
    # Not by write_file, which would import torch. The temporary name is that of a leftover: if this process
    # is killed now, the next start of the run removes it.
    temporary = unfinished(path)
    try:
        try:
            with temporary.open("xb") as file:
                file.write(content)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:  # names the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from error


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    }


@contextlib.contextmanager
def _lines(path: Path, most_bytes: int) -> Iterator[Iterator[bytes]]:
    """The last lines of a file, up to this many bytes; none if it cannot be read."""
    file: BinaryIO = io.BytesIO()
    with contextlib.suppress(OSError):
        file = path.open("rb") if path.is_file() else file
    with file:
        start = max(0, file.seek(0, io.SEEK_END) - most_bytes)
        file.seek(start)
        if start:
            file.readline(_MAX_LINE_BYTES)
        yield iter(lambda: file.readline(_MAX_LINE_BYTES), b"")


def _events(path: Path) -> Iterator[Event]:
    with _lines(path, _MAX_EVENT_BYTES) as lines:
        for line in lines:
            row = json_row(line)
            if row is not None and isinstance(row.get("text"), str):
                peak = row.get("peak_memory_bytes")
                is_peak = type(peak) is int and 0 < peak < 2**53
                yield Event(
                    str(row.get("time", ""))[:40],
                    str(row.get("step", ""))[:20],
                    row["text"][:2000],
                    peak if is_peak else None,
                )


def _jpeg(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_PICTURE_BYTES:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    if not content.startswith(b"\xff\xd8\xff"):
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


def _bad_images(path: Path) -> tuple[int, tuple[str, ...]]:
    """The number of unreadable images, and the names of the first."""
    with _lines(path, _MAX_EVENT_BYTES) as lines:
        names = [line.decode(errors="backslashreplace").strip()[:1000] for line in lines]
    return len(names), tuple(names[:_MAX_BAD])
