"""`flambeau tune`: trials in separate processes, noted one by one, and the search over them."""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.errors import InputError, unreadable
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.run.options.option import allowed_types
from flambeau.run.options.toml_file import as_toml, load_toml
from flambeau.sandbox.inside_trial import RUNS
from flambeau.trainer.settings.settings import FIELDS
from flambeau.tune.doctor.machine_watch import BUSY, busy_cpus
from flambeau.tune.doctor.remedies import REPEATS
from flambeau.tune.doctor.trial import Script, Trial, signals_raise
from flambeau.tune.search.journal import Journal
from flambeau.tune.search.levers import Choice, Lever, LoaderFacts, Setting, TrainFacts, TrialFacts
from flambeau.tune.search.search import Measured, Search, SearchResult
from flambeau.tune.watch.plan import Plan

_LOSS_LINES = 3  # of metrics.jsonl, ten steps each
_LOG_EVERY = "10"
_LOOK_S = 0.3  # at the machine before a trial; chosen
_MOST_WAIT_S = 20.0  # for other programs; chosen
_WAIT_SHARE = 0.1  # of the budget; chosen
_SMALL = 2**20  # bytes; chosen
_SCRIPTS = ("", ".py", ".sh", ".toml", ".yaml", ".yml", ".json", ".cfg", ".ini")


@dataclass(frozen=True)
class Options:
    """How to search.

    Attributes:
        objective: throughput, seconds per step; memory, bytes of the processes.
        budget_s: no comparison begins after it.
        planned_s: length of the tuned run, against which a longer start is weighed.
        loss_bound: share by which the first losses may differ in another precision.
    """

    objective: str = "throughput"
    budget_s: float = 300.0
    rounds: int = 3
    seconds: float = 3.0
    planned_s: float = 3600.0
    loss_bound: float = 0.05


class Trials:
    """Runs trials and notes each in a file, from which an interrupted search continues.

    Args:
        is_train: the script is `flambeau train`.
        data_at: index of the image folder in the command, if copies may be tried.
    """

    def __init__(
        self,
        script: Script,
        options: Options,
        *,
        is_train: bool,
        data_at: int | None,
        journal: Path,
        say: Callable[[str], None],
    ) -> None:
        self._script, self._is_train, self._data_at = script, is_train, data_at
        self.copies: PackedCopies | None = None
        if data_at is not None:
            folder = Path(script.command[data_at])
            self.copies = PackedCopies(folder, journal.parent, limit_s=script.limit_s)
        self.levers: dict[str, Lever] = {}
        """Those that a trial may set, by name."""
        self.facts: TrialFacts = None
        """What the newest trial has shown."""
        self._options, self._say = options, say
        search = json.dumps([list(script.command), options.objective, options.seconds])
        key = hashlib.sha256(search.encode() + _files_in(script.command)).hexdigest()[:16]
        self._journal = Journal(journal, key)
        self._waits = options.objective == "throughput"
        self.num_reused = 0
        """Trials of an earlier call that were not run again."""
        self.num_run = 0
        """Trials of this call."""

    def measure(self, choice: Choice) -> Measured:
        """Run the script with these levers set, or take the trial from an interrupted search."""
        row = self._journal.take(choice)
        if row is not None:
            self.num_reused += 1
        else:
            named = ", ".join(f"{name}={value}" for name, value in choice.items()) or "as it is"
            self._wait_for_quiet()
            self._say(f"trial: {named}")
            self.num_run += 1
            row = {"choice": dict(choice), **self._run(choice)}
            self._journal.add(row)
        self.facts = trial_facts(row)
        cost = row["step_s"] if self._options.objective == "throughput" else row["bytes"]
        if cost is not None:
            cost /= math.prod(one.samples for one in self._settings(choice))
        # Memory is the same whatever else runs.
        is_timed = self._options.objective == "throughput"
        others = row.get("others_cpus", 0.0) if is_timed else 0.0
        return Measured(cost, row["start_s"], tuple(row.get("losses", ())), row["failure"], others)

    def _wait_for_quiet(self) -> None:
        """Until other programs rest; after one wait in vain, trials begin all the same, and say so."""
        end = time.monotonic() + min(_MOST_WAIT_S, _WAIT_SHARE * self._options.budget_s)
        busy = busy_cpus(_LOOK_S) if self._waits else 0.0
        if busy > BUSY:
            self._say(f"other programs keep {busy:.1f} CPUs busy: waiting")
        while busy > BUSY:
            busy = busy_cpus(_LOOK_S)
            if time.monotonic() > end:
                self._waits = False
                self._say("they still do: what is faster only then is not judged")
                return

    def close(self) -> None:
        if self.copies is not None:
            self.copies.close()

    def _settings(self, choice: Choice) -> list[Setting]:
        return [self.levers[name].setting(value) for name, value in choice.items()]

    def _run(self, choice: Choice) -> dict[str, Any]:
        settings = self._settings(choice)
        command = list(self._script.command)
        for flags in (one.packs for one in settings if one.packs is not None):
            assert self.copies is not None and self._data_at is not None
            copy = self.copies.copy(flags)
            if isinstance(copy, str):
                return _row(Trial([], failure=copy)) | {"losses": [], "run": None}
            command[self._data_at] = f"{copy}"
        command += [word for one in settings for word in one.words]
        change = {name: value for one in settings for name, value in one.change.items()}
        environment = {name: value for one in settings for name, value in one.environment.items()}
        if environment:
            change.pop("threads", None)  # the variable sets it, as the user will
        plan = Plan(
            watches=False,
            warmup_steps=5,
            warmup_s=1.0,
            steps=10,
            seconds=self._options.seconds,
            change=change,
        )
        if self._is_train and "--log-every" not in self._script.command:
            command += ["--log-every", _LOG_EVERY]
        command = ["env", *(f"{k}={v}" for k, v in environment.items()), *command]
        facts: dict[str, Any] = {"losses": [], "run": None}

        def read_run(folder: Path) -> None:
            for metrics in folder.glob(f"{RUNS}/*/metrics.jsonl"):
                lines = _first_lines(metrics)
                facts["losses"] = [line["train_loss"] for line in lines]
                facts["run"] = _run_facts(metrics.with_name("config.toml"), lines)

        script = dataclasses.replace(self._script, command=command)
        trial = script.run(plan, before_removal=read_run if self._is_train else lambda _: None)
        return _row(trial) | facts


def trial_facts(row: Mapping[str, Any]) -> TrialFacts:
    """What a row of the journal says about its run, or about the loader of a script."""
    if row.get("run"):
        return TrainFacts(**row["run"])
    loader = row.get("loader")
    if not loader:
        return None if row["failure"] else LoaderFacts(repeats=False, is_used=False)
    return LoaderFacts(loader["repeats"], tuple(loader["shared"]), loader.get("num_workers"))


def _files_in(command: Sequence[str]) -> bytes:
    """Hashes of the scripts and configs that a command names, not of the logs that each trial writes."""
    digests = b""
    for path in (Path(name) for word in command for name in (word, word.partition("=")[2])):
        with suppress(OSError):  # too long for a name
            is_script = path.suffix in _SCRIPTS or os.access(path, os.X_OK)
            if is_script and path.is_file() and path.stat().st_size < _SMALL:
                digests += hashlib.sha256(path.read_bytes()).digest()
    return digests


def _row(trial: Trial) -> dict[str, Any]:
    machine = trial.machine
    if trial.failure is not None:
        return {"step_s": None, "bytes": None, "start_s": 0.0, "failure": trial.failure}
    on_device = sum(one.get("device_bytes", 0) for one in trial.trainers)
    loader = trial.trainers[0].get("loader", {})
    return {
        "step_s": trial.step_s,
        "bytes": on_device or (0 if machine is None else machine.most_bytes),
        "start_s": max(one["until_window_s"] + one["until_first_s"] for one in trial.trainers),
        "failure": "",
        "others_cpus": 0.0 if machine is None else machine.others_cpus,
        "loader": {name: loader[name] for name in ("repeats", "shared", "num_workers")}
        if "repeats" in loader
        else None,
    }


def _first_lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:20]]
    return [row for row in rows if "train_loss" in row][:_LOSS_LINES]


def _run_facts(file: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The fields of `TrainFacts` from the run's resolved settings; None if there are none."""
    if not file.exists():
        return None
    settings = load_toml(file)
    numbers = {name: settings.get(name) for name in ("batch_size", "accumulate", "workers")}
    if not all(isinstance(number, int) for number in numbers.values()):
        return None
    # The first line includes the warm-up.
    waits = [line["data_wait"] for line in lines[1:] if "data_wait" in line]
    return numbers | {
        "data_wait": min(waits, default=None),
        "image_size": settings.get("image_size"),
    }


def tune(
    script: Script,
    levers_of: Callable[[TrialFacts], Sequence[Lever]],
    options: Options,
    *,
    is_train: bool,
    journal: Path,
    say: Callable[[str], None],
    data_at: int | None = None,
) -> SearchResult:
    """Find the best setting of the levers that `levers_of` makes of the first trial's facts, best first.

    InputError: the script makes no step without any lever.
    """
    trials = Trials(script, options, is_train=is_train, data_at=data_at, journal=journal, say=say)
    began = time.monotonic()

    def is_over(more: int) -> bool:
        used_s = time.monotonic() - began
        return used_s * (1 + more / max(trials.num_run, 1)) > options.budget_s

    search = Search(
        trials.measure,
        rounds=options.rounds,
        is_over=is_over,
        left_s=options.planned_s,
        loss_bound=options.loss_bound,
    )
    with signals_raise(), closing(trials):
        first = trials.measure({})
        if first.cost is None:
            raise InputError(first.failure)
        levers = levers_of(trials.facts)
        if isinstance(trials.facts, LoaderFacts) and trials.facts.repeats:
            say(f"workers and persistent workers are {REPEATS}")
        trials.levers = {lever.name: lever for lever in levers}
        result = search.run(levers, first=first)
        if trials.num_reused:
            file = os.path.relpath(journal)
            say(f"{trials.num_reused} trials of an earlier call were taken from {file}")
    return result


_SHARE_OF_DISK = 0.25  # of the free space; chosen


class PackedCopies:
    """Copies of the folder `data`, hidden in `parent`, each made when first needed."""

    def __init__(self, data: Path, parent: Path, *, limit_s: float) -> None:
        self._data, self._parent, self._limit_s = data, parent, limit_s
        self._folder: Path | None = None
        self._made: dict[tuple[str, ...], Path | str] = {}

    def copy(self, flags: Sequence[str]) -> Path | str:
        """The copy as DATA of `flambeau train`, or a sentence on why there is none."""
        key = tuple(flags)
        if key not in self._made:
            self._made[key] = self._pack(key)
        return self._made[key]

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _pack(self, flags: tuple[str, ...]) -> Path | str:
        if not self._fits():
            return f"a copy might take more than {_SHARE_OF_DISK:.0%} of the free disk"
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=".flambeau-tune-", dir=self._parent))
        # TFRecord keeps the names of images, so that the same ones are held out.
        file = self._folder / f"{len(self._made)}.tfrecord"
        command = [sys.executable, "-m", "flambeau", "pack", f"{self._data}", f"{file}", *flags]
        try:
            done = subprocess.run(command, capture_output=True, timeout=self._limit_s, check=False)
        except subprocess.TimeoutExpired:
            return f"packing takes more than {self._limit_s:.0f} s"
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            return f"packing failed: {said.rpartition('flambeau: ')[2]}"  # what, and what to do
        return next(path for path in (file, file.with_stem(f"{file.stem}_train")) if path.exists())

    def _fits(self) -> bool:
        most = shutil.disk_usage(self._parent).free * _SHARE_OF_DISK
        total = 0
        for file in self._data.rglob("*"):
            total += file.stat().st_size if file.is_file() else 0
            if total > most:
                return False
        return True


FIRST_LINE = "# flambeau tune"  # marks a file that may be replaced


def check_replaceable(file: Path) -> None:
    """Raise InputError for an existing file that `flambeau tune` has not written."""
    if not file.exists():
        return
    try:
        with file.open("rb") as opened:
            start = opened.read(len(FIRST_LINE))
    except OSError as error:
        raise unreadable(file, error) from error
    if start != FIRST_LINE.encode():
        what = "not of flambeau tune" if start.strip() else "empty, so it may be of anything"
        raise InputError(f"{file} is there, and {what}: name another with --write, or remove it")


def write_tuned_toml(file: Path, result: SearchResult, given: Mapping[str, Any]) -> None:
    """Write the chosen settings and those of the user's own file, `given`, whole or not at all."""
    write_file(file, f"{FIRST_LINE}\n{tuned_toml(result, given)}".encode())


def tuned_toml(result: SearchResult, given: Mapping[str, Any] | None = None) -> str:
    """The content of the file: the chosen flags and the settings in `given`."""
    values = dict(given or {})
    comments = []
    for setting in result.settings:
        values |= _values_of(setting.words)
    if variables := variables_of(result):
        comments.append(
            f"# chosen with them, and to be set by you: {variables} flambeau train ...\n"
        )
    return as_toml(values).decode() + "".join(comments)


def variables_of(result: SearchResult) -> str:
    """The chosen environment variables, as they stand before a command; no setting replaces them."""
    pairs = [pair for setting in result.settings for pair in setting.environment.items()]
    return shlex.join(f"{name}={value}" for name, value in pairs)


def _values_of(words: Sequence[str]) -> dict[str, Any]:
    """Settings by name from flags: values in the setting's type; without a value true, or false for --no-."""
    values: dict[str, Any] = {}
    for flag, word in itertools.zip_longest(words, words[1:], fillvalue="--"):
        if not flag.startswith("--"):
            continue
        name = flag.removeprefix("--").replace("-", "_")
        if word.startswith("--"):
            values[name.removeprefix("no_")] = not name.startswith("no_")
            continue
        kinds = allowed_types(FIELDS[name])
        as_number = int if int in kinds and word.isdecimal() else float if float in kinds else str
        values[name] = as_number(word)
    return values
