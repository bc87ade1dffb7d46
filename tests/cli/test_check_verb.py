"""`flambeau check`: what it prints, the listing that `train` takes, its exit codes, and wrong input."""

import json
import os
import resource
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.source import Source


def picture(seed: int, side: int = 40) -> Image.Image:
    draw = np.random.default_rng(seed)
    noise = [Image.fromarray(draw.integers(0, 256, (k, k, 3), dtype=np.uint8)) for k in (4, 9, 17)]
    layers = [
        np.asarray(n.resize((side, side), Image.Resampling.BICUBIC), np.float64) for n in noise
    ]
    return Image.fromarray((sum(layers) / 3).astype(np.uint8))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of class cat: a broken image, a copy in the same part, and a mirrored one of a validation image."""
    monkeypatch.chdir(tmp_path)
    for part, count in (("train", 8), ("val", 3)):
        for label, kind in enumerate(("cat", "dog")):
            folder = tmp_path / "data" / part / kind
            folder.mkdir(parents=True)
            for number in range(count):
                seed = 1000 * count + 100 * label + number
                picture(seed).save(folder / f"{part[0]}{kind}{chr(97 + number)}.png")
    cats = tmp_path / "data" / "train" / "cat"
    (cats / "tcata.png").write_bytes(b"no image at all")
    (cats / "tcatb.png").write_bytes((cats / "tcatc.png").read_bytes())
    with Image.open(tmp_path / "data" / "val" / "dog" / "vdogb.png") as image:
        mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).resize((70, 70))
    mirrored.save(tmp_path / "data" / "train" / "dog" / "tdogh.png")
    return tmp_path / "data"


LEFT_OUT = ["train/cat/tcata.png", "train/cat/tcatc.png", "train/dog/tdogh.png"]


def listed(sources: tuple[Source, Source]) -> list[dict[str, str]]:
    """Of both parts the classes by path."""
    return [
        {
            str(Path(source.describe(n).partition(" (")[0]).resolve()): source.classes[label]
            for n, label in enumerate(source.labels.tolist())
        }
        for source in sources
    ]


def test_the_report(flambeau: Any, data: Path) -> None:
    answer = flambeau("check", "data")
    assert (answer.code, answer.err) == (1, "")
    lines = answer.out.splitlines()
    assert lines[0].startswith("22 images of 2 classes: 16 to train on, 6 to validate on; ")
    assert [line for line in lines if line and line[0] != " "][1:] == [
        "leaks: 1 validation image (16.7%) can be seen in training, too",
        "unreadable: 1 image cannot be read",
        "copies: 1 image is a copy of another one in the same part",
    ]
    assert "    train/cat/tcatb.png = train/cat/tcatc.png" in lines
    assert any(
        line.startswith("    val/dog/vdogb.png = train/dog/tdogh.png (mirrored; likeness ")
        for line in lines
    )
    assert any(line.startswith("    train/cat/tcata.png: not a JPEG, PNG, ") for line in lines)
    assert sum(line.startswith("  To do: ") for line in lines) == 3


def test_one_image_and_several_read_alike(flambeau: Any, data: Path) -> None:
    Image.new("RGB", (5, 5), (200, 30, 90)).save(data / "train" / "cat" / "small.png")
    answer = flambeau("check", "data", "--json")
    titles = {found["kind"]: found["title"] for found in json.loads(answer.out)["findings"]}
    assert titles["blank"] == "1 image of one color, or nearly one, which shows nothing"
    assert titles["tiny"] == "1 image of a tiny size"


def test_clean_data(flambeau: Any, data: Path) -> None:
    for name in LEFT_OUT:
        (data / name).unlink()
    answer = flambeau("check", "data")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[1:] == ["Nothing was found."]


def test_train_takes_what_is_left(flambeau: Any, data: Path) -> None:
    answer = flambeau("check", "data --out clean.csv")
    assert answer.code == 0
    assert answer.err.splitlines() == [
        "19 images are left, 3 are left out: clean.csv", "next: flambeau train clean.csv",
    ]  # fmt: skip
    before, after = listed(open_sources(data)), listed(open_sources(Path("clean.csv")))
    for name in LEFT_OUT:
        del before[0][str((data / name).resolve())]
    assert after == before
    assert Path("clean.csv").read_text().splitlines()[1] == "data/train/cat/tcatb.png,cat,train"
    again = flambeau("check", "clean.csv")
    assert (again.code, again.out.splitlines()[1:]) == (0, ["Nothing was found."])
    command = (
        "train clean.csv --out run --duration 2st --batch-size 4 --device cpu --precision fp32"
    )
    assert flambeau(*command.split()).code == 0
    facts = json.loads(Path("run/dataset.json").read_text())
    assert (facts["train_samples"], facts["val_samples"], facts["classes"]) == (
        13,
        6,
        ["cat", "dog"],
    )


def test_what_is_held_out_stays_held_out(flambeau: Any, data: Path) -> None:
    assert flambeau("check", "data/train --out clean.csv").code == 0
    before, after = listed(open_sources(data / "train")), listed(open_sources(Path("clean.csv")))
    assert after[1].items() <= before[1].items()
    assert after[0].items() <= before[0].items()


def test_what_is_left_out_is_chosen(flambeau: Any, data: Path) -> None:
    assert flambeau("check", "data --drop unreadable").code == 1
    answer = flambeau("check", "data --drop unreadable --out clean.csv")
    assert answer.err.startswith("21 images are left, 1 are left out")
    (data / "train" / "cat" / "tcata.png").unlink()
    assert flambeau("check", "data --drop unreadable").code == 0
    picture(1, 4).save(data / "train" / "cat" / "tcata.png")
    answer = flambeau("check", "data --drop tiny,copies --out clean.csv --force")
    assert answer.err.startswith("20 images are left, 2 are left out")
    assert "train/cat/tcata.png" not in Path("clean.csv").read_text()


def test_json(flambeau: Any, data: Path) -> None:
    answer = flambeau("check", "data --json")
    assert answer.code == 1
    facts = json.loads(answer.out)
    assert (facts["images"], facts["train"], facts["val"], facts["classes"]) == (22, 16, 6, 2)
    assert [finding["kind"] for finding in facts["findings"]] == ["leaks", "unreadable", "copies"]
    assert [finding["drop"] for finding in facts["findings"]] == [
        ["train/dog/tdogh.png"], ["train/cat/tcata.png"], ["train/cat/tcatc.png"],
    ]  # fmt: skip
    leak = facts["findings"][0]["found"][0]
    assert leak["images"] == ["val/dog/vdogb.png", "train/dog/tdogh.png"]


def test_numbers_as_classes_keep_their_places(flambeau: Any, data: Path) -> None:
    for part in ("train", "val"):
        (data / part / "cat").rename(data / part / "07")
        (data / part / "dog").rename(data / part / "3")
    assert flambeau("check", "data --out clean.csv").code == 0
    before, after = open_sources(data), open_sources(Path("clean.csv"))
    assert after[0].classes == before[0].classes == ("07", "3")
    assert listed(after)[1] == listed(before)[1]


@pytest.mark.parametrize("kind", ["tar", "npz", "rec", "listing", "data"])
def test_all_that_train_takes(flambeau: Any, data: Path, kind: str) -> None:
    (data / LEFT_OUT[0]).unlink()
    if kind == "tar":
        for part in ("train", "val"):
            with tarfile.open(f"x_{part}.tar", "w") as file:
                for path in sorted((data / part).rglob("*.png")):
                    file.add(path, str(path.relative_to(data / part)))
        name = "x_train.tar"
    elif kind in ("npz", "rec"):
        resize = "--resize 32 --center-crop" * (kind == "npz")
        for part in ("train", "val"):
            assert flambeau("pack", f"data/{part} x_{part}.{kind} {resize}").code == 0
        name = f"x_train.{kind}"
    elif kind == "listing":
        paths = sorted(Path("data").rglob("*.png"))
        rows = [f"{path},{path.parent.name},{path.parts[1]}" for path in paths]
        Path("x.csv").write_text("\n".join(["path,label,split", *rows]))
        name = "x.csv"
    else:
        name = "data"
    answer = flambeau("check", name)
    assert (answer.code, answer.err) == (1, "")
    assert "\nleaks: 1 validation image (16.7%) " in answer.out
    assert "\ncopies: 1 image is a copy " in answer.out
    listing = flambeau("check", f"{name} --out clean.csv")
    if kind in ("listing", "data"):
        assert listing.code == 0
        assert len(open_sources(Path("clean.csv"))[0]) == 13
    else:
        assert listing.code == 2
        assert "flambeau: --out lists image files, and x_train." in listing.err
        assert "flambeau pack x_train" in listing.err


def test_the_accuracy_without_what_leaked(flambeau: Any, data: Path) -> None:
    (data / LEFT_OUT[0]).unlink()
    command = "train data --out run --duration 2st --batch-size 4 --device cpu --precision fp32"
    assert flambeau(*command.split()).code == 0
    answer = flambeau("check", "data --model run --json")
    assert (answer.code, answer.err) == (1, "")
    told = json.loads(answer.out)["model"]
    assert {name: row["images"] for name, row in told.items()} == {
        "all": 6,
        "leaked": 1,
        "without": 5,
    }
    hits = {name: round(row["images"] * row["accuracy"]) for name, row in told.items()}
    assert hits["all"] == hits["leaked"] + hits["without"]
    figures = json.loads(flambeau("evaluate", "run data --json").out)
    assert told["all"]["accuracy"] == pytest.approx(figures["accuracy"])
    lines = flambeau("check", "data --model run").out.splitlines()
    assert lines[-4] == "Accuracy of run on the validation images:"
    assert lines[-1].startswith("  without those: ")
    assert lines[-1].endswith("% of 5")
    picture(5).save(data / "train" / "cat" / "new.png")
    other = flambeau("check", "data --model run")
    assert other.err.splitlines() == [
        "run has no losses of these images (docs: Checking data, wrong labels)",
        "run was trained on other images than these: what it has seen is not known",
    ]


def test_labels_that_look_wrong(flambeau: Any, data: Path) -> None:
    """One bright image in the class of dark ones."""
    for path in data.rglob("*.png"):
        shade = 60 if path.parent.name == "cat" else 190
        noise = np.random.default_rng(len(path.name) + ord(path.stem[-1])).integers(
            0, 60, (24, 24, 3)
        )
        Image.fromarray((shade + noise).astype(np.uint8)).save(path)
    odd = data / "train" / "cat" / "tcatd.png"
    noise = np.random.default_rng(7).integers(0, 60, (24, 24, 3))
    Image.fromarray((190 + noise).astype(np.uint8)).save(odd)
    command = (
        "train data --out run --epochs 12 --batch-size 4 --device cpu --precision fp32 --lr 0.05"
    )
    assert flambeau(*command.split()).code == 0
    answer = flambeau("check", "data --model run --json")
    (labels,) = [f for f in json.loads(answer.out)["findings"] if f["kind"] == "labels"]
    first = labels["found"][0]
    assert first["images"] == ["train/cat/tcatd.png"]
    assert first["note"].startswith("cat, or dog? mean loss ")
    kept = flambeau("check", "data --model run --out clean.csv --drop labels").err
    assert f"{labels['count']} are left out" in kept
    assert "tcatd.png" not in Path("clean.csv").read_text()


def test_a_class_that_would_be_lost(flambeau: Any, data: Path) -> None:
    for path in (data / "train" / "dog").iterdir():
        path.unlink()
    (data / "train" / "dog" / "only.png").write_bytes(
        (data / "val" / "dog" / "vdoga.png").read_bytes()
    )
    answer = flambeau("check", "data --out clean.csv")
    assert answer.code == 2
    assert "leaks: 1 validation image" in answer.out
    assert "--out would leave no image of class 'dog' to train on" in answer.err
    assert not Path("clean.csv").exists()


def test_names_that_a_listing_cannot_hold(flambeau: Any, data: Path) -> None:
    cats = data / "train" / "cat"
    (cats / "tcate.png").rename(cats / 'a, "b".png')
    assert flambeau("check", "data --out clean.csv").code == 0
    assert any('a, "b".png' in path for path in listed(open_sources(Path("clean.csv")))[0])
    (cats / "tcatf.png").rename(cats / "a\nb.png")
    answer = flambeau("check", "data --out clean.csv --force")
    assert answer.code == 2
    assert "a\\nb.png' cannot stand in a listing" in answer.err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("nowhere", ["nowhere does not exist"]),
        ("empty", ["empty has no sub-folders"]),
        ("text.txt", ["text.txt is neither a folder nor a file of packed images"]),
        ("data --drop typo", ["--drop typo: there is no such kind", "leaks, groups, contradictions"]),
        ("data --drop leak", ["--drop leak: ", "did you mean 'leaks'?"]),
        ("data --drop names", ["--drop names: this is not about single images"]),
        ("data --workers 0", ["--workers must be at least 1, got 0"]),
        ("data --out clean.txt", ["--out clean.txt: a listing is a CSV file"]),
        ("data --out there.csv", ["--out there.csv exists", "--force"]),
        ("data --out no/clean.csv", ["there is no folder no"]),
        ("there.csv --out there.csv --force", ["--out there.csv is what is checked"]),
        ("data --model data", ["data"]),
        ("data --model nowhere", ["nowhere"]),
        ("", ["DATA is missing"]),
    ],
)  # fmt: skip
def test_wrong_input(flambeau: Any, data: Path, words: str, parts: list[str]) -> None:
    Path("empty").mkdir()
    Path("text.txt").write_text("hello")
    Path("there.csv").write_text("path,label\ndata/train/cat/tcatb.png,cat\ndata/train/dog/tdoga.png,dog\n"
                                 "data/train/cat/tcatd.png,cat\ndata/train/dog/tdogb.png,dog\n")  # fmt: skip
    before = Path("there.csv").read_text()
    answer = flambeau("check", words)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("flambeau: ")
    assert "Traceback" not in answer.err
    for part in parts:
        assert part in answer.err
    assert Path("there.csv").read_text() == before


def test_nothing_can_be_read(flambeau: Any, data: Path) -> None:
    for path in data.rglob("*.png"):
        path.write_bytes(b"\0" * 10)
    answer = flambeau("check", "data")
    assert answer.code == 1
    assert "unreadable: 22 images cannot be read" in answer.out
    answer = flambeau("check", "data --out clean.csv")
    assert answer.code == 2


@pytest.mark.skipif(os.name == "nt", reason="names of files are text there")
def test_a_name_that_is_no_text(flambeau: Any, data: Path) -> None:
    bad = os.fsencode(data / "train" / "cat") + b"/\xff.png"
    with open(bad, "wb") as file:  # noqa: PTH123 - a path of bytes
        file.write(b"broken")
    answer = flambeau("check", "data")
    assert answer.code == 1
    assert "train/cat/\\udcff.png" in answer.out


def test_a_full_disk_is_told_with_the_file(flambeau: Any, data: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        code, _, err = flambeau("check", data, "--out", "clean.csv")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    assert err.endswith(
        "flambeau: clean.csv: File too large; raise the limit (`ulimit -f`) or use a disk that takes larger "
        "files and run the command again\n"
    )
    assert sorted(path.name for path in data.parent.iterdir()) == ["data"]
