"""Labels of a tar by every convention, against webdataset and FolderSource; each complaint; what is kept."""

import io
import json
import os
import pickle
import random
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from flambeau.data.sources import tar_file
from flambeau.data.sources.folder import FolderSource
from flambeau.data.sources.open_data import open_source, open_sources
from flambeau.data.sources.tar_file import TarSource, open_tar
from flambeau.errors import InputError

# Python 3.12 warns where a process with threads, such as torch's own, forks.
not_our_threads = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def put(path, files):
    """A tar of files, by the standard library alone."""
    path.parent.mkdir(exist_ok=True, parents=True)
    with tarfile.open(path, "w") as tar:
        for name, value in files.items():
            data = value if isinstance(value, bytes) else str(value).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def numbered(*labels, extension="cls"):
    files = {}
    for i, label in enumerate(labels):
        files |= {f"{i:04}.jpg": f"image {i}", f"{i:04}.{extension}": label}
    return files


def jsons(*values):
    return numbered(*(json.dumps(value) for value in values), extension="json")


def complaint(path, function=TarSource):
    """The message of the InputError, checked to be one or two lines that name the file."""
    with pytest.raises(InputError) as caught:
        function(path)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 2
    assert str(path) in message
    return message


def labels_of(source):
    return [source.classes[label] for label in source.labels.tolist()]


# --- the same as others


def test_what_webdataset_writes(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    draw = random.Random(0)
    samples = [
        {
            "__key__": f"part/{i:05}",
            "jpg": draw.randbytes(50),
            "cls": draw.randrange(7),
            "json": {"a": i},
        }
        for i in range(300)
    ]
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for sample in samples:
            writer.write(sample)
    source = TarSource(tmp_path / "a.tar")
    assert source.labels.tolist() == [sample["cls"] for sample in samples]
    assert source.classes == ("0", "1", "2", "3", "4", "5", "6")
    assert list(source.names) == [sample["__key__"] for sample in samples]
    assert [source.read(i) for i in range(300)] == [sample["jpg"] for sample in samples]
    assert not source.by_folder


def test_a_folder_that_was_packed(tmp_path):
    for i in range(30):
        path = tmp_path / "photos" / random.Random(i).choice(["cat", "dog", "ä 图"]) / f"{i}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i]) * i)
        path.with_suffix(".txt").write_text("a photo")  # which the folder passes over
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for path in sorted((tmp_path / "photos").rglob("*")):
            tar.add(path, path.relative_to(tmp_path), recursive=False)
    folder, packed = FolderSource(tmp_path / "photos"), TarSource(tmp_path / "photos.tar")
    assert packed.classes == folder.classes
    assert packed.labels.tolist() == folder.labels.tolist()
    assert [f"{name}.JPEG" for name in packed.names] == [f"photos/{name}" for name in folder.names]
    assert [packed.read(i) for i in range(30)] == [folder.read(i) for i in range(30)]
    assert packed.describe(0) == f"{tmp_path / 'photos.tar'}, photos/{folder.names[0]}"
    assert packed.by_folder


# --- labels


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (numbered("1", " 0\n", "3"), ["1", "0", "3"]),
        (jsons({"label": 2}, {"label": 0, "class": "x"}), ["2", "0"]),
        (jsons({"class": "dog"}, {"class": " cat "}, {"x": 1, "class": "é"}), ["dog", "cat", "é"]),
        (jsons({"label": "10"}, {"label": "9"}), ["10", "9"]),
        (jsons({"label": 3.0}, {"label": 1}), ["3", "1"]),
        (numbered("dog\n", "cat", "dog", "cat", extension="txt"), ["dog", "cat", "dog", "cat"]),
        (numbered("1", "0", "2", extension="txt"), ["1", "0", "2"]),
        # What has numbers or names of classes beside each other, and in which order they count:
        ({"b/1.jpg": "x", "b/1.cls": "3", "b/1.json": '{"label": 5}', "b/1.txt": "cat"}, ["3"]),
        ({"b/1.jpg": "x", "b/1.json": '{"label": 5}', "b/1.txt": "cat"}, ["5"]),
        ({"b/1.jpg": "x", "b/1.json": '{"width": 5}', "b/1.txt": "cat"}, ["b"]),
        ({"b/1.jpg": "x", "b/1.json": "[1, 2]", "a/1.jpg": "x"}, ["b", "a"]),
        ({"10/1.jpg": "x", "9/1.jpg": "x"}, ["10", "9"]),
        ({"./b/1.jpg": "x", "./a/1.jpg": "x", "./README.md": "x"}, ["b", "a"]),
        ({"a/1.seg.png": "mask", "a/1.jpg": "x", "a/2.left.PNG": "x"}, ["a", "a"]),
        # A class that is called like a part of the data, under parts
        ({"train/test/1.jpg": "x", "val/test/1.jpg": "x", "val/a/1.jpg": "x"}, ["test", "test", "a"]),
    ],
)  # fmt: skip
def test_labels(tmp_path, files, expected):
    source = TarSource(put(tmp_path / "a.tar", files))
    assert labels_of(source) == expected
    assert len(source) == len(source.names) == len(expected)
    # Numbers count from 0; names are in alphabetical order, and there are no others.
    if expected[0].isdecimal() and not source.by_folder:
        assert source.classes == tuple(map(str, range(max(map(int, expected)) + 1)))
    else:
        assert source.classes == tuple(sorted(set(expected)))


def test_names_of_numbered_classes(tmp_path):
    (tmp_path / "pets.classes.txt").write_text("cat\ndog\n")
    files = numbered("1", "0", "1")
    for name in ("pets.tar", "pets-000012.tar", "pets_train-0.tar"):
        assert labels_of(TarSource(put(tmp_path / name, files))) == ["dog", "cat", "dog"]
    message = complaint(put(tmp_path / "pets.tar", numbered("1", "2")))
    assert "label 2 is none of the 2 classes that" in message


BAD = {
    "no label": ({"1.jpg": "x", "1.npy": "x"}, ", 1 has no label (found: .jpg, .npy)"),
    "one without": (numbered("1") | {"x.jpg": "x"}, ", x.cls is missing, but other images have a .cls"),
    "a word": (numbered("1", "cat"), ", 0001.cls: 'cat' is no label"),
    "a fraction": (numbered("1", "1.5"), ", 0001.cls: '1.5' is no label"),
    "an empty one": (numbered("1", ""), ", 0001.cls: '' is no label"),
    "bytes": (numbered("1", b"\xff\xfe"), ", 0001.cls is not UTF-8 text"),
    "numpy": (numbered("1", b"\x93NUMPY\1\0"), ", 0001.cls is not UTF-8"),
    "below zero": (numbered("1", "-1"), ", 0001.jpg: label -1"),
    "huge": (numbered("1", "9" * 400), ", 0001.jpg: label 999"),
    "no json": (jsons({"label": 1}) | {"x.jpg": "x", "x.json": "{"}, ", x.json cannot be read"),
    "label twice": (
        jsons({"label": 1}) | {"x.jpg": "x", "x.json": '{"label": 1, "label": 2}'},
        ", x.json cannot be read: it gives 'label' twice",
    ),
    "deep json": (jsons({"label": 1}) | {"x.jpg": "x", "x.json": "[" * 90000}, ", x.json cannot be read"),
    "json without": (jsons({"label": 1}, {"width": 1}), ", 0001.json has no `label`, as others"),
    "null": (jsons({"label": 1}, {"label": None}), ", 0001.json has no `label`"),
    "several": (jsons({"label": [1, 2]}), ", 0000.json: [1, 2] is no label"),
    "truth": (jsons({"label": True}), ", 0000.json: True is no label"),
    "json fraction": (jsons({"label": 1.5}), ", 0000.json: 1.5 is no label"),
    "not a number": (jsons({"label": float("nan")}), ", 0000.json: nan is no label"),
    "two lines": (jsons({"label": "a\nb"}), ", 0000.json: 'a\\nb' is no label"),
    "half a character": (jsons({"label": "a\ud800"}), ", 0000.json: 'a\\ud800' is no label"),
    "captions": (numbered("a cat", "a dog", "a cat", extension="txt") | {"4.jpg": "", "4.txt": "sea"},
                 ": its .txt seem to be captions, 3 different ones for 4 images"),
    "no folder": ({"a/1.jpg": "x", "2.jpg": "x"}, ", 2 lies in no folder"),
    "either": ({"cat/2021/1.jpg": "", "dog/2021/1.jpg": ""}, "a folder 2021 lies in dog and in cat, so"),
    "either at the root": ({"2021/1.jpg": "", "dog/2021/1.jpg": ""}, "lies in dog and in ., so either"),
    "two images": ({"a/photo.1.jpg": "x", "a/photo.2.jpg": "y"},
                   ": sample a/photo has 2 images, .1.jpg and .2.jpg"),
    "two kinds": ({"a/1.jpg": "x", "a/1.png": "y"}, ": sample a/1 has 2 images, .jpg and .png"),
    "no images": ({"1.npy": "x", "1.cls": "3", "2.npy": "x"}, " holds no images (found: 2 .npy, 1 .cls)"),
    "nothing": ({}, " holds no images\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(tmp_path, name):
    files, reason = BAD[name]
    assert reason in complaint(put(tmp_path / "a.tar", files))
    assert not list(tmp_path.glob("*index*")) or "label " in reason  # nothing wrong is kept


def test_names_that_are_not_utf8(tmp_path):
    strange = b"a\xff.jpg".decode(errors="surrogateescape")
    source = TarSource(put(tmp_path / "a.tar", {f"cat/{strange}": "x", "dog/1.jpg": "y"}))
    source.describe(0).encode()
    assert "a\\udcff.jpg" in source.describe(0)
    assert source.read(0) == b"x"
    assert TarSource(tmp_path / "a.tar").names == source.names  # as kept
    folder = strange.replace(".jpg", "/1.jpg")
    complaint(put(tmp_path / "b.tar", {folder: "x"})).encode()
    complaint(put(tmp_path / "c.tar", {folder: "x", f"{folder[:-4]}.png": "y"})).encode()
    two = {f"{folder[:-5]}cat/1.jpg": "x", "other\n/cat/1.jpg": "y"}
    complaint(put(tmp_path / "d.tar", two)).encode()
    (tmp_path / "e.tar").write_bytes(
        put(tmp_path / "a.tar", {strange: "x" * 600}).read_bytes()[:1500]
    )
    complaint(tmp_path / "e.tar").encode()


def test_damaged_files(tmp_path):
    data = put(tmp_path / "good.tar", numbered("1", "0")).read_bytes()
    path = tmp_path / "bad.tar"
    assert "cannot be read: no such file" in complaint(path)
    path.write_bytes(data[:2000])
    assert "byte 2000" not in complaint(path)
    assert "goes on after the end of the file\nThe tar was cut short" in complaint(path)
    path.write_bytes(data[:1024] + b"x" + data[1025:])
    assert "byte 1024: a damaged header\nCopy or make the tar again" in complaint(path)
    path.write_bytes(b"\x1f\x8b" + data)
    assert complaint(path).endswith(f"\nUnpack it: gzip -dc {path} > NEW.tar")
    assert "cannot be read: is a directory" in complaint(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    source = TarSource(put(tmp_path / "a.tar", numbered("1", "0")))
    os.truncate(tmp_path / "a.tar", 515)
    with pytest.raises(OSError, match=r"a\.tar, byte 512: 3 of 7 bytes are there"):
        source.read(0)
    with pytest.raises(OSError, match=r"a\.tar, byte 2560: 0 of 7 bytes"):
        source.read(1)


# --- train and val


def test_parts_by_folder(tmp_path):
    files = {f"set/{part}/{name}/{i}.jpg": f"{part}{name}{i}" for part in ("Train", "valid")
             for name in ("cat", "dog") for i in range(3)}  # fmt: skip
    train, val = open_tar(put(tmp_path / "a.tar", files))
    assert train.classes == val.classes == ("cat", "dog")
    assert [train.read(i).decode() for i in range(6)] == [v for v in files.values() if "Train" in v]
    assert [val.read(i).decode() for i in range(6)] == [v for v in files.values() if "valid" in v]
    assert set(train.names).isdisjoint(val.names)
    with_labels = {
        name.replace("dog", "x"): data
        for part in ("train", "test")
        for i in range(2)
        for name, data in {f"{part}/{i}.jpg": "x", f"{part}/{i}.cls": i}.items()
    }
    train, val = open_tar(put(tmp_path / "b.tar", with_labels))
    assert (labels_of(train), labels_of(val)) == (["0", "1"], ["0", "1"])


@pytest.mark.parametrize(
    "files",
    [
        {"cat/1.jpg": "", "dog/1.jpg": ""},
        {"train/cat/1.jpg": "", "train/dog/1.jpg": ""},
        {"train/cat/1.jpg": "", "val/dog/1.jpg": "", "bird/1.jpg": ""},
    ],
)
def test_no_parts(tmp_path, files):
    source, val = open_tar(put(tmp_path / "a.tar", files))
    assert val is None
    assert len(source) == len(files)


def test_parts_without_classes_are_no_classes(tmp_path):
    path = put(tmp_path / "a.tar", {"train/1.jpg": "", "test/1.jpg": ""})
    with pytest.raises(InputError, match="look like parts of the data"):
        open_tar(path)


# --- kept beside the file, found by all


def test_headers_and_labels_are_read_once(tmp_path, monkeypatch):
    path = put(tmp_path / "a.tar", numbered(*"0123012"))
    first = TarSource(path)
    assert (tmp_path / "a.tar.flambeau-index").is_file()
    monkeypatch.setattr(tar_file, "_index", None)
    again = TarSource(path)
    assert again.labels.tolist() == first.labels.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert (again.names, again.classes, again.fingerprint) == (
        first.names,
        first.classes,
        first.fingerprint,
    )
    assert [again.read(i) for i in range(7)] == [f"image {i}".encode() for i in range(7)]
    monkeypatch.undo()
    put(path, numbered(*"10"))
    assert labels_of(TarSource(path)) == ["1", "0"]


def test_fingerprint(tmp_path):
    files = {f"cat/{i}.jpg": f"{i}" * 3000 for i in range(9)} | {"dog/1.jpg": "x"}
    prints = [
        TarSource(put(tmp_path / "a.tar", files)).fingerprint,
        TarSource(put(tmp_path / "moved/b.tar", files)).fingerprint,
        TarSource(put(tmp_path / "c.tar", files | {"dog/1.jpg": "y"})).fingerprint,
        TarSource(
            put(tmp_path / "d.tar", {k.replace("dog", "eel"): v for k, v in files.items()})
        ).fingerprint,
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@not_our_threads
def test_pickle_threads_and_fork(tmp_path):
    expected = [f"image {i}".encode() for i in range(300)]
    source = TarSource(put(tmp_path / "a.tar", numbered(*(i % 5 for i in range(300)))))

    def right(source):
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(source.read, range(300))) == expected

    assert right(source)
    copy = pickle.loads(pickle.dumps(source))
    assert right(copy)
    assert (copy.names, copy.classes, copy.describe(3)) == (
        source.names,
        source.classes,
        source.describe(3),
    )
    assert copy.labels.equal(source.labels)
    pid = os.fork()
    if pid == 0:
        good = False
        with suppress(Exception):
            good = right(source)
        os._exit(0 if good else 1)
    assert right(source)
    assert os.waitpid(pid, 0)[1] == 0


# --- through the sources


def test_training_on_a_tar(tmp_path):
    files = {f"{name}/{i:02}.jpg": f"{name}{i}" for name in ("cat", "dog") for i in range(20)}
    train, val = open_sources(put(tmp_path / "a.tar", files))
    assert (len(train), len(val)) == (36, 4)
    assert train.classes == ("cat", "dog")
    # What is held out depends on the names alone.
    again = open_sources(put(tmp_path / "b.tar", dict(reversed(files.items()))))[1]
    assert sorted(again.names) == sorted(val.names)
    assert len(open_source(tmp_path / "a.tar", ["dog", "cat"])) == 40


def test_a_folder_of_shards(tmp_path):
    for shard in range(3):
        files = {f"{shard}{i:03}.jpg": f"{shard} {i}" for i in range(10)}
        labels = {name.replace("jpg", "cls"): i % (2 + shard) for i, name in enumerate(files)}
        put(tmp_path / f"pets-{shard:06}.tar", dict(sorted((files | labels).items())))
    source = open_source(tmp_path, [str(i) for i in range(4)])
    assert [source.read(i) for i in range(30)] == [
        f"{i // 10} {i % 10}".encode() for i in range(30)
    ]
    assert source.labels.tolist() == [i % (2 + shard) for shard in range(3) for i in range(10)]


DATA = Path(__file__).resolve().parents[4] / "shared" / "datasets" / "imagenette-mini.tar"


@pytest.mark.skipif(not DATA.is_file(), reason=f"no {DATA}")
def test_imagenette(tmp_path):
    (tmp_path / "a.tar").symlink_to(DATA)  # the index is kept beside the link
    train, val = open_tar(tmp_path / "a.tar")
    assert (len(train), len(val), len(train.classes)) == (800, 400, 10)
    assert train.labels.bincount().tolist() == [80] * 10
    with tarfile.open(DATA) as tar:
        for source, part in ((train, "train"), (val, "val")):
            index = 371
            name = source.describe(index).rpartition(", ")[2]
            assert name.startswith(f"{part}/{labels_of(source)[index]}/")
            assert source.read(index) == tar.extractfile(name).read()
