"""Labels of image records that are vectors: one number, one-hot, and what is refused."""

import struct
from pathlib import Path

import pytest

from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.recordio_file import RecordSource
from flambeau.errors import InputError
from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack


def write(path: Path, labels) -> Path:
    with RecordWriter(path) as writer:
        for number, label in enumerate(labels):
            writer.write(pack(IRHeader(0, label, number, 0), b"image %d" % number))
    return path


def complaint(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        RecordSource(path)
    assert len(str(caught.value).splitlines()) == 2
    return str(caught.value)


def test_a_one_hot_vector_is_its_class(tmp_path):
    vectors = [[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    source = RecordSource(write(tmp_path / "x.rec", vectors))
    assert source.labels.tolist() == [2, 0, 1, 2]
    assert source.classes == ("0", "1", "2")
    assert source.read(3) == b"image 3"


def test_a_one_hot_vector_as_its_bytes_stand_in_the_file(tmp_path):
    # flag 4: four float32 after the header of 24 bytes, whose own label does not count (mxnet 1.9.1).
    record = struct.pack("<IfQQ", 4, 3.0, 0, 0) + struct.pack("<4f", 0, 1, 0, 0) + b"image"
    with RecordWriter(tmp_path / "x.rec") as writer:
        writer.write(record)
    source = RecordSource(tmp_path / "x.rec")
    assert source.labels.tolist() == [1]
    assert source.read(0) == b"image"


def test_numbers_vectors_of_one_and_one_hot_vectors_may_stand_together(tmp_path):
    source = RecordSource(write(tmp_path / "x.rec", [1, [2], [1, 0, 0]]))
    assert source.labels.tolist() == [1, 2, 0]


def test_one_hot_records_are_trained_on(tmp_path):
    train, val = open_sources(write(tmp_path / "x.rec", [[1, 0], [0, 1]] * 10))
    assert sorted(train.labels.tolist() + val.labels.tolist()) == [0] * 10 + [1] * 10


@pytest.mark.parametrize(
    "vector",
    [
        [0, 0, 0],
        [1, 1, 0],
        [0, 2, 0],
        [0, -1, 0],
        [0, 0.5, 0],
        [0, 1, 0.001],
        [float("nan"), 0, 0],
        [1, float("inf"), 0],
        [2, 5, 1, 0.1, 0.2, 0.5, 0.6],  # im2rec's boxes
    ],
)
def test_other_vectors_are_refused(tmp_path, vector):
    path = write(tmp_path / "x.rec", [0, vector])
    message = complaint(path)
    assert message.startswith(f"{path}, record 1 (key 1): {len(vector)} labels\n")
    assert "pack it with a single number, or a one-hot vector" in message


def test_one_hot_vectors_of_several_lengths_are_refused(tmp_path):
    path = write(tmp_path / "x.rec", [[0, 1, 0], [0, 1]])
    expected = f"{path}, record 1 (key 1): 2 labels, the records before it have 3\n"
    assert complaint(path).startswith(expected)


def test_a_vector_that_is_cut_short_is_named(tmp_path):
    with RecordWriter(tmp_path / "x.rec") as writer:
        writer.write(struct.pack("<IfQQ", 1 << 31, 0.0, 0, 0) + bytes(8))
    assert "record 0 (key 0): flag 2147483648 asks for" in complaint(tmp_path / "x.rec")


def test_a_label_that_damage_has_made_huge_is_refused(tmp_path):
    path = write(tmp_path / "x.rec", [0, 1, 2e30, 1])
    assert "label 2" in complaint(path) and "record 2" in complaint(path)
