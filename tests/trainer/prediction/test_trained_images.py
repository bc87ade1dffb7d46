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


def trained_on(photos: Path) -> tuple[Any, set[str]]:
    """What a run on these images knows of them, and what it was trained on."""
    train, val = open_sources(photos)
    facts = SimpleNamespace(
        train_samples=len(train),
        val_samples=len(val),
        train_fingerprint=train.fingerprint,
        train_names=names_digest(train),
        train_content=content_sample(train),
    )
    settings = SimpleNamespace(**vars(Settings(data=str(photos))))
    trained = SimpleNamespace(facts=facts, settings=settings, choice=FOUND, others=())
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
