"""Label vectors and numbers in .rec and TFRecord files: several labels per image, or regression."""

import io
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flambeau.data.sources.open_data import open_source, open_sources
from flambeau.data.sources.path_format import open_path
from flambeau.data.sources.source import ConcatSource, Source
from flambeau.data.sources.targets import TargetChoice, separator_of, task_of
from flambeau.errors import InputError
from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack
from flambeau.recipes.data.tf_example import build_example
from flambeau.recipes.data.tfrecord import TFRecordWriter

ENDINGS = (".rec", ".tfrecord")
NAN = math.nan
LABELS = [[1, 0, 1], [0, 0, 0], [0, 1, NAN], [0, 1, 0]] * 4


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8), level, np.uint8)).save(file, "PNG")
    return file.getvalue()


def written(path: Path, labels: Sequence[Any], **features: Sequence[Any]) -> Path:
    """Images with these labels; in a TFRecord with other features, too."""
    if path.suffix == ".rec":
        with RecordWriter(path) as records:
            for number, label in enumerate(labels):
                records.write(pack(IRHeader(0, label, number, 0), png(number)), key=number)
        return path
    with TFRecordWriter(path) as examples:
        for number, label in enumerate(labels):
            more = {name: values[number] for name, values in features.items()}
            examples.write(build_example({"image": png(number), "label": label, **more}))
    return path


def rows_of(path: Path, **choice: Any) -> tuple[Source, list[Any]]:
    """All images in the order of the file, and their targets."""
    source, _ = open_path(path, choice=TargetChoice(**choice))
    for at in range(len(source)):
        assert source.read(at) == png(at)
    return source, source.labels.tolist()


def complaint(path: Path, **choice: Any) -> str:
    with pytest.raises(InputError) as caught:
        open_sources(path, choice=TargetChoice(**choice))
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_vectors_of_0_and_1_are_several_labels(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path / f"a{ending}", LABELS)
    source, rows = rows_of(path)
    assert (task_of(source), source.classes) == ("multilabel", ("0", "1", "2"))
    assert separator_of(source) is None
    np.testing.assert_array_equal(rows, LABELS)
    (tmp_path / "a.classes.txt").write_text("sun\nrain\nsnow\n")
    train, val = open_sources(path)
    assert train.classes == val.classes == ("sun", "rain", "snow")
    assert len(train) + len(val) == len(LABELS)
    again = open_source(path, ("snow", "sun", "rain"), choice=TargetChoice("multilabel"))
    np.testing.assert_array_equal(again.labels, np.array(LABELS)[:, [2, 0, 1]])
    wide = open_source(path, ("snow", "sun", "rain", "fog"), choice=TargetChoice("multilabel"))
    assert wide.labels[:, 3].isnan().all()  # the file does not say


@pytest.mark.parametrize("ending", ENDINGS)
def test_vectors_of_other_numbers_are_learned_if_the_user_says_so(
    tmp_path: Path, ending: str
) -> None:
    boxes = [[2, 5, 1, 0.25, k / 8] for k in range(8)]
    path = written(tmp_path / f"a{ending}", boxes)
    assert "record 0" in (message := complaint(path)) and ": 5 labels\n" in message
    assert "give --task regression" in message
    source, rows = rows_of(path, task="regression")
    assert (task_of(source), source.classes) == ("regression", ("0", "1", "2", "3", "4"))
    np.testing.assert_array_equal(rows, boxes)
    assert "label 2 is neither 0 nor 1" in complaint(path, task="multilabel")
    (tmp_path / "a.classes.txt").write_text("x\ny\n")
    assert "5 labels, and" in complaint(path, task="regression")


@pytest.mark.parametrize("ending", ENDINGS)
def test_single_numbers_with_fractions(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path / f"a{ending}", [0.5, 1.25, NAN, 3.0, 2.5])
    source, rows = rows_of(path)
    assert (task_of(source), source.classes) == ("regression", ("value",))
    np.testing.assert_array_equal(rows, [[0.5], [1.25], [NAN], [3.0], [2.5]])
    counts = written(tmp_path / f"b{ending}", [float(k % 3) for k in range(9)])
    assert task_of(rows_of(counts)[0]) == "classification"
    assert rows_of(counts, task="regression")[1][:3] == [[0], [1], [2]]
    one_wrong = written(tmp_path / f"c{ending}", [0.0, 1.0, 0.5, 1.0])
    assert "record 2" in (message := complaint(one_wrong)) and "label 0.5\n" in message
    assert "--task regression" in message
    infinite = written(tmp_path / f"d{ending}", [0.5, math.inf, 1.5])
    assert "label inf is no number" in complaint(infinite)
    nothing = written(tmp_path / f"e{ending}", [NAN, NAN])
    assert "has no number" in complaint(nothing, task="regression")


@pytest.mark.parametrize("ending", ENDINGS)
def test_vectors_of_several_lengths(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path / f"a{ending}", [[1, 1], [1, 1, 0], [0, 1]])
    assert "record 1" in (message := complaint(path, task="multilabel"))
    assert "3 labels, the records before it have 2" in message
    assert ": 2 labels\n" in complaint(path) or "3 labels" in complaint(path)


@pytest.mark.parametrize("ending", ENDINGS)
def test_one_hot_vectors_stay_classes_unless_the_user_says_otherwise(
    tmp_path: Path, ending: str
) -> None:
    path = written(tmp_path / f"a{ending}", [[1, 0], [0, 1]] * 4)
    if ending == ".rec":
        assert task_of(rows_of(path)[0]) == "classification"
    else:
        assert ": 2 labels\n" in complaint(path)
    source, rows = rows_of(path, task="multilabel")
    assert (task_of(source), rows[:2]) == ("multilabel", [[1, 0], [0, 1]])


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_part_to_validate_on_beside_it(tmp_path: Path, ending: str) -> None:
    written(tmp_path / f"a_train{ending}", LABELS)
    written(tmp_path / f"a_val{ending}", [[1, 0, 0], [0, 1, 0]])  # one-hot alone would be classes
    train, val = open_sources(tmp_path / f"a_train{ending}")
    assert (task_of(train), task_of(val), len(val)) == ("multilabel", "multilabel", 2)


def test_there_are_no_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "a.rec", LABELS)
    for choice in ({"columns": ("x",)}, {"separator": ","}):
        assert "a.rec has no columns, so --" in complaint(path, **choice)
    path = written(tmp_path / "a.tfrecord", LABELS)
    assert "a.tfrecord has no columns, so --label-separator" in complaint(path, separator=",")
    for file in ("a.rec", "a.tfrecord"):
        assert "name columns" in complaint(tmp_path / file, group="patient")


def test_features_of_a_tfrecord_by_their_names(tmp_path: Path) -> None:
    ages, sizes = [31, 2, 77, 5], [0.5, 1.5, NAN, 2.5]
    kinds = [b"pug", b"tabby", b"pug", b"pug"]
    path = written(tmp_path / "a.tfrecord", [0, 1, 1, 0], age=ages, size=sizes, kind=kinds)
    source, rows = rows_of(path, columns=("age", "size"))
    assert (task_of(source), source.classes) == ("regression", ("age", "size"))
    np.testing.assert_array_equal(rows, np.stack([ages, sizes], 1))
    source, rows = rows_of(path, columns=("age",), task="regression")
    assert (source.classes, rows) == (("age",), [[31], [2], [77], [5]])
    assert rows_of(path, columns=("kind",))[0].classes == ("pug", "tabby")
    assert "no column 'agee'; did you mean 'age'?" in complaint(path, columns=("agee",))
    assert "no numbers in kind" in complaint(path, columns=("age", "kind"))
    assert "its label is a text" in complaint(path, columns=("kind",), task="regression")
    empty = written(tmp_path / "e.tfrecord", [[]] * 4, targets=[[1, 1], [0, 1], [0, 0], [1, 0]])
    assert task_of(rows_of(empty)[0]) == "multilabel"
    assert task_of(rows_of(path)[0]) == "classification"  # the index of before is not taken
    other = open_source(
        path, ("age", "size"), choice=TargetChoice("regression", ("age", "size"), of_others=True)
    )
    np.testing.assert_array_equal(other.labels, np.stack([ages, sizes], 1))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("task", [None, "multilabel", "regression"])
def test_damaged_files_are_read_or_refused_in_two_lines(
    tmp_path: Path, ending: str, task: Any
) -> None:
    """Whatever bytes are damaged: nothing else than InputError, and never targets that cannot be."""
    labels = LABELS if task != "regression" else [[0.5, k, NAN] for k in range(16)]
    whole = written(tmp_path / f"whole{ending}", labels).read_bytes()
    index = tmp_path / "whole.idx"
    draw = random.Random(f"{ending} {task}")
    refused = 0
    for number in range(250):
        data = bytearray(whole)
        if number % 5 == 0:
            del data[draw.randrange(len(data)) :]
        for _ in range(draw.choice((1, 1, 3))):
            if data:
                # Most hits in the header and labels of a record, which begin each of them.
                start = draw.choice((0, draw.randrange(len(data))))
                at = min(start + draw.randrange(64), len(data) - 1)
                data[at] = draw.choice((0, 255, 1 << draw.randrange(8), draw.randrange(256)))
        path = tmp_path / f"cut{ending}"
        path.write_bytes(data)
        if index.exists():
            (tmp_path / "cut.idx").write_bytes(index.read_bytes())
        try:
            train, val = open_sources(path, choice=TargetChoice(task))
        except InputError as error:
            refused += 1
            assert str(path) in str(error) and len(str(error)) < 1000
        else:
            source = ConcatSource([train, val])
            assert source.labels.shape[0] == len(source) <= len(labels)
            if task_of(source) == "multilabel":
                values = source.labels
                assert ((values == 0) | (values == 1) | values.isnan()).all()
            assert not source.labels.isinf().any()
    assert refused > 25


def test_a_vector_that_claims_to_be_long_takes_no_memory(tmp_path: Path) -> None:
    path = written(tmp_path / "a.rec", LABELS)
    data = bytearray(path.read_bytes())
    data[8:12] = (0xFFFFFFF0).to_bytes(4, "little")  # the number of labels of the first record
    path.write_bytes(data)
    assert "record 0 (key 0): flag 4294967280 asks for" in complaint(path)
