"""What could be changed, and what it would give at most."""

import math
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from flambeau.recipes.setup.environment import native_bf16, usable_cpus
from flambeau.recipes.setup.freed_memory import KEEP_FREED, can_keep_freed
from flambeau.tune.doctor.causes import (
    SLOWS_ALL,
    Findings,
    page_fault_share,
    profiler_runs,
)
from flambeau.tune.doctor.formatting import shown
from flambeau.tune.doctor.shares import device_share

_MOST_WORKERS = 16
_CACHED = 8  # batches
_OR_TENSORS = ", or batches of tensors, which go through shared memory"
_WORTH_TRYING = 0.04  # share of the time that a change could save; chosen

REPEATS = "not tried: the data set never asks get_worker_info for a share, so each worker gives every sample"
"""Of another number of workers: it would be another training."""


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
        refused: why it is not tried although it would be faster; '' for all others.
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
    """What is worth a trial: first what would slow down all else, then the most promising.

    Of equals a bound is the last: time may be too short for all, and nobody can write it.

    Args:
        findings: of the watched run.
    """
    found = [
        *_for_data(findings),
        *_for_waits(findings),
        *_for_optimizer(findings),
        *_for_gradients(findings),
        *_for_process(findings),
        *_for_model(findings),
    ]
    return sorted(found, key=lambda one: (one.kind not in SLOWS_ALL, -one.predicted, one.is_bound))


def _idle(findings: Findings) -> float:
    """The most that can be saved of what the host does or waits for: a GPU may compute meanwhile."""
    return 1 - device_share(findings.trial)


def _saved(share: float) -> float:
    """How many times as fast a step is without this share of it."""
    return 1 / max(1 - share, 0.02)


def _loader_line(findings: Findings) -> str:
    place = findings.trial.trainers[0]["loader"].get("place")
    return f", {shown(f'{place[0]}:{place[1]}')}" if place else ""


def _for_data(findings: Findings) -> list[Remedy]:
    shares, work = findings.shares, findings.work
    idle = _idle(findings)
    waits, start = min(shares["data"], idle), min(shares["worker start"], idle)
    whole = min(waits + start, idle)
    loader = findings.trial.trainers[0]["loader"]
    if whole < _WORTH_TRYING or not loader:
        return []
    line = _loader_line(findings)
    workers: int = loader["num_workers"]
    found = [
        Remedy(
            "cached batches",
            f"no data to wait for: the most that any change of the loader can give{line}",
            {"cached": _CACHED},
            _saved(whole),
            "data",
            at_most=False,
            is_bound=True,
        )
    ]
    found += _for_workers(findings, whole=whole, start=start)
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


def _for_workers(findings: Findings, *, whole: float, start: float) -> list[Remedy]:
    """Other numbers of them, and that they stay: for a data set that gives each its share."""
    loader = findings.trial.trainers[0]["loader"]
    line = _loader_line(findings)
    workers: int = loader["num_workers"]
    refused = REPEATS if loader.get("repeats") else ""
    found = []
    if start >= _WORTH_TRYING and not loader["persistent_workers"] and not refused:
        how = f"DataLoader(persistent_workers=True){line}"
        found.append(
            Remedy(
                "persistent workers",
                how,
                {"persistent": True},
                _saved(start),
                "worker start",
                at_most=False,
            )
        )
    for count in _other_workers(workers, findings):
        how = f"DataLoader(num_workers={count}){'' if count else _OR_TENSORS}{line}"
        kind = "few workers" if count > workers else "many workers" if count else "send"
        change = {"workers": count, "shared": loader.get("shared", [])}
        found.append(Remedy(f"workers={count}", how, change, _saved(whole), kind, refused=refused))
    return found


def _reads_images(findings: Findings) -> bool:
    places = [where for found in findings.work.places.values() for where, _ in found]
    return bool(findings.work.shares.get("decode")) or any(
        "torchvision" in where or "PIL" in where for where in places
    )


def _other_workers(now: int, findings: Findings) -> list[int]:
    """Numbers worth a trial: what is needed, if CPUs are left or they mostly wait; 0 if they mostly send."""
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
    if now and findings.work.shares.get("send", 0) > 0.3:
        found.append(0)
    return [count for count in dict.fromkeys(found) if count != now]


def _for_waits(findings: Findings) -> list[Remedy]:
    share = min(sum(findings.waiting_lines.values()), _idle(findings))
    if share < 0.02:
        return []
    lines = sorted(findings.waiting_lines, key=lambda one: -findings.waiting_lines[one])
    named = ", ".join(shown(line) for line in lines[:4])
    how = f"keep the value on the device, or ask for it every 50 steps: {named}"
    return [
        Remedy(
            "skip waiting calls", how, {"skip_waits": lines}, _saved(share), "sync", at_most=False
        )
    ]


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
    if not findings.trial.trainers[0].get("keeps_gradients"):
        return []
    how = "optimizer.zero_grad(), without set_to_none=False"
    return [Remedy("set_to_none", how, {"set_to_none": True}, 1.1, "optimizer")]


def _for_process(findings: Findings) -> list[Remedy]:
    trial, shares = findings.trial, findings.shares
    first = trial.trainers[0]
    cpus = usable_cpus()
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
            Remedy(
                "no checkpoints",
                how,
                {"no_saves": True},
                _saved(shares["checkpoint"]),
                "checkpoint",
                at_most=False,
                is_bound=True,
            )
        )
    share = min(page_fault_share(trial), _idle(findings))
    if share >= _WORTH_TRYING and can_keep_freed():
        words = " ".join(f"{name}={value}" for name, value in KEEP_FREED.items())
        how = f"keep_freed_memory() of flambeau.recipes.setup.freed_memory; or {words} in the environment"
        kept = {"keep_freed": True}
        gain = _saved(share)
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
    shares = findings.shares
    first = findings.trial.trainers[0]
    # On a GPU what it computes, where that is known, and not for how long Python starts it.
    share = device_share(findings.trial) or shares["forward"] + shares["backward"]
    started = max(share, shares["forward"] + shares["backward"])
    if started < 0.3:
        return []
    device = torch.device(first["device"])
    found = []
    if native_bf16(device):
        how = "with torch.autocast(device.type, torch.bfloat16): around the forward pass"
        found.append(Remedy("bf16", how, {"autocast": "bfloat16"}, _saved(share / 2), "model"))
    facts = first["optimizer"]
    if facts.get("has_convolutions") and not facts.get("is_channels_last"):
        how = "model.to(memory_format=torch.channels_last), and the images"
        found.append(
            Remedy("channels_last", how, {"channels_last": True}, _saved(share / 4), "model")
        )
    if device.type == "cuda":
        found += _for_cuda(share, has_convolutions=bool(facts.get("has_convolutions")))
    if shares["compile"] == 0 and (device.type == "cuda" or shutil.which("g++")):
        how = "model.compile(), or model = torch.compile(model)"
        found.append(Remedy("compile", how, {"compile": True}, _saved(started / 3), "model"))
    return found


def _for_cuda(share: float, *, has_convolutions: bool) -> list[Remedy]:
    """What a GPU of NVIDIA has besides."""
    found = [
        Remedy(
            "fp16",
            "torch.autocast(device.type, torch.float16) with torch.amp.GradScaler",
            {"autocast": "float16"},
            _saved(share / 2),
            "model",
        ),
        Remedy(
            "tf32",
            'torch.set_float32_matmul_precision("high")',
            {"tf32": True},
            _saved(share / 2),
            "model",
        ),
    ]
    if has_convolutions:
        how = "torch.backends.cudnn.benchmark = True, where images keep their size"
        found.append(
            Remedy("cudnn.benchmark", how, {"cudnn_benchmark": True}, _saved(share / 4), "model")
        )
    return found
