"""One run of a sweep's step, as the sweep describes it to a worker, and what came of it."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flambeau.experiments.space import Value

_NAME = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True)
class Job:
    """Train a run up to a number of epochs.

    Attributes:
        run: its folder, in which it goes on.
        claim: file of the claim on it.
        log: file of its process's output.
        settings: of `flambeau train`.
        command: of a script in place of them, with all words filled in.
        epochs: after which it pauses; None: at its end.
        figure: of a script without a run folder: the name in its last line of JSON.
        trust: run code that only a folder of the settings names.
    """

    run: Path
    claim: Path
    log: Path
    settings: Mapping[str, Any]
    command: tuple[str, ...] | None
    epochs: int | None
    figure: str
    trust: bool = False

    def to_line(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def of_line(cls, line: str) -> "Job":
        row = json.loads(line)
        paths = {name: Path(row[name]) for name in ("run", "claim", "log")}
        command = None if row["command"] is None else tuple(row["command"])
        return cls(**{**row, **paths, "command": command})


@dataclass(frozen=True)
class Answer:
    """What a worker says of a job.

    Attributes:
        state: done, failed, stopped (by a signal, with a checkpoint), or taken (by another process).
        value: figure of what is done.
        is_whole: trained to its end.
        reason: of a failure, in one line.
        refused: it failed before training, as for a wrong setting.
    """

    state: Literal["done", "failed", "stopped", "taken"]
    value: float | None = None
    is_whole: bool = False
    reason: str | None = None
    refused: bool = False
    seconds: float = 0.0

    def to_line(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_line(cls, line: str) -> "Answer":
        return cls(**json.loads(line))


def fill(command: tuple[str, ...], values: Mapping[str, Value | Path]) -> tuple[str, ...]:
    """The words of a command with {name} replaced by the value.

    Example:
        >>> fill(("train.py", "--lr={lr}"), {"lr": 0.01})
        ('train.py', '--lr=0.01')
    """

    def filled(word: str) -> str:
        return _NAME.sub(
            lambda name: _text(values[name[1]]) if name[1] in values else name[0], word
        )

    return tuple(map(filled, command))


def names_in(command: Iterable[str]) -> set[str]:
    """The names that a command has in braces."""
    return {name for word in command for name in _NAME.findall(word)}


def _text(value: Value | Path) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
