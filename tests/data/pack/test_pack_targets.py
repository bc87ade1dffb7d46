"""Several labels per image, and numbers, in packed files: what is written is read back, and checked."""

import csv
import io
import json
import math
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from flambeau import evaluate, train
from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shard_plan import WITH_VECTORS, Split
from flambeau.data.pack.verify import verify_file
from flambeau.data.sources.open_data import open_parts, open_source, open_sources
from flambeau.data.sources.source import Source
from flambeau.data.sources.targets import FOUND, TargetChoice, separator_of, task_of
from flambeau.errors import InputError

ENDINGS = sorted(WITH_VECTORS)
NUM = 12
Flambeau = Callable[..., Any]

TABLES: dict[str, tuple[list[str], list[list[str]], TargetChoice]] = {
    "cells": (["labels"], [["b;a", ""][k % 2 :: 2] or ["a"] for k in range(NUM)], FOUND),
    "columns": (["left", "my label"], [["01"[k % 2], ["", "1", "0"][k % 3]] for k in range(NUM)], FOUND),
    "numbers": (
        ["weight", "age"],
        [[str(k / 3), "" if k == 5 else str(k - 40)] for k in range(NUM)],
        TargetChoice(columns=("weight", "age")),
    ),
    "counts": (["count"], [[str(k % 3)] for k in range(NUM)], TargetChoice("regression", ("count",))),
    "one": (["sunny"], [[["", "1", "0"][k % 3]] for k in range(NUM)], TargetChoice("multilabel", ("sunny",))),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAMBEAU_DATA", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def table(name: str) -> tuple[Path, TargetChoice]:
    """A listing of images in folders, and which of its targets are meant."""
    head, rows, choice = TABLES[name]
    path = Path(f"{name}.csv")
    with path.open("w", newline="") as file:
        write = csv.writer(file)
        write.writerow(["path", *head])
        for k, row in enumerate(rows):
            Path(f"f{k % 2}").mkdir(exist_ok=True)
            Image.new("RGB", (9, 8), (k * 20, 7, 7)).save(f"f{k % 2}/{k}.png")
            write.writerow([f"f{k % 2}/{k}.png", *row])
    return path, choice


def packed(src: Path, dst: str, choice: TargetChoice = FOUND, **split: Any) -> Path:
    pack(src, Path(dst), Conversion(), Split(**split), workers=1, choice=choice)
    return Path(dst)


def same(one: Source, other: Source) -> None:
    """Equal targets, images and what is known of them, in one order."""
    assert (task_of(one), one.classes) == (task_of(other), other.classes)
    assert separator_of(one) == separator_of(other)
    np.testing.assert_array_equal(one.labels, other.labels)
    assert [one.read(k) for k in range(len(one))] == [other.read(k) for k in range(len(other))]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", TABLES)
def test_targets_are_read_as_they_were_written(name: str, ending: str) -> None:
    path, choice = table(name)
    source, _ = open_parts(path, choice=choice)
    made = packed(path, f"a.{ending}", choice)
    again, val = open_parts(made)
    assert val is None
    same(source, again)
    report = verify_file(made, ending, deep=True)
    assert (report.good, report.damaged, report.not_read, report.checksums) == (NUM, [], [], True)
    Path("a." + ending + ".pack.json").unlink()
    report = verify_file(made, ending)
    assert (report.good, report.damaged, report.not_read) == (NUM, [], [])
    # Its names may be those of a label or a number, and the order of them another one.
    wider = ("more", *reversed(source.classes))
    filled = math.nan if separator_of(source) is None else 0.0
    found = open_source(made, wider, choice=TargetChoice(source.task, wider, of_others=True))
    np.testing.assert_array_equal(found.labels[:, 1:], source.labels.flip(1))
    np.testing.assert_array_equal(found.labels[:, 0], np.full(NUM, filled))


@pytest.mark.parametrize("name", ["cells", "columns", "numbers"])
def test_through_all_formats_in_shards_and_parts(name: str) -> None:
    path, choice = table(name)
    source, _ = open_parts(path, choice=choice)
    step = path
    for number, ending in enumerate([*ENDINGS, "rec"]):
        packed(
            step, f"{number}.{ending}", choice if step == path else FOUND, shards=2, shuffle=False
        )
        step = Path(f"{number}.{ending}")
    same(source, open_parts(step)[0])
    packed(step, "half.tar", train_ratio=0.5, shuffle=False)
    train_part, val_part = open_sources(Path("half_train.tar"))
    assert (len(train_part), len(val_part)) == (6, 6)
    np.testing.assert_array_equal(val_part.labels, source.labels[6:])


def test_names_of_users_that_look_like_separators() -> None:
    """Lists of a user's function may hold names with any sign."""
    table("cells")
    Path("mine.py").write_text(
        "class Data:\n"
        "    def __len__(self):\n        return 8\n"
        "    def __getitem__(self, k):\n"
        "        return f'f{k % 2}/{k}.png', [['a|b', 'c;d'], ['c;d'], [], ['e, f']][k % 4]\n"
        "def data():\n    return Data()\n"
    )
    source, _ = open_parts(Path("mine.py:data"))
    for ending in ENDINGS:
        again, _ = open_parts(packed(Path("mine.py:data"), f"u.{ending}"))
        assert (again.classes, separator_of(again)) == (source.classes, separator_of(source))
        np.testing.assert_array_equal(again.labels, source.labels)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_label_that_has_changed_is_found(ending: str) -> None:
    path, choice = table("numbers")
    made = packed(path, f"a.{ending}", choice)
    other = Path("b.csv")
    other.write_text(path.read_text().replace("-37", "-38"))
    changed = packed(other, f"b.{ending}", choice)
    made.write_bytes(changed.read_bytes())
    report = verify_file(made, ending)
    assert report.good == NUM - 1 and len(report.damaged) == 1
    assert "its class are not what was packed" in report.damaged[0].what


def test_formats_that_hold_one_class_per_image() -> None:
    path, _ = table("cells")
    with pytest.raises(InputError, match="lmdb here holds one class per image"):
        packed(path, "a.lmdb")
    for dst in ("a.npz", "a.h5", "a.zarr", "a.pth", "a.npy", "a.n5", "a"):
        with pytest.raises(
            InputError, match=r"holds one class per image\n.*\.rec \.tfrecord \.tar"
        ):
            pack(
                path, Path(dst), Conversion("raw" if "." in dst[1:] else "keep"), Split(), workers=1
            )
        assert not Path(dst).exists()


def test_flags_say_which_targets(flambeau: Flambeau) -> None:
    table("numbers")
    assert flambeau("pack", "numbers.csv", "a.tar", "--target", "weight").code == 0
    assert open_parts(Path("a.tar"))[0].classes == ("weight",)
    answer = flambeau("pack", "numbers.csv", "b.tar", "--target", "wight")
    assert answer.code == 2 and "did you mean 'weight'?" in answer.err
    # Another choice of the same data is another DST.
    answer = flambeau("pack", "numbers.csv", "a.tar", "--target", "age", "--task", "regression")
    assert answer.code == 2 and "a.tar is there, made" in answer.err
    answer = flambeau("pack", "a.tar", "c", "--list")
    assert answer.code == 2 and "a .lst holds one class per image" in answer.err


@pytest.mark.parametrize("ending", ["rec", "tfrecord", "parquet", "tar", "zip"])
def test_a_run_on_packed_data_is_that_on_the_table(ending: str) -> None:
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 4, "bar": False, "image_size": 8}
    path, _ = table("cells")
    made = packed(path, f"a.{ending}")
    result = train(data=made, out="run", **settings)
    again = train(data=made, out="run", **settings)  # the settings of the run are read, and fit
    assert again.metrics == result.metrics
    assert json.loads(Path("run/dataset.json").read_text())["classes"] == ["a", "b"]
    assert evaluate("run", path, all_images=True).map == evaluate("run", made, all_images=True).map


def test_hugging_face_reads_the_tables() -> None:
    path, _ = table("cells")
    schema = pq.read_schema(packed(path, "a.parquet"))
    feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"]["labels"]
    assert feature == {"feature": {"names": ["a", "b"], "_type": "ClassLabel"}, "_type": "List"}
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset(pa.table(pq.read_table("a.parquet")))
    assert rows[0]["labels"] == [0, 1]
    assert rows.features["labels"].feature.names == ["a", "b"]


def test_a_tar_of_others() -> None:
    def written(contents: list[Any]) -> Path:
        with tarfile.open("others.tar", "w") as file:
            for k, content in enumerate(contents):
                data = io.BytesIO()
                Image.new("RGB", (8, 8), (k, 0, 0)).save(data, "PNG")
                for name, value in (
                    (f"{k}.png", data.getvalue()),
                    (f"{k}.json", json.dumps(content).encode()),
                ):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(value)
                    file.addfile(entry, io.BytesIO(value))
        return Path("others.tar")

    source, _ = open_parts(written([{"tags": ["x", "y"]}, {"tags": []}, {"tags": ["y"]}]))
    assert (source.classes, source.labels.tolist()) == (("x", "y"), [[1, 1], [0, 0], [0, 1]])
    source, _ = open_parts(
        written([{"targets": {"a": 1.5, "b": None}}, {"targets": {"a": 2, "b": 3}}])
    )
    assert (task_of(source), source.classes) == ("regression", ("a", "b"))
    assert source.labels[1].tolist() == [2, 3]
    source, _ = open_parts(written([{"label": {"a": 1}}, {"label": {"a": 0}}]))
    assert task_of(source) == "multilabel"
    for contents, message in (
        ([{"tags": ["x"]}, {"tags": {"x": 1}}], "1.png: its labels are of another form"),
        ([{"tags": {"x": 1}}, {"tags": {"y": 1}}], "1.png: it has values for y, the first sample for x"),
        ([{"tags": ["x"]}, {"note": 1}], "1.json has no list of labels"),
        ([{"tags": {"x": 1.5}}, {"tags": {"x": math.inf}}], "is no number"),
        ([{"tags": ["x", "x"]}, {"tags": ["x"]}], "stands there twice"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            open_parts(written(contents))
    with pytest.raises(InputError, match="has no columns, so --target"):
        open_parts(Path("others.tar"), choice=TargetChoice(columns=("x",)))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", ["cells", "numbers"])
def test_damaged_files_are_read_or_refused(name: str, ending: str) -> None:
    path, choice = table(name)
    whole = packed(path, f"whole.{ending}", choice).read_bytes()
    Path("cut.classes.txt").write_text(Path("whole.classes.txt").read_text())
    draw = random.Random(f"{name} {ending}")
    marks = [at for mark in (b"flambeau", b"label", b"number") if (at := whole.find(mark)) >= 0]
    for number in range(60):
        data = bytearray(whole)
        if number % 6 == 0:
            del data[draw.randrange(len(data)) :]
        for _ in range(2):
            near = draw.choice([0, len(data), draw.randrange(len(data) + 1), *marks])
            at = min(max(0, near + draw.randrange(-40, 60)), len(data) - 1)
            if data:
                data[at] = draw.choice((0, 255, data[at] ^ 1 << draw.randrange(8)))
        Path(f"cut.{ending}").write_bytes(data)
        try:
            source, _ = open_parts(Path(f"cut.{ending}"))
        except InputError as error:
            assert f"cut.{ending}" in str(error) and len(str(error)) < 2000
        else:
            assert len(source.labels) == len(source)
            assert not source.labels.isinf().any()
        report = verify_file(Path(f"cut.{ending}"), ending)
        assert report.good <= NUM


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_tables_of_others_are_verified(ending: str) -> None:
    """Their images, where training takes the targets; and what it refuses is said."""
    images = []
    for k in range(6):
        data = io.BytesIO()
        Image.new("RGB", (8, 8), (k, 0, 0)).save(data, "PNG")
        images.append(data.getvalue())

    def written(**columns: Any) -> Path:
        found = pa.table({"image": images, **columns})
        if ending == "parquet":
            pq.write_table(found, "o.parquet")
        else:
            with (
                pa.OSFile("o.arrow", "wb") as file,
                pa.ipc.new_stream(file, found.schema) as stream,
            ):
                stream.write_table(found)
        return Path(f"o.{ending}")

    for columns in ({"labels": [["x"], [], ["y"]] * 2}, {"label": [0.5, 1.5, None] * 2}):
        report = verify_file(written(**columns), ending)
        assert (report.good, report.damaged, report.not_read) == (6, [], [])
    report = verify_file(written(labels=[["x", "x"], [], ["y"]] * 2), ending)
    assert not report.good and report.not_read


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_saved_of_a_damaged_file_has_its_targets(ending: str) -> None:
    path, choice = table("columns")
    made = packed(path, f"a.{ending}", choice)
    data = bytearray(made.read_bytes())
    image = open_parts(made)[0].read(7)
    assert isinstance(image, bytes)
    if ending != "parquet":  # where damage takes a whole row group, and there is one
        data[data.index(image) + len(image) // 2] ^= 255
    made.write_bytes(data)
    report = verify_file(made, ending, salvage=Path(f"good.{ending}"))
    assert report.saved and report.good == NUM - (ending != "parquet")
    whole, _ = open_parts(path, choice=choice)
    saved, _ = open_parts(Path(f"good.{ending}"))
    assert (task_of(saved), saved.classes, len(saved)) == ("multilabel", whole.classes, report.good)
    rows = {repr(row) for row in whole.labels.tolist()}
    assert {repr(row) for row in saved.labels.tolist()} <= rows
