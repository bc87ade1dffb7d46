"""Several labels per image, and numbers, in Parquet, Arrow and Hugging Face data sets."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from flambeau.data.sources.open_data import open_source, open_sources
from flambeau.data.sources.source import ConcatSource, Source, left_out_columns
from flambeau.data.sources.targets import TargetChoice, task_of
from flambeau.errors import InputError


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAMBEAU_DATA", str(tmp_path / "home"))


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8), level, np.uint8)).save(file, "PNG")
    return file.getvalue()


def written(path: Path, columns: dict[str, Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    length = len(next(iter(columns.values())))
    table = pa.table({"image": [png(k) for k in range(length)], **columns})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=5)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    return path


def rows_of(path: Path, **choice: Any) -> tuple[Source, list[list[float]]]:
    """All images, in the order of the table."""
    source = ConcatSource(open_sources(path, choice=TargetChoice(**choice)))
    order = np.argsort([int(name.rpartition("/")[2]) for name in source.names])
    for at in order.tolist():
        assert len(source.read(at))
    return source, source.labels[order].tolist()


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_what_a_column_may_hold(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    written(path, {"labels": [["x", "y"], ["y"], [], None] * 3})
    source, rows = rows_of(path)
    assert (task_of(source), source.classes) == ("multilabel", ("x", "y"))
    assert rows == [[1, 1], [0, 1], [0, 0], [0, 0]] * 3
    written(path, {"tags": ["x|y", "y", "", "x"] * 3})
    source, rows = rows_of(path)
    assert (source.classes, rows) == (("x", "y"), [[1, 1], [0, 1], [0, 0], [1, 0]] * 3)
    written(path, {"cat": [1, 0, None] * 4, "dog": [True, False, True] * 4, "age": [31, 2, 3] * 4})
    source, rows = rows_of(path)
    assert (task_of(source), source.classes) == ("multilabel", ("cat", "dog"))
    assert rows[:2] == [[1, 1], [0, 0]] and math.isnan(rows[2][0])
    assert left_out_columns(source) == ["age"]
    written(path, {"label": pa.array([[1.0, 0.0], [0.0, None]] * 6)})
    source, rows = rows_of(path)
    assert (task_of(source), source.classes) == ("multilabel", ("label_0", "label_1"))
    assert rows[0] == [1, 0] and math.isnan(rows[1][1])
    written(path, {"label": [1.5, None, 2.0] * 4, "size": [1, 2, 3] * 4})
    source, rows = rows_of(path)
    assert (task_of(source), source.classes) == ("regression", ("label",))
    assert rows[0] == [1.5] and math.isnan(rows[1][0])
    source, rows = rows_of(path, task="regression", columns=("size", "label"))
    assert (source.classes, rows[2]) == (("size", "label"), [3, 2])
    written(path, {"label": [0, 1] * 6, "breed": ["pug", "tabby"] * 6})
    source, _ = rows_of(path, columns=("breed",))
    assert (task_of(source), source.classes) == ("classification", ("pug", "tabby"))


def test_lists_of_class_labels_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "labels": datasets.List(datasets.ClassLabel(names=["cat", "dog", "owl"])),
        }
    )
    images = [{"bytes": png(k), "path": None} for k in range(12)]
    made = datasets.Dataset.from_dict(
        {"image": images, "labels": [[0, 2], [1], []] * 4}, features=features
    )
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        source, rows = rows_of(path)
        assert (task_of(source), source.classes) == ("multilabel", ("cat", "dog", "owl"))
        assert rows == [[1, 0, 1], [0, 1, 0], [0, 0, 0]] * 4
        one = open_source(path, ("owl", "cat", "dog"), choice=TargetChoice("multilabel"))
        assert one.labels[0].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("columns", "choice", "message"),
    [
        ({"labels": [["x", "x"]] * 3}, {}, "row 0, column labels: label 'x' stands there twice"),
        ({"label": ["1.5", "old"] * 3}, {"task": "regression"}, "row 1, column label: 'old' is no"),
        ({"label": [1, 2] * 3}, {"columns": ("lable",)}, "no column 'lable'; did you mean 'label'"),
        ({"label": pa.array([[1.0], [1.0, 0.0]] * 3)}, {}, "have 2 different lengths"),
        ({"size": [1, 2] * 3}, {}, "has no column of labels"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, columns: dict[str, Any], choice: dict[str, Any], message: str
) -> None:
    for ending in (".parquet", ".arrow"):
        path = written(tmp_path / f"a{ending}", columns)
        with pytest.raises(InputError, match=message):
            open_sources(path, choice=TargetChoice(**choice))


SPLITS: dict[str, Any] = {
    "label": ["a", "b"] * 6,
    "fold": ["train", "Train", "val", "training", "test", "train"] * 2,
    "patient": [f"p{k // 3}" for k in range(12)],
}


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_groups_and_splits_in_columns(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path / f"a{ending}", SPLITS)
    train, val = open_sources(path, choice=TargetChoice(split="fold"))
    assert [*train.names] == ["0", "1", "3", "5", "6", "7", "9", "11"]  # test is left out
    assert [*val.names] == ["2", "8"]
    assert left_out_columns(train) == ["patient"]
    train, val = open_sources(path, choice=TargetChoice(group="patient"))
    assert len(val) == 3 and len({int(name) // 3 for name in val.names}) == 1
    assert left_out_columns(train) == ["fold"]
    with pytest.raises(InputError, match="row 2 is to validate on and of the group 'p0', as is"):
        open_sources(path, choice=TargetChoice(group="patient", split="fold"))
    other = TargetChoice(group="doctor", split="set", of_others=True)
    assert len(open_source(path, ("a", "b"), choice=other)) == 12
    assert len(open_source(path, ("a", "b"), choice=TargetChoice(split="fold"))) == 2
    for choice, message in (
        ({"group": "patent"}, "has no column 'patent'; did you mean 'patient'"),
        ({"split": "patient"}, "row 0, column patient: 'p0' is no part of the data"),
        ({"split": "image"}, "has no column 'image'"),
    ):
        with pytest.raises(InputError, match=message):
            open_sources(path, choice=TargetChoice(**choice))
    written(path, {**SPLITS, "patient": ["p", None, ""] * 4})
    with pytest.raises(InputError, match="row 1, column patient names no group"):
        open_sources(path, choice=TargetChoice(group="patient"))


def test_splits_of_shards_and_of_hugging_face(tmp_path: Path) -> None:
    for shard in range(2):
        half = {name: values[6 * shard : 6 * shard + 6] for name, values in SPLITS.items()}
        written(tmp_path / "shards" / f"a-0000{shard}-of-00002.parquet", half)
    train, val = open_sources(tmp_path / "shards", choice=TargetChoice(split="fold"))
    assert (len(train), len(val)) == (8, 2)
    _, val = open_sources(tmp_path / "shards", choice=TargetChoice(group="patient"))
    assert len(val) == 3
    datasets = pytest.importorskip("datasets")
    fold = datasets.ClassLabel(names=["train", "val"])
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["a", "b"]),
        "fold": fold,
    }
    rows = {
        "image": [{"bytes": png(k), "path": None} for k in range(6)],
        "label": [0, 1] * 3,
        "fold": [0, 0, 1] * 2,
    }
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    made.save_to_disk(tmp_path / "saved")
    train, val = open_sources(tmp_path / "saved", choice=TargetChoice(split="fold"))
    assert (len(train), len(val)) == (4, 2)
    both = datasets.DatasetDict({"train": made, "test": made})
    both.save_to_disk(tmp_path / "both")
    with pytest.raises(InputError, match="has the splits train, test already\nLeave --split out"):
        open_sources(tmp_path / "both", choice=TargetChoice(split="fold"))


def test_a_part_of_columns_that_no_name_has(tmp_path: Path) -> None:
    """The labels of lists have names that are no columns; those to validate on are read the same."""
    for part in ("train", "val"):
        written(tmp_path / f"a_{part}.parquet", {"label": pa.array([[1.0, 0.0], [0.0, 1.0]] * 6)})
    train, val = open_sources(tmp_path / "a_train.parquet")
    assert train.classes == val.classes == ("label_0", "label_1")
    (tmp_path / "a.classes.txt").write_text("sun\nrain\n")
    assert open_sources(tmp_path / "a_train.parquet")[1].classes == ("sun", "rain")
