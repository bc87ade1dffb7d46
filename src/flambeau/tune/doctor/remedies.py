"""What could be changed, what it would give at most, and what it gives: measured in pairs of runs."""

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flambeau.recipes.setup.environment import native_bf16, usable_cpus
from flambeau.recipes.setup.freed_memory import KEEP_FREED, can_keep_freed
from flambeau.tune.doctor.cause_text import Cause, of_package, shown
from flambeau.tune.doctor.causes import (
    SLOWS_ALL,
    Findings,
    in_order,
    page_fault_share,
    profiler_runs,
)
from flambeau.tune.doctor.paired_test import Gain, gain_of
from flambeau.tune.doctor.trial import run_trial
from flambeau.tune.watch.plan import Plan

_MOST_WORKERS = 16
_CACHED = 8  # batches
_WORTH_TRYING = 0.04  # share of the time that a change could save; chosen
_NO_HOPE = 1.01  # a first pair below this is not tried again
_CLEAR = 1.5  # a gain that, seen in each pair, is believed without a test; chosen
_SOME = 1.1  # a mean gain below which a test refutes a cause on a busy machine, too; chosen
_FIRST_SHARE = (
    0.6  # of the time, for the first pairs; the rest is for those that have shown a gain; chosen
)


@dataclass(frozen=True)
class Remedy:
    """Something to change.

    Attributes:
        name: of it.
        how: what to write, and where.
        change: what a trial does; see `watch/changes.py`.
        predicted: times as many steps per second, from the shares alone; an upper bound where `at_most`.
        at_most: see there.
        kind: the cause that it is against.
        is_bound: it shows a limit, and nobody can write it so.
    """

    name: str
    how: str
    change: dict[str, Any]
    predicted: float
    kind: str
    at_most: bool = True
    is_bound: bool = False


@dataclass(frozen=True)
class Tried:
    """A remedy and what came of it; `gain` is None where its trial failed, for the reason in `failure`."""

    remedy: Remedy
    gain: Gain | None
    failure: str = ""


def remedies_for(findings: Findings) -> list[Remedy]:
    """What is worth a trial: first what would slow down all else, then the most promising.

    Of equals a bound is the last: time may be too short for all, and nobody can write it.

    Args:
        findings: of the watched run.
    """
    found = [
        *_for_data(findings), *_for_waits(findings), *_for_optimizer(findings),
        *_for_gradients(findings), *_for_process(findings), *_for_model(findings),
    ]  # fmt: skip
    return sorted(found, key=lambda one: (one.kind not in SLOWS_ALL, -one.predicted, one.is_bound))


def _saved(share: float) -> float:
    """How many times as fast a step is without this share of it."""
    return 1 / max(1 - share, 0.02)


def _loader_line(findings: Findings) -> str:
    place = findings.trial.trainers[0]["loader"].get("place")
    return f", {shown(f'{place[0]}:{place[1]}')}" if place else ""


def _for_data(findings: Findings) -> list[Remedy]:
    shares, work = findings.shares, findings.work
    waits, start = shares["data"], shares["worker start"]
    whole = waits + start
    loader = findings.trial.trainers[0]["loader"]
    if whole < _WORTH_TRYING or not loader:
        return []
    line = _loader_line(findings)
    workers: int = loader["num_workers"]
    found = [
        Remedy(
            "cached batches", f"no data to wait for: the most that any change of the loader can give{line}",
            {"cached": _CACHED}, _saved(whole), "data", at_most=False, is_bound=True,
        )
    ]  # fmt: skip
    if start >= _WORTH_TRYING and not loader["persistent_workers"]:
        how = f"DataLoader(persistent_workers=True){line}"
        found.append(
            Remedy(
                "persistent workers", how, {"persistent": True}, _saved(start), "worker start",
                at_most=False,
            )
        )  # fmt: skip
    for count in _other_workers(workers, findings):
        how = f"DataLoader(num_workers={count}){line}"
        kind = "few workers" if count > workers else "many workers"
        found.append(Remedy(f"workers={count}", how, {"workers": count}, _saved(whole), kind))
    if workers and waits >= _WORTH_TRYING and work.idle > 0.2:
        how = f"DataLoader(prefetch_factor=8){line}"
        found.append(Remedy("prefetch=8", how, {"prefetch": 8}, _saved(waits), "data"))
    images = work.shares.get("decode", 0) + work.shares.get("transform", 0)
    if images > 0.3 and _reads_images(findings):
        how = f"from flambeau.data.fast import fast; loader = fast(loader){line}"
        found.append(Remedy("fast(loader)", how, {"fast": True}, _saved(waits), work.first))
    if findings.trial.trainers[0]["device"] != "cpu" and not loader["pin_memory"]:
        how = f"DataLoader(pin_memory=True), and .to(device, non_blocking=True){line}"
        found.append(Remedy("pin memory", how, {"pin": True}, _saved(waits), "copy"))
    return found


def _reads_images(findings: Findings) -> bool:
    places = [where for found in findings.work.places.values() for where, _ in found]
    return bool(findings.work.shares.get("decode")) or any(
        "torchvision" in where or "PIL" in where for where in places
    )


def _other_workers(now: int, findings: Findings) -> list[int]:
    """Numbers worth a trial: as many as are needed, where CPUs are left for them or they mostly wait."""
    cpus = usable_cpus()
    whole = min(0.95, findings.shares["data"] + findings.shares["worker start"])
    needed = max(now + 1, math.ceil(max(now, 1) / (1 - whole)))
    found = []
    if findings.work.blocked > 0.3:
        found.append(min(needed, _MOST_WORKERS))
    elif now < cpus:
        found.append(min(needed, cpus))
    if now > cpus:
        found.append(cpus)
    return [count for count in dict.fromkeys(found) if count != now]


def _for_waits(findings: Findings) -> list[Remedy]:
    share = sum(findings.waiting_lines.values())
    if share < 0.02:
        return []
    lines = sorted(findings.waiting_lines, key=lambda one: -findings.waiting_lines[one])
    named = ", ".join(shown(line) for line in lines[:4])
    how = f"keep the value on the device, or ask for it every 50 steps: {named}"
    return [
        Remedy("skip waiting calls", how, {"skip_waits": lines}, _saved(share), "sync", at_most=False)
    ]  # fmt: skip


def _for_optimizer(findings: Findings) -> list[Remedy]:
    facts = findings.trial.trainers[0]["optimizer"]
    share = findings.shares["optimizer"]
    if (
        share < _WORTH_TRYING
        or not facts.get("can_fuse")
        or facts["fused"]
        or not facts["is_torchs"]
    ):
        return []
    how = f"{facts['name']}(..., fused=True)"
    return [Remedy("fused optimizer", how, {"fused": True}, _saved(share), "optimizer")]


def _for_gradients(findings: Findings) -> list[Remedy]:
    """Gradients that are filled with zeros, which nobody needs, instead of being dropped."""
    first = findings.trial.trainers[0]
    zeroed = first.get("operations", {}).get("zeroed", {})
    half = first["optimizer"].get("tensors", 0) / 2
    if zeroed.get("aten::_foreach_zero_", 0) < 1 and zeroed.get("aten::zero_", 0) < max(half, 1):
        return []
    how = "optimizer.zero_grad(), without set_to_none=False"
    return [Remedy("set_to_none", how, {"set_to_none": True}, 1.1, "optimizer")]


def _for_process(findings: Findings) -> list[Remedy]:
    trial, shares = findings.trial, findings.shares
    first, cpus = trial.trainers[0], usable_cpus()
    found = []
    if first["anomaly"]:
        how = "remove torch.autograd.set_detect_anomaly(True)"
        found.append(
            Remedy("no anomaly mode", how, {"no_anomaly": True}, 2.0, "debug mode", at_most=False)
        )
    if profiler_runs(trial):
        how = "stop torch's profiler after a few steps: torch.profiler.schedule(...)"
        found.append(
            Remedy("no profiler", how, {"no_profiler": True}, 2.0, "debug mode", at_most=False)
        )
    if shares["checkpoint"] >= _WORTH_TRYING:
        how = "save less often"
        found.append(
            Remedy("no checkpoints", how, {"no_saves": True}, _saved(shares["checkpoint"]), "checkpoint",
                   at_most=False, is_bound=True)
        )  # fmt: skip
    if (share := page_fault_share(trial)) >= _WORTH_TRYING and can_keep_freed():
        words = " ".join(f"{name}={value}" for name, value in KEEP_FREED.items())
        how = f"keep_freed_memory() of flambeau.recipes.setup.freed_memory; or {words} in the environment"
        kept, gain = {"keep_freed": True}, _saved(share)
        found.append(Remedy("keep freed memory", how, kept, gain, "page faults", at_most=False))
    ranks = max(1, len(trial.trainers))
    of_workers = max((one["process_threads"] for one in trial.workers), default=0)
    if of_workers > 4 + 2 * cpus:
        how = "torch.set_num_threads(1) in workers, which is torch's default there; cv2.setNumThreads(1)"
        change = {"worker_threads": 1}
        found.append(Remedy("one thread per worker", how, change, 1.5, "threads", at_most=False))
    if first["threads"] * ranks > cpus:
        count = max(1, cpus // ranks)
        how = f"OMP_NUM_THREADS={count}, and no torch.set_num_threads"
        found.append(
            Remedy(f"threads={count}", how, {"threads": count}, 1.5, "threads", at_most=False)
        )
    return found


def _for_model(findings: Findings) -> list[Remedy]:
    shares, first = findings.shares, findings.trial.trainers[0]
    share = shares["forward"] + shares["backward"]
    if share < 0.3:
        return []
    device, found = torch.device(first["device"]), []
    if native_bf16(device):
        how = "with torch.autocast(device.type, torch.bfloat16): around the forward pass"
        found.append(Remedy("bf16", how, {"autocast": "bfloat16"}, _saved(share / 2), "model"))
    if first["optimizer"].get("has_convolutions"):
        how = "model.to(memory_format=torch.channels_last), and the images"
        found.append(
            Remedy("channels_last", how, {"channels_last": True}, _saved(share / 4), "model")
        )
    if device.type == "cuda":
        found += _for_cuda(share, has_convolutions=bool(first["optimizer"].get("has_convolutions")))
    if shares["compile"] == 0 and (device.type == "cuda" or shutil.which("g++")):
        how = "model.compile(), or model = torch.compile(model)"
        found.append(Remedy("compile", how, {"compile": True}, _saved(share / 3), "model"))
    return found


def _for_cuda(share: float, *, has_convolutions: bool) -> list[Remedy]:
    """What a GPU of NVIDIA has besides."""
    found = [
        Remedy(
            "fp16", "torch.autocast(device.type, torch.float16) with torch.amp.GradScaler",
            {"autocast": "float16"}, _saved(share / 2), "model",
        ),
        Remedy(
            "tf32", 'torch.set_float32_matmul_precision("high")', {"tf32": True}, _saved(share / 2), "model"
        ),
    ]  # fmt: skip
    if has_convolutions:
        how = "torch.backends.cudnn.benchmark = True, where images keep their size"
        found.append(
            Remedy("cudnn.benchmark", how, {"cudnn_benchmark": True}, _saved(share / 4), "model")
        )
    return found


# ---------------------------------------------------------------- trials


def try_remedies(
    command: Sequence[str],
    remedies: Sequence[Remedy],
    plan: Plan,
    *,
    rounds: int,
    enough_s: float,
    limit_s: float,
    say: Callable[[str], None],
) -> list[Tried]:
    """Run the script with each remedy between two runs without it, in turn.

    Args:
        command: the script.
        remedies: the most promising first; those for which no time is left are not tried.
        plan: of a trial without a change.
        rounds: pairs per remedy; one that shows no gain at the first is not tried again.
        enough_s: no new trial begins after so many seconds, and no first pair of a remedy late in them.
        limit_s: of one run.
        say: takes a line on what goes on.
    """
    start = time.monotonic()
    pairs: dict[str, list[tuple[float, float]]] = {one.name: [] for one in remedies}
    failures: dict[str, str] = {}
    before = None
    for number in range(rounds):
        share = _FIRST_SHARE if number == 0 < rounds - 1 else 1.0
        # The largest gains are tried again first, for it is they that are to be sure.
        for remedy in sorted(remedies, key=lambda one: -_seen(pairs[one.name])):
            hopeless = number and _seen(pairs[remedy.name]) < _NO_HOPE
            late = time.monotonic() > start + share * enough_s
            if remedy.name in failures or hopeless or late:
                continue
            say(f"trying {remedy.name}, {number + 1} of {rounds}")
            if before is None:
                before = run_trial(command, plan, limit_s=limit_s)
            changed = dataclasses.replace(plan, change=remedy.change)
            with_it = run_trial(command, changed, limit_s=limit_s)
            after = run_trial(command, plan, limit_s=limit_s)
            if with_it.failure is not None:
                failures[remedy.name] = with_it.failure
            elif before.failure is None and after.failure is None:
                # The two runs around it: a machine that slows down, does so for both.
                base = math.sqrt(before.step_s * after.step_s)
                pairs[remedy.name].append((base, with_it.step_s))
            before = after
    return [
        _tried(remedy, pairs[remedy.name], failures.get(remedy.name, "")) for remedy in remedies
    ]


def _seen(pairs: Sequence[tuple[float, float]]) -> float:
    """The largest gain of a remedy so far; 0 where it has not been tried."""
    return max((base / with_it for base, with_it in pairs), default=0.0)


def _tried(remedy: Remedy, pairs: Sequence[tuple[float, float]], failure: str) -> Tried:
    if failure or not pairs:
        return Tried(remedy, None, failure or "no time was left")
    before, after = zip(*pairs, strict=True)
    return Tried(remedy, gain_of(before, after))


def told_by_trials(
    causes: Sequence[Cause], tried: Sequence[Tried], *, was_busy: bool = False
) -> list[Cause]:
    """Causes as the trials show them: what helps is what was missing.

    Args:
        causes: of the watched run.
        tried: what was changed.
        was_busy: other programs took CPUs, so that a single pair of runs refutes nothing. They take more from
            a script with fewer threads.
    """
    found, measured = list(causes), []
    for one in tried:
        if one.gain is None or one.remedy.is_bound or not _is_clear(one.gain):
            continue
        share, kind = 1 - 1 / one.gain.times, one.remedy.kind
        if kind in _SEEN_BY_TRIALS:
            text = next((c.text for c in found if c.kind == kind), _TEXTS.get(kind, ""))
            found = [c for c in found if c.kind != kind]
            measured.append(Cause(kind, share, "", text))
        elif kind == "few workers":
            waits = next((c for c in found if c.kind in _READERS), None)
            if waits is not None and share >= waits.share / 2:
                # The user's own line can be written anew, so it stays the cause.
                kind = kind if of_package(waits.where) else waits.kind
                text = f"{waits.text}; more workers help"
                found[found.index(waits)] = Cause(kind, waits.share, waits.where, text)
    # These slow down whatever else is seen, so they come first; and where leaving them did not help, last.
    refuted = {
        one.remedy.kind
        for one in tried
        if one.gain is not None
        and _refutes(one.gain, was_busy=was_busy)
        and one.remedy.kind in _SEEN_BY_TRIALS
    }
    rest = in_order([c for c in found if c.kind not in refuted])
    return in_order(measured) + rest + [c for c in found if c.kind in refuted]


def _is_clear(gain: Gain) -> bool:
    """Faster by the test, or in each pair by more than any noise, for a few pairs make a weak test."""
    return gain.verdict == "faster" or gain.least >= _CLEAR


def _refutes(gain: Gain, *, was_busy: bool) -> bool:
    if _is_clear(gain):
        return False
    if was_busy:  # where pairs differ much, a test says nothing
        return gain.is_tested and gain.times < _SOME
    return gain.is_tested or gain.times < _NO_HOPE


_SEEN_BY_TRIALS = ("threads", "many workers", "debug mode")
_READERS = ("read", "decode", "transform", "collate")
_TEXTS = {
    "threads": "more threads run than there are CPUs, and wait for each other",
    "many workers": "there are more workers than CPUs to run them",
}
