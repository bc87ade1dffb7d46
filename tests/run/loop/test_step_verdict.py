"""The verdict over computations of a step, for every way in which one or two of them may be wrong."""

import itertools

import pytest
import torch

from flambeau.run.loop.step_verdict import Computation, Verdict, digest, verdict

RIGHT = {1: {"the gradient of a": 1, "the loss": 2}, 0: {"a": 3}}
PLAN = {1: (0, 0, 0), 2: (1, 0, 1, 0), 3: (1, 0, 2, 0), 5: (1, 0, 2, 0)}


def wrong_by(value: int) -> dict[int, dict[str, int]]:
    return {**RIGHT, 1: {"the gradient of a": 1 + value, "the loss": 2}}


def after(world: int, passes: int, wrong: dict[tuple[int, int], int]) -> Verdict:
    """The verdict after so many passes; `wrong`: by pass and rank."""
    computations = [
        Computation(
            number,
            (rank - PLAN[world][number - 1]) % world,
            rank,
            wrong_by(wrong[number, rank]) if (number, rank) in wrong else RIGHT,
        )
        for number in range(1, passes + 1)
        for rank in range(world)
    ]
    return verdict(computations, world=world, rotates=world > 1)


@pytest.mark.parametrize("world", PLAN)
def test_equal_ones_hold(world: int) -> None:
    assert after(world, 2, {}) == Verdict(True, [], [])
    assert not after(world, 1, {}).holds


@pytest.mark.parametrize("world", PLAN)
def test_one_wrong_computation_is_outvoted_and_its_rank_named(world: int) -> None:
    for number, rank in itertools.product((1, 2), range(world)):
        wrong = {(number, rank): 7}
        early = after(world, 2, wrong)
        assert not early.holds
        (difference,) = early.differences
        assert difference.names == ["the gradient of a"]
        assert difference.micro_batch == 1
        late = after(world, len(PLAN[world]), wrong)
        assert late.holds
        assert list(late.suspects) == ([rank] if world > 1 else [])


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_rank_that_is_always_wrong_never_holds(world: int) -> None:
    for rank in range(world):
        found = after(world, 4, {(number, rank): 7 for number in range(1, 5)})
        assert not found.holds
        # Of two ranks each agrees with itself.
        assert list(found.suspects) == ([rank] if world > 2 else [])


def test_two_computations_of_one_rank_are_no_proof_where_others_can_make_one() -> None:
    assert not after(3, 4, {(2, 0): 1, (4, 0): 1}).holds
    assert not after(2, 4, {(1, 0): 1, (2, 1): 2, (3, 0): 3, (4, 1): 4}).holds


def test_three_different_ones_do_not_hold() -> None:
    assert not after(1, 3, {(1, 0): 1, (2, 0): 2}).holds
    assert after(1, 3, {(1, 0): 1}).holds


def test_a_digest_sees_each_bit_each_place_and_the_sign_of_zero() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(70_000)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    bits = tensor.view(torch.int32)
    for place, bit in itertools.product((0, 1, 65_535, 65_536, 69_999), range(32)):
        flip = 1 << bit if bit < 31 else -(2**31)
        bits[place] ^= flip
        assert digest(tensor) != before, (place, bit)
        bits[place] ^= flip
    assert digest(tensor) == before
    assert digest(tensor.flip(0)) != before
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert digest(nan) == digest(nan.clone())
    strided = torch.randn(4, 6).t()
    assert digest(strided) == digest(strided.contiguous())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64, torch.int64]
)
def test_a_digest_of_any_dtype(dtype: torch.dtype) -> None:
    found = digest(torch.ones(3, dtype=dtype))
    assert found.dtype is torch.int64
    assert found.dim() == 0
    assert found != digest(torch.tensor([1, 1, 0]).to(dtype))
    assert digest(torch.ones(0, dtype=dtype)) == 0
