"""`verify` calls only what is damaged so: what is whole and not read has a verdict of its own."""

import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shard_plan import Split
from flambeau.data.pack.verify import FileReport, packed_files, verify_file
from flambeau.recipes.data.recordio import IRHeader, RecordWriter
from flambeau.recipes.data.recordio import pack as pack_record
from flambeau.recipes.data.tf_example import build_example
from flambeau.recipes.data.tfrecord import TFRecordWriter

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
IMAGES = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)
LABELS = np.arange(6) % 2


def png(pixels: Any, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


PNGS = [png(image) for image in IMAGES]


def folder(root: Path, files: list[bytes], ending: str = ".png") -> Path:
    for number, data in enumerate(files):
        path = root / "ab"[number % 2] / f"{number}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def verified(path: Path, **settings: Any) -> FileReport:
    ((file, kind),) = packed_files(path)
    return verify_file(file, kind, **settings)


def not_read(path: Path, *parts: str, good: int = 0) -> None:
    report = verified(path)
    assert (report.damaged, report.good) == ([], good)
    for part in parts:
        assert part in report.not_read[0].what


@pytest.mark.parametrize("ending", ["rec", "tfrecord", "tar", "zip", "lmdb", "npz", "npy", "h5"])
def test_pointers_and_packed_files(ending: str, tmp_path: Path, flambeau: Any) -> None:
    pytest.importorskip("h5py")
    whole = folder(tmp_path / "photos", PNGS)
    path = tmp_path / f"a.{ending}"
    pack(
        whole,
        path,
        Conversion("raw" if ending in ("npz", "npy", "h5") else "keep"),
        Split(),
        workers=1,
    )
    for data, words in (
        (LFS, "a pointer of Git LFS"),
        (b"/annex/objects/MD5E-s1--0cc1\n", "a pointer of git-annex"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (gzip.compress(path.read_bytes()), "a gzip file"),
    ):  # fmt: skip
        path.write_bytes(data)  # with its pack.json, as in a repository
        not_read(path, f"this is {words}")
        answer = flambeau("verify", path)
        assert (answer.code, answer.err) == (1, "")
        assert answer.out.endswith(f"{path}: NOT READ in 1 place; 0 images are good\n")
        for command, *places in (
            ("train --out", tmp_path / "run", path),
            ("pack", path, tmp_path / "b"),
        ):
            answer = flambeau(command, *places)
            assert answer.code == 2
            assert f"{path} is {words}" in answer.err


def test_links_of_git_annex(tmp_path: Path, flambeau: Any) -> None:
    (tmp_path / "a.tar").symlink_to(".git/annex/objects/aa/x")
    for command in ("verify", "train"):
        answer = flambeau(command, tmp_path / "a.tar")
        assert (answer.code, "git annex get" in answer.err) == (2, True)
    photos = folder(tmp_path / "photos", PNGS)
    (photos / "a" / "0.png").unlink()
    (photos / "a" / "0.png").symlink_to("../../.git/annex/objects/aa/x")
    not_read(photos, "a pointer of git-annex", good=5)
    answer = flambeau(
        "train", photos, "--out", tmp_path / "run", "--duration 1st --batch-size 2 --precision fp32"
    )
    assert (answer.code, "git annex get" in answer.err) == (2, True)


def test_images_that_are_none(tmp_path: Path) -> None:
    not_read(folder(tmp_path / "lfs", [LFS] * 6), "git lfs pull")
    not_read(folder(tmp_path / "one", [LFS, *PNGS[1:]]), "git lfs pull", good=5)
    assert verified(folder(tmp_path / "bad", [b"zz", *PNGS[1:]])).not_read == []
    assert len(verified(folder(tmp_path / "cut", [PNGS[0][:20], *PNGS[1:]])).damaged) == 1


def test_floating_point_tiffs_are_not_called_whole(tmp_path: Path) -> None:
    grey = IMAGES[0, :, :, 0]
    float32 = png((grey / 255).astype(np.float32), "TIFF")
    not_read(folder(tmp_path / "float", [float32] * 6, ".tif"), "floating-point pixels")
    int32 = png(grey.astype(np.int32) * 100_000, "TIFF")
    wide = folder(tmp_path / "int32", [int32, *PNGS[1:]], ".tif")
    report = verified(wide, deep=True)  # only the pixels show it
    assert (len(report.not_read), report.damaged, report.good) == (1, [], 5)
    int16 = png(grey.astype(np.uint16) * 257, "TIFF")
    assert verified(folder(tmp_path / "int16", [int16] * 6, ".tif"), deep=True).good == 6


def test_records_of_another_kind(tmp_path: Path) -> None:
    with TFRecordWriter(tmp_path / "a.tfrecord") as writer:
        for data in PNGS:
            writer.write(build_example({"pixels": data, "y": 1}))
    not_read(tmp_path / "a.tfrecord", "no image in its Example")
    with RecordWriter(tmp_path / "a.rec") as rec:
        for number, image in enumerate(IMAGES):
            rec.write(pack_record(IRHeader(0, number % 2, number, 0), image.tobytes()))
    not_read(tmp_path / "a.rec", "not a JPEG")
    with RecordWriter(tmp_path / "b.rec") as rec:
        for number, data in enumerate(PNGS):
            rec.write(pack_record(IRHeader(0, 0.5 if number == 3 else 1, number, 0), data))
    assert verified(tmp_path / "b.rec").damaged  # others are good, so one label is damaged
    with RecordWriter(tmp_path / "c.rec") as rec:
        for number, data in enumerate(PNGS):
            rec.write(pack_record(IRHeader(0, number / 4, number, 0), data))
    assert verified(tmp_path / "c.rec").good == len(PNGS)  # numbers, which training takes


def tar_of(path: Path, files: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_tars_of_another_kind(tmp_path: Path) -> None:
    plain = [(f"{n}.png", data) for n, data in enumerate(PNGS)]
    words = [
        file for n, data in enumerate(PNGS) for file in ((f"{n}.png", data), (f"{n}.cls", b"cat"))
    ]
    twice = [(f"a/v1.{n}.png", data) for n, data in enumerate(PNGS)]
    split = [
        *((f"a/{n}.png", data) for n, data in enumerate(PNGS)),
        *((f"a/{n}.cls", b"0") for n in range(6)),
    ]
    not_read(tar_of(tmp_path / "plain.tar", plain), "has no label", good=6)
    not_read(tar_of(tmp_path / "words.tar", words), "no number of a class")
    not_read(tar_of(tmp_path / "twice.tar", twice), "6 images in it")
    not_read(tar_of(tmp_path / "split.tar", split), "a sample of this name", good=6)
    words[1] = ("0.cls", b"0")
    assert verified(tar_of(tmp_path / "one.tar", words)).damaged


def test_arrays_of_another_kind(tmp_path: Path) -> None:
    np.savez(tmp_path / "names.npz", pictures=IMAGES, gt=LABELS)
    not_read(tmp_path / "names.npz", "by a known name", "Name them images")
    np.savez(tmp_path / "objects.npz", images=np.array([*IMAGES, None], object), labels=LABELS)
    not_read(tmp_path / "objects.npz", "pickled Python objects")
    np.savez(tmp_path / "float.npz", images=IMAGES - 0.5, labels=LABELS)
    not_read(tmp_path / "float.npz", "not all k / 255")
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "records.h5", "w") as file:
        file["images"] = np.zeros(6, [("pixels", "u1", (8, 8)), ("id", "i4")])
        file["labels"] = LABELS
    not_read(tmp_path / "records.h5", "these are no images")
    np.save(tmp_path / "dict.npy", {"images": IMAGES}, allow_pickle=True)
    not_read(tmp_path / "dict.npy", "pickled Python objects")
    np.save(tmp_path / "late.npy", np.concatenate([IMAGES / 255] * 3 + [IMAGES / 200])[:20])
    np.save(tmp_path / "late_labels.npy", np.arange(20) % 2)
    report = verified(tmp_path / "late.npy")  # some of which are not looked at when it is opened
    assert report.damaged == []


def test_lmdb_of_another_kind(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "a.lmdb"), subdir=False, max_dbs=2) as env:
        database = env.open_db(b"train")
        with env.begin(write=True) as transaction:
            transaction.put(b"1", PNGS[0], db=database)
    not_read(tmp_path / "a.lmdb", "is a named database")


def test_with_notes_what_is_not_read_is_damage(tmp_path: Path) -> None:
    """`flambeau pack` has read it when it made it."""
    path = tmp_path / "a.npy"
    pack(folder(tmp_path / "photos", PNGS), path, Conversion("raw"), Split(), workers=1)
    np.save(tmp_path / "a_labels.npy", LABELS - 9)
    assert verified(path).damaged
    (tmp_path / "a.npy.pack.json").unlink()
    not_read(path, "label -9 is none of the 2 classes")


def test_what_has_no_checksums_is_said(tmp_path: Path, flambeau: Any) -> None:
    h5py = pytest.importorskip("h5py")
    np.save(tmp_path / "a.npy", IMAGES)
    np.save(tmp_path / "a_labels.npy", LABELS)
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS)
    for name, checked in (("plain", False), ("checked", True)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("images", data=IMAGES, chunks=(1, 8, 8, 3), fletcher32=checked)
            file["labels"] = LABELS
    tensors = {"images": torch.from_numpy(IMAGES), "labels": torch.from_numpy(LABELS)}
    for name in ("summed.pth", "plain.pth"):
        torch.serialization.set_crc32_options(name == "summed.pth")
        torch.save(tensors, tmp_path / name)
    torch.serialization.set_crc32_options(True)
    for name, said in (
        ("a.npy", True),
        ("a.npz", False),
        ("plain.pth", True),
        ("summed.pth", False),
        ("plain.h5", True),
        ("checked.h5", False),
    ):
        answer = flambeau("verify", tmp_path / name)
        assert answer.code == 0
        assert ("no checksums in this format" in answer.out) == said, name
        facts = json.loads(flambeau("verify --json", tmp_path / name).out)
        assert facts["own_checksums"] != said


def test_chunks_that_are_absent_are_counted(tmp_path: Path, flambeau: Any) -> None:
    h5py = pytest.importorskip("h5py")
    pytest.importorskip("tensorstore")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        images = file.create_dataset("images", (6, 8, 8, 3), "u1", chunks=(1, 8, 8, 3))
        images[:4] = IMAGES[:4]
        file.create_dataset("labels", (6,), "i8")  # never written
    answer = flambeau("verify", tmp_path / "a.h5")
    assert answer.code == 0
    assert "2 of 6 chunks of images are absent" in answer.out
    assert "all of labels is absent" in answer.out
    photos = folder(tmp_path / "photos", PNGS)
    for ending, chunk in (("n5", "0/0/0/3"), ("zarr", "c/0/0/0/0")):
        store = tmp_path / f"a.{ending}"
        pack(photos, store, Conversion("raw"), Split(), workers=1)
        (tmp_path / f"a.{ending}.pack.json").unlink()
        report = verified(store)
        assert (report.good, report.absent, report.format_checksums) == (6, [], ending == "zarr")
        (store / "images" / chunk).unlink()
        report = verified(store)
        assert (report.good, len(report.absent)) == (6, 1)
        shutil.rmtree(store / "labels")
        not_read(store, "by a known name")
