"""Each kind of finding on planted cases, and none where nothing is wrong."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.check.check_data import DataCheck, check_data, class_findings
from flambeau.data.check.copy_findings import SamePictures, copy_findings
from flambeau.data.check.finding import HARMFUL, KINDS, Finding, images_text
from flambeau.data.check.image_facts import measure_images
from flambeau.data.check.name_clues import name_findings
from flambeau.data.check.near_copies import NearPair
from flambeau.data.check.single_images import single_image_findings
from flambeau.data.sources.folder import FolderSource
from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.source import SubsetSource, file_of
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.torchvision_sets import PixelSet


def picture(seed: int, side: int = 48) -> Image.Image:
    draw = np.random.default_rng(seed)
    total = np.zeros((side, side, 3))
    for cells in (4, 9, 17):
        noise = Image.fromarray(draw.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        total += np.asarray(noise.resize((side, side), Image.Resampling.BICUBIC), np.float64) / 3
    return Image.fromarray(total.astype(np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, ten images each to train on and four to validate on, nothing wrong with them."""
    names = iter("abcdefghijklmnopqrstuvwxyz"[k] + "xqz" for k in range(26))
    for part, count in (("train", 10), ("val", 3)):
        for label, kind in enumerate(("cat", "dog")):
            place = tmp_path / part / kind
            place.mkdir(parents=True)
            for number in range(count):
                seed = 1000 * count + 100 * label + number
                picture(seed).save(place / f"{next(names)}.png")
    return tmp_path


def files(folder: Path, *parts: str) -> list[Path]:
    return sorted(folder.joinpath(*parts).iterdir())


def check(folder: Path) -> DataCheck:
    return check_data(*open_sources(folder), folder)


def found(checked: DataCheck, kind: str) -> Finding:
    (finding,) = [finding for finding in checked.findings if finding.kind == kind]
    return finding


def names_of(checked: DataCheck, numbers: Any) -> list[str]:
    return sorted(checked.names[number] for number in numbers)


def relative(folder: Path, *paths: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in paths)


def test_nothing_is_found_where_nothing_is_wrong(folder: Path) -> None:
    checked = check(folder)
    assert checked.findings == []
    assert (len(checked.train), len(checked.val)) == (20, 6)


def test_a_copy_of_a_validation_image_leaves_training(folder: Path) -> None:
    (source, near, *_), (target, other, *_) = (
        files(folder, "val", "cat"),
        files(folder, "train", "cat"),
    )
    target.write_bytes(source.read_bytes())
    with Image.open(near) as image:
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).resize((80, 80)).save(other)
    checked = check(folder)
    leaks = found(checked, "leaks")
    assert names_of(checked, leaks.drop) == relative(folder, target, other)
    assert leaks.title == "2 validation images (33.3%) can be seen in training, too"
    assert [row.note.split(";")[0] for row in leaks.rows] == ["the same file", "mirrored"]
    assert checked.leaked == [0, 1]
    assert [finding.kind for finding in checked.findings] == ["leaks"]


def test_copies_within_a_part_leave_one(folder: Path) -> None:
    one, two, three, *_ = files(folder, "train", "cat")
    for target in (two, three):
        target.write_bytes(one.read_bytes())
    with Image.open(files(folder, "val", "dog")[0]) as image:
        image.resize((96, 96), Image.Resampling.BICUBIC).save(files(folder, "val", "dog")[1])
    checked = check(folder)
    assert names_of(checked, found(checked, "copies").drop) == relative(folder, two, three)
    assert found(checked, "copies").count == 2
    near = found(checked, "near-copies")
    assert names_of(checked, near.drop) == relative(folder, files(folder, "val", "dog")[1])
    assert near.rows[0].note == "resized; likeness 1.000"
    assert {finding.kind for finding in checked.findings} == {"copies", "near-copies"}


def test_the_same_pixels_in_another_file_are_a_copy(folder: Path) -> None:
    one, two, *_ = files(folder, "train", "cat")
    with Image.open(one) as image:
        image.save(two.with_suffix(".bmp"))
    two.unlink()
    checked = check(folder)
    assert found(checked, "copies").count == 1


def test_a_fine_texture_is_looked_at_in_full(tmp_path: Path) -> None:
    """A JPEG that is decoded at an eighth shows the means of squares of eight pixels, here all equal."""
    y, x = np.mgrid[:256, :256]
    textures = {
        "train/cat/checks": (x + y) % 2,
        "train/dog/rows": y % 2,
        "val/cat/columns": x % 2,
        "val/dog/twos": (x // 2 + y // 2) % 2,
    }
    for name, texture in textures.items():
        (tmp_path / name).parent.mkdir(parents=True)
        image = Image.fromarray(np.where(texture, 200, 56).astype(np.uint8))
        image.save(tmp_path / f"{name}.jpg", quality=95)
    draw = np.random.default_rng(0)
    for number, label in enumerate(("train/cat", "train/dog", "val/dog") * 2):
        coarse = np.asarray(picture(number // 3, 256), int) // 2 + 64
        dots = draw.permuted(np.tile([60, -60], (128 * 32, 2)), axis=1).reshape(128, 128)
        texture = np.kron(dots, np.ones((2, 2), int))[..., None]
        image = Image.fromarray((coarse + texture).astype(np.uint8))
        image.save(tmp_path / label / f"{number}.jpg", quality=95)
    assert [f for f in check(tmp_path).findings if f.kind in HARMFUL] == []


def test_copies_with_two_labels_all_leave(folder: Path) -> None:
    cat, dog = files(folder, "train", "cat")[0], files(folder, "train", "dog")[0]
    dog.write_bytes(cat.read_bytes())
    near_cat, near_dog = files(folder, "train", "cat")[1], files(folder, "train", "dog")[1]
    with Image.open(near_cat) as image:
        image.resize((96, 96), Image.Resampling.BICUBIC).save(near_dog)
    checked = check(folder)
    contradictions = found(checked, "contradictions")
    assert contradictions.count == 2
    assert [row.note.split(";")[0] for row in contradictions.rows] == ["cat and dog"] * 2
    assert names_of(checked, contradictions.drop) == relative(folder, cat, dog)
    assert names_of(checked, checked.to_drop(HARMFUL)) == relative(folder, cat, dog, near_dog)


def test_a_copy_of_a_copy_that_left_is_kept() -> None:
    """What is near to an image that is left out anyway is not left out for it."""
    facts = measure_images(PixelSet("set", np.zeros((5, 8, 8), np.uint8), [0] * 5, ["a"]))
    pairs = [NearPair(1, 0, False, (6, 0, 0, 0), 0.97), NearPair(2, 1, False, (0, 0, 0, 6), 0.97)]
    same = SamePictures([[2, 3]], pairs, {})
    (copies, near) = copy_findings(same, [0] * 5, ["a"], facts, np.zeros(5, bool), "classification")
    assert (copies.drop, near.drop) == ({3}, {1})
    is_val = np.array([False, True, False, False, False])
    (leaks, copies) = copy_findings(
        SamePictures([[2, 3]], pairs, {1: 0}), [0] * 5, ["a"], facts, is_val, "classification"
    )
    assert (leaks.drop, copies.drop) == ({0, 2, 3}, {3})


@pytest.mark.parametrize(
    ("task", "accused"),
    [
        ("classification", {"equal", "near", "mirrored", "part"}),
        ("multilabel", {"equal", "near", "mirrored"}),
        ("regression", {"equal", "near"}),
        ("segmentation", {"equal"}),
    ],
)
def test_a_part_or_mirror_image_may_have_another_target(task: TaskName, accused: set[str]) -> None:
    """As a crop has another share of each class in its mask, and other objects to count."""
    facts = measure_images(PixelSet("set", np.zeros((8, 8, 8), np.uint8), [0] * 8, ["a"]))
    whole = (0, 0, 0, 0)
    pairs = [
        NearPair(2, 3, False, whole, 0.99),
        NearPair(4, 5, True, whole, 0.99),
        NearPair(6, 7, False, (0, 0, 0, 8), 0.99),
    ]
    names = ("equal", "near", "mirrored", "part")
    found = copy_findings(
        SamePictures([[0, 1]], pairs, {}), [0, 1] * 4, ["a", "b"], facts, np.zeros(8, bool), task
    )
    (contradictions,) = (one for one in found if one.kind == "contradictions")
    assert {names[row.images[0] // 2] for row in contradictions.rows} == accused


def test_a_thousand_copies_of_one_image(folder: Path) -> None:
    for number in range(1000):
        picture(3).save(folder / "train" / "cat" / f"same{number}p.png")
    checked = check(folder)
    copies = found(checked, "copies")
    kinds = [finding.kind for finding in checked.findings]
    assert (copies.count, len(copies.drop), kinds) == (
        999,
        999,
        ["copies", "classes"],
    )
    (row,) = copies.rows
    assert (len(row.images), row.note) == (8, "and 992 more")


def test_single_images(folder: Path) -> None:
    broken, blank, dark, bright, tiny, long_one, grey, *_ = files(folder, "train", "cat")
    broken.write_bytes(broken.read_bytes()[:-200])
    Image.new("RGB", (48, 48), (120, 130, 140)).save(blank)
    pixels = np.asarray(picture(1)) // 8
    Image.fromarray(pixels).save(dark)
    Image.fromarray(255 - np.asarray(picture(2)) // 8).save(bright)
    picture(3, 5).save(tiny)
    picture(4, 240).crop((0, 0, 240, 30)).save(long_one)
    for path in files(folder, "train", "dog"):
        path.unlink()
    for number in range(30):
        picture(1000 + number).save(
            folder / "train" / "dog" / f"{chr(97 + number % 26)}{number}w.png"
        )
    picture(6).convert("L").save(grey)
    picture(7).save(files(folder, "val", "cat")[0], "JPEG")
    checked = check(folder)
    drops = {finding.kind: names_of(checked, finding.drop) for finding in checked.findings}
    assert drops == {
        "unreadable": relative(folder, broken),
        "blank": relative(folder, blank),
        "exposure": relative(folder, dark, bright),
        "tiny": relative(folder, tiny),
        "odd": relative(folder, long_one, grey),
        "endings": relative(folder, files(folder, "val", "cat")[0]),
    }
    (row,) = found(checked, "unreadable").rows
    assert "truncated" in row.note
    assert found(checked, "endings").rows[0].note == "JPEG, by its first bytes"
    assert (
        checked.to_drop(HARMFUL) == found(checked, "unreadable").drop | found(checked, "blank").drop
    )
    assert [f.kind for f in checked.findings] == sorted(drops, key=KINDS.index)


def test_an_image_that_cannot_be_opened_is_told(folder: Path) -> None:
    path = files(folder, "train", "cat")[0]
    path.unlink()
    path.symlink_to(folder / "nowhere.png")
    (row,) = found(check(folder), "unreadable").rows
    assert row.note == "no such file or directory"


def test_a_whole_set_in_grey_is_not_odd() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    facts = measure_images(PixelSet("set", pixels, [0] * 30, ["a"]))
    assert facts.is_grey.all()
    assert single_image_findings(facts, [""] * 30) == []


def test_what_is_known_of_an_image(tmp_path: Path) -> None:
    file = io.BytesIO()
    image = picture(5, 300).resize((300, 200))
    image.save(file, "JPEG", quality=95)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(file.getvalue())
    image.save(tmp_path / "a" / "2.png")
    facts = measure_images(FolderSource(tmp_path), threads=2)
    assert facts.formats.tolist() == ["JPEG", "PNG"]
    assert (facts.width.tolist(), facts.height.tolist()) == ([300, 300], [200, 200])
    levels = np.asarray(image, np.float64)
    np.testing.assert_allclose(facts.spread[1], levels.std((0, 1)).max(), rtol=1e-3)
    np.testing.assert_allclose(facts.spread[0], facts.spread[1], rtol=0.05)
    assert abs(int(facts.darkest[1]) - np.quantile(levels, 0.01, (0, 1)).min()) <= 1
    assert abs(int(facts.brightest[1]) - np.quantile(levels, 0.99, (0, 1)).max()) <= 1
    assert np.abs(facts.small[0].astype(int) - facts.small[1]).max() < 20
    assert len({*facts.file_hash.tolist(), *facts.pixel_hash.tolist(), 0}) == 5


@pytest.mark.parametrize("kind", ["unit", "float"])
def test_floating_point_pixels(kind: str) -> None:
    class FloatSet(PixelSet):
        pixel_kind = kind

    pixels = np.stack([np.asarray(picture(k), np.float32) / 255 for k in range(3)])
    pixels = pixels if kind == "unit" else pixels * 6 - 3
    pixels[2] = np.nan
    facts = measure_images(FloatSet("set", pixels, [0] * 3, ["a"]))  # type: ignore[arg-type]
    assert facts.problems == {2: "pixels that are NaN or infinite"}
    expected = np.asarray(
        picture(0).resize((32, 32), Image.Resampling.BILINEAR).convert("L"), float
    )
    assert np.corrcoef(facts.small[0].ravel(), expected.ravel())[0, 1] > 0.999


def test_uneven_classes() -> None:
    train, val = torch.tensor([0] * 40 + [1] * 4), torch.tensor([0, 0])
    (finding,) = class_findings(train, val, ["cat", "dog"])
    assert [row.note for row in finding.rows] == [
        "cat: 40 to train on; dog: 4",
        "dog: 4 to train on",
        "dog: none to validate on",
    ]
    assert not finding.drop
    assert (
        class_findings(torch.tensor([0] * 40 + [1] * 5), torch.tensor([0, 1]), ["cat", "dog"]) == []
    )


@pytest.mark.parametrize(
    ("names", "row"),
    [
        (["Cat", "cat"], "'Cat' and 'cat'"),
        (["hot dog", "hot_dog"], "'hot dog' and 'hot_dog'"),
        (["caf\u00e9", "cafe\u0301"], r"'caf\xe9' and 'cafe\u0301'"),
        (["cat", "cats"], None),
    ],
)
def test_names_of_classes_that_are_alike(names: list[str], row: str | None) -> None:
    labels = torch.arange(20) % 2
    notes = [row.note for finding in class_findings(labels, labels, names) for row in finding.rows]
    assert notes == ([] if row is None else [row])


def clues(train: list[str], val: list[str], labels: list[int] | None = None) -> list[str]:
    names = [f"train/{name}" for name in train] + [f"val/{name}" for name in val]
    is_val = np.arange(len(names)) >= len(train)
    findings = name_findings(names, labels or [0] * len(names), is_val)
    return [
        " = ".join(names[k] for k in row.images) + f" {row.note}"
        for f in findings
        for row in f.rows
    ]


@pytest.mark.parametrize(
    "name",
    ["bird (1).jpg", "bird_aug.jpg", "bird_aug_3.jpg", "bird - Copy.jpg", "Bird-copy2.png",
     "bird_flipped.jpg", "bird_rot90.jpg", "bird(copy).jpg", "bird 副本.jpg", "bird_crop_2.jpg"],
)  # fmt: skip
def test_the_name_of_a_copy(name: str) -> None:
    (clue,) = clues(["bird.jpg", "plane.jpg"], [name])
    assert (
        clue
        == f"val/{name} = train/bird.jpg the name of a copy, and the image that it is called after"
    )


@pytest.mark.parametrize(
    "name", ["birds.jpg", "blackbird.jpg", "bird_small_wings.jpg", "copy.jpg", "12"]
)
def test_other_names_say_nothing(name: str) -> None:
    assert clues(["bird.jpg", "plane.jpg", "12"], [name, "x.jpg"]) == []


def test_the_same_name_in_both_parts() -> None:
    (clue,) = clues(["cat/DSC_1234567.jpg"], ["cat/DSC_1234567.png", "cat/abc.png"])
    assert clue == "val/cat/DSC_1234567.png = train/cat/DSC_1234567.jpg the same name in both parts"
    assert (
        clues(["cat/001.jpg", "cat/img_7.jpg"], ["cat/001.jpg", "cat/img_7.jpg"] + ["x.png"] * 9)
        == []
    )
    numbered = [f"cat/holiday{k}.jpg" for k in range(20)]
    assert clues(numbered, numbered) == []


def test_a_recording_in_both_parts() -> None:
    train = [f"video{v:02}_frame{f:04}.jpg" for v in range(8) for f in range(6)]
    val = ["video03_frame0006.jpg", "video03_frame0007.jpg", "video99_frame0001.jpg"]
    (clue,) = clues(train, val)
    assert clue == (
        "val/video03_frame0006.jpg = train/video03_frame0000.jpg "
        "one recording, person or place in both parts: video03, 6 to train on, 2 to validate on"
    )


def test_numbers_of_a_collection_are_no_recording() -> None:
    draw = np.random.default_rng(0)
    names = [f"ILSVRC2012_{n:08}.jpg" for n in draw.choice(50_000, 60, replace=False)]
    assert clues(names[:40], names[40:], [*draw.integers(0, 10, 60)]) == []
    of_class = [f"n0{label}_{n}.jpg" for n in range(30) for label in range(3)]
    assert clues(of_class[::2], of_class[1::2], [*[0, 2, 1] * 15, *[1, 0, 2] * 15]) == []


def test_the_files_behind_a_subset(folder: Path) -> None:
    source, _ = open_sources(folder / "train")
    assert isinstance(source, SubsetSource)
    assert file_of(source, 1) == Path(source.describe(1))
    assert file_of(PixelSet("set", np.zeros((1, 2, 2), np.uint8), [0], ["a"]), 0) is None


def test_counts_as_text() -> None:
    assert [images_text(n) for n in (0, 1, 2, 1200)] == [
        "0 images",
        "1 image",
        "2 images",
        "1,200 images",
    ]
