"""`flambeau evaluate --calibrate`: temperature and prediction sets, and what uses them."""

import contextlib
import copy
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.optimize import minimize_scalar

from flambeau import InputError, load, train
from flambeau.data.sources.open_data import open_sources
from flambeau.exports import step_figures
from flambeau.exports.fine_tune import fine_tune
from flambeau.trainer.prediction.calibration import fitted, set_threshold
from refused import refused

Flambeau = Callable[..., Any]
NET = """
from torch import nn

def net(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""


def noisy(folder: Path, *, per_class: int, seed: int) -> Path:
    """Images of three classes that overlap."""
    draw = np.random.default_rng(seed)
    for label, name in enumerate("abc"):
        (folder / name).mkdir(parents=True)
        for k in range(per_class):
            pixels = draw.integers(0, 200, (8, 8, 3))
            pixels[:, :, label] += draw.integers(0, 30)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{k:03}.png")
    return folder


@pytest.fixture(scope="module")
def root(
    tmp_path_factory: pytest.TempPathFactory,
    kept_process: Callable[[], contextlib.AbstractContextManager[None]],
) -> Path:
    root = tmp_path_factory.mktemp("calibration")
    (root / "net.py").write_text(NET)
    noisy(root / "photos", per_class=30, seed=0)
    noisy(root / "others", per_class=40, seed=1)
    with kept_process(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        train(
            "photos", out="run", model="net.py:net", epochs=30, batch_size=16, lr=0.05,
            precision="fp32", label_smoothing=0.0, bar=False,
        )  # fmt: skip
    return root


@pytest.fixture(autouse=True)
def _in_the_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setattr(step_figures, "_ROUNDS", range(1, 2))
    for file in Path("run").glob("calibration*.json"):
        file.unlink()


FILES = [f"others/{name}/{k:03}.png" for name in "abc" for k in range(40)]
LABELS = torch.arange(3).repeat_interleave(40)


def test_the_temperature_is_that_of_scipy_and_is_used(tmp_path: Path, flambeau: Flambeau) -> None:
    logits = load("run")(FILES).logits.double()
    answer = flambeau("evaluate run others --calibrate --json")
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)["calibration"]
    best = minimize_scalar(
        lambda t: float(F.cross_entropy(logits / t, LABELS)), bounds=(0.05, 20), method="bounded"
    )
    assert said["temperature"] == pytest.approx(best.x, rel=1e-4)
    assert said["loss_after"] == pytest.approx(best.fun, rel=1e-9)
    assert said["loss_before"] == pytest.approx(float(F.cross_entropy(logits, LABELS)), rel=1e-6)
    assert said["temperature"] > 1.2 and said["loss_after"] < said["loss_before"]
    assert "not independent" in answer.err

    expected = (logits / said["temperature"]).softmax(1)
    torch.testing.assert_close(
        load("run")(FILES).probabilities.double(), expected, rtol=1e-5, atol=1e-6
    )
    again = flambeau("evaluate run others --json")
    figures = json.loads(again.out)
    assert figures["loss"] == pytest.approx(said["loss_after"], rel=1e-5)
    assert figures["calibration_error"] == pytest.approx(said["error_after"], abs=1e-5)
    assert f"temperature {said['temperature']:.4g}" in again.err
    shown = flambeau("predict run --json", FILES[0])
    assert f"temperature {said['temperature']:.4g}, fitted on 120 images" in shown.err
    out = tmp_path / "shipped"
    answer = flambeau("export run --data others --allow-slower --out", out)
    assert answer.code == 0 and "is in the graph" in answer.err
    row = json.loads(flambeau("predict", out, "--json", FILES[0]).out)
    found = {one["class"]: one["probability"] for one in row["classes"]}
    assert found == pytest.approx(dict(zip("abc", expected[0].tolist(), strict=True)), abs=1e-5)
    # Fitted anew from the plain logits, whatever the run keeps.
    second = json.loads(flambeau("evaluate run others --calibrate --json").out)["calibration"]
    assert second == said


def test_weights_alone_are_used_at_the_temperature(tmp_path: Path, flambeau: Flambeau) -> None:
    train(
        "photos", out=tmp_path / "small", model="small_convnet", epochs=1, batch_size=27,
        precision="fp32", bar=False,
    )  # fmt: skip
    assert flambeau("evaluate", tmp_path / "small", "others --calibrate").code == 0
    out = tmp_path / "out"
    answer = flambeau(
        "export", tmp_path / "small", "--format safetensors --allow-slower --out", out
    )
    assert answer.code == 0, answer.err
    kept = json.loads((tmp_path / "small" / "calibration.json").read_text())
    assert f"(logits / {kept['temperature']!r}).softmax(0)" in (out / "example.py").read_text()
    rows = [
        json.loads(flambeau("predict", one, "--json", FILES[0]).out)
        for one in (out, tmp_path / "small")
    ]
    for one, other in zip(rows[0]["classes"], rows[1]["classes"], strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)


def test_sets_cover_what_they_say(tmp_path: Path, flambeau: Flambeau) -> None:
    answer = flambeau("evaluate run others --calibrate --coverage 0.9")
    assert answer.code == 0 and "sets of classes for 0.9 of all new images" in answer.err
    kept = json.loads(Path("run/calibration.json").read_text())
    logits = load("run")(FILES).logits.double()
    shares = logits.softmax(1)
    of_label = shares[range(120), LABELS].sort().values
    assert kept["threshold"] == pytest.approx(float(of_label[12 - 1]), rel=1e-5)  # floor(121 * 0.1)
    [row] = map(json.loads, flambeau("predict run --json", FILES[3]).out.splitlines())
    order = shares[3].argsort(descending=True).tolist()
    expected = ["abc"[k] for k in order if shares[3, k] >= kept["threshold"]]
    assert row["set"] == expected
    assert f"set: {', '.join(expected)}" in flambeau("predict run", FILES[3]).out
    table = tmp_path / "table.csv"
    assert flambeau("predict run --top 2 others --out", table).code == 0
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    has_label = [row["label"] in row["set"].split("|") for row in rows]
    assert sum(has_label) in (108, 109)  # 120 - 12 + 1, but for the last bit of one
    assert flambeau("evaluate run others --calibrate").code == 0  # without sets
    assert "set" not in json.loads(flambeau("predict run --json", FILES[3]).out)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_coverage_of_new_images_over_200_repetitions(coverage: float, adaptive: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(200):
        logits = 1.5 * torch.randn(1500, 5, generator=generator, dtype=torch.float64)
        labels = torch.multinomial((logits / 1.7).softmax(1), 1, generator=generator)[:, 0]
        found = fitted(
            logits[:500], labels[:500], weights_sha256="", coverage=coverage, adaptive=adaptive
        )
        inside = found.sets(logits[500:] / found.temperature)
        shares.append(float(inside[range(1000), labels[500:]].double().mean()))
    assert abs(np.mean(shares) - coverage) < 0.01


def test_adaptive_sets_are_those_of_their_definition(flambeau: Flambeau) -> None:
    answer = flambeau("evaluate run others --calibrate --coverage 0.85 --adaptive --json")
    assert answer.code == 0 and "the most probable classes, until" in answer.err
    kept = json.loads(answer.out)["calibration"]
    shares = load("run")(FILES).probabilities.double().numpy()
    sums = []
    for row, label in zip(shares, LABELS.tolist(), strict=True):
        sums.append(sum(float(share) for share in row if share > row[label]))
    assert kept["threshold"] == pytest.approx(sorted(sums)[103 - 1], abs=1e-5)  # ceil(121 * 0.85)
    rows = [json.loads(line) for line in flambeau("predict run --json", *FILES).out.splitlines()]
    for row, each in zip(rows, shares, strict=True):
        order = (-each).argsort()
        sums_here = each[order].cumsum() - each[order]
        near = abs(sums_here - kept["threshold"]) < 1e-4
        expected = ["abc"[k] for k in order[sums_here <= kept["threshold"]]]
        assert near.any() or row["set"] == expected
    has_label = sum("abc"[k] in row["set"] for k, row in zip(LABELS.tolist(), rows, strict=True))
    assert has_label in (102, 103)  # but for the last bit of one


def test_the_temperature_of_known_logits_is_found() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(20_000, 4, generator=generator)
    labels = torch.multinomial((logits / 2.5).softmax(1), 1, generator=generator)[:, 0]
    found = fitted(logits, labels, weights_sha256="", coverage=None)
    assert found.temperature == pytest.approx(2.5, rel=0.03)
    assert found.error_after < 0.02 < found.error_before


def test_too_few_images_for_a_coverage() -> None:
    shares = torch.full((8, 2), 0.5, dtype=torch.float64)
    with pytest.raises(
        InputError, match=r"8 images are too few for sets of coverage 0\.9: at least 9"
    ):
        set_threshold(shares, torch.zeros(8).long(), 0.9)
    assert set_threshold(shares.new_full((9, 2), 0.5), torch.zeros(9).long(), 0.9) == 0.5


def test_each_member_of_an_ensemble_is_calibrated(tmp_path: Path, flambeau: Flambeau) -> None:
    train(
        "photos", out=tmp_path / "second", model="net.py:net", epochs=2, batch_size=16, seed=1,
        precision="fp32", bar=False,
    )  # fmt: skip
    assert flambeau("evaluate run others --calibrate").code == 0
    runs = ["run", str(tmp_path / "second")]
    mean = sum(load(run)(FILES).probabilities.double() for run in runs) / 2
    found = load(runs)(FILES).probabilities.double()
    torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-7)
    out = tmp_path / "both"
    assert flambeau("export run --allow-slower --with", runs[1], "--out", out).code == 0
    row = json.loads(flambeau("predict", out, "--json", FILES[0]).out)
    shares = {one["class"]: one["probability"] for one in row["classes"]}
    assert shares == pytest.approx(dict(zip("abc", mean[0].tolist(), strict=True)), abs=1e-5)


def second(folder: Path) -> str:
    train(
        "photos", out=folder, model="net.py:net", epochs=2, batch_size=16, seed=1,
        precision="fp32", bar=False,
    )  # fmt: skip
    return str(folder)


def test_several_runs_are_calibrated_together(tmp_path: Path, flambeau: Flambeau) -> None:
    runs = ["run", second(tmp_path / "second")]
    plain = load(runs)(FILES).logits
    answer = flambeau("evaluate run others --calibrate --coverage 0.8 --json --with", runs[1])
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)["calibration"]
    assert not Path("run/calibration.json").exists()
    expected = fitted(
        load(runs)(FILES).logits * found["temperature"],
        LABELS,
        weights_sha256="",
        coverage=0.8,
    )
    assert found["temperature"] == pytest.approx(expected.temperature, rel=1e-4)
    assert found["threshold"] == pytest.approx(expected.threshold, rel=1e-4)
    for order in (runs, runs[::-1]):  # it is kept for these two, whichever comes first
        together = load(order)(FILES)
        torch.testing.assert_close(together.logits, plain / found["temperature"])
        assert together.sets is not None
        limit = found["threshold"] - 1e-6  # where the image that has chosen it is
        for shares, chosen in zip(together.probabilities, together.sets, strict=True):
            inside = {name for name, one in zip("abc", shares, strict=True) if one >= limit}
            assert {*chosen} == inside
    line = flambeau("predict run", FILES[0], "--with", runs[1])
    assert "; set: " in line.out
    assert load("run")(FILES[0]).sets is None

    assert flambeau("evaluate run others --calibrate").code == 0  # now it is another ensemble
    assert load(runs)(FILES[0]).sets is None


def test_sets_are_in_an_export_of_several(tmp_path: Path, flambeau: Flambeau) -> None:
    runs = ["run", second(tmp_path / "second")]
    assert flambeau("evaluate run others --calibrate --coverage 0.8 --with", runs[1]).code == 0
    out = tmp_path / "both"
    assert flambeau("export run --allow-slower --with", runs[1], "--out", out).code == 0
    said = json.loads(flambeau("predict run", FILES[0], "--json --with", runs[1]).out)
    shipped = json.loads(flambeau("predict", out, "--json", FILES[0]).out)
    assert shipped["set"] == said["set"]
    for one, other in zip(shipped["classes"], said["classes"], strict=True):
        assert one["class"] == other["class"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)


@pytest.mark.parametrize("adaptive", ["", "--adaptive"])
def test_sets_from_python_and_in_an_export(
    tmp_path: Path, flambeau: Flambeau, adaptive: str
) -> None:
    assert load("run")(FILES).sets is None
    assert flambeau("evaluate run others --calibrate --coverage 0.8", adaptive).code == 0
    rows = [json.loads(line) for line in flambeau("predict run --json", *FILES).out.splitlines()]
    sets = load("run")(FILES).sets
    assert sets is not None
    assert [[*one] for one in sets] == [row["set"] for row in rows]
    assert len({len(one) for one in sets}) > 1

    out = tmp_path / "shipped"
    assert flambeau("export run --allow-slower --out", out).code == 0
    again = [
        json.loads(line) for line in flambeau("predict", out, "--json", *FILES).out.splitlines()
    ]
    assert [row["set"] for row in again] == [row["set"] for row in rows]
    done = subprocess.run(
        [sys.executable, out / "example.py", *FILES], capture_output=True, text=True, check=True
    )
    printed = [line.removeprefix("  set: ") for line in done.stdout.splitlines()[1::2]]
    assert printed == [", ".join(row["set"]) or "no class" for row in rows]

    index = out / "export.json"
    about = json.loads(index.read_text())
    index.write_text(json.dumps({**about, "sets": {"coverage": "x"}}))
    refused(flambeau("predict", out, FILES[0]), "was edited: its sets of classes")


def test_a_quantized_export_has_no_sets(tmp_path: Path, flambeau: Flambeau) -> None:
    assert flambeau("evaluate run others --calibrate --coverage 0.8").code == 0
    out = tmp_path / "shipped"
    done = flambeau("export run --allow-slower --quantize fp16 --format torch-export --out", out)
    assert done.code == 0, done.err
    assert "the sets of classes are left out" in done.err
    assert "sets" not in json.loads((out / "export.json").read_text())
    assert "set_of" not in (out / "example.py").read_text()


def test_a_calibration_reaches_the_mirror(tmp_path: Path, flambeau: Flambeau) -> None:
    mirror = f"file://{tmp_path}/store"
    run = tmp_path / "run"
    train(
        "photos", out=run, model="net.py:net", epochs=1, batch_size=16, bar=False, mirror=mirror,
        precision="fp32",
    )  # fmt: skip
    done = flambeau("evaluate", run, "others --calibrate")
    assert done.code == 0
    assert f"the mirror {mirror} gets it, too" in done.err
    kept = (run / "calibration.json").read_bytes()
    assert (tmp_path / "store/calibration.json").read_bytes() == kept
    shutil.rmtree(run)
    refused(flambeau("evaluate", mirror, "others --calibrate"), "is no folder of a run here")
    train(
        "photos", out=run, model="net.py:net", epochs=1, batch_size=16, bar=False, mirror=mirror,
        precision="fp32",
    )  # fmt: skip
    assert (run / "calibration.json").read_bytes() == kept


def test_a_network_is_fine_tuned_towards_plain_logits(tmp_path: Path, flambeau: Flambeau) -> None:
    """The graph divides its outputs by the temperature once."""
    sources = open_sources(Path("photos"))
    tuned = []
    for name in ("plain", "calibrated"):
        trained = load("run").trained
        assert (trained.calibration is None) == (name == "plain")
        network = copy.deepcopy(trained.model)
        tuned.append(fine_tune(network, trained, sources, tmp_path / name, "3st").state_dict())
        assert flambeau("evaluate run others --calibrate").code == 0
    torch.testing.assert_close(tuned[0], tuned[1], rtol=0, atol=0)


def test_what_is_not_of_these_weights_is_not_used(flambeau: Flambeau) -> None:
    plain = load("run")(FILES[:4]).probabilities
    assert flambeau("evaluate run others --calibrate").code == 0
    path = Path("run/calibration.json")
    kept = json.loads(path.read_text())
    assert not torch.equal(load("run")(FILES[:4]).probabilities, plain)
    for other in (
        {"weights_sha256": "0" * 64},
        {"temperature": -1.0},
        {"temperature": "2"},
        {"more": 1},
    ):
        path.write_text(json.dumps({**kept, **other}))
        with pytest.warns(UserWarning, match=r"calibration\.json is of other weights, or damaged"):
            assert torch.equal(load("run")(FILES[:4]).probabilities, plain)
    path.write_text("{")
    answer = flambeau("predict run", FILES[0])
    assert answer.code == 0 and "--calibrate` makes it anew" in answer.err
    assert flambeau("verify run").code == 0


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path, flambeau: Flambeau) -> None:
    refused(flambeau("evaluate run others --coverage 0.9"), "--coverage has no effect")
    refused(flambeau("evaluate run others --calibrate --adaptive"), "--adaptive has no effect")
    refused(flambeau("evaluate run others --calibrate --coverage 1.5"), "above 0 and below 1")
    refused(flambeau("evaluate run photos --calibrate --all"), "--calibrate and --all")
    refused(flambeau("evaluate run others --calibrate --flip-tta"), "--calibrate and --flip-tta")
    answer = flambeau("evaluate run photos --calibrate --coverage 0.99")
    refused(answer, "are too few for sets of coverage 0.99: at least 99 are needed")
    assert flambeau("export run --allow-slower --out", tmp_path / "shipped").code == 0
    refused(
        flambeau("evaluate", tmp_path / "shipped", "others --calibrate"), "is no folder of a run"
    )
    assert not Path("run/calibration.json").exists()
