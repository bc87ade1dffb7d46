"""`--best` chooses the weights of a run by another figure than the accuracy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from refused import refused


def write(folder: Path, counts: dict[str, int], *, seed: int) -> None:
    """Grey noise, of the second class a little brighter."""
    draw = np.random.default_rng(seed)
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = draw.integers(15 * label, 15 * label + 220, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")


def test_the_figure_that_is_named_chooses(flambeau: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("photos/train"), {"a": 24, "b": 8}, seed=0)
    write(Path("photos/val"), {"a": 12, "b": 5}, seed=1)
    # Which seeds tell the two figures apart depends on the rounding of the processor.
    for seed in range(3, 13):
        words = "--model tiny_convnet --epochs 8 --batch-size 4 --precision fp32 --lr 0.1 --out run --fresh"
        answer = flambeau("train photos", words, f"--seed {seed} --best val_macro_f1")
        assert answer.code == 0, answer.err
        lines = Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if "val_macro_f1" in row]
        assert len(rows) == 8
        best = max(rows, key=lambda row: row["val_macro_f1"])
        if best["step"] != max(rows, key=lambda row: row["val_accuracy"])["step"]:
            break
    else:
        pytest.fail("both figures are highest at the same step, with all seeds")
    result = json.loads(Path("run/result.json").read_text(encoding="utf-8"))
    assert (result["weights"], result["step"]) == ("best", best["step"])
    figures = json.loads(flambeau("evaluate run photos --json").out)
    assert figures["macro_f1"] == best["val_macro_f1"]
    assert figures["largest_class_share"] == 12 / 17
    assert "; always 'a' would be 0.7059 (best weights" in answer.out
    assert "share of the largest class: 0.7059 (a)" in Path("run/report.html").read_text(
        encoding="utf-8"
    )
    refused(flambeau("train photos --best val_macro_f"), "did you mean 'val_macro_f1'?")
