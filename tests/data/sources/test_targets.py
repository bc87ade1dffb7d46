"""Several labels per image, and numbers, from the tables of users: what is found, and what is refused."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.sources.open_data import open_source, open_sources
from flambeau.data.sources.source import (
    ConcatSource,
    Source,
    SubsetSource,
    hold_out,
    left_out_columns,
    names_digest,
)
from flambeau.data.sources.targets import TargetChoice, separator_of, target_texts, task_of
from flambeau.errors import InputError


def table(folder: Path, text: str, *, name: str = "list.csv") -> Path:
    """A listing, with an image for each of its lines."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for k, line in enumerate(text.splitlines()):
        image = path.parent / re.split("[,;\t]", line)[0]
        if image.suffix == ".png":
            Image.fromarray(np.full((8, 8), k, np.uint8)).save(image)
    return path


def lines(*cells: str, head: str = "path,label") -> str:
    return "\n".join([head, *(f"i{k}.png,{cell}" for k, cell in enumerate(cells))]) + "\n"


def everything(path: Path, **choice: object) -> Source:
    train, val = open_sources(path, choice=TargetChoice(**choice))  # type: ignore[arg-type]
    return ConcatSource([train, val])


def by_name(source: Source) -> dict[str, list[float]]:
    names = [name.rpartition("/")[2] for name in source.names]
    return dict(sorted(zip(names, source.labels.tolist(), strict=True)))


def complaint(path: Path, **choice: object) -> str:
    with pytest.raises(InputError) as caught:
        everything(path, **choice)
    return str(caught.value)


TWENTY = ("a|b", "a", "b", "c|a", "") * 4


def test_labels_in_a_cell_are_found(tmp_path: Path) -> None:
    source = everything(table(tmp_path, lines(*TWENTY)))
    assert (task_of(source), source.classes, separator_of(source)) == (
        "multilabel",
        ("a", "b", "c"),
        "|",
    )
    assert source.labels.dtype == torch.float32
    rows = list(by_name(source).values())
    assert sorted(rows) == sorted([[1, 1, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1], [0, 0, 0]] * 4)
    assert by_name(source)["i3.png"] == [1, 0, 1]


@pytest.mark.parametrize(
    ("cells", "separator", "choice"),
    [
        (("x;y", "x", "y") * 4, ";", {}),
        (("x y", "x", "y") * 4, " ", {"task": "multilabel"}),
        (('"x, y"', "x", "y") * 4, ",", {"task": "multilabel"}),
        (("x/y", "x", "y") * 4, "/", {"task": "multilabel", "separator": "/"}),
        (("\"['x', 'y']\"", "['x']", "['y']") * 4, ",", {"task": "multilabel"}),
    ],
)
def test_separators(
    tmp_path: Path, cells: tuple[str, ...], separator: str, choice: dict[str, str]
) -> None:
    source = everything(table(tmp_path, lines(*cells)), **choice)
    assert (source.classes, separator_of(source)) == (("x", "y"), separator)
    assert by_name(source)["i0.png"] == [1, 1]


def test_a_cell_is_one_class_where_the_user_says_so(tmp_path: Path) -> None:
    source = everything(table(tmp_path, lines(*("a|b", "a", "b") * 4)), task="classification")
    assert (task_of(source), source.classes) == ("classification", ("a", "a|b", "b"))


def test_a_separator_that_may_be_part_of_a_name_is_asked_about(tmp_path: Path) -> None:
    message = complaint(table(tmp_path, lines(*("a, b", "a", "b") * 4).replace("a, b", '"a, b"')))
    assert "'a, b' looks like several labels" in message
    assert "--task multilabel" in message


COLUMNS = lines(*("1,0,", "0,1,1", "1,1,0", "0,0,1") * 3, head="path,cat,dog,owner")


def test_a_column_per_label_is_found_and_empty_is_unknown(tmp_path: Path) -> None:
    source = everything(table(tmp_path, COLUMNS))
    assert (task_of(source), source.classes) == ("multilabel", ("cat", "dog", "owner"))
    assert separator_of(source) is None
    first = by_name(source)["i0.png"]
    assert first[:2] == [1, 0] and math.isnan(first[2])


def test_other_columns_are_named_as_not_read(tmp_path: Path) -> None:
    text = lines(*("1,0,31", "0,1,44") * 6, head="path,cat,dog,age")
    source = everything(table(tmp_path, text))
    assert source.classes == ("cat", "dog")
    [left] = {one.columns for one in source.left_out}  # type: ignore[attr-defined]
    assert left == ("age",)


def test_numbers_with_fractions_are_found(tmp_path: Path) -> None:
    source = everything(table(tmp_path, lines(*("1.5", "2", "", "-3e1") * 5)))
    assert (task_of(source), source.classes) == ("regression", ("label",))
    rows = by_name(source)
    assert (rows["i0.png"], rows["i3.png"]) == ([1.5], [-30])
    assert math.isnan(rows["i2.png"][0])


def test_whole_numbers_are_classes_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    path = table(tmp_path, lines(*("1", "2") * 6))
    assert task_of(everything(path)) == "classification"
    assert everything(path, task="regression").labels.shape == (12, 1)


def test_the_user_names_the_columns(tmp_path: Path) -> None:
    text = lines(*("31,1.5,x", "44,2.5,y") * 6, head="path,age,height,label")
    path = table(tmp_path, text)
    assert everything(path).classes == ("x", "y")
    both = everything(path, columns=("height", "age"))
    assert (task_of(both), both.classes) == ("regression", ("height", "age"))
    assert by_name(both)["i1.png"] == [2.5, 44]
    assert everything(path, columns=("Age",), task="regression").classes == ("age",)


def test_targets_of_a_part_keep_their_task_names_and_order(tmp_path: Path) -> None:
    source = everything(table(tmp_path, lines(*TWENTY)))
    part = SubsetSource(source, torch.arange(3), classes=("c", "a", "b", "d"))
    assert (task_of(part), separator_of(part)) == ("multilabel", "|")
    assert part.labels.tolist() == [
        [row[2], row[0], row[1], 0] for row in source.labels[:3].tolist()
    ]
    with pytest.raises(ValueError, match="'a' is not in classes"):
        SubsetSource(source, torch.arange(20), classes=("b", "c"))


def test_each_part_of_a_split_has_the_rare_labels(tmp_path: Path) -> None:
    cells = ["common"] * 60 + ["common|rare"] * 4 + ["common|once"]
    train, val = open_sources(table(tmp_path, lines(*cells)))
    for part in (train, val):
        assert (part.labels[:, part.classes.index("rare")] == 1).any()
    assert (train.labels[:, train.classes.index("once")] == 1).sum() == 1
    assert {*hold_out(train)[0].names} < {*train.names}


def test_a_name_and_its_targets_are_what_identifies_an_image(tmp_path: Path) -> None:
    one = everything(table(tmp_path / "one", lines(*TWENTY)))
    two = everything(table(tmp_path / "two", lines(*("b|a", *TWENTY[1:]))))
    three = everything(table(tmp_path / "three", lines(*("c|a", *TWENTY[1:]))))
    assert names_digest(one) == names_digest(two) != names_digest(three)
    assert one.fingerprint != three.fingerprint
    assert target_texts(one)[list(one.names).index("0/i3.png")] == "a|c"


def test_images_to_measure_a_model_on_have_its_labels(tmp_path: Path) -> None:
    choice = TargetChoice("multilabel", separator="|")
    path = table(tmp_path, lines(*("b", "b|a", "a") * 3))
    source = open_source(path, ("a", "b", "c"), choice=choice)
    assert source.classes == ("a", "b", "c")
    assert source.labels[0].tolist() == [0, 1, 0]
    with pytest.raises(InputError, match=r"i1.png .*line 3\) has the label 'a', which the model"):
        open_source(path, ("b", "c"), choice=choice)
    numbers = table(tmp_path / "n", lines("1.5,2", "2,3", head="path,age,size"))
    source = open_source(
        numbers, ("size", "age"), choice=TargetChoice("regression", ("size", "age"))
    )
    assert source.labels.tolist() == [[2, 1.5], [3, 2]]


REFUSED = {
    "text in a column of numbers": (
        lines("1.5", "2", "old"), {"task": "regression"},
        r"i2.png \(.*list.csv, line 4\), column label: 'old' is no number\nLeave a missing one empty",
    ),
    "a decimal comma": (
        lines('"1,5"', '"2,5"'), {"task": "regression"}, "'1,5' is no number\nWrite 1.5",
    ),
    "text in a column that was not said to be of numbers": (
        lines("20.5", "80.5", "bright", "80.5"), {},
        r"i2.png \(.*list.csv, line 4\), column label: 'bright' is no number, as most cells of its "
        "column are\nLeave a missing one empty; if they are names of classes, give --task classification",
    ),
    "a decimal comma among points": (
        lines("1.5", "2.5", '"1,5"'), {"columns": ("label",)}, "'1,5' is no number, .*\nWrite 1.5",
    ),
    "a text among numbers with few fractions": (
        lines("20", "1.5", "31", "unknown"), {}, "'unknown' is no number, as most",
    ),
    "infinite among numbers": (lines("1.5", "2.5", "inf"), {}, "'inf' is no number, as most"),
    "infinite": (lines("1.5", "inf"), {"task": "regression"}, "'inf' is no number"),
    "no number": (lines("", ""), {"task": "regression"}, "column 'label' has no number"),
    "always the same": (
        lines(*["1.5"] * 12), {}, "column 'label' is always 1.5 in the images to train on",
    ),
    "too close for float32": (
        lines("100000000.1", "100000000.2"), {}, "too large for what they differ by",
    ),
    "no such column": (
        lines("1,2", head="path,age,size"), {"columns": ("agee",)},
        "line 1 names no column 'agee'; did you mean 'age'?\nIts columns are path, age, size",
    ),
    "neither 0 nor 1": (
        lines("1,0", "0,2", head="path,cat,dog"), {"task": "multilabel", "columns": ("cat", "dog")},
        "i1.png .*, column dog: '2' is neither 0 nor 1, nor empty for unknown",
    ),
    "several columns of a class": (
        lines("x,y", head="path,cat,dog"), {"task": "classification", "columns": ("cat", "dog")},
        "cat, dog: a class stands in one column",
    ),
    "a label twice": (
        lines("a|a", "a", "b|a"), {}, "line 2.*label 'a' stands there twice\nName it once",
    ),
    "no label at all": (lines("", ""), {"task": "multilabel"}, "no image has a label"),
    "on all images": (
        lines(*["a"] * 12), {"task": "multilabel"}, "no label is on some images and not on others",
    ),
    "a class that is only validated on": (
        lines("a,train", "b,train", "a,val", "c,val", head="path,label,split"), {},
        r"i3.png \(.*line 5\) is of class 'c', and no image to train on is\nMove one of it",
    ),
    "a label that is only validated on": (
        lines("a|b,train", "a,train", "b,train", "a|c,val", head="path,label,split"), {},
        r"i3.png \(.*line 5\) has the label 'c', and no image to train on has it",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "choice"),
    [
        (("1.5", "2.5", "old") * 8, {"task": "classification"}),
        (("1.5", "red", "blue") * 8, {}),
        (("20", "21", "unknown") * 8, {}),
        (("1.5", "0", "x") * 8, {}),
    ],
)
def test_names_of_classes_may_be_numbers(
    tmp_path: Path, cells: tuple[str, ...], choice: dict[str, Any]
) -> None:
    train, _ = open_sources(table(tmp_path, lines(*cells)), choice=TargetChoice(**choice))
    assert task_of(train) == "classification"
    assert {*train.classes} == {*cells}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(tmp_path: Path, what: str) -> None:
    text, choice, expected = REFUSED[what]
    assert re.search(expected.replace("?\n", "\\?\n"), complaint(table(tmp_path, text), **choice))


def test_data_of_one_class_per_image_are_for_nothing_else(tmp_path: Path) -> None:
    for name in ("ant", "bee"):
        table(tmp_path / name, "a.png\nb.png\n", name="x.txt")
    message = complaint(tmp_path, task="multilabel")
    assert f"{tmp_path} holds one class per image, and nothing for multilabel" in message
    assert "--target has no effect" in complaint(tmp_path, columns=("age",))


def test_a_metadata_file_of_labels_or_numbers(tmp_path: Path) -> None:
    text = COLUMNS.replace("path,", "file_name,", 1)
    table(tmp_path, text, name="metadata.csv")
    source = everything(tmp_path)
    assert source.classes == ("cat", "dog", "owner")
    sizes = lines("31,1.5", "44,2.5", head="file_name,width,height")
    (tmp_path / "metadata.csv").write_text(sizes)
    assert "outside any class folder" in complaint(tmp_path)  # sizes are no labels


def test_images_to_validate_on_are_read_as_those_to_train_on(tmp_path: Path) -> None:
    path = table(tmp_path, lines(*TWENTY), name="a_train.csv")
    table(tmp_path, lines("a", "", "b"), name="a_val.csv")
    train, val = open_sources(path)
    assert (task_of(train), task_of(val), val.classes) == (
        "multilabel",
        "multilabel",
        train.classes,
    )
    assert val.labels.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]
    path = table(tmp_path, lines(*("1.5", "2") * 5), name="n_train.csv")
    table(tmp_path, lines("1", "2"), name="n_val.csv")
    assert task_of(open_sources(path)[1]) == "regression"
    path = table(tmp_path, lines(*("a", "b") * 5), name="c_train.csv")
    table(tmp_path, lines("a|b", "a"), name="c_val.csv")
    with pytest.raises(
        InputError, match="for multilabel, and those to train on for classification"
    ):
        open_sources(path)


GROUPED = "\n".join(
    ["path,label,patient", *(f"i{k}.png,{'ab'[k % 2]},p{k // 5}" for k in range(60))]
)


def test_images_of_a_group_stay_on_one_side(tmp_path: Path) -> None:
    path = table(tmp_path, GROUPED + "\n")
    train, val = open_sources(path, choice=TargetChoice(group="patient"))
    groups = {*train.groups}, {*val.groups}  # type: ignore[attr-defined]
    assert not groups[0] & groups[1]
    assert (len(train), len(val)) == (50, 10)  # a tenth of 60, in whole groups of five
    again = open_sources(path, choice=TargetChoice(group="patient"))
    assert list(again[1].names) == list(val.names)
    assert left_out_columns(train) == []
    without, _ = open_sources(path)
    assert left_out_columns(without) == ["patient"]
    more = table(tmp_path / "more", GROUPED + "\ni60.png,a,p12\ni61.png,b,p12\n")
    _, val = open_sources(more, choice=TargetChoice(group="patient"))
    assert len({*val.groups} ^ groups[1]) <= 1  # type: ignore[attr-defined]


def test_the_users_own_split_and_a_group_on_both_of_its_sides(tmp_path: Path) -> None:
    rows = [f"i{k}.png,{'ab'[k % 2]},p{k // 4},{'dev' if k > 7 else 'train'}" for k in range(12)]
    path = table(tmp_path, "\n".join(["path,label,patient,fold", *rows]) + "\n")
    train, val = open_sources(path, choice=TargetChoice(group="patient", split="fold"))
    assert (len(train), len(val)) == (8, 4)
    path = table(tmp_path, path.read_text().replace("i9.png,b,p2", "i9.png,b,p1"))
    with pytest.raises(InputError) as caught:
        open_sources(path, choice=TargetChoice(group="patient", split="fold"))
    message = str(caught.value)
    assert "i9.png" in message and "line 11" in message
    assert "is to validate on and of the group 'p1', as is" in message and "i4.png" in message


@pytest.mark.parametrize(
    ("text", "choice", "message"),
    [
        (GROUPED, {"group": "patent"}, "names no column 'patent'; did you mean 'patient'"),
        (GROUPED, {"split": "patient"}, "'p0' is no part of the data"),
        (re.sub(r"p\d+", "p0", GROUPED), {"group": "patient"}, "all images are of one group, 'p0'"),
        (GROUPED.replace(",p3", ","), {"group": "patient"}, "line 17 names no group"),
    ],
)
def test_groups_and_splits_that_are_refused(
    tmp_path: Path, text: str, choice: dict[str, str], message: str
) -> None:
    assert message in complaint(table(tmp_path, text + "\n"), **choice)


def test_a_model_is_measured_on_data_without_these_columns(tmp_path: Path) -> None:
    choice = TargetChoice(
        "classification", ("kind",), group="patient", split="fold", of_others=True
    )
    path = table(tmp_path, lines("a", "b", head="path,kind"))
    assert open_source(path, ("a", "b"), choice=choice).labels.tolist() == [0, 1]
    for name in ("ant", "bee"):
        table(tmp_path / "folders" / name, "a.png\nb.png\n", name="x.txt")
    assert len(open_source(tmp_path / "folders", ("ant", "bee"), choice=choice)) == 4
