"""Classes that cannot name a folder: written escaped, read back, and only where `pack` has written them."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flambeau.data.sources.escaped_names import CLASS_NAMES, class_names_file, folder_names
from flambeau.data.sources.folder import FolderSource
from flambeau.data.sources.open_data import EMBEDDED, open_source, open_unlabelled
from flambeau.errors import InputError

ODD = (
    "T-shirt/top", "..", ".", ".hidden", "", " ", "a ", " a", "a.", "100%", "a%2Fb", "a/b", "CON", "com1.txt",
    "Dog", "dog", "DOG", "Stra\u00dfe", "STRASSE", "e\u0301", "\u00e9", "\u72d7", "a\\b", "a:b", "tab\there",
    "x\x00y", "__MACOSX", "train", "val", "x" * 300, "x" * 299 + "/", "%", "%25", "a\nb", "nul", "\u2028",
)  # fmt: skip


def made(folder: Path, classes: list[str]) -> list[str]:
    """A folder per class with one image, as `pack` makes it; the folders."""
    folders = folder_names(classes)
    for name in folders:
        place = folder / name
        place.mkdir(parents=True)  # which fails where two are one
        assert place.parent == folder
        Image.new("L", (2, 2)).save(place / "1.png")
    told = class_names_file(classes)
    if told is not None:
        (folder / CLASS_NAMES).write_text(told, encoding="utf-8")
    return folders


def test_odd_names_come_back(tmp_path: Path) -> None:
    folders = made(tmp_path, list(ODD))
    assert len({name.casefold() for name in folders}) == len(ODD)
    for name in folders:
        assert name.strip(" .") == name
        assert not set(name) & set('/\\:*?"<>|\0\n\t')
        assert len(name.encode()) <= 210
        assert name.lower() not in ("train", "val", "con", "nul", "com1.txt")
    found = FolderSource(tmp_path)
    assert found.classes == tuple(sorted(ODD))
    by_folder = dict(zip(folders, ODD, strict=True))
    for name, label in zip(found.names, found.labels.tolist(), strict=True):
        assert by_folder[name.split("/")[0]] == found.classes[label]


@pytest.mark.parametrize("seed", range(20))
def test_random_names_come_back(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    letters = "ab./%\\ A\u00c4\u0130:~\u00df\u72d7\U0001f600-_0\x7f\t2F5"
    names = {"".join(draw.choice(letters) for _ in range(draw.randint(0, 6))) for _ in range(60)}
    classes = sorted(names, key=lambda _: draw.random())
    made(tmp_path, classes)
    assert FolderSource(tmp_path).classes == tuple(sorted(classes))


def test_names_that_fit_are_left_alone(tmp_path: Path) -> None:
    assert made(tmp_path, ["dog", "50%", "a%2Fb", "\u72d7"]) == ["dog", "50%", "a%2Fb", "\u72d7"]
    assert not (tmp_path / CLASS_NAMES).exists()
    assert "a%2Fb" in FolderSource(tmp_path).classes


@pytest.mark.parametrize(
    "content",
    ["[1]", "{", '{"a": 1}', '{"a": "x", "a": "y"}', "[" * 100_000, '{"a": "b"}', '{"a": "\\ud800"}', "\xff"],
)  # fmt: skip
def test_edited_file_is_refused(tmp_path: Path, content: str) -> None:
    """The last but two gives two folders one class."""
    made(tmp_path, ["a", "b"])
    (tmp_path / CLASS_NAMES).write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"class_names\.json"):
        FolderSource(tmp_path)


def test_embedded_set_in_a_folder(tmp_path: Path, flambeau: Any) -> None:
    """It ended with 2, and advised a file inside the package."""
    shutil.copy(EMBEDDED, tmp_path / "clothes_train.rec")
    shutil.copy(EMBEDDED.with_name("fashion_mnist_val.rec"), tmp_path / "clothes_val.rec")
    for file in EMBEDDED.parent.glob("*.classes.txt"):
        shutil.copy(file, tmp_path / "clothes.classes.txt")
    answer = flambeau("pack", tmp_path / "clothes_val.rec", tmp_path / "clothes")
    assert answer.code == 0, answer.err
    assert (tmp_path / "clothes" / "T-shirt%2Ftop").is_dir()
    shutil.move(tmp_path / "clothes", tmp_path / "moved")
    shutil.move(tmp_path / "clothes.pack.json", tmp_path / "moved.pack.json")
    source = FolderSource(tmp_path / "moved")
    assert "T-shirt/top" in source.classes
    again = open_source(tmp_path / "moved", source.classes)
    assert len(again) == len(source)
    (given,) = open_unlabelled([tmp_path / "moved"], source.classes)
    assert sorted(given.source.labels.tolist()) == sorted(source.labels.tolist())
    assert flambeau("verify", tmp_path / "moved").code == 0
    answer = flambeau("pack", tmp_path / "moved", tmp_path / "back.tar")
    assert answer.code == 0, answer.err
    lines = (tmp_path / "back.classes.txt").read_text().splitlines()
    assert lines == sorted(source.classes)
    answer = flambeau("pack", tmp_path / "moved", tmp_path / "twice")
    assert answer.code == 0, answer.err
    assert FolderSource(tmp_path / "twice").names == source.names
    told = json.loads((tmp_path / "twice" / CLASS_NAMES).read_text())
    assert told == {"T-shirt%2Ftop": "T-shirt/top"}


def test_parts_and_salvage_keep_the_names(tmp_path: Path, flambeau: Any) -> None:
    (tmp_path / "small_train.lst").write_text("")
    made(tmp_path / "photos" / "train", ["a/b", "c"])
    made(tmp_path / "photos" / "val", ["a/b", "c"])
    answer = flambeau("pack", tmp_path / "photos", tmp_path / "again")
    assert answer.code == 0, answer.err
    for part in ("train", "val"):
        assert FolderSource(tmp_path / "again" / part).classes == ("a/b", "c")
    assert flambeau("verify", tmp_path / "again").code == 0
    answer = flambeau("verify", tmp_path / "again", "--salvage", tmp_path / "saved")
    assert answer.code == 0, answer.err
    files = sorted(str(p.relative_to(tmp_path / "saved")) for p in (tmp_path / "saved").rglob(".*"))
    assert len(files) == 2, files
