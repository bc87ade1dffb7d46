"""The folder of a sweep: sweep.toml says what it is, sweep.jsonl what was decided and found.

Several processes, on hosts that share the folder, append to sweep.jsonl under a lock. A kill leaves at most a
torn last line, which the next one who appends removes.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flambeau.errors import InputError, naming
from flambeau.experiments.space import Space, Value, shown
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.run.folder.json_file import json_row
from flambeau.run.options.toml_file import as_toml, load_toml

_MAX_BYTES = 2**26  # of sweep.jsonl: a sweep of 1,000 trials has 1 MB
_MAY_CHANGE = ("trials",)
_FOLDERS = ("trials", "logs", "claims")
_LOCK = ".sweep-lock"


@dataclass(frozen=True)
class DecidedStep:
    """A line of sweep.jsonl: a trial is to be trained up to a rung.

    Attributes:
        seen: from the results of how many steps it was decided.
        settings: of a new trial; None where an earlier step has them.
    """

    step: int
    trial: int
    rung: int
    seen: int
    settings: Mapping[str, Value] | None = None


@dataclass(frozen=True)
class MemberResult:
    """A line of sweep.jsonl: one run of a step, which has several with seeds or folds.

    Attributes:
        value: the figure; None if it failed.
        reason: of a failure.
        is_whole: trained to its end.
        seconds: of all starts that were not killed.
    """

    step: int
    member: int
    value: float | None
    reason: str | None
    is_whole: bool
    seconds: float


@dataclass
class Records:
    """What sweep.jsonl holds."""

    steps: list[DecidedStep] = field(default_factory=list)
    results: dict[tuple[int, int], MemberResult] = field(default_factory=dict)

    def settings(self, trial: int) -> Mapping[str, Value]:
        """Of a trial that was begun."""
        found = next(s.settings for s in self.steps if s.trial == trial and s.settings is not None)
        assert found is not None
        return found


class SweepFolder:
    """The files of a sweep, perhaps from elsewhere, checked against the command.

    Args:
        path: made if missing.
        space: a line with other settings or values is refused.
        rungs: their number.
    """

    def __init__(self, path: Path, space: Space, *, rungs: int) -> None:
        self.path = path
        self._space, self._rungs = space, rungs
        self.records = Records()
        self._read_bytes = 0

    @property
    def journal(self) -> Path:
        return self.path / "sweep.jsonl"

    def run(self, trial: int, member: str) -> Path:
        """The folder of a trial's run: `member`, such as 'seed1'; empty if it has one."""
        return self.path / "trials" / (f"{trial:04d}" + (f"-{member}" if member else ""))

    def log(self, trial: int, member: str) -> Path:
        """What the process of a run prints."""
        return self.path / "logs" / f"{self.run(trial, member).name}.txt"

    def claim(self, step: int, member: int) -> Path:
        return self.path / "claims" / f"{step:06d}-{member}"

    def begin(self, described: Mapping[str, Any]) -> None:
        """Make the folder, or check that it holds this sweep.

        Raises:
            InputError: it holds another one, or something else.
        """
        config = self.path / "sweep.toml"
        if config.exists():  # first: the journal of another sweep reads as a damaged one
            self._check_same(self._stored(config), described, config)
        elif self.path.exists():
            self._check_empty()
        for name in _FOLDERS:
            (self.path / name).mkdir(parents=True, exist_ok=True)
        with self.locked():
            if config.exists():
                self._check_same(self._stored(config), described, config)
            else:
                write_file(config, as_toml(described))

    def _check_empty(self) -> None:
        """Refuse a folder that holds something of its user; what a killed start has left is none of it."""
        if not self.path.is_dir():
            raise InputError(f"{self.path} is no folder: choose another --out")
        others = sorted({one.name for one in self.path.iterdir()} - {*_FOLDERS, _LOCK})
        if others:
            raise InputError(
                f"{self.path} holds {others[0]!r:.100}, and no sweep: choose another folder with --out"
            )

    def _check_same(
        self, stored: dict[str, Any], described: Mapping[str, Any], config: Path
    ) -> None:
        old = _flat(stored)
        new = _flat(described)
        for name in dict.fromkeys((*new, *old)):
            before = old.get(name)
            now = new.get(name)
            if before != now and name not in _MAY_CHANGE:
                written = name.removeprefix("settings ").replace("space ", "--set ")
                raise InputError(
                    f"{self.path} holds a sweep with another {written} ({_short(before)}; now "
                    f"{_short(now)}): "
                    "choose another folder with --out, or repeat its command"
                )
        if stored["trials"] != described["trials"]:
            write_file(config, as_toml(described))

    def _stored(self, config: Path) -> dict[str, Any]:
        try:
            stored = load_toml(config)
        except (OSError, ValueError) as error:
            raise InputError(f"{config} cannot be read: {error}") from error
        if not isinstance(stored.get("trials"), int):
            raise InputError(f"{config} is not of a sweep: choose another folder with --out")
        return stored

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time is here, with the newest records.

        Raises:
            InputError: no locks on this file system, or no sweep's sweep.jsonl.
        """
        import fcntl

        with (self.path / _LOCK).open("ab") as lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX)
            except OSError as error:
                raise InputError(
                    f"{self.path} is on a file system without locks ({error.strerror}), so that processes "
                    "cannot share it: choose another folder with --out"
                ) from error
            self.read()
            yield

    def read(self) -> None:
        """Add the whole lines that were written since.

        Raises:
            InputError: a line is not what a sweep writes.
        """
        if not self.journal.is_file():
            return
        with self.journal.open("rb") as file:
            file.seek(self._read_bytes)
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise InputError(
                f"{self.journal} has more than {_MAX_BYTES} bytes: a sweep writes less"
            )
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._add(line)
        self._read_bytes += len(whole)

    def append(self, *rows: DecidedStep | MemberResult) -> None:
        """Write lines to the disk; within `locked`. A result that is there already stays."""
        fd = os.open(self.journal, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        with naming(self.journal), os.fdopen(fd, "wb", buffering=0) as file:
            file.truncate(self._read_bytes)  # what a kill has torn
            file.seek(0, os.SEEK_END)
            for row in rows:
                if isinstance(row, MemberResult) and (row.step, row.member) in self.records.results:
                    continue
                values = {name: value for name, value in asdict(row).items() if value is not None}
                line = json.dumps(values).encode()
                rest = memoryview(line + b"\n")
                while rest:
                    rest = rest[file.write(rest) :]
                self._add(line)
                self._read_bytes += len(line) + 1
            os.fsync(fd)

    def _add(self, line: bytes) -> None:
        row = json_row(line) or {}
        records = self.records
        decided = self._decided(row)
        result = _result(row, len(records.steps))
        if decided is not None:
            records.steps.append(decided)
        elif result is not None:
            records.results.setdefault((result.step, result.member), result)
        else:
            number = len(records.steps) + len(records.results) + 1
            raise InputError(
                f"{self.journal}, line {number}: it is not what a sweep writes; restore the file, or begin "
                "in another folder with --out"
            )

    def _decided(self, row: Mapping[str, Any]) -> DecidedStep | None:
        """The step of a line; None if it is not one that this sweep can have decided here."""
        numbers = [row.get(name) for name in ("step", "trial", "rung", "seen")]
        if row.keys() - {"settings"} != {"step", "trial", "rung", "seen"} or not all(
            type(one) is int and 0 <= one < 2**31 for one in numbers
        ):
            return None
        step = DecidedStep(**{"settings": None, **row})
        begun = sum(one.rung == 0 for one in self.records.steps)
        settings = step.settings
        is_right = step.step == len(self.records.steps) and step.rung < self._rungs
        if step.rung:
            return step if is_right and settings is None and step.trial < begun else None
        is_ours = isinstance(settings, Mapping) and settings.keys() == self._space.keys()
        if not is_right or settings is None or not is_ours or step.trial != begun:
            return None
        holds = all(one.holds(settings[name]) for name, one in self._space.items())
        return step if holds else None


def _result(row: Mapping[str, Any], num_steps: int) -> MemberResult | None:
    row = {"value": None, "reason": None, **row}
    value, reason = row["value"], row["reason"]
    is_right = (
        row.keys() == {"step", "member", "value", "reason", "is_whole", "seconds"}
        and all(type(row[name]) is int for name in ("step", "member"))
        and 0 <= row["step"] < num_steps
        and type(row["is_whole"]) is bool
        and type(row["seconds"]) in (int, float)
        and (value is None or (type(value) in (int, float) and math.isfinite(value)))
        and isinstance(reason, str | None)
        and (value is None) == (reason is not None)
    )
    return MemberResult(**row) if is_right else None


def _short(value: object) -> str:
    """A stored value; of what a setting was searched in, the words of --set."""
    if value is None:
        return "none"
    if not isinstance(value, Mapping):
        return f"{value!r:.80}"
    if isinstance(values := value.get("values"), list):
        return f"{','.join(map(shown, values)):.80}"
    log = ":log" if value.get("log") else ""
    return f"{value.get('low')!s:.40}..{value.get('high')!s:.40}{log}"


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tables by the names of their entries, such as 'space lr'; what is None is not there."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name} {inner}": one for inner, one in value.items()}
        elif value is not None:
            flat[name] = value
    return flat
