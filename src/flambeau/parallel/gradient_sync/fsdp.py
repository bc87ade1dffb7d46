"""A model sharded over ranks by torch's FSDP2, for models too large for one device.

A rank holds a piece of every parameter, its gradient and its optimizer state. A block of the model is
gathered for its forward and backward pass, and freed after each. The rest of a run sees the pieces as plain
tensors that share FSDP's memory, so fused optimizers (torch's fused SGD does not support DTensor), weight
averages and checkpoint copies work as without sharding.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.gradient_sync.interface import buffer_versions
from flambeau.parallel.ranks import Ranks
from flambeau.parallel.shard_layout import Layout, Piece
from flambeau.recipes.parallel.sync_batchnorm import SyncBatchNorm

UNIT_BYTES = 4 << 20  # smaller blocks are gathered with the surrounding one; chosen, untested
# Optimizers that treat each element alone, so that a piece can be stepped without the others.
_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)


def shard_model(
    model: nn.Module,
    ranks: Ranks,
    device: torch.device,
    *,
    gather_dtype: torch.dtype | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> None:
    """Leave each rank a piece of every parameter, in place; all ranks call it with the same model.

    Rank 0's weights and buffers count. A model on the CPU moves to the device block by block, which never
    holds all of it. Make the optimizer afterwards, over `model.parameters()`.

    Args:
        model: not compiled, not sharded yet.
        gather_dtype: gather in bfloat16 or float16, for a model that is only called under autocast: half the
            traffic, and no half-precision copy lives until backward. It also rounds what autocast keeps in
            float32 (norms, position embeddings, sums of a residual stream), except blocks with BatchNorm.
        unit_bytes: from which a block is gathered alone.
    """
    _check(model)
    mesh = init_device_mesh(device.type, (ranks.world,))
    _settle(list(model.buffers()), ranks, device)
    for unit in [*units(model, unit_bytes), model]:
        _settle([p for p in unit.parameters() if not isinstance(p, DTensor)], ranks, device)
        # Also the root: otherwise an evaluation would leave its weights gathered, and the next forward pass
        # would use these old ones.
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=True, mp_policy=_policy(unit, gather_dtype)
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The first gathering allocates permanently. In a user's inference_mode it would make tensors that
            # no backward pass can use.
            module.unshard()
            module.reshard()


def units(model: nn.Module, unit_bytes: int = UNIT_BYTES) -> list[nn.Module]:
    """The blocks of a model that are gathered one at a time, inner ones first; the rest is gathered together.

    A block is an item of a Sequential, ModuleList or ModuleDict with modules inside, a sibling of its class,
    no parameter shared with the rest, and `unit_bytes` of parameters outside of inner blocks.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(p, set()).add(module)
    blocks: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for block in _repeated(model):
        inside, parameters = set(block.modules()), set(block.parameters())
        size_bytes = sum(p.numel() * p.element_size() for p in parameters - taken)
        if size_bytes >= unit_bytes and all(owners[p] <= inside for p in parameters):
            blocks.append(block)
            taken |= parameters
    return blocks


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    for container in reversed(list(model.modules())):  # inner ones first
        if isinstance(container, containers):
            classes = Counter(map(type, container.children()))
            for child in container.children():
                has_forward = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
                if classes[type(child)] > 1 and has_forward and any(True for _ in child.children()):
                    yield child


def _check(model: nn.Module) -> None:
    if not dist.is_initialized():
        raise InputError(
            "shard = 'fsdp' needs the processes of a job: start it with --procs or torchrun"
        )
    for name, p in model.named_parameters():
        what = None
        if not p.dim():
            what = "is a single number of shape (): make its shape (1,)"
        elif p.is_meta:
            what = "is on the meta device: give it values first"
        elif isinstance(p, DTensor):
            what = "is sharded already"
        if what is not None:
            raise InputError(f"shard = 'fsdp' cannot shard the model: {name} {what}")


def _policy(unit: nn.Module, gather_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    if any(isinstance(module, _BatchNorm) for module in unit.modules()):
        gather_dtype = None  # its kernels need weights of the dtype of its running statistics
    # Autocast casts the inputs where needed, instead of at every block.
    return MixedPrecisionPolicy(
        param_dtype=gather_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _settle(tensors: list[Tensor], ranks: Ranks, device: torch.device) -> None:
    """Move tensors to the device, contiguous as FSDP needs them, with the values of rank 0."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device, memory_format=torch.contiguous_format)
    ranks.broadcast_tensors(tensors)


class Shards:
    """A rank's pieces of a sharded model, with the methods of GradientSync.

    Gradients are reduced and scattered in every backward pass, even while accumulating, so that no rank holds
    them whole.

    Args:
        max_norm: clip the norm of all ranks' gradients together.

    Attributes:
        pieces: a module with the model's names and buffers, whose parameters are this rank's pieces.
        norm: 0-d float32, of all ranks' last gradients, before clipping.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, max_norm: float | None = None) -> None:
        self._model, self._ranks, self._max_norm = model, ranks, max_norm
        self.averages_over = ranks.world
        self.together = None
        self._norms = [m for m in model.modules() if isinstance(m, SyncBatchNorm)]
        self._versions: dict[str, tuple[int, int]] | None = None
        self._broadcast: list[str] = []
        self._is_stepped = False
        # FSDP does not move the pieces; only `model.to` and load_state_dict(assign=True) would.
        self._pairs = {
            p: nn.Parameter(_local(p.detach()), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        self.pieces = self._mirror(model, {})
        # If the last rank has a trained weight, all have.
        sizes = [len(p) for p in model.parameters() if p.requires_grad]
        last = ranks.world - 1
        self._all_train = any(last * math.ceil(n / ranks.world) < n for n in sizes)
        self.norm = torch.zeros((), device=next(iter(self._pairs.values())).device)

    def _mirror(self, module: nn.Module, seen: dict[nn.Module, nn.Module]) -> nn.Module:
        if module not in seen:
            mirror = seen[module] = nn.Module()
            mirror._buffers = module._buffers  # the same dict: a forward pass may replace a tensor
            mirror._non_persistent_buffers_set = module._non_persistent_buffers_set
            for name, p in module._parameters.items():
                mirror._parameters[name] = None if p is None else self._pairs[p]
            for name, child in module._modules.items():
                mirror._modules[name] = None if child is None else self._mirror(child, seen)
        return seen[module]

    def adopt(self, optimizer: Optimizer) -> Layout:
        """Let an optimizer step the pieces instead of the model's parameters; before its first step.

        It must work elementwise. InputError: one of whole parameters (Muon, Adafactor, LBFGS), or unknown.
        """
        if not isinstance(optimizer, _ELEMENTWISE):
            names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
            raise InputError(
                f"shard = 'fsdp' steps every rank's piece of a parameter alone, which is right for {names} "
                f"and those derived from them; {type(optimizer).__name__} is none of them"
            )
        # Adagrad makes its state, with step 0, in its constructor.
        if any(float(entries.get("step", 1)) for entries in optimizer.state.values()):
            raise ValueError("the optimizer has a state already: adopt it before the first step")
        pieces = {id(piece): _piece(p) for p, piece in self._pairs.items()}
        adopted = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                entries = optimizer.state.pop(p, {})
                if (
                    entries and self._pairs[p].numel()
                ):  # an empty piece has no state in any optimizer
                    optimizer.state[self._pairs[p]] = {
                        name: t.to_local() if isinstance(t, DTensor) else t
                        for name, t in entries.items()
                    }
            group["params"] = [self._pairs[p] for p in group["params"]]
            adopted += [pieces[id(p)] for p in group["params"]]
        named = self.pieces.state_dict(keep_vars=True)
        return Layout(
            model={
                name: pieces.get(id(t)) or Piece.whole(t.shape)
                for name, t in named.items()
                if isinstance(t, Tensor)
            },
            parameters=adopted,
        )

    def start_epoch(self) -> None:
        """Nothing to do: FSDP checks in each step what is frozen."""

    def roll_back(self) -> None:
        """Nothing is kept from earlier gradients."""

    def hold(self, *, behind: int, is_trial: bool) -> None:
        """Nothing to do: FSDP exchanges gradients in the backward pass, and each rank computes its share."""

    def before_batch(self, micro: MicroBatch) -> None:
        for norm in self._norms:
            norm.counted = None if micro.all_have else bool(micro.size)
        if self._versions is None:
            self._versions = buffer_versions(self._model)
        elif self._broadcast:
            buffers = dict(self._model.named_buffers())
            self._ranks.broadcast_tensors([buffers[name] for name in self._broadcast])

    def after_part(self) -> None:
        """Nothing to do before the last one."""

    def after_backward(self, *, scale: Tensor | None = None) -> Sequence[Tensor]:
        """Hand the clipped gradients to the pieces, before the optimizer's step.

        If one is not finite, all become NaN on all ranks, so that all skip the step. `scale`, 0-d, is the
        loss's factor in fp16. Returns the norm, not finite if a gradient is not; nothing in fp16, where
        gradients are checked.
        """
        if scale is not None and not self._all_train:
            # Without a gradient that rank would not see skipped steps, and its loss scale would grow.
            raise InputError(
                f"shard = 'fsdp' leaves the last of {self._ranks.world} processes no weight that is trained, "
                "which fp16 needs: use fewer processes, or bf16"
            )
        if not self._is_stepped:
            # As in Replicas, buffers that a forward pass writes and may read again come from rank 0.
            now = buffer_versions(self._model)
            self._is_stepped = True
            changed = [name for name in now if now[name] != (self._versions or {}).get(name)]
            self._broadcast = sorted(set().union(*self._ranks.gather(changed)))
        gradients: list[Tensor] = []
        # In float64, because the square of a large norm overflows float32.
        total = torch.zeros((), dtype=torch.float64, device=self.norm.device)
        with torch.no_grad():
            for p, piece in self._pairs.items():
                if p.grad is not None and piece.numel():
                    piece.grad = _local(p.grad)
                    gradients.append(piece.grad)
                p.grad = None
            if gradients:
                norms = torch._foreach_norm(gradients)
                total += torch.stack([norm.double() for norm in norms]).square_().sum()
            dist.all_reduce(total)
            self.norm = (total.sqrt() if scale is None else total.sqrt() / scale).float()
            factor = self.norm * 0 + 1
            if self._max_norm is not None:
                # As in torch.nn.utils.clip_grad_norm_.
                factor = factor * (self._max_norm / (self.norm + 1e-6)).clamp_(max=1.0)
            if gradients:
                torch._foreach_mul_(gradients, factor)
        return [self.norm] if scale is None else []

    def share_statistics(self, also: Mapping[str, Tensor]) -> None:
        """Give all ranks the buffers of rank 0, which are the saved ones."""
        pieces = {name for name, _ in self.pieces.named_parameters(remove_duplicate=False)}
        averages = [t for name, t in also.items() if name not in pieces]
        self._ranks.broadcast_tensors([*self._model.buffers(), *averages])


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor), "shard_model has sharded every parameter"
    return tensor.to_local()


def _piece(parameter: Tensor) -> Piece:
    assert isinstance(parameter, DTensor)
    (chunk,) = parameter.__create_chunk_list__()  # torch's own interface to its checkpoints
    return Piece(tuple(parameter.shape), tuple(chunk.offsets), tuple(chunk.sizes))
