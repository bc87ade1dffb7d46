import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flambeau.recipes.parallel.first_rank import on_first_rank


class NeedsTwo(Exception):
    """Its pickle is made from `args`, which are one: it cannot be read again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def test_without_a_group_it_is_the_call() -> None:
    value = object()
    assert on_first_rank(lambda: value) is value
    with pytest.raises(ZeroDivisionError):
        on_first_rank(lambda: 1 // 0)


def test_only_rank_0_works_and_all_get_the_result(start_ranks, tmp_path: Path) -> None:
    def rank() -> list[object]:
        def work() -> dict[str, object]:
            with (tmp_path / "calls").open("a") as file:
                file.write(f"{dist.get_rank()}\n")
            return {"path": tmp_path, "tensor": torch.arange(3), "none": None}

        return [on_first_rank(work), on_first_rank(lambda: None), on_first_rank(lambda: [b"", 0])]

    for first, second, third in start_ranks(3, rank, group=True).results():
        assert (first["path"], first["none"]) == (tmp_path, None)
        torch.testing.assert_close(first["tensor"], torch.arange(3), rtol=0, atol=0)
        assert (second, third) == (None, [b"", 0])
    assert (tmp_path / "calls").read_text() == "0\n"


def failing(kind: str) -> tuple[str, str, list[str], bool, float]:
    def work() -> object:
        match kind:
            case "file":
                return Path("/nowhere/file").read_bytes()
            case "exit":
                raise SystemExit(3)
            case "error that cannot be pickled":
                raise NeedsTwo("a", "b")
        return lambda: None  # a result that cannot be pickled

    with pytest.raises(BaseException) as found:
        on_first_rank(work)
    error = found.value
    total = torch.ones(1)
    dist.all_reduce(total)  # the ranks are still in step
    notes = getattr(error, "__notes__", [])
    is_chained = error.__cause__ is not None
    return type(error).__name__, str(error), notes, is_chained, float(total)


def test_every_rank_raises_what_rank_0_raised(start_ranks) -> None:
    first, second = start_ranks(2, failing, "file", group=True).results()
    for name, text, *_, total in (first, second):
        assert name == "FileNotFoundError"
        assert text == "[Errno 2] No such file or directory: '/nowhere/file'"
        assert total == 2
    assert first[2] == []
    assert second[2] == ["on rank 0, which did this for all ranks"]


def test_exit_codes_are_shared(start_ranks) -> None:
    for name, text, *_ in start_ranks(2, failing, "exit", group=True).results():
        assert (name, text) == ("SystemExit", "3")


def test_an_error_that_cannot_be_pickled_is_a_runtime_error_on_all(start_ranks) -> None:
    job = start_ranks(2, failing, "error that cannot be pickled", group=True)
    for rank, (name, text, notes, is_chained, total) in enumerate(job.results()):
        assert (name, text) == ("RuntimeError", "rank 0 failed with NeedsTwo: a and b")
        assert "not raised as such, because it cannot be pickled: " in notes[0]
        assert is_chained == (rank == 0)
        assert total == 2


def test_a_result_that_cannot_be_pickled_fails_on_all(start_ranks) -> None:
    job = start_ranks(2, failing, "result that cannot be pickled", group=True)
    (first, *_), (second, *_) = job.results()
    assert first == second
    assert first in ("AttributeError", "PicklingError")  # Python 3.11 and 3.12, and later


def slow() -> str:
    try:
        return on_first_rank(lambda: time.sleep(0.5) or "done", timeout_s=0.1)
    except RuntimeError as error:
        return str(error)


def test_the_timeout_is_its_own(start_ranks) -> None:
    """That of the process group is 60 s here."""
    _, second = start_ranks(2, slow, group=True).results()
    assert "imed out" in second


def test_many_in_a_row(start_ranks) -> None:
    def rank() -> list[int]:
        return [on_first_rank(lambda number=number: number) for number in range(10)]

    assert start_ranks(3, rank, group=True).results() == [list(range(10))] * 3


def test_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout_s must be above 0, got 0"):
        on_first_rank(lambda: None, timeout_s=0)
