"""The answers to the images of an evaluation, counted by other means."""

import collections
import json
import math

import pytest
import torch
from torch import Tensor

from flambeau.run.loop.sample_results import (
    SampleResults,
    SampleResultsMetric,
    evaluation_facts,
    results_of_classes,
)

CLASSES = ("ant", "bee", "cow")


def answers(num: int = 200, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(num, generator=generator)
    logits = 2 * torch.randn(num, 3, generator=generator)
    targets = torch.randint(3, (num,), generator=generator)
    return indices, targets, logits


def counted(*batches_of_ranks: range) -> SampleResultsMetric[SampleResults]:
    """A metric that has seen these batches, those of each rank by one of its own."""
    indices, targets, logits = answers()
    ranks = []
    for batches in batches_of_ranks:
        metric = results_of_classes()
        for start in batches:
            part = slice(start, start + 32)
            metric.update(indices[part], targets[part], logits[part])
        ranks.append(metric)
    for other in ranks[1:]:
        ranks[0].merge(other.state_dict())
    assert ranks[0].compute() == {}
    return ranks[0]


def test_what_is_counted_does_not_depend_on_order_or_ranks() -> None:
    one = counted(range(0, 200, 32)).last
    two = counted(range(0, 200, 64), range(32, 200, 64)).last
    assert one is not None and two is not None
    assert one.indices.tolist() == list(range(200))
    for name in ("indices", "targets", "predicted", "confidence", "of_target"):
        assert torch.equal(getattr(one, name), getattr(two, name))


def test_the_facts_are_those_of_a_count_by_hand() -> None:
    indices, targets, logits = answers()
    last = counted(range(0, 200, 32)).last
    assert last is not None
    facts = evaluation_facts(last, CLASSES, step=7, describe="image {}".format)
    rows = []
    for index, target, row in zip(indices.tolist(), targets.tolist(), logits.tolist(), strict=True):
        exp = [math.exp(value) for value in row]
        shares = [value / sum(exp) for value in exp]
        predicted = shares.index(max(shares))
        rows.append((index, target, predicted, shares[predicted], shares[target]))
    pairs = collections.Counter((t, p) for _, t, p, _, _ in rows)
    assert {(a, b): n for a, b, n in facts["confused"]} == {
        pair: n for pair, n in pairs.items() if pair[0] != pair[1]
    }
    times = [n for *_, n in facts["confused"]]
    assert times == sorted(times, reverse=True)
    assert facts["right"] == [pairs[k, k] for k in range(3)]
    assert facts["labels"] == [sum(t == k for _, t, *_ in rows) for k in range(3)]
    assert facts["predicted"] == [sum(p == k for _, _, p, *_ in rows) for k in range(3)]
    mistakes = sorted((r for r in rows if r[1] != r[2]), key=lambda r: -r[3])[:12]
    assert [one["index"] for one in facts["mistakes"]] == [row[0] for row in mistakes]
    assert facts["mistakes"][0]["image"] == f"image {mistakes[0][0]}"
    assert facts["mistakes"][0]["of_label"] == pytest.approx(mistakes[0][4], abs=1e-6)
    unsure = sorted((r for r in rows if r[1] == r[2]), key=lambda r: r[3])[:12]
    assert [one["index"] for one in facts["unsure"]] == [row[0] for row in unsure]
    assert sum(n for _, n, _, _ in facts["calibration"]) == 200
    error = sum(n * abs(right - sure) for _, n, sure, right in facts["calibration"]) / 200
    assert facts["calibration_error"] == pytest.approx(error)
    json.dumps(facts, allow_nan=False)


def test_a_new_evaluation_begins_with_nothing() -> None:
    metric = results_of_classes()
    metric.update(*answers(8))
    metric.reset()
    metric.update(*answers(5, seed=1))
    metric.compute()
    assert metric.last is not None and len(metric.last.indices) == 5
