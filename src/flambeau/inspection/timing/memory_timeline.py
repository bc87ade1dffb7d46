"""Memory over the time of a training step, as torch's allocator reports it, and what lives at the peak."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import profile, record_function

from flambeau.errors import InputError
from flambeau.inspection.timing.paired_times import synchronize
from flambeau.inspection.timing.step_profile import (
    BACKWARD,
    MODULE,
    activities,
    chrome_trace,
    modules_recorded,
    no_part,
)
from flambeau.inspection.timing.training_steps import Steps

_WARM_UP = 2  # steps, in which the optimizer makes its state
_PART = "part "
_CATEGORIES = ("user_annotation", "cpu_op")


@dataclass(frozen=True)
class Span:
    """A part of the step, in seconds from its start."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Owner:
    """Who has allocated what lives at the peak: a module, or an operation of the backward pass."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes of tensors during one step, beside those that were there before: parameters, optimizer state.

    Attributes:
        about: what a step is.
        there_before: bytes of parameters and buffers.
        parts: of the step.
        samples: (seconds from the start, bytes), at each allocation and each release; the clock is that of a
            step under the profiler, which is slower.
        peak_bytes: the most of them.
        peak_s: when.
        owners: of what lives then, the largest first.
    """

    about: str
    there_before: int
    parts: tuple[Span, ...]
    samples: tuple[tuple[float, int], ...]
    peak_bytes: int
    peak_s: float
    owners: tuple[Owner, ...]


def memory_timeline(steps: Steps, *, num_steps: int = 1) -> MemoryTimeline:
    """Watch the allocator during a step.

    Args:
        steps: to watch; some are made to warm up.
        num_steps: how many, one after the other.

    Raises:
        InputError: torch's profiler sees no memory of the device.
    """
    for _ in range(_WARM_UP):
        steps.step(no_part)
    with (
        modules_recorded(steps.model),
        profile(activities=activities(steps.device), profile_memory=True, acc_events=True) as seen,
    ):
        for _ in range(num_steps):
            steps.step(lambda name: record_function(_PART + name))
        synchronize(steps.device)
    events = json.loads(chrome_trace(seen))["traceEvents"]
    there = sum(t.untyped_storage().nbytes() for t in _own(steps))
    return _timeline(events, steps, there)


def _own(steps: Steps) -> Iterable[Any]:
    tensors = (*steps.model.parameters(), *steps.model.buffers())
    return {t.untyped_storage().data_ptr(): t for t in tensors}.values()


def _timeline(events: Sequence[dict[str, Any]], steps: Steps, there: int) -> MemoryTimeline:
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in _CATEGORIES]
    parts = [e for e in spans if e["name"].startswith(_PART)]
    begin = min((e["ts"] for e in parts), default=0.0)
    live: dict[int, tuple[int, str]] = {}
    at_peak: dict[int, tuple[int, str]] = {}
    samples = [(0.0, 0)]
    now = 0
    peak = 0
    peak_s = 0.0
    for event, owner in _owned(events, spans, on_cpu=steps.device.type == "cpu"):
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        if size > 0:
            live[address] = (size, owner)
        elif live.pop(address, None) is None:
            continue  # it was there before
        now += size
        samples.append(((event["ts"] - begin) / 1e6, now))
        if now > peak:
            peak = now
            peak_s = samples[-1][0]
            at_peak = dict(live)
    owners: dict[str, int] = defaultdict(int)
    for size, owner in at_peak.values():
        owners[owner] += size
    if len(samples) == 1:
        raise InputError(f"torch's profiler reports no memory of the device {steps.device}")
    return MemoryTimeline(
        about=steps.about,
        there_before=there,
        parts=tuple(
            Span(
                e["name"].removeprefix(_PART),
                (e["ts"] - begin) / 1e6,
                (e["ts"] + e["dur"] - begin) / 1e6,
            )
            for e in parts
        ),
        samples=tuple(samples),
        peak_bytes=peak,
        peak_s=peak_s,
        owners=tuple(Owner(n, s) for n, s in sorted(owners.items(), key=lambda pair: -pair[1])),
    )


def _owned(
    events: Sequence[dict[str, Any]], spans: Sequence[dict[str, Any]], *, on_cpu: bool
) -> Iterator[tuple[dict[str, Any], str]]:
    """Each report of the allocator, in order, and in which module or operation it came."""
    reports = [
        e
        for e in events
        if e.get("name") == "[memory]" and (e["args"].get("Device Type") == 0) == on_cpu
    ]
    # A range that begins with a report comes before it; of two, the outer one.
    order = [(e["ts"], -e["dur"], e) for e in spans] + [(e["ts"], 1.0, e) for e in reports]
    open_: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for now, _, event in sorted(order, key=lambda row: row[:2]):
        around = open_[event["tid"]]
        while around and around[-1]["ts"] + around[-1]["dur"] < now:
            around.pop()
        if event["ph"] == "X":
            around.append(event)
        else:
            yield event, _owner([one["name"] for one in around])


def _owner(around: Sequence[str]) -> str:
    """The innermost module or node of the backward pass; else the part of the step, else the operation."""
    for prefix, word in ((BACKWARD, "backward: "), (MODULE, ""), (_PART, "")):
        for name in reversed(around):
            if name.startswith(prefix):
                return word + (name.removeprefix(prefix) or "(model)")
    return around[0] if around else "between operations"
