"""What a watched process does, as a file in the trial's folder."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """Of one run of the script.

    Attributes:
        watches: sample stacks; else only time steps.
        warmup_steps, warmup_s: minimum before the timed window.
        steps, seconds: minimum of the window, at most four times the seconds.
        short_s: shorter steps are watched in slices, to cost at most 1 %.
        change: what is done differently, by name; see `changes.py`.
        learning: what the training learns from is watched in place of its time; see `learning/`.
        end: by time.time(); what was seen of learning is written before a step that would go beyond it.
        is_outside: stacks are read from outside where possible.
    """

    watches: bool = True
    warmup_steps: int = 10
    warmup_s: float = 3.0
    steps: int = 20
    seconds: float = 10.0
    short_s: float = 0.0005
    change: dict[str, Any] = dataclasses.field(default_factory=dict)
    trace: str | None = None
    learning: bool = False
    end: float = math.inf
    is_outside: bool = False

    def write(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        return cls(**json.loads((folder / "plan.json").read_text(encoding="utf-8")))


def write_whole(file: Path, content: object) -> None:
    """Write JSON so that a reader sees all of it or nothing."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(file)
