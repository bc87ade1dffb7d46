"""`flambeau pack`: what comes out is what went in, whatever the format, the threads or the kills."""

import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.pack import output_files, writers
from flambeau.data.pack import pack as pack_module
from flambeau.data.pack.encode_images import Conversion, common_layout, layout_of
from flambeau.data.pack.pack import pack, record_crc
from flambeau.data.pack.shard_indexes import write_shard_indexes
from flambeau.data.pack.shard_plan import Split, deal, list_files, named_parts, record_paths
from flambeau.data.pack.verify import verify_file
from flambeau.data.sources.open_data import open_parts, open_source, open_sources
from flambeau.errors import InputError
from flambeau.recipes.data.recordio import IRHeader, RecordReader, RecordWriter, unpack
from flambeau.recipes.data.recordio import pack as pack_record
from plain_disks import keep_open_files

PACKAGE = {"lmdb": "lmdb", "h5": "h5py", "n5": "tensorstore", "zarr": "tensorstore"}
FILES = ("rec", "tfrecord", "tar", "zip", "lmdb", "npz", "h5", "pth")  # hold image files
ARRAYS = ("npz", "npy", "h5", "n5", "zarr", "pth")  # hold pixels
KEEP, RAW = Conversion(), Conversion("raw")
NAMES = ("ant", "bee", "cat")


def packed(src: Path, dst: Path, how: Conversion = KEEP, **settings: Any) -> Path:
    split = {k: settings.pop(k) for k in list(settings) if k in Split.__dataclass_fields__}
    pack(src, dst, how, Split(**split), workers=settings.pop("workers", 2), **settings)
    return dst


def contents(path: Path, classes: tuple[str, ...] = NAMES) -> list[tuple[str, bytes]]:
    """Class and bytes of each image, in an order that every format has."""
    source = open_source(path, classes)
    stored = [source.read(index) for index in range(len(source))]
    data = [image if isinstance(image, bytes) else image.tobytes() for image in stored]
    return sorted(zip((source.classes[k] for k in source.labels.tolist()), data, strict=True))


def on_disk(root: Path) -> list[tuple[str, bytes]]:
    """The same of a folder, by Python alone."""
    return sorted((path.parent.name, path.read_bytes()) for path in root.rglob("*.*"))


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def opened(path: Path) -> Image.Image:
    """An image that keeps no file open."""
    with Image.open(path) as image:
        image.load()
        return image


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Classes ant, bee and cat, of five grey PNG files of 8 x 8 pixels each, all different."""
    generator = np.random.default_rng(0)
    for name in NAMES:
        (tmp_path / "small" / name).mkdir(parents=True)
        for index in range(5):
            pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "small" / name / f"{index:02}.png")
    return tmp_path / "small"


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("ending", FILES)
def test_files_come_back_byte_by_byte(ending: str, photos: Path, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGE.get(ending, "torch"))
    dst = packed(photos, tmp_path / f"packed.{ending}")
    assert contents(dst) == on_disk(photos)
    back = packed(dst, tmp_path / "back")
    assert on_disk(back) == on_disk(photos)


@pytest.mark.parametrize("ending", ARRAYS)
def test_pixels_come_back(ending: str, small: Path, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGE.get(ending, "torch"))
    dst = packed(small, tmp_path / f"packed.{ending}", RAW)
    pixels = [(path.parent.name, np.asarray(opened(path)).tobytes()) for path in small.rglob("*.*")]
    assert contents(dst) == sorted(pixels)
    back = packed(dst, tmp_path / "back")  # as PNG, without loss
    assert contents(packed(back, tmp_path / "again.npz", RAW)) == sorted(pixels)


def test_other_readers_agree(small: Path, tmp_path: Path) -> None:
    """NumPy, h5py, torch, tarfile and lmdb read what was packed, with labels in the order of the classes."""
    h5py, lmdb = pytest.importorskip("h5py"), pytest.importorskip("lmdb")
    paths = sorted(small.rglob("*.png"))
    pixels = np.stack([np.asarray(opened(path)) for path in paths])
    labels = np.repeat([0, 1, 2], 5)
    with np.load(packed(small, tmp_path / "a.npz", RAW)) as npz:
        np.testing.assert_array_equal(npz["images"], pixels)
        np.testing.assert_array_equal(npz["labels"], labels)
    np.testing.assert_array_equal(np.load(packed(small, tmp_path / "a.npy", RAW)), pixels)
    np.testing.assert_array_equal(np.load(tmp_path / "a_labels.npy"), labels)
    with h5py.File(packed(small, tmp_path / "a.h5", RAW)) as file:
        np.testing.assert_array_equal(file["images"][:], pixels)
        np.testing.assert_array_equal(file["labels"][:], labels)
    loaded = torch.load(packed(small, tmp_path / "a.pth", RAW), weights_only=True)
    assert loaded["images"].equal(torch.from_numpy(pixels))
    assert loaded["labels"].tolist() == labels.tolist()
    with tarfile.open(packed(small, tmp_path / "a.tar")) as tar:
        assert tar.getnames()[:2] == ["ant/00.png", "ant/00.cls"]
        assert tar.extractfile("cat/04.cls").read() == b"2"  # type: ignore[union-attr]
        assert tar.extractfile("ant/00.png").read() == paths[0].read_bytes()  # type: ignore[union-attr]
    path = str(packed(small, tmp_path / "a.lmdb"))
    with (
        lmdb.open(path, subdir=False, readonly=True, lock=False) as env,
        env.begin() as transaction,
    ):
        assert transaction.get(b"bee/03.png") == (small / "bee" / "03.png").read_bytes()
    assert (tmp_path / "a.classes.txt").read_text(encoding="utf-8") == "ant\nbee\ncat\n"


def test_n5_is_read_by_tensorstore(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")  # in a process of its own: it ends every fork of this one
    dst = packed(small, tmp_path / "a.n5", RAW)
    script = f"""
import json, sys
import tensorstore as ts
store = ts.open({{"driver": "n5", "kvstore": {{"driver": "file", "path": {str(dst / "images")!r}}}}}).result()
print(json.dumps(store.read().result().T.tolist()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    expected = [np.asarray(opened(path)).tolist() for path in sorted(small.rglob("*.png"))]
    assert json.loads(done.stdout) == expected


def test_names_stay_so_that_the_same_images_are_held_out(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    held = {f"{name}/{p.name}" for name in NAMES for p in (small / name).iterdir()}
    expected = set(open_sources(small)[1].names)
    assert expected < held
    for ending in ("tfrecord", "lmdb"):
        dst = packed(small, tmp_path / f"{ending}-made.{ending}", shuffle=True)
        assert set(open_sources(dst)[1].names) == expected
    rec = packed(small, tmp_path / "a.rec", shuffle=True)
    again = packed(rec, tmp_path / "b.rec", shuffle=True, seed=7)
    assert set(open_sources(rec)[1].names) == set(open_sources(again)[1].names)
    folder = packed(small, tmp_path / "folder", shuffle=True)
    assert set(open_sources(folder)[1].names) == expected


def test_parts_stay_apart(images: Path, tmp_path: Path) -> None:
    made = pack(images, tmp_path / "a.rec", KEEP, Split(), workers=2)
    assert [path.name for path in made.files] == ["a_train.rec", "a_val.rec"]
    assert made.images == 24
    train, val = open_sources(tmp_path / "a_train.rec")
    assert (len(train), len(val), train.classes) == (16, 8, ("a", "b"))
    assert contents(tmp_path / "a_val.rec", ("a", "b")) == on_disk(images / "val")
    packed(images, tmp_path / "again")
    assert tree(tmp_path / "again") == tree(images)


def test_shards_hold_everything_once(small: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    packed(small, tmp_path / "out" / "a.rec", shards=4, shuffle=True)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.rec"))
    assert names == [f"a-{k:05}-of-00004.rec" for k in range(4)]
    sizes = [len(RecordReader(tmp_path / "out" / name)) for name in names]
    assert sizes == [3, 4, 4, 4]
    assert contents(tmp_path / "out") == on_disk(small)


# ---------------------------------------------------------------- images


def test_what_a_kill_beside_a_finished_index_of_shards_has_left_is_removed(
    small: Path, tmp_path: Path
) -> None:
    made = pack(small, tmp_path / "a.rec", KEEP, Split(shards=2), workers=1)
    (left := tmp_path / ".a.rec.flambeau-shards.tmp").mkdir()
    (left / "a.rec").write_bytes(b"1")
    write_shard_indexes([Path(path) for path in made.files])
    assert not left.exists()
    assert (tmp_path / "a.rec.flambeau-shards").exists()


@pytest.mark.parametrize("limit", [140, 200, 300])
def test_arrays_that_the_disk_does_not_take_are_no_arrays(limit: int, tmp_path: Path) -> None:
    """Of the header and 160 bytes: NumPy itself says nothing when the last buffer is not written."""
    arrays = {"images": np.zeros((1, 1, 1, 1), np.uint8), "labels": np.arange(20)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        if limit < 288:
            with pytest.raises(OSError, match="File too large"):
                writers._save_npy(tmp_path / "a.npy", arrays)
        else:
            writers._save_npy(tmp_path / "a.npy", arrays)
            assert np.load(tmp_path / "a_labels.npy").tolist() == list(range(20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_resizing(tmp_path: Path) -> None:
    """Against the whole image, shrunk by Pillow with its own anti-aliasing box: a mean over whole pixels."""
    (tmp_path / "src" / "a").mkdir(parents=True)
    y, x = np.mgrid[:240, :360]
    smooth = np.stack([x * 255 // 360, y * 255 // 240, (x + y) * 255 // 600], 2).astype(np.uint8)
    Image.fromarray(smooth).save(tmp_path / "src/a/wide.png")
    Image.fromarray(smooth[:50, :41]).save(tmp_path / "src/a/small.png")
    small = (tmp_path / "src/a/small.png").read_bytes()

    how = Conversion("png", resize=60)
    dst = packed(tmp_path / "src", tmp_path / "a", how)
    wide = np.asarray(opened(dst / "a/wide.png"))
    expected = smooth.reshape(60, 4, 90, 4, 3).mean((1, 3))
    assert wide.shape == (60, 90, 3)
    assert abs(wide - expected).max() < 3
    assert opened(dst / "a/small.png").size == (41, 50)  # never enlarged

    square = packed(
        tmp_path / "src", tmp_path / "b", Conversion("png", resize=60, center_crop=True)
    )
    found = np.asarray(opened(square / "a/wide.png"))
    middle = smooth[:, 60:300].reshape(60, 4, 60, 4, 3).mean((1, 3))
    assert abs(found - middle).max() < 3

    jpeg = Conversion("jpeg", resize=60, keep_small=True)
    kept = packed(tmp_path / "src", tmp_path / "c", jpeg)
    assert (kept / "a/small.png").read_bytes() == small
    assert opened(kept / "a/wide.jpg").size == (90, 60)


def test_aliasing_is_none() -> None:
    """A fine checkerboard becomes grey; taking every fourth pixel would leave black or white."""
    board = (np.indices((128, 128)).sum(0) % 2 * 255).astype(np.uint8)
    small = Conversion("raw", resize=32).convert(board)
    assert isinstance(small, np.ndarray)
    assert abs(small.astype(int) - 127).max() <= 2


@pytest.mark.parametrize(
    ("encode", "quality", "kind"),
    [("jpeg", 95, "JPEG"), ("png", 95, "PNG"), ("webp", 40, "WEBP"), ("bmp", 95, "BMP")],
)
def test_encodings(encode: str, quality: int, kind: str, photos: Path, tmp_path: Path) -> None:
    dst = packed(photos, tmp_path / "made", Conversion(encode, quality=quality))
    for path in dst.rglob("*.*"):
        found = opened(path)
        original = opened(next(photos.rglob(f"{path.parent.name}/{path.stem}.*")))
        assert found.format == kind
        turned = original.getexif().get(0x0112) == 6
        assert found.size == (original.size[::-1] if turned else original.size)
        assert (found.mode == "L") == (original.mode == "L" and encode != "webp")


def test_quality_is_that_of_the_flag(photos: Path, tmp_path: Path) -> None:
    sizes = [
        sum(
            p.stat().st_size
            for p in packed(photos, tmp_path / f"q{q}", Conversion("jpeg", quality=q)).rglob("*.*")
        )
        for q in (50, 90, 100)
    ]
    assert sizes == sorted(sizes)
    table = opened(tmp_path / "q90/ant/3.jpg").quantization[0]  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG", quality=90)
    assert table == Image.open(buffer).quantization[0]  # type: ignore[attr-defined]


def test_segments_keep_every_pixel(photos: Path, tmp_path: Path) -> None:
    """And files that cannot be cut keep their bytes."""
    segments = pytest.importorskip("flambeau.images.jpeg.scan_segments")
    Image.new("L", (9, 9), 7).save(photos / "bee" / "icon.png")
    dst = packed(photos, tmp_path / "made", Conversion(segments=True))
    cut = 0
    for path in photos.rglob("*.*"):
        made = dst / path.relative_to(photos)
        cut += made.read_bytes() != path.read_bytes()
        assert segments.is_segmented(made.read_bytes()) == (made.read_bytes() != path.read_bytes())
        np.testing.assert_array_equal(np.asarray(opened(made)), np.asarray(opened(path)))
    assert cut == 15  # one photo of each class is CMYK


def test_pixels_are_kept_as_they_are(tmp_path: Path) -> None:
    deep = np.arange(2 * 4 * 5, dtype=np.uint16).reshape(2, 4, 5) * 1000
    np.savez(tmp_path / "a.npz", images=deep, labels=[0, 1])
    dst = packed(tmp_path / "a.npz", tmp_path / "b.npy", RAW)
    np.testing.assert_array_equal(np.load(dst), deep)
    assert np.load(dst).dtype == np.uint16


def test_grey_and_colour_images_share_an_array() -> None:
    grey, colour = np.zeros((4, 5), np.uint8), np.zeros((4, 5, 3), np.uint8)
    layouts = [layout_of(image, RAW) for image in (grey, colour)]
    common = common_layout(layouts)
    assert common is not None
    layout, channels = common
    assert (layout.shape, channels) == ((4, 5, 3), 3)
    made = Conversion("raw", channels=channels).convert(grey)
    assert isinstance(made, np.ndarray)
    assert made.shape == (4, 5, 3)
    assert common_layout([layout_of(grey, RAW), layout_of(grey[1:], RAW)]) is None


# ---------------------------------------------------------------- classes and labels


@pytest.mark.parametrize("ending", FILES)
def test_classes_without_images_keep_their_numbers(
    ending: str, small: Path, tmp_path: Path
) -> None:
    pytest.importorskip(PACKAGE.get(ending, "torch"))
    (small / "bat").mkdir()
    (small / "dog").mkdir()
    names = ["ant", "bat", "bee", "cat", "dog"]
    made = pack(small, tmp_path / f"a.{ending}", KEEP, Split(), workers=2)
    (remark,) = made.remarks
    assert remark == "2 of 5 classes are without any image: bat, dog; they keep their numbers"
    (source, _), path = open_parts(tmp_path / f"a.{ending}"), tmp_path / "back"
    assert (list(source.classes), source.labels.bincount().tolist()) == (names, [5, 0, 5, 5])
    assert (
        "empty folders" in pack(tmp_path / f"a.{ending}", path, KEEP, Split(), workers=2).remarks[0]
    )
    assert sorted(folder.name for folder in path.iterdir()) == names
    assert on_disk(path) == on_disk(small)
    assert packed(path, tmp_path / "again.rec").exists()
    assert (tmp_path / "again.classes.txt").read_text(encoding="utf-8").split() == names


def test_each_part_has_the_folders_of_all_classes(small: Path, tmp_path: Path) -> None:
    for path in (small / "cat").iterdir():
        path.write_bytes(b"no image")
    made = packed(small, tmp_path / "a", train_ratio=0.5, shuffle=True, skip_bad_images=5)
    found = sorted(str(path.relative_to(made)) for path in made.glob("*/*"))
    assert found == [f"{part}/{name}" for part in ("train", "val") for name in NAMES]


def test_numbers_that_a_folder_cannot_keep(small: Path, tmp_path: Path) -> None:
    packed(small, tmp_path / "a.rec")
    (tmp_path / "a.classes.txt").write_text("cat\nant\nbee\n", encoding="utf-8")
    (remark,) = pack(tmp_path / "a.rec", tmp_path / "a", KEEP, Split(), workers=1).remarks
    assert remark.endswith("numbered by their names: 'cat' becomes 2, and was 0")


def test_label_vectors_stay_as_they_are(tmp_path: Path) -> None:
    """Several classes, boxes, and a record with one number among them."""
    labels = [[1.0, 0, 1], [0.0, 0, 0], [4.0, 5, 0.1, 0.25, 0.3, 0.75], 2.0, [0.0, 1, 0]]
    with RecordWriter(tmp_path / "a.rec") as writer:
        for key, label in enumerate(labels):
            data = io.BytesIO()
            Image.new("RGB", (60, 40), (key, 0, 0)).save(data, "PNG")
            writer.write(pack_record(IRHeader(0, label, 0, 0), data.getvalue()), key=70 + key)

    def found(path: Path) -> list[Any]:
        unpacked = [unpack(record)[0].label for record in RecordReader(path)]
        return [label if isinstance(label, float) else label.tolist() for label in unpacked]

    expected = [
        label if isinstance(label, float) else torch.tensor(label).tolist() for label in labels
    ]
    made = packed(tmp_path / "a.rec", tmp_path / "b.rec", Conversion("jpeg", resize=20))
    assert found(made) == expected
    assert list(RecordReader(made).keys) == [70, 71, 72, 73, 74]
    sizes = {Image.open(io.BytesIO(unpack(r)[1])).size for r in RecordReader(made)}
    assert sizes == {(30, 20)}
    packed(made, tmp_path / "c.rec", shards=2)
    shards = sorted(tmp_path.glob("c-*.rec"))
    assert [label for shard in shards for label in found(shard)] == expected
    packed(tmp_path / "c.rec", tmp_path / "d.rec")
    assert found(tmp_path / "d.rec") == expected
    assert not list(tmp_path.glob("*.classes.txt"))
    report = verify_file(made, "rec")
    assert (report.good, report.damaged, report.checksums) == (5, [], True)
    with pytest.raises(
        InputError, match=r"3 labels, which only a \.rec file can hold\n.*\.rec; .*predict"
    ):
        packed(made, tmp_path / "e.tar")
    with pytest.raises(InputError, match="maybe boxes, which a crop would move"):
        packed(made, tmp_path / "e.rec", Conversion("jpeg", center_crop=True))


def test_one_hot_vectors_are_classes(small: Path, tmp_path: Path) -> None:
    """So what is wrong with them is said, and they are not passed on."""
    with RecordWriter(tmp_path / "a.rec") as writer:
        for label in ([1.0, 0.0], [0.0, 1.0]):
            image = (small / "ant" / "00.png").read_bytes()
            writer.write(pack_record(IRHeader(0, label, 0, 0), image))
    (tmp_path / "a.classes.txt").write_text("one\n", encoding="utf-8")
    with pytest.raises(
        InputError, match=r"label 1 is none of the 1 classes that .*a\.classes\.txt names\n"
    ):
        packed(tmp_path / "a.rec", tmp_path / "b.rec")


# ---------------------------------------------------------------- im2rec


def test_lists_are_those_of_im2rec(small: Path, tmp_path: Path) -> None:
    """Against what tools/im2rec.py does, written out: shuffle with seed 100, cut into chunks, then ratios."""
    dst = small / "all.lst"
    split = Split(chunks=2, train_ratio=0.5, test_ratio=0.25, shuffle=True)
    made = list_files(named_parts(small, "list"), dst, split)
    rows = []
    for label, name in enumerate(NAMES):
        for path in sorted((small / name).iterdir()):
            rows.append((len(rows), f"{name}/{path.name}", label))
    random.seed(100)
    random.shuffle(rows)
    size = (15 + 2 - 1) // 2
    expected = {}
    for chunk in range(2):
        lot = rows[chunk * size : (chunk + 1) * size]
        train, test = int(size * 0.5), int(size * 0.25)
        for name, part in (
            ("train", lot[test : test + train]), ("val", lot[test + train :]), ("test", lot[:test]),
        ):  # fmt: skip
            lines = [f"{index:d}\t{label:f}\t{path:s}\n" for index, path, label in part]
            expected[f"all_{chunk}_{name}.lst"] = "".join(lines)
    assert {path.name: text for path, text in made.items()} == expected


def test_a_list_can_be_packed(small: Path, tmp_path: Path) -> None:
    for path, text in list_files(
        named_parts(small, "list"), tmp_path / "all", Split(shuffle=True)
    ).items():
        path.write_text(text, encoding="utf-8")
    dst = packed(tmp_path / "all.lst", tmp_path / "a.rec")
    reader = RecordReader(dst)
    lines = (tmp_path / "all.lst").read_text(encoding="utf-8").splitlines()
    for record, line in zip(reader, lines, strict=True):
        _, label, path = line.split("\t")
        header, image = unpack(record)
        assert header.label == float(label)
        assert image == (tmp_path / path).read_bytes()


@pytest.mark.parametrize("length", [1, 7, 100])
def test_dealing_loses_nothing(length: int) -> None:
    for chunks, train, test in ((1, 1.0, 0.0), (3, 0.8, 0.1), (1, 0.7, 0.3)):
        lots = deal(length, Split(chunks=chunks, train_ratio=train, test_ratio=test, shuffle=True))
        dealt = sorted(index for _, _, lot in lots for index in lot)
        assert len(dealt) == len(set(dealt))
        if train + test < 1 or chunks == 1 == train:
            assert dealt == list(range(length))


# ---------------------------------------------------------------- threads and kills


@pytest.mark.parametrize("ending", ["rec", "tar", "zip", "npz", ""])
def test_the_number_of_threads_changes_nothing(ending: str, photos: Path, tmp_path: Path) -> None:
    found = []
    how = Conversion("raw" if ending == "npz" else "jpeg", resize=32, center_crop=True)
    for workers in (1, 5):
        (tmp_path / f"{workers}").mkdir()
        packed(
            photos,
            tmp_path / f"{workers}" / f"a.{ending}".rstrip("."),
            how,
            workers=workers,
            shuffle=True,
        )
        found.append(tree(tmp_path / f"{workers}"))
    assert found[0] == found[1]


def in_fork(work: Callable[[], object]) -> int:
    """Exit status of a process that does it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
        child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def killed_at(count: int, work: Callable[[], object], below: Path) -> int:
    """Do it in a process that is killed when it touches files below a folder for the n-th time."""
    left = [count]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        touches = event in (
            "open",
            "os.rename",
            "os.mkdir",
            "os.remove",
            "os.rmdir",
            "shutil.rmtree",
        )
        if touches and str(below) in str(args[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def hooked() -> None:
        sys.addaudithook(hook)
        work()

    return in_fork(hooked)


@pytest.mark.parametrize(("ending", "shards"), [(".rec", 2), (".npz", 1), ("", 1)])
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 6])
def test_killed_at_any_moment_it_goes_on(
    ending: str,
    shards: int,
    step: int,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed when it touches a file, some files later each time, it ends with the bytes of one go."""
    monkeypatch.setattr("flambeau.data.pack.shard_plan.FOLDER_UNIT", 6)
    how = RAW if ending == ".npz" else KEEP
    (tmp_path / "whole").mkdir()
    packed(small, tmp_path / "whole" / f"a{ending}", how, shards=shards)
    expected = tree(tmp_path / "whole")
    (tmp_path / "out").mkdir()

    def work() -> None:
        packed(small, tmp_path / "out" / f"a{ending}", how, shards=shards)

    count, status = 0, -1
    while status != 0:
        count += step
        status = killed_at(count, work, tmp_path / "out")
        assert status in (0, signal.SIGKILL)
        finished = {n: d for n, d in tree(tmp_path / "out").items() if not n.startswith(".")}
        assert finished.items() <= expected.items()  # nothing half-written has a final name
    assert tree(tmp_path / "out") == expected
    assert count > 12


def test_finished_shards_are_kept(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = pack_module._Work._convert

    def counted(self: Any, source: Any, index: int) -> Any:
        seen.append(index)
        if stop and index == 12:
            raise KeyboardInterrupt
        return original(self, source, index)

    monkeypatch.setattr(pack_module._Work, "_convert", counted)
    stop = True
    with pytest.raises(KeyboardInterrupt):
        packed(small, tmp_path / "a.rec", shards=3, workers=1)
    stop = False
    seen.clear()
    packed(small, tmp_path / "a.rec", shards=3, workers=1)
    assert seen == [10, 11, 12, 13, 14]
    seen.clear()
    assert pack(small, tmp_path / "a.rec", KEEP, Split(shards=3), workers=1).already
    assert seen == []


def test_another_command_is_refused(small: Path, tmp_path: Path) -> None:
    dst = packed(small, tmp_path / "a.rec")
    before = tree(tmp_path)
    with pytest.raises(InputError, match="made with encode keep, not png\nGive the same command"):
        packed(small, dst, Conversion("png", resize=4, keep_small=False, quality=95))
    Image.new("L", (8, 8)).save(small / "ant" / "new.png")
    with pytest.raises(InputError, match="of other images, or of a source that has changed"):
        packed(small, dst)
    (small / "ant" / "new.png").unlink()
    image = next(small.glob("ant/*.png"))
    whole = image.read_bytes()
    image.write_bytes(whole[:-1] + b"?")  # the same names and sizes: it was taken for done
    with pytest.raises(InputError, match="of other images, or of a source that has changed"):
        packed(small, dst)
    image.write_bytes(whole)
    assert tree(tmp_path) == before
    packed(small, dst, Conversion("png", resize=4), fresh=True)
    assert (tmp_path / "a.rec.old-1" / "a.rec").read_bytes() == before["a.rec"]
    assert (tmp_path / "a.rec.old-1" / "a.idx").read_bytes() == before["a.idx"]
    assert Image.open(io.BytesIO(unpack(RecordReader(dst)[0])[1])).size == (4, 4)


def test_fresh_after_a_kill_between_the_last_renames(small: Path, tmp_path: Path) -> None:
    """Some files have their names, others not: all are set aside, and nothing is in the way."""
    for count in range(30, 60, 3):
        out = tmp_path / f"{count}"
        out.mkdir()
        killed_at(count, lambda out=out: packed(small, out / "a.rec", shards=3), out)
        packed(small, out / "a.rec", fresh=True)
        assert len(RecordReader(out / "a.rec")) == 15
        assert not list(out.glob("a-*"))


def test_class_names_are_there_before_the_data(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, the data would be read with the classes 0, 1 and 2."""
    there: list[list[str]] = []
    move = output_files.PackFiles._move

    def noted(files: output_files.PackFiles, folder: Path) -> None:
        there.append([path.name for path in tmp_path.glob("a.*")])
        move(files, folder)

    monkeypatch.setattr(output_files.PackFiles, "_move", noted)
    packed(small, tmp_path / "a.rec")
    assert there == [["a.classes.txt"]]


@pytest.mark.parametrize(("ending", "beside"), [("rec", "a.idx"), ("npy", "a_labels.npy")])
def test_fresh_after_the_checksums_were_removed(
    small: Path, tmp_path: Path, ending: str, beside: str
) -> None:
    """As the message on a damaged .pack.json says: what lay beside the data was in the way."""
    how = RAW if ending == "npy" else KEEP
    dst = packed(small, tmp_path / f"a.{ending}", how)
    (tmp_path / "a.csv").write_text("mine")
    (tmp_path / f"{dst.name}.pack.json").unlink()
    packed(small, dst, how, fresh=True)
    assert (tmp_path / f"{dst.name}.old-1" / beside).exists()
    assert (tmp_path / "a.csv").read_text() == "mine"
    assert len(contents(dst)) == 15


@pytest.mark.parametrize("at_once", [False, True])
def test_everything_below_a_folder_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x")
    synced: list[int] = []
    monkeypatch.setattr(output_files.os, "fsync", lambda f: synced.append(os.fstat(f).st_ino))
    output_files.sync_below(tmp_path, at_once=at_once)
    one_by_one = {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))}
    assert set(synced) == (set() if at_once and sys.platform == "linux" else one_by_one)


def test_two_at_once_are_refused(small: Path, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / ".a.rec.packing").mkdir()
    with (tmp_path / ".a.rec.packing" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process is packing"):
            packed(small, tmp_path / "a.rec")
    packed(small, tmp_path / "a.rec")


def test_a_full_disk_leaves_nothing_half_written(small: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk that is full."""
    Image.effect_noise((60, 60), 99).save(small / "cat" / "large.png")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            packed(small, tmp_path / "a.rec", shards=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path.name for path in tmp_path.iterdir()} == {"small", ".a.rec.packing"}
    kept = {path.name for path in (tmp_path / ".a.rec.packing").iterdir() if path.is_dir()}
    assert kept == {"00000", "00001"}
    packed(small, tmp_path / "a.rec", shards=3)
    assert not (tmp_path / ".a.rec.packing").exists()


def test_a_full_disk_is_told_where_a_library_has_its_own_error(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("cannot write: 17")

    monkeypatch.setitem(writers._SAVERS, "npz", fail)
    with pytest.raises(RuntimeError, match="cannot write"):
        packed(small, tmp_path / "a.npz", RAW)
    monkeypatch.setattr(output_files, "_RESERVED", 1 << 60)  # so is every disk as good as full
    with pytest.raises(OSError, match="No space left") as told:
        packed(small, tmp_path / "a.npz", RAW)
    assert told.value.filename == str(tmp_path / "a.npz")


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """A function that limits the size of files, which is undone."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    "ending", ["rec", "tfrecord", "tar", "zip", "lmdb", "npz", "npy", "pth", ""]
)
def test_what_hinders_the_disk_is_told_of_dst(
    ending: str, small: Path, tmp_path: Path, limited: Callable[[int], None]
) -> None:
    """Never of a hidden file; also where the images fit, and what is around them does not."""
    pytest.importorskip(PACKAGE.get(ending, "numpy"))
    dst = tmp_path / f"a.{ending}".rstrip(".")
    how = RAW if ending in ARRAYS else KEEP
    for size in (100, 15 * 64 + 1) if ending in ("npz", "pth") else (100,):
        limited(size)
        with pytest.raises(OSError, match="File too large|Input/output") as told:  # noqa: RUF043
            packed(small, dst, how)
        limited(resource.RLIM_INFINITY)
        assert told.value.filename == str(dst)
        assert told.value.errno == errno.EFBIG or (ending, size) == ("pth", 961)
    assert packed(small, dst, how).exists()


LIMITED = """
import resource, sys
from flambeau.cli.command import main
resource.setrlimit(resource.RLIMIT_FSIZE, (15 * 64 + 1, -1))
sys.exit(main(["pack", "small", "sub/a.h5"]))
"""


def test_what_hinders_hdf5_is_told_of_dst(
    small: Path, tmp_path: Path, run_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: the library cannot be used any more where a file could not be closed."""
    pytest.importorskip("h5py")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    done = run_python("-c", LIMITED)
    assert done.returncode == 2, done.stderr
    assert "flambeau: sub/a.h5: File too large; raise the limit (`ulimit -f`)" in done.stderr


@pytest.mark.parametrize("ending", ["rec", "tar", "parquet", ""])
def test_a_disk_like_nfs(
    ending: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that was open kept its folder there, and the command, which had packed all, ended with 2."""
    pytest.importorskip(PACKAGE.get(ending, "numpy"))
    keep_open_files(monkeypatch)
    dst = tmp_path / "nfs" / f"a.{ending}".rstrip(".")
    dst.parent.mkdir()
    assert packed(small, dst).exists()
    assert not [path for path in dst.parent.iterdir() if path.name.startswith(".")]


def test_a_disk_that_takes_no_file(
    small: Path, tmp_path: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(small, tmp_path / "a.rec")
    (tmp_path / "target").mkdir()

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for method in ("mkdir", "write_text"):
        monkeypatch.setattr(Path, method, refuse)
    dst = tmp_path / "target" / "b.rec"
    for command in (("pack", small, dst), ("verify", tmp_path / "a.rec", "--salvage", dst)):
        answer = flambeau(*command)
        assert (answer.code, f"flambeau: {dst}: Read-only file system;" in answer.err) == (2, True)
    dst = tmp_path / "target" / "b"
    answer = flambeau("pack --list", small, dst)
    assert (answer.code, f"flambeau: {dst}: Read-only file system;" in answer.err) == (2, True)


ENTRY = {"images": 1, "crc32": "00000000"}
NOTES = {"config": {}, "classes": [], "images": 1, "bad_images": [], "beside": [], "files": {}}


@pytest.mark.parametrize(
    "text",
    [
        "", "[" * 100_000, "[]", "3", "{}", '{"config": {}, "found": [1]}',
        json.dumps({**NOTES, "files": ["a.rec"]}),
        json.dumps({**NOTES, "files": {"a.rec": 3}}),
        json.dumps({**NOTES, "files": {"a.rec": {"crc32": "zzzzzzzz"}}}),
        json.dumps({**NOTES, "files": {"../a.rec": ENTRY}}),
        json.dumps({**NOTES, "beside": ["/etc/passwd"]}),
    ],
)  # fmt: skip
def test_files_of_our_own_that_are_damaged(
    text: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst, staging = tmp_path / "a.rec", tmp_path / ".a.rec.packing"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            output_files.PackFiles, "publish", lambda *_: signal.raise_signal(signal.SIGINT)
        )
        packed(small, dst)
    for file in (staging / "00000" / ".unit.json", staging / "plan.json"):
        file.write_text(text)
        with pytest.raises(InputError, match=rf"{file.name} is damaged: .*\nGive --fresh"):
            packed(small, dst)
    assert packed(small, dst, fresh=True).exists()
    notes = tmp_path / "a.rec.pack.json"
    notes.write_text(text)
    for use in (lambda: packed(small, dst), lambda: verify_file(dst, "rec")):
        with pytest.raises(InputError, match=r"a\.rec\.pack\.json is damaged: .*\nRemove it"):
            use()
    assert packed(small, dst, fresh=True).exists()  # with its index, which stood in the way
    assert verify_file(dst, "rec").damaged == []


# ---------------------------------------------------------------- what is refused


def test_bad_images(small: Path, tmp_path: Path) -> None:
    (small / "ant" / "01.png").write_bytes(b"no image")
    (small / "cat" / "00.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"ant/01\.png: not a JPEG.*\n.*--skip-bad-images"):
        packed(small, tmp_path / "a.rec")
    with pytest.raises(InputError, match=r"cat/00\.png.* and the 1 that are allowed"):
        packed(small, tmp_path / "a.rec", skip_bad_images=1)
    for dst, how in (("a.rec", KEEP), ("a.npz", RAW), ("a", KEEP)):
        made = pack(small, tmp_path / dst, how, Split(), workers=2, skip_bad_images=2)
        assert made.images == 13
        assert [line.split(": ")[0][-10:] for line in made.bad] == ["ant/01.png", "cat/00.png"]
        facts = json.loads((tmp_path / f"{dst}.pack.json").read_text(encoding="utf-8"))
        assert facts["bad_images"] == made.bad


@pytest.mark.parametrize(
    ("encode", "width", "reason"),
    [
        ("webp", 20000, "20000 x 2 pixels cannot become WebP"),
        ("jpeg", 70000, "become JPEG: .* 65500"),
    ],
)
def test_images_for_which_a_format_has_no_room(
    encode: str, width: int, reason: str, small: Path, tmp_path: Path
) -> None:
    Image.new("L", (width, 2)).save(small / "bee" / "wide.png")
    with pytest.raises(
        InputError, match=rf"bee/wide\.png: .*{reason}.*\nGive another --encode, --res"
    ):
        packed(small, tmp_path / "a.rec", Conversion(encode))
    made = pack(
        small, tmp_path / "a.rec", Conversion(encode), Split(), workers=2, skip_bad_images=1
    )
    assert (made.images, len(made.bad)) == (15, 1)
    assert "bee/wide.png" in made.bad[0]


def test_records_and_memory_that_are_too_small(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    large = small / "cat" / "large.png"
    Image.effect_noise((60, 60), 99).save(large)
    with monkeypatch.context() as patched:
        patched.setattr("flambeau.recipes.data.recordio._MAX_LENGTH", 0x7FF)
        with pytest.raises(InputError, match=rf"{large}: it cannot .* at most 2047 bytes"):
            packed(small, tmp_path / "a.rec")
        made = pack(small, tmp_path / "a.rec", KEEP, Split(), workers=2, skip_bad_images=1)
    assert (made.images, len(RecordReader(tmp_path / "a.rec"))) == (15, 15)
    monkeypatch.setattr("flambeau.data.pack.encode_images._resized", no_memory)
    with pytest.raises(
        InputError, match=r"00\.png: the memory is too small for it\nGive fewer --work"
    ):
        packed(small, tmp_path / "b.rec", Conversion("png"))


@pytest.mark.parametrize(
    ("dst", "how", "split", "message"),
    [
        ("a.7z", KEEP, {}, r"nothing can be packed into \.7z"),
        ("a.rec", RAW, {}, "--encode raw makes pixels, and rec holds image files"),
        ("a.npy", KEEP, {}, "--encode keep makes image files, and npy holds pixels"),
        ("a.npy", RAW, {}, "is 110 x 70, .* an array holds images of one size"),
        ("a", KEEP, {"shards": 2}, "--shards is for packed files"),
        ("a.rec", KEEP, {"shards": 99}, "18 images are too few for 99 files"),
        ("a.rec", KEEP, {"train_ratio": 1.5}, "--train-ratio must be above 0"),
        ("a.rec", KEEP, {"test_ratio": 0.5}, "--test-ratio needs --train-ratio"),
        ("a.rec", KEEP, {"chunks": 0}, "--chunks must be at least 1"),
        ("none/a.rec", KEEP, {}, "there is no folder"),
        ("photos/a.rec", KEEP, {}, "would lie within the data"),
        (".a.rec", KEEP, {}, "does not begin with a dot"),
    ],
)
def test_refused_before_any_work(
    dst: str, how: Conversion, split: Any, message: str, photos: Path, tmp_path: Path
) -> None:
    before = tree(tmp_path)
    with pytest.raises(InputError, match=message) as refused:
        packed(photos, tmp_path / dst, how, **split)
    assert len(str(refused.value).splitlines()) <= 2
    assert tree(tmp_path) == before
    assert not list(tmp_path.glob(".*"))


def test_nothing_is_overwritten(small: Path, tmp_path: Path) -> None:
    (tmp_path / "a.rec").write_text("mine")
    with pytest.raises(InputError, match=r"a\.rec exists"):
        packed(small, tmp_path / "a.rec")
    (tmp_path / "b.classes.txt").write_text("other\nnames\n")
    with pytest.raises(InputError, match=r"b\.classes\.txt exists and names other classes"):
        packed(small, tmp_path / "b.rec")
    assert (tmp_path / "a.rec").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.rec", "b.classes.txt", "small"]


def test_names_that_lead_elsewhere(tmp_path: Path) -> None:
    """Names in a packed file are whatever somebody has put there."""

    class Hostile:
        classes = ("x",)
        labels = torch.zeros(6, dtype=torch.int64)
        names = ("../../up", "/etc/passwd", "x/.hidden", "a\\b\0c", "x/" + "long" * 99, "x/A.b.jpg")

    paths = record_paths(Hostile(), dots=False)  # type: ignore[arg-type]
    for path in paths:
        parts = path.split("/")
        assert parts[0] == "x"
        assert not any(part.startswith(".") or not part or "\0" in part for part in parts)
        assert max(len(part.encode()) for part in parts) <= 200
    assert paths[-1] == "x/A_b"
    Hostile.names = ("a.jpg", "a.png", "A.gif", "b", "b.c", "x/b")
    assert record_paths(Hostile(), dots=True) == [  # type: ignore[arg-type]
        "x/a", "x/a-2", "x/A-3", "x/b", "x/b-2", "x/b-3",
    ]  # fmt: skip
    Hostile.classes = ("../x",)
    assert record_paths(Hostile(), dots=True)[0] == "%2E.%2Fx/a"  # type: ignore[arg-type]


def test_crc_tells_class_and_image_apart() -> None:
    assert record_crc("a", b"bc") == zlib.crc32(b"a\0bc")
    assert record_crc("a", np.array([[98, 99]], np.uint8)) == zlib.crc32(b"a\0bc")
    assert record_crc("ab", b"c") != record_crc("a", b"bc")


def test_names_with_dots_keep_their_classes_apart(tmp_path: Path, small: Path) -> None:
    """Also from the name up to its first dot, where version 0.1 wrote the classes, and still finds them."""
    (tmp_path / "other").mkdir()
    for name in "xy":
        shutil.copytree(small / "ant", tmp_path / "other" / name)
    for dst, src, classes in (
        ("a.v1.rec", small, NAMES), ("a.v2.rec", tmp_path / "other", ("x", "y")), ("a.rec", small, NAMES),
        ("b.v1.rec", small, NAMES), ("b.train.rec", small, NAMES), ("b.v1.zarr", small, NAMES),
    ):  # fmt: skip
        if dst.endswith("zarr"):
            pytest.importorskip("tensorstore")
        packed(src, tmp_path / dst, RAW if dst.endswith("zarr") else KEEP)
        assert open_sources(tmp_path / dst)[0].classes == classes
    assert {path.name for path in tmp_path.glob("*.classes.txt")} == {
        "a.classes.txt", "a.v1.classes.txt", "a.v2.classes.txt", "b.classes.txt", "b.v1.classes.txt",
    }  # fmt: skip
    (tmp_path / "b.v1.classes.txt").unlink()
    (tmp_path / "b.classes.txt").write_text("one\ntwo\nthree\n")
    assert open_sources(tmp_path / "b.v1.rec")[0].classes == ("one", "two", "three")


def test_a_working_folder_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    folder = tmp_path / ".a.rec.packing"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", fails)
        with output_files.locked_folder(folder, tmp_path / "a.rec", plan="plan"):
            pass
    assert (
        f"{folder} is empty, and cannot be removed: input/output error" in capsys.readouterr().err
    )
    with output_files.locked_folder(folder, tmp_path / "a.rec", plan="plan"):
        pass
    assert not folder.exists()
    assert capsys.readouterr().err == ""
