"""A global batch in parts that are always the same: whatever the number of ranks, each is made once."""

import numpy as np
import pytest

from flambeau.data.loading.batch_plan import BatchLayout, BatchPart, BatchPlan

LENGTH, BATCH = 70, 16


def an_epoch(*, parts: int, rank: int = 0, world: int = 1) -> list[BatchPart]:
    layout = BatchLayout(BATCH, 1, rank, world, parts=parts)
    return list(
        BatchPlan(
            layout, lambda epoch: np.arange(LENGTH)[::-1].copy(), repeats=False, length=LENGTH,
            epoch=3, position=0, epochs=1,
        )
    )  # fmt: skip


def made(plans: list[list[BatchPart]]) -> list[tuple[int, ...]]:
    """Of each part that counts, its number for random draws and its samples, in the order of the epoch."""
    parts = [part for plan in plans for part in plan if not part.is_stand_in]
    return sorted((part.draw, *part.indices[part.own]) for part in parts)


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
        ends = [part for part in plan if part.ends_batch]
        assert [part.position for part in ends] == [16, 32, 48, 64, 70]
        assert [part.total for part in ends] == [16, 16, 16, 16, 6]
        assert [part.dealt for part in ends] == [4, 4, 4, 4, 3]  # nobody gets a lone sample
        for part in plan:
            assert part.ends_batch or part.position == _start_of(part)


def _start_of(part: BatchPart) -> int:
    return LENGTH - 1 - int(part.indices[0])


def test_a_rank_beyond_the_parts_has_a_stand_in_in_each_batch() -> None:
    plan = an_epoch(parts=2, rank=0, world=3)
    assert all(part.is_stand_in and part.ends_batch for part in plan)
    assert len(plan) == 5
