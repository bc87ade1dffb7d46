"""Masks in packed files: what is written is read back, checked, saved from damage, and learned from."""

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image

from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shard_plan import WITH_MASKS, Split
from flambeau.data.pack.verify import verify_file
from flambeau.data.sources.open_data import open_parts, open_source, open_sources
from flambeau.data.sources.source import Source, image_blocks, mask_of, mask_values
from flambeau.data.sources.targets import FOUND, TargetChoice, task_of
from flambeau.errors import InputError

NUM = 8
Flambeau = Callable[..., Any]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAMBEAU_DATA", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def a_mask(k: int, numbers: tuple[int, ...]) -> NDArray[np.uint8]:
    """(12, 16), with all of the numbers, at places that depend on k."""
    return np.roll(np.resize(np.array(numbers, np.uint8), 192), k).reshape(12, 16)


def put(
    numbers: tuple[int, ...] = (0, 3, 7, 255), classes: str | None = "0 sky\n3 road\n7 car\n"
) -> Path:
    """Images and masks of equal names, in folders."""
    root = Path("street")
    for folder in ("images/left", "masks/left"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for k in range(NUM):
        Image.new("RGB", (16, 12), (k, 9, 9)).save(root / f"images/left/a.{k}.jpg")
        Image.fromarray(a_mask(k, numbers)).save(root / f"masks/left/a.{k}.png")
    if classes is not None:
        (root / "classes.txt").write_text(classes)
    return root


def packed(
    src: Path, dst: str, choice: TargetChoice = FOUND, how: Conversion | None = None, **split: Any
) -> Path:
    pack(src, Path(dst), how or Conversion(), Split(**split), workers=2, choice=choice)
    return Path(dst)


def masks_of(source: Source) -> list[NDArray[np.uint8]]:
    found = [mask_of(source, index) for index in range(len(source))]
    return [mask for mask in found if mask is not None]


def same(one: Source, other: Source) -> None:
    """Equal images, masks and classes, in one order."""
    assert (task_of(one), one.classes, mask_values(one)) == (
        task_of(other),
        other.classes,
        mask_values(other),
    )
    assert [one.read(k) for k in range(len(one))] == [other.read(k) for k in range(len(other))]
    np.testing.assert_array_equal(masks_of(one), masks_of(other))
    np.testing.assert_array_equal(one.labels, other.labels)


def a_tar(path: str, samples: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as file:
        for name, content in samples.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return Path(path)


def png(array: NDArray[np.uint8]) -> bytes:
    target = io.BytesIO()
    Image.fromarray(array).save(target, "png")
    return target.getvalue()


def samples(
    count: int = NUM, numbers: tuple[int, ...] = (0, 1, 2), end: str = "mask.png"
) -> dict[str, bytes]:
    found = {}
    for k in range(count):
        found[f"{k:02}.jpg"] = jpeg(k)
        found[f"{k:02}.{end}"] = png(a_mask(k, numbers))
    return found


def jpeg(k: int) -> bytes:
    target = io.BytesIO()
    Image.new("RGB", (16, 12), (k, 9, 9)).save(target, "jpeg")
    return target.getvalue()


@pytest.mark.parametrize("ending", WITH_MASKS)
def test_masks_are_read_as_they_were_written(ending: str) -> None:
    source, _ = open_parts(put())
    made = packed(Path("street"), f"a.{ending}")
    again, val = open_parts(made)
    assert val is None
    assert again.classes == ("sky", "road", "car")
    same(source, again)
    report = verify_file(made, ending, deep=True)
    assert (report.good, report.damaged, report.not_read, report.checksums) == (NUM, [], [], True)
    assert Path("a.classes.txt").read_text() == "0 sky\n3 road\n7 car\n"
    assert open_source(made, again.classes).classes == again.classes
    blocks = image_blocks(again)  # neighbours that may be read together
    assert blocks is None or blocks.sum() == NUM
    assert (blocks is None) == (ending not in ("tar", "zip", "parquet", "arrow"))


@pytest.mark.parametrize("ending", WITH_MASKS)
def test_shards_have_the_classes_of_all_of_them(ending: str) -> None:
    """Each shard has other numbers in its masks, and no file names them."""
    root = put(numbers=(0, 1), classes=None)
    for k in range(NUM):
        mask = np.full((12, 16), k, np.uint8)
        mask[0, 0] = 0
        Image.fromarray(mask).save(root / f"masks/left/a.{k}.png")
    packed(root, f"a.{ending}", shards=4)
    assert not list(Path().glob("*.flambeau-index"))  # of packing
    same(open_parts(root)[0], open_parts(Path(f"a.{ending}"))[0])
    Path("a.classes.txt").unlink()
    source, _ = open_parts(Path(f"a.{ending}"))
    assert source.classes == tuple(map(str, range(NUM)))
    assert mask_values(source) == tuple(range(NUM))
    assert [int(mask[5, 5]) for mask in masks_of(source)] == [*range(NUM)]


def test_shards_of_two_numbers_are_background_and_foreground() -> None:
    root = put(numbers=(0,), classes=None)
    Image.fromarray(a_mask(0, (0, 255))).save(root / "masks/left/a.7.png")
    packed(root, "a.tar", shards=4)
    Path("a.classes.txt").unlink()
    source, _ = open_parts(Path("a.tar"))
    # Written as 0 and 1, since 255 would be what is ignored.
    assert (source.classes, mask_values(source)) == (("background", "foreground"), (0, 1))
    assert set(np.unique(masks_of(source)[7])) == {0, 1}


@pytest.mark.parametrize("ending", WITH_MASKS)
def test_an_ignored_number_stays_ignored(ending: str) -> None:
    choice = TargetChoice(ignore_index=3)
    root = put(numbers=(0, 3, 255), classes="0 sky\n255 car\n")
    made = packed(root, f"a.{ending}", choice)
    source, _ = open_parts(made)
    assert source.classes == ("sky", "car")
    np.testing.assert_array_equal(masks_of(source), masks_of(open_parts(root, choice=choice)[0]))
    assert Path("a.classes.txt").read_text() == "0 sky\n1 car\n"


@pytest.mark.parametrize("square", [False, True])
def test_masks_are_resized_with_their_images(square: bool) -> None:
    how = Conversion(encode="png", resize=6, center_crop=square)
    made = packed(put(), "a.tar", how=how)
    source, _ = open_parts(made)
    for k, mask in enumerate(masks_of(open_parts(Path("street"))[0])):
        image = Image.fromarray(mask[:, 2:14] if square else mask)
        expected = image.resize((6, 6) if square else (8, 6), Image.Resampling.NEAREST)
        np.testing.assert_array_equal(masks_of(source)[k], np.asarray(expected))
        data = source.read(k)
        assert isinstance(data, bytes)
        assert Image.open(io.BytesIO(data)).size == expected.size
    assert verify_file(made, "tar", deep=True).damaged == []


def test_parts_get_files_of_their_own() -> None:
    root = put()
    for part in ("train", "val"):
        for folder in ("images", "masks"):
            (root / folder / part).mkdir()
            for path in (root / folder / "left").iterdir():
                if (int(path.suffixes[0][1:]) < 6) == (part == "train"):
                    path.rename(root / folder / part / path.name)
            if part == "val":
                (root / folder / "left").rmdir()
    packed(root, "a.tar")
    train, val = open_sources(Path("a_train.tar"))
    assert (len(train), len(val)) == (6, 2)
    assert train.classes == val.classes == ("sky", "road", "car")


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("ending", ["tar", "zip", "arrow"])
def test_a_mask_that_changed_is_found_and_left_out_of_what_is_saved(ending: str) -> None:
    root = put()
    noise = np.random.default_rng(0).choice(np.array([0, 3, 7], np.uint8), (12, 16))
    Image.fromarray(noise).save(root / "masks/left/a.3.png")
    made = packed(root, f"a.{ending}")
    data = made.read_bytes()
    at = data.index(png(noise)) + len(png(noise)) // 2
    made.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    report = verify_file(made, ending, salvage=Path(f"saved.{ending}"))
    assert (len(report.damaged), report.good) == (1, NUM - 1)
    saved, _ = open_parts(Path(f"saved.{ending}"))
    kept = [mask for k, mask in enumerate(masks_of(open_parts(root)[0])) if k != 3]
    np.testing.assert_array_equal(masks_of(saved), kept)
    assert saved.classes == ("sky", "road", "car")


def test_a_damaged_page_of_masks_is_found() -> None:
    made = packed(put(), "a.parquet")
    data = made.read_bytes()
    start = pq.read_metadata(made).row_group(0).column(2)
    assert start.path_in_schema == "mask.bytes"
    at = start.data_page_offset + start.total_compressed_size // 2
    made.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    assert verify_file(made, "parquet").damaged


def test_a_mask_of_another_size_is_damage_without_checksums() -> None:
    content = samples()
    content["03.mask.png"] = png(np.zeros((4, 4), np.uint8))
    report = verify_file(a_tar("a.tar", content), "tar")
    [damage] = report.damaged or report.not_read
    assert damage.record == "sample 03"
    assert damage.what == "its mask is 4 x 4, and the image 16 x 12"


def test_a_bad_mask_is_no_image_to_pack() -> None:
    root = put()
    (root / "masks/left/a.5.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    with pytest.raises(InputError, match=r"a\.5\.jpg: its mask .*a\.5\.png"):
        packed(root, "a.tar")
    made = pack(root, Path("b.tar"), Conversion(), Split(), workers=1, skip_bad_images=1)
    assert (made.images, len(made.bad)) == (NUM - 1, 1)


# ---------------------------------------------------------------- tars of others


@pytest.mark.parametrize(
    "end", ["mask.png", "seg.png", "segmentation.tif", "masks.png", "label_map.png"]
)
def test_a_mask_lies_beside_its_image(end: str) -> None:
    source, _ = open_parts(a_tar("a.tar", samples(end=end)))
    assert (task_of(source), source.classes) == ("segmentation", ("0", "1", "2"))
    np.testing.assert_array_equal(masks_of(source), [a_mask(k, (0, 1, 2)) for k in range(NUM)])
    assert source.describe(2) == f"{Path('a.tar').absolute()}, 02.jpg"


def test_names_stand_beside_the_tar() -> None:
    Path("classes.txt").write_text("sky\nroad\ncar\n")
    source, _ = open_parts(a_tar("a.tar", samples()))
    assert source.classes == ("sky", "road", "car")


def test_a_missing_mask_is_named() -> None:
    content = samples()
    del content["04.mask.png"]
    with pytest.raises(InputError) as refused:
        open_parts(a_tar("a.tar", content))
    assert str(refused.value).startswith(f"{Path('a.tar').absolute()}, 04.jpg has no mask")


def test_labels_beside_masks_are_classes_unless_masks_are_wanted() -> None:
    content = {}
    for name, data in samples().items():
        content[name] = data
        if name.endswith("mask.png"):
            content[name.replace("mask.png", "cls")] = b"%d" % (int(name[:2]) % 2)
    path = a_tar("a.tar", content)
    assert open_parts(path)[0].classes == ("0", "1")
    source, _ = open_parts(path, choice=TargetChoice("segmentation"))
    assert (task_of(source), len(source.classes)) == ("segmentation", 3)
    assert open_parts(path)[0].classes == ("0", "1")


def test_folders_beside_masks_are_classes_where_these_are_wanted() -> None:
    content = {f"{'ab'[int(name[:2]) % 2]}/{name}": data for name, data in samples().items()}
    path = a_tar("a.tar", dict(sorted(content.items())))
    assert task_of(open_parts(path)[0]) == "segmentation"
    source, _ = open_parts(path, choice=TargetChoice("classification"))
    assert (task_of(source), source.classes) == ("classification", ("a", "b"))


def test_ignore_index_is_for_masks() -> None:
    choice = TargetChoice(ignore_index=2)
    assert open_parts(a_tar("a.tar", samples()), choice=choice)[0].classes == ("0", "1")
    plain = a_tar("b.tar", {"0.jpg": jpeg(0), "0.cls": b"0", "1.jpg": jpeg(1), "1.cls": b"1"})
    with pytest.raises(InputError, match="has no masks, so --ignore-index has no effect"):
        open_parts(plain, choice=choice)


# ---------------------------------------------------------------- from the command line


def test_other_formats_refuse_masks(flambeau: Flambeau) -> None:
    put()
    for ending in ("rec", "tfrecord", "h5", "zarr"):
        result = flambeau(f"pack street a.{ending}")
        assert result.code == 2
        assert (
            f"street has masks, and {'hdf5' if ending == 'h5' else ending} here keeps none"
            in result.err
        )
        assert "Name a DST that ends in one of .tar .zip .parquet .arrow" in result.err
    assert "and a folder keeps none" in flambeau("pack street folder").err


def test_packed_masks_are_learned_from(flambeau: Flambeau) -> None:
    put(numbers=(0, 3, 9), classes="0 sky\n3 road\n")
    assert flambeau("pack street a.tar").code == 2
    assert flambeau("pack street a.parquet --ignore-index 9").code == 0
    assert flambeau("verify a.parquet").code == 0
    assert flambeau("train a.parquet --epochs 1 --image-size 32 --out run").code == 0
    assert flambeau("evaluate run a.parquet --all").code == 0
    assert flambeau("predict run a.parquet --masks found").code == 0
    made = np.asarray(Image.open(next(Path("found").rglob("*.png"))))
    assert {*np.unique(made)} <= {0, 3}


def test_a_table_holds_hugging_faces_features() -> None:
    made = packed(put(), "a.parquet")
    table = pq.read_table(made)
    assert table.column_names == ["image", "mask"]
    assert table.schema.field("mask").type == pa.struct(
        [("bytes", pa.binary()), ("path", pa.string())]
    )
    assert b'"mask": {"_type": "Image"}' in table.schema.metadata[b"huggingface"]
