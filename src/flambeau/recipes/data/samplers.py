"""Samplers whose epoch is a pure function of (seed, epoch): weighted, class-balanced, by blocks, subset.

采样器：每个 epoch 只由 (seed, epoch) 决定——加权、类别均衡、按块、子集、无限。

Source: SplitMix64 as in Steele, Lea and Flood, OOPSLA 2014, for the random numbers. Weighted sampling
without replacement: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", Information
Processing Letters 97, 2006: the k largest of u**(1/w).

torch's samplers draw from a generator whose state a resume would have to restore, give each rank another
order, or repeat samples so that all ranks have equally many; these do not.
Without a sampler, `Run` and `flambeau train` shuffle by `sample_order`, in another order.
Not for data without a length.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

_GAMMA = 0x9E3779B97F4A7C15
_DIVIDING = 0xD1B54A32D192ED03
"""Makes another seed of one: of the streams of a BlockSampler; chosen, odd."""
_PIECE = 1 << 14
"""Samples of a BlockSampler that are sorted at once, at least. From 2**15 on torch uses threads, which wait
for each other on a busy machine: a million samples took 7 s in place of 0.3."""


class EpochSampler(Sampler[int]):
    """All samples, shuffled; the base of the other samplers.

    In torch's DataLoader each pass is the next epoch. `start_at` jumps to any position at no cost; give it
    the samples that you have consumed, because with workers the sampler is ahead.

    Args:
        length: at least 1.
        rank: of this process, which gets every `world`-th sample of the order, from number `rank` on.
        world: processes; their numbers of samples differ by at most one, and no sample is repeated.

    Raises:
        ValueError: nothing to sample from, or no such rank.

    Example:
        >>> sampler = EpochSampler(5, seed=1)
        >>> first, second = list(sampler), list(sampler)
        >>> sampler.start_at(epoch=1, position=2)
        >>> list(sampler) == second[2:]
        True
    """

    def __init__(self, length: int, *, seed: int = 0, rank: int = 0, world: int = 1) -> None:
        if length < 1:
            raise ValueError(f"there must be a sample to draw, got {length}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in [0, {world}), got {rank}")
        self._length, self._seed, self._rank, self._world = length, seed, rank, world
        self.epoch, self._position = 0, 0

    def order(self, epoch: int) -> Tensor:
        """The order of the samples in an epoch, of all ranks together.

        Returns:
            (N,) int64 on the CPU.
        """
        return torch.argsort(uniform(self._length, seed=self._seed, epoch=epoch), stable=True)

    def set_epoch(self, epoch: int) -> None:
        """Begin with the start of this epoch (from 0)."""
        self.start_at(epoch=epoch, position=0)

    def start_at(self, *, epoch: int, position: int) -> None:
        """Begin in an epoch after `position` samples of this rank."""
        self.epoch, self._position = epoch, position

    def __len__(self) -> int:
        return len(range(self._rank, self._length, self._world))

    def __iter__(self) -> Iterator[int]:
        indices = self.order(self.epoch)[self._rank :: self._world]
        start, self._position = self._position, 0
        self.epoch += 1
        yield from indices[start:].tolist()


class WeightedSampler(EpochSampler):
    """Samples drawn with probabilities proportional to their weights.

    Args:
        weights: (M,) at least 0, not all 0, finite.
        num_samples: drawn per epoch; by default M.
        replacement: False draws each sample at most once.

    Raises:
        ValueError: a weight is negative or not finite, all are 0, or, without replacement, fewer than
            `num_samples` are above 0.

    Example:
        >>> sorted(WeightedSampler([1.0, 0.0, 1.0], num_samples=2, replacement=False))
        [0, 2]
    """

    def __init__(
        self,
        weights: Any,
        num_samples: int | None = None,
        *,
        replacement: bool = True,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._weights = torch.as_tensor(weights, dtype=torch.float64).cpu()
        if self._weights.dim() != 1 or not bool(
            (self._weights.isfinite() & (self._weights >= 0)).all()
        ):
            raise ValueError("weights must be one row of finite numbers of at least 0")
        above = int((self._weights > 0).sum())
        if not above:
            raise ValueError("all weights are 0: there is nothing to draw")
        length = len(self._weights) if num_samples is None else num_samples
        if not replacement and length > above:
            raise ValueError(
                f"{length} samples are to be drawn without replacement, and {above} weights are above 0"
            )
        super().__init__(length, seed=seed, rank=rank, world=world)
        self._replacement = replacement

    def order(self, epoch: int) -> Tensor:
        if self._replacement:
            levels = self._weights.cumsum(0)
            drawn = uniform(self._length, seed=self._seed, epoch=epoch) * levels[-1]
            # right=True: a draw equal to a level belongs to the next sample with a weight above 0.
            return torch.searchsorted(levels, drawn, right=True).clamp_max(len(levels) - 1)
        keys = uniform(len(self._weights), seed=self._seed, epoch=epoch).log() / self._weights
        keys[self._weights == 0] = -torch.inf
        return torch.argsort(keys, descending=True, stable=True)[: self._length]


class BalancedSampler(WeightedSampler):
    """Draws each class equally often on average, whatever its size; with replacement.

    Args:
        labels: (M,) classes, at least 0.
        num_samples: drawn per epoch; by default M.
        strength: in [0, 1]: the probability of a class of n samples is proportional to n ** (1 - strength),
            so 1 makes all equally likely, and 0.5 halves the differences on a log scale.

    Raises:
        ValueError: no labels, a label below 0, or a strength outside [0, 1].

    Example:
        >>> labels = torch.tensor([0] * 90 + [1] * 10)
        >>> drawn = labels[BalancedSampler(labels, num_samples=1000).order(epoch=0)]
        >>> 400 < int(drawn.sum()) < 600
        True
    """

    def __init__(
        self,
        labels: Any,
        num_samples: int | None = None,
        *,
        strength: float = 1.0,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not 0 <= strength <= 1:
            raise ValueError(f"strength must be in [0, 1], got {strength}")
        numbers = torch.as_tensor(labels, dtype=torch.int64).cpu()
        if numbers.dim() != 1 or not len(numbers) or int(numbers.min()) < 0:
            raise ValueError("labels must be one row of integers of at least 0")
        weights = torch.bincount(numbers)[numbers].double() ** -strength
        super().__init__(weights, num_samples, seed=seed, rank=rank, world=world)


class BlockSampler(EpochSampler):
    """Blocks of neighbours in random order, whose samples mix within a window: where data are read in blocks.

    A sample comes at most `window` places from where the random order of blocks puts it, so the blocks of
    about two windows are in use at a time. `streams` divides the blocks at random, for all epochs, into
    streams of equally many samples, each with a part of the window, from which an epoch takes samples by
    turns. Where `world` divides `streams`, each rank reads blocks of its own.

    Args:
        lengths: (B,) samples of each block, at least 1, in the order of the data.
        window: at least 1; far above the number of samples it shuffles each stream as a whole.
        streams: at least 1; their numbers of samples differ by at most one.

    Attributes:
        stream_of: (streams,) int64, the stream of each place in an epoch's order, modulo `streams`; places in
            a row are spread evenly.

    Raises:
        ValueError: no blocks, an empty one, no window, or no stream.

    Example:
        >>> order = BlockSampler([3, 3, 3], window=1).order(epoch=0).tolist()
        >>> sorted(order) == list(range(9)), order[0] % 3, order[1] - order[0]
        (True, 0, 1)
        >>> halves = [BlockSampler([5] * 8, window=9, streams=2, rank=k, world=2) for k in range(2)]
        >>> blocks = [{index // 5 for index in half} for half in halves]
        >>> len(blocks[0]), len(blocks[1]), blocks[0] & blocks[1]
        (4, 4, set())
    """

    def __init__(
        self,
        lengths: Any,
        *,
        window: int,
        streams: int = 1,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        blocks = torch.as_tensor(lengths, dtype=torch.int64).cpu()
        if blocks.dim() != 1 or not len(blocks) or int(blocks.min()) < 1:
            raise ValueError("lengths must be one row of integers of at least 1")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if streams < 1:
            raise ValueError(f"streams must be at least 1, got {streams}")
        super().__init__(int(blocks.sum()), seed=seed, rank=rank, world=world)
        self._window = max(1, window // streams)
        self.stream_of = spread(streams)
        self._edges = stream_edges(self._length, self.stream_of)
        self._starts, self._lengths = self._divided(blocks)
        ends = self._lengths.cumsum(0)
        # Of each stream: the first of its blocks; a block across an edge is two.
        self._firsts = torch.searchsorted(ends, self._edges, right=True).tolist()

    def _divided(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The first sample and the number of samples of each block, stream after stream."""
        starts = lengths.cumsum(0) - lengths
        if len(self.stream_of) == 1:
            return starts, lengths
        numbers = uniform(len(lengths), seed=self._seed ^ _DIVIDING, epoch=0)
        by_number = torch.argsort(numbers, stable=True)
        starts, lengths = starts[by_number], lengths[by_number]
        ends = lengths.cumsum(0)
        cuts = torch.cat([ends - lengths, self._edges[:-1]]).unique()
        of = torch.searchsorted(ends, cuts, right=True)
        of, cuts = of[of < len(ends)], cuts[of < len(ends)]
        first = starts[of] + cuts - (ends - lengths)[of]
        return first, torch.diff(cuts, append=ends[-1:])

    def order(self, epoch: int) -> Tensor:
        """The order of the samples in an epoch, of all ranks together.

        Returns:
            (N,) int32 on the CPU, int64 from 2**31 samples on.
        """
        # The numbers of the blocks are others than those of the samples.
        numbers = uniform(len(self._lengths), seed=self._seed ^ _GAMMA, epoch=epoch)
        edges = self._edges.tolist()
        # Half of the memory of int64, of which the order of a very large set would be the most.
        dtype = torch.int32 if self._length <= torch.iinfo(torch.int32).max else torch.int64
        order = torch.empty(self._length, dtype=dtype)
        for turn, stream in enumerate(self.stream_of.tolist()):
            low, high = self._firsts[stream : stream + 2]
            blocks = low + torch.argsort(numbers[low:high], stable=True)
            if len(blocks):
                order[turn :: len(self.stream_of)] = self._mixed(blocks, edges[stream], epoch)
        return order

    def _mixed(self, blocks: Tensor, first_number: int, epoch: int) -> Tensor:
        """The samples of some blocks, mixed within the window; `first_number` is of their random numbers."""
        lengths = self._lengths[blocks]
        ends = lengths.cumsum(0)
        moved = self._starts[blocks] - (ends - lengths)
        length = int(ends[-1])
        order = torch.empty(length, dtype=torch.int64)
        keys = samples = order[:0]
        num_done = 0
        # No key is below its place, so that what is below the next piece can be sorted before that is drawn:
        # the memory is that of a piece and of the window, and the order that of one sort of all.
        size = max(_PIECE, self._window)
        for first in range(0, length, size):
            last = min(first + size, length)
            places = torch.arange(first, last)
            drawn = _uniform(first_number + first, first_number + last, self._seed, epoch)
            keys = torch.cat([keys, places + (drawn * self._window).long()])
            # torch would use threads here, too.
            of = ends.numpy().searchsorted(places.numpy(), side="right")
            samples = torch.cat([samples, places + moved[torch.from_numpy(of)]])
            by_key = torch.argsort(keys, stable=True)
            keys, samples = keys[by_key], samples[by_key]
            ready = int(torch.searchsorted(keys, last)) if last < length else len(keys)
            order[num_done : num_done + ready] = samples[:ready]
            keys, samples = keys[ready:], samples[ready:]
            num_done += ready
        return order


def spread(count: int) -> Tensor:
    """The numbers below `count`, any in a row spread evenly.

    Groups of neighbours, as many as the largest power of 2 in `count`, come by turns in the order of van der
    Corput's sequence, and the numbers of a group by turns as well: 16 in a row of 48, from a multiple of 16
    on, have one of each group.

    Args:
        count: at least 1.

    Returns:
        (count,) int64 on the CPU.

    Example:
        >>> spread(8).tolist()
        [0, 4, 2, 6, 1, 5, 3, 7]
        >>> spread(12).tolist()
        [0, 6, 3, 9, 1, 7, 4, 10, 2, 8, 5, 11]
    """
    groups = count & -count
    width = groups.bit_length() - 1
    size = count // groups
    mirrored = [int(f"{group:0{width}b}"[::-1], 2) for group in range(groups)]
    return torch.tensor([size * group + turn for turn in range(size) for group in mirrored])


def stream_edges(length: int, stream_of: Tensor) -> Tensor:
    """Where streams begin and end whose samples come by turns.

    Args:
        stream_of: as `spread` makes it.

    Returns:
        (streams + 1,) int64 on the CPU, the first 0 and the last `length`.

    Example:
        >>> stream_edges(5, spread(2)).tolist()
        [0, 3, 5]
    """
    counts = torch.zeros(len(stream_of) + 1, dtype=torch.int64)
    for turn, stream in enumerate(stream_of.tolist()):
        counts[stream + 1] = len(range(turn, length, len(stream_of)))
    return counts.cumsum(0)


class SubsetSampler(EpochSampler):
    """Some samples, shuffled or in the given order.

    Args:
        indices: (M,) integers; a repeated index is visited repeatedly.
        shuffle: False keeps the order.

    Example:
        >>> list(SubsetSampler([7, 3, 5], shuffle=False))
        [7, 3, 5]
    """

    def __init__(
        self, indices: Any, *, shuffle: bool = True, seed: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        self._indices = torch.as_tensor(indices, dtype=torch.int64).cpu()
        super().__init__(len(self._indices), seed=seed, rank=rank, world=world)
        self._shuffle = shuffle

    def order(self, epoch: int) -> Tensor:
        return self._indices[super().order(epoch)] if self._shuffle else self._indices


class InfiniteSampler(Sampler[int]):
    """The epochs of another sampler without end, for training that counts steps.

    Workers prefetch across epochs. It has no length.

    Args:
        sampler: continues from its current position.

    Example:
        >>> import itertools
        >>> endless = InfiniteSampler(SubsetSampler([4, 2], shuffle=False))
        >>> list(itertools.islice(endless, 5))
        [4, 2, 4, 2, 4]
    """

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from self._sampler


def uniform(count: int, *, seed: int, epoch: int) -> Tensor:
    """Random numbers above 0 and below 1 that depend only on seed, epoch and their index.

    Args:
        seed: any integer; its low 64 bits count.
        epoch: at least 0.

    Returns:
        (count,) float64 on the CPU, odd multiples of 2**-53.

    Example:
        >>> bool((uniform(9, seed=0, epoch=3)[:4] == uniform(4, seed=0, epoch=3)).all())
        True
    """
    return _uniform(0, count, seed, epoch)


def _uniform(first: int, last: int, seed: int, epoch: int) -> Tensor:
    base = _mix(torch.tensor([_signed(seed)]))
    stream = _mix(base ^ _signed((epoch + 1) * _GAMMA))
    bits = _mix((torch.arange(first, last) + 1) * _signed(_GAMMA) + stream)
    return ((bits >> 12 & (1 << 52) - 1).double() + 0.5) / (1 << 52)


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's finalizer; int64 arithmetic wraps modulo 2**64, as it requires."""
    value = (value ^ (value >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return value ^ (value >> 31 & (1 << 33) - 1)


def _signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value
