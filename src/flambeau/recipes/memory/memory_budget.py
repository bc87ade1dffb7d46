"""Estimate the memory of a training step, or fit it into a budget by recomputing the cheapest blocks.

训练步骤的内存：估计它，或让代价最小的模块重新计算，把它放进给定的预算。

Source: Chen et al., "Training deep nets with sublinear memory cost", arXiv 1604.06174, for recomputing
blocks; here a dynamic program chooses them by seconds that are measured and bytes that come from steps on
tensors without data.

The function that makes blocks recompute is a parameter, such as `checkpoint_modules` of
activation_checkpointing.py.

Not for models whose forward pass depends on values of its input (`.item()`, boolean masks), nor for blocks
that run several times. Not counted: scratch space inside kernels, the CUDA context (0.3 to 0.5 GB) and the
fragmentation of the allocator.
"""

import copy
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_Optimizers = Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]]
_Recompute = Callable[..., nn.Module]
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_TIME_UNITS = 1000  # the choice rounds seconds to a thousandth of the total of all blocks


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one training step; `print` shows a table. `peak` is not the sum, as lifetimes differ."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    """State between steps: momentum and the like."""
    batch: int
    activations: int
    """Tensors that the graph keeps for the backward pass, without parameters, buffers and the batch."""
    peak: int
    """The largest sum at any moment of a step, temporaries between operations included."""

    def __str__(self) -> str:
        rows = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return "\n".join(f"{name:<12}{size / 2**20:12.2f} MiB" for name, size in rows)


@dataclass(frozen=True)
class Block:
    """One block: the bytes that recomputing it frees, and the seconds of its forward pass."""

    name: str
    freed_bytes: int
    forward_s: float
    recomputed: bool


@dataclass(frozen=True)
class MemoryPlan:
    """The blocks that recompute, and the predicted memory and time of a step; `print` shows a table."""

    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    """The peak if nothing recomputes."""
    extra_s: float
    """Seconds of the forward passes that run again."""
    step_s: float
    """Measured seconds of the forward and backward pass with the plan applied."""
    blocks: tuple[Block, ...]

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the blocks that recompute."""
        return tuple(block.name for block in self.blocks if block.recomputed)

    def __str__(self) -> str:
        rows = [f"{'block':<24}{'frees MiB':>12}{'costs ms':>12}  recomputed"]
        for b in self.blocks:
            row = f"{b.name:<24}{b.freed_bytes / 2**20:12.2f}{b.forward_s * 1e3:12.2f}"
            rows.append(f"{row}  {'yes' if b.recomputed else 'no'}")
        sizes = (self.peak_bytes, self.budget_bytes, self.plain_peak_bytes)
        rows.append("peak {:.2f} MiB of {:.2f}, without {:.2f}".format(*(n / 2**20 for n in sizes)))
        rows.append(f"{self.extra_s * 1e3:.2f} ms more: {self.extra_s / self.step_s:.0%} of a step")
        return "\n".join(rows)


# ---------------------------------------------------------------- bytes


@dataclass
class _Phase:
    """Live bytes between two marks; the label is ('forward', name), ('backward', name) or another."""

    label: tuple[str, str]
    start: int
    peak: int
    end: int = 0


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of all live storages, by phase."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.phases = [_Phase(("parameters", ""), 0, 0)]
        self._sizes: dict[int, int] = {}

    def mark(self, kind: str, name: str = "") -> None:
        self.phases[-1].end = self.live
        self.phases.append(_Phase((kind, name), self.live, self.live))

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if (
                isinstance(leaf, Tensor)
                and (key := leaf.untyped_storage()._cdata) not in self._sizes
            ):
                storage = leaf.untyped_storage()
                self._sizes[key] = storage.nbytes()
                self.live += self._sizes[key]
                self.phases[-1].peak = max(self.phases[-1].peak, self.live)
                weakref.finalize(storage, self._drop, key)
        if func in _CONVOLUTIONS and args[0].device.type == "cpu":
            self.phases[-1].peak = max(self.phases[-1].peak, self.live + _reordered(args))
        return out


def _reordered(args: Any) -> int:
    """Bytes that oneDNN copies into its own layouts: input and weight, backward gradient and input."""
    copied: list[Tensor] = list(args[:2])
    return sum(tensor.untyped_storage().nbytes() for tensor in copied)


def _mark_passes(module: nn.Module, name: str, live: _LiveStorages) -> None:
    def arrived(_gradient: Tensor) -> None:
        if ("backward", name) not in [phase.label for phase in live.phases]:
            live.mark("backward", name)

    def after(_module: nn.Module, _args: object, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(arrived)

    module.register_forward_pre_hook(lambda *_: live.mark("forward", name))
    module.register_forward_hook(after)


def fake_tensor_mode() -> FakeTensorMode:
    """A mode in which new tensors have only shape and dtype, beside others with values.

    Without a GPU torch assumes one in this mode, and a process's first backward pass would start threads for
    it, after which forks can run none; so one runs here before.

    Example:
        >>> with fake_tensor_mode():
        ...     product = torch.empty(10**6, 10**6) @ torch.empty(10**6, 3)
        >>> product.shape
        torch.Size([1000000, 3])
    """
    if not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()
    return FakeTensorMode(allow_non_fake_inputs=True)


def _without_data(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, layout and device (CPU for 'meta') without memory, in FakeTensorMode."""
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _copied(
    model: nn.Module, batch: tuple[Any, ...], live: _LiveStorages
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Copies of model, gradients and batch without data; in FakeTensorMode."""
    memo: dict[int, Any] = {id(p): _without_data(p) for p in model.parameters()}
    live.mark("buffers")
    memo.update({id(b): _without_data(b) for b in model.buffers()})
    live.mark("batch")
    batch = tree_map_only(Tensor, _without_data, batch)
    live.mark("gradients")
    model = copy.deepcopy(model, memo)  # ties, hooks and frozen parameters stay as they are
    for parameter in _trainable(model):
        parameter.grad = torch.empty_like(parameter)
    return model, batch


def _update(
    made: Optimizer | Sequence[Optimizer], live: _LiveStorages, known: Sequence[_Phase]
) -> None:
    """Run the optimizer's step, or take its bytes from the same phase of an earlier simulation."""
    optimizers = [made] if isinstance(made, Optimizer) else made
    with live:  # not under the mode: Adam reads its step count, which is a tensor
        for one in optimizers:
            if not known:
                one.step()
            one.zero_grad()
    now = live.phases[-1]
    for then in (phase for phase in known if phase.label == now.label):
        now.peak = now.start + then.peak - then.start
        live.live = now.start + then.end - then.start if then.end else live.live


def _simulate(
    model: nn.Module,
    batch: tuple[Any, ...],
    forward: Callable[[nn.Module, tuple[Any, ...]], tuple[Any, Tensor]],
    optimizer: _Optimizers,
    recompute: _Recompute = lambda model: model,
    names: Sequence[str] = (),
    recomputed: Sequence[str] = (),
    known: Sequence[_Phase] = (),
) -> list[_Phase]:
    """The phases of a step in which the blocks `recomputed` recompute; nothing is allocated.

    `known` are the phases of an earlier simulation, whose bytes of the optimizer's step are used again: it
    has more operations than the rest of the step.
    """
    live = _LiveStorages()
    mode = fake_tensor_mode()
    with mode, live:
        model, batch = _copied(model, batch, live)
    live.mark("optimizer")
    made = optimizer(_trainable(model))
    _update(made, live, known)  # makes the state of the optimizer
    recompute(model, *recomputed)
    for name in names:
        _mark_passes(model.get_submodule(name), name, live)
    live.mark("start")
    try:
        with mode, live:
            output, loss = forward(model, batch)
            live.mark("gradients of all")
            loss.backward()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"the step reads values of a tensor, but only shapes are known: {error}"
        ) from error
    live.mark("end")
    _update(made, live, known)
    del output  # kept until here, as in a training loop that counts hits
    return live.phases


def _step(phases: list[_Phase]) -> list[_Phase]:
    """The phases after the set-up."""
    return phases[[phase.label[0] for phase in phases].index("start") :]


def _peak(phases: list[_Phase]) -> int:
    return max(phase.peak for phase in _step(phases))


# ---------------------------------------------------------------- seconds


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _seconds(model: nn.Module, names: Sequence[str], run: Callable[[], object]) -> dict[str, float]:
    """Seconds of each block's forward pass and, as '', of the whole run: the fastest of three.

    The runs are real; buffers and the random state are restored.
    """
    device = next(model.parameters()).device
    times: dict[str, list[float]] = {name: [] for name in ("", *names)}

    def begin(name: str, *_: object) -> None:
        times[name].append(-_now(device))

    def end(name: str, *_: object) -> None:
        times[name][-1] += _now(device)

    handles = []
    for name in names:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(partial(begin, name)))
        handles.append(module.register_forward_hook(partial(end, name)))
    devices = [] if device.type == "cpu" else [device]
    try:
        with _buffers_kept(model), torch.random.fork_rng(devices, device_type=device.type):
            for _ in range(3):
                begin("")
                run()
                end("")
    finally:
        for handle in handles:
            handle.remove()
    return {name: min(seconds) for name, seconds in times.items()}


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers, also where a forward pass puts another tensor in the place of one."""
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffers, before in places:
            buffers.clear()
            buffers.update(before)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


# ---------------------------------------------------------------- the choice


class _Choice:
    """Chooses the blocks to recompute from two simulated steps: one without recomputation, one with all.

    Forward passes add bytes and backward passes free them in the reverse order. So the live bytes at a phase
    of block k are a constant plus what the blocks up to k keep, and a dynamic program over the blocks is
    exact as long as the bytes of one block do not depend on the choice for another.
    """

    def __init__(self, names: Sequence[str], *both: list[_Phase]) -> None:
        self.names = names
        modes = [{phase.label: phase for phase in phases} for phases in both]
        passes = [[mode["forward", name] for mode in modes] for name in names]
        self.kept = [[phase.end - phase.start for phase in pair] for pair in passes]
        held = [0, *accumulate(kept[0] for kept in self.kept)]
        # After k blocks: bytes besides those that they keep, and the peak above that by block k's mode.
        self._checks: list[list[tuple[int, list[int]]]] = [[] for _ in held]
        k = 0
        for phase in _step(both[0]):
            kind, name = phase.label
            pair = [phase, phase]
            if name in names:
                k = names.index(name) + 1
                pair = [mode[phase.label] for mode in modes]
            elif kind == "end":
                k = 0
            base = [
                p.start + (p.end - p.start if kind == "forward" and name in names else 0)
                for p in pair
            ]
            offset = base[0] - held[k]
            rise = [p.peak - b for p, b in zip(pair, base, strict=True)]
            self._checks[k].append((offset, rise))

    def within(self, limit: int, costs: Sequence[float]) -> list[str] | None:
        """The cheapest choice whose peak is at most `limit`; None if there is none."""
        unit = sum(costs) / _TIME_UNITS or 1.0
        # By time: the bytes that are kept, and the modes of the blocks.
        states: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
        for k, checks in enumerate(self._checks):
            after: dict[int, tuple[int, list[int]]] = {}
            for spent, (kept, modes) in states.items():
                for mode in (0, 1) if k else (0,):
                    now = kept + (self.kept[k - 1][mode] if k else 0)
                    when = spent + (round(costs[k - 1] / unit) if mode else 0)
                    fits = all(offset + now + rise[mode] <= limit for offset, rise in checks)
                    if fits and (when not in after or now < after[when][0]):
                        after[when] = (now, [*modes, mode] if k else [])
            states = after
        if not states:
            return None
        modes = states[min(states)][1]
        return [name for name, mode in zip(self.names, modes, strict=True) if mode]

    def least(self, enough: int) -> list[str]:
        """The choice with the lowest peak, which is at most `enough`."""
        free = [0.0] * len(self.names)
        limits = range(enough + 1)
        least = bisect_left(limits, True, key=lambda limit: self.within(limit, free) is not None)
        return self.within(least, free) or []


def _fit(
    choice: _Choice,
    simulate: Callable[[Sequence[str]], list[_Phase]],
    costs: Sequence[float],
    budget_bytes: int,
    plain_peak: int,
) -> tuple[list[str], int]:
    """The cheapest choice, and its peak from a simulation: bytes of blocks may depend on each other a bit."""
    limit = budget_bytes
    for _ in range(5):
        recomputed = choice.within(limit, costs)
        if recomputed is None:
            break
        peak = _peak(simulate(recomputed))
        if peak <= budget_bytes:
            return recomputed, peak
        limit -= peak - budget_bytes
    recomputed = choice.least(plain_peak)
    peak = _peak(simulate(recomputed))
    if peak > budget_bytes:
        raise ValueError(
            f"budget_bytes={budget_bytes} cannot be met: the least possible peak of a step is {peak} bytes, "
            f"with {len(recomputed)} of {len(costs)} blocks recomputed"
        )
    return recomputed, peak


# ---------------------------------------------------------------- the plan


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("no parameter of the model needs a gradient: there is no step")
    return parameters


def _forward(
    loss: Callable[[Any], Tensor],
    autocast: torch.dtype | None,
    model: nn.Module,
    batch: tuple[Any, ...],
) -> tuple[Any, Tensor]:
    device = next(model.parameters()).device.type
    with torch.autocast(device, autocast, enabled=autocast is not None):
        output = model(*batch)
        value = loss(output)
    if value.numel() != 1:
        raise ValueError(f"the loss must be a scalar, got the shape {tuple(value.shape)}")
    return output, value


def mean_of_all(output: Any) -> Tensor:
    """A stand-in loss that depends on every floating-point tensor of an output: the sum of their means.

    Example:
        >>> mean_of_all({"logits": torch.ones(2, 3), "ids": torch.zeros(2, dtype=torch.int64)})
        tensor(1.)
    """
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack([leaf.float().mean() for leaf in leaves]).sum()


def estimate_memory(
    model: nn.Module,
    batch: tuple[Any, ...],
    *,
    loss: Callable[[Any], Tensor] = mean_of_all,
    optimizer: _Optimizers = AdamW,
    autocast: torch.dtype | None = None,
) -> MemoryEstimate:
    """Estimate the memory of a step: `loss(model(*batch))`, its backward pass and the optimizer.

    Args:
        model: on any device, 'meta' too; not changed.
        batch: the model's arguments, on any device; only shapes and dtypes count.
        loss: from the output to a scalar; may use real targets. By default the sum of means.
        optimizer: from the trainable parameters to one optimizer or several.
        autocast: torch.bfloat16 or torch.float16 for forward pass and loss.

    Raises:
        ValueError: no parameter needs a gradient, or the loss is not a scalar.

    Example:
        >>> from torch.optim import SGD
        >>> model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU())
        >>> estimate = estimate_memory(model, (torch.ones(16, 256),), optimizer=SGD)
        >>> estimate.parameters, estimate.activations // 1024, estimate.optimizer
        (262144, 16, 0)
    """
    phases = _simulate(model, batch, partial(_forward, loss, autocast), optimizer)
    grown = {phase.label[0]: phase.end - phase.start for phase in phases}
    grown["optimizer"] += grown["gradients"]  # the optimizer's phase ends with freeing them
    grown |= {"activations": grown["start"], "peak": _peak(phases)}
    return MemoryEstimate(**{field.name: grown[field.name] for field in fields(MemoryEstimate)})


def top_modules(model: nn.Module) -> list[str]:
    """Names of the outermost modules inside the model that have a forward pass.

    A single wrapper of the whole model is replaced by its children, a ModuleList by its members.

    Example:
        >>> model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))})
        >>> top_modules(model)
        ['net.0', 'net.1']
    """

    def below(prefix: str, module: nn.Module) -> list[str]:
        names: list[str] = []
        for name, child in module.named_children():
            runs = type(child).forward is not nn.Module.forward
            names += [f"{prefix}{name}"] if runs else below(f"{prefix}{name}.", child)
        return names

    names = below("", model)
    while len(names) == 1 and (inner := below(f"{names[0]}.", model.get_submodule(names[0]))):
        names = inner
    return names


def activations_by_module(
    model: nn.Module,
    batch: tuple[Any, ...],
    *,
    loss: Callable[[Any], Tensor] = mean_of_all,
    autocast: torch.dtype | None = None,
) -> dict[str, int]:
    """Bytes that each of the `top_modules` keeps for the backward pass; nothing is allocated.

    Args:
        model, batch, loss, autocast: as for `estimate_memory`.

    Returns:
        Bytes by name, in order; '' for operations before the first module. An operation between modules
        counts with the one before it.

    Raises:
        ValueError: as `estimate_memory`.

    Example:
        >>> model = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 8))
        >>> kept = activations_by_module(model, (torch.ones(16, 256),))
        >>> kept["0"] + kept["1"]  # Tanh keeps its output, (16, 64), and its input is freed
        4096
    """
    names = top_modules(model)
    forward, plain = partial(_forward, loss, autocast), partial(SGD, lr=0.0)
    phases = _step(_simulate(model, batch, forward, plain, names=names))
    kept = dict.fromkeys(["", *names], 0)
    for phase in phases:
        if phase.label[0] in ("start", "forward"):
            kept[phase.label[1]] += phase.end - phase.start
    return kept


def _block_names(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The outermost modules that match the patterns, one with several names by its first."""
    if isinstance(patterns, str):
        raise TypeError(f"blocks must be a list of patterns, got one string: [{patterns!r}]")
    every_name = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and type(module).forward is not nn.Module.forward
    }
    first: dict[nn.Module, str] = {}
    for name, module in every_name.items():
        first.setdefault(module, name)
    names = {name: module for module, name in first.items()}
    chosen = set()
    for pattern in patterns:
        matches = {first[m] for name, m in every_name.items() if fnmatchcase(name, pattern)}
        if not matches:
            near = get_close_matches(pattern, every_name, n=1, cutoff=0.0) or ["none"]
            raise ValueError(
                f"{pattern!r} matches no module with a forward pass; the nearest is {near[0]!r}"
            )
        chosen |= matches
    replaced = [name for name in names if name in chosen and "forward" in names[name].__dict__]
    if replaced:
        raise ValueError(
            f"{replaced[0]}: its forward has been replaced, perhaps by an earlier plan: undo that first"
        )
    inner = {m for name in chosen for m in names[name].modules() if m is not names[name]}
    return [name for name in names if name in chosen and names[name] not in inner]


def _in_order(phases: list[_Phase], names: Sequence[str]) -> list[str]:
    """The blocks in the order they ran, without frozen ones: no gradient passes them, they keep nothing."""
    labels = [phase.label for phase in phases]
    for name in names:
        if (count := labels.count(("forward", name))) != 1:
            raise ValueError(f"{name} ran {count} times in a forward pass; a block must run once")
    return [name for kind, name in labels if kind == "forward" and ("backward", name) in labels]


def fit_memory_budget(
    model: nn.Module,
    batch: tuple[Any, ...],
    *,
    blocks: Sequence[str],
    budget_bytes: int,
    recompute: _Recompute,
    loss: Callable[[Any], Tensor] = mean_of_all,
    optimizer: _Optimizers = AdamW,
    autocast: torch.dtype | None = None,
) -> MemoryPlan:
    """Make the cheapest set of blocks recompute that keeps a training step within a memory budget.

    The step is `loss(model(*batch))`, its backward pass and the optimizer, which frees gradients. Parameters,
    buffers, gradients, optimizer state, batch, activations and temporaries between operations count.

    Args:
        model: on its device, in training mode, not recomputing yet.
        batch: the model's arguments, of the largest size.
        blocks: patterns of module names as in a shell; `*` matches dots too. Of nested modules the outermost
            is taken.
        budget_bytes: the peak that a whole step may reach.
        recompute: `recompute(model, *names)` makes these modules recompute, in place.
        loss, optimizer, autocast: as for `estimate_memory`.

    Returns:
        The plan, already applied.

    Raises:
        ValueError: the budget is below the lowest peak (the message names it; nothing recomputes), a pattern
            has no match, a block does not run exactly once or recomputes already, or no parameter is
            trainable.
        TypeError: `blocks` is a single string.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)))
        >>> def recompute(model, *names):
        ...     for name in names:
        ...         module = model.get_submodule(name)
        ...         module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        ...     return model
        >>> from torch.utils.checkpoint import checkpoint
        >>> plan = fit_memory_budget(
        ...     model, (torch.ones(512, 8),), blocks=["*"], budget_bytes=170_000, recompute=recompute
        ... )
        >>> plan.peak_bytes <= 170_000 < plan.plain_peak_bytes
        True
    """
    parameters = _trainable(model)
    forward = partial(_forward, loss, autocast)

    def step() -> None:
        torch.autograd.grad(forward(model, batch)[1], parameters, allow_unused=True)

    names = _block_names(model, blocks)
    plain = _simulate(model, batch, forward, optimizer, recompute, names, ())
    names = _in_order(plain, names)
    simulate = partial(_simulate, model, batch, forward, optimizer, recompute, names, known=plain)
    choice = _Choice(names, plain, simulate(names))
    seconds = _seconds(model, names, torch.no_grad()(partial(forward, model, batch)))
    costs = [seconds[name] for name in names]
    recomputed, peak = _fit(choice, simulate, costs, budget_bytes, _peak(plain))
    recompute(model, *recomputed)
    return MemoryPlan(
        budget_bytes=budget_bytes,
        peak_bytes=peak,
        plain_peak_bytes=_peak(plain),
        extra_s=sum(seconds[name] for name in recomputed),
        step_s=_seconds(model, (), step)[""],
        blocks=tuple(
            Block(name, kept[0] - kept[1], seconds[name], name in recomputed)
            for name, kept in zip(names, choice.kept, strict=True)
        ),
    )
