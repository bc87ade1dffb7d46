"""What the usual advice for a faster training changes for one model on one machine, measured."""

import contextlib
import copy
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from flambeau.inspection.model_copy import with_values
from flambeau.inspection.timing.memory_timeline import memory_timeline
from flambeau.inspection.timing.paired_times import PartTime, interleaved, ratios, summary
from flambeau.inspection.timing.step_profile import no_part, read_seconds, timed
from flambeau.inspection.timing.training_steps import WAIT, Part, Steps, steps_of_model
from flambeau.recipes.memory.memory_budget import mean_of_all
from flambeau.recipes.setup.environment import usable_cpus
from flambeau.trainer.parts.device import num_threads

BASE = "as it is"
_CLOSE = 0.02  # below this share a difference is of no use, however sure; chosen
_READ_S = 2.0  # of reading per number of workers and round; chosen
_ROUNDS = 3  # of reading


@dataclass(frozen=True)
class Advice:
    """One line of the list.

    Attributes:
        name: what to change.
        how: in code.
        time: of a step with it, or of a batch; None where it was not measured.
        times: of what it was without it, compared round by round; 0.5 is twice as fast. Of `del` it is that
            of bytes.
        verdict: in words.
    """

    name: str
    how: str
    time: PartTime | None
    times: float | None
    verdict: str


@dataclass(frozen=True)
class Checklist:
    """What was measured: the step itself, and each piece of advice."""

    about: str
    base: PartTime
    advice: tuple[Advice, ...]


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
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    run: Steps | None = None,
    rounds: int = 15,
) -> Checklist:
    """Measure training steps with and without each piece of advice, in turn.

    Args:
        model: with values; copies of it are trained.
        args: of the model, tensors in any nesting; those on the device 'meta' get random values.
        kwargs: likewise.
        device: to run on.
        run: whose data are read by more and fewer workers; None for a model alone.
        rounds: of steps.

    Raises:
        InputError: a training step of the model fails.
    """
    given: tuple[tuple[Any, ...], dict[str, Any]] = with_values((tuple(args), dict(kwargs)))
    plain = steps_of_model(copy.deepcopy(model), *given, device=device)
    calls = {BASE: _whole(plain), **_variants(model, *given, plain)}
    seconds = interleaved(calls, device=device, rounds=rounds, enough_s=60.0)
    found = [_compared(name, seconds) for name in _HOW if name in seconds]
    if device.type != "cuda":
        found += [Advice(name, _HOW[name], None, None, "needs a GPU") for name in _GPU]
    found.append(_deleted(plain, *given))
    if run is None:
        why = "needs data: give a run in the place of the model"
        found.append(Advice("num_workers", _HOW["num_workers"], None, None, why))
    else:
        found += _workers(run)
    return Checklist(plain.about, summary(BASE, seconds[BASE]), tuple(found))


def _whole(steps: Steps) -> Callable[[], None]:
    return lambda: steps.step(no_part)


def _variants(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Steps
) -> dict[str, Callable[[], None]]:
    device = plain.device
    found: dict[str, Callable[[], None]] = {}

    def add(name: str, given: tuple[Any, Any] = (args, kwargs), **settings: Any) -> None:
        twin = copy.deepcopy(model)
        if name == "channels_last":
            twin = twin.to(memory_format=torch.channels_last)
        found[name] = _whole(steps_of_model(twin, *given, device=device, **settings))

    convolves = any(isinstance(one, nn.Conv2d) for one in model.modules())
    if convolves:
        add("channels_last", tree_map_only(Tensor, _channels_last, (args, kwargs)))
    add("bf16", precision=torch.bfloat16)
    add("fused optimizer", fused=True)
    if device.type == "cpu" and torch.get_num_threads() > 1:
        found["one thread"] = _around(partial(num_threads, 1), _whole(plain))
    if device.type == "cuda":
        if convolves:
            found["cudnn.benchmark"] = _around(_benchmark, _whole(plain))
        found |= _copies(plain, (args, kwargs))
    return found


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _around(
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
    """A batch that is copied to the device while the step before still runs there."""
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


def _compared(name: str, seconds: Mapping[str, list[float]]) -> Advice:
    base = seconds[_COPIED if name in ("pinned memory", "non_blocking") else BASE]
    times = ratios(seconds[name], base)
    if times.high_s < 1 - _CLOSE:
        verdict = "faster"
    elif times.low_s > 1 + _CLOSE:
        verdict = "slower"
    else:
        verdict = "no difference seen"
    return Advice(name, _HOW[name], summary(name, seconds[name]), times.median_s, verdict)


def _deleted(plain: Steps, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Advice:
    """The peak of steps whose output lives until the next one is there, as in most loops, and without."""
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

    both = [dataclasses.replace(plain, step=partial(step, keeps=keeps)) for keeps in (True, False)]
    peaks = [memory_timeline(steps, num_steps=2).peak_bytes for steps in both]
    saved = peaks[0] - peaks[1]
    share = saved / peaks[0] if peaks[0] else 0.0
    verdict = f"saves {saved / 2**20:.2f} of {peaks[0] / 2**20:.1f} MiB at the peak"
    if share < _CLOSE:
        verdict = f"of no use: {verdict}"
    return Advice("del", _HOW["del"], None, 1 - share, verdict)


def _workers(run: Steps) -> list[Advice]:
    """Batches of a run's data, and whether they come faster than a step takes them."""
    assert run.read is not None
    for _ in range(_ROUNDS):
        run.step(no_part)
    whole, parts = timed(run)
    computes_s = statistics.median(whole) - statistics.median(parts[WAIT])
    counts = [0]
    while (count := max(1, 2 * counts[-1])) <= usable_cpus():
        counts.append(count)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(_ROUNDS):
        for count in counts:
            seconds[count].append(read_seconds(run.read(count), enough_s=_READ_S))
    return [_of_workers(count, seconds, computes_s) for count in counts]


def _of_workers(count: int, seconds: Mapping[int, list[float]], computes_s: float) -> Advice:
    each = seconds[count]
    name = f"num_workers={count}"
    time = PartTime(name, statistics.median(each), min(each), max(each))
    step = f"the step, which computes for {computes_s * 1000:.3g} ms"
    if count == 0:
        verdict = f"comes on top of {step}"
    elif time.median_s < computes_s:
        verdict = f"keeps up with {step}"
    else:
        verdict = f"slower than {step}: it would wait"
    times = time.median_s / statistics.median(seconds[0])
    return Advice(name, _HOW["num_workers"], time, times, verdict)
