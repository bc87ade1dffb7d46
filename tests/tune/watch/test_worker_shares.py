"""Iterable data sets in real processes, with and without workers: which of them ask for their share."""

import sys
from pathlib import Path
from typing import Any

import pytest

from flambeau.sandbox.sandbox import Sandbox
from flambeau.tune.doctor.trial import Script
from flambeau.tune.watch.plan import Plan

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

way, workers = sys.argv[1], int(sys.argv[2])


class Plain(IterableDataset):
    def __iter__(self):
        for number in range(64):
            yield torch.full((8,), float(number))


class Shares(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, count = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, 64, count):
            yield torch.full((8,), float(number))


class Seeds(IterableDataset):
    def __iter__(self):
        if (info := get_worker_info()) is not None:
            torch.manual_seed(info.seed)
        yield from Plain()


def give_share(_):
    info = get_worker_info()
    info.dataset.share = info.id


def give_seed(_):
    torch.manual_seed(get_worker_info().seed)


def main():
    begin = None
    if way.startswith("pipe"):
        from torch.utils.data.datapipes.iter import IterableWrapper

        data = IterableWrapper([torch.full((8,), float(n)) for n in range(64)])
        data = data.sharding_filter() if way == "pipe shares" else data.map(torch.neg)
    else:
        data = {"shares": Shares, "seeds": Seeds}.get(way, Plain)()
        begin = {"begin shares": give_share, "begin seeds": give_seed}.get(way)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for epoch in range(10**6):
        seen = []
        for batch in DataLoader(data, 4, num_workers=workers, worker_init_fn=begin):
            seen += batch[:, 0].tolist()
            model(batch).mean().backward()
            optimizer.step()
        if epoch == 0:
            print(len(seen), len(set(seen)), flush=True)
            assert len(seen) == len(set(seen)), "a sample came twice"


if __name__ == "__main__":
    main()
"""
QUICK = Plan(watches=False, warmup_steps=2, warmup_s=0.1, steps=4, seconds=0.2)
WAYS = {
    "plain": True,
    "shares": False,
    "seeds": True,
    "begin seeds": True,
    "pipe": True,
    "begin shares": False,
    "pipe shares": False,
}


def facts(folder: Path, way: str, now: int, **change: Any) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    plan = Plan(**(vars(QUICK) | {"change": change}))
    with Sandbox() as sandbox:
        trial = Script([sys.executable, f"{script}", way, f"{now}"], sandbox, 120).run(plan)
    assert trial.failure is None, trial.failure
    loader: dict[str, Any] = trial.trainers[0]["loader"]
    return loader


@pytest.mark.parametrize("way", WAYS)
def test_who_asks_is_known_before_there_are_workers(tmp_path: Path, way: str) -> None:
    found = facts(tmp_path, way, 0)
    assert found["repeats"] == WAYS[way]
    assert bool(found["shared"]) != WAYS[way]


def test_a_trial_gives_workers_to_data_that_are_shared_only(tmp_path: Path) -> None:
    shared = facts(tmp_path, "shares", 0)["shared"]
    assert facts(tmp_path, "shares", 0, workers=2, shared=shared)["num_workers"] == 2
    assert facts(tmp_path, "plain", 0, workers=2, shared=shared)["num_workers"] == 0
    assert facts(tmp_path, "plain", 0, workers=2, shared=[])["num_workers"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["shares", "pipe shares"])
def test_workers_tell_as_well(tmp_path: Path, way: str) -> None:
    assert not facts(tmp_path, way, 2)["repeats"]
