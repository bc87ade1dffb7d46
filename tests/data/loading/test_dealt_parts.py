"""A global batch in parts that are always the same: whatever the number of ranks, each is made once."""

import numpy as np
import pytest

from flambeau.data.loading.batch_layout import FixedPartsLayout
from flambeau.data.loading.batch_plan import BatchPart, BatchPlan

LENGTH, BATCH = 70, 16


def an_epoch(*, parts: int, rank: int = 0, world: int = 1) -> list[BatchPart]:
    layout = FixedPartsLayout(BATCH, parts, rank, world)
    return list(
        BatchPlan(
            layout, lambda epoch: np.arange(LENGTH)[::-1].copy(), repeats=False, length=LENGTH,
            epoch=3, position=0, epochs=1,
        )
    )  # fmt: skip


def made(plans: list[list[BatchPart]]) -> list[tuple[int, ...]]:
    """Of each part that counts, its number for random draws and its samples, in the order of the epoch."""
    parts = [part for plan in plans for part in plan if not part.cut.is_stand_in]
    return sorted((part.cut.draw, *part.indices[part.cut.local]) for part in parts)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_ranks_together_make_the_parts_of_one(parts: int, world: int) -> None:
    plans = [an_epoch(parts=parts, rank=rank, world=world) for rank in range(world)]
    alone = made([an_epoch(parts=parts)])
    assert made(plans) == alone
    samples = [index for _, *indices in alone for index in indices]
    assert samples == [*range(LENGTH)][::-1]
    assert len({draw for draw, *_ in alone}) == len(alone)


@pytest.mark.parametrize("world", [1, 3])
def test_each_rank_ends_each_batch_and_only_then_the_position_moves(world: int) -> None:
    for rank in range(world):
        plan = an_epoch(parts=4, rank=rank, world=world)
        ends = [part for part in plan if part.cut.ends_batch]
        assert [part.cut.position for part in ends] == [16, 32, 48, 64, 70]
        assert [part.total for part in ends] == [16, 16, 16, 16, 6]
        assert [part.cut.dealt for part in ends] == [4, 4, 4, 4, 3]  # nobody gets a lone sample
        for part in plan:
            assert part.cut.ends_batch or part.cut.position == _start_of(part)


def _start_of(part: BatchPart) -> int:
    return LENGTH - 1 - int(part.indices[0])


def test_a_rank_beyond_the_parts_has_a_stand_in_in_each_batch() -> None:
    plan = an_epoch(parts=2, rank=0, world=3)
    assert all(part.cut.is_stand_in and part.cut.ends_batch for part in plan)
    assert len(plan) == 5
