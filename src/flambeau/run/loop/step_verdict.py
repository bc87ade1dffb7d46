"""What several computations of a step, compared by digests of their bits, say about the ranks that made them.

Every rank has the digests of all computations, and comes to the same verdict.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # an odd number with bits all over it, as in SplitMix64
_MOST_NAMED = 3

Digests = Mapping[int, Mapping[str, int]]
"""By micro-batch (from 1; 0 for weights) and name of a tensor."""


class Computation(NamedTuple):
    """One computation of a share of a step: the micro-batches of the rank `share`, computed by `rank`."""

    number: int  # from 1
    share: int
    rank: int
    digests: Digests


class Difference(NamedTuple):
    """Two computations of a share that differ, in these tensors of the first micro-batch with any."""

    left: Computation
    right: Computation
    micro_batch: int
    names: Sequence[str]

    def text(self, world: int) -> str:
        who = (
            f"computations {self.left.number} and {self.right.number} differ"
            if world == 1
            else f"computations {self.left.number} (rank {self.left.rank}) and {self.right.number} "
            f"(rank {self.right.rank}) of the share of rank {self.left.share} differ"
        )
        return f"{who} in {shortened(self.names)}"


class Verdict(NamedTuple):
    """What the computations of a step so far say.

    Attributes:
        holds: the newest computations have the bits of others, so that the optimizer may use them.
        differences: between the computations of each share.
        suspects: ranks with a computation that differs from what two ranks have found; none if that is all.
    """

    holds: bool
    differences: Sequence[Difference]
    suspects: Sequence[int]


def verdict(computations: Sequence[Computation], *, world: int, rotates: bool) -> Verdict:
    """`rotates`: another computation of a share counts only if another rank has made it."""
    holds = True
    differences: list[Difference] = []
    suspects: set[int] = set()
    for share in range(world):
        ours = [one for one in computations if one.share == share]
        confirmed = next((one for one in ours if _is_confirmed(one, ours, rotates)), None)
        right = ours[0] if confirmed is None else confirmed
        others = [one for one in ours if one.digests != right.digests]
        # One line is enough where a rank has computed the same twice.
        distinct = [one for n, one in enumerate(others) if not _is_among(one, others[:n])]
        differences += [_difference(*sorted((right, one))) for one in distinct]
        if confirmed is not None and rotates:
            suspects.update(one.rank for one in others)
        holds &= confirmed is not None and ours[-1].digests == confirmed.digests
    return Verdict(holds, differences, sorted(suspects) if len(suspects) < world else ())


def _is_among(one: Computation, others: Sequence[Computation]) -> bool:
    return any(one.rank == other.rank and one.digests == other.digests for other in others)


def _is_confirmed(one: Computation, ours: Sequence[Computation], rotates: bool) -> bool:
    return any(
        one.digests == other.digests
        and (one.rank != other.rank if rotates else one.number != other.number)
        for other in ours
    )


def _difference(left: Computation, right: Computation) -> Difference:
    for micro_batch in sorted(
        left.digests.keys() | right.digests.keys(), key=lambda n: (n == 0, n)
    ):
        pair = [one.digests.get(micro_batch, {}) for one in (left, right)]
        names = sorted(
            name for name in {**pair[0], **pair[1]} if len({d.get(name) for d in pair}) > 1
        )
        if names:
            return Difference(left, right, micro_batch, names)
    raise AssertionError("the computations are equal")


def shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def digest(tensor: Tensor) -> Tensor:
    """64 bits of a tensor's bits and their places, 0-d int64 on its device; waits for nothing.

    NaN equals itself, and 0 is not -0.
    """
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = values.reshape(-1).view(_INTEGERS[values.element_size()])
    places = _places(tensor.device)
    sums = []
    for start in range(0, len(bits), len(places)):
        part = bits[start : start + len(places)].long()
        part += places[: len(part)]
        part += _wrapped(start * _GOLDEN)
        # x + 2 x^2 is a permutation of the 64-bit integers (as in RC6): one other element is another sum.
        sums.append(torch.addcmul(part, part, part, value=2).sum())
    return torch.stack(sums).sum() if sums else bits.new_zeros((), dtype=torch.int64)


@functools.cache
def _places(device: torch.device) -> Tensor:
    """A number for each place; few at once on a CPU, for its cache."""
    return torch.arange(2**16 if device.type == "cpu" else 2**20, device=device) * _GOLDEN


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
