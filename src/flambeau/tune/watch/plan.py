"""What a watched process is to do, as a file in the folder of the trial."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """Of one run of the script.

    Attributes:
        watches: stacks are looked at; else steps are timed only.
        warmup_steps, warmup_s: what comes before the window that is timed: so many steps and seconds.
        steps, seconds: of the window, so many at least; but it ends after four times the seconds.
        short_s: steps below it are watched in slices, for the watch would take more than 1 % of them.
        change: what is done differently, by name; see `changes.py`.
        trace: where a time line of some steps is written; None for none.
    """

    watches: bool = True
    warmup_steps: int = 10
    warmup_s: float = 3.0
    steps: int = 20
    seconds: float = 10.0
    short_s: float = 0.0005
    change: dict[str, Any] = dataclasses.field(default_factory=dict)
    trace: str | None = None

    def write(self, folder: Path) -> None:
        """Into the folder of a trial."""
        (folder / "plan.json").write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """From the folder of a trial."""
        return cls(**json.loads((folder / "plan.json").read_text(encoding="utf-8")))


def write_whole(file: Path, content: object) -> None:
    """As JSON; a reader sees all of it or nothing."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(file)
