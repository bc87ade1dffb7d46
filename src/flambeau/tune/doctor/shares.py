"""Where the time of a step goes, as shares, from what one watched run has recorded."""

import linecache
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flambeau.tune.doctor.trial import Trial

PHASES = (
    "data",
    "worker start",
    "forward",
    "backward",
    "optimizer",
    "communication",
    "python",
    "evaluation",
    "checkpoint",
    "compile",
)
"""What a step's time is divided into."""
_C_CALLS = (
    (
        r"\b(zlib|gzip|bz2|lzma|brotli|zstd|zstandard|snappy|blosc2?|lz4\.\w+)\.decompress\(|"
        r"\b(json|orjson|ujson|pickle|marshal|msgpack)\.(loads?|unpackb)\(|"
        r"\b(imdecode|imread|b64decode)\(",
        "decode",
    ),
    (r"\.(execute|fetchone|fetchall|read|readline|readinto|recv)\(|\b(listdir|scandir)\(", "read"),
)
"""What lines do that call C code, which has no lines of its own."""
_PLAUSIBLE = 1.2  # largest ratio of GPU time in a profiled step to the time of a step; chosen


@dataclass(frozen=True)
class Row:
    """Seconds for which samples showed a thread at one thing."""

    thread: str
    phase: str
    kind: str
    waits: str
    file: str
    line: int
    function: str
    seconds: float

    @property
    def where(self) -> str:
        """FILE:LINE; '' if no line of the user or of a library is known."""
        return f"{self.file}:{self.line}" if self.file else ""


def rows_of(process: Mapping[str, Any]) -> list[Row]:
    return [Row(*row) for row in process["seen"]]


def shares_of(trainer: Mapping[str, Any]) -> dict[str, float]:
    """The share of each phase in the window of one process; they add up to 1.

    Waiting for a DataLoader is clocked; stack samples divide the rest, or all without one, as with `Run` or
    DALI.
    """
    total = max(trainer["seconds"], 1e-9)
    sampled: dict[str, float] = defaultdict(float)
    for row in rows_of(trainer):
        if row.thread == "main":
            sampled[row.phase if row.phase in PHASES else "python"] += row.seconds
    if not sum(sampled.values()):
        sampled["python"] = 1.0
    is_clocked = trainer["batches"] * 2 >= trainer["steps"]
    if is_clocked:
        sampled.pop("data", None)
        ends = sampled.pop("worker start", 0.0)  # includes workers that end outside of any next()
        clocked = {
            "data": min(trainer["waited_s"] / total, 1.0),
            "worker start": min(max(trainer["started_s"], ends) / total, 1.0),
        }
        left = max(0.0, 1.0 - sum(clocked.values()))
    else:
        clocked = {}
        left = 1.0
    sampled_s = sum(sampled.values()) or 1.0
    return {
        phase: clocked.get(phase, 0.0) + left * sampled.get(phase, 0.0) / sampled_s
        for phase in PHASES
    }


def loader_line(loader: Mapping[str, Any]) -> str:
    """FILE:LINE where the DataLoader was made; '' if unknown."""
    place = loader.get("place")
    return f"{place[0]}:{place[1]}" if place else ""


def mean_shares(trial: Trial) -> dict[str, float]:
    each = [shares_of(trainer) for trainer in trial.trainers]
    return {phase: sum(one[phase] for one in each) / len(each) for phase in PHASES}


def device_share(trial: Trial) -> float:
    """The smallest share of the time that a GPU computes, over all ranks; 0 without a GPU.

    Also 0 if profiled steps are much longer than others.
    """
    shares = [_on_device(trainer, "device_s") for trainer in trial.trainers]
    return 0.0 if max(shares) > _PLAUSIBLE else min(1.0, *shares)


def active_share(trial: Trial) -> float:
    """Like `device_share`, but with copies from and to the host and exchanges with other processes."""
    return min(1.0, *(_on_device(trainer, "active_s") for trainer in trial.trainers))


def _on_device(trainer: Mapping[str, Any], name: str) -> float:
    return float(trainer.get("operations", {}).get(name, 0.0) / trainer["step_s"])


@dataclass(frozen=True)
class DataWork:
    """What making a batch consists of.

    Attributes:
        shares: by kind (read, decode, transform, collate, send, pin), of the time that is not idle.
        lines: by kind, lines with their share of it, the largest first.
        idle: share of the readers' time.
        blocked: share of the other time without CPU: reading, sleeping.
    """

    shares: dict[str, float]
    lines: dict[str, list[tuple[str, float]]]
    idle: float
    blocked: float

    @property
    def first(self) -> str:
        """The kind that takes most; '' if nothing was sampled."""
        return max(self.shares, key=lambda kind: self.shares[kind], default="")


def data_work(trial: Trial) -> DataWork:
    """From the samples of the workers if there are any, else of the process that trains."""
    rows = [row for worker in trial.workers for row in rows_of(worker)]
    if not rows:
        rows = [r for one in trial.trainers for r in rows_of(one) if r.phase == "data"]
    busy: dict[str, float] = defaultdict(float)
    lines: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    idle = blocked = 0.0
    for row in rows:
        kind = kind_of(row)
        if kind == "idle":
            idle += row.seconds if row.thread == "main" else 0.0
            continue
        busy[kind] += row.seconds
        lines[kind][row.where] += row.seconds
        blocked += row.seconds if row.waits and kind != "send" else 0.0
    total = sum(busy.values()) or 1.0
    return DataWork(
        {kind: seconds / total for kind, seconds in busy.items()},
        {kind: _by_share(seconds) for kind, seconds in lines.items()},
        idle / (idle + total),
        blocked / total,
    )


def kind_of(row: Row) -> str:
    """The kind of work on data; what no rule knows is the data set's own code, a transform."""
    if row.kind in ("idle", "send", "pin", "collate"):
        return row.kind
    if row.waits in ("file", "message") or (
        row.kind in ("decode", "read") and row.waits == "sleep"
    ):
        return "read"
    text = "" if row.kind else linecache.getline(row.file, row.line)
    called = (kind for pattern, kind in _C_CALLS if re.search(pattern, text))
    return row.kind or next(called, "transform")


def by_line(rows: Iterable[Row], phases: tuple[str, ...]) -> dict[str, float]:
    """Seconds of the main thread by line."""
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.thread == "main" and row.phase in phases:
            seconds[row.where] += row.seconds
    return dict(seconds)


def _by_share(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    total = sum(seconds.values()) or 1.0
    return sorted(((where, one / total) for where, one in seconds.items()), key=lambda p: -p[1])
