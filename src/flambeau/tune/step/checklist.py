"""How much the common advice for faster training helps one model on one machine, measured."""

import contextlib
import copy
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from flambeau.inspection.watched_forward import with_values
from flambeau.recipes.memory.memory_budget import mean_of_all
from flambeau.recipes.setup.environment import usable_cpus
from flambeau.trainer.parts.device import num_threads
from flambeau.tune.doctor.paired_test import Gain, gain_of
from flambeau.tune.step.step_memory import chrome_trace, memory_of
from flambeau.tune.step.step_profile import read_seconds, synchronize, traced
from flambeau.tune.step.training_steps import Part, Steps, no_part, steps_of_model

BASE = "as it is"
_WARM_UP = 3  # rounds that do not count: memory, kernels; chosen
_CLOSE = 0.02  # saving a smaller share of the peak is of no use; chosen
_READ_S = 2.0  # reading time per number of workers and round; chosen
_READ_ROUNDS = 3


@dataclass(frozen=True)
class ChecklistItem:
    """One line of the list.

    Attributes:
        gain: against steps without it, round by round; None if steps do not show it.
    """

    name: str
    how: str
    time_s: float | None
    gain: Gain | None
    verdict: str


_COPIED = "copied as it is"
_HOW = {
    "channels_last": "model and images .to(memory_format=torch.channels_last)",
    "bf16": "torch.autocast(device_type, torch.bfloat16) around the forward pass",
    "fused optimizer": "AdamW(..., fused=True)",
    "one thread": "torch.set_num_threads(1)",
    "cudnn.benchmark": "torch.backends.cudnn.benchmark = True",
    "pinned memory": "DataLoader(pin_memory=True)",
    "non_blocking": "pinned, and batch.to(device, non_blocking=True)",
    "del": "del output when the loss is there, del loss after backward",
    "num_workers": "DataLoader(num_workers=N)",
}
_GPU = ("cudnn.benchmark", "pinned memory", "non_blocking")


def checklist(
    steps: Steps, *, computes_s: float, rounds: int, enough_s: float
) -> tuple[ChecklistItem, ...]:
    """Measure training steps with and without each piece of advice, alternating; the first has none.

    Args:
        steps: their model is copied and trained alone, in float32 by AdamW. Any data are also read by more
            and fewer workers.
        computes_s: of a step without waiting for data.
    """
    model, device = steps.model, steps.device
    given: tuple[tuple[Any, ...], dict[str, Any]]
    given = with_values((tuple(steps.args), dict(steps.kwargs)))
    plain = steps_of_model(copy.deepcopy(model), *given, device=device)
    calls = {BASE: _whole(plain), **_variants(model, *given, plain)}
    seconds = interleaved(calls, device=device, rounds=rounds, enough_s=enough_s)
    base_s = statistics.median(seconds[BASE])
    advice = [ChecklistItem(BASE, f"{plain.about} in float32", base_s, None, "")]
    for name in _HOW:
        if name in seconds:
            one = _compared(name, seconds)
            verdict = f"{one.verdict}; the run has it" if name in steps.has else one.verdict
            advice.append(dataclasses.replace(one, verdict=verdict))
    if device.type != "cuda":
        advice += [ChecklistItem(name, _HOW[name], None, None, "needs a GPU") for name in _GPU]
    advice.append(_deleted(plain, *given))
    if steps.read is None:
        why = "needs data: give a run instead of the model"
        return (*advice, ChecklistItem("num_workers", _HOW["num_workers"], None, None, why))
    return (*advice, *_workers(steps.read, computes_s))


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, device: torch.device, rounds: int, enough_s: float
) -> dict[str, list[float]]:
    """Time each call once per round, in a new order, so that a slow phase of the machine hits all.

    At least two rounds; none begins after `enough_s`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    draw = random.Random(0)
    begin = time.perf_counter()
    for number in range(-_WARM_UP, rounds):
        if number == 0:
            begin = time.perf_counter()
        if number >= 2 and time.perf_counter() - begin > enough_s:
            break
        draw.shuffle(order)
        for name in order:
            synchronize(device)
            start = time.perf_counter()
            calls[name]()
            synchronize(device)
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _whole(steps: Steps) -> Callable[[], None]:
    return lambda: steps.step(no_part)


def _variants(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Steps
) -> dict[str, Callable[[], None]]:
    device = plain.device
    calls: dict[str, Callable[[], None]] = {}

    def add(name: str, given: tuple[Any, Any] = (args, kwargs), **settings: Any) -> None:
        twin = copy.deepcopy(model)
        if name == "channels_last":
            twin = twin.to(memory_format=torch.channels_last)
        calls[name] = _whole(steps_of_model(twin, *given, device=device, **settings))

    convolves = any(isinstance(one, nn.Conv2d) for one in model.modules())
    if convolves:
        add("channels_last", tree_map_only(Tensor, _channels_last, (args, kwargs)))
    add("bf16", precision=torch.bfloat16)
    add("fused optimizer", fused=True)
    if device.type == "cpu" and torch.get_num_threads() > 1:
        calls["one thread"] = _within(partial(num_threads, 1), _whole(plain))
    if device.type == "cuda":
        if convolves:
            calls["cudnn.benchmark"] = _within(_benchmark, _whole(plain))
        calls |= _copies(plain, (args, kwargs))
    return calls


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _within(
    context: Callable[[], contextlib.AbstractContextManager[None]], call: Callable[[], None]
) -> Callable[[], None]:
    def both() -> None:
        with context():
            call()

    return both


@contextlib.contextmanager
def _benchmark() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _copies(plain: Steps, given: Any) -> dict[str, Callable[[], None]]:
    """Steps that copy the next batch to the device while the current step still runs there."""
    pageable = tree_map_only(Tensor, lambda tensor: tensor.cpu(), given)
    pinned = tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), pageable)

    def call(batch: Any, *, wait: bool) -> Callable[[], None]:
        def step() -> None:
            plain.step(no_part)
            tree_map_only(
                Tensor, lambda tensor: tensor.to(plain.device, non_blocking=not wait), batch
            )

        return step

    return {
        _COPIED: call(pageable, wait=True),
        "pinned memory": call(pinned, wait=True),
        "non_blocking": call(pinned, wait=False),
    }


def _compared(name: str, seconds: Mapping[str, list[float]]) -> ChecklistItem:
    base = seconds[_COPIED if name in ("pinned memory", "non_blocking") else BASE]
    gain = gain_of(base, seconds[name])
    return ChecklistItem(name, _HOW[name], statistics.median(seconds[name]), gain, gain.verdict)


def _deleted(plain: Steps, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ChecklistItem:
    """The memory peak of steps that keep their output until the next step, as most loops do, and without."""
    kept: list[Any] = []
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(plain.device), (args, kwargs))

    def step(part: Part, *, keeps: bool) -> None:
        with part("forward"):
            output = plain.model(*args, **kwargs)
            loss = mean_of_all(output)
        if keeps:
            kept[:] = [output, loss]
        del output
        with part("backward"):
            loss.backward()
        plain.model.zero_grad()

    peaks = []
    for keeps in (True, False):
        steps = dataclasses.replace(plain, step=partial(step, keeps=keeps))
        steps.step(no_part)
        memory = memory_of(chrome_trace(traced(steps, 2)), steps)
        if memory is None:
            verdict = f"torch reports no memory of the device {plain.device}"
            return ChecklistItem("del", _HOW["del"], None, None, verdict)
        peaks.append(memory.peak_bytes)
    saved = peaks[0] - peaks[1]
    verdict = f"saves {saved / 2**20:.2f} of {peaks[0] / 2**20:.1f} MiB at the peak"
    if saved < _CLOSE * peaks[0]:
        verdict = f"of no use: {verdict}"
    return ChecklistItem("del", _HOW["del"], None, None, verdict)


def _workers(
    read: Callable[[int | None], Generator[Any]], computes_s: float
) -> list[ChecklistItem]:
    """Read a run's data with several numbers of workers; do batches come faster than a step takes?"""
    counts = [0]
    while (count := max(1, 2 * counts[-1])) <= usable_cpus():
        counts.append(count)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(_READ_ROUNDS):
        for count in counts:
            seconds[count].append(read_seconds(read(count), enough_s=_READ_S))
    return [_worker_advice(count, seconds, computes_s) for count in counts]


def _worker_advice(
    count: int, seconds: Mapping[int, list[float]], computes_s: float
) -> ChecklistItem:
    time_s = statistics.median(seconds[count])
    step = f"the step, which computes for {computes_s * 1000:.3g} ms"
    if count == 0:
        verdict = f"comes on top of {step}"
    elif time_s < computes_s:
        verdict = f"keeps up with {step}"
    else:
        verdict = f"slower than {step}: it would wait"
    return ChecklistItem(f"num_workers={count}", _HOW["num_workers"], time_s, None, verdict)
