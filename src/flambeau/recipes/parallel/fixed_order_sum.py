"""Add the gradients of a batch's parts in one order: the same bits on any number of processes.

把一个批次各部分的梯度按同一顺序相加：无论多少个进程，结果逐位相同。

A batch has K parts, whichever process computes them. Their gradients are added in one binary tree over the
parts, as (0 + 1) + (2 + 3). Each process adds the subtrees of its parts, then for its slice of the gradient
the sums of all processes; then the slices are exchanged. With one part per process this sends as many bytes
as a ring all-reduce.

Source: Higham, "The accuracy of floating point summation", 1993 (pairwise); Li et al., "EasyScale", SC 2023;
buckets as in Li et al., "PyTorch Distributed", VLDB 2020.
Not for sharded parameters (FSDP), nor for sparse gradients.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

_Value = TypeVar("_Value")
_Gradients = list[Tensor | None]  # one for each parameter
_Sums = list[tuple[int, int]]  # first part and number of parts of each sum
_ALIGNED = (
    512  # bytes; torch's allocators align tensors so, and a GPU's order of summation depends on it
)

# torch 2.14 renamed it and deprecated the old name; 2.15 has both again.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def parts_of(rank: int, world: int, parts: int) -> range:
    """The parts of a batch that a process computes; of fewer parts than processes some have none.

    Example:
        >>> [list(parts_of(rank, 3, 4)) for rank in range(3)]
        [[0], [1], [2, 3]]
    """
    return range(rank * parts // world, (rank + 1) * parts // world)


class FixedOrderSum:
    """Collects the gradients of one part after another, and sets `p.grad` to their sum over all processes.

    At most log2(K) + 1 gradients exist at once, and on several processes buffers to send and receive.

    Args:
        parameters: of one dtype and device, the same on all processes; frozen ones are ignored.
        parts: of a batch; the last one of an epoch may have fewer.
        group: the processes; None is all of them, or only this one without a process group.
        bucket_bytes: sent together; sums do not depend on it.

    Attributes:
        local_parts: the parts of this process, to compute in this order.

    Raises:
        ValueError: no parameters, several dtypes, or fewer than one part.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> total = FixedOrderSum(layer.parameters(), parts=4)
        >>> for part in total.local_parts:
        ...     layer(torch.full((8, 2), float(part))).mean().div(4).backward()
        ...     total.take()
        >>> total.give()
        >>> layer.weight.grad
        tensor([[1.5000, 1.5000]])
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        parts: int,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        trained = [p for p in parameters if p.requires_grad]
        if parts < 1 or len({p.dtype for p in trained}) != 1:
            raise ValueError(f"needs parameters of one dtype and at least one part, got {parts=}")
        joined = dist.is_initialized()
        self._world = dist.get_world_size(group) if joined else 1
        self._parts, self._group = parts, group
        self.local_parts = parts_of(dist.get_rank(group) if joined else 0, self._world, parts)
        size = bucket_bytes if self._world > 1 else sum(p.nbytes for p in trained)
        self._buckets = [_Bucket(some, self._world) for some in _bucketed(trained, size)]
        self._taken = self._num_sent = 0
        # Each rank's sums in the current batch, from `expect_last` or `send` on.
        self._sums_by_rank: list[_Sums] = []
        # During the last part's backward pass: how many gradients each bucket still misses, and the ids of
        # the parameters that have theirs.
        self._missing: list[int] | None = None
        self._seen = set[int]()
        # Whether each gradient is accumulated once per backward pass; known after the first such pass.
        self._come_whole: bool | None = None
        # A part whose gradients stay in `p.grad`, so that autograd adds the next part's to them.
        self._held: int | None = None
        self._hooks: list[RemovableHandle] = []

    def expect_last(self, *, parts: int | None = None) -> None:
        """Call before the backward pass of this process's last part, to send sums during it.

        Optional, and useful on one process too: where gradients come in one piece, autograd then adds those
        of neighbours in the tree, which is faster. Others (reentrant checkpointing) are added separately and
        not sent early.

        Args:
            parts: as for `give`.
        """
        if self._come_whole is None and not self._hooks:
            for number, bucket in enumerate(self._buckets):
                hook = _reporting(weakref.WeakMethod(self._arrived), number)
                for p in bucket.parameters:
                    self._hooks.append(p.register_post_accumulate_grad_hook(hook))
        if self._hooks:
            self._missing = [len(bucket.parameters) for bucket in self._buckets]
            self._seen.clear()
            self._sums_by_rank = self._all_sums(parts)

    def take(self, *, alone: bool = False) -> None:
        """Call after the backward pass of each part: it takes the gradients away.

        Args:
            alone: leave none in place for autograd to add the next part's to, which has the same bits.

        Raises:
            RuntimeError: a gradient came after its sum was sent.
        """
        for bucket in self._buckets[: self._num_sent]:
            if any(p.grad is not None for p in bucket.parameters):
                raise RuntimeError(
                    "a parameter got another gradient after its sum was sent: call expect_last() only "
                    "before a part's one backward pass, or not at all"
                )
        part, self._taken = self.local_parts.start + self._taken, self._taken + 1
        is_last, self._missing = self._missing is not None, None
        if is_last:
            self._come_whole = self._come_whole is not False
            while self._world == 1 and self._hooks:  # on one process only the first pass needs them
                self._hooks.pop().remove()
        has_next = part % 2 == 0 and part + 1 < self.local_parts.stop
        if self._come_whole and has_next and not is_last and not alone:
            self._held = part
        else:
            self._take_rest(part)

    def _take_rest(self, part: int) -> None:
        """Take the gradients of a part, and of the held one, from the buckets that are not sent."""
        for bucket in self._buckets[self._num_sent :]:
            self._take_bucket(bucket, part)
        self._held = None

    def _take_bucket(self, bucket: "_Bucket", part: int) -> None:
        bucket.take(part if self._held is None else self._held, part)

    def send(self, *, parts: int | None = None) -> None:
        """Start sending the remaining sums; other collectives may run between this and `give`.

        Optional: all processes call it, or none.

        Args:
            parts: as for `give`.

        Raises:
            ValueError, RuntimeError: as `give`.
        """
        parts = self._number_of(parts)
        due = len(self.local_parts[: max(0, parts - self.local_parts.start)])
        if self._taken != due:
            raise RuntimeError(
                f"gradients of {self._taken} parts were taken, and {due} of the {parts} parts of this batch "
                "belong to this process: call take() once after each backward pass of a part"
            )
        if self._held is not None:  # the part that it was held for is not in this batch
            self._take_rest(self._held)
        if self._world == 1:
            return
        sums_by_rank = self._all_sums(parts)
        if self._num_sent and sums_by_rank != self._sums_by_rank:
            raise RuntimeError(f"expect_last was called with another number of parts than {parts=}")
        self._sums_by_rank = sums_by_rank
        for bucket in self._buckets[self._num_sent :]:
            bucket.send(sums_by_rank, self._group)
        self._num_sent = len(self._buckets)

    def give(self, *, parts: int | None = None) -> None:
        """Set each `p.grad` to the sum, or None if no part has a gradient; all processes call it.

        Args:
            parts: of a shorter batch, which has the first ones; None for all.

        Raises:
            ValueError: `parts` is out of range.
            RuntimeError: `take` was not called once per part of this process, or `expect_last` or `send` got
                another number of parts.
        """
        self.send(parts=parts)
        self._taken = self._num_sent = 0
        if self._world == 1:
            for bucket in self._buckets:
                bucket.set_gradients(bucket.tree.total())
            return
        for bucket in self._buckets:
            bucket.add(self._sums_by_rank, self._group)
        for bucket in self._buckets:
            bucket.set_gradients(bucket.gathered())

    def _number_of(self, parts: int | None) -> int:
        if parts is not None and not 1 <= parts <= self._parts:
            raise ValueError(f"a batch has 1 to {self._parts} parts, got {parts=}")
        return self._parts if parts is None else parts

    def _all_sums(self, parts: int | None) -> list[_Sums]:
        """The sums of each rank."""
        count = self._number_of(parts)
        by_rank = (parts_of(rank, self._world, self._parts) for rank in range(self._world))
        return [_sums_in(rank_parts, count) for rank_parts in by_rank]

    def _arrived(self, number: int, parameter: Tensor) -> None:
        """Called when a gradient was accumulated: send the next buckets that are complete."""
        if self._missing is None:
            return
        if id(parameter) in self._seen:
            self._come_whole = False
            return
        self._seen.add(id(parameter))
        self._missing[number] -= 1
        part = self.local_parts.start + self._taken
        while self._come_whole and self._num_sent < len(self._buckets):
            if self._missing[self._num_sent]:
                return
            bucket = self._buckets[self._num_sent]
            self._take_bucket(bucket, part)
            bucket.send(self._sums_by_rank, self._group)
            self._num_sent += 1


def _reporting(
    arrived: "weakref.WeakMethod[Callable[[int, Tensor], None]]", number: int
) -> Callable[[Tensor], None]:
    """A parameter's hook that does not keep the FixedOrderSum alive."""

    def hook(parameter: Tensor) -> None:
        if (report := arrived()) is not None:
            report(number, parameter)

    return hook


class _Buffer(NamedTuple):
    """Memory for the gradients of a bucket, a slice per process.

    Attributes:
        flat: the whole memory.
        views: of `flat`, one per gradient, with the strides of its parameter, as autograd makes them.
        counts: of `flat`, behind the views: how many sums have a gradient, per parameter.
        received: as much memory, for the slices of other processes.
    """

    flat: Tensor
    views: list[Tensor]
    counts: Tensor
    received: Tensor

    def fill(self, gradients: _Gradients) -> None:
        self.counts.fill_(1)
        targets, sources = [], []
        for number, gradient in enumerate(gradients):
            if gradient is None:
                self.views[number].zero_()
                self.counts[number].zero_()
            else:
                targets.append(self.views[number])
                sources.append(gradient)
        if sources:
            torch._foreach_copy_(targets, sources)


class _Bucket:
    """Parameters whose gradients are added and sent together."""

    def __init__(self, parameters: Sequence[Tensor], world: int) -> None:
        self.parameters, self._world = parameters, world
        self.tree = _Tree(_add_gradients)
        # One for each sum that is sent; the first also receives the total.
        self._buffers: list[_Buffer] = []
        # Pending exchanges: this process's slices of one sum per sender, and the senders.
        self._arriving: list[tuple[dist.Work, Tensor, list[int]]] = []
        self._present: list[bool] = []
        step = _ALIGNED // parameters[0].element_size()
        self._starts = [0, *accumulate(-(-p.numel() // step) * step for p in parameters)]
        self._slice = -(-(self._starts[-1] + len(parameters)) // (world * step)) * step

    def take(self, first: int, last: int) -> None:
        """Take the gradients of one part, or of two neighbours that autograd has added."""
        gradients = [p.grad for p in self.parameters]
        self.set_gradients([None] * len(gradients))
        self.tree.push(first, last - first + 1, gradients)

    def set_gradients(self, gradients: _Gradients) -> None:
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient

    def send(self, sums_by_rank: Sequence[_Sums], group: dist.ProcessGroup | None) -> None:
        """Start sending each process its slice of this process's sums."""
        local = [sums for _, _, sums in self.tree.sums]
        self.tree.sums.clear()
        self._present = [any(g is not None for g in sums) for sums in zip(*local, strict=True)]
        for turn in range(max(map(len, sums_by_rank))):
            if turn == len(self._buffers):
                self._buffers.append(self._new_buffer())
            flat = self._buffers[turn].flat
            sends = turn < len(local)
            if sends:
                self._buffers[turn].fill(local[turn])
            senders = [rank for rank, sums in enumerate(sums_by_rank) if turn < len(sums)]
            received = self._buffers[turn].received[: len(senders) * self._slice]
            size = self._slice * flat.element_size()
            work = dist.all_to_all_single(  # as bytes: gloo does not support every dtype
                received.view(torch.uint8),
                flat[: None if sends else 0].view(torch.uint8),
                [size * (rank in senders) for rank in range(self._world)],
                [size * sends] * self._world,
                group=group,
                async_op=True,
            )
            assert work is not None  # since it is asynchronous
            self._arriving.append((work, received, senders))

    def add(self, sums_by_rank: Sequence[_Sums], group: dist.ProcessGroup | None) -> None:
        """Add the received slices in the order of the tree, and start to gather the slices of the total."""
        arrived = []
        for work, received, senders in self._arriving:
            work.wait()
            arrived.append(dict(zip(senders, received.split(self._slice), strict=True)))
        self._arriving.clear()
        tree: _Tree[Tensor] = _Tree(Tensor.add_)
        for rank, sums in enumerate(sums_by_rank):
            for turn, (start, size) in enumerate(sums):
                tree.push(start, size, arrived[turn][rank])
        mine = tree.total()
        whole, part = (t.view(torch.uint8) for t in (self._buffers[0].flat, mine))
        self._gathering = _all_gather(whole, part, group=group, async_op=True), mine

    def gathered(self) -> _Gradients:
        """The total over all processes."""
        self._gathering[0].wait()
        del self._gathering
        views, counts = self._buffers[0].views, self._buffers[0].counts
        if self._present and all(self._present):
            return [*views]
        present = counts.tolist()  # waits for the device, but only if a gradient is missing here
        return [view if count else None for view, count in zip(views, present, strict=True)]

    def _new_buffer(self) -> _Buffer:
        flat = self.parameters[0].new_zeros(self._world * self._slice)
        views = [
            flat.as_strided(p.shape, torch.empty_like(p, device="meta").stride(), start)
            for p, start in zip(self.parameters, self._starts, strict=False)
        ]
        return _Buffer(flat, views, flat[self._starts[-1] :][: len(views)], torch.empty_like(flat))


class _Tree(Generic[_Value]):
    """Adds values from left to right in a binary tree; `add` may change its first argument."""

    def __init__(self, add: Callable[[_Value, _Value], _Value]) -> None:
        self._add = add
        # First part, number of parts (a power of 2), sum.
        self.sums: list[tuple[int, int, _Value]] = []

    def push(self, start: int, size: int, value: _Value) -> None:
        """Append the next sum, and add neighbours of the same size."""
        while start // size % 2 and self.sums and self.sums[-1][:2] == (start - size, size):
            start, _, left = self.sums.pop()
            size, value = 2 * size, self._add(left, value)
        self.sums.append((start, size, value))

    def total(self) -> _Value:
        """The sum of all; subtrees that are left (no power of 2) are added from the right."""
        value = self.sums.pop()[2]
        while self.sums:
            value = self._add(self.sums.pop()[2], value)
        return value


def _bucketed(parameters: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Buckets of at least `size` bytes, from the last parameter on, because its gradient comes first."""
    bucket: list[Tensor] = []
    for p in reversed(parameters):
        bucket.append(p)
        if sum(p.nbytes for p in bucket) >= size:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


@functools.cache
def _sums_in(rank_parts: range, parts: int) -> _Sums:
    """First part and size of each sum that a process has, in a batch of `parts` parts."""
    tree: _Tree[None] = _Tree(lambda _, __: None)
    for part in rank_parts[: max(0, parts - rank_parts.start)]:
        tree.push(part, 1, None)
    return [(start, size) for start, size, _ in tree.sums]


def _add_gradients(left: _Gradients, right: _Gradients) -> _Gradients:
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]
