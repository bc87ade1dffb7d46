"""Draw every learning-rate schedule of the recipes and of `flambeau train` as an SVG file.

    python tools/draw/schedules.py

Run it after a change of a schedule; tests/test_schedule_pictures.py compares the files in
docs/pictures/schedules with what this writes. Coordinates are whole numbers, so that no rounding of another
machine changes a file.
"""

import math
from collections.abc import Callable
from pathlib import Path

from flambeau.recipes.training.cyclic_schedules import (
    cosine_restarts,
    one_cycle,
    one_cycle_momentum,
)
from flambeau.recipes.training.plateau import ReduceOnPlateau
from flambeau.recipes.training.schedules import (
    chain,
    constant,
    cosine,
    exponential,
    linear,
    multistep,
    piecewise_linear,
    polynomial,
    staircase,
    with_warmup,
    wsd,
)

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "schedules"
TOTAL, WARMUP = 100, 10
WIDTH, HEIGHT, MARGIN = 240, 96, 8
Schedule = Callable[[int], float]


def plateau(step: int) -> float:
    """An accuracy that rises in two bends, measured each tenth step, patience 1."""
    rule = ReduceOnPlateau(mode="max", patience=1, factor=0.4)
    for seen in range(10, step + 1, 10):
        rule.step(1 - math.exp(-seen / 8) if seen < 70 else 1.1)
    return constant(step, total_steps=TOTAL, warmup_steps=WARMUP) * rule.multiplier


def pictures() -> dict[str, Schedule]:
    """The schedules by the names of their files, each over TOTAL steps."""
    common = {"total_steps": TOTAL, "warmup_steps": WARMUP}
    half = with_warmup(lambda step: cosine(step, total_steps=40), warmup_steps=WARMUP)
    points = [(0, 0.2), (25, 1.0), (60, 0.3), (99, 0.0)]
    return {
        "constant": lambda step: constant(step, **common),
        "linear": lambda step: linear(step, **common),
        "cosine": lambda step: cosine(step, **common),
        "multistep": lambda step: multistep(step, milestones=[50, 75], gamma=0.3, **common),
        "polynomial": lambda step: polynomial(step, **common),
        "exponential": lambda step: exponential(step, end=0.02, **common),
        "staircase": lambda step: staircase(step, every=15, gamma=0.6, **common),
        "wsd": lambda step: wsd(step, decay_steps=20, **common),
        "cosine-restarts": lambda step: cosine_restarts(
            step, cycles=3, cycle_multiplier=2, **common
        ),
        "one-cycle": lambda step: one_cycle(step, total_steps=TOTAL),
        "one-cycle-momentum": lambda step: one_cycle_momentum(
            step, total_steps=TOTAL, low=0.3, high=0.95
        ),
        "plateau": plateau,
        "chain": chain([(50, half)], half),
        "piecewise-linear": lambda step: piecewise_linear(step, points=points),
    }


def svg(name: str, schedule: Schedule) -> str:
    """One curve, from step 0 to TOTAL - 1 and from 0 to 1, on a line that stands for 0."""
    right = WIDTH - MARGIN
    floor = HEIGHT - MARGIN
    points = " ".join(
        f"{MARGIN + round(step * (right - MARGIN) / (TOTAL - 1))},"
        f"{floor - round(schedule(step) * (floor - MARGIN))}"
        for step in range(TOTAL)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{name}: learning rate over the steps of a run</title>\n"
        f'<path d="M{MARGIN},{floor}H{right}" stroke="#888" fill="none"/>\n'
        f'<polyline points="{points}" stroke="#d2691e" stroke-width="2" fill="none"/>\n'
        "</svg>\n"
    )


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, schedule in pictures().items():
        (FOLDER / f"{name}.svg").write_text(svg(name, schedule), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
