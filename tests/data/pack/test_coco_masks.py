"""Masks from COCO's polygons and runs, the table of them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import matplotlib.path as matplotlib_path
import numpy as np
import pytest
from PIL import Image

from flambeau.data.pack import coco_masks
from flambeau.data.pack.coco_masks import UnfinishedMasks, _in_polygon, _numbers_of, masks_of_coco
from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.source import mask_of
from flambeau.errors import InputError

SQUARE = [4.0, 2.0, 20.0, 2.0, 20.0, 12.0, 4.0, 12.0]
SMALL = [10, 4, 16, 4, 16, 8, 10, 8]


def text_of(counts: list[int]) -> str:
    """COCO's text of run lengths, as `rleToString` of its maskApi.c describes it."""
    text = ""
    for at, count in enumerate(counts):
        value = count - (counts[at - 2] if at > 2 else 0)
        while True:
            code = value & 31
            value >>= 5
            more = value != (-1 if code & 16 else 0)
            text += chr(48 + (code | 32 if more else code))
            if not more:
                break
    return text


def write(folder: Path, annotations: list[dict[str, Any]], **changes: Any) -> Path:
    """annotations/instances_train.json, and four images of 30 x 20 in train/."""
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / "train").mkdir(exist_ok=True)
    images = []
    for number in range(4):
        Image.new("RGB", (30, 20), (60 * number, 9, 9)).save(folder / "train" / f"{number}.jpg")
        images.append({"id": 100 + number, "file_name": f"{number}.jpg", "width": 30, "height": 20})
    content = {
        "images": images,
        "categories": [{"id": 17, "name": "cat"}, {"id": 3, "name": "car"}],
        "annotations": annotations,
        "licenses": [],
    } | changes
    path = folder / "annotations" / "instances_train.json"
    path.write_text(json.dumps(content))
    return path


def one(image: int, category: int, segmentation: Any, **more: Any) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "segmentation": segmentation, **more}


def test_polygons_and_runs_become_masks(tmp_path: Path) -> None:
    runs = np.zeros((20, 30), bool)
    runs[5:9, 7:11] = True
    flat = runs.T.ravel()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flat, [not flat[-1]]])))
    counts = np.diff(np.concatenate([[0], edges])).tolist()
    path = write(
        tmp_path,
        [
            one(100, 17, [SMALL]),  # smaller, so on top of the one that comes after it
            one(100, 3, [SQUARE]),
            one(101, 17, {"size": [20, 30], "counts": counts}),
            one(102, 3, {"size": [20, 30], "counts": text_of(counts)}, iscrowd=1),
            one(102, 17, [SMALL, [22, 2, 28, 2, 28, 6]]),
        ],
    )
    made = masks_of_coco(path, tmp_path / "coco.csv")
    assert made.images == 4
    assert made.names.read_text() == "0 background\n1 car\n2 cat\n"
    masks = [np.asarray(Image.open(tmp_path / "coco_masks" / f"{k}.png")) for k in range(4)]
    expected = np.zeros((20, 30), np.uint8)
    expected[2:12, 4:20] = 1
    expected[4:8, 10:16] = 2
    assert (masks[0] == expected).all()
    assert ((masks[1] == 2) == runs).all() and {*np.unique(masks[1])} == {0, 2}
    assert (masks[2] == 255).sum() > 0 and (masks[2] == 2).sum() > 0
    assert not masks[3].any()
    train, val = open_sources(tmp_path / "coco.csv")
    assert train.classes == ("background", "car", "cat") and len(train) + len(val) == 4
    found = mask_of(train, 0)
    assert found is not None and found.shape == (20, 30)


def test_pixels_are_inside_as_their_middle_is() -> None:
    draw = np.random.default_rng(1)
    middles = np.stack(np.meshgrid(np.arange(40) + 0.5, np.arange(25) + 0.5), 2).reshape(-1, 2)
    for _ in range(200):
        corners = draw.uniform(-5, 45, (draw.integers(3, 12), 2))
        around = corners - corners.mean(0)
        corners = corners[
            np.arctan2(around[:, 1], around[:, 0]).argsort()
        ]  # no edge crosses another
        expected = matplotlib_path.Path(corners).contains_points(middles)
        assert (_in_polygon(corners, (25, 40)).ravel() == expected).all()


def test_the_text_of_runs_is_read_as_it_is_written() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        counts = draw.integers(0, 10 ** draw.integers(1, 6), draw.integers(1, 30)).tolist()
        assert _numbers_of(text_of(counts)) == counts
    for text in ("~~~", "\x00", "oooooooooooooooooooooo", "o"):
        assert _numbers_of(text) is None


@pytest.mark.parametrize(
    ("annotations", "changes", "message"),
    [
        ([one(999, 3, [SQUARE])], {}, "annotation 0 is of image 999, which is not there"),
        ([one(100, 4, [SQUARE])], {}, "annotation 0 is of category 4"),
        ([one(100, 3, [[1, 2, 3, 4]])], {}, "an outline on 0.jpg is '[[1, 2, 3, 4]]'"),
        ([one(100, 3, [[1, 2, 3, 4, 5, "x"]])], {}, "an outline on 0.jpg"),
        ([one(100, 3, [[1, 2, 3, 4, 5, 1e30]])], {}, "an outline on 0.jpg"),
        ([one(100, 3, [])], {}, "an outline on 0.jpg"),
        ([one(100, 3, {"size": [20, 30], "counts": [599]})], {}, "an outline on 0.jpg"),
        ([one(100, 3, {"size": [20, 30], "counts": [10**12]})], {}, "an outline on 0.jpg"),
        ([one(100, 3, {"size": [20, 30], "counts": [-1, 601]})], {}, "an outline on 0.jpg"),
        ([], {"categories": []}, "has 0 categories"),
        ([], {"categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}, "have one id"),
        ([], {"categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]}, "have one name"),
        ([], {"categories": [{"id": 1}]}, "has no 'name'"),
        ([], {"images": []}, "names no image"),
        ([], {"images": 5}, "has no list 'images'"),
        (
            [],
            {"images": [{"id": 1, "file_name": "../x.jpg", "width": 1, "height": 1}]},
            "lies elsewhere",
        ),
        (
            [],
            {"images": [{"id": 1, "file_name": "0.jpg", "width": 9, "height": 9}]},
            "is 30 x 20, and",
        ),
        (
            [],
            {"images": [{"id": 1, "file_name": "9.jpg", "width": 9, "height": 9}]},
            "Looked for it in",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, annotations: list[Any], changes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, annotations, **changes)
    with pytest.raises(InputError) as refused:
        masks_of_coco(path, tmp_path / "coco.csv")
    assert message in str(refused.value)
    assert not (tmp_path / "coco.csv").exists()


def test_nothing_is_overwritten(tmp_path: Path, flambeau: Any) -> None:
    path = write(tmp_path, [one(100, 3, [SQUARE])])
    ran = flambeau("pack", path, tmp_path / "coco_train.csv")
    assert ran.code == 0 and "4 images and masks" in ran.out
    for dst, message in (
        ("coco_train.csv", "exists"),
        ("coco.tar", "Name a DST that ends in .csv"),
    ):
        refused = flambeau("pack", path, tmp_path / dst)
        assert refused.code == 2 and message in refused.err and "Traceback" not in refused.err
    refused = flambeau("pack", path, tmp_path / "b.csv", "--json --fresh")
    assert refused.code == 2 and "--fresh has no effect on polygons" in refused.err
    refused = flambeau("pack", path, tmp_path / "b.csv", "--resize 10")
    assert refused.code == 2 and "--resize has no effect on polygons" in refused.err
    (tmp_path / "coco.classes.txt").write_text("0 background\n1 dog\n")
    refused = flambeau("pack", path, tmp_path / "coco_val.csv")
    assert refused.code == 2 and "names other classes" in refused.err
    path.write_text("{")
    refused = flambeau("pack", path, tmp_path / "c.csv")
    assert refused.code == 2 and "is no JSON" in refused.err


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Killed(BaseException):
    """As if the process ended here."""


def cut_off_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Let a function end the process before its Nth call."""
    calls = 0
    real = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        return real(*arguments)

    monkeypatch.setattr(owner, name, counted)


PLACES = (
    *[(UnfinishedMasks, "write", call) for call in (1, 2, 4)],
    (UnfinishedMasks, "move", 1),
    *[
        (coco_masks, "write_whole", call) for call in (2, 3)
    ],  # the first is the plan, before any mask
)


@pytest.mark.parametrize(("owner", "name", "call"), PLACES)
def test_the_same_call_continues_what_was_cut_off(
    owner: Any, name: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [one(100, 3, [SQUARE]), one(101, 17, [SMALL]), one(103, 3, [SMALL])]
    for folder in ("whole", "cut"):
        source = write(tmp_path / folder, drawn)
    masks_of_coco(tmp_path / "whole" / "annotations" / source.name, tmp_path / "whole" / "a.csv")
    dst = source.parent.parent / "a.csv"
    with monkeypatch.context() as patched, pytest.raises(Killed):
        cut_off_at(patched, owner, name, call)
        masks_of_coco(source, dst)
    assert not dst.exists()
    made = set(source.parent.parent.rglob("*.png"))
    assert len(made) == (call - 1 if name == "write" else 4)
    times = {path.name: path.stat().st_mtime_ns for path in made}
    masks_of_coco(source, dst)
    assert everything(source.parent.parent) == everything(tmp_path / "whole")
    for file in (dst.parent / "a_masks").iterdir():
        assert times.get(file.name, file.stat().st_mtime_ns) == file.stat().st_mtime_ns


def test_what_was_cut_off_of_another_file_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, [one(100, 3, [SQUARE])])
    with monkeypatch.context() as patched, pytest.raises(Killed):
        cut_off_at(patched, UnfinishedMasks, "write", 3)
        masks_of_coco(source, tmp_path / "a.csv")
    source = write(tmp_path, [one(100, 3, [SMALL])])
    masks_of_coco(source, tmp_path / "a.csv")
    mask = np.asarray(Image.open(tmp_path / "a_masks" / "0.png"))
    assert mask.sum() == 24  # of SMALL, 6 x 4
    assert not (tmp_path / ".a.csv.packing").exists()


def test_a_folder_of_the_users_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither before nor after a conversion was cut off; and nothing is left of one that made no mask."""
    source = write(tmp_path, [one(100, 3, [[1, 2]])])
    with pytest.raises(InputError, match="an outline on 0"):
        masks_of_coco(source, tmp_path / "a.csv")
    assert not (tmp_path / ".a.csv.packing").exists()
    source = write(tmp_path, [one(100, 3, [SQUARE])])
    with monkeypatch.context() as patched, pytest.raises(Killed):
        cut_off_at(patched, UnfinishedMasks, "write", 3)
        masks_of_coco(source, tmp_path / "a.csv")
    (tmp_path / "a_masks").mkdir()
    (tmp_path / "a_masks" / "0.png").write_text("mine")
    with pytest.raises(InputError, match="a_masks exists"):
        masks_of_coco(source, tmp_path / "a.csv")
    assert (tmp_path / "a_masks" / "0.png").read_text() == "mine"
    (tmp_path / "a_masks").rename(tmp_path / "mine")
    masks_of_coco(source, tmp_path / "a.csv")
    with pytest.raises(InputError, match=r"a\.csv exists"):
        masks_of_coco(source, tmp_path / "a.csv")


def test_two_conversions_into_one_table_do_not_mix(tmp_path: Path) -> None:
    source = write(tmp_path, [one(100, 3, [SQUARE])])
    with (
        UnfinishedMasks(tmp_path / "a.csv", "another").open(),
        pytest.raises(InputError, match="another process is packing"),
    ):
        masks_of_coco(source, tmp_path / "a.csv")
