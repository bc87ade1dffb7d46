import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flambeau.recipes.parallel.gather_rows import gather_rows

NUM_ROWS = [0, 3, 2]
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def rows_of(rank: int, dtype: torch.dtype, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 100, (num_rows, 2, 3), generator=generator).to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))


def test_rows_of_all_ranks_in_every_dtype(start_ranks) -> None:
    def rank() -> list[list[bool]]:
        here = dist.get_rank()
        found = {dtype: gather_rows(rows_of(here, dtype, NUM_ROWS[here])) for dtype in DTYPES}
        return [
            [
                same_bits(part, rows_of(source, dtype, NUM_ROWS[source]))
                for source, part in enumerate(parts)
            ]
            for dtype, parts in found.items()
        ]

    assert start_ranks(3, rank, group=True).results() == [[[True] * 3] * len(DTYPES)] * 3


def test_shapes_of_all_kinds(start_ranks) -> None:
    def rank() -> list[list[Tensor]]:
        here = dist.get_rank()
        group = dist.new_group([1, 2])
        strided = torch.arange(12.0).view(3, 4).t()[: here + 1]
        found = [
            gather_rows(torch.arange(here)),
            gather_rows(torch.empty(0, 4)),
            gather_rows(torch.empty(here + 1, 0)),
            gather_rows(strided.requires_grad_()),
        ]
        if here:
            found.append(gather_rows(torch.full((here,), here), group=group))
        return found

    for here, found in enumerate(start_ranks(3, rank, group=True).results()):
        flat, no_rows, no_columns, strided, *of_group = found
        assert [part.tolist() for part in flat] == [[], [0], [0, 1]]
        assert [part.shape for part in no_rows] == [(0, 4)] * 3
        assert [part.shape for part in no_columns] == [(1, 0), (2, 0), (3, 0)]
        assert not any(part.requires_grad for part in strided)
        assert strided[2].tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10]]
        if here:
            assert [part.tolist() for part in of_group[0]] == [[1], [2, 2]]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            torch.zeros(2, 3),
            torch.zeros(2, 4),
            r"float32 \(2, 3\) on rank 0, torch.float32 \(2, 4\)",
        ),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), "torch.int64"),
        (torch.zeros(2), torch.zeros(()), r"torch.float32 \(\) on rank 1"),
        (torch.zeros(2, 1), torch.zeros(2), r"\(2, 1\) on rank 0"),
    ],
)
def test_what_does_not_fit_is_refused_on_all(
    first: Tensor, second: Tensor, message: str, start_ranks
) -> None:
    def rank() -> float:
        with pytest.raises(ValueError, match=message):
            gather_rows((first, second)[dist.get_rank()])
        total = torch.ones(())
        dist.all_reduce(total)  # the ranks are still in step
        return float(total)

    assert start_ranks(2, rank, group=True).results() == [2, 2]


def test_without_a_group() -> None:
    rows = torch.ones(3, requires_grad=True)
    (part,) = gather_rows(rows)
    torch.testing.assert_close(part, torch.ones(3), rtol=0, atol=0)
    assert not part.requires_grad
    with pytest.raises(ValueError, match=r"needs a tensor \(N, ...\)"):
        gather_rows(torch.zeros(()))
