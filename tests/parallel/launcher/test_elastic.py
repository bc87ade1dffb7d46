"""A run goes on with another number of ranks as if nothing had happened; with the same one, to the bit.

The plans are those of bench/elastic_plans.py; what looks at their outcome is tried on damaged ones here.
"""

import dataclasses
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flambeau.recipes.data.sample_order import sample_order

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it watches processes in /proc")

SEED = 0
PLANS = (0, 2, 3, 5, 7, 10, 11)  # of which 3 keep their number of ranks: 2, 3 and 4
"""Of those of the harness: every end, norm and number of micro-batches is among them."""
PLANS_IN_PARTS = (0, 5, 6, 7)  # in 6, 5, 4 and 2 parts, and down to one rank and up again


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    path = f"{Path(__file__).parents[3] / 'bench'}"
    before = set(sys.modules)
    sys.path.insert(0, path)
    try:
        yield importlib.import_module("elastic_plans")
    finally:
        sys.path.remove(path)
        for name in set(sys.modules) - before:
            if name in ("elastic_plans", "elastic_training", "kill_storm"):
                del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("number", PLANS)
def test_a_killed_run_ends_like_one_never_killed(
    bench: ModuleType, tmp_path: Path, number: int
) -> None:
    plan = bench.make_plan(number, SEED)
    outcome = bench.carry_out(plan, tmp_path)
    assert not outcome.problems, plan
    assert outcome.kills or plan.lives[0].end == "save"  # which is over before it is seen, at times


@pytest.mark.slow
@pytest.mark.parametrize("number", PLANS_IN_PARTS)
def test_a_killed_run_in_parts_ends_with_the_bits_of_one_process(
    bench: ModuleType, tmp_path: Path, number: int
) -> None:
    plan = bench.make_plan_in_parts(number, SEED)
    worlds = [life.world for life in plan.lives]
    assert all(a != b for a, b in itertools.pairwise(worlds))
    outcome = bench.carry_out(plan, tmp_path)
    assert not outcome.problems, plan


def test_other_bits_of_a_run_in_parts_are_found(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flambeau.recipes.parallel import fixed_order_sum

    def other_order(tree: Any) -> Any:
        value = tree.sums.pop(0)[2]
        while tree.sums:
            value = tree._add(value, tree.sums.pop(0)[2])
        return value

    plan = dataclasses.replace(
        bench.make_plan_in_parts(0, SEED), parts=7, batch_size=14, lives=(bench.Life(3, 0),)
    )
    assert not bench.carry_out(plan, tmp_path / "same").problems
    one = bench.Life(1, 0)
    bench.live(plan, one, tmp_path / "expected", tmp_path / "notes-0", bench.Outcome())
    monkeypatch.setattr(
        fixed_order_sum._Tree, "total", other_order
    )  # the ranks are forks of this process
    bench.live(plan, one, tmp_path / "actual", tmp_path / "notes-1", bench.Outcome())
    assert bench.same_bits(plan, tmp_path / "expected", tmp_path / "actual")


def test_the_plans_hit_what_they_are_meant_to(bench: ModuleType) -> None:
    plans = [bench.make_plan(number, SEED) for number in PLANS]
    exact = [plan for plan in plans if plan.exact]
    assert [{life.world for life in plan.lives} for plan in exact] == [{2}, {3}, {4}]
    for plan in plans:
        worlds = [life.world for life in plan.lives]
        assert plan.exact or all(a != b for a, b in itertools.pairwise(worlds))
        assert plan.length % plan.global_batch
    lives = [life for plan in plans for life in plan.lives]
    assert {life.workers for life in lives} == {0, 1, 2}
    assert {life.end for life in lives} == {"start", "batches", "save", "finish"}
    assert len({life.victim for life in lives}) >= 4
    assert {plan.norm for plan in plans} == {"layer", "sync", "batch"}
    assert {plan.accumulate for plan in plans} == {1, 2, 3}
    assert any(plan.has_unused for plan in plans)
    in_parts = [bench.make_plan_in_parts(number, SEED) for number in PLANS_IN_PARTS]
    worlds = {life.world for plan in in_parts for life in plan.lives}
    assert (worlds, {plan.parts for plan in in_parts}) == ({1, 2, 3, 4}, {2, 4, 5, 6})
    assert any(life.asks for plan in in_parts for life in plan.lives)


def test_a_share_that_is_too_small_is_found(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flambeau.data.loading import batch_layout

    share_of = batch_layout.share_of

    def smaller(num_samples: int, *, rank: int, world: int, full_size: int) -> slice | None:
        share = share_of(num_samples, rank=rank, world=world, full_size=full_size)
        return slice(share.start, share.stop - 1) if share is not None and rank else share

    monkeypatch.setattr(batch_layout, "share_of", smaller)  # the ranks are forks of this process
    found = bench.make_plan(0, SEED)
    plan = dataclasses.replace(found, lives=(bench.Life(2, 0),), batch_size=8)
    problems = bench.carry_out(plan, tmp_path).problems
    assert any(text.startswith("step 0 ") for text in problems)
    assert any("not each sample once" in text for text in problems)


def lives_of(bench: ModuleType, plan: Any) -> list[list[list[Any]]]:
    """What two ranks would note: a life that comes to step 4, and one that goes on from step 3."""

    def train(first: int, last: int) -> list[list[Any]]:
        ranks: list[list[Any]] = [[], []]
        for step in range(first, last):
            epoch, batch = divmod(step, plan.steps_per_epoch)
            order = sample_order(plan.length, seed=plan.seed, epoch=epoch).tolist()
            whole = order[batch * plan.global_batch :][: plan.global_batch]
            half = len(whole) // 2
            ranks[0].append(bench.Batch("train", step, epoch, whole[:half]))
            ranks[1].append(bench.Batch("train", step, epoch, whole[half:]))
            if (step + 1) % plan.steps_per_epoch == 0 or step + 1 == plan.total_steps:
                ranks[0].append(bench.Batch("val", step + 1, epoch, [*range(plan.val_length)]))
        return ranks

    started = train(0, 5)
    started[1].pop()  # rank 1 did not come to the last one
    return [started, train(3, plan.total_steps)]


def no_change(lives: Any) -> None:
    pass


def lose(lives: Any) -> None:
    lives[1][0][0].indices.pop()


def repeat(lives: Any) -> None:
    lives[1][1][1].indices.append(lives[1][1][1].indices[0])


def swap(lives: Any) -> None:
    a, b = lives[1][0][0].indices, lives[1][1][0].indices
    a[0], b[0] = b[0], a[0]


def skip_step(lives: Any) -> None:
    for ranks in lives:
        for batches in ranks:
            batches[:] = [batch for batch in batches if (batch.kind, batch.step) != ("train", 2)]


def skip_on_one_rank(lives: Any) -> None:
    del lives[1][1][0]


def resume_too_late(lives: Any) -> None:
    for batches in lives[1]:
        batches[:] = [batch for batch in batches if batch.step > 4]


def miss_in_evaluation(lives: Any) -> None:
    next(batch for batch in lives[1][0] if batch.kind == "val").indices.pop()


def evaluate_twice(lives: Any) -> None:
    evaluated = next(batch for batch in lives[1][0] if batch.kind == "val")
    lives[1][1].append(evaluated._replace(indices=[0]))


@pytest.mark.parametrize(
    "damage",
    [
        no_change, lose, repeat, swap, skip_step, skip_on_one_rank, resume_too_late, miss_in_evaluation,
        evaluate_twice,
    ],
)  # fmt: skip
def test_samples_are_counted(bench: ModuleType, damage: Callable[[Any], None]) -> None:
    plan = dataclasses.replace(bench.make_plan(0, SEED), accumulate=1, batch_size=8, last_batch=5)
    lives = lives_of(bench, plan)
    damage(lives)
    assert bool(bench.check_samples(plan, lives)) == (damage is not no_change)


def rows_of(plan: Any) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of a run of two epochs, of 4 and 3 steps, with a line every 2 steps."""
    last = plan.val_length - 1
    means = {"val_index": last / 2, "val_square": last * (2 * last + 1) / 6}
    steps = [(2, 0), (4, 0), (4, 0), (6, 1), (7, 1), (7, 1)]
    return [
        {"step": step, "epoch": epoch, **({"val_loss": 1.0, **means} if number in (2, 5) else {})}
        for number, (step, epoch) in enumerate(steps)
    ]


@pytest.mark.parametrize(
    "damage",
    [
        no_change,
        lambda rows: rows.pop(),
        lambda rows: rows.insert(1, rows[0]),
        lambda rows: rows.reverse(),
        lambda rows: rows[2].update(val_index=rows[2]["val_index"] + 1e-6),
        lambda rows: rows[5].update(val_square=rows[5]["val_square"] * 0.999),
    ],
)
def test_lines_are_counted(bench: ModuleType, damage: Callable[[Any], None]) -> None:
    plan = dataclasses.replace(
        bench.make_plan(0, SEED), epochs=2, steps_per_epoch=4, cut_steps=1, log_every=2
    )
    rows = json.loads(json.dumps(rows_of(plan)))
    damage(rows)
    assert bool(bench.check_journal(plan, rows)) == (damage is not no_change)
