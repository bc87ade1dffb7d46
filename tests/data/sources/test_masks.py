"""Images with masks: how they are found in folders and tables, what their numbers mean, what is refused."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.sources.masks.mask_classes import VOC_CLASSES
from flambeau.data.sources.masks.mask_file import decoded_mask
from flambeau.data.sources.open_data import open_parts, open_source, open_sources, open_unlabelled
from flambeau.data.sources.source import (
    ConcatSource,
    Source,
    SubsetSource,
    left_out_lines,
    mask_of,
    mask_problem,
)
from flambeau.data.sources.targets import FOUND, TargetChoice
from flambeau.errors import DecodeError, InputError

WANTED = TargetChoice("segmentation")


def a_mask(k: int, numbers: tuple[int, ...] = (0, 1, 2)) -> NDArray[np.uint8]:
    """(12, 16), with all of the numbers, at places that depend on k."""
    return np.roll(np.resize(np.array(numbers, np.uint8), 192), k).reshape(12, 16)


def put(
    root: Path,
    count: int = 6,
    *,
    images: str = "images",
    masks: str = "masks",
    end: str = ".png",
    first: int = 0,
    numbers: tuple[int, ...] = (0, 1, 2),
) -> Path:
    """Images a0, a1 ... and their masks below a folder."""
    for folder in (images, masks):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for k in range(first, first + count):
        Image.new("RGB", (16, 12), (k, 9, 9)).save(root / images / f"a{k}.jpg")
        Image.fromarray(a_mask(k, numbers)).save(root / masks / f"a{k}{end}")
    return root


def complaint(path: Path, choice: TargetChoice = FOUND) -> str:
    with pytest.raises(InputError) as refused:
        open_sources(path, choice=choice)
    return str(refused.value)


def masks_of(source: Source) -> list[NDArray[np.uint8]]:
    """Those of a copy, as a worker that is not forked gets it."""
    source = pickle.loads(pickle.dumps(source))
    found = [mask_of(source, index) for index in range(len(source))]
    return [mask for mask in found if mask is not None]


# ---------------------------------------------------------------- folders


@pytest.mark.parametrize(
    ("images", "masks", "end"),
    [
        ("images", "masks", ".png"),
        ("img", "annotations", ".png"),
        ("JPEGImages", "SegmentationClass", ".png"),
        ("images", "annotations/trimaps", ".png"),
        ("imgs", "masks", "_mask.gif"),
        ("Images", "Labels", ".bmp"),
    ],
)
def test_a_folder_of_images_and_masks_is_found(
    tmp_path: Path, images: str, masks: str, end: str
) -> None:
    put(tmp_path / "data", images=images, masks=masks, end=end)
    source, val = open_parts(tmp_path / "data")
    assert val is None
    assert source.classes == ("0", "1", "2")
    assert [Path(name).name for name in source.names] == [f"a{k}.jpg" for k in range(6)]
    for k, mask in enumerate(masks_of(source)):
        assert (mask == a_mask(k)).all()
    assert torch.allclose(source.labels, torch.full((6, 3), 1 / 3))


@pytest.mark.parametrize("above", [True, False])
def test_train_and_val_lie_above_or_below_images_and_masks(tmp_path: Path, above: bool) -> None:
    for first, part in enumerate(("train", "val")):
        names = ("images", "masks") if above else (f"images/{part}", f"masks/{part}")
        root = tmp_path / part if above else tmp_path
        put(root, 4, images=names[0], masks=names[1], first=4 * first)
    (tmp_path / "classes.txt").write_text("sky\nroad\ncar\n")
    train, val = open_sources(tmp_path)
    assert (len(train), len(val)) == (4, 4)
    assert train.classes == val.classes == ("sky", "road", "car")
    assert all("val" in name for name in val.names)
    # One part alone, as `evaluate` may be given it, has the names of the whole.
    alone = open_source(tmp_path / "val", train.classes, choice=WANTED) if above else val
    assert alone.classes == train.classes


def test_a_folder_in_a_folder_is_that_folder(tmp_path: Path) -> None:
    put(tmp_path / "VOCdevkit" / "VOC2012")
    assert len(open_parts(tmp_path / "VOCdevkit")[0]) == 6
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "again").symlink_to(tmp_path / "loop")
    assert "masks" in complaint(tmp_path / "loop", WANTED)


def test_pascal_voc_has_lists_and_names(tmp_path: Path) -> None:
    root = put(tmp_path / "VOC2012", 6, images="JPEGImages", masks="SegmentationClass")
    Image.new("RGB", (16, 12)).save(root / "JPEGImages" / "without_mask.jpg")
    (root / "Annotations").mkdir()
    (root / "Annotations" / "a0.xml").write_text("<xml/>")
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("a0\na1\na2\n")
    (lists / "val.txt").write_text("a3\na4\n")
    train, val = open_sources(root)
    assert [Path(name).stem for name in train.names] == ["a0", "a1", "a2"]
    assert [Path(name).stem for name in val.names] == ["a3", "a4"]
    assert train.classes == VOC_CLASSES and len(VOC_CLASSES) == 21


def test_ade20k_has_names_by_number_and_ignores_0(tmp_path: Path) -> None:
    for part in ("training", "validation"):
        put(tmp_path, 3, images=f"images/{part}", masks=f"annotations/{part}")
    (tmp_path / "objectInfo150.txt").write_text(
        "Idx\tRatio\tTrain\tVal\tStuff\tName\n1\t0.16\t11664\t1172\t1\twall\n"
        "2\t0.11\t6046\t612\t1\tbuilding, edifice\n"
    )
    train, _ = open_sources(tmp_path)
    assert train.classes == ("wall", "building, edifice")
    assert sorted({*masks_of(train)[0].ravel().tolist()}) == [0, 1, 255]
    assert torch.allclose(train.labels.sum(1), torch.tensor(2 / 3))


def test_images_without_masks_are_left_out_and_counted(tmp_path: Path) -> None:
    put(tmp_path)
    Image.new("RGB", (16, 12)).save(tmp_path / "images" / "b.jpg")
    source, _ = open_parts(tmp_path)
    assert len(source) == 6
    assert "1 .jpg without a mask" in left_out_lines(source)[0]


def test_a_mask_without_an_image_is_refused(tmp_path: Path) -> None:
    put(tmp_path)
    Image.fromarray(a_mask(0)).save(tmp_path / "masks" / "b.png")
    assert f"{tmp_path}/masks/b.png has no image of its name" in complaint(tmp_path)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    put(tmp_path)
    Image.fromarray(a_mask(0)).save(tmp_path / "masks" / "a0.gif")
    assert "a0.png and a0.gif have one name" in complaint(tmp_path)


def test_what_is_no_folder_of_masks_is_refused_if_masks_are_wanted(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (16, 12)).save(tmp_path / name / "1.png")
    assert "has no folders of images and masks" in complaint(tmp_path, WANTED)
    put(tmp_path / "other", masks="masks", end="_of_something.png")
    assert "masks have no image of their name" in complaint(tmp_path / "other", WANTED)


def test_masks_are_no_images_to_predict_on(tmp_path: Path) -> None:
    put(tmp_path)
    lines: list[str] = []
    [opened] = open_unlabelled([tmp_path], ("0", "1"), say=lines.append)
    assert len(opened.source) == 6
    assert lines[0] == f"{tmp_path}: 6 masks are left out"


# ---------------------------------------------------------------- numbers and names


@pytest.mark.parametrize(
    ("numbers", "choice", "classes", "ignored"),
    [
        ((0, 255), TargetChoice(), ("background", "foreground"), 0.0),
        ((0, 1), TargetChoice(), ("background", "foreground"), 0.0),
        ((0, 1, 255), TargetChoice(), ("0", "1"), 1 / 3),
        ((0, 255), TargetChoice(ignore_index=7), ("0", "255"), 0.0),
        ((1, 2, 3), TargetChoice(ignore_index=3), ("1", "2"), 1 / 3),
        ((10, 20), TargetChoice(), ("10", "20"), 0.0),
    ],
)
def test_numbers_without_names_are_classes(
    tmp_path: Path,
    numbers: tuple[int, ...],
    choice: TargetChoice,
    classes: tuple[str, ...],
    ignored: float,
) -> None:
    put(tmp_path, numbers=numbers)
    source, _ = open_parts(tmp_path, choice=choice)
    assert source.classes == classes
    assert torch.allclose(source.labels.sum(1), torch.tensor(1 - ignored))
    expected = {*range(len(classes))} | ({255} if ignored else set())
    assert {*masks_of(source)[0].ravel().tolist()} == expected


@pytest.mark.parametrize(
    "text", ["0 sky\n1: road\n2,car\n", "sky\nroad\ncar\n", "2 car\n0 sky\n1 road\n"]
)
def test_a_file_names_the_numbers(tmp_path: Path, text: str) -> None:
    put(tmp_path)
    (tmp_path / "classes.txt").write_text(text)
    assert open_parts(tmp_path)[0].classes == ("sky", "road", "car")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sky\nroad\n", "pixels are 2, which"),
        ("0 sky\n0 road\n", "names the number 0 twice"),
        ("0 sky\n1 sky\n", "two numbers the name 'sky'"),
        ("\n", "names no class"),
        ("".join(f"c{k}\n" for k in range(300)), "names 257 numbers or more"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path: Path, text: str, message: str) -> None:
    put(tmp_path)
    (tmp_path / "classes.txt").write_text(text)
    assert message in complaint(tmp_path)


def test_masks_of_one_class_are_refused(tmp_path: Path) -> None:
    put(tmp_path, numbers=(4,))
    assert "the pixels of all masks to train on are of one class only, '4'" in complaint(tmp_path)
    put(tmp_path / "ignored", numbers=(255,))
    assert "all pixels of all masks are 255, which is ignored" in complaint(tmp_path / "ignored")


def test_a_class_of_the_validation_part_alone_is_refused(tmp_path: Path) -> None:
    put(tmp_path, images="images/train", masks="masks/train")
    put(tmp_path, 2, images="images/val", masks="masks/val", first=6, numbers=(0, 1, 2, 3))
    assert "images/val/a6.jpg has pixels of class '3', and no image to train on" in complaint(
        tmp_path
    )


def test_a_number_in_a_single_mask_is_named_with_its_file(tmp_path: Path) -> None:
    put(tmp_path)
    (tmp_path / "classes.txt").write_text("sky\nroad\ncar\n")
    Image.fromarray(a_mask(1, (0, 9))).save(tmp_path / "masks" / "a3.png")
    message = complaint(tmp_path)
    assert f"{tmp_path}/masks/a3.png: 96 pixels are 9" in message
    assert "--ignore-index 9" in message
    assert open_parts(tmp_path, choice=TargetChoice(ignore_index=9))[0].classes[0] == "sky"


# ---------------------------------------------------------------- files of masks


def stored(image: Image.Image, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    image.save(content, kind)
    return content.getvalue()


def palette_png() -> bytes:
    image = Image.fromarray(a_mask(0))
    image.putpalette([7, 200, 30] * 256)
    return stored(image)


@pytest.mark.parametrize(
    "data",
    [
        stored(Image.fromarray(a_mask(0))),
        palette_png(),
        stored(Image.fromarray(a_mask(0).astype(np.uint16))),
        stored(Image.fromarray(np.stack([a_mask(0)] * 3, 2))),
        stored(Image.fromarray(a_mask(0)), "TIFF"),
        stored(Image.fromarray(a_mask(0)), "BMP"),
        a_mask(0),
        a_mask(0).astype(np.int64),
        a_mask(0)[None].astype(np.float32),
    ],
)
def test_numbers_are_read_as_they_are_stored(data: Any) -> None:
    mask = decoded_mask(data)
    assert mask.dtype == np.uint8 and mask.flags.c_contiguous
    assert (mask == a_mask(0)).all()


def test_one_bit_is_0_or_1_and_minus_one_is_ignored() -> None:
    bits = Image.fromarray(a_mask(0) > 0)
    assert (decoded_mask(stored(bits)) == (a_mask(0) > 0)).all()
    assert decoded_mask(np.array([[-1, 0]])).tolist() == [[255, 0]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (stored(Image.new("RGB", (4, 4)), "JPEG"), "a JPEG"),
        (stored(Image.new("RGB", (4, 4), (1, 2, 3))), "in color"),
        (stored(Image.fromarray(np.full((4, 4), 300, np.uint16))), "numbers from 300 to 300"),
        (palette_png()[:-34], ""),
        (b"", ""),
        (b"PK\x03\x04" + bytes(100), "zip"),
        (np.full((4, 4), 0.5), "fractions"),
        (np.full((4, 4), np.nan), "numbers from nan"),
        (np.full((4, 4), -2), "numbers from -2"),
        (np.zeros((4, 4, 3), np.uint8), "a mask of shape (4, 4, 3)"),
        (np.zeros((0, 4), np.uint8), "a mask of shape"),
        (np.array([["a"]]), "it holds whole numbers"),
    ],
)
def test_what_is_no_mask_is_refused(data: Any, message: str) -> None:
    with pytest.raises(DecodeError) as refused:
        decoded_mask(data)
    assert message in str(refused.value)


def test_damaged_masks_never_raise_anything_else() -> None:
    draw = np.random.default_rng(0)
    whole = np.frombuffer(palette_png(), np.uint8)
    for _ in range(300):
        data = whole.copy()
        data[draw.integers(0, len(data), draw.integers(1, 6))] = draw.integers(0, 256)
        try:
            assert decoded_mask(data.tobytes()[: draw.integers(8, len(data) + 1)]).size < 1 << 28
        except DecodeError as error:
            assert str(error)


# ---------------------------------------------------------------- bad masks


@pytest.mark.parametrize("spoil", ["size", "damage"])
def test_a_bad_mask_is_that_of_a_bad_image(tmp_path: Path, spoil: str) -> None:
    put(tmp_path)
    path = tmp_path / "masks" / "a2.png"
    if spoil == "size":
        Image.fromarray(np.zeros((5, 4), np.uint8)).save(path)
    else:
        path.write_bytes(path.read_bytes()[:-30])
    source, _ = open_parts(tmp_path)
    problems = [mask_problem(source, index) for index in range(len(source))]
    assert [index for index, why in enumerate(problems) if why] == [2]
    if spoil == "size":
        assert problems[2] == f"its mask {path} is 4 x 5, and the image 16 x 12"
    whole = {"image_size": 8, "channels": 3, "train": False}
    with pytest.raises(InputError, match=r"a2\.jpg: its mask"):
        ImageDataset(source, **whole).batch(torch.arange(6), torch.zeros(6, dtype=torch.int64))
    kept = ImageDataset(source, **whole, skip_bad=True)
    (images, masks), bad = kept.batch(torch.arange(6), torch.zeros(6, dtype=torch.int64))
    assert bad == [2] and images.shape[0] == masks.shape[0] == 5


def test_an_upright_phone_photo_fits_its_upright_mask(tmp_path: Path) -> None:
    put(tmp_path)
    image = Image.new("RGB", (12, 16))  # stored lying, shown upright as 16 x 12
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "images" / "a1.jpg", exif=exif)
    assert mask_problem(open_parts(tmp_path)[0], 1) is None


def test_what_was_counted_is_kept_and_counted_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path)
    first, _ = open_parts(tmp_path)
    assert (tmp_path / "masks.flambeau-index").is_file()
    with monkeypatch.context() as patch:

        def never(*_: object) -> None:
            raise AssertionError("masks are read again")

        patch.setattr("flambeau.data.sources.masks.masked_source.decoded_mask", never)
        again, _ = open_parts(tmp_path)
    assert again.fingerprint == first.fingerprint and torch.equal(again.labels, first.labels)
    Image.fromarray(a_mask(0, (0, 1, 1))).save(tmp_path / "masks" / "a0.png")
    changed, _ = open_parts(tmp_path)
    assert changed.labels[0].tolist() == pytest.approx([1 / 3, 2 / 3, 0])
    assert changed.fingerprint != first.fingerprint


# ---------------------------------------------------------------- parts, tables


def test_other_orders_of_the_classes_move_the_numbers(tmp_path: Path) -> None:
    put(tmp_path)
    source, _ = open_parts(tmp_path)
    moved = SubsetSource(source, torch.tensor([3, 1]), classes=("2", "x", "0", "1"))
    assert moved.labels[0].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    table = np.array([2, 3, 0], np.uint8)
    assert (mask_of(moved, 0) == table[a_mask(3)]).all()
    both = ConcatSource([moved, source])
    assert (mask_of(both, 2) == both.classes.index("0") + 0 * a_mask(0)).any()
    for index, (one, local) in enumerate([(moved, 0), (moved, 1), (source, 0)]):
        names = np.array(one.classes)[mask_of(one, local)]
        assert (np.array(both.classes)[mask_of(both, index)] == names).all()


def test_the_rarest_class_of_each_image_is_on_both_sides(tmp_path: Path) -> None:
    put(tmp_path, 18)
    for k in (3, 11):
        Image.fromarray(a_mask(k, (0, 1, 2, 7))).save(tmp_path / "masks" / f"a{k}.png")
    train, val = open_sources(tmp_path)
    assert [int((one.labels[:, 3] > 0).sum()) for one in (train, val)] == [1, 1]


def table(root: Path, rows: list[tuple[str, ...]], name: str = "list.csv") -> Path:
    path = root / name
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    return path


def test_a_table_has_a_column_of_masks(tmp_path: Path) -> None:
    put(tmp_path)
    rows = [(f"images/a{k}.jpg", f"masks/a{k}.png", f"g{k // 2}", "x") for k in range(6)]
    path = table(tmp_path, [("path", "mask", "patient", "note"), *rows])
    (tmp_path / "list.classes.txt").write_text("sky\nroad\ncar\n")
    source, val = open_parts(path, choice=TargetChoice(group="patient"))
    assert val is None and source.classes == ("sky", "road", "car")
    assert left_out_lines(source) == [f"{path}: columns that are not read: note"]
    train, val = open_sources(path, choice=TargetChoice(group="patient"))
    groups: Callable[[Any], set[str]] = lambda one: {*one.groups}  # noqa: E731
    assert not groups(train) & groups(val)
    assert (masks_of(source)[4] == a_mask(4)).all()


def test_a_table_with_labels_is_one_of_labels_unless_masks_are_wanted(tmp_path: Path) -> None:
    put(tmp_path)
    rows = [(f"images/a{k}.jpg", f"masks/a{k}.png", "cat" if k % 2 else "dog") for k in range(6)]
    path = table(tmp_path, [("path", "mask", "label"), *rows])
    assert open_parts(path)[0].classes == ("cat", "dog")
    assert open_parts(path, choice=WANTED)[0].classes == ("0", "1", "2")
    other = table(tmp_path, [("path", "outline", "label"), *rows], "other.csv")
    named = TargetChoice("segmentation", ("outline",))
    assert open_parts(other, choice=named)[0].classes == ("0", "1", "2")


def test_a_row_without_a_mask_is_refused_with_its_line(tmp_path: Path) -> None:
    put(tmp_path)
    rows = [(f"images/a{k}.jpg", "" if k == 2 else f"masks/a{k}.png") for k in range(6)]
    path = table(tmp_path, [("path", "mask"), *rows])
    assert f"({path}, line 4) has no mask" in complaint(path)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("name", ["annotation", "label", "outline"])
def test_a_table_of_hugging_face_has_a_column_of_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, name: str
) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("FLAMBEAU_DATA", str(tmp_path / "cache"))
    put(tmp_path)
    files: dict[str, list[dict[str, Any]]] = {"pixel_values": [], name: []}
    for k in range(6):
        for column, file in (("pixel_values", f"images/a{k}.jpg"), (name, f"masks/a{k}.png")):
            files[column].append({"bytes": (tmp_path / file).read_bytes(), "path": file})
    table = pa.table({**files, "note": ["x"] * 6})
    path = tmp_path / f"list.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    if name == "outline":
        assert "outline" in complaint(path)  # two columns of images, or none of labels
    choice = TargetChoice("segmentation", (name,)) if name == "outline" else FOUND
    train, val = open_sources(path, choice=choice)
    assert train.classes == ("0", "1", "2") and (len(train), len(val)) == (5, 1)
    assert left_out_lines(train) == [f"{path}: columns that are not read: note"]
    for source in (train, val):
        for index, mask in enumerate(masks_of(source)):
            k = int(Path(source.names[index]).stem[1:])
            assert (mask == a_mask(k)).all()
            assert source.read(index) == (tmp_path / f"images/a{k}.jpg").read_bytes()
    if name == "outline":
        assert "no column of masks" in complaint(path, WANTED)


def test_a_table_of_images_with_labels_is_one_of_labels(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    put(tmp_path)
    columns: dict[str, list[Any]] = {"image": [], "mask": [], "label": []}
    for k in range(6):
        columns["image"].append({"bytes": (tmp_path / f"images/a{k}.jpg").read_bytes()})
        columns["mask"].append({"bytes": (tmp_path / f"masks/a{k}.png").read_bytes()})
        columns["label"].append(k % 2)
    table = pa.table(columns)
    path = tmp_path / "list.arrow"
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    assert open_parts(path)[0].classes == ("0", "1")
    assert open_parts(path, choice=WANTED)[0].classes == ("0", "1", "2")


_FUNCTION = """
from pathlib import Path
import numpy as np
import torch
from PIL import Image

class Data:
    classes = ["sky", "road", "car"]
    def __init__(self, first, count):
        self.first, self.count = first, count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        k = self.first + index
        mask = Image.open(f"{ROOT}/masks/a{k}.png")
        return f"{ROOT}/images/a{k}.jpg", AS_LABEL(mask)

def pair():
    return Data(0, 4), Data(4, 2)
"""


@pytest.mark.parametrize(
    "as_label",
    [
        "lambda m: m",
        "np.asarray",
        "lambda m: torch.from_numpy(np.array(m)).long()",
        "lambda m: torch.from_numpy(np.array(m))[None]",
    ],
)
def test_a_function_returns_masks(tmp_path: Path, as_label: str) -> None:
    put(tmp_path)
    file = tmp_path / "data.py"
    text = _FUNCTION.replace("{ROOT}", str(tmp_path))
    file.write_text(text.replace("AS_LABEL(mask)", f"({as_label})(mask)"))
    train, val = open_sources(Path(f"{file}:pair"))
    assert train.classes == val.classes == ("sky", "road", "car")
    assert (len(train), len(val)) == (4, 2)
    assert all((mask == a_mask(k)).all() for k, mask in enumerate(masks_of(train)))
    assert all((mask == a_mask(4 + k)).all() for k, mask in enumerate(masks_of(val)))
    again, _ = open_sources(Path(f"{file}:pair"))
    assert again.fingerprint == train.fingerprint
    Image.fromarray(a_mask(0, (0, 1, 1))).save(tmp_path / "masks" / "a1.png")
    assert open_sources(Path(f"{file}:pair"))[0].fingerprint != train.fingerprint


def test_what_a_function_returns_in_place_of_masks_is_refused(tmp_path: Path) -> None:
    put(tmp_path)
    file = tmp_path / "data.py"
    file.write_text(
        "def words():\n    return [(b'x', 'cat'), (b'y', 'dog')]\n"
        f"def lost():\n    return [('{tmp_path}/images/a0.jpg', '{tmp_path}/masks/none.png')]\n"
    )
    message = complaint(Path(f"{file}:words"), WANTED)
    assert "sample 0" in message and "cat" in message
    assert "no such file or directory" in complaint(Path(f"{file}:lost"), WANTED)


def test_a_listing_of_what_is_left_has_masks_and_names(tmp_path: Path, flambeau: Any) -> None:
    put(tmp_path / "data", 8, numbers=(0, 40, 70))
    (tmp_path / "data" / "classes.txt").write_text("0 sky\n40 road\n70 car\n")
    Image.fromarray(np.zeros((12, 16), np.uint8)).save(tmp_path / "data" / "masks" / "a3.png")
    clean = tmp_path / "clean.csv"
    ran = flambeau("check", tmp_path / "data", "--drop labels --out", clean)
    assert ran.code == 0 and "1 image with a mask of one class" in ran.out
    train, val = open_sources(clean)
    assert train.classes == ("sky", "road", "car") and len(train) + len(val) == 7
    assert {*masks_of(train)[0].ravel().tolist()} == {0, 1, 2}
    assert flambeau("check", tmp_path / "data", "--drop labels --force --out", clean).code == 0
    (tmp_path / "clean.classes.txt").write_text("0 sky\n40 street\n70 car\n")
    refused = flambeau("check", tmp_path / "data", "--drop labels --force --out", clean)
    assert refused.code == 2 and "names other classes" in refused.err


@pytest.mark.parametrize("spoil", ["counts", "bad", "missing", "claim", "rubbish"])
def test_a_kept_count_that_cannot_be_one_is_made_again(tmp_path: Path, spoil: str) -> None:
    """The file lies among the data, and may come from elsewhere with them."""
    put(tmp_path)
    first, _ = open_parts(tmp_path)
    kept = tmp_path / "masks.flambeau-index"
    with np.load(kept) as stored:
        arrays = {name: stored[name] for name in stored.files}
    if spoil == "rubbish":
        kept.write_bytes(b"PK" + bytes(200))
    elif spoil == "claim":
        name = b"{'descr': '<u4', 'fortran_order': False, 'shape': (6, 256)"
        data = kept.read_bytes()
        assert name in data
        kept.write_bytes(data.replace(name, name.replace(b"(6, 256)", b"(9**9,)")))
    else:
        arrays |= {"counts": {"counts": arrays["counts"][:2]}, "bad": {"bad": np.array([77])}}.get(
            spoil, {}
        )
        if spoil == "missing":
            del arrays["why"]
        with kept.open("wb") as file:
            np.savez(file, **arrays)
    again, _ = open_parts(tmp_path)
    assert torch.equal(again.labels, first.labels) and mask_problem(again, 0) is None


def test_images_to_predict_on_need_no_clear_pairs(tmp_path: Path) -> None:
    put(tmp_path)
    Image.fromarray(a_mask(0)).save(tmp_path / "masks" / "lone.png")
    [opened] = open_unlabelled([tmp_path], ("0", "1"))
    assert len(opened.source) == 13


def test_check_ignores_a_number_as_training_does(tmp_path: Path, flambeau: Any) -> None:
    put(tmp_path / "data", 8)
    (tmp_path / "data" / "classes.txt").write_text("sky\nroad\n")
    refused = flambeau("check", tmp_path / "data")
    assert refused.code == 2 and "--ignore-index 2" in refused.err
    clean = tmp_path / "clean.csv"
    refused = flambeau("check", tmp_path / "data", "--ignore-index 2 --out", clean)  # all are blank
    assert refused.code == 2 and "would leave no image to train on" in refused.err
    assert not clean.exists()
    ran = flambeau("check", tmp_path / "data", "--ignore-index 2 --drop labels --out", clean)
    assert ran.code == 0 and "8 images of 2 classes" in ran.out
    assert f"flambeau train {clean} --ignore-index 2" in ran.err
    assert open_sources(clean, choice=TargetChoice(ignore_index=2))[0].classes == ("sky", "road")
