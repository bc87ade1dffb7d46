"""What could be changed, and how much faster that could make a step."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flambeau.recipes.setup.environment import native_bf16, usable_cpus
from flambeau.recipes.setup.freed_memory import KEEP_FREED, can_keep_freed
from flambeau.tune.doctor.causes import (
    FASTER_ON_ONE,
    MOSTLY,
    SLOWS_ALL,
    Findings,
    gain_of_one_thread,
    page_fault_share,
    profiler_runs,
    timed_waits,
)
from flambeau.tune.doctor.formatting import shown
from flambeau.tune.doctor.shares import device_share, loader_line

_MAX_WORKERS = 16
_CACHED = 8  # batches
_OR_TENSORS = ", or batches of tensors, which go through shared memory"
_WORTH_TRYING = 0.04  # changes that could save a smaller share of the time are not tried; chosen

LINES_STAY = (
    "not tried: only the calls can be left out from outside, not what else these lines compute"
)
"""Why waiting calls are not left out in a trial; what is predicted comes from the profile."""
REPEATS = "not tried: the data set never asks get_worker_info for a share, so each worker gives every sample"
"""Why other numbers of workers are not tried: they would make it another training."""


@dataclass(frozen=True)
class Remedy:
    """Something to change.

    Attributes:
        how: what to write, and where.
        change: what a trial does differently; see `watch/changes.py`.
        predicted: ratio of steps per second by shares; an upper bound if `at_most`.
        is_bound: it shows a limit, and no user can write it.
        refused: why it is not tried although faster.
    """

    name: str
    how: str
    change: dict[str, Any]
    predicted: float
    kind: str
    at_most: bool = True
    is_bound: bool = False
    refused: str = ""


def remedies_for(findings: Findings) -> list[Remedy]:
    """First remedies against what slows down all else, then the most promising; bounds after equals."""
    remedies = [
        *_for_data(findings),
        *_for_waits(findings),
        *_for_optimizer(findings),
        *_for_gradients(findings),
        *_for_process(findings),
        *_for_model(findings),
    ]
    return sorted(
        remedies, key=lambda one: (one.kind not in SLOWS_ALL, -one.predicted, one.is_bound)
    )


def _idle(findings: Findings) -> float:
    """The largest share of the host's time that can be saved, as a GPU may compute meanwhile."""
    return 1 - device_share(findings.trial)


def _saved(share: float) -> float:
    """How many times as fast a step is without this share of it."""
    return 1 / max(1 - share, 0.02)


def _loader_line(findings: Findings) -> str:
    """', FILE:LINE'; '' if unknown."""
    where = loader_line(findings.trial.trainers[0]["loader"])
    return f", {shown(where)}" if where else ""


def _for_data(findings: Findings) -> Iterator[Remedy]:
    shares, work = findings.shares, findings.work
    idle = _idle(findings)
    waits, start = min(shares["data"], idle), min(shares["worker start"], idle)
    whole = min(waits + start, idle)
    loader = findings.trial.trainers[0]["loader"]
    if whole < _WORTH_TRYING or not loader:
        return
    line = _loader_line(findings)
    workers: int = loader["num_workers"]
    # Neither batches in memory nor more of them ahead spare the start of workers that are made anew.
    start_stays = loader.get("is_made_anew") and start > waits
    if not start_stays:
        yield _cached(line, whole)
    yield from _for_workers(findings, whole=whole, start=start)
    if workers and waits >= _WORTH_TRYING and work.idle > 0.2 and not start_stays:
        how = f"DataLoader(prefetch_factor=8){line}"
        yield Remedy("prefetch=8", how, {"prefetch": 8}, _saved(waits), "data")
    images = work.shares.get("decode", 0) + work.shares.get("transform", 0)
    if images > 0.3 and _reads_images(findings):
        how = f"from flambeau import fast; loader = fast(loader){line}"
        yield Remedy("fast(loader)", how, {"fast": True}, _saved(waits), work.first)
    if findings.trial.trainers[0]["device"] != "cpu" and not loader["pin_memory"]:
        how = f"DataLoader(pin_memory=True), and .to(device, non_blocking=True){line}"
        yield Remedy("pin memory", how, {"pin": True}, _saved(waits), "copy")


def _cached(line: str, whole: float) -> Remedy:
    """The bound of all changes of the loader."""
    return Remedy(
        "cached batches",
        f"no data to wait for: the most that any change of the loader can give{line}",
        {"cached": _CACHED},
        _saved(whole),
        "data",
        at_most=False,
        is_bound=True,
    )


def _for_workers(findings: Findings, *, whole: float, start: float) -> Iterator[Remedy]:
    """Other numbers of workers, and persistent ones, for a data set that splits its samples among them."""
    loader = findings.trial.trainers[0]["loader"]
    line = _loader_line(findings)
    workers: int = loader["num_workers"]
    refused = REPEATS if loader.get("repeats") else ""
    is_anew = bool(loader.get("is_made_anew"))
    if start >= _WORTH_TRYING and is_anew:
        how = f"make the DataLoader once, before the epochs, with persistent_workers=True{line}"
        once = {"once": True, "persistent": True}
        yield Remedy("one loader", how, once, _saved(start), "worker start", at_most=False)
    elif start >= _WORTH_TRYING and not loader["persistent_workers"] and not refused:
        how = f"DataLoader(persistent_workers=True){line}"
        stay = {"persistent": True}
        gain = _saved(start)
        yield Remedy("persistent workers", how, stay, gain, "worker start", at_most=False)
    for count in _other_workers(workers, findings):
        how = f"DataLoader(num_workers={count}){'' if count else _OR_TENSORS}{line}"
        kind = "few workers" if count > workers else "many workers" if count else "send"
        change = {"workers": count, "shared": loader.get("shared", [])}
        yield Remedy(f"workers={count}", how, change, _saved(whole), kind, refused=refused)


def _reads_images(findings: Findings) -> bool:
    lines = [where for lines in findings.work.lines.values() for where, _ in lines]
    return bool(findings.work.shares.get("decode")) or any(
        "torchvision" in where or "PIL" in where for where in lines
    )


def _other_workers(now: int, findings: Findings) -> list[int]:
    """Numbers worth a trial: as many as needed, if CPUs are left or workers wait; 0 if they mostly send."""
    cpus = usable_cpus()
    waits, start = findings.shares["data"], findings.shares["worker start"]
    if findings.trial.trainers[0]["loader"].get("is_made_anew") and start > waits:
        return []  # more of them would take longer to start
    whole = min(0.95, waits + start)
    needed = max(now + 1, math.ceil(max(now, 1) / (1 - whole)))
    counts = []
    if findings.work.blocked > 0.3:
        counts.append(min(needed, _MAX_WORKERS))
    elif now < cpus:
        counts.append(min(needed, cpus))
    if now > cpus:
        counts.append(cpus)
    if now and findings.work.shares.get("send", 0) > 0.3:
        counts.append(0)
    return [count for count in dict.fromkeys(counts) if count != now]


def _for_waits(findings: Findings) -> Iterator[Remedy]:
    share = min(sum(findings.waiting_lines.values()), _idle(findings))
    if share < 0.02:
        return
    lines = sorted(findings.waiting_lines, key=lambda one: -findings.waiting_lines[one])
    named = ", ".join(shown(line) for line in lines[:4])
    how = f"keep the value on the device, or ask for it every 50 steps: {named}"
    change = {"skip_waits": lines}
    # A trial leaves out the calls; what a check such as torch.isnan(x).any() computes before stays.
    calls = sum(timed_waits(findings.trial).values())
    refused = "" if calls > MOSTLY * share else LINES_STAY
    yield Remedy(
        "skip waiting calls", how, change, _saved(share), "sync", at_most=False, refused=refused
    )


def _for_optimizer(findings: Findings) -> Iterator[Remedy]:
    facts = findings.trial.trainers[0]["optimizer"]
    share = findings.shares["optimizer"]
    can_fuse = facts.get("can_fuse") and not facts["fused"] and facts["is_torchs"]
    if share < _WORTH_TRYING or not can_fuse:
        return
    how = f"{facts['name']}(..., fused=True)"
    yield Remedy("fused optimizer", how, {"fused": True}, _saved(share), "optimizer")


def _for_gradients(findings: Findings) -> Iterator[Remedy]:
    """Dropping gradients instead of filling them with zeros, which nothing reads."""
    if not findings.trial.trainers[0].get("keeps_gradients"):
        return
    how = "optimizer.zero_grad(), without set_to_none=False"
    yield Remedy("set_to_none", how, {"set_to_none": True}, 1.1, "optimizer")


def _for_process(findings: Findings) -> Iterator[Remedy]:
    trial, shares = findings.trial, findings.shares
    first = trial.trainers[0]
    cpus = usable_cpus()
    if tracer := first.get("tracer"):
        how = f"remove sys.settrace or sys.setprofile of {tracer}: a debugger, a profiler, coverage"
        change = {"no_tracer": True}
        yield Remedy("no tracer", how, change, 2.0, "debug mode", at_most=False)
    if first.get("traces_memory"):
        how = "remove tracemalloc.start(), or PYTHONTRACEMALLOC and -X tracemalloc"
        change = {"no_tracemalloc": True}
        yield Remedy("no tracemalloc", how, change, 2.0, "debug mode", at_most=False)
    if first["anomaly"]:
        how = "remove torch.autograd.set_detect_anomaly(True)"
        change = {"no_anomaly": True}
        yield Remedy("no anomaly mode", how, change, 2.0, "debug mode", at_most=False)
    if profiler_runs(trial):
        how = "stop torch's profiler after a few steps: torch.profiler.schedule(...)"
        change = {"no_profiler": True}
        yield Remedy("no profiler", how, change, 2.0, "debug mode", at_most=False)
    if shares["checkpoint"] >= _WORTH_TRYING:
        yield Remedy(
            "no checkpoints",
            "save less often",
            {"no_saves": True},
            _saved(shares["checkpoint"]),
            "checkpoint",
            at_most=False,
            is_bound=True,
        )
    share = min(page_fault_share(trial), _idle(findings))
    if share >= _WORTH_TRYING and can_keep_freed():
        words = " ".join(f"{name}={value}" for name, value in KEEP_FREED.items())
        how = f"keep_freed_memory() of flambeau.recipes.setup.freed_memory; or {words} in the environment"
        kept = {"keep_freed": True}
        yield Remedy("keep freed memory", how, kept, _saved(share), "page faults", at_most=False)
    ranks = max(1, len(trial.trainers))
    worker_threads = max((one["process_threads"] for one in trial.workers), default=0)
    if worker_threads > 4 + 2 * cpus:
        how = "torch.set_num_threads(1) in workers, which is torch's default there; cv2.setNumThreads(1)"
        one_thread = {"worker_threads": 1}
        yield Remedy("one thread per worker", how, one_thread, 1.5, "threads", at_most=False)
    if (gain := gain_of_one_thread(trial)) >= FASTER_ON_ONE:
        how = "OMP_NUM_THREADS=1, while other programs run; bits are those of one thread"
        yield Remedy("threads=1", how, {"threads": 1}, gain, "threads", at_most=False)
    elif first["threads"] * ranks > cpus:
        count = max(1, cpus // ranks)
        how = f"OMP_NUM_THREADS={count}, and no torch.set_num_threads"
        threads = {"threads": count}
        yield Remedy(f"threads={count}", how, threads, 1.5, "threads", at_most=False)


def _for_model(findings: Findings) -> Iterator[Remedy]:
    shares = findings.shares
    first = findings.trial.trainers[0]
    # Prefer the GPU's own time, if known, to the time in which Python starts its work.
    share = device_share(findings.trial) or shares["forward"] + shares["backward"]
    started = max(share, shares["forward"] + shares["backward"])
    if started < 0.3:
        return
    device = torch.device(first["device"])
    if native_bf16(device):
        how = "with torch.autocast(device.type, torch.bfloat16): around the forward pass"
        yield Remedy("bf16", how, {"autocast": "bfloat16"}, _saved(share / 2), "model")
    facts = first["optimizer"]
    if facts.get("has_convolutions") and not facts.get("is_channels_last"):
        how = "model.to(memory_format=torch.channels_last), and the images"
        change = {"channels_last": True}
        yield Remedy("channels_last", how, change, _saved(share / 4), "model")
    if device.type == "cuda":
        how = "torch.autocast(device.type, torch.float16) with torch.amp.GradScaler"
        yield Remedy("fp16", how, {"autocast": "float16"}, _saved(share / 2), "model")
        how = 'torch.set_float32_matmul_precision("high")'
        yield Remedy("tf32", how, {"tf32": True}, _saved(share / 2), "model")
        if facts.get("has_convolutions"):
            how = "torch.backends.cudnn.benchmark = True, where images keep their size"
            change = {"cudnn_benchmark": True}
            yield Remedy("cudnn.benchmark", how, change, _saved(share / 4), "model")
    if shares["compile"] == 0 and (device.type == "cuda" or shutil.which("g++")):
        how = "model.compile(), or model = torch.compile(model)"
        yield Remedy("compile", how, {"compile": True}, _saved(started / 3), "model")
