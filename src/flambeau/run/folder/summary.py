"""A summary of a run folder without torch: state, best figure, progress.

The folder may be damaged, of another program or malicious: only regular files are read, up to a limit, their
content is checked, and what is wrong is part of the summary.
"""

import contextlib
import datetime
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flambeau.errors import InputError
from flambeau.html_table import html_table
from flambeau.run.folder.json_file import (
    dataset_facts,
    finite_number,
    json_file,
    json_table,
    metrics_row,
    table,
    whole_number,
)
from flambeau.run.folder.lock import is_locked
from flambeau.run.options.better_figure import DEFAULT_BEST, better_by_name
from flambeau.run.options.durations import Duration, parse_duration
from flambeau.run.options.toml_file import load_toml
from flambeau.terminal import clock

State = Literal["finished", "running", "stopped", "failed", "damaged", "foreign"]
STATES: tuple[State, ...] = ("finished", "running", "stopped", "failed", "damaged", "foreign")

TAIL_BYTES = 2**20
"""Of metrics.jsonl that are read, about 7000 lines; reading and parsing them takes 30 ms."""
_MAX_FOLDERS = 20_000  # searched for runs
_MAX_ENTRIES = 200_000  # names in them, so that a folder of photos is left soon
MAX_DEPTH = 4
"""Of folders below the first one, in which runs are searched for."""
_MAX_RUNS = 5_000
_CHECKPOINT = re.compile(r"step-([0-9]{1,18})")
TRIAL = re.compile(r"(?P<trial>[0-9]{1,9})(-fold(?P<fold>[0-9]{1,3}))?(-seed[0-9]+)?")
"""The name of a run folder of a sweep."""
_NOT_FINITE = re.compile(r"not-finite-step-([0-9]{1,18})\.json")


@dataclass(frozen=True)
class RunSummary:
    """What a run folder says; None where it says nothing.

    Attributes:
        state: finished, running (a process holds its lock), stopped, failed (not finite), damaged (a file is
            not what a run writes), foreign (config.toml of another program).
        why: reason of damaged, foreign or failed.
        metric, best: name and value; of a finished run, those of its published weights.
        seconds: of training, without evaluations and pauses.
        is_sweep: of several runs of a sweep, which `why` counts.
    """

    path: Path
    name: str
    state: State
    why: str | None = None
    kind: Literal["train", "script"] | None = None
    data: str | None = None
    model: str | None = None
    metric: str | None = None
    best: float | None = None
    step: int | None = None
    steps: int | None = None
    steps_per_epoch: int | None = None
    changed: float | None = None
    seconds: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    is_sweep: bool = False

    @property
    def moment(self) -> datetime.datetime | None:
        """When it was changed, in local time; None for a clock that was far off."""
        if self.changed is not None:
            with contextlib.suppress(ValueError, OverflowError, OSError):
                return datetime.datetime.fromtimestamp(self.changed).astimezone()
        return None

    def _repr_html_(self) -> str:
        changed = None if self.moment is None else f"{self.moment:%Y-%m-%d %H:%M}"
        step = None if self.step is None else f"{self.step}/{self.steps or '?'}"
        seconds = None if self.seconds is None else clock(self.seconds)
        rows = {
            "state": self.state,
            "why": self.why,
            "data": self.data,
            "model": self.model,
            "step": step,
            self.metric or "best": self.best,
            "when": changed,
            "time": seconds,
            "folder": self.path,
        }
        return html_table(self.name, rows)


@dataclass
class Search:
    """The run folders below a folder, up to a limit of searched folders; `is_cut`: there may be more."""

    root: Path
    is_cut: bool = False

    def __iter__(self) -> Iterator[Path]:
        """Each folder with a config.toml; the folders below one are not searched."""
        todo = [(self.root, 0)]
        seen = set[tuple[int, int]]()
        entries = 0
        runs = 0
        while todo:
            folder, depth = todo.pop()
            try:
                status = folder.stat()
                if (status.st_dev, status.st_ino) in seen:
                    continue  # a link back
                seen.add((status.st_dev, status.st_ino))
                if (folder / "config.toml").is_file():
                    runs += 1
                    yield folder
                    continue
                below = []
                with os.scandir(folder) as names:
                    for entry in names:
                        entries += 1
                        if entry.name[0] != "." and entry.is_dir():
                            below.append(Path(entry.path))
                        if entries > _MAX_ENTRIES:
                            break
            except OSError:
                continue  # no permission, or removed meanwhile
            if below and depth == MAX_DEPTH:
                self.is_cut = True
                continue
            todo += [(path, depth + 1) for path in sorted(below, reverse=True)]
            if len(seen) > _MAX_FOLDERS or entries > _MAX_ENTRIES or runs > _MAX_RUNS:
                self.is_cut = True
                return


def sweep_of(run: Path) -> Path | None:
    """The folder of the sweep that has trained a run; None for another run."""
    root = run.parent.parent
    is_trial = run.parent.name == "trials" and TRIAL.fullmatch(run.name) is not None
    with contextlib.suppress(OSError):
        return root if is_trial and (root / "sweep.toml").is_file() else None
    return None


def of_sweep(runs: Sequence[RunSummary], path: Path, *, name: str) -> RunSummary:
    """One summary of runs of a sweep: how many are in which state, and their best figure."""
    counts = Counter(run.state for run in runs)
    several = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    if len(counts) == 1:
        several = runs[0].state if len(runs) == 1 else f"all {runs[0].state}"
    known = [run for run in runs if run.best is not None]
    sign = -1 if known and mode_of(known[0].config) == "max" else 1
    best = min(known, key=lambda run: sign * (run.best or 0.0), default=runs[0])
    seconds = [run.seconds for run in runs if run.seconds is not None]
    data = {run.data for run in runs}
    models = {run.model for run in runs}
    return RunSummary(
        path,
        name,
        "running" if counts["running"] else best.state,
        f"{len(runs)} run{'s' if len(runs) > 1 else ''}: {several}",
        best.kind,
        data.pop() if len(data) == 1 else None,
        models.pop() if len(models) == 1 else None,
        metric=best.metric,
        best=best.best,
        changed=max((run.changed for run in runs if run.changed is not None), default=None),
        seconds=sum(seconds) if seconds else None,
        is_sweep=True,
    )


def mode_of(config: Mapping[str, Any]) -> Literal["max", "min"]:
    """Whether more or less of the figure `best` of a run is better, by its config.toml."""
    mode = config.get("best_mode")
    if mode in ("max", "min"):
        return "max" if mode == "max" else "min"
    return better_by_name(str(config.get("best", DEFAULT_BEST))) or "max"


def summarize(path: Path, *, name: str) -> RunSummary:
    try:
        config = load_toml(path / "config.toml")
        _check_values(config)
    except (OSError, ValueError) as error:
        why = f"config.toml cannot be read: {error}"
        return RunSummary(path, name, "damaged", why, changed=_changed(path))
    if not _is_of_a_run(config):
        why = "its config.toml is not of a run"
        return RunSummary(path, name, "foreign", why, changed=_changed(path))
    return _Reader(path, name, config).summary()


def saved_place(path: Path) -> tuple[int, int]:
    """Epoch and position (samples of it) of a run's newest checkpoint; 0, 0 without one."""
    checkpoints = path / "checkpoints"
    step = max(_numbered(checkpoints, _CHECKPOINT), default=0)
    meta = table(json_table(checkpoints / f"step-{step:08d}" / "manifest.json").get("meta"))
    return whole_number(meta.get("epoch")) or 0, whole_number(meta.get("position")) or 0


class _Reader:
    def __init__(self, path: Path, name: str, config: Mapping[str, Any]) -> None:
        self._path, self._name, self._config = path, name, config
        self._is_command = isinstance(config.get("model"), str)
        checkpoints = _numbered(path / "checkpoints", _CHECKPOINT)
        self._saved = max(checkpoints, default=0)
        self._is_running = is_locked(path)
        self._rows, self._has_all_rows = _rows(path / "metrics.jsonl")
        self._metas = [] if self._has_all_rows else self._metas_of(sorted(checkpoints)[-64:])
        self._why_no_facts: str | None = None
        self._num_samples = self._samples()

    def summary(self) -> RunSummary:
        config = self._config
        state, why, result = self._state()
        metric = str(config.get("best", "val_accuracy"))
        best = self._best(metric) if result is None else finite_number(result.get(metric))
        values = config if self._is_command else table(config.get("config"))
        data = config.get("data", "fashion-mnist") if self._is_command else values.get("data")
        model = values.get("model", config.get("builder"))
        step = max([self._saved, *(row["step"] for row in self._rows[-1:] if self._is_running)])
        return RunSummary(
            self._path,
            self._name,
            state,
            why,
            kind="train" if self._is_command else "script",
            data=data if isinstance(data, str) else None,
            model=model if isinstance(model, str) else None,
            metric=metric if best is not None else None,
            best=best,
            step=step,
            steps=self._total(),
            steps_per_epoch=self._steps_per_epoch(),
            changed=_changed(self._path),
            seconds=self._seconds(),
            config=config,
        )

    def _state(self) -> tuple[State, str | None, Mapping[str, Any] | None]:
        """The state, its reason, and the figures of a finished run."""
        try:
            result = json_file(self._path / "result.json")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            return "damaged", f"result.json cannot be read: {error}", None
        else:
            figures = table(result).get("metrics")
            if not isinstance(figures, dict):
                return "damaged", "result.json is not of a run", None
            if not (self._path / "model.safetensors").is_file():
                return "damaged", "model.safetensors is missing", figures
            if self._is_command and self._why_no_facts:
                return "damaged", self._why_no_facts, figures
            return "finished", None, figures
        if self._is_running:
            return "running", None, None
        if self._is_command and self._why_no_facts:
            return "damaged", self._why_no_facts, None
        bad = max(_numbered(self._path, _NOT_FINITE), default=0)
        if bad > self._saved:
            return "failed", f"not finite at step {bad}", None
        return "stopped", None, None

    def _best(self, metric: str) -> float | None:
        """The best over the evaluations in the lines read, and in checkpoints if not all lines were read."""
        evaluations: list[Mapping[str, Any]] = [r for r in self._rows if "images_per_s" not in r]
        evaluations += [table(meta.get("metrics")) for meta in self._metas]
        values = [v for row in evaluations if (v := finite_number(row.get(metric))) is not None]
        choose = {"max": max, "min": min}[mode_of(self._config)]
        return choose(values, default=None)

    def _samples(self) -> int | None:
        try:
            return whole_number(dataset_facts(self._path / "dataset.json")["train_samples"])
        except ValueError as error:
            self._why_no_facts = f"dataset.json cannot be read: {error}"
            return None

    def _metas_of(self, steps: Sequence[int]) -> list[Mapping[str, Any]]:
        metas = []
        for step in steps:
            manifest = self._path / "checkpoints" / f"step-{step:08d}" / "manifest.json"
            metas.append(table(json_table(manifest).get("meta")))  # `flambeau verify` says more
        return metas

    def _global_batch(self) -> int | None:
        batch = whole_number(self._config.get("batch_size"))
        parts = whole_number(self._config.get("accumulate", 1))
        return batch * parts if batch and parts else None

    def _steps_per_epoch(self) -> int | None:
        batch = self._global_batch()
        if self._num_samples and batch:
            return math.ceil(self._num_samples / batch)
        for meta in self._metas_of([self._saved] if self._saved else []):
            step, epoch = whole_number(meta.get("step")), whole_number(meta.get("epoch"))
            if step and epoch and meta.get("position") == 0 and step % epoch == 0:
                return step // epoch
        return None

    def _total(self) -> int | None:
        lengths = _lengths(self._config)
        per_epoch = 0 if {length.unit for length in lengths} == {"st"} else self._steps_per_epoch()
        if per_epoch is None:
            return None
        return max(1, sum(length.steps(steps_per_epoch=per_epoch) for length in lengths))

    def _seconds(self) -> float | None:
        """Training time: the images between two lines, divided by their images_per_s, summed over lines."""
        batch = self._global_batch()
        total = 0.0
        before = 0
        rows = [row for row in self._rows if "images_per_s" in row]
        if not rows or batch is None or not self._has_all_rows:
            return None
        for row in rows:
            speed = finite_number(row["images_per_s"])
            seen = self._images(row, batch)
            if not speed or speed < 0 or seen < before:
                return None
            total, before = total + (seen - before) / speed, seen
        return total if math.isfinite(total) else None

    def _images(self, row: Mapping[str, Any], batch: int) -> int:
        """How many images the run has trained on up to a line; the last batch of an epoch may be smaller."""
        step = int(row["step"])
        epoch = whole_number(row.get("epoch"))
        samples = self._num_samples
        if epoch is None or samples is None:
            return step * batch
        in_epoch = step - epoch * math.ceil(samples / batch)
        return epoch * samples + min(in_epoch * batch, samples)


def _lengths(config: Mapping[str, Any]) -> list[Duration]:
    lengths = [config["duration"], *([config["extend"]] if "extend" in config else [])]
    return [parse_duration(text, name="duration") for text in lengths]


def _is_of_a_run(config: Mapping[str, Any]) -> bool:
    try:
        _lengths(config)
    except (KeyError, InputError, TypeError):
        return False
    return {"batch_size", "seed", "checkpoint_every"} <= config.keys()


def _check_values(values: object) -> None:
    """Raise ValueError for integers beyond 64 bits: TOML does not promise them."""
    if isinstance(values, int) and values.bit_length() > 64:  # Python may refuse to print it
        raise ValueError("a whole number in it has more than 64 bits")
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            _check_values(value)


def _rows(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The last valid lines of metrics.jsonl, and whether these are all."""
    try:
        if not path.is_file():
            return [], True
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            lines = file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return [], False
    rows = [row for line in lines[1 if start else 0 :] if (row := metrics_row(line)) is not None]
    return rows, start == 0


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    try:
        names = [path.name for path in itertools.islice(folder.iterdir(), _MAX_ENTRIES)]
    except OSError:
        return []
    return [int(match[1]) for name in names if (match := pattern.fullmatch(name))]


def _changed(path: Path) -> float | None:
    """Time of the last change of the files that a run writes."""
    times = []
    for name in ("config.toml", "metrics.jsonl", "checkpoints", "result.json"):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)
