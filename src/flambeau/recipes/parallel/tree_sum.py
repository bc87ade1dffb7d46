"""Gradients of the parts of a batch, added in one order, so to the same bits, on any number of processes.

把一个批次各部分的梯度按同一顺序相加：无论多少个进程，结果逐位相同。

A batch is K parts, whoever computes them. Their gradients are added in one binary tree over the parts, as
(0 + 1) + (2 + 3). Each process adds what of the tree lies in its own parts, then the sums of all for its
slice of the gradient; slices are exchanged. For one part per process: the bytes of a ring all-reduce.

Source: Higham, "The accuracy of floating point summation", 1993 (pairwise); Li et al., "EasyScale", SC 2023.
Not for parameters in pieces (FSDP), nor for sparse gradients.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_Value = TypeVar("_Value")
_Gradients = list[Tensor | None]  # one for each parameter
_ALIGNED = 512  # bytes; where torch's allocators begin a tensor, on which the order of a GPU's sums depends


def parts_of(rank: int, world: int, parts: int) -> range:
    """The parts of a batch that a process computes; some have none if parts are fewer.

    Example:
        >>> [list(parts_of(rank, 3, 4)) for rank in range(3)]
        [[0], [1], [2, 3]]
    """
    return range(rank * parts // world, (rank + 1) * parts // world)


class TreeSum:
    """Takes the gradients of part after part, and gives the parameters their sum over all processes.

    It holds at most log2(K) + 1 gradients at once, and on several processes two more.

    Args:
        parameters: those that are trained, of one dtype, on one device; the same on all processes.
        parts: of a batch; the last batch of an epoch may have fewer.
        group: the processes; None is all of them, or this one alone where there are no others.

    Attributes:
        own: the parts of this process, to compute in this order.

    Raises:
        ValueError: no parameters, or of several dtypes, or less than one part.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> tree = TreeSum(layer.parameters(), parts=4)
        >>> for part in tree.own:
        ...     layer(torch.full((8, 2), float(part))).mean().div(4).backward()
        ...     tree.take()
        >>> tree.give()
        >>> layer.weight.grad
        tensor([[1.5000, 1.5000]])
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, parts: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        if parts < 1 or len({p.dtype for p in self._parameters}) != 1:
            raise ValueError(f"needs parameters of one dtype and at least one part, got {parts=}")
        joined = dist.is_initialized()
        self._world = dist.get_world_size(group) if joined else 1
        self._parts, self._group = parts, group
        self.own = parts_of(dist.get_rank(group) if joined else 0, self._world, parts)
        self._tree, self._taken = _Tree(_add_gradients), 0
        if self._world > 1:
            self._lay_out()

    def take(self) -> None:
        """After the backward pass of the next part of this process: takes its gradients away."""
        gradients = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        self._tree.push(self.own.start + self._taken, 1, gradients)
        self._taken += 1

    def give(self, *, parts: int | None = None) -> None:
        """Give each parameter its sum, or none if no part has any; all processes call it.

        Args:
            parts: how many this batch has, if fewer than usual: the first ones.

        Raises:
            RuntimeError: gradients were taken of more or fewer parts than this process has.
        """
        parts = self._parts if parts is None else parts
        taken, self._taken = self._taken, 0
        due = len(self.own[: max(0, parts - self.own.start)])
        if taken != due:
            raise RuntimeError(
                f"gradients of {taken} parts were taken, and {due} of the {parts} parts of this batch "
                "belong to this process: call take() once after each backward pass of a part"
            )
        total = self._tree.total() if self._world == 1 else self._exchanged(parts)
        for p, gradient in zip(self._parameters, total, strict=True):
            p.grad = gradient

    def _lay_out(self) -> None:
        """One buffer for all gradients, a slice for each process; behind them how many sums have each."""
        first = self._parameters[0]
        step = _ALIGNED // first.element_size()
        starts = [0, *accumulate(-(-p.numel() // step) * step for p in self._parameters)]
        length = starts[-1] + len(self._parameters)
        self._slice = -(-length // (self._world * step)) * step
        self._buffer = first.new_zeros(self._world * self._slice)
        self._counts = self._buffer[starts[-1] : length]
        self._views = [  # in the strides of the parameter, as autograd gives them
            self._buffer.as_strided(p.shape, torch.empty_like(p).stride(), start)
            for p, start in zip(self._parameters, starts, strict=False)
        ]

    def _exchanged(self, parts: int) -> _Gradients:
        """The total over all processes."""
        own = [sums for _, _, sums in self._tree.sums]
        self._tree.sums.clear()
        dealt = [parts_of(rank, self._world, self._parts) for rank in range(self._world)]
        everyones = [_sums_in(theirs, parts) for theirs in dealt]
        arrived = [
            self._sent(own[turn : turn + 1], [turn < len(sums) for sums in everyones])
            for turn in range(max(map(len, everyones)))
        ]
        tree: _Tree[Tensor] = _Tree(Tensor.add_)
        for rank, sums in enumerate(everyones):
            for turn, (start, size) in enumerate(sums):
                tree.push(start, size, arrived[turn][rank])
        whole, mine = (t.view(torch.uint8) for t in (self._buffer, tree.total()))
        dist.all_gather_into_tensor(whole, mine, group=self._group)
        if all(any(sums[i] is not None for sums in own) for i in range(len(self._parameters))):
            return list(self._views)
        counts = self._counts.tolist()  # waits for the device, where a gradient is missing here
        return [view if count else None for view, count in zip(self._views, counts, strict=True)]

    def _sent(self, own: Sequence[_Gradients], sends: Sequence[bool]) -> dict[int, Tensor]:
        """This process's slice of a sum of each process that sends one."""
        for sums in own:
            present = [grad is not None for grad in sums]
            if not all(present):
                self._buffer.zero_()
            for view, gradient in zip(self._views, sums, strict=True):
                if gradient is not None:
                    view.copy_(gradient)
            self._counts.copy_(torch.tensor(present))
        received = self._buffer.new_empty(sum(sends) * self._slice)
        bytes_each = self._slice * self._buffer.element_size()
        dist.all_to_all_single(  # as bytes: gloo does not know every dtype
            received.view(torch.uint8),
            (self._buffer if own else self._buffer[:0]).view(torch.uint8),
            [bytes_each * sent for sent in sends],
            [bytes_each * len(own)] * self._world,
            group=self._group,
        )
        senders = [rank for rank, sent in enumerate(sends) if sent]
        return dict(zip(senders, received.split(self._slice), strict=True))


class _Tree(Generic[_Value]):
    """Sums that come from left to right; neighbours of one size become one. `add` may change its first."""

    def __init__(self, add: Callable[[_Value, _Value], _Value]) -> None:
        self._add = add
        self.sums: list[
            tuple[int, int, _Value]
        ] = []  # first part, number of parts, a power of 2, sum

    def push(self, start: int, size: int, value: _Value) -> None:
        """The next sum; nothing between it and the last one may be missing."""
        while start // size % 2 and self.sums and self.sums[-1][:2] == (start - size, size):
            start, _, left = self.sums.pop()
            size, value = 2 * size, self._add(left, value)
        self.sums.append((start, size, value))

    def total(self) -> _Value:
        """Of all: what is left where their number is no power of 2 is added from the right."""
        value = self.sums.pop()[2]
        while self.sums:
            value = self._add(self.sums.pop()[2], value)
        return value


def _sums_in(own: range, parts: int) -> list[tuple[int, int]]:
    """First part and size of the sums that a process has, of a batch of so many parts."""
    tree: _Tree[None] = _Tree(lambda _, __: None)
    for part in own[: max(0, parts - own.start)]:
        tree.push(part, 1, None)
    return [(start, size) for start, size, _ in tree.sums]


def _add_gradients(left: _Gradients, right: _Gradients) -> _Gradients:
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]
