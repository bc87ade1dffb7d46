"""What a training loses its time to, out of one watched run."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flambeau.recipes.setup.environment import usable_cpus
from flambeau.tune.doctor.formatting import Cause, at_line, compiled_anew, line_with_source, percent
from flambeau.tune.doctor.shares import (
    PHASES,
    DataWork,
    active_share,
    by_line,
    data_work,
    device_share,
    mean_shares,
    rows_of,
    shares_of,
)
from flambeau.tune.doctor.trial import Trial

_WORTH_A_WORD = 0.03  # share of the time below which nothing is said; chosen
_LARGE = 0.12  # from which on a cause comes before the model's own work; chosen
_UNEVEN = 0.1  # share of a step by which a rank may take longer than another; chosen
_DEVICE_WAITS = 0.4  # share of a step from which on a GPU has too little to do; chosen
_START_S = 3e-6  # of Python and dispatch per operation: a step of 3171 small ones took 7.9 ms (2 CPUs, EPYC)
_MOST_OF_A_FAULT_S = 5e-6  # of the kernel's time, per page fault; 2e-6 measured (EPYC, virtual)
_SLEEP = 0.3  # share of the time of workers that use no CPU, from which on many of them are of use; chosen
_FULL = 0.9
_OWN = ("python", "")
SLOWS_ALL = ("debug mode", "threads")
_OF_HOST = (
    "read",
    "decode",
    "transform",
    "collate",
    "send",
    "pin",
    "worker start",
    "many workers",
    "sync",
    "python",
    "copy",
    "page faults",
)
_DATA_KINDS = {
    "read": "reading files",
    "decode": "decoding",
    "transform": "the transform",
    "collate": "collating",
    "send": "sending batches between processes",
    "pin": "copying into page-locked memory",
}


@dataclass(frozen=True)
class Findings:
    """What one watched run has shown.

    Attributes:
        trial: the run.
        shares: by phase, mean of all ranks.
        work: what making a batch consists of.
        causes: the largest first, but the model's own work after others that are large.
        waiting_lines: FILE:LINE of calls that wait for the device, with their share.
    """

    trial: Trial
    shares: dict[str, float]
    work: DataWork
    causes: tuple[Cause, ...]
    waiting_lines: dict[str, float]


def findings_of(trial: Trial) -> Findings:
    """Read what a watched run has recorded.

    Args:
        trial: with at least one process that made steps.
    """
    shares = mean_shares(trial)
    work = data_work(trial)
    lines = waiting_lines(trial)
    causes = [
        *_of_data(trial, shares, work),
        *_of_lines(trial, lines),
        *_of_phases(trial, shares),
        *_of_copies(trial),
        *_of_ranks(trial),
        *_of_model(trial, shares),
        *_of_debugging(trial),
        *_of_threads(trial),
        *_of_page_faults(trial),
        *_of_machine(trial),
    ]
    # What the host waits for or does while its GPU computes costs nothing.
    idle = 1 - device_share(trial)
    causes = [
        dataclasses.replace(cause, share=min(cause.share, idle))
        if cause.kind in _OF_HOST
        else cause
        for cause in causes
    ]
    slow = {cause.where for cause in causes if cause.kind == "slow rank"} - {""}
    causes = [
        cause
        for cause in causes
        if cause.share >= _WORTH_A_WORD and (cause.kind == "slow rank" or cause.where not in slow)
    ]
    found = tuple(in_order(causes))
    return Findings(trial, shares, work, found, lines)


def in_order(causes: list[Cause]) -> list[Cause]:
    """The largest first, but the model's own work after other large ones: it is what a training is for.

    A cause that makes everything else slow comes before all others, whatever its share is.
    """

    def rank(cause: Cause) -> tuple[int, float]:
        if cause.kind in SLOWS_ALL:
            group = 0
        elif cause.kind in ("model", "small steps"):
            group = 2
        else:
            group = 1 if cause.share >= _LARGE else 3
        return group, -cause.share

    return sorted(causes, key=rank)


# ---------------------------------------------------------------- one kind after the other


def _of_data(trial: Trial, shares: dict[str, float], work: DataWork) -> list[Cause]:
    wait, start = shares["data"], shares["worker start"]
    whole = wait + start
    loader = trial.trainers[0]["loader"]
    workers = loader.get("num_workers", 0) or len(trial.workers)
    if start > wait and start >= _WORTH_A_WORD:
        line = _place(loader)
        cpus = usable_cpus()
        are_many = workers > 2 * cpus and work.blocked < _SLEEP
        who = f"{workers} workers{f' on {cpus} CPUs' if are_many else ''}"
        text = f"waits {percent(whole)} of the time for {who} to start, each epoch{at_line(line)}"
        return [Cause("many workers" if are_many else "worker start", whole, line, text)]
    if not work.shares:
        return [Cause("read", whole, "", f"waits for data {percent(whole)} of the time")]
    kind = work.first
    where, _ = work.places[kind][0]
    share = percent(work.shares[kind])
    if workers:
        who = (
            f"its {workers} workers spend {share} of their work"
            if workers > 1
            else (f"its worker spends {share} of its work")
        )
    else:
        who = f"they are made in the training process, {share} of that time"
    what = f"{who} on {_DATA_KINDS[kind]}{line_with_source(where)}"
    return [Cause(kind, whole, where, f"waits for data {percent(whole)} of the time: {what}")]


def _place(facts: dict[str, Any]) -> str:
    place = facts.get("place")
    return f"{place[0]}:{place[1]}" if place else ""


def waiting_lines(trial: Trial) -> dict[str, float]:
    """Lines that make the host wait for the device, with their share of the time of the first rank.

    The time of a line is that of its timed calls, or the time for which samples of the stack show the line
    outside of the model, whichever is more.
    """
    trainer = trial.trainers[0]
    seen = by_line(rows_of(trainer), _OWN)
    found: dict[str, float] = {}
    for file, line, _, _, seconds, _ in _calls(trainer, are_copies=False):
        where = f"{file}:{line}"
        found[where] = min(1.0, found.get(where, 0.0) + seconds / trainer["step_s"])
    return {
        where: max(share, seen.get(where, 0.0) / trainer["seconds"])
        for where, share in found.items()
    }


def _calls(trainer: dict[str, Any], *, are_copies: bool) -> list[list[Any]]:
    """Of the calls that make the host wait those that copy to a device, or the others."""
    calls = trainer.get("waiting_calls", ())
    return [call for call in calls if call[2].startswith("copy to") is are_copies]


def _of_lines(trial: Trial, lines: dict[str, float]) -> list[Cause]:
    """The user's own Python between the parts of a step, and in it what waits for the device."""
    trainer = trial.trainers[0]
    found = []
    total = sum(lines.values())
    copies: dict[str, float] = defaultdict(float)  # which are causes of their own
    for file, line, _, _, seconds, _ in _calls(trainer, are_copies=True):
        copies[f"{file}:{line}"] += seconds / trainer["step_s"]
    if total >= _WORTH_A_WORD:
        where = max(lines, key=lambda line: lines[line])
        calls = sum(call[3] for call in _calls(trainer, are_copies=False))
        text = (
            f"{percent(total)} of the time goes to calls that wait for the device, "
            f"{calls:.0f} in a step, most{line_with_source(where).lstrip(',')}"
        )
        if busy := device_share(trial):
            text += f"; the GPU computes {percent(busy)} of the time"
        found.append(Cause("sync", total, where, text))
    own = {
        where: max(0.0, seconds / trainer["seconds"] - copies[where])
        for where, seconds in by_line(rows_of(trainer), _OWN).items()
        if where not in lines
    }
    share = sum(own.values())
    if own:
        where = max(own, key=lambda line: own[line])
        text = (
            f"{percent(share)} of the time is Python between the parts of a step, "
            f"{percent(own[where])}{line_with_source(where).lstrip(',')}"
        )
        found.append(Cause("python", share, where, text))
    return found


def _of_phases(trial: Trial, shares: dict[str, float]) -> list[Cause]:
    facts = trial.trainers[0]["optimizer"]
    rows = rows_of(trial.trainers[0])
    texts: dict[str, Callable[[], str]] = {
        "optimizer": lambda: (
            f"the optimizer takes {percent(shares['optimizer'])} of the time "
            f"({facts.get('name', '?')} of {facts.get('tensors', 0)} tensors"
            f"{', fused' if facts.get('fused') else ', not fused'})"
        ),
        "communication": lambda: (
            f"{percent(shares['communication'])} of the time is communication between processes"
        ),
        "evaluation": lambda: f"evaluations take {percent(shares['evaluation'])} of the time",
        "checkpoint": lambda: (
            f"saving checkpoints takes {percent(shares['checkpoint'])} of the time"
        ),
        "compile": lambda: (
            f"compiling takes {percent(shares['compile'])} of the time, long after the first step"
            f"{compiled_anew(trial.trainers[0])}: "
            "something in the model changes from step to step (TORCH_LOGS=recompiles says what)"
        ),
    }
    found = []
    if facts.get("fused"):
        del texts["optimizer"]  # nothing is to be gained
    for phase, text in texts.items():
        own = by_line(rows, (phase,))
        where = max(own, key=lambda line: own[line], default="") if phase != "optimizer" else ""
        found.append(Cause(phase, shares[phase], where, text() + at_line(where)))
    return found


def _of_copies(trial: Trial) -> list[Cause]:
    trainer = trial.trainers[0]
    found = []
    for file, line, what, _, seconds, copied in _calls(trainer, are_copies=True):
        share = min(1.0, seconds / trainer["step_s"])
        where = f"{file}:{line}"
        much = f"{what} of {copied / 2**20:.1f} MiB in a step"
        text = f"{much} takes {percent(share)} of the time{at_line(where)}"
        found.append(Cause("copy", share, where, text))
    return found


def _of_ranks(trial: Trial) -> list[Cause]:
    """The rank that the others wait for is the one that waits least, in backward and communication."""
    if len(trial.trainers) < 2:
        return []
    waits = [(one["backward"] + one["communication"]) for one in map(shares_of, trial.trainers)]
    slow, quick = waits.index(min(waits)), waits.index(max(waits))
    behind = waits[quick] - waits[slow]
    if behind < _UNEVEN:
        return []
    more = _more_of(trial.trainers[slow], trial.trainers[quick])
    rank = trial.trainers[slow]["rank"]
    text = f"the others wait for rank {rank} {percent(behind)} of the time: it does more"
    return [Cause("slow rank", behind, more, text + line_with_source(more))]


def _more_of(slow: dict[str, Any], quick: dict[str, Any]) -> str:
    """The line of code in which one rank spends more time than another."""

    def lines(process: dict[str, Any]) -> dict[str, float]:
        phases = tuple(p for p in ("", *PHASES) if p not in ("backward", "communication"))
        return by_line(rows_of(process), phases)

    of_quick = lines(quick)
    more = {where: seconds - of_quick.get(where, 0.0) for where, seconds in lines(slow).items()}
    return max(more, key=lambda where: more[where], default="")


def _of_model(trial: Trial, shares: dict[str, float]) -> list[Cause]:
    share = shares["forward"] + shares["backward"]
    trainer = trial.trainers[0]
    operations = trainer.get("operations", {})
    count = operations.get("count", 0)
    busy = device_share(trial)
    if busy:
        known = ("data", "worker start", "communication", "evaluation", "checkpoint", "compile")
        idle = 1 - active_share(trial)
        gap = idle - sum(shares[phase] for phase in known) - min(idle, shares["python"])
        if gap > _DEVICE_WAITS:
            text = (
                f"the GPU computes {percent(busy)} of the time and waits for Python to start operations "
                f"{percent(gap)} of it: larger batches, or torch.compile"
            )
            return [Cause("small steps", gap, "", text)]
        share = busy
    if not busy and count and _are_small(trainer, operations):
        whole = share + shares["optimizer"] + shares["python"]
        text = (
            f"{1000 * whole * trainer['step_s']:.2g} ms of a step are {count:.0f} operations of "
            f"{1e6 * operations['seconds'] / count:.0f} us: Python and the starts of operations take longer "
            "than the computing; larger batches, or torch.compile"
        )
        return [Cause("small steps", whole, "", text)]
    text = f"the {'GPU' if busy else 'model'} computes {percent(share)} of the time"
    bound = operations.get("memory_bound", 0.0)
    if bound > 0.3:
        text += f"; {percent(bound)} of that in operations bound by memory, such as batch norm"
    return [Cause("model", share, "", text)]


def _are_small(trainer: dict[str, Any], operations: dict[str, Any]) -> bool:
    """Whether small operations take most of the time, or their starts most of the fastest step.

    The second holds on a machine where other programs make single operations long.
    """
    fastest: float = min(trainer.get("times") or [trainer["step_s"]])
    starts_s: float = _START_S * operations["count"]
    return bool(operations["small_s"] > operations["seconds"] / 2) or starts_s > fastest / 2


def _of_debugging(trial: Trial) -> list[Cause]:
    """Its share is known only when a trial without it has run."""
    trainer = trial.trainers[0]
    if trainer["anomaly"]:
        return [Cause("debug mode", _WORTH_A_WORD, "", "autograd's anomaly detection is on")]
    if profiler_runs(trial):
        return [Cause("debug mode", _WORTH_A_WORD, "", "torch's profiler is running")]
    return []


def profiler_runs(trial: Trial) -> bool:
    """Whether the script has torch's profiler on, or was seen in it."""
    trainer = trial.trainers[0]
    in_it = sum(row.seconds for row in rows_of(trainer) if row.phase == "profiler")
    is_on = bool(trainer.get("operations", {}).get("has_other_profiler"))
    return is_on or in_it > 0.01 * trainer["seconds"]


def _of_threads(trial: Trial) -> list[Cause]:
    cpus = usable_cpus()
    of_trainers = sum(one["threads"] for one in trial.trainers)
    of_workers = sum(one.get("busy_threads", 0) for one in trial.workers)
    if of_trainers >= 2 * cpus:
        who = f"{of_trainers} threads compute"
    # One thread of a worker makes batches, one sends them, and there may be one of the user's.
    elif of_workers >= 2 * cpus and of_workers > 3 * len(trial.workers):
        who = f"{len(trial.workers)} workers compute with {of_workers} threads"
    else:
        return []
    return [Cause("threads", _WORTH_A_WORD, "", f"{who} on {cpus} CPUs, and wait for each other")]


def page_fault_share(trial: Trial) -> float:
    """Of the time of the first rank, what its threads spend in the kernel to get pages of memory."""
    trainer = trial.trainers[0]
    seconds = min(trainer.get("system_s", 0.0), _MOST_OF_A_FAULT_S * trainer.get("faults", 0))
    return float(seconds / (trainer["seconds"] * max(1, min(trainer["threads"], usable_cpus()))))


def _of_page_faults(trial: Trial) -> list[Cause]:
    share = page_fault_share(trial)
    trainer = trial.trainers[0]
    text = (
        "memory comes anew from the system in each step, as when what is freed goes back, by "
        f"{trainer.get('faults', 0) / trainer['steps']:.0f} page faults: {percent(share)} of the time"
    )
    return [Cause("page faults", share, "", text)]


def _of_machine(trial: Trial) -> list[Cause]:
    found = []
    for one in trial.trainers:
        held, limit = one.get("device_bytes", 0), one.get("device_limit_bytes", 0)
        if limit and held > _FULL * limit:
            text = (
                f"tensors of rank {one['rank']} hold {held / 2**30:.1f} of the {limit / 2**30:.1f} GiB of "
                "its device"
            )
            found.append(Cause("memory", _WORTH_A_WORD, "", text))
    machine = trial.machine
    if machine is None:
        return found
    if machine.throttled_share >= _WORTH_A_WORD:
        share = min(1.0, machine.throttled_share)
        text = f"the container's quota of CPU was used up {percent(share)} of the time"
        found.append(Cause("quota", share, "", text))
    if machine.limit_bytes and machine.most_bytes > _FULL * machine.limit_bytes:
        text = (
            f"the processes hold {machine.most_bytes / 2**30:.1f} of {machine.limit_bytes / 2**30:.1f} GiB "
            "of memory"
        )
        found.append(Cause("memory", _WORTH_A_WORD, "", text))
    if machine.shared_share > _FULL:
        text = f"/dev/shm is {percent(machine.shared_share)} full; batches of workers go through it"
        found.append(Cause("memory", _WORTH_A_WORD, "", text))
    return found
