"""The optimizer step in any precision: scale, unscale, clip, skip, and never wait for the device.

任意精度下的优化器一步：缩放、反缩放、裁剪、跳过，且从不等待设备。

Source: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2 (loss scaling), with exactly
the growth and back-off of torch.amp.GradScaler.
In float32 and bfloat16 nothing is scaled, but a step with a gradient that is not finite is skipped too.
A fused optimizer (`fused=True`) skips and clips inside its kernel. Any other optimizer makes the step, which
is then undone; that costs a copy of parameters and state. If it counts its steps on the CPU (torch's Adam
with neither `fused` nor `capturable`), each step does wait for the device.

Not for optimizers that need a closure (LBFGS), nor for sparse gradients. State in plain Python numbers (no
optimizer of torch has any) counts skipped steps too. SGD does not dampen its first step; if that one is
skipped, all steps are dampened.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.autograd.graph
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Precision = Literal["fp32", "bf16", "fp16"]
_run_engine = getattr(torch.autograd.graph, "_engine_run_backward", None)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MAX_ROOTS = 64  # weights of micro-batches that are cached as tensors; chosen
_ON_DEVICE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused or capturable step is done by kernels alone, and reads a rate from the device."""
Replay = Callable[[Callable[[], object], Sequence[Tensor], Hashable], object]


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """The autocast context for the forward pass and the loss; call backward outside it.

    Example:
        >>> with autocast(torch.device("cpu"), "bf16"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, _DTYPES[precision])


class AmpStep:
    """Runs backward and step for one optimizer.

    Args:
        optimizer: with dense floating-point parameters on one device; its state is empty or loaded.
        precision: 'fp32', 'bf16' or 'fp16', autocast's dtype in the forward pass.
        max_norm: clip the global gradient norm to this, after unscaling.
        init_scale: first fp16 loss scale (torch's default).
        growth_interval: fp16 steps without an overflow after which the scale doubles.
        halt: after a value that is not finite, skip all steps until `halted` is zeroed, so that a loop can
            read the flag later. In fp16 only watched tensors halt.
        agree: for processes that average gradients: replaces a 0-d flag by its maximum over all
            (`all_reduce(flag, op=MAX)`), so that a loss that is not finite on one counts on all. Only in
            fp16; otherwise averaging spreads the NaN.
        replay: the class `GraphReplay` of graph_replay.py, which makes one CUDA graph of what follows the
            backward pass: on a GPU, for torch's SGD, Adam and AdamW with `fused` or `capturable`, and an
            optimizer with `steps_on_device = True`, whose learning rates become float32 on the device.
            Elsewhere without effect.

    Raises:
        ValueError: an unknown precision, no parameters, several devices, max_norm <= 0.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> amp = AmpStep(torch.optim.SGD(layer.parameters(), lr=0.1, fused=True), precision="bf16")
        >>> with amp.autocast():
        ...     loss = layer(torch.ones(4, 2)).square().mean()
        >>> amp.backward(loss)
        >>> amp.step()
        >>> float(amp.skipped), layer.weight.grad is None
        (0.0, True)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        precision: Precision = "fp32",
        max_norm: float | None = None,
        init_scale: float = 65536.0,
        growth_interval: int = 2000,
        halt: bool = False,
        agree: Callable[[Tensor], object] | None = None,
        replay: Callable[[torch.device], Replay] | None = None,
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        devices = {p.device for p in parameters}
        if precision not in ("fp32", "bf16", "fp16"):
            raise ValueError(f"precision must be 'fp32', 'bf16' or 'fp16', got {precision!r}")
        if len(devices) != 1:
            raise ValueError(
                f"the parameters must be on one device, got {sorted(map(str, devices))}"
            )
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be above 0 (None does not clip), got {max_norm}")
        self.optimizer = optimizer
        self.precision = precision
        self.max_norm = max_norm
        self.device = devices.pop()
        self.halted = torch.zeros((), dtype=torch.float32, device=self.device)
        """0-d float32: 1 if a watched tensor, or (except in fp16) a gradient, was not finite."""
        self.num_halted = torch.zeros_like(self.halted)
        """0-d float32, with `halt`: steps that were skipped since `halted` became 1."""
        self.skipped = torch.zeros_like(self.halted) if precision == "fp16" else self.halted
        """0-d float32: 1 if the last step was skipped. A schedule may read it later, without waiting."""
        self.norm = torch.zeros((), dtype=torch.float32, device=self.device)
        """0-d float32: the norm of the last gradients before clipping; updated only with `max_norm`."""
        self._parameters = parameters
        self._growth_interval, self._halt = growth_interval, halt
        self._agree = agree
        self._one_dtype = {p.dtype for p in parameters} == {torch.float32}
        self._one = torch.ones((), dtype=torch.float32, device=self.device)
        self._scale = torch.full((), init_scale, dtype=torch.float32, device=self.device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=self.device)
        self._roots: dict[tuple[float, torch.dtype], Tensor] = {}
        self._fused = _skips_in_kernel(optimizer)
        self._bare_step = _without_wrappers(type(optimizer).step)
        self._replay: Replay | None = None
        if replay is not None and _is_on_device(optimizer):
            self._replay = replay(self.device)
        self._rates: list[tuple[float, Tensor]] = []  # of each group, on the device

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast context for the forward pass and the loss; call backward outside it."""
        return autocast(self.device, self.precision)

    def backward(self, loss: Tensor, *, weight: float = 1.0) -> None:
        """Add the gradients of `weight * loss` to the parameters, scaled in fp16.

        The weight is the gradient of the root, so the graph gets no extra node.

        Args:
            loss: 0-d floating-point, on the device.
            weight: this micro-batch's fraction of the batch.
        """
        root = self._roots.get((weight, loss.dtype))
        if root is None:
            if len(self._roots) == _MAX_ROOTS:
                self._roots.clear()
            root = self._roots[weight, loss.dtype] = torch.full_like(loss, weight)
        if self.precision == "fp16":
            root = root * self._scale
        elif self._agree is not None:
            root = root + loss.detach() * 0
        if type(loss) is Tensor and _run_engine is not None:
            # The last call inside loss.backward(), without its 20 us of checks of the arguments.
            _run_engine(
                (loss,), (root,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        else:
            loss.backward(gradient=root)

    def step(self, *, watch: Sequence[Tensor] = ()) -> None:
        """Unscale, clip, step (or skip), update the scale, and drop the gradients.

        Args:
            watch: float32 tensors on the device that must be finite too, such as the loss.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        watched = list(watch)
        replay = self._replay_of(gradients)
        if not self._halt:
            self.halted.zero_()
        if self.precision == "fp16" or replay is not None:  # each loss is at a new address
            self._check(watched, self.halted, self._one)
            watched = []
        if self.precision == "fp16" and self._agree is not None:
            self._agree(self.halted)
        if replay is None:
            self._finish(gradients, watched)
        else:
            self._finish_by(replay, gradients)
        for p in self._parameters:
            p.grad = None

    def clear_halt(self) -> None:
        """With `halt`: let the next steps count again."""
        self.halted.zero_()
        self.num_halted.zero_()

    @property
    def scale(self) -> Tensor | None:
        """0-d float32 on the device: the loss scale in fp16, else None."""
        return self._scale if self.precision == "fp16" else None

    def loss_scale(self) -> float:
        """The loss scale in fp16, else 1. It waits for the device, so do not call it in every step."""
        return float(self._scale) if self.precision == "fp16" else 1.0

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its growth counter, as tensors on the CPU."""
        return {"scale": self._scale.cpu(), "growth_tracker": self._growth_tracker.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._scale.copy_(state["scale"])
        self._growth_tracker.copy_(state["growth_tracker"])

    def _finish(self, gradients: list[Tensor], watched: list[Tensor]) -> None:
        """All that follows the backward pass, by kernels that depend on no value on the host."""
        if self.precision == "fp16":
            self.skipped.copy_(self.halted)
            self._check(gradients, self.skipped, self._scale.double().reciprocal().float())
        else:
            self._check([*gradients, *watched], self.halted, self._one)
        divisor = None
        if self.max_norm is not None and gradients:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            if self._replay is None:
                self.norm = norm
            else:  # a graph's own tensors are overwritten by the next one
                self.norm.copy_(norm)
            # As torch.nn.utils.clip_grad_norm_: gradients times max_norm / (norm + 1e-6), at most 1.
            divisor = ((norm + 1e-6) / self.max_norm).clamp_(min=1.0)
        self._step(gradients, divisor)
        if self._halt:
            self.num_halted += self.halted
        if self.precision == "fp16":
            torch._amp_update_scale_(
                self._scale, self._growth_tracker, self.skipped, 2.0, 0.5, self._growth_interval
            )

    def _replay_of(self, gradients: list[Tensor]) -> Replay | None:
        """Who does this step; None if there is no replay at all, and rates stay numbers."""
        if self._replay is None:
            return None
        is_dense = all(gradient.layout is torch.strided for gradient in gradients)
        return self._replay if is_dense and _unobserved(self.optimizer) else _run

    def _finish_by(self, replay: Replay, gradients: list[Tensor]) -> None:
        groups = self.optimizer.param_groups
        given = [(group["lr"], group.get("capturable")) for group in groups]
        names = tuple(next(iter(self.optimizer.state.values()), ()))  # in the order of the tensors
        settings = (names, *map(_settings, groups))
        while len(self._rates) < len(groups):
            self._rates.append((math.nan, torch.zeros_like(self._one)))
        for number, group in enumerate(groups):
            rate = group["lr"]
            before, on_device = self._rates[number]
            if isinstance(rate, Tensor):
                self._rates[number] = math.nan, rate
                continue
            if rate != before:
                on_device.fill_(rate)
                self._rates[number] = rate, on_device
            group["lr"] = on_device
            if "capturable" in group:
                group["capturable"] = True  # Adam is else not recorded
        tensors = [*gradients, *_tensors(self.optimizer), *(rate for _, rate in self._rates)]
        try:
            replay(functools.partial(self._finish, gradients, []), tensors, settings)
        finally:
            for group, (rate, capturable) in zip(groups, given, strict=True):
                group["lr"] = rate
                if capturable is not None:
                    group["capturable"] = capturable

    def _check(self, tensors: list[Tensor], flag: Tensor, factor: Tensor) -> None:
        """Multiply by `factor`, and set `flag` if a value is not finite; one kernel per dtype."""
        if self._one_dtype:
            if tensors:
                torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, factor)
            return
        for dtype in {t.dtype for t in tensors}:
            same = [t for t in tensors if t.dtype is dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(same, flag, factor)

    def _step(self, gradients: list[Tensor], divisor: Tensor | None) -> None:
        optimizer: Any = self.optimizer
        if self._fused:
            # As torch.amp.GradScaler: fused kernels divide by grad_scale and skip if found_inf is 1.
            optimizer.grad_scale = None if divisor is None else divisor.float()  # read as float32
            optimizer.found_inf = self.skipped
            if _unobserved(optimizer):
                with torch.no_grad():  # as that wrapper; no fused kernel is differentiable
                    self._bare_step(optimizer)
            else:
                optimizer.step()
            optimizer.grad_scale = optimizer.found_inf = None
            return
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)
        with _undone_if(self.skipped, optimizer):
            optimizer.step()


def _run(work: Callable[[], object], tensors: object, settings: object) -> None:
    """In place of a replay, where a hook or profiler is to see the step: the same bits."""
    work()


def _settings(group: dict[str, Any]) -> tuple[Hashable, ...]:
    """What a kernel gets as numbers."""
    return tuple(
        tuple(value) if type(value) is list else value
        for name, value in group.items()
        if name not in ("params", "lr")
    )


def _is_on_device(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    by_kernels = getattr(optimizer, "steps_on_device", False) or (
        type(optimizer) in _ON_DEVICE
        and all(group.get("fused") or group.get("capturable") for group in groups)
    )
    return by_kernels and all(p.is_cuda for group in groups for p in group["params"])


def _unobserved(optimizer: Optimizer) -> bool:
    """Whether the wrapper of `step` (9 us) can be bypassed: no profiler and no hook needs it."""
    return (
        "step" not in optimizer.__dict__  # torch's schedulers replace it by a counter
        and getattr(type(optimizer).step, "hooked", False)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not _global_optimizer_pre_hooks
        and not _global_optimizer_post_hooks
        and not torch._C._autograd._profiler_enabled()
    )


def _without_wrappers(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's `step` without torch's wrappers: that for hooks, and that of its own optimizers, which
    imports torch.compile (2 s of a processor's time). What others have wrapped a step in stays."""
    file = Optimizer.profile_hook_step.__code__.co_filename
    bare: Any = step
    while hasattr(bare, "__wrapped__") and getattr(bare, "__code__", None) is not None:
        if bare.__code__.co_filename != file:
            break
        bare = bare.__wrapped__
    made: Callable[..., Any] = bare
    return made


def _skips_in_kernel(optimizer: Optimizer) -> bool:
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    if type(optimizer) is not torch.optim.SGD:
        return True
    if any(group["momentum"] and group["dampening"] for group in optimizer.param_groups):
        return False
    # Fused SGD allocates its momentum uninitialized, and a skipped first step would leave it so. Zeros
    # give the same first step: 0 * momentum + gradient.
    for group in optimizer.param_groups:
        for p in group["params"]:
            if group["momentum"] and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return True


@contextlib.contextmanager
def _undone_if(flag: Tensor, optimizer: Optimizer) -> Iterator[None]:
    """Undo the step in the block, on the device, if `flag` is 1; state that is new in it is zeroed."""
    with torch.no_grad():
        before = [(t, t.clone()) for t in _tensors(optimizer)]
    known = {id(t) for t, _ in before}
    yield
    undo = flag.bool()
    with torch.no_grad():
        for t, old in before:
            t.copy_(torch.where(undo.to(t.device), old, t))
        for t in _tensors(optimizer):
            if id(t) not in known:
                t.masked_fill_(undo.to(t.device), 0)


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return parameters + state
