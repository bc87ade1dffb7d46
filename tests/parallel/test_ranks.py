"""Ranks agree before the first step, fail together, and rank 0 alone speaks."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau.errors import InputError
from flambeau.parallel import ranks as ranks_module
from flambeau.parallel.ranks import LOST_PEER, FailedElsewhere, Ranks, _choose_interface, join_ranks
from flambeau.run.loop.nan_guard import NotFinite
from flambeau.run.run import Run

StartRanks = Callable[..., Any]


def outcome(work: Callable[[], Any]) -> tuple[str, str]:
    """How `work` ends: what it raises, and the words."""
    try:
        return "returned", str(work())
    except FailedElsewhere as error:
        assert error.code == LOST_PEER
        return "FailedElsewhere", error.cause
    except Exception as error:
        return type(error).__name__, str(error)


def test_whoever_asks_gets_the_same_ranks(start_ranks: StartRanks) -> None:
    """Two objects would have two watchdogs, which report one failure in different words."""

    def work() -> bool:
        first = join_ranks()
        return join_ranks() is first and first.world == 2

    assert start_ranks(2, work).results() == [True, True]


@pytest.mark.parametrize(("rank", "absent"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_join_is_named_and_not_waited_for_without_end(
    rank: int, absent: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 stopped on the first line of its script: the others waited ten minutes without a word."""
    monkeypatch.setattr(ranks_module, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(ranks_module, "_START_S", 0.6)
    with pytest.raises(InputError, match=f"^rank {absent} has not joined the others within 0.6 s"):
        ranks_module._start_name(dist.HashStore(), rank, 2)
    said = capsys.readouterr().err
    assert said.startswith(f"flambeau: rank {absent} has not joined the others within 0.2 s: it is")
    assert said.endswith("; waiting for 0.6 s at most\n")


def test_first_runs_on_rank_0_and_tells_the_others(start_ranks: StartRanks) -> None:
    def work() -> Any:
        ranks = join_ranks()
        found = [ranks.first(os.getpid), ranks.gather(ranks.rank), ranks.broadcast(ranks.rank)]

        def fail() -> None:
            raise InputError("the disk is full")

        def crash() -> None:
            raise ZeroDivisionError("by zero")

        return (
            os.getpid(),
            found,
            outcome(lambda: ranks.first(fail)),
            outcome(lambda: ranks.first(crash)),
        )

    results = start_ranks(3, work).results()
    for rank, (_, found, failed, crashed) in enumerate(results):
        assert found == [results[0][0], [0, 1, 2], 0]
        if rank == 0:
            assert failed == ("InputError", "the disk is full")
            assert crashed == ("ZeroDivisionError", "by zero")
        else:
            assert failed == ("FailedElsewhere", "InputError: the disk is full")
            assert crashed == ("FailedElsewhere", "ZeroDivisionError: by zero")


def test_each_goes_on_only_if_all_can(start_ranks: StartRanks) -> None:
    def work() -> Any:
        ranks = join_ranks()

        def read() -> int:
            if ranks.rank == 2:
                raise InputError("no such folder")
            return ranks.rank

        return outcome(lambda: ranks.each(lambda: ranks.rank)), outcome(lambda: ranks.each(read))

    results = start_ranks(3, work).results()
    assert [r[0] for r in results] == [("returned", f"{rank}") for rank in range(3)]
    kind, text = results[0][1]
    assert kind == "InputError"
    assert text.startswith("rank 2 (")
    assert text.endswith("): no such folder")
    assert [r[1][0] for r in results[1:]] == ["FailedElsewhere"] * 2


def run_of(folder: Path, *, features: int = 3, rows: int = 12, **settings: Any) -> Run:
    torch.manual_seed(join_ranks().rank)
    data = TensorDataset(torch.randn(rows, features), torch.arange(rows) % 2)
    model = nn.Linear(features, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Run(folder, model, optimizer, data, duration="2ep", batch_size=6, **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"features": 5}, "the shape of 'weight' is (2, 5, 'torch.float32') there and (2, 3, "),
        ({"rows": 13}, "the length of the training data is 13 there and 12 here"),
        ({"clip_norm": 2.0}, "the setting clip_norm is 2.0 there and 0.0 here"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_told(
    start_ranks: StartRanks, tmp_path: Path, settings: Any, named: str
) -> None:
    def work() -> tuple[str, str]:
        mine = settings if os.environ["RANK"] == "1" else {}
        return outcome(lambda: run_of(tmp_path / "run", **mine))

    (kind, text), *others = start_ranks(3, work).results()
    assert kind == "InputError"
    assert text.startswith("rank 1 (")
    assert named in text
    assert [k for k, _ in others] == ["FailedElsewhere"] * 2
    assert not (tmp_path / "run").exists()


def test_equal_weights_need_no_seed(start_ranks: StartRanks, tmp_path: Path) -> None:
    def work() -> Any:
        run = run_of(tmp_path / "run", ema=0.5)
        assert run.state.ema is not None
        run.close()
        return run.model.state_dict(), run.state.ema.shadow

    first, second = start_ranks(2, work).results()
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_loss_that_is_bad_on_one_rank_stops_all_before_that_step(
    start_ranks: StartRanks, tmp_path: Path, precision: str
) -> None:
    def work() -> Any:
        run = run_of(tmp_path / precision, precision=precision, log_every=4, rows=24)
        weights = []

        def train() -> None:
            for _ in run.epochs():
                for rows, targets in run.batches():
                    with run.autocast():
                        loss = cross_entropy(run.model(rows), targets)
                    if run.state.step == 1 and os.environ["RANK"] == "1":
                        loss = loss + float("inf")
                    weights.append([p.detach().clone() for p in run.model.parameters()])
                    run.step(loss)

        with (
            pytest.raises(NotFinite)
            if os.environ["RANK"] == "0"
            else pytest.raises(FailedElsewhere)
        ):
            train()
        return weights, [p.detach() for p in run.model.parameters()]

    results = start_ranks(2, work).results()
    for weights, last in results:
        assert len(weights) == 4
        torch.testing.assert_close(last, weights[1], rtol=0, atol=0)
        assert not torch.equal(weights[0][0], weights[1][0])
    assert (tmp_path / precision / "not-finite-step-00000002.json").exists()


def test_more_ranks_than_samples_a_batch_are_refused(
    start_ranks: StartRanks, tmp_path: Path
) -> None:
    def work() -> tuple[str, str]:
        data = TensorDataset(torch.randn(12, 3), torch.arange(12) % 2)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return outcome(
            lambda: Run(tmp_path / "run", model, optimizer, data, duration="1ep", batch_size=2)
        )

    for kind, text in start_ranks(3, work).results():
        assert kind == "InputError"
        assert "3 processes" in text


def test_no_rank_goes_on_before_all_have_joined(
    start_ranks: StartRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ended with an error at once would reset the connections of those that still join."""
    init = dist.init_process_group

    def slowly(*arguments: Any, **settings: Any) -> None:
        init(*arguments, **settings)
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            (tmp_path / "joined").touch()

    monkeypatch.setattr(dist, "init_process_group", slowly)

    def work() -> bool:
        join_ranks()
        return (tmp_path / "joined").exists()

    assert start_ranks(2, work).results() == [True, True]


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="RANK, MASTER_ADDR, MASTER_PORT is not"):
        join_ranks()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(InputError, match="WORLD_SIZE is 'two', not a number"):
        join_ranks()


def test_alone_nothing_is_sent() -> None:
    ranks = Ranks(0, 1, None)
    flag = torch.ones(())
    ranks.worst(flag)
    assert ranks.first(lambda: 3) == 3
    assert ranks.gather("a") == ["a"]
    ranks.check_same({"a": 1})
    with pytest.raises(InputError, match="here"):
        ranks.each(lambda: (_ for _ in ()).throw(InputError("here")))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the interfaces of Linux")
def test_gloo_listens_on_the_interface_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is put back
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    _choose_interface("127.0.0.1", 29500)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    _choose_interface("127.0.0.1", 29500)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
