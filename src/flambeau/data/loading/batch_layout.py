"""How the samples of a global batch are divided into forward passes and shared by the ranks.

`BatchLayout` divides it into micro-batches, which the ranks share. `FixedPartsLayout` divides it into the
same parts on any number of ranks, and gives each rank some of the parts.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from flambeau.data.loading.micro_batch import share_of
from flambeau.recipes.parallel.fixed_order_sum import parts_of


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank computes in one forward pass.

    Attributes:
        low, high: the samples of the pass, on all its ranks, as positions in the epoch.
        local: this rank's samples, relative to `low`.
        is_stand_in: this rank has no sample left; its result does not count.
        part: of the global batch, from 1.
        draw: unique within the epoch; seeds what the pass draws at random.
        counts_indices: no earlier pass of the global batch had these samples.
        sum_key: metrics of passes with one key are added up, in order.
        dealt: in fixed parts, how many of the global batch hold samples; else 0.
    """

    low: int
    high: int
    local: slice
    is_stand_in: bool
    part: int
    ends_batch: bool
    position: int
    all_have: bool
    draw: int
    counts_indices: bool = True
    sum_key: int = 0
    dealt: int = 0


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Global batches in micro-batches that ranks share.

    Attributes:
        takes_singles: a rank may get a single sample, rather than none.
        step_samples: samples per optimizer step; if `micro_batch_size` does not divide them, the last
            micro-batch is smaller.
    """

    micro_batch_size: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1
    keeps_empty: bool = True
    takes_singles: bool = False
    step_samples: int | None = None

    @property
    def global_batch_size(self) -> int:
        return self.step_samples or self.micro_batch_size * self.accumulate

    @property
    def num_parts(self) -> int:
        """Micro-batches of a whole global batch."""
        return -(-self.global_batch_size // self.micro_batch_size)

    @property
    def min_size(self) -> int:
        """Smallest micro-batch in which every rank has a sample."""
        return self.world

    def with_micro_batches(self, size: int) -> "BatchLayout":
        """The same global batches in micro-batches of `size` samples."""
        return dataclasses.replace(self, micro_batch_size=size, step_samples=self.global_batch_size)

    def in_batches_of(self, size: int) -> "BatchLayout":
        """Batches for an evaluation, which has no optimizer steps."""
        return dataclasses.replace(self, micro_batch_size=size, accumulate=1, step_samples=None)

    def halved(self, *, min_size: int) -> "BatchLayout | None":
        """The same global batches in twice as many passes of at least `min_size`; None if impossible."""
        size = max(min_size, -(-self.global_batch_size // (2 * self.num_parts)))
        return self.with_micro_batches(size) if size < self.micro_batch_size else None

    def cut(self, start: int, stop: int) -> Iterator[Cut]:
        low = start
        part = 0
        full = self.micro_batch_size
        # As if a full micro-batch gave every rank just one.
        full_to_share = self.world if self.takes_singles else full
        while low < stop:
            part += 1
            left = stop - low
            # A single last sample joins the part before it: BatchNorm cannot train on one.
            joins = left == full + 1 > 2
            high = stop if joins else min(low + full, stop)
            local, last = (
                share_of(high - low, rank=rank, world=self.world, full_size=full_to_share)
                for rank in (self.rank, self.world - 1)
            )
            if local is not None or self.keeps_empty:
                yield Cut(
                    low,
                    high,
                    local or slice(0, 2),
                    is_stand_in=local is None,
                    part=part,
                    ends_batch=high == stop,
                    position=high,
                    all_have=last is not None,
                    draw=low + local.stop if local else high,
                )
            low = high


@dataclass(frozen=True, slots=True)
class FixedPartsLayout:
    """Global batches in parts that are the same on any number of ranks; see `BatchLayout.keeps_empty`."""

    global_batch_size: int
    parts: int
    rank: int = 0
    world: int = 1
    keeps_empty: bool = True

    @property
    def micro_batch_size(self) -> int:
        """Samples per optimizer step: parts are not divided further."""
        return self.global_batch_size

    @property
    def num_parts(self) -> int:
        return self.parts

    @property
    def min_size(self) -> int:
        """A rank may have no part."""
        return 1

    def with_micro_batches(self, size: int) -> "FixedPartsLayout":
        """Itself: parts are not divided further."""
        return self

    def in_batches_of(self, size: int) -> "FixedPartsLayout":
        """Itself: parts are not divided further."""
        return self

    def halved(self, *, min_size: int) -> None:
        """None: the parts of a step are fixed."""

    def cut(self, start: int, stop: int) -> Iterator[Cut]:
        shares = [
            share_of(stop - start, rank=part, world=self.parts, full_size=self.global_batch_size)
            for part in range(self.parts)
        ]
        filled = [share for share in shares if share is not None]
        numbers = parts_of(self.rank, self.world, self.parts)
        local: list[slice | None] = [*filled[numbers.start : numbers.stop]]
        if not local and self.keeps_empty:
            local = [None]
        for part, share in enumerate(local, start=1):
            is_last = part == len(local)
            draw = start + share.stop if share else stop
            yield Cut(
                start,
                stop,
                share or slice(0, 2),
                is_stand_in=share is None,
                part=part,
                ends_batch=is_last,
                position=stop if is_last else start,
                all_have=True,
                draw=draw,
                counts_indices=is_last,
                sum_key=draw,
                dealt=len(filled),
            )


Layout = BatchLayout | FixedPartsLayout
"""Divides global batches into the forward passes of one rank."""


def layout_of(
    batch_size: int,
    *,
    accumulate: int = 1,
    parts: int | None = None,
    rank: int = 0,
    world: int = 1,
    keeps_empty: bool = True,
) -> Layout:
    """Fixed parts with `parts`, where `batch_size` is of a step; else micro-batches."""
    if parts is not None:
        return FixedPartsLayout(batch_size, parts, rank, world, keeps_empty)
    return BatchLayout(batch_size, accumulate, rank, world, keeps_empty)
