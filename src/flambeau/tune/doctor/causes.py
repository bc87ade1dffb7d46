"""What slows a training down, computed from what one watched run has recorded."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flambeau.recipes.setup.environment import usable_cpus
from flambeau.tune.doctor.formatting import Cause, at_line, compiled_anew, line_with_source, percent
from flambeau.tune.doctor.outside_sampler import COMPANION, PRODUCER
from flambeau.tune.doctor.script_statements import computes_what_it_asks_for
from flambeau.tune.doctor.shares import (
    PHASES,
    DataWork,
    active_share,
    by_line,
    data_work,
    device_share,
    loader_line,
    mean_shares,
    rows_of,
    shares_of,
)
from flambeau.tune.doctor.trial import Trial

_MIN_SHARE = 0.03  # causes with a smaller share of the time are not reported; chosen
_LARGE = 0.12  # causes with a larger share come before the model's own work; chosen
_UNEVEN = 0.1  # share of a step by which a rank may take longer than another; chosen
_MANY_OPERATIONS = 2000  # in a step; beyond them a line that makes most is taken for a loop; chosen
_DEVICE_WAITS = (
    0.4  # share of a step that a GPU may wait for Python before it counts as idle; chosen
)
_START_S = 3e-6  # Python and dispatch per operation: 3171 small ones took 7.9 ms (2 CPUs, EPYC)
_UNKNOWN = 4  # times as long as known: Python of modules, and slower CPUs than that one; chosen
_MAX_FAULT_S = 5e-6  # upper bound of kernel time per page fault; 2e-6 measured (EPYC, virtual)
_SLEEP = (
    0.3  # share of workers' time without CPU above which more workers than CPUs make sense; chosen
)
MOSTLY = 0.5  # of a line's time that calls must take, so that they stand for all of it; chosen
_FULL = 0.9
_PYTHON_PHASES = ("python", "")
SLOWS_ALL = ("debug mode", "threads")
FASTER_ON_ONE = 1.3
"""Times as fast on one thread, from which threads that wait for a CPU are a cause; chosen."""
_DATA_KINDS = {
    "read": "reading files",
    "decode": "decoding",
    "transform": "the transform",
    "collate": "collating",
    "send": "sending batches between processes",
    "pin": "copying into page-locked memory",
}
_HOST_KINDS = {
    "worker start",
    "many workers",
    "sync",
    "python",
    "copy",
    "page faults",
    *_DATA_KINDS,
}


@dataclass(frozen=True)
class Findings:
    """What one watched run has shown.

    Attributes:
        shares: by phase, the mean of all ranks.
        waiting_lines: FILE:LINE of calls that wait for the device, with their share of the time.
    """

    trial: Trial
    shares: dict[str, float]
    work: DataWork
    causes: tuple[Cause, ...]
    waiting_lines: dict[str, float]


def findings_of(trial: Trial) -> Findings:
    """The causes of lost time in a watched run, in which at least one process made steps."""
    shares = mean_shares(trial)
    work = data_work(trial)
    lines = waiting_lines(trial)
    causes = [
        *_data_causes(trial, shares, work),
        *_line_causes(trial, lines),
        *_phase_causes(trial, shares),
        *_copy_causes(trial),
        *_rank_causes(trial),
        *_model_causes(trial, shares),
        *_debug_causes(trial),
        *_thread_causes(trial),
        *_companion_causes(trial, shares),
        *_page_fault_causes(trial),
        *_machine_causes(trial),
    ]
    # What the host does or waits for while its GPU computes costs nothing.
    idle = 1 - device_share(trial)
    causes = [
        dataclasses.replace(cause, share=min(cause.share, idle))
        if cause.kind in _HOST_KINDS
        else cause
        for cause in causes
    ]
    slow = {cause.where for cause in causes if cause.kind == "slow rank"} - {""}
    causes = [
        cause
        for cause in causes
        if cause.share >= _MIN_SHARE and (cause.kind == "slow rank" or cause.where not in slow)
    ]
    return Findings(trial, shares, work, tuple(in_order(causes)), lines)


def in_order(causes: list[Cause]) -> list[Cause]:
    """The largest first, but the model's own work after other large causes.

    What slows down everything comes before all.
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


def _data_causes(trial: Trial, shares: dict[str, float], work: DataWork) -> Iterator[Cause]:
    wait, start = shares["data"], shares["worker start"]
    whole = wait + start
    loader = trial.trainers[0]["loader"]
    workers = loader.get("num_workers", 0) or len(trial.workers)
    if start > wait and start >= _MIN_SHARE:
        line = loader_line(loader)
        cpus = usable_cpus()
        are_many = workers > 2 * cpus and work.blocked < _SLEEP
        who = f"{workers} workers{f' on {cpus} CPUs' if are_many else ''}"
        text = f"waits {percent(whole)} of the time for {who} to start, each epoch{at_line(line)}"
        if loader.get("is_made_anew"):
            text += ", where the DataLoader is made anew: make it once, before the epochs"
        yield Cause("many workers" if are_many else "worker start", whole, line, text)
        return
    if not work.shares:
        lines = by_line(rows_of(trial.trainers[0]), ("data",))
        where = max(lines, key=lines.__getitem__, default="")
        text = f"waits for data {percent(whole)} of the time{line_with_source(where)}"
        yield Cause("read", whole, where, text)
        return
    kind = work.first
    where, _ = work.lines[kind][0]
    share = percent(work.shares[kind])
    if workers:
        who = f"its {workers} workers spend {share} of their work"
        if workers == 1:
            who = f"its worker spends {share} of its work"
    elif any(row.thread == PRODUCER for row in rows_of(trial.trainers[0])):
        who = f"they are made by a thread of the script, which spends {share} of its work"
    else:
        who = f"they are made in the training process, {share} of that time"
    what = f"{who} on {_DATA_KINDS[kind]}{line_with_source(where)}"
    yield Cause(kind, whole, where, f"waits for data {percent(whole)} of the time: {what}")


def waiting_lines(trial: Trial) -> dict[str, float]:
    """Lines that make the host wait for the device, with their share of the first rank's time.

    A line counts by its timed calls, or stack samples outside of the model, if longer and it computes what it
    asks for.
    """
    trainer = trial.trainers[0]
    sampled = by_line(rows_of(trainer), _PYTHON_PHASES)
    lines = timed_waits(trial)
    for where, share in lines.items():
        whole = sampled.get(where, 0.0) / trainer["seconds"]
        if share > MOSTLY * whole or computes_what_it_asks_for(where):
            lines[where] = max(share, whole)
    return lines


def timed_waits(trial: Trial) -> dict[str, float]:
    """Shares of the time in those calls alone, without what else their lines do."""
    trainer = trial.trainers[0]
    timed: dict[str, float] = {}
    for file, line, _, _, seconds, _ in _calls(trainer, are_copies=False):
        where = f"{file}:{line}"
        timed[where] = min(1.0, timed.get(where, 0.0) + seconds / trainer["step_s"])
    return timed


def _calls(trainer: dict[str, Any], *, are_copies: bool) -> list[list[Any]]:
    """Calls that make the host wait: those that copy to a device, or all others."""
    calls = trainer.get("waiting_calls", ())
    return [call for call in calls if call[2].startswith("copy to") is are_copies]


def _line_causes(trial: Trial, lines: dict[str, float]) -> Iterator[Cause]:
    """The user's Python between the parts of a step; calls in it that wait for the device come separately."""
    trainer = trial.trainers[0]
    total = sum(lines.values())
    apart: dict[str, float] = defaultdict(float, lines)  # they are separate causes
    for file, line, _, _, seconds, _ in _calls(trainer, are_copies=True):
        apart[f"{file}:{line}"] += seconds / trainer["step_s"]
    if total >= _MIN_SHARE:
        where = max(lines, key=lines.__getitem__)
        calls = sum(call[3] for call in _calls(trainer, are_copies=False))
        what = "calls that wait for the device"
        if trainer["device"] == "cpu":
            what = "lines that ask tensors for their values, such as .item()"
        text = (
            f"{percent(total)} of the time goes to {what}, "
            f"{calls:.0f} in a step, most{line_with_source(where).lstrip(',')}"
        )
        if busy := device_share(trial):
            text += f"; the GPU computes {percent(busy)} of the time"
        yield Cause("sync", total, where, text)
    python = {
        where: max(0.0, seconds / trainer["seconds"] - apart[where])
        for where, seconds in by_line(rows_of(trainer), _PYTHON_PHASES).items()
    }
    if python:
        share = sum(python.values())
        where = max(python, key=python.__getitem__)
        text = (
            f"{percent(share)} of the time is Python between the parts of a step, "
            f"{percent(python[where])}{line_with_source(where).lstrip(',')}"
        )
        yield Cause("python", share, where, text)


def _phase_causes(trial: Trial, shares: dict[str, float]) -> Iterator[Cause]:
    facts = trial.trainers[0]["optimizer"]
    rows = rows_of(trial.trainers[0])
    share = {phase: percent(shares[phase]) for phase in PHASES}
    texts = {
        "communication": f"{share['communication']} of the time is communication between processes",
        "evaluation": f"evaluations take {share['evaluation']} of the time",
        "checkpoint": f"saving checkpoints takes {share['checkpoint']} of the time",
        "compile": (
            f"compiling takes {share['compile']} of the time, long after the first step"
            f"{compiled_anew(trial.trainers[0])}: "
            "something in the model changes from step to step (TORCH_LOGS=recompiles says what)"
        ),
    }
    if not facts.get("fused"):  # a fused one cannot become faster
        is_torchs = facts.get("is_torchs", True)
        text = (
            f"the optimizer takes {share['optimizer']} of the time "
            f"({facts.get('name', '?')} of {facts.get('tensors', 0)} tensors"
            f"{', not fused' * bool(is_torchs and facts.get('can_fuse'))})"
        )
        lines = {} if is_torchs else by_line(rows, ("optimizer",))
        where = max(lines, key=lines.__getitem__, default="")
        yield Cause("optimizer", shares["optimizer"], where, text + line_with_source(where))
    for phase, text in texts.items():
        lines = by_line(rows, (phase,))
        where = max(lines, key=lines.__getitem__, default="")
        yield Cause(phase, shares[phase], where, text + at_line(where))


def _copy_causes(trial: Trial) -> Iterator[Cause]:
    trainer = trial.trainers[0]
    for file, line, what, _, seconds, copied in _calls(trainer, are_copies=True):
        share = min(1.0, seconds / trainer["step_s"])
        where = f"{file}:{line}"
        much = f"{what} of {copied / 2**20:.1f} MiB in a step"
        text = f"{much} takes {percent(share)} of the time{at_line(where)}"
        yield Cause("copy", share, where, text)


def _rank_causes(trial: Trial) -> Iterator[Cause]:
    """The slow rank is the one that itself waits least, in backward and communication."""
    if len(trial.trainers) < 2:
        return
    waits = [one["backward"] + one["communication"] for one in map(shares_of, trial.trainers)]
    slow, quick = waits.index(min(waits)), waits.index(max(waits))
    behind = waits[quick] - waits[slow]
    if behind < _UNEVEN:
        return
    more = _line_of_more_work(trial.trainers[slow], trial.trainers[quick])
    rank = trial.trainers[slow]["rank"]
    text = f"the others wait for rank {rank} {percent(behind)} of the time: it does more"
    yield Cause("slow rank", behind, more, text + line_with_source(more))


def _line_of_more_work(slow: dict[str, Any], quick: dict[str, Any]) -> str:
    """FILE:LINE in which the slow rank spends most time beyond that of the quick one."""
    phases = tuple(p for p in ("", *PHASES) if p not in ("backward", "communication"))
    usual = by_line(rows_of(quick), phases)
    more = by_line(rows_of(slow), phases)
    more = {where: seconds - usual.get(where, 0.0) for where, seconds in more.items()}
    return max(more, key=more.__getitem__, default="")


def _model_causes(trial: Trial, shares: dict[str, float]) -> Iterator[Cause]:
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
            yield Cause("small steps", gap, "", text)
            return
        share = busy
    are_small = bool(not busy and count and _are_small(trainer, operations))
    around = max(0.0, shares["python"] - _elsewhere(trainer, operations)) if are_small else 0.0
    whole = share + shares["optimizer"] + around if are_small else share
    lines = by_line(rows_of(trainer), ("forward",))
    where = max(lines, key=lines.__getitem__, default="")
    # The kernels of a compiled model are none of torch's operations.
    is_at_line = lines.get(where, 0.0) > share * trainer["seconds"] / 2 and not trainer["graphs"]
    is_known = not busy and count and (are_small or is_at_line)
    of_line = whole if are_small else lines.get(where, 0.0) / trainer["seconds"]
    if is_known and not _do_fit(trainer, operations, of_line, are_small=are_small):
        text = (
            f"the model takes {percent(share)} of the time, and torch's operations only "
            f"{percent(min(share, operations['seconds'] / trainer['step_s']))}: the rest is Python or "
            f"other code in it{line_with_source(where)}"
        )
        yield Cause("python", share, where, text)
        return
    if are_small:
        is_loop = count > _MANY_OPERATIONS and lines.get(where, 0.0) > sum(lines.values()) / 2
        remedy = (
            "whole tensors in place of a loop over their parts" if is_loop else "larger batches"
        )
        most = where if is_loop else ""
        text = (
            f"{1000 * whole * trainer['step_s']:.2g} ms of a step are {count:.0f} operations of "
            f"{1e6 * operations['seconds'] / count:.0f} us{line_with_source(most)}: Python and the starts of "
            f"operations take longer than the computing; {remedy}, or torch.compile"
        )
        yield Cause("small steps", whole, most, text)
        return
    text = f"the {'GPU' if busy else 'model'} computes {percent(share)} of the time"
    bound = operations.get("memory_bound", 0.0)
    if bound > 0.3:
        text += f"; {percent(bound)} of that in operations bound by memory, such as batch norm"
    yield Cause("model", share, "", text)


def _elsewhere(trainer: dict[str, Any], operations: dict[str, Any]) -> float:
    """Share of the time in lines between the parts of a step, each too long for the operations of a step.

    Such a line is other code, such as a query of a database, and not the Python around small operations.
    """
    known_s = operations["seconds"] + _START_S * operations["count"]
    seconds = by_line(rows_of(trainer), ("", "python")).values()
    longest = 2 * known_s * trainer["steps"]
    return float(sum(one for one in seconds if one > longest) / trainer["seconds"])


def _do_fit(
    trainer: dict[str, Any], operations: dict[str, Any], share: float, *, are_small: bool
) -> bool:
    """Whether the operations and their starts are about as long as this share of an undisturbed step."""
    fastest: float = min(trainer.get("times") or [trainer["step_s"]])
    starts_s = _START_S * operations["count"]
    times = (_UNKNOWN, _UNKNOWN) if are_small else (2, 1)
    known_s: float = times[0] * operations["seconds"] + times[1] * starts_s
    return bool(known_s >= share * min(fastest, trainer["step_s"]))


def _are_small(trainer: dict[str, Any], operations: dict[str, Any]) -> bool:
    """Whether small operations take most of the time, or starting them takes most of the fastest step.

    The second test also works where other programs interrupt operations and make them long.
    """
    fastest: float = min(trainer.get("times") or [trainer["step_s"]])
    starts_s: float = _START_S * operations["count"]
    return bool(operations["small_s"] > operations["seconds"] / 2) or starts_s > fastest / 2


def _debug_causes(trial: Trial) -> Iterator[Cause]:
    """Their share is known only after a trial without the debug mode."""
    trainer = trial.trainers[0]
    if tracer := trainer.get("tracer"):
        text = f"Python calls {tracer} at each line or call, as sys.settrace or sys.setprofile asks for"
        yield Cause("debug mode", _MIN_SHARE, "", text)
        return
    if trainer.get("traces_memory"):
        text = "tracemalloc records where each object of Python is made"
        yield Cause("debug mode", _MIN_SHARE, "", text)
        return
    if trainer["anomaly"]:
        text = "autograd's anomaly detection is on; flambeau lint rule FLB602"
        yield Cause("debug mode", _MIN_SHARE, "", text)
        return
    if profiler_runs(trial):
        yield Cause("debug mode", _MIN_SHARE, "", "torch's profiler is running")
        return


def profiler_runs(trial: Trial) -> bool:
    """Whether torch's profiler is on in the script, or stack samples show it."""
    trainer = trial.trainers[0]
    in_it = sum(row.seconds for row in rows_of(trainer) if row.phase == "profiler")
    is_on = bool(trainer.get("operations", {}).get("has_other_profiler"))
    return is_on or in_it > 0.01 * trainer["seconds"]


def gain_of_one_thread(trial: Trial) -> float:
    """How many times as fast a step was on one thread, while other programs ran; 1 if not tried."""
    first = trial.trainers[0]
    return float(first["step_s"] / first.get("one_thread_step_s", first["step_s"]))


def _thread_causes(trial: Trial) -> Iterator[Cause]:
    cpus = usable_cpus()
    gain = gain_of_one_thread(trial)
    if gain >= FASTER_ON_ONE:
        others = 0.0 if trial.machine is None else trial.machine.others_cpus
        text = (
            f"other programs keep {others:.1f} CPUs busy, and torch's {trial.trainers[0]['threads']} "
            f"threads wait for each other: a step was {gain:.1f} times as fast on one"
        )
        yield Cause("threads", 1 - 1 / gain, "", text)
        return
    trainer_threads = sum(one["threads"] for one in trial.trainers)
    worker_threads = sum(one.get("busy_threads", 0) for one in trial.workers)
    if trainer_threads >= 2 * cpus:
        who = f"{trainer_threads} threads compute"
    # A worker has one thread that makes batches, one that sends them, and perhaps one of the user's.
    elif worker_threads >= 2 * cpus and worker_threads > 3 * len(trial.workers):
        who = f"{len(trial.workers)} workers compute with {worker_threads} threads"
    else:
        return
    yield Cause(
        "threads", _MIN_SHARE, "", f"{who} on {cpus} CPU{'s' * (cpus > 1)}, and wait for each other"
    )


def page_fault_share(trial: Trial) -> float:
    """Share of the first rank's time that its threads spend in the kernel for pages of memory."""
    trainer = trial.trainers[0]
    seconds = min(trainer.get("system_s", 0.0), _MAX_FAULT_S * trainer.get("faults", 0))
    return float(seconds / (trainer["seconds"] * max(1, min(trainer["threads"], usable_cpus()))))


def _companion_causes(trial: Trial, shares: dict[str, float]) -> Iterator[Cause]:
    """A thread of the script that computes in Python, so that the training waits for Python's lock."""
    trainer = trial.trainers[0]
    runs = dict(trainer.get("runs", ()))
    lines: dict[str, float] = defaultdict(float)
    others = {row.thread for row in rows_of(trainer) if row.thread.startswith(COMPANION)}
    for row in rows_of(trainer):
        if row.thread in others:
            lines[row.where] += row.seconds
    if not lines:
        return
    computes = sum(runs[int(thread.removeprefix(COMPANION))] for thread in others)
    waits = 1 - runs.get(trainer["thread"], 0.0) - shares["data"] - shares["communication"]
    share = min(waits, computes)
    where = max(lines, key=lines.__getitem__)
    text = (
        "another thread of the script computes, and the training waits for Python's lock "
        f"{percent(share)} of the time{line_with_source(where)}"
    )
    yield Cause("python", share, where, text)


def _page_fault_causes(trial: Trial) -> Iterator[Cause]:
    share = page_fault_share(trial)
    trainer = trial.trainers[0]
    text = (
        "each step requests memory from the system, to which freed memory returns: "
        f"{trainer.get('faults', 0) / trainer['steps']:.0f} page faults, {percent(share)} of the time"
    )
    yield Cause("page faults", share, "", text)


def _machine_causes(trial: Trial) -> Iterator[Cause]:
    for one in trial.trainers:
        held, limit = one.get("device_bytes", 0), one.get("device_limit_bytes", 0)
        if limit and held > _FULL * limit:
            text = (
                f"tensors of rank {one['rank']} hold {held / 2**30:.1f} of the {limit / 2**30:.1f} GiB of "
                "its device"
            )
            yield Cause("memory", _MIN_SHARE, "", text)
    machine = trial.machine
    if machine is None:
        return
    if machine.throttled_share >= _MIN_SHARE:
        share = min(1.0, machine.throttled_share)
        text = f"the container's quota of CPU was used up {percent(share)} of the time"
        yield Cause("quota", share, "", text)
    if machine.limit_bytes and machine.most_bytes > _FULL * machine.limit_bytes:
        text = (
            f"the processes hold {machine.most_bytes / 2**30:.1f} of {machine.limit_bytes / 2**30:.1f} GiB "
            "of memory"
        )
        yield Cause("memory", _MIN_SHARE, "", text)
    if machine.shared_share > _FULL:
        text = f"/dev/shm is {percent(machine.shared_share)} full; batches of workers go through it"
        yield Cause("memory", _MIN_SHARE, "", text)
