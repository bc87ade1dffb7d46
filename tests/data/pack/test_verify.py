"""`flambeau verify FILE`: damage is found where it was put, nothing crashes, and the rest is saved."""

import errno
import io
import json
import os
import random
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flambeau.data.pack import output_files
from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.scan import RECOVERY
from flambeau.data.pack.shard_plan import Split
from flambeau.data.pack.verify import (
    Damage,
    FileReport,
    check_salvage,
    packed_files,
    verify_file,
)
from flambeau.data.sources.open_data import open_source
from flambeau.errors import InputError
from flambeau.recipes.data.recordio import IRHeader, RecordReader, RecordWriter
from flambeau.recipes.data.recordio import pack as pack_record
from flambeau.recipes.data.tf_example import build_example
from flambeau.recipes.data.tfrecord import TFRecordReader, TFRecordWriter

PACKAGE = {"lmdb": "lmdb", "h5": "h5py", "n5": "tensorstore", "zarr": "tensorstore"}
ENDINGS = ("rec", "tfrecord", "tar", "zip", "lmdb", "npz", "npy", "h5", "n5", "zarr", "pth", "")
NUM_IMAGES = 12


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classes a and b, of six grey PNG files of noise each."""
    root = tmp_path_factory.mktemp("small")
    generator = np.random.default_rng(0)
    for name in "ab":
        (root / name).mkdir()
        for index in range(6):
            pixels = generator.integers(0, 256, (32, 32), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    return root


def packed(small: Path, folder: Path, ending: str) -> tuple[Path, str]:
    pytest.importorskip(PACKAGE.get(ending, "numpy"))
    dst = folder / f"p.{ending}".rstrip(".")
    encode = "raw" if ending in ("npz", "npy", "h5", "n5", "zarr", "pth") else "keep"
    pack(small, dst, Conversion(encode), Split(), workers=1)
    return packed_files(dst)[0]


def verify(path: Path, kind: str, **settings: Any) -> FileReport:
    told: list[Damage] = []
    report = verify_file(path, kind, say=told.append, workers=2, **settings)
    assert sorted(map(repr, told)) == sorted(map(repr, report.damaged + report.not_read))
    assert all(line.what and "\n" not in line.what for line in told)
    return report


def flip(path: Path, at: int, count: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for place in range(at, at + count):
        data[place] ^= 0xFF
    path.write_bytes(data)


def images_of(path: Path) -> list[tuple[str, bytes]]:
    source = open_source(path, ("a", "b"))
    stored = (source.read(index) for index in range(len(source)))
    data = [image if isinstance(image, bytes) else image.tobytes() for image in stored]
    return list(zip((source.classes[k] for k in source.labels.tolist()), data, strict=True))


# ---------------------------------------------------------------- all formats


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_whole_is_called_whole(ending: str, small: Path, tmp_path: Path) -> None:
    path, kind = packed(small, tmp_path, ending)
    for deep in (False, True):
        report = verify(path, kind, deep=deep)
        assert (report.good, report.damaged, report.checksums) == (NUM_IMAGES, [], True)
    (tmp_path / f"{path.name}.pack.json").unlink()
    report = verify(path, kind, deep=True)
    assert (report.good, report.damaged, report.checksums) == (NUM_IMAGES, [], False)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_changed_byte_of_an_image_is_found_and_the_rest_saved(
    ending: str, small: Path, tmp_path: Path
) -> None:
    """A byte in the middle of one image's data; which one is known from the bytes that were packed."""
    path, kind = packed(small, tmp_path, ending)
    before = images_of(path)
    name, victim = before[7]
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    (file,) = (p for p in files if victim in p.read_bytes())
    flip(file, file.read_bytes().index(victim) + len(victim) // 2)

    saved = tmp_path / f"saved{path.suffix}"
    check_salvage(path, kind, saved)
    report = verify(path, kind, salvage=saved)
    assert (report.good, len(report.damaged), report.saved) == (NUM_IMAGES - 1, 1, True)
    assert "7" in report.damaged[0].record or f"{name}/" in report.damaged[0].record
    after = images_of(saved)
    assert sorted(after) == sorted(before[:7] + before[8:])
    assert verify(saved, kind).damaged == []


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_missing_image_is_missed(ending: str, small: Path, tmp_path: Path) -> None:
    """The file of eleven images, with what was noted of twelve."""
    less = tmp_path / "less"
    for path in sorted(small.rglob("*.png"))[:-1]:
        (less / path.parent.name).mkdir(parents=True, exist_ok=True)
        (less / path.parent.name / path.name).write_bytes(path.read_bytes())
    (tmp_path / "all").mkdir()
    whole, _ = packed(small, tmp_path / "all", ending)
    path, kind = packed(less, tmp_path, ending)
    notes = f"{path.name}.pack.json"
    (tmp_path / notes).write_bytes((whole.parent / notes).read_bytes())
    report = verify(path, kind)
    assert report.damaged == [Damage("the file", None, "an image that was packed is missing")]


@pytest.mark.parametrize(
    "ending", [ending for ending in ENDINGS if ending not in ("", "n5", "zarr")]
)
def test_no_damage_stops_it(ending: str, small: Path, tmp_path: Path) -> None:
    """Cut anywhere, bytes flipped, zeroed or repeated anywhere: always a report, never another exception."""
    path, kind = packed(small, tmp_path, ending)
    whole = path.read_bytes()
    generator = random.Random(0)
    for turn in range(40):
        data = bytearray(whole)
        at = generator.randrange(len(data))
        if turn % 4 == 0:
            del data[at:]
        elif turn % 4 == 1:
            data[at : at + 64] = generator.randbytes(len(data[at : at + 64]))
        elif turn % 4 == 2:
            data[at : at + 600] = bytes(len(data[at : at + 600]))
        else:
            data[at:at] = data[at : at + 100]
        path.write_bytes(data)
        saved = tmp_path / f"saved-{turn}{path.suffix}"
        report = verify(path, kind, salvage=saved, deep=True)
        assert report.good <= NUM_IMAGES
        assert report.saved == (report.good > 0) == saved.exists()
        if report.saved:
            assert verify(saved, kind, deep=True).damaged == []
            known = set(images_of_whole(small, kind))
            assert {image for _, image in images_of(saved)} <= known


def images_of_whole(small: Path, kind: str) -> list[bytes]:
    files = [path.read_bytes() for path in small.rglob("*.png")]
    if kind in ("npz", "npy", "hdf5", "pth"):
        return [np.asarray(Image.open(io.BytesIO(data))).tobytes() for data in files]
    return files


# ---------------------------------------------------------------- places


def offsets(path: Path) -> list[int]:
    lines = path.with_suffix(".idx").read_text().splitlines()
    return [int(line.split("\t")[1]) for line in lines]


def test_rec_goes_on_behind_a_damaged_header(small: Path, tmp_path: Path) -> None:
    path, kind = packed(small, tmp_path, "rec")
    start, after = offsets(path)[3:5]
    flip(path, start)  # the magic
    report = verify(path, kind, salvage=tmp_path / "saved.rec")
    assert [line[:2] for line in report.damaged] == [("record 3 (key 3)", start)]
    assert f"the next record begins at byte {after}" in report.damaged[0].what
    assert RecordReader(tmp_path / "saved.rec").keys == (0, 1, 2, *range(4, NUM_IMAGES))


def test_records_are_saved_although_the_working_folder_stays(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(folder: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(folder))

    path, kind = packed(small, tmp_path, "rec")
    flip(path, offsets(path)[3])
    monkeypatch.setattr(output_files.shutil, "rmtree", fails)
    assert verify(path, kind, salvage=tmp_path / "saved.rec").saved
    said = f"{tmp_path}/.saved.rec.salvaging cannot be removed: disk quota exceeded"
    assert said in capsys.readouterr().err
    assert len(RecordReader(tmp_path / "saved.rec")) == NUM_IMAGES - 1


def test_rec_with_a_length_that_swallows_others(small: Path, tmp_path: Path) -> None:
    path, kind = packed(small, tmp_path, "rec")
    start, after, _, later = offsets(path)[3:7]
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, start + 4, later - start - 8)  # ends where a record ends
    path.write_bytes(data)
    report = verify(path, kind)
    assert report.good == NUM_IMAGES - 1
    assert f"another header lies in it at byte {after}" in report.damaged[0].what


def test_rec_names_each_record_that_lies_in_the_damage(small: Path, tmp_path: Path) -> None:
    path, kind = packed(small, tmp_path, "rec")
    starts = offsets(path)
    data = bytearray(path.read_bytes())
    data[starts[2] + 20 : starts[5] + 20] = bytes(starts[5] - starts[2])
    path.write_bytes(data)
    report = verify(path, kind)
    assert [line.offset for line in report.damaged] == starts[2:6]
    assert [line.record[:8] for line in report.damaged] == [f"record {k}" for k in (2, 3, 4, 5)]
    assert report.good == NUM_IMAGES - 4


@pytest.mark.parametrize("new", [b"", bytes(64), b"x" * 64])
def test_rec_before_damage(small: Path, tmp_path: Path, new: bytes) -> None:
    """Damage that covers the end of a record and the next header: without notes, neither is good."""
    path, kind = packed(small, tmp_path, "rec")
    before, start = images_of(path), offsets(path)[4]
    data = bytearray(path.read_bytes())
    data[start - 32 : start + 32] = new
    path.write_bytes(data)
    for notes in (True, False):
        report = verify(path, kind, salvage=tmp_path / f"{notes}.rec")
        assert report.good == NUM_IMAGES - 2
        assert images_of(tmp_path / f"{notes}.rec") == [*before[:3], *before[5:]]
        (tmp_path / "p.rec.pack.json").unlink(missing_ok=True)


def test_rec_payloads_that_hold_magics(tmp_path: Path) -> None:
    """Records of several parts are walked as one; their content is no image, which is said, and no damage."""
    payloads = [b"\x0a\x23\xd7\xce" * n + bytes(n) for n in range(6)]
    with RecordWriter(tmp_path / "a.rec") as writer:
        for number, payload in enumerate(payloads):
            writer.write(pack_record(IRHeader(0, 1, number, 0), payload))
    report = verify(tmp_path / "a.rec", "rec")
    assert (len(report.not_read), report.damaged) == (6, [])
    assert all("not a JPEG" in d.what or "empty" in d.what for d in report.not_read)


def test_rec_index_that_does_not_fit(small: Path, tmp_path: Path) -> None:
    path, kind = packed(small, tmp_path, "rec")
    index = path.with_suffix(".idx")
    lines = index.read_text().splitlines()
    index.write_text("\n".join([*lines[:4], "what", "77\t8", *lines[5:]]) + "\n")
    found = {(line.record, line.what) for line in verify(path, kind).damaged}
    assert ("p.idx", "line 5 is not 'key<TAB>offset': b'what'") in found
    assert ("record 4", "p.idx has no key for it") in found
    assert ("key 77", "p.idx: no record begins there") in found


def test_tfrecord_goes_on_behind_a_damaged_length(small: Path, tmp_path: Path) -> None:
    path, kind = packed(small, tmp_path, "tfrecord")
    with TFRecordReader(path) as reader:
        starts, records = list(reader.offsets), list(reader)
    flip(path, starts[4] + 3)
    report = verify(path, kind, salvage=tmp_path / "saved.tfrecord")
    assert len(report.damaged) == 1
    assert report.damaged[0].offset == starts[4]
    assert f"the next whole record begins at byte {starts[5]}" in report.damaged[0].what
    with TFRecordReader(tmp_path / "saved.tfrecord") as reader:
        assert list(reader) == records[:4] + records[5:]


def test_tfrecord_of_others(tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.new("RGB", (4, 4)).save(image, "JPEG")
    with TFRecordWriter(tmp_path / "a.tfrecord") as writer:
        writer.write(build_example({"jpg": image.getvalue(), "cls": 3}))
        writer.write(build_example({"label": 3}))
        writer.write(b"\xff\xff\xff")
        writer.write(build_example({"image": b"no image", "label": 3}))
    report = verify(tmp_path / "a.tfrecord", "tfrecord")
    assert report.good == 1
    assert [line.record for line in report.not_read] == [
        "record 1",
        "record 2",
    ]  # their checksums fit
    assert [line.record for line in report.damaged] == ["record 3"]
    assert report.not_read[0].what == "no image in its Example"


def test_tar_goes_on_behind_a_damaged_header(small: Path, tmp_path: Path) -> None:
    path, kind = packed(small, tmp_path, "tar")
    with tarfile.open(path) as tar:
        member = tar.getmember("b/0.png")
    flip(path, member.offset + 10)
    report = verify(path, kind, salvage=tmp_path / "saved.tar")
    assert report.good == NUM_IMAGES - 1
    first, second = report.damaged
    assert (first.record, first.offset) == ("the tar", member.offset)
    assert (second.record, second.what) == ("sample b/0", "no image in it, only .cls")
    with tarfile.open(tmp_path / "saved.tar") as tar:
        assert len(tar.getnames()) == 2 * (NUM_IMAGES - 1)


def test_tar_of_gnu_with_long_names(small: Path, tmp_path: Path) -> None:
    for name, form in (("gnu.tar", tarfile.GNU_FORMAT), ("pax.tar", tarfile.PAX_FORMAT)):
        with tarfile.open(tmp_path / name, "w", format=form) as tar:
            tar.add(small / "a", "cat/" + "long" * 40)
        report = verify(tmp_path / name, "tar", salvage=tmp_path / f"saved-{name}")
        assert (report.good, report.damaged) == (6, [])
        with tarfile.open(tmp_path / f"saved-{name}") as tar:
            assert all(n.startswith("cat/longlong") for n in tar.getnames())
    whole = (tmp_path / "gnu.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole.rstrip(b"\0") + bytes(-len(whole.rstrip(b"\0")) % 512))
    assert "end mark is missing" in verify(tmp_path / "cut.tar", "tar").damaged[-1].what


def without_notes(small: Path, folder: Path, ending: str) -> tuple[Path, str]:
    path, kind = packed(small, folder, ending)
    (folder / f"{path.name}.pack.json").unlink()
    return path, kind


def test_tar_goes_on_behind_empty_blocks(small: Path, tmp_path: Path) -> None:
    """A zeroed page: all samples that have no byte in it are saved, and no other."""
    path, kind = without_notes(small, tmp_path, "tar")
    before = images_of(path)
    with tarfile.open(path) as tar:
        ends = [m.offset_data + m.size for m in tar.getmembers()]
        starts = [m.offset for m in tar.getmembers()]
    page = next(p for p in range(0, ends[-1], 4096) if {p, p + 512} & set(starts[2:]))
    data = bytearray(path.read_bytes())
    data[page : page + 4096] = bytes(4096)
    path.write_bytes(data)
    hit = {k // 2 for k in range(len(starts)) if starts[k] < page + 4096 and ends[k] > page}
    report = verify(path, kind, salvage=tmp_path / "saved.tar")
    assert any("empty blocks" in d.what and d.offset in (page, page + 512) for d in report.damaged)
    assert images_of(tmp_path / "saved.tar") == [b for k, b in enumerate(before) if k not in hit]


def test_tar_is_refused_by_training_and_by_verify_alike(small: Path, tmp_path: Path) -> None:
    path, kind = without_notes(small, tmp_path, "tar")
    whole = path.read_bytes()
    link = tarfile.TarInfo("a/9.png")
    link.type, link.linkname = tarfile.SYMTYPE, "a/1.png"
    two_images = tarfile.TarInfo("b/5.jpg").tobuf()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for data, good in (
        (whole + whole, NUM_IMAGES), (whole + b"x", NUM_IMAGES), (whole[:-1] + b"x", NUM_IMAGES),
        (link.tobuf() + whole, NUM_IMAGES), (whole[:end] + two_images + bytes(1024), NUM_IMAGES - 1),
    ):  # fmt: skip
        path.write_bytes(data)
        with pytest.raises(InputError):
            open_source(path, ("a", "b"))
        saved = tmp_path / f"{len(list(tmp_path.iterdir()))}.tar"
        report = verify(path, kind, salvage=saved)
        assert report.damaged or report.not_read
        assert len(images_of(saved)) == report.good == good


def test_what_training_refuses_is_not_whole(small: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(small / "a" / "0.png", "0.png")
    (line,) = verify(tmp_path / "a.tar", "tar").not_read
    assert "training refuses it" in line.what
    assert "has no label" in line.what
    path, kind = without_notes(small, tmp_path, "rec")
    (tmp_path / "p.classes.txt").write_text("a\n")
    report = verify(path, kind)
    assert (report.good, report.damaged[0].what) == (6, "class 1, of 1 classes")


def test_tar_samples_that_lost_their_label_are_left_out(small: Path, tmp_path: Path) -> None:
    path, kind = without_notes(small, tmp_path, "tar")
    before = images_of(path)
    with tarfile.open(path) as tar:
        flip(path, tar.getmember("a/2.cls").offset + 100)
        flip(path, tar.getmember("b/1.cls").offset_data)
    report = verify(path, kind, salvage=tmp_path / "saved.tar")
    assert {d.what[:12] for d in report.damaged} == {"a damaged he", "no .cls in i", "its .cls is "}
    assert images_of(tmp_path / "saved.tar") == [*before[:2], *before[3:7], *before[8:]]


@pytest.mark.parametrize(
    ("lost", "new", "lost_images", "what"),
    [
        (512, b"", 1, "another header lies in it"),
        (100, b"", 1, "another header lies in it"),
        (0, b"x", 1, "is no header, so bytes of it"),
        (0, b"x" * 512, 1, "is no header, so bytes of it"),
        (1500, bytes(1500), 2, "its end lies in the empty blocks"),
    ],
)
def test_tar_image_before_damage(
    small: Path, tmp_path: Path, lost: int, new: bytes, lost_images: int, what: str
) -> None:
    """The header of an image is whole, its bytes are not; that shows only in what comes next."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(small.rglob("*.png")):
            tar.add(name, name.relative_to(small))
    before = images_of(path)
    with tarfile.open(path) as tar:
        at = tar.getmember("b/0.png").offset_data + 600
    data = bytearray(path.read_bytes())
    data[at : at + lost] = new
    path.write_bytes(data)
    report = verify(path, "tar", salvage=tmp_path / "saved.tar")
    assert (report.damaged[0].record, what in report.damaged[0].what) == ("b/0.png", True)
    assert images_of(tmp_path / "saved.tar") == [*before[:6], *before[6 + lost_images :]]


@pytest.mark.parametrize("name", ["\u732b/1.png", "x" * 95 + "/1.png"])
def test_tar_name_that_lies_in_the_damage(small: Path, tmp_path: Path, name: str) -> None:
    """Of a name that is not ASCII, or long, the header of the file itself holds a part: another class."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for place in (name, "a/2.png", "a/3.png"):
            tar.add(small / "a" / "0.png", place)
    data = bytearray(path.read_bytes())
    data[:1024] = bytes(1024)  # what holds the name
    path.write_bytes(data)
    assert verify(path, "tar").good == 2


def test_tar_with_other_files_is_whole(small: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for name in ("README.md", "__notes__/1.jpg"):
            tar.addfile(tarfile.TarInfo(name))
        folder = tarfile.TarInfo("b" * 120)  # a long name, which is not that of what follows
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        tar.add(small / "a" / "0.png", "a/0.png")
    report = verify(tmp_path / "a.tar", "tar")
    assert (report.good, report.damaged) == (1, [])


# ---------------------------------------------------------------- headers and pixels


def test_pixels_are_decoded_only_when_asked_for(tmp_path: Path) -> None:
    photo = io.BytesIO()
    Image.effect_noise((64, 64), 80).save(photo, "PNG")
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(pack_record(IRHeader(0, 0, 0, 0), photo.getvalue()))
        writer.write(pack_record(IRHeader(0, 1, 1, 0), photo.getvalue()[:900]))
        writer.write(pack_record(IRHeader(0, 0.5, 2, 0), photo.getvalue()))
        writer.write(b"short")
    headers = verify(tmp_path / "a.rec", "rec")
    assert [line.record for line in headers.damaged] == ["record 2 (key 2)", "record 3 (key 3)"]
    pixels = verify(tmp_path / "a.rec", "rec", deep=True)
    assert [line.record[:8] for line in pixels.damaged] == ["record 1", "record 2", "record 3"]


def test_zip_checksums_without_notes(small: Path, tmp_path: Path) -> None:
    for ending in ("npz", "pth"):
        path, kind = packed(small, tmp_path, ending)
        (tmp_path / f"{path.name}.pack.json").unlink()
        _, victim = images_of(path)[3]
        flip(path, path.read_bytes().index(victim) + 5)
        report = verify(path, kind)
        (line,) = report.damaged
        assert line.what.startswith("its checksum does not match")
        assert report.good == 0  # the damaged one cannot be told from the others


@pytest.mark.parametrize("ending", ["npy", "npz", "pth", "h5"])
def test_a_cut_file_of_arrays_names_the_tool_that_may_recover_it(
    ending: str, small: Path, tmp_path: Path
) -> None:
    path, kind = packed(small, tmp_path, ending)
    before, whole = images_of(path), path.read_bytes()
    path.write_bytes(whole[: whole.index(before[4][1]) + 9])
    (line, *_) = verify(path, kind, salvage=tmp_path / f"saved.{ending}").damaged
    assert RECOVERY[kind] in line.what
    assert not (tmp_path / f"saved.{ending}").exists()
    if ending == "npy":
        assert "128" in RECOVERY[kind]
        rows = np.memmap(path, "u1", "r", 128, (4, 32, 32))
        assert [row.tobytes() for row in rows] == [image for _, image in before[:4]]


def test_a_label_that_was_changed_is_found(small: Path, tmp_path: Path) -> None:
    path, kind = packed(small, tmp_path, "npy")
    labels = np.load(tmp_path / "p_labels.npy")
    labels[2] = 1
    np.save(tmp_path / "p_labels.npy", labels)
    (line,) = verify(path, kind).damaged
    assert line.record.endswith("[2]")
    assert line.what == "its bytes or its class are not what was packed"


@pytest.mark.parametrize("ending", ["rec", "tfrecord", "tar"])
def test_other_class_names_are_found(ending: str, small: Path, tmp_path: Path) -> None:
    """Numbers stand for them, and the checksums of the images do not cover this file."""
    path, kind = packed(small, tmp_path, ending)
    names = tmp_path / "p.classes.txt"
    assert names.read_text() == "a\nb\n"
    for content, what in (
        ("b\na\n", f"{names} has other class names than were packed"),
        ("a\nb\nc\n", f"{names} has other class names than were packed"),
        (None, f"{names} is missing"),
    ):
        names.unlink() if content is None else names.write_text(content)
        report = verify(path, kind)
        assert report.good == NUM_IMAGES
        assert [damage.what for damage in report.damaged] == [what]


def test_folder_of_parts(images: Path, tmp_path: Path) -> None:
    pack(images, tmp_path / "made", Conversion(), Split(), workers=1)
    ((path, kind),) = packed_files(tmp_path / "made")
    assert verify(path, kind).good == 24
    (path / "val" / "b" / "01.png").unlink()
    flip(path / "train" / "a" / "03.png", 60)
    report = verify(path, kind, salvage=tmp_path / "saved")
    assert report.damaged[0].record == "train/a/03.png"
    assert report.damaged[1].what == "an image that was packed is missing"
    assert len(list((tmp_path / "saved").rglob("*.png"))) == 22
    assert (tmp_path / "saved" / "val" / "a" / "02.png").exists()


# ---------------------------------------------------------------- what is refused


def test_refused(small: Path, tmp_path: Path) -> None:
    path, kind = packed(small, tmp_path, "rec")
    for dst, message in (
        ("a.tar", "is of another format"), ("p.rec", "exists"), ("none/a.rec", "there is no folder"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            check_salvage(path, kind, tmp_path / dst)
    with pytest.raises(InputError, match="does not exist"):
        packed_files(tmp_path / "none.rec")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match="is no packed file"):
        packed_files(tmp_path / "a.txt")
    for text in (json.dumps({"files": {}}), "[" * 100_000):
        (tmp_path / "p.rec.pack.json").write_text(text)
        with pytest.raises(InputError, match=r"p\.rec\.pack\.json is damaged.*\nRemove it"):
            verify(path, kind)


def test_empty_file(tmp_path: Path) -> None:
    for ending in ("rec", "tfrecord", "tar", "zip", "lmdb", "h5", "npz", "npy"):
        path = tmp_path / f"a.{ending}"
        path.write_bytes(b"")
        ((_, kind),) = packed_files(path)
        assert verify(path, kind).damaged == [Damage("the file", 0, "it is empty")]
        with pytest.raises(InputError, match=f"a.{ending} is empty\n"):
            open_source(path, ("a", "b"))


def test_pixels_in_tfrecords_are_whole_and_can_be_saved(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3), np.uint8)
    with TFRecordWriter(tmp_path / "raw.tfrecord") as writer:
        for number, image in enumerate(pixels):
            sides = {"height": 5, "width": 4, "depth": 3, "label": number % 2}
            writer.write(build_example({"image_raw": image.tobytes(), **sides}))
    report = verify(tmp_path / "raw.tfrecord", "tfrecord", deep=True)
    assert (report.good, report.damaged) == (3, [])
    data = bytearray((tmp_path / "raw.tfrecord").read_bytes())
    data[30] ^= 1  # in the first record
    (tmp_path / "raw.tfrecord").write_bytes(data)
    saved = tmp_path / "saved.tfrecord"
    report = verify(tmp_path / "raw.tfrecord", "tfrecord", deep=False, salvage=saved)
    assert (report.good, len(report.damaged)) == (2, 1)
    source = open_source(saved, ("0", "1"))
    for number, image in enumerate(pixels[1:]):
        np.testing.assert_array_equal(source.read(number), image)
