"""Samplers: the distributions that they promise, the same epoch each time, and shares without padding."""

import itertools
import random
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from flambeau.recipes.data.sample_order import mix
from flambeau.recipes.data.samplers import (
    BalancedSampler,
    BlockSampler,
    EpochSampler,
    InfiniteSampler,
    SubsetSampler,
    WeightedSampler,
    spread,
    uniform,
)


def test_random_numbers_are_splitmix64() -> None:
    """Computed with Python's integers, from the definition."""
    gamma = 0x9E3779B97F4A7C15
    stream = mix(mix(7) ^ 4 * gamma)
    expected = [((mix((k + 1) * gamma + stream) >> 12) + 0.5) / 2**52 for k in range(100)]
    assert uniform(100, seed=7, epoch=3).tolist() == expected
    assert uniform(100, seed=-1, epoch=3).tolist() == uniform(100, seed=2**64 - 1, epoch=3).tolist()
    many = uniform(200_000, seed=0, epoch=0)
    assert float(many.min()) > 0 and float(many.max()) < 1
    assert abs(float(many.mean()) - 0.5) < 0.003
    assert abs(float(many.var()) - 1 / 12) < 0.001


SAMPLERS = [
    EpochSampler(23, seed=3),
    WeightedSampler(torch.arange(23.0), seed=3),
    WeightedSampler(torch.arange(23.0), 20, replacement=False, seed=3),
    BalancedSampler([0] * 20 + [1, 1, 2], seed=3),
    SubsetSampler(range(4, 15), seed=3),
    BlockSampler([4, 1, 9, 3, 6], window=5, seed=3),
    BlockSampler([4, 1, 9, 3, 6], window=9, streams=3, seed=3),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_an_epoch_is_the_same_each_time_and_can_be_entered_anywhere(sampler: EpochSampler) -> None:
    sampler.set_epoch(0)
    epochs = [list(sampler) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [len(sampler)] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    for epoch, position in itertools.product(range(3), (0, 1, 7, len(sampler))):
        sampler.start_at(epoch=epoch, position=position)
        assert list(sampler) == epochs[epoch][position:]
        assert sampler.epoch == epoch + 1
    assert [sampler.order(epoch).tolist() for epoch in range(3)] == epochs
    wide = torch.int32 if isinstance(sampler, BlockSampler) else torch.int64
    assert sampler.order(0).dtype == wide


def test_ranks_share_an_epoch_without_repeating_anything() -> None:
    for length, world in ((23, 4), (3, 4), (8, 2)):
        whole = EpochSampler(length, seed=5).order(2).tolist()
        shares = []
        for rank in range(world):
            sampler = EpochSampler(length, seed=5, rank=rank, world=world)
            sampler.set_epoch(2)
            shares.append(list(sampler))
            assert len(sampler) == len(shares[-1])
        assert sorted(itertools.chain(*shares)) == sorted(whole)
        assert shares[0] == whole[::world]


def test_weights_are_frequencies() -> None:
    weights = torch.tensor([1.0, 0.0, 2.0, 5.0, 0.0])
    drawn = torch.bincount(WeightedSampler(weights, 80_000).order(0), minlength=5) / 80_000
    torch.testing.assert_close(drawn, weights / 8, rtol=0, atol=0.006)
    peer = torch.tensor(list(WeightedRandomSampler(weights.tolist(), 80_000)))
    torch.testing.assert_close(
        drawn, torch.bincount(peer, minlength=5) / 80_000, rtol=0, atol=0.012
    )


def test_without_replacement_the_first_is_drawn_by_weight_and_none_twice() -> None:
    sampler = WeightedSampler([1.0, 3.0, 0.0, 4.0], 3, replacement=False)
    firsts = Counter()
    for epoch in range(4000):
        order = sampler.order(epoch).tolist()
        assert sorted(order) == [0, 1, 3]
        firsts[order[0]] += 1
    for index, share in ((0, 1 / 8), (1, 3 / 8), (3, 4 / 8)):
        assert abs(firsts[index] / 4000 - share) < 0.03
    with pytest.raises(
        ValueError, match=r"4 samples .* without replacement, and 3 weights are above 0"
    ):
        WeightedSampler([1.0, 3.0, 0.0, 4.0], replacement=False)
    # What torch does there:
    assert 2 in list(WeightedRandomSampler([1.0, 3.0, 0.0, 4.0], 4, replacement=False))


def test_classes_come_equally_often() -> None:
    labels = torch.tensor([0] * 900 + [1] * 90 + [4] * 10)
    drawn = labels[BalancedSampler(labels, 30_000).order(1)]
    shares = torch.bincount(drawn, minlength=5) / 30_000
    torch.testing.assert_close(shares, torch.tensor([1, 1, 0, 0, 1]) / 3, rtol=0, atol=0.01)


def test_classes_come_half_way_to_equally_often() -> None:
    labels = torch.tensor([0] * 900 + [1] * 100)
    drawn = labels[BalancedSampler(labels, 30_000, strength=0.5).order(1)]
    assert float(drawn.double().mean()) == pytest.approx(10 / (30 + 10), abs=0.01)


def test_a_subset_keeps_its_order_or_is_shuffled() -> None:
    assert list(SubsetSampler([5, 1, 5], shuffle=False)) == [5, 1, 5]
    assert sorted(SubsetSampler([5, 1, 5])) == [1, 5, 5]


def test_infinite_goes_over_the_border_of_epochs() -> None:
    base = EpochSampler(5, seed=2)
    expected = [*base.order(1).tolist()[3:], *base.order(2).tolist(), *base.order(3).tolist()]
    base.start_at(epoch=1, position=3)
    endless = InfiniteSampler(base)
    assert list(itertools.islice(endless, 12)) == expected[:12]
    with pytest.raises(TypeError):
        len(endless)  # type: ignore[arg-type]


def test_torchs_loader_takes_them() -> None:
    sampler = EpochSampler(10, seed=1)
    loader = DataLoader(range(10), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    seen = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert seen == [sampler.order(0).tolist(), sampler.order(1).tolist()]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EpochSampler(0), "there must be a sample to draw, got 0"),
        (lambda: EpochSampler(3, rank=2, world=2), r"rank must be in \[0, 2\), got 2"),
        (lambda: WeightedSampler([1.0, -1.0]), "finite numbers of at least 0"),
        (lambda: WeightedSampler([1.0, float("nan")]), "finite numbers of at least 0"),
        (lambda: WeightedSampler([[1.0]]), "one row"),
        (lambda: WeightedSampler([0.0, 0.0]), "all weights are 0"),
        (lambda: BalancedSampler([]), "one row of integers"),
        (lambda: BalancedSampler([1, -1]), "at least 0"),
        (lambda: BalancedSampler([1], strength=1.5), r"strength must be in \[0, 1\], got 1.5"),
        (lambda: SubsetSampler([]), "there must be a sample"),
    ],
)
def test_refusals(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


# ---------------------------------------------------------------- blocks


def by_definition(lengths: list[int], window: int, seed: int, epoch: int) -> list[int]:
    """In plain Python, from the sentences of the docstring."""
    starts = [sum(lengths[:block]) for block in range(len(lengths))]
    of_blocks = uniform(len(lengths), seed=seed ^ 0x9E3779B97F4A7C15, epoch=epoch).tolist()
    placed = [
        starts[block] + k
        for block in sorted(range(len(lengths)), key=lambda block: of_blocks[block])
        for k in range(lengths[block])
    ]
    delays = [int(one * window) for one in uniform(len(placed), seed=seed, epoch=epoch).tolist()]
    places = sorted(range(len(placed)), key=lambda at: at + delays[at])
    return [placed[at] for at in places]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_mix_as_they_are_defined(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 12) for _ in range(draw.randint(1, 15))]
    for window in (1, 2, draw.randint(1, 40), 10**6):
        order = BlockSampler(lengths, window=window, seed=seed).order(seed % 3).tolist()
        assert order == by_definition(lengths, window, seed, seed % 3)
        assert sorted(order) == list(range(sum(lengths)))


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_blocks_mix_the_same_in_pieces_of_any_size(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flambeau.recipes.data.samplers._PIECE", piece)
    lengths = [5, 1, 12, 3, 8, 30, 2] * 5
    for window in (1, 2, 13, 40, 10**6):
        order = BlockSampler(lengths, window=window, seed=4).order(2).tolist()
        assert order == by_definition(lengths, window, 4, 2)


def test_a_window_bounds_how_far_a_sample_moves() -> None:
    """And with it how many blocks are in use at the same time."""
    lengths, window = [100] * 200, 500
    order = BlockSampler(lengths, window=window).order(0).long()
    blocks = order // 100
    first = torch.full((200,), 10**9).scatter_reduce(0, blocks, torch.arange(20_000), "amin")
    last = torch.zeros(200, dtype=torch.int64).scatter_reduce(
        0, blocks, torch.arange(20_000), "amax"
    )
    assert int((last - first).max()) < 100 + 2 * window
    in_use = [int(((first <= at) & (last >= at)).sum()) for at in range(0, 20_000, 500)]
    assert max(in_use) <= (100 + 2 * window) // 100 + 2


def test_classes_that_lie_in_blocks_are_mixed() -> None:
    """50 blocks, sorted by 10 classes: with a window of a fifth each batch has nearly all of them."""
    labels = torch.arange(5000) // 500

    def classes_of_batches(window: int) -> float:
        order = BlockSampler([100] * 50, window=window, seed=1).order(0)
        return sum(len(set(labels[batch].tolist())) for batch in order.split(50)) / 100

    assert classes_of_batches(1) < 2
    assert classes_of_batches(1000) > 6
    whole = EpochSampler(5000, seed=1).order(0)
    assert classes_of_batches(10**6) == pytest.approx(
        sum(len(set(labels[batch].tolist())) for batch in whole.split(50)) / 100, abs=0.1
    )


def streams_by_definition(
    lengths: list[int], window: int, streams: int, seed: int, epoch: int
) -> list[int]:
    """In plain Python, from the sentences of the docstring."""
    starts = [sum(lengths[:block]) for block in range(len(lengths))]
    divided = uniform(len(lengths), seed=seed ^ 0xD1B54A32D192ED03, epoch=0).tolist()
    placed = [
        (block, starts[block] + k)
        for block in sorted(range(len(lengths)), key=lambda block: divided[block])
        for k in range(lengths[block])
    ]
    delays = uniform(len(placed), seed=seed, epoch=epoch).tolist()
    turn_of = {stream: turn for turn, stream in enumerate(spread(streams).tolist())}
    begin = 0
    stretches = []  # of each stream: its blocks, each a list of samples
    for stream in range(streams):
        end = begin + len(range(turn_of[stream], len(placed), streams))
        blocks = itertools.groupby(placed[begin:end], key=lambda one: one[0])
        stretches.append([[sample for _, sample in block] for _, block in blocks])
        begin = end
    numbers = iter(
        uniform(sum(map(len, stretches)), seed=seed ^ 0x9E3779B97F4A7C15, epoch=epoch).tolist()
    )
    late = iter(int(one * max(1, window // streams)) for one in delays)
    order = [-1] * len(placed)
    for stream, stretch in enumerate(stretches):
        shuffled = sorted((next(numbers), block) for block in stretch)
        row = [sample for _, block in shuffled for sample in block]
        keys = [at + next(late) for at in range(len(row))]
        mixed = sorted(range(len(row)), key=keys.__getitem__)
        order[turn_of[stream] :: streams] = [row[at] for at in mixed]
    return order


@pytest.mark.parametrize("seed", range(20))
def test_streams_come_by_turns_as_they_are_defined(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 12) for _ in range(draw.randint(1, 40))]
    for streams in (2, 3, 16, 48):
        window = draw.choice([1, 20, 50, 10**6])
        sampler = BlockSampler(lengths, window=window, streams=streams, seed=seed)
        for epoch in (0, 3):
            order = sampler.order(epoch).tolist()
            assert order == streams_by_definition(lengths, window, streams, seed, epoch)
            assert sorted(order) == list(range(sum(lengths)))


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 8, 16, 48])
def test_places_in_a_row_are_spread_over_the_streams(streams: int) -> None:
    """Of any places in a row each half of the streams has as many as the other, to two."""
    stream_of = spread(streams)
    assert sorted(stream_of.tolist()) == list(range(streams))
    turns = stream_of.repeat(3)
    for first, count in itertools.product(range(streams), range(1, streams + 1)):
        low = int((turns[first : first + count] < streams / 2).sum())
        assert abs(low - count / 2) <= 2


@pytest.mark.parametrize(
    ("ranks", "batch"), [(2, 16), (4, 16), (8, 32), (16, 16), (3, 48), (6, 96)]
)
def test_each_batch_has_equally_many_places_of_each_rank_s_streams(ranks: int, batch: int) -> None:
    owner = spread(48).repeat(10) // (48 // ranks)
    for first in range(0, 480, batch):
        assert torch.bincount(owner[first : first + batch]).tolist() == [batch // ranks] * ranks


def test_streams_have_blocks_of_their_own_in_all_epochs() -> None:
    """One block more for each edge between two streams, which lies within a block."""
    lengths = [10 + block % 7 for block in range(300)]
    of_block = torch.repeat_interleave(torch.arange(300), torch.tensor(lengths))
    sampler = BlockSampler(lengths, window=200, streams=16, seed=5)
    found: list[list[set[int]]] = []
    for epoch in range(3):
        blocks = of_block[sampler.order(epoch)]
        found.append([set(blocks[turn::16].tolist()) for turn in range(16)])
        assert 300 <= sum(map(len, found[-1])) <= 315
    assert found[0] == found[1] == found[2]
    orders = [sampler.order(epoch).tolist() for epoch in range(2)]
    assert orders[0] != orders[1]
    for world in (2, 4, 8):
        ranks = [
            BlockSampler(lengths, window=200, streams=16, seed=5, rank=rank, world=world)
            for rank in range(world)
        ]
        read = [len({*of_block[torch.tensor(list(rank))].tolist()}) for rank in ranks]
        assert sum(read) <= 300 + world - 1
        assert max(read) - min(read) < 20


def test_as_many_blocks_are_in_use_as_without_streams() -> None:
    labels = torch.arange(20_000) // 2000

    def facts(streams: int) -> tuple[int, float]:
        sampler = BlockSampler([50] * 400, window=4000, streams=streams, seed=2)
        order = sampler.order(0).long()
        places = torch.arange(20_000)
        first = torch.full((400,), 10**9).scatter_reduce(0, order // 50, places, "amin")
        last = torch.zeros(400, dtype=torch.int64).scatter_reduce(0, order // 50, places, "amax")
        in_use = [int(((first <= at) & (last >= at)).sum()) for at in range(0, 20_000, 500)]
        classes = [len(set(labels[batch].tolist())) for batch in order.split(64)]
        return max(in_use), sum(classes) / len(classes)

    (plain, classes), (divided, other) = facts(1), facts(16)
    assert divided < 1.2 * plain
    assert other > classes - 0.1


@pytest.mark.parametrize(("lengths", "window"), [([], 1), ([3, 0], 1), ([3], 0), ([[3]], 1)])
def test_blocks_that_are_none_are_refused(lengths: list[int], window: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        BlockSampler(lengths, window=window)
    with pytest.raises(ValueError, match="streams must be at least 1, got 0"):
        BlockSampler([3], window=1, streams=0)
