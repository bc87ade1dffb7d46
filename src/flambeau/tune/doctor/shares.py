"""Where the time of a step goes, as shares of it, from what one watched run has recorded."""

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
_PLAUSIBLE = 1.2  # of what a GPU computes in a profiled step to a step of the window; chosen


@dataclass(frozen=True)
class Row:
    """Seconds that a thread was seen at one thing."""

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
        """FILE:LINE; '' where no line of the user's or of a library is known."""
        return f"{self.file}:{self.line}" if self.file else ""


def rows_of(process: Mapping[str, Any]) -> list[Row]:
    """What was seen in a trainer or worker."""
    return [Row(*row) for row in process["seen"]]


def shares_of(trainer: Mapping[str, Any]) -> dict[str, float]:
    """By phase the share of the window of one process; they add up to 1.

    Waiting for a DataLoader is clocked; the rest of the time is divided as the looks at the stack fell. Where
    no DataLoader was iterated, as by `Run` or DALI, the looks say what data take, too.
    """
    total = max(trainer["seconds"], 1e-9)
    seen: dict[str, float] = defaultdict(float)
    for row in rows_of(trainer):
        if row.thread == "main":
            seen[row.phase if row.phase in PHASES else "python"] += row.seconds
    if not sum(seen.values()):
        seen["python"] = 1.0
    is_clocked = trainer["batches"] * 2 >= trainer["steps"]
    if is_clocked:
        seen.pop("data", None)
        ends = seen.pop("worker start", 0.0)  # those that are ended by nobody's wish for a batch
        clocked = {
            "data": min(trainer["waited_s"] / total, 1.0),
            "worker start": min(max(trainer["started_s"], ends) / total, 1.0),
        }
        left = max(0.0, 1.0 - sum(clocked.values()))
    else:
        clocked = {}
        left = 1.0
    looked_at = sum(seen.values()) or 1.0
    return {
        phase: clocked.get(phase, 0.0) + left * seen.get(phase, 0.0) / looked_at for phase in PHASES
    }


def mean_shares(trial: Trial) -> dict[str, float]:
    """Of all ranks."""
    each = [shares_of(trainer) for trainer in trial.trainers]
    return {phase: sum(one[phase] for one in each) / len(each) for phase in PHASES}


def device_share(trial: Trial) -> float:
    """Share of the time in which a GPU computes, of all ranks the least; 0 without one.

    And 0 where it is not known: three steps were profiled, and if they are much longer than others, they say
    nothing of a usual one.
    """
    shares = [_on_device(trainer, "device_s") for trainer in trial.trainers]
    return 0.0 if max(shares) > _PLAUSIBLE else min(1.0, *shares)


def active_share(trial: Trial) -> float:
    """Likewise, but also with copies from and to the host and exchanges with other processes."""
    return min(1.0, *(_on_device(trainer, "active_s") for trainer in trial.trainers))


def _on_device(trainer: Mapping[str, Any], name: str) -> float:
    return float(trainer.get("operations", {}).get(name, 0.0) / trainer["step_s"])


@dataclass(frozen=True)
class DataWork:
    """What making a batch consists of, wherever that is done.

    Attributes:
        shares: by kind (read, decode, transform, collate, send, pin), of the time that is not idle.
        places: by kind, lines with their share of that kind, the largest first.
        idle: share of the readers' time with nothing to do.
        blocked: share of the time that is not idle in which no CPU is used: reading, sleeping.
    """

    shares: dict[str, float]
    places: dict[str, list[tuple[str, float]]]
    idle: float
    blocked: float

    @property
    def first(self) -> str:
        """The kind that takes most; '' if nothing was seen."""
        return max(self.shares, key=lambda kind: self.shares[kind], default="")


def data_work(trial: Trial) -> DataWork:
    """By the workers if there are any, else by the process that trains."""
    rows = [row for worker in trial.workers for row in rows_of(worker)]
    if not rows:
        rows = [r for one in trial.trainers for r in rows_of(one) if r.phase == "data"]
    busy: dict[str, float] = defaultdict(float)
    places: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    idle = blocked = 0.0
    for row in rows:
        kind = kind_of(row)
        if kind == "idle":
            idle += row.seconds if row.thread == "main" else 0.0
            continue
        busy[kind] += row.seconds
        places[kind][row.where] += row.seconds
        blocked += row.seconds if row.waits and kind != "send" else 0.0
    total = sum(busy.values()) or 1.0
    return DataWork(
        {kind: seconds / total for kind, seconds in busy.items()},
        {kind: _by_share(found) for kind, found in places.items()},
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
    return row.kind or "transform"


def by_line(rows: Iterable[Row], phases: tuple[str, ...]) -> dict[str, float]:
    """Seconds of the main thread by line, in these phases."""
    found: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.thread == "main" and row.phase in phases:
            found[row.where] += row.seconds
    return dict(found)


def _by_share(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    total = sum(seconds.values()) or 1.0
    return sorted(((where, one / total) for where, one in seconds.items()), key=lambda p: -p[1])
