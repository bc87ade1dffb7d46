"""What lies beside images and looks like their labels is read, said or refused, and never passed over."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.open_data import open_parts, open_source, open_sources
from flambeau.data.sources.source import Source, left_out, left_out_counts, left_out_lines
from flambeau.data.sources.targets import task_of
from flambeau.errors import InputError


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (9, 9), level).save(file, "PNG")
    return file.getvalue()


def put(folder: Path, **images: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, level in images.items():
        (folder / f"{name}.png").write_bytes(png(level))


def tar_of(path: Path, image: str, label: str, values: list[object]) -> Path:
    """Samples in two folders, part0 and part1, each with an image and a file beside it."""
    with tarfile.open(path, "w") as tar:
        for k, value in enumerate(values):
            for end, data in ((image, png(k)), (label, str(value).encode())):
                entry = tarfile.TarInfo(f"part{2 * k // len(values)}/{k:03}{end}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return path


def labels_of(source: Source) -> list[str]:
    return [source.classes[label] for label in source.labels.tolist()]


def complaint(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_sources(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("label", "values", "expected"),
    [
        (".label", [0, 1, 0, 1], ["0", "1", "0", "1"]),
        (".class", ["cat", "dog\n", "cat", "dog"], ["cat", "dog", "cat", "dog"]),
        (".target", [1, 0, 1, 0], ["1", "0", "1", "0"]),
        (".json", [json.dumps({"category": k % 2}) for k in range(4)], ["0", "1", "0", "1"]),
        (".json", [json.dumps({"target": "ab"[k % 2]}) for k in range(4)], ["a", "b", "a", "b"]),
        (".json", [3, 1, 3, 1], ["3", "1", "3", "1"]),
    ],
)
def test_labels_of_a_tar_are_read_though_its_samples_lie_in_folders(
    tmp_path: Path, label: str, values: list[object], expected: list[str]
) -> None:
    source, _ = open_parts(tar_of(tmp_path / "a.tar", ".png", label, values))
    assert labels_of(source) == expected
    assert left_out_lines(source) == []


def test_a_coordinate_beside_images_is_no_label(tmp_path: Path) -> None:
    values = [json.dumps({"x": k, "y": 3 - k}) for k in range(4)]
    source, _ = open_parts(tar_of(tmp_path / "a.tar", ".png", ".json", values))
    assert len(source.classes) == 2


@pytest.mark.parametrize(
    ("image", "label", "what"),
    [
        (".1.png", ".1.cls", ".1.cls looks like its label"),
        (".input.png", ".target.cls", ".target.cls looks like its label"),
        (".png", ".class_id", ".class_id looks like its label"),
        (".png", ".lbl", ".lbl looks like its label"),
        (".png", ".y", ".y looks like its label"),
        (".png", ".gt.txt", ".gt.txt looks like its label"),
        (".png", ".txt", ".txt looks like its label"),
        (".png", ".json", "'class_id' in .json looks like its label"),
    ],
)
def test_labels_of_a_tar_that_contradict_its_folders_are_refused(
    tmp_path: Path, image: str, label: str, what: str
) -> None:
    values = [json.dumps({"class_id": k % 2}) if label == ".json" else k % 2 for k in range(8)]
    message = complaint(tar_of(tmp_path / "a.tar", image, label, values))
    assert what in message
    assert ".cls (a number) or .label" in message


@pytest.mark.parametrize(
    ("label", "value"),
    [(".1.cls", "{part}"), (".txt", "caption {k}"), (".json", '{{"width": {k}}}'), (".txt", "all")],
)
def test_what_agrees_with_the_folders_of_a_tar_or_is_no_label_is_counted(
    tmp_path: Path, label: str, value: str
) -> None:
    values: list[object] = [value.format(part=k // 4, k=k) for k in range(8)]
    source, _ = open_parts(tar_of(tmp_path / "a.tar", ".png", label, values))
    assert source.classes == ("part0", "part1")
    assert left_out_counts(source) == {label: 8}


@pytest.mark.parametrize("parts", [("",), ("train", "val")])
def test_a_metadata_csv_is_a_list_of_labels(tmp_path: Path, parts: tuple[str, ...]) -> None:
    for part in parts:
        put(tmp_path / "data" / part, a=0, b=100, c=0, d=100, e=1)
        text = "file_name,age,label\n" + "".join(f"{x}.png,5,{x > 'b'}\n" for x in "abcd")
        (tmp_path / "data" / part / "metadata.csv").write_text(text)
    source, val = open_parts(tmp_path / "data")
    assert labels_of(source) == ["False", "False", "True", "True"]
    assert (val is None) == (len(parts) == 1)
    folder = tmp_path / "data" / parts[0]
    assert left_out_lines(source) == [
        f"{folder / 'metadata.csv'}: columns that are not read: age",
        f"{folder}: 1 file is left out, by ending: 1 .png (such as a PNG image)",
    ]
    assert len(open_source(tmp_path / "data", source.classes)) == 4


def test_a_metadata_csv_beside_class_folders_must_agree_with_them(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        put(tmp_path / "data" / folder, a=1, b=2)
    metadata = tmp_path / "data" / "metadata.csv"
    rows = ["x/a.png", "x/b.png", "y/a.png", "y/b.png"]
    metadata.write_text("file_name,label\n" + "".join(f"{row},{row[0]}\n" for row in rows))
    source, _ = open_parts(tmp_path / "data")
    assert source.classes == ("x", "y")
    assert left_out_counts(source) == {".csv": 1}
    metadata.write_text("file_name,label\n" + "".join(f"{row},{row[2]}\n" for row in rows))
    assert f"Train on the file, {metadata}" in complaint(tmp_path / "data")
    metadata.rename(tmp_path / "data" / "metadata.jsonl")
    assert "is not read\nWrite it as metadata.csv" in complaint(tmp_path / "data")


@pytest.mark.parametrize(
    ("labels", "wrong"),
    [
        (["a", "b", "a|b"], "a|b"),
        (["a", "b", "c;d"], "c;d"),
        (["a", "b", "a, b"], "a, b"),
        (["a", "b", "b a"], "b a"),
        (["a", "b", "a/b"], "a/b"),
        (["0 3", "1", "2"], "0 3"),
        (["['a', 'b']", "a", "b"], "['a', 'b']"),
        (["maillot, tank suit", "maillot", "red wine"], ""),
        (["|", "input/output", "a"], ""),
    ],
)
def test_a_text_of_several_labels_is_no_class(
    tmp_path: Path, labels: list[str], wrong: str
) -> None:
    put(tmp_path, i0=0, i1=1, i2=2)
    path = tmp_path / "list.csv"
    path.write_text("path,label\n" + "".join(f'i{k}.png,"{x}"\n' for k, x in enumerate(labels)))
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 8, 8), np.uint8), y=np.array(labels))
    for data in (path, tmp_path / "a.npz"):
        if not wrong:
            assert labels_of(open_parts(data)[0]) == labels
            continue
        if data == path and wrong in ("a|b", "['a', 'b']"):  # both are labels of other rows
            assert open_parts(data)[0].classes == ("a", "b")
            continue
        message = complaint(data)
        assert f"label {wrong!r} looks like several labels" in message
        if data == path:
            assert f", line {labels.index(wrong) + 2}), column label:" in message
    if wrong:  # the way out that the message names
        (tmp_path / "list.classes.txt").write_text("\n".join(labels))
        assert labels_of(open_parts(path)[0]) == labels


@pytest.mark.parametrize(
    ("folders", "is_refused"),
    [
        (("images", "masks"), True),
        (("JPEGImages", "Annotations", "SegmentationClass"), True),
        (("images", "cats"), False),
        (("masks", "labels"), False),
    ],
)
def test_images_and_their_masks_are_no_two_classes(
    tmp_path: Path, folders: tuple[str, ...], is_refused: bool
) -> None:
    for folder in folders:
        put(tmp_path / "data" / folder, a=0, b=1)
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(tmp_path / "data", "data")
    for path in (tmp_path / "data", tmp_path / "data.tar"):
        if is_refused and path.is_dir():
            assert task_of(open_parts(path)[0]) == "segmentation"
        elif is_refused:
            assert "rename one" in complaint(path)
        else:
            assert open_parts(path)[0].classes == tuple(sorted(folders))


def test_many_columns_that_are_not_read_are_counted() -> None:
    assert LeftOut("a.csv", columns=tuple("abcdefg")).lines == [
        "a.csv: columns that are not read: a, b, c, d, e, 2 others"
    ]


def test_training_says_which_columns_it_does_not_read(tmp_path: Path, flambeau: Any) -> None:
    put(tmp_path, **{f"i{k}": k for k in range(8)})
    rows = "".join(f"i{k}.png,{k % 2},{k}\n" for k in range(8))
    (tmp_path / "list.csv").write_text(f"path,label,weight\n{rows}")
    answer = flambeau("check", tmp_path / "list.csv")
    assert "list.csv: columns that are not read: weight" in answer.out


@pytest.mark.parametrize("name", ["data.yaml", "classes.txt", "Class_Names", "labels.txt", "a.xml"])
def test_a_file_beside_class_folders_that_may_hold_labels_or_names_is_counted(
    tmp_path: Path, name: str
) -> None:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.png").write_bytes(png(1))
    (tmp_path / "README.md").write_text("of no class")
    (source, _) = open_parts(tmp_path)
    assert not sum(sum(one.counts.values()) for one in left_out(source))
    (tmp_path / name).write_text("dog\ncat\n")
    (source, _) = open_parts(tmp_path)
    assert [dict(one.counts) for one in left_out(source)] == [{Path(name).suffix: 1}]
