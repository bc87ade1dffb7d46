"""Images that are kept for one test at the end: `--test` of train and sweep, `evaluate --test`."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import flambeau
from flambeau.data.sources.folds import part_to_test, without_test
from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.targets import TargetChoice
from flambeau.errors import InputError
from flambeau.trainer.parts.data import target_choice
from flambeau.trainer.prediction.final_test import (
    check_look,
    estimate,
    look_lines,
    looks_file,
    only_look,
    wilson,
)
from flambeau.trainer.settings.settings import Settings

FAST: dict[str, Any] = {"model": "tiny_convnet", "epochs": 1}
SHORT = "--model tiny_convnet --epochs 1"


def write_images(folder: Path, count: int = 40) -> Path:
    rng = np.random.default_rng(0)
    for number in range(count):
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        levels = rng.integers(0, 99, (16, 16, 3), dtype=np.uint8) + 99 * (number % 2)
        Image.fromarray(levels.astype(np.uint8)).save(place / f"{folder.name}{number}.png")
    return folder


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_images(tmp_path / "images")


def names_of(choice: TargetChoice, images: Path) -> tuple[set[str], set[str], set[str]]:
    whole, _ = open_sources(images, holdout=0.05)
    train, val = open_sources(images, choice=choice)
    everything = {*whole.names, *open_sources(images, holdout=0.05)[1].names}
    return {*train.names}, {*val.names}, everything - {*train.names} - {*val.names}


def test_a_share_of_each_class_is_in_no_part(images: Path) -> None:
    train, val, kept = names_of(target_choice(Settings(test="20%")), images)
    assert sorted(name[0] for name in kept) == ["a"] * 4 + ["b"] * 4
    assert train
    assert val
    for number in range(1, 4):
        fold = target_choice(Settings(test="20%", fold=f"{number}/3"))
        assert names_of(fold, images)[2] == kept


def test_it_is_independent_of_the_hold_out(images: Path) -> None:
    """By the same hashes the images to validate on would be the first of those to test on."""
    _, val, _ = names_of(TargetChoice(), images)
    _, _, kept = names_of(TargetChoice(test=0.1), images)
    assert val != kept


def test_whole_groups_are_kept() -> None:
    class Grouped:
        task = "classification"
        classes = ("a", "b")
        names = tuple(f"{number}.png" for number in range(60))
        labels = torch.arange(60) % 2
        groups = tuple(f"patient {number // 6}" for number in range(60))

        def __len__(self) -> int:
            return 60

    source: Any = Grouped()
    choice = TargetChoice(test=0.2, group="patient")
    rest = {source.groups[int(name[:-4])] for name in without_test(source, choice).names}
    kept = {source.groups[int(name[:-4])] for name in part_to_test(source, choice).names}
    assert len(kept) == 2
    assert len(rest) == 8
    assert not rest & kept


@pytest.mark.parametrize("text", ["0.1", "0%", "60%", "-5%"])
def test_wrong_shares(text: str) -> None:
    if text == "-5%":  # names data, which are missing
        assert target_choice(Settings(test=text)).test is None
        return
    with pytest.raises(InputError, match="such as 10%"):
        Settings(test=text)


def test_a_run_keeps_them_from_every_evaluation_but_the_test(images: Path) -> None:
    flambeau.train(images, out="run", test="20%", bar=False, **FAST)
    facts = json.loads(Path("run/dataset.json").read_text())
    assert (facts["train_samples"], facts["val_samples"], facts["test_samples"]) == (28, 4, 8)
    assert flambeau.evaluate("run", images).num_images == 4
    assert flambeau.evaluate("run", images, all_images=True).num_images == 32

    evaluation = flambeau.evaluate("run", test=True)
    assert evaluation.num_images == 8
    record = json.loads(Path("run/test.json").read_text())
    assert record["touched"] == 1
    assert record["looks"][0]["value"] == evaluation.accuracy  # type: ignore[union-attr]
    assert record["looks"][0]["images"] == 8
    with pytest.raises(InputError, match="were looked at on"):
        flambeau.evaluate("run", test=True)
    assert json.loads(Path("run/test.json").read_text()) == record

    flambeau.evaluate("run", test=True, again=True)
    assert json.loads(Path("run/test.json").read_text())["touched"] == 2
    assert "looked at 2 times" in look_lines(Path("run/test.json"))[-1]


def test_the_report_says_how_often_they_were_looked_at(flambeau: Any, images: Path) -> None:
    assert flambeau("train", images, "--test 20% --out run", SHORT).code == 0
    assert flambeau("evaluate run --test --json").code == 0
    assert flambeau("evaluate run --test --again").code == 0
    assert flambeau("report run --force").code == 0
    assert "touched: 2" in Path("run/report.html").read_text()


def test_images_of_their_own(flambeau: Any, images: Path) -> None:
    other = write_images(images.parent / "other", 10)
    assert flambeau("train", images, "--test other --out run", SHORT).code == 0
    facts = json.loads(Path("run/dataset.json").read_text())
    assert (facts["train_samples"], facts["test_samples"]) == (36, 10)
    refused = flambeau("evaluate run", other)
    assert refused.code == 2
    assert "are kept for a test" in refused.err
    done = flambeau("evaluate run --test --json")
    assert done.code == 0
    assert json.loads(done.out)["images"] == 10


def test_a_test_that_is_none(flambeau: Any, images: Path) -> None:
    for text in ("images", "images/a", "nothing"):
        done = flambeau("train", images, f"--test {text} --out run", SHORT)
        assert done.code == 2, text
        assert len(done.err.splitlines()) <= 2
        assert not Path("run").exists()


def test_a_changed_test_ends_a_resume_and_a_look(flambeau: Any, images: Path) -> None:
    other = write_images(images.parent / "other", 10)
    assert flambeau("train", images, "--test other --out run", SHORT).code == 0
    (other / "a" / "other0.png").unlink()
    for words in ("evaluate run --test", f"train {images} --test other --out run {SHORT}"):
        done = flambeau(words)
        assert done.code == 2
        assert "have changed since the run was started (10 images then, 9 now)" in done.err
    assert not Path("run/test.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evaluate run", "name the data to evaluate on"),
        ("evaluate run images --again", "--again has no effect without --test"),
        ("evaluate run --test --again", "--again has no effect: the test images were not"),
        ("evaluate run --test --calibrate", "--test and --calibrate do not go together"),
        ("evaluate run --test --download", "--test and --download do not go together"),
        ("evaluate run --test --all", "--test and --all do not go together"),
        ("evaluate images --test", "images is no folder of a run here"),
        ("sweep images --set test=10%,20%", "test cannot be searched"),
        ("sweep images --set lr=0.1,0.2 --test 0.1", "flambeau: test must be a share"),
        ("sweep images --set lr=0.1,0.2 --test nothing", "nothing does not exist"),
        ("sweep images --set lr=0.1,0.2 --test images", "is what is trained or validated on"),
        (
            "sweep images --folds 3 --momentum 7",
            "flambeau: momentum must be at least 0 and below 1",
        ),
        ("train images --test 0.1", "such as 10%"),
    ],
)
def test_wrong_input(flambeau: Any, images: Path, words: str, said: str) -> None:
    if "run" in words:
        Path("run").mkdir()
        assert flambeau("train", images, "--test 20% --out run", SHORT).code == 0
    done = flambeau(words)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) <= 2
    assert not Path("runs").exists()


def test_what_a_test_from_python_does_not_take(images: Path) -> None:
    flambeau.train(images, out="run", test="20%", bar=False, **FAST)
    for given in ({"all_images": True}, {"download": True}, {"image_size": 8}):
        with pytest.raises(InputError, match="as it was trained"):
            flambeau.evaluate("run", test=True, **given)
    with pytest.raises(InputError, match="no effect without test=True"):
        flambeau.evaluate("run", images, again=True)
    with pytest.raises(InputError, match="name the data"):
        flambeau.evaluate("run")
    assert not Path("run/test.json").exists()


def test_a_run_without_one(flambeau: Any, images: Path) -> None:
    assert flambeau("train", images, "--out run", SHORT).code == 0
    done = flambeau("evaluate run --test")
    assert done.code == 2
    assert "keeps no images for a test" in done.err


def test_two_do_not_look_at_the_same_moment(flambeau: Any, images: Path) -> None:
    assert flambeau("train", images, "--test 20% --out run", SHORT).code == 0
    with only_look(Path("run/test.json")):
        refused = flambeau("evaluate run --test")
    assert refused.code == 2
    assert "another process looks at the test images of" in refused.err
    assert not Path("run/test.json").exists()
    assert flambeau("evaluate run --test").code == 0


def test_a_damaged_record_is_not_written_over(images: Path) -> None:
    Path("test.json").write_text('{"touched": 1, "looks": [{"when": 3}]}')
    with pytest.raises(InputError, match="is damaged"):
        check_look(Path("test.json"), again=True)


def test_a_sweep_looks_once_with_its_best_trial(flambeau: Any, images: Path) -> None:
    pytest.importorskip("optuna")
    sweep = f"sweep images --set lr=0.01,0.1 --seeds 2 --test 20% --out found {SHORT}"
    early = flambeau(f"{sweep} --budget 0.01s")
    assert early.code == 0
    refused = flambeau("evaluate found --test")
    assert refused.code == 2
    assert "is not over" in refused.err

    done = flambeau(sweep)
    assert done.code == 0
    assert "flambeau evaluate" in done.out
    assert "--test, once" in done.out
    for run in Path("found/trials").iterdir():
        assert json.loads((run / "dataset.json").read_text())["test_samples"] == 8
        assert looks_file(run).resolve() == Path("found/test.json").resolve()
    looked = flambeau("evaluate found --test --json")
    assert looked.code == 0
    assert json.loads(looked.out)["images"] == 8
    record = json.loads(Path("found/test.json").read_text())
    best = next(word for word in done.out.split("best: trial ")[1].split())
    assert record["looks"][0]["runs"] == [f"trials/{int(best):04d}-seed{n}" for n in (0, 1)]

    chosen, other = (Path(f"found/trials/{int(best) ^ n:04d}-seed0") for n in (0, 1))
    for run, has_figure in ((chosen, True), (other, False)):
        assert flambeau("report", run, "--out page.html --force").code == 0
        assert ("touched: 1" in Path("page.html").read_text()) == has_figure

    assert flambeau("evaluate found/trials/0000-seed1 --test").code == 2
    after = flambeau(sweep)
    assert "looked at once" in after.out
    other = flambeau(sweep.replace("20%", "30%"))
    assert other.code == 2
    assert "another test" in other.err


@pytest.mark.parametrize(("right", "count"), [(5, 10), (99, 100), (1, 30), (450, 500)])
def test_the_ends_of_an_interval_solve_its_equation(right: int, count: int) -> None:
    """Wilson's ends are the shares p from which right / count is 1.96 standard deviations of p away."""
    for end in wilson(right / count, count):
        deviation = math.sqrt(end * (1 - end) / count)
        assert math.isclose(abs(right / count - end) / deviation, 1.959964, rel_tol=1e-5)


def test_all_right_and_none_right() -> None:
    assert wilson(0.0, 10)[0] == 0
    assert math.isclose(wilson(1.0, 10)[1], 1)


def test_intervals_hold_what_they_say() -> None:
    """Over 4000 shares and samples of 100 images, the interval has the true share in 95 %."""
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.5, 0.99, 4000)
    inside = 0
    for share, right in zip(shares, rng.binomial(100, shares), strict=True):
        low, high = wilson(right / 100, 100)
        inside += low <= share <= high
    assert 0.94 <= inside / 4000 <= 0.96


def test_numbers_have_the_interval_of_a_mean(flambeau: Any, images: Path) -> None:
    rows = ["path,age"]
    rows += [f"{path.relative_to(images)},{k % 7}" for k, path in enumerate(images.rglob("*.png"))]
    (images / "labels.csv").write_text("\n".join(rows) + "\n")
    done = flambeau(
        "train images/labels.csv --target age --task regression --test 50% --out run", SHORT
    )
    assert done.code == 0, done.err
    assert flambeau("evaluate run --test").code == 0
    look = json.loads(Path("run/test.json").read_text())["looks"][0]
    assert look["figure"] == "mae_age"
    assert look["low"] < look["value"] < look["high"]
    assert math.isclose(look["value"] - look["low"], look["high"] - look["value"])


def test_an_estimate_of_several_labels() -> None:
    from flambeau.trainer.evaluation.label_evaluation import LabelEvaluation, LabelPredictions
    from flambeau.trainer.evaluation.reading import Reading

    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(200, 3, generator=generator) < 0.4).float()
    shares = (labels * 0.3 + torch.rand(200, 3, generator=generator) * 0.7).clamp(0, 1)
    said = LabelPredictions(
        ("a", "b", "c"), torch.arange(200), labels, shares, torch.full((3,), 0.5), str
    )
    reading: Any = Reading.__new__(Reading)
    object.__setattr__(reading, "num_images", 200)
    found = estimate(LabelEvaluation(0.1, reading, said))
    assert found.figure == "map"
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high
    assert found.high - found.low < 0.2


def test_one_group_cannot_be_kept(flambeau: Any, images: Path) -> None:
    rows = ["path,label,site"]
    for path in images.rglob("*.png"):
        rows.append(f"images/{path.relative_to(images)},{path.parent.name},here")
    Path("all.csv").write_text("\n".join(rows) + "\n")
    done = flambeau("train all.csv --group site --test 10%")
    assert done.code == 2
    assert "none can be held out to test on" in done.err
