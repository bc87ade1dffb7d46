"""How the samples of a global batch are grouped into forward passes and shared by processes: two strategies.

`BatchLayout` cuts a global batch into micro-batches, which the ranks share. `FixedPartsLayout` cuts it into
the same parts on any number of ranks, and deals the parts out.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from flambeau.data.loading.micro_batch import share_of
from flambeau.recipes.parallel.fixed_order_sum import parts_of


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank computes in one forward pass, of a global batch of an epoch.

    Attributes:
        low, high: the samples of the pass in the order of the epoch, of all ranks that share it.
        own: which of them are this rank's.
        is_stand_in: none is left for it: what it computes does not count.
        part: number of the pass in the global batch, from 1.
        ends_batch: no pass of this global batch follows.
        position: where the epoch stands after it, in samples.
        all_have: whether each rank has samples that count.
        draw: a number that no other pass of the epoch has, to seed what is drawn for it.
        counts_indices: the samples from low to high were in no earlier pass of the global batch.
        sum_key: what is logged of passes with the same number is added up together, in their order.
        dealt: parts of the global batch, where these are always the same; else 0.
    """

    low: int
    high: int
    own: slice
    is_stand_in: bool
    part: int
    ends_batch: bool
    position: int
    all_have: bool
    draw: int
    counts_indices: bool = True
    sum_key: int = 0
    dealt: int = 0


class Layout(Protocol):
    """A strategy."""

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward pass, of all ranks together."""

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""

    @property
    def num_parts(self) -> int:
        """Forward passes of a whole global batch."""

    @property
    def world(self) -> int:
        """How many processes read together."""

    @property
    def least_size(self) -> int:
        """Samples that a forward pass needs, so that each process can take part."""

    def cut(self, start: int, stop: int) -> Iterator[Cut]:
        """This rank's forward passes of the global batch of the samples from `start` to `stop`."""

    def with_micro_batches(self, size: int) -> "Layout":
        """The same global batches in micro-batches of another size."""

    def in_batches_of(self, size: int) -> "Layout":
        """Batches of an evaluation, which has no steps to keep whole."""

    def halved(self, *, least: int) -> "Layout | None":
        """The same global batches in twice as many forward passes; None where that cannot be.

        Args:
            least: samples that a forward pass needs.
        """


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Global batches in micro-batches, each of which the ranks share.

    Attributes:
        micro_batch_size: samples per forward pass, of all ranks together.
        accumulate: micro-batches per optimizer step.
        rank: of this process.
        world: how many processes read together.
        keeps_empty: a rank for which no sample is left gets a stand-in, so that it takes part in the step.
        step_samples: samples per optimizer step, if they are no multiple of `micro_batch_size`: the last
            micro-batch of each step is smaller then.
    """

    micro_batch_size: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1
    keeps_empty: bool = True
    step_samples: int | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.step_samples or self.micro_batch_size * self.accumulate

    @property
    def num_parts(self) -> int:
        """Micro-batches of a whole global batch."""
        return -(-self.global_batch_size // self.micro_batch_size)

    @property
    def least_size(self) -> int:
        """One sample per process."""
        return self.world

    def with_micro_batches(self, size: int) -> "BatchLayout":
        """The same global batches in micro-batches of another size."""
        return dataclasses.replace(self, micro_batch_size=size, step_samples=self.global_batch_size)

    def in_batches_of(self, size: int) -> "BatchLayout":
        """Batches of an evaluation, which has no steps to keep whole."""
        return dataclasses.replace(self, micro_batch_size=size, accumulate=1, step_samples=None)

    def halved(self, *, least: int) -> "BatchLayout | None":
        """The same global batches in twice as many micro-batches; None where they cannot be smaller."""
        size = max(least, -(-self.global_batch_size // (2 * self.num_parts)))
        return self.with_micro_batches(size) if size < self.micro_batch_size else None

    def cut(self, start: int, stop: int) -> Iterator[Cut]:
        """This rank's forward passes of the global batch of the samples from `start` to `stop`."""
        low = start
        part = 0
        usual = self.micro_batch_size
        while low < stop:
            part += 1
            left = stop - low
            # A lone last sample joins the part before it: BatchNorm cannot train on one.
            joins = left == usual + 1 > 2
            high = stop if joins else min(low + usual, stop)
            own, last = (
                share_of(high - low, rank=rank, world=self.world, usual=usual)
                for rank in (self.rank, self.world - 1)
            )
            if own is not None or self.keeps_empty:
                yield Cut(
                    low,
                    high,
                    own or slice(0, 2),
                    is_stand_in=own is None,
                    part=part,
                    ends_batch=high == stop,
                    position=high,
                    all_have=last is not None,
                    draw=low + own.stop if own else high,
                )
            low = high


@dataclass(frozen=True, slots=True)
class FixedPartsLayout:
    """Global batches in parts that are always the same, whoever computes which.

    Attributes:
        global_batch_size: samples per optimizer step.
        parts: of each global batch.
        rank: of this process.
        world: how many processes share the parts.
        keeps_empty: a rank for which no part is left gets a stand-in, so that it takes part in the step.
    """

    global_batch_size: int
    parts: int
    rank: int = 0
    world: int = 1
    keeps_empty: bool = True

    @property
    def micro_batch_size(self) -> int:
        """Samples per optimizer step: no part is cut further."""
        return self.global_batch_size

    @property
    def num_parts(self) -> int:
        """Parts of a whole global batch."""
        return self.parts

    @property
    def least_size(self) -> int:
        """A process may have no part."""
        return 1

    def with_micro_batches(self, size: int) -> "FixedPartsLayout":
        """The same: no part is cut further."""
        return self

    def in_batches_of(self, size: int) -> "FixedPartsLayout":
        """The same: no part is cut further."""
        return self

    def halved(self, *, least: int) -> None:
        """The parts of a step are fixed."""

    def cut(self, start: int, stop: int) -> Iterator[Cut]:
        """This rank's parts of the global batch of the samples from `start` to `stop`."""
        shares = [
            share_of(stop - start, rank=part, world=self.parts, usual=self.global_batch_size)
            for part in range(self.parts)
        ]
        there = [share for share in shares if share is not None]
        own = parts_of(self.rank, self.world, self.parts)
        mine: list[slice | None] = [*there[own.start : own.stop]]
        if not mine and self.keeps_empty:
            mine = [None]
        for part, share in enumerate(mine, start=1):
            is_last = part == len(mine)
            draw = start + share.stop if share else stop
            yield Cut(
                start,
                stop,
                share or slice(0, 2),
                is_stand_in=share is None,
                part=part,
                ends_batch=is_last,
                position=stop if is_last else start,  # the last one moves it
                all_have=True,
                draw=draw,
                counts_indices=is_last,
                sum_key=draw,
                dealt=len(there),
            )


def layout_of(
    batch_size: int,
    *,
    accumulate: int = 1,
    parts: int | None = None,
    rank: int = 0,
    world: int = 1,
    keeps_empty: bool = True,
) -> Layout:
    """The strategy for a batch size: fixed parts where their number is given, else micro-batches.

    Args:
        batch_size: samples per forward pass, or per step in fixed parts.
        accumulate: micro-batches per optimizer step.
        parts: of each global batch; None cuts it into micro-batches.
        rank: of this process.
        world: how many processes read together.
        keeps_empty: a rank for which nothing is left gets a stand-in.
    """
    if parts is not None:
        return FixedPartsLayout(batch_size, parts, rank, world, keeps_empty)
    return BatchLayout(batch_size, accumulate, rank, world, keeps_empty)
