import io
import math
import random
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from flambeau.recipes.training.plateau import ReduceOnPlateau


def pair(**settings: Any) -> tuple[ReduceOnPlateau, Any, SGD]:
    """Mine, and torch's with the same settings on an optimizer of base rate 1."""
    theirs = {name: value for name, value in settings.items() if name != "min_multiplier"}
    peer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(
        peer, min_lr=settings.get("min_multiplier", 0.0), eps=0.0, **theirs
    )
    return ReduceOnPlateau(**settings), scheduler, peer


def draw(rng: random.Random) -> dict[str, Any]:
    return {
        "mode": rng.choice(["min", "max"]),
        "factor": rng.choice([0.1, 0.5, 0.9]),
        "patience": rng.randrange(4),
        "cooldown": rng.randrange(4),
        "threshold": rng.choice([0.0, 1e-4, 0.2]),
        "threshold_mode": rng.choice(["rel", "abs"]),
        "min_multiplier": rng.choice([0.0, 0.03]),
    }


@pytest.mark.parametrize("seed", range(60))
def test_equals_torch_over_random_metrics(seed: int) -> None:
    rng = random.Random(seed)
    mine, theirs, peer = pair(**draw(rng))
    level = rng.choice([-1.0, 0.0, 3.0])  # relative thresholds have a sign
    for _ in range(60):
        level += rng.choice([-0.1, 0.0, 0.0, 0.05, 0.3])
        metric = rng.choice([level, level, round(level, 1), math.inf, -math.inf])
        theirs.step(metric)
        assert mine.step(metric) == pytest.approx(peer.param_groups[0]["lr"], rel=1e-12)
        assert mine.num_bad == theirs.num_bad_epochs
        assert mine.best in (theirs.best, None)


@pytest.mark.parametrize("stop", [0, 1, 7, 15, 30])
def test_a_resume_is_exact(stop: int) -> None:
    rng = random.Random(stop)
    settings: dict[str, Any] = {"mode": "max", "factor": 0.7, "patience": 1, "cooldown": 2}
    metrics = [rng.random() for _ in range(40)]
    whole, first = ReduceOnPlateau(**settings), ReduceOnPlateau(**settings)
    expected = [whole.step(metric) for metric in metrics]
    found = [first.step(metric) for metric in metrics[:stop]]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = ReduceOnPlateau(**settings)
    second.load_state_dict(torch.load(file, weights_only=True))
    found += [second.step(metric) for metric in metrics[stop:]]
    assert found == expected
    assert second.state_dict() == whole.state_dict()
    assert expected[-1] < 0.2  # it has fallen often


def test_patience_of_the_note() -> None:
    """Mode 'max', patience 5: the sixth epoch without a better one reduces."""
    plateau = ReduceOnPlateau(mode="max", patience=5)
    values = [plateau.step(0.8) for _ in range(8)]
    assert values == [1.0] * 6 + [0.1] * 2


def test_verbose_is_gone_from_torch_and_not_here_either() -> None:
    peer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(TypeError, match="verbose"):
        lr_scheduler.ReduceLROnPlateau(peer, mode="max", verbose=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="verbose"):
        ReduceOnPlateau(mode="max", verbose=True)  # type: ignore[call-arg]


def test_it_multiplies_with_another_schedule() -> None:
    plateau = ReduceOnPlateau(mode="min", factor=0.5, patience=0)
    plateau.step(1.0)
    plateau.step(1.0)
    assert [min(1.0, (step + 1) / 4) * plateau.multiplier for step in (0, 9)] == [0.125, 0.5]


def test_a_metric_may_be_a_tensor() -> None:
    plateau = ReduceOnPlateau(mode="max", patience=0)
    assert plateau.step(torch.tensor(0.5)) == 1.0  # type: ignore[arg-type]
    assert type(plateau.best) is float


def test_nan_is_said_and_counts_for_nothing() -> None:
    plateau = ReduceOnPlateau(mode="min", patience=0)
    plateau.step(1.0)
    before = plateau.state_dict()
    with pytest.raises(ValueError, match="the metric is NaN"):
        plateau.step(math.nan)
    assert plateau.state_dict() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "best"}, "got 'best' and 'rel'"),
        ({"threshold_mode": "share"}, "got 'min' and 'share'"),
        ({"factor": 1.0}, "got 1.0 and 0.0"),
        ({"factor": 0.0}, "got 0.0 and 0.0"),
        ({"min_multiplier": 1.5}, "got 0.1 and 1.5"),
        ({"patience": -1}, "got -1, 0 and 0.0001"),
        ({"cooldown": -1}, "got 10, -1 and 0.0001"),
        ({"threshold": math.nan}, "got 10, 0 and nan"),
    ],
)
def test_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReduceOnPlateau(**{"mode": "min", **settings})
