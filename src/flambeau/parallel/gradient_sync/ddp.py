"""Equal models on all ranks: torch's DistributedDataParallel without its wrapper around the model.

The user's loop calls its own model. DDP gets the parameters alone, in a module whose forward pass does
nothing: calling it before a batch prepares DDP's reducer, which then averages the gradients during backward,
however the parameters are used.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.gradient_sync.interface import buffer_versions
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.parallel.sync_batchnorm import SyncBatchNorm

COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")
_WIRE = {"fp16": torch.float16, "bf16": torch.bfloat16}
# The first steps, in which gradients change most, are not compressed; chosen, untested.
_POWER_SGD_START = 100
_Reduce = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


class _Bucket(NamedTuple):
    """What DDP reduces at once; the views are parts of the buffer."""

    buffer: Tensor
    views: list[Tensor]
    parameters: list[Tensor]


class Replicas:
    """Averages the gradients of a model over the ranks, and keeps its other state equal.

    The first step is reduced after backward, when it is known whether every parameter has a gradient on every
    rank. If so, DDP overlaps from the second step on.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, compression: str = "none") -> None:
        self._model, self._ranks, self._compression = model, ranks, compression
        self.averages_over = ranks.world
        self.together = None
        self._norms = [m for m in model.modules() if isinstance(m, SyncBatchNorm)]
        self._is_held = False
        self._first_share = 0  # the rank that computes the share of rank 0
        self._start()

    def _start(self) -> None:
        named = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self._names, self._parameters = list(named), list(named.values())
        self._buckets: list[_Bucket] = []
        self._overlaps: bool | None = None
        self._broadcast: list[str] = []
        self._versions: dict[str, tuple[int, int]] = {}
        self._is_recorded = False
        if not self._parameters:
            raise InputError("the model has no parameter that is trained: there is nothing to do")
        self._ddp = DistributedDataParallel(
            _Carrier(self._parameters), gradient_as_bucket_view=True
        )
        self._reduce = _reduction(self._compression)
        self._ddp.register_comm_hook(None, _annotated(self._on_bucket))
        # After its first backward DDP rebuilds its buckets in the order in which gradients came. That order
        # must depend on the model alone, so that a resumed process adds in the same order.
        for _ in range(2):
            self._buckets.clear()
            self._ddp(touch=True).backward()
        for p in self._parameters:
            p.grad = None
        self._is_recorded = True

    def _on_bucket(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if not self._is_recorded:
            buffer = bucket.buffer()
            parameters = bucket.parameters()
            views = [_view(p, g) for p, g in zip(parameters, bucket.gradients(), strict=True)]
            self._buckets.append(_Bucket(buffer, views, parameters))
            return default_hooks.allreduce_hook(_world(), bucket)
        return self._reduce(state, bucket)

    def start_epoch(self) -> None:
        """Check whether other parameters are trained now.

        All ranks get rank 0's running statistics, for frozen normalization layers.
        """
        self.share_statistics({})
        trained = [p for p in self._model.parameters() if p.requires_grad]
        if list(map(id, trained)) != list(map(id, self._parameters)):
            self._start()

    def hold(self, *, behind: int, is_trial: bool) -> None:
        self._is_held = True
        self._first_share = behind % self._ranks.world

    def before_batch(self, micro: MicroBatch) -> None:
        for norm in self._norms:
            norm.counted = None if micro.all_have else bool(micro.size)
        if self._overlaps is None:
            # Again in the first step of each process, so that a resume continues like an unstopped run.
            self._find_written_buffers(starts=micro.part == 1)
        if self._broadcast:
            buffers = dict(self._model.named_buffers())
            self._ranks.broadcast_tensors(
                [buffers[name] for name in self._broadcast], source=self._first_share
            )
        if micro.ends_batch and self._overlaps and not self._is_held:
            self._ddp()

    def after_part(self) -> None:
        """Nothing to do before the last one."""

    def after_backward(self, *, scale: Tensor | None = None) -> Sequence[Tensor]:
        """Make the gradients the averages over the ranks, see GradientSync."""
        missing = [n for n, p in zip(self._names, self._parameters, strict=True) if p.grad is None]
        if self._overlaps:
            if missing:
                raise RuntimeError(
                    f"{_few(missing)} got no gradient in this step, but in the first one: "
                    "freeze parameters only between epochs, or leave none out"
                )
            if self._is_held:
                self._average(has_missing=False)
            self._is_held = False
            return ()
        if self._overlaps is None:
            self._decide_overlap(missing)
            self._find_written_buffers()
        self._average(has_missing=not self._overlaps)
        self._is_held = False
        return ()

    def _find_written_buffers(self, *, starts: bool = False) -> None:
        """Find which buffers a forward pass writes, since the start of a process's first step."""
        now = buffer_versions(self._model)
        if starts:
            self._versions = now
        changed = [name for name in now if now[name] != self._versions.get(name)]
        self._broadcast = sorted(set().union(*self._ranks.gather(changed)))

    def _decide_overlap(self, missing: list[str]) -> None:
        missing = sorted(set().union(*self._ranks.gather(missing)))
        self._overlaps = not missing
        if missing and self._compression != "none":
            self._ranks.first(lambda: self._refuse(missing))

    def _refuse(self, missing: list[str]) -> None:
        raise InputError(
            f"compression = {self._compression!r} needs a gradient for each parameter in each step, and "
            f"{_few(missing)} got none; freeze them, or leave the compression out"
        )

    def _average(self, *, has_missing: bool) -> None:
        """Average all gradients now; a missing one counts as zero if another rank has it."""
        absent: set[Tensor] = set()
        if has_missing:
            present = torch.tensor([float(p.grad is not None) for p in self._parameters])
            present = present.to(self._parameters[0].device)
            self._ranks.worst(present)
            absent = {
                p for p, got in zip(self._parameters, present.tolist(), strict=True) if not got
            }
        works = []
        for bucket in self._buckets:
            for view, p in zip(bucket.views, bucket.parameters, strict=True):
                if p.grad is None:
                    view.zero_()
                else:
                    view.copy_(p.grad)
            # The same operations as in DDP's hooks, for the same bits.
            sent = bucket.buffer.to(_WIRE.get(self._compression, bucket.buffer.dtype))
            sent.div_(self._ranks.world)
            works.append((dist.all_reduce(sent, async_op=True), sent))
        for bucket, (work, sent) in zip(self._buckets, works, strict=True):
            work.wait()
            if sent is not bucket.buffer:
                bucket.buffer.copy_(sent)
        for bucket in self._buckets:
            for view, p in zip(bucket.views, bucket.parameters, strict=True):
                p.grad = None if p in absent else view

    def roll_back(self) -> None:
        """Forget what compression keeps of earlier gradients, which may not be finite."""
        self._reduce = _reduction(self._compression)

    def share_statistics(self, also: Mapping[str, Tensor]) -> None:
        self._ranks.broadcast_tensors([*self._model.buffers(), *also.values()])


class _Carrier(nn.Module):
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)

    def forward(self, *, touch: bool = False) -> Tensor | None:
        """Nothing; with `touch` a zero whose backward reaches the parameters from the last to the first."""
        if not touch:
            return None
        out = torch.zeros((), device=self.held[0].device)
        for p in self.held:
            out = _Touch.apply(p, out)
        return out


class _Touch(torch.autograd.Function):
    """A link of a chain: passes a zero on, and gives its parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, chain: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (parameter,) = ctx.saved_tensors
        return torch.zeros_like(parameter), gradient


def _view(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient's memory in its bucket, in the strides of the parameter, as DDP fills it.

    Fused optimizers pair parameters and gradients by memory order, whatever the strides.
    """
    strides = torch.empty_like(parameter).stride()  # a dense parameter keeps its strides
    return gradient.as_strided(parameter.size(), strides, gradient.storage_offset())


def _reduction(compression: str) -> _Reduce:
    world = _world()
    if compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            world, matrix_approximation_rank=4, start_powerSGD_iter=_POWER_SGD_START
        )

        def reduce(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            # After a skipped step, NaN in the state that it keeps would spread to all later steps.
            for kept in (state.error_dict, state.q_memory_dict):
                if (tensor := kept.get(bucket.index())) is not None:
                    tensor.masked_fill_(~tensor.isfinite().all(), 0)
            return _one_by_one(powerSGD_hook.powerSGD_hook(state, bucket), bucket)

        return reduce
    hook = {
        "none": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }[compression]
    return lambda _, bucket: hook(world, bucket)


def _one_by_one(
    future: torch.futures.Future[Tensor], bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """PowerSGD starts collectives in callbacks, which gloo runs in a different order on each rank."""
    if bucket.buffer().device.type == "cpu":
        future.wait()
    return future


def _annotated(hook: _Reduce) -> _Reduce:
    """A plain function: DDP reads the annotations of its hook, which a bound method hides."""

    def on_bucket(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    return on_bucket


def _world() -> dist.ProcessGroup:
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    return dist.group.WORLD


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
