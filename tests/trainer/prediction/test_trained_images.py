"""Images that a model was trained on are recognized wherever they lie when it is evaluated."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flambeau.cli.command import main
from flambeau.data.sources.open_data import open_source, open_sources
from flambeau.data.sources.source import Source, content_sample, names_digest
from flambeau.data.sources.targets import FOUND
from flambeau.trainer.parts.data import target_choice
from flambeau.trainer.prediction.trained_images import trained_images
from flambeau.trainer.settings.settings import Settings


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def trained_on(photos: Path, **given: Any) -> tuple[Any, set[str]]:
    """What a run on these images knows of them, and what it was trained on."""
    settings = Settings(data=str(photos), **given)
    train, val = open_sources(photos, choice=target_choice(settings))
    facts = SimpleNamespace(
        train_samples=len(train),
        val_samples=len(val),
        train_fingerprint=train.fingerprint,
        train_names=names_digest(train),
        train_content=content_sample(train),
    )
    trained = SimpleNamespace(
        facts=facts,
        settings=SimpleNamespace(**vars(settings)),
        choice=FOUND,
        others=(),
        knows_its_data=True,
    )
    return trained, set(train.names)


def seen(trained: Any, data: Path) -> set[str]:
    source: Source = open_source(data, ("cat", "dog"))
    is_trained = trained_images(trained, data, source).tolist()
    return {name for name, known in zip(source.names, is_trained, strict=True) if known}


def test_the_same_data_wherever_they_are(photos: Path, monkeypatch: Any) -> None:
    trained, names = trained_on(photos)
    assert len(names) == 36
    assert seen(trained, photos) == names
    (photos.parent / "link").symlink_to(photos)
    assert seen(trained, photos.parent / "link") == names
    monkeypatch.chdir(photos.parent)
    assert seen(trained, Path("photos")) == names
    assert seen(trained, photos.rename("moved")) == names


def test_packed_since_then(photos: Path) -> None:
    trained, names = trained_on(photos)
    assert main(["pack", str(photos), str(photos.parent / "photos.parquet")]) == 0
    assert len(seen(trained, photos.parent / "photos.parquet")) == len(names)


def test_other_images_of_the_same_names_packed_or_not(photos: Path) -> None:
    """As a test set whose files are numbered like those of the training set."""
    trained, _ = trained_on(photos)
    test = photos.parent / "test_photos"
    for file in photos.rglob("*.png"):
        copy = test / file.relative_to(photos)
        copy.parent.mkdir(parents=True, exist_ok=True)
        Image.open(file).transpose(Image.Transpose.ROTATE_90).save(copy, compress_level=0)
    assert seen(trained, test) == set()
    assert main(["pack", str(test), str(photos.parent / "test.parquet")]) == 0
    assert seen(trained, photos.parent / "test.parquet") == set()


def test_some_of_its_files(photos: Path) -> None:
    trained, names = trained_on(photos)
    listing = photos.parent / "some.csv"
    some = [
        f"photos/{label}/{number}.png,{label}" for label in ("cat", "dog") for number in range(9)
    ]
    listing.write_text("path,label\n" + "\n".join(some), encoding="utf-8")
    chosen = {line.partition(",")[0].removeprefix("photos/") for line in some}
    assert {name.removeprefix("photos/") for name in seen(trained, listing)} == names & chosen


def test_an_image_more_moves_one_other_at_most(photos: Path) -> None:
    trained, names = trained_on(photos)
    Image.new("RGB", (8, 8)).save(photos / "cat" / "new.png")
    assert len(names ^ (seen(trained, photos) - {"cat/new.png"})) <= 1


@pytest.mark.parametrize("recorded", ["/" + "x" * 300, "/gone/photos", "relative", "hf:name"])
def test_data_of_somebody_elses_run_that_cannot_be_looked_at(photos: Path, recorded: str) -> None:
    trained, _ = trained_on(photos)
    trained.settings.data = recorded
    Image.new("RGB", (8, 8)).save(photos / "cat" / "new.png")
    assert seen(trained, photos) == set()


def test_other_images(photos: Path) -> None:
    trained, _ = trained_on(photos)
    shutil.copytree(photos, photos.parent / "others")
    (photos.parent / "others" / "cat" / "0.png").rename(photos.parent / "others" / "cat" / "x.png")
    assert seen(trained, photos.parent / "others") == set()  # the content of a copy is not compared


@pytest.mark.parametrize(
    "given", [{"fold": "2/4"}, {"subset": 0.5}, {"fold": "1/3", "subset": 0.2}]
)
def test_folds_and_subsets(photos: Path, given: Any) -> None:
    trained, names = trained_on(photos, **given)
    assert 4 <= len(names) < 36
    assert seen(trained, photos) == names
    assert seen(trained, photos.rename(photos.with_name("moved"))) == names


@pytest.mark.parametrize("given", [{}, {"subset": 0.5}])
def test_the_packed_file_that_has_another_to_validate_on(photos: Path, given: Any) -> None:
    """Both are files of their own, and the records of both are numbered."""
    pair = photos.parent / "pair"
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            shutil.copytree(photos / name, photos.parent / part / name)
    pair.mkdir()
    for part, copies in (("train", 2), ("val", 1)):
        source = photos.parent / part
        for number in range(copies - 1):
            Image.new("RGB", (8, 8), (number, 9, 9)).save(source / "cat" / "more.png")
        assert main(["pack", str(source), str(pair / f"a_{part}.rec")]) == 0
    trained, names = trained_on(pair / "a_train.rec", **given)
    assert len(names) == (20 if given else 41)
    assert seen(trained, pair / "a_train.rec") == names
    assert not seen(trained, pair / "a_val.rec")
