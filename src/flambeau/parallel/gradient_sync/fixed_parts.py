"""Steps in fixed parts: equal bits, whichever process computes which part.

Each part is computed alone. Gradients are summed in one tree over the parts
(recipes/parallel/fixed_order_sum.py), and the running statistics of BatchNorm are updated in the order of the
parts, in one process too. With SyncBatchNorm the parts of a process are computed together
(sync_batchnorm_parts.py).
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.gradient_sync.interface import buffer_versions
from flambeau.parallel.gradient_sync.sync_batchnorm_parts import GatheredRows, SyncBatchNormParts
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.parallel.fixed_order_sum import FixedOrderSum, parts_of
from flambeau.recipes.parallel.sync_batchnorm import SyncBatchNorm


class FixedParts:
    """A `GradientSync` for one or several processes.

    `together` computes the parts together if the model has SyncBatchNorm; else None.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, parts: int) -> None:
        self._model, self._ranks, self._parts = model, ranks, parts
        self.averages_over = 1
        norms = list(_with_statistics(model))
        self.together: SyncBatchNormParts | None = None
        if any(isinstance(m, SyncBatchNorm) for m in model.modules()):
            self.together = SyncBatchNormParts(model, ranks, parts=parts)
        self._statistics = _RunningStatistics(norms)
        self._versions: dict[str, tuple[int, int]] | None = None
        self._is_checked = False
        self._is_held = self._is_trial = False
        self._share = ranks.rank  # whose parts this rank computes
        self._start()

    def _start(self) -> None:
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        if not self._trained:
            raise InputError("the model has no parameter that is trained: there is nothing to do")
        self._sum = FixedOrderSum(self._trained, parts=self._parts)

    def start_epoch(self) -> None:
        trained = [p for p in self._model.parameters() if p.requires_grad]
        if list(map(id, trained)) != list(map(id, self._trained)):
            self._start()

    def hold(self, *, behind: int, is_trial: bool) -> None:
        if self._is_held:  # an earlier computation of this step, which is undone
            if self.together is not None:
                self.together.end_step()
            if not self._is_trial:
                self._start()
        self._is_held = True
        self._is_trial = is_trial
        self._share = (self._ranks.rank - behind) % self._ranks.world
        if self.together is not None:
            self.together.behind = behind

    def before_batch(self, micro: MicroBatch) -> None:
        """Reset the running statistics to those at the start of the step."""
        self._dealt = micro.dealt
        if self.together is not None:
            self.together.before_batch(micro)
        if micro.part == 1:
            self._statistics.begin_step()
        else:
            self._statistics.put_back()
        if not self._is_checked and self._versions is None:
            self._versions = buffer_versions(self._model)
        if micro.ends_batch and self._has_any and self.together is None and not self._is_held:
            self._sum.expect_last(parts=micro.dealt)

    @property
    def _has_any(self) -> bool:
        """Whether this rank has a part in this step; otherwise it computes a stand-in."""
        parts = parts_of(self._share, self._ranks.world, self._parts)
        return parts.start < min(parts.stop, self._dealt)

    def after_part(self) -> None:
        if not self._is_checked:
            self._check_buffers()
        if self._has_any and not self._is_trial:
            self._sum.take(alone=self._is_held)
            self._statistics.take()
            return
        for p in self._trained:  # of a stand-in, as there are fewer parts than ranks, or a trial
            p.grad = None

    def after_backward(self, *, scale: Tensor | None = None) -> Sequence[Tensor]:
        self._is_checked = True
        self._sum.send(parts=self._dealt)
        self._statistics.send(self._ranks, dealt=self._dealt, parts=self._parts)
        self._sum.give(parts=self._dealt)
        self._statistics.end_step()
        if self.together is not None:
            self.together.end_step()
        self._is_held = False
        return ()

    def _check_buffers(self) -> None:
        now = buffer_versions(self._model)
        before = self._versions or {}
        written = sorted(name for name in now if now[name] != before.get(name))
        if written:
            raise InputError(
                f"parts = {self._parts}: the forward pass writes the buffer '{written[0]}' of the model, and "
                "what it then holds depends on which process computes which part; leave parts out"
            )

    def share_statistics(self, also: Mapping[str, Tensor]) -> None:
        """They are equal on all ranks already."""

    def roll_back(self) -> None:
        """Nothing is kept from earlier steps."""


class _RunningStatistics:
    """The running mean and variance of all BatchNorm layers, updated in the order of the parts.

    Each part starts from the statistics r of the step's start, and its c calls of a layer give a r + b, with
    a = (1 - momentum)^c. The update is x -> a x + b, part by part.
    """

    def __init__(self, layers: Sequence[_BatchNorm]) -> None:
        self._layers = layers
        self._made: list[Tensor] = []
        self._counted: list[Tensor] = []
        if not self._layers:
            return
        like = next(self._layers[0].buffers())
        sizes = torch.tensor([m.num_features for m in self._layers])
        numbers = torch.repeat_interleave(torch.arange(len(self._layers)), sizes)
        self._layer_of = torch.cat([numbers, numbers]).to(like.device)
        keeps = [1.0 - (m.momentum or 0.0) for m in self._layers]
        self._keeps = torch.tensor(keeps, dtype=like.dtype, device=like.device)
        self._live = _not_none(
            *(m.running_mean for m in self._layers), *(m.running_var for m in self._layers)
        )
        self._counters = _not_none(*(m.num_batches_tracked for m in self._layers))

    def begin_step(self) -> None:
        """Note the statistics from which each part of this step starts."""
        self._made.clear()
        self._counted.clear()
        if self._layers:
            self._before = torch.cat(self._live)
            self._starts = self._before.split([len(buffer) for buffer in self._live])
            self._counted.append(torch.stack(self._counters))

    def put_back(self) -> None:
        """Reset them to the start of the step; the counters continue."""
        if self._layers:
            with torch.no_grad():
                torch._foreach_copy_(self._live, list(self._starts))

    def take(self) -> None:
        """Note what a part has made of them."""
        if self._layers:
            self._made.append(torch.cat(self._live))
            self._counted.append(torch.stack(self._counters))

    def send(self, ranks: Ranks, *, dealt: int, parts: int) -> None:
        """Start to exchange the statistics of all parts; this step has `dealt` of them."""
        if not self._layers:
            return
        width = len(self._before) + len(self._layers)
        mine = self._updates() if self._made else self._before.new_zeros(0, width)
        self._rows = GatheredRows(mine, ranks, parts=parts, dealt=dealt)

    def end_step(self) -> None:
        if not self._layers:
            return
        updates = self._rows.wait()
        # A row per part: the shapes, and so the order of operations, do not depend on the number of ranks.
        made, calls = updates.split([len(self._before), len(self._layers)], dim=1)
        keeps = (self._keeps**calls)[:, self._layer_of]
        added = made - keeps * self._before
        now = self._before
        for kept, more in zip(keeps, added, strict=True):
            now = kept * now + more
        counts = self._counted[0] + calls.sum(0).to(self._counted[0].dtype)
        with torch.no_grad():
            torch._foreach_copy_(self._live, list(now.split([len(one) for one in self._live])))
            torch._foreach_copy_(self._counters, list(counts.unbind()))

    def _updates(self) -> Tensor:
        """Of this rank's parts: the statistics of each, and its number of calls of each layer."""
        made = torch.stack(self._made)
        calls = torch.stack(self._counted).diff(dim=0)
        return torch.cat([made, calls.to(made.dtype)], dim=1)


def _not_none(*buffers: Tensor | None) -> list[Tensor]:
    return [buffer for buffer in buffers if buffer is not None]


def _with_statistics(model: nn.Module) -> Iterator[_BatchNorm]:
    """The BatchNorm layers whose running statistics each part updates by itself; none with SyncBatchNorm."""
    is_synced = any(isinstance(m, SyncBatchNorm) for m in model.modules())
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise InputError(
                f"'{name}' is torch's SyncBatchNorm, which knows processes and no parts: convert the model "
                "with flambeau.recipes.parallel.sync_batchnorm.convert_sync_batchnorm instead"
            )
        if isinstance(module, SyncBatchNorm):
            if isinstance(module.process_group, dist.ProcessGroup):
                raise InputError(
                    f"'{name}' has a process_group, and with parts its statistics are those of all parts: "
                    "leave it out"
                )
            continue
        if not isinstance(module, _BatchNorm) or module.running_mean is None:
            continue
        if is_synced:
            raise InputError(
                f"'{name}' is a BatchNorm of one part, and others are SyncBatchNorm, of all parts: convert "
                "all of them"
            )
        if module.momentum is None:
            raise InputError(
                f"'{name}' has momentum=None, a mean over all batches, which a part cannot update by itself: "
                "give it a momentum, or leave parts out"
            )
        yield module
