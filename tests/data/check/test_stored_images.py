"""What is found almost without decoding is what a look at all pixels finds, and no more."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flambeau.data.check.check_data import check_data
from flambeau.data.check.image_facts import read_each
from flambeau.data.check.report_text import ReportItem, quick_findings
from flambeau.data.sources.open_data import open_sources


def picture(seed: int, size: tuple[int, int] = (64, 48), mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).convert(mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of good images."""
    for number in range(60):
        part = tmp_path / ("train" if number % 3 else "val") / "ab"[number % 2]
        part.mkdir(parents=True, exist_ok=True)
        picture(number).save(part / f"{number * 7919 % 9973}.{('jpg', 'png')[number % 2]}")
    return tmp_path


def told(folder: Path, seconds: float = 60.0) -> dict[str, ReportItem]:
    return {one.kind: one for one in quick_findings(*open_sources(folder), folder, seconds=seconds)}


def first(folder: Path, *parts: str) -> Path:
    return min(folder.joinpath(*parts).iterdir())


def test_nothing_is_found_in_good_images(folder: Path) -> None:
    assert told(folder) == {}


def test_copies_leaks_and_contradictions(folder: Path) -> None:
    shutil.copy(first(folder, "val", "a"), folder / "train" / "a" / "leaked.jpg")
    shutil.copy(first(folder, "train", "a"), folder / "train" / "a" / "twice.jpg")
    shutil.copy(first(folder, "train", "b"), folder / "train" / "a" / "moved.png")
    found = told(folder)
    whole = {one.kind: one for one in check_data(*open_sources(folder), folder).findings}
    assert found.keys() == whole.keys() == {"leaks", "contradictions", "copies"}
    for kind, one in found.items():
        assert one.title == whole[kind].title
    assert "leaked.jpg (the same file)" in "".join(found["leaks"].lines)
    assert "moved.png" in "".join(found["contradictions"].lines)


def test_equal_middles_are_no_copies(folder: Path) -> None:
    """Uncompressed images of one size that differ in a corner."""
    pixels = np.asarray(picture(99, (128, 128))).copy()
    for number in range(3):
        pixels[0, 0] = number
        Image.fromarray(pixels).save(folder / "train" / "a" / f"corner {'xyz'[number]}.bmp")
    shutil.copy(folder / "train" / "a" / "corner x.bmp", folder / "val" / "a" / "w.bmp")
    found = told(folder)
    assert found.keys() == {"leaks"}
    assert found["leaks"].title.startswith("1 validation image ")


@pytest.mark.parametrize("ending", ["jpg", "png", "bmp"])
def test_single_images(folder: Path, ending: str) -> None:
    here = folder / "train" / "a"
    Image.new("RGB", (400, 300), (200, 10, 30)).save(here / f"blank.{ending}")
    picture(1, (6, 6)).save(here / f"small.{ending}")
    picture(2, (900, 60)).save(here / f"strip.{ending}")
    picture(3, mode="L").save(here / f"grey.{ending}")
    (here / f"broken.{ending}").write_bytes(b"cut")
    picture(4).save(here / "other.gif")
    (here / "other.gif").rename(here / f"other.{ending}")
    found = {kind: "".join(one.lines) for kind, one in told(folder).items()}
    named = {kind: name for kind, name in {
        "tiny": "small", "odd": "strip", "unreadable": "broken", "endings": "other", "blank": "blank",
    }.items() if (kind, ending) != ("blank", "bmp")}  # fmt: skip
    assert found.keys() == named.keys()  # uncompressed, a blank image is as long as any
    for kind, name in named.items():
        assert f"{name}.{ending}" in found[kind]
    assert f"grey.{ending}" in found["odd"]


def test_pixels_that_are_stored_as_such(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (40, 8, 8), dtype=np.uint8)
    images[5], images[6] = images[30], 7
    labels = np.arange(40) % 2
    np.savez(tmp_path / "a_train.npz", images=images, labels=labels)
    np.savez(tmp_path / "a_val.npz", images=images[10:12], labels=1 - labels[10:12])
    found = told(tmp_path / "a_train.npz")
    assert found.keys() == {"leaks", "contradictions", "copies", "blank"}
    assert found["leaks"].title.startswith("2 validation images ")
    assert found["contradictions"].title.startswith("3 pictures ")
    assert "the same pixels" in "".join(found["leaks"].lines)


def test_no_time_is_left(folder: Path) -> None:
    shutil.copy(first(folder, "val", "a"), folder / "train" / "a" / "leaked.jpg")
    found = told(folder, seconds=0.0)
    assert found.keys() == {""}
    assert found[""].title == "61 of 61 images were not looked at"


def test_a_copy_that_was_not_compared_in_time_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(first(folder, "val", "a"), folder / "train" / "a" / "leaked.jpg")
    shutil.copy(first(folder, "val", "a"), folder / "train" / "a" / "twice.jpg")
    calls = iter([math.inf, 0.0])

    def read(*given: Any, until: float) -> None:
        read_each(*given, until=next(calls))

    monkeypatch.setattr("flambeau.data.check.stored_images.read_each", read)
    found = told(folder)
    assert found.keys() == {""}
    assert found[""].title == "3 of 62 images were not looked at"
