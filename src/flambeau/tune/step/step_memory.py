"""What is allocated at the memory peak of a training step, and by which module, from torch's profiler."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import profile

from flambeau.tune.step.training_steps import Steps

MODULE = "module "
"""Prefix of a module's name in ranges of the profiler."""
BACKWARD = "autograd::engine::evaluate_function: "
"""Prefix that torch gives the name of a node of the backward pass."""
_CATEGORIES = ("user_annotation", "cpu_op")


@dataclass(frozen=True)
class Owner:
    """A module, or an operation of the backward pass, and its bytes at the peak."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """Bytes of tensors at the peak, beside those `there_before`: parameters, buffers, optimizer state.

    `owners` of what is allocated at the peak, the largest first.
    """

    there_before: int
    peak_bytes: int
    owners: tuple[Owner, ...]


def chrome_trace(seen: profile) -> bytes:
    """A profiler's events as JSON that ui.perfetto.dev opens; a profiler exports them only once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        return file.read_bytes()


def memory_of(trace: bytes, steps: Steps) -> StepMemory | None:
    """Memory at the peak of profiled steps; None if torch reports none of the device.

    The profiler needs `profile_memory`, and ranges for modules.
    """
    live: dict[int, tuple[int, str]] = {}
    at_peak: dict[int, tuple[int, str]] = {}
    now = peak = reports = 0
    for event, owner in _owned(trace, on_cpu=steps.device.type == "cpu"):
        reports += 1
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        if size > 0:
            live[address] = (size, owner)
        elif live.pop(address, None) is None:
            continue  # allocated before the trace
        now += size
        if now > peak:
            peak = now
            at_peak = dict(live)
    if not reports:
        return None
    owners: dict[str, int] = defaultdict(int)
    for size, owner in at_peak.values():
        owners[owner] += size
    tensors = (*steps.model.parameters(), *steps.model.buffers())
    there = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return StepMemory(
        there_before=sum(there.values()),
        peak_bytes=peak,
        owners=tuple(Owner(n, s) for n, s in sorted(owners.items(), key=lambda pair: -pair[1])),
    )


def _owned(trace: bytes, *, on_cpu: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """Each report of the allocator in order, with the module or operation it belongs to."""
    events = json.loads(trace)["traceEvents"]
    reports = [
        e
        for e in events
        if e.get("name") == "[memory]" and (e["args"].get("Device Type") == 0) == on_cpu
    ]
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in _CATEGORIES]
    # At the same time a range comes before a report, and the outer range before the inner one.
    order = [(e["ts"], -e["dur"], e) for e in spans] + [(e["ts"], 1.0, e) for e in reports]
    open_: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for now, _, event in sorted(order, key=lambda row: row[:2]):
        around = open_[event["tid"]]
        while around and around[-1]["ts"] + around[-1]["dur"] < now:
            around.pop()
        if event["ph"] == "X":
            around.append(event)
        else:
            yield event, _owner(around)


def _owner(around: Sequence[dict[str, Any]]) -> str:
    """The innermost module or node of the backward pass; else the part of the step, else the operation."""
    names = [one["name"] for one in reversed(around)]
    for prefix, word in ((BACKWARD, "backward: "), (MODULE, "")):
        for name in names:
            if name.startswith(prefix):
                return word + (name.removeprefix(prefix) or "(model)")
    parts = [one["name"] for one in reversed(around) if one["cat"] == "user_annotation"]
    return str([*parts, *names[-1:], "between operations"][0])
