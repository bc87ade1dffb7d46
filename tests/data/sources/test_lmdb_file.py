"""Images in LMDB files of three conventions, written by the lmdb package and the pickle module themselves."""

import io
import os
import pickle
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.sources import lmdb_file
from flambeau.data.sources.folder import FolderSource
from flambeau.data.sources.lmdb_file import LMDBSource, image_key
from flambeau.data.sources.open_data import open_sources
from flambeau.errors import InputError
from flambeau.recipes.checkpoints.safe_pickle import plain_pickle
from flambeau.recipes.data.lmdb_records import LMDBWriter
from flambeau.recipes.data.sample_order import sample_seeds

lmdb = pytest.importorskip("lmdb")


def image(number: int, form: str = "PNG") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (10, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def put(path, values, **settings):
    with (
        lmdb.open(str(path), **{"subdir": False, "map_size": 1 << 26, **settings}) as env,
        env.begin(write=True) as transaction,
    ):
        for key, value in values.items():
            transaction.put(key, value)
    return path


def by_name(path, count=6, **settings):
    values = {
        f"{name}/{number}.png".encode(): image(number + 100 * (name == "dog"))
        for name in ("dog", "cat")
        for number in range(count)
    }
    return put(path, values, **settings)


def pickled(path, pairs, dumps=pickle.dumps):
    """As the scripts called ImageFolder2LMDB write it."""
    values = {str(number).encode(): dumps(pair) for number, pair in enumerate(pairs)}
    values[b"__keys__"] = dumps(list(values))
    values[b"__len__"] = dumps(len(pairs))
    return put(path, values)


def headed(path, labels):
    """An image behind the header of MXNet's image records: flag, label, id, second id."""
    return put(path, {
        b"%08d" % number: struct.pack("<IfQQ", 0, label, number, 0) + image(number)
        for number, label in enumerate(labels)
    })  # fmt: skip


def complaint(path) -> str:
    with pytest.raises(InputError) as caught:
        LMDBSource(path)
    assert 1 <= len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


# --- classes in the keys


@pytest.mark.parametrize("subdir", [False, True])
def test_classes_in_the_keys(tmp_path, subdir):
    path = by_name(tmp_path / "x.lmdb", count=2, subdir=subdir)
    source = LMDBSource(path)
    assert source.classes == ("cat", "dog")
    assert list(source.names) == ["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"]
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert source.labels.dtype == torch.int64
    assert [source.read(place) for place in range(4)] == [image(n) for n in (0, 1, 100, 101)]
    assert source.describe(2) == f"{path}, key 'dog/0.png'"


def test_class_names_and_their_order_may_stand_beside_the_file(tmp_path):
    path = by_name(tmp_path / "pets_train.lmdb", count=1)
    (tmp_path / "pets.classes.txt").write_text("dog\neel\ncat\n")
    source = LMDBSource(path)
    assert source.classes == ("dog", "eel", "cat")
    assert source.labels.tolist() == [2, 0]
    (tmp_path / "pets.classes.txt").write_text("dog\neel\n")
    assert "label 'cat' is none of the 2 classes that" in complaint(path)


def test_what_is_packed_from_a_folder_is_held_out_as_the_folder_is(tmp_path):
    for name in ("cat", "dog"):
        for number in range(20):
            file = tmp_path / "photos" / name / "deeper" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(image(number))
    folder = FolderSource(tmp_path / "photos")
    with LMDBWriter(tmp_path / "photos.lmdb") as writer:
        for place, name in enumerate(folder.names):
            writer.write(image_key(folder.classes[folder.labels[place]], name), folder.read(place))
    assert LMDBSource(tmp_path / "photos.lmdb").names == list(folder.names)
    for ours, theirs in zip(
        open_sources(tmp_path / "photos.lmdb"), open_sources(tmp_path / "photos"), strict=True
    ):
        assert list(ours.names) == list(theirs.names)
        assert ours.labels.tolist() == theirs.labels.tolist()
        assert [ours.read(n) for n in range(len(ours))] == [
            theirs.read(n) for n in range(len(ours))
        ]


def test_keys_for_images():
    assert image_key("cat", "70") == b"cat/70"
    assert image_key("cat", "catalogue/1.png") == b"cat/catalogue/1.png"
    strange = os.fsdecode(b"\xff.png")
    assert image_key("cat", strange) == b"cat/\xff.png"
    long = [image_key("cat", "x" * 600 + str(number)) for number in range(2)]
    assert len(set(long)) == 2
    assert all(key.startswith(b"cat/") and len(key) == 4 + 64 for key in long)
    for name in ("", "a/b", "__len__", "x" * 255):
        with pytest.raises(InputError, match="cannot be stored in an LMDB file"):
            image_key(name, "1.png")


def test_keys_that_are_not_utf8(tmp_path):
    source = LMDBSource(put(tmp_path / "x.lmdb", {b"cat/\xff": image(0), b"dog/1": image(1)}))
    assert source.names == [f"cat/{os.fsdecode(bytes([255]))}", "dog/1"]
    assert source.describe(0).endswith("key 'cat/\\\\xff'")
    source.describe(0).encode()  # can be printed
    path = put(tmp_path / "y.lmdb", {b"\xff/1": image(0)})
    assert "key '\\\\xff/1': 'utf-8' codec" in complaint(path)


@pytest.mark.parametrize("key", [b"image-000000001", b"/1.png"])
def test_keys_without_a_class(tmp_path, key):
    path = put(tmp_path / "x.lmdb", {b"!/1": image(0), key: image(1)})
    assert (
        f"{path}, key {key.decode()!r}: the key names no class; expected CLASS/NAME\n"
        in complaint(path)
    )


# --- pairs of ImageFolder2LMDB


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickled_pairs(tmp_path, protocol):
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    pairs = [
        (image(0), 2),
        [image(1, "JPEG"), 0],
        (pixels, 1),
        (np.asfortranarray(pixels), np.int64(2)),
        (pixels[:, :, 0].astype(np.uint16), np.uint8(0)),
    ]
    path = pickled(tmp_path / "x.lmdb", pairs, lambda pair: pickle.dumps(pair, protocol=protocol))
    source = LMDBSource(path)
    assert list(source.names) == ["0", "1", "2", "3", "4"]
    assert source.classes == ("0", "1", "2")
    assert source.labels.tolist() == [2, 0, 1, 2, 0]
    for place, (expected, _) in enumerate(pairs):
        found = source.read(place)
        assert type(found) is type(expected)
        np.testing.assert_array_equal(found, expected)
        assert isinstance(found, bytes) or found.dtype == expected.dtype


def test_pickled_pairs_of_python_2(tmp_path):
    """Protocol 2 of Python 2.7: its `str` is the operation U (SHORT_BINSTRING) or T (BINSTRING)."""
    long = image(0)
    value = b"\x80\x02T" + struct.pack("<I", len(long)) + long + b"K\x01\x86."
    assert pickle.loads(value, encoding="bytes") == (long, 1)
    source = LMDBSource(put(tmp_path / "x.lmdb", {b"0": value}))
    assert (source.read(0), source.labels.tolist()) == (long, [1])


def test_pickled_pairs_that_come_from_a_loader(tmp_path):
    """As folder2lmdb.py of Efficient-PyTorch makes them: a batch of one of an ImageFolder of raw bytes."""
    for number, name in enumerate(("cat", "dog", "dog")):
        file = tmp_path / "photos" / name / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image(number))
    folder = torchvision.datasets.ImageFolder(
        tmp_path / "photos", loader=lambda path: Path(path).read_bytes()
    )
    pairs = [(data, label.numpy()) for data, label in torch.utils.data.DataLoader(folder)]
    assert len(pairs[0][0]) == 1
    assert pairs[0][1].shape == (1,)
    source = LMDBSource(pickled(tmp_path / "x.lmdb", pairs))
    assert source.labels.tolist() == [0, 1, 1]
    assert [source.read(place) for place in range(3)] == [image(0), image(1), image(2)]


def test_pickled_pairs_with_class_names(tmp_path):
    path = pickled(tmp_path / "x.lmdb", [(image(0), "dog"), (image(1), "cat"), (image(2), "dog")])
    source = LMDBSource(path)
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [1, 0, 1]


class Evil:
    """What a pickle can do: run any command on the machine of whoever opens the file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_is_never_run(tmp_path):
    value = pickle.dumps((image(0), Evil(tmp_path / "ran")))
    path = put(tmp_path / "x.lmdb", {b"0": value})
    assert "key '0': it names posix.system; nothing was run\n" in complaint(path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(value)  # to see that the trap works
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"image": b"x", "label": 1}, "a pickle of dict; expected"),
        ((torch.zeros(2), 1), "a pickle of tuple of Tensor, int; expected (image, label)"),
        ((np.zeros(2), 1), "a pickle of tuple of ndarray, int; expected"),
        ((np.array([None]), 1), "it holds the NumPy dtype 'O8', not read here\nRepair"),
        ((np.zeros((2, 2), ">u2"), 1), "a pickle of tuple of ndarray, int; expected"),
        ((Image.new("L", (1, 1)), 1), "it names PIL.Image.Image"),
        ({1, 2}, "a pickle of set; expected"),
        (os.system, "it names posix.system; nothing was run"),
        ((b"image", eval), "it names builtins.eval"),
    ],
)
def test_pickles_that_are_refused(tmp_path, value, reason):
    path = put(tmp_path / "x.lmdb", {b"0": pickle.dumps(value, protocol=4)})
    message = complaint(path)
    assert f"{path}, key '0': {reason}" in message
    assert len(message.splitlines()) == 2


def test_bytes_of_python_2(tmp_path):
    """They are strings to Python 3."""
    file = image(0)
    value = b"\x80\x02T" + len(file).to_bytes(4, "little") + file + b"K\x01\x86."
    source = LMDBSource(put(tmp_path / "x.lmdb", {b"0": value}))
    assert (source.read(0), source.labels.tolist()) == (file, [1])


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b"only an image", "a pickle of bytes"),
        ((b"image", 1, "more"), "a pickle of tuple of bytes, int, str"),
        ((1, b"image"), "a pickle of tuple of int, bytes"),
        ((b"image", 1.5), "a pickle of tuple of bytes, float"),
        ((b"image", np.arange(2)), "a pickle of tuple of bytes, ndarray"),
        (([b"image", b"image"], 1), "a pickle of tuple of list, int"),
        ((b"image", True), "a pickle of tuple of bytes, bool"),
        ((b"image", None), "a pickle of tuple of bytes, NoneType"),
        ((b"image", 1 << 40), "label 1099511627776 is no number of a class"),
        ((b"image", -1), "label -1\nA label is the number of a class"),
        ((b"image", "cat"), "label 'cat' beside labels like 0\n"),
    ],
)
def test_pickles_that_are_no_pairs(tmp_path, value, found):
    path = pickled(tmp_path / "x.lmdb", [(b"image", 0), value])
    message = complaint(path)
    assert f"{path}, key '1': {found}" in message


def test_plain_pickles_are_read_as_pickle_reads_them():
    shared = ["a", b"b"]
    for value in (
        (), (1,), [[], [1, 2, 3]], (None, True, False), 2**70, -(2**33), 1.5, "ü" * 300, b"b" * 70_000,
        (shared, shared, "a"), list(range(300)), np.int32(-7), np.arange(6, dtype=np.int16), "",
    ):  # fmt: skip
        for protocol in range(2, 6):
            found = plain_pickle(pickle.dumps(value, protocol=protocol))
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(found, value)
            else:
                assert found == value
            assert type(found) is (int if isinstance(value, np.int32) else type(value))


def test_damaged_pickles_end_in_one_exception():
    data = pickle.dumps((np.arange(48, dtype=np.uint8).reshape(4, 4, 3), np.int64(3)), protocol=4)
    generator, refused = random.Random(0), 0
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(generator.randint(1, 3)):
            damaged[generator.randrange(len(data))] = generator.randrange(256)
        cut = bytes(damaged[: generator.choice((len(data), generator.randrange(len(data))))])
        try:
            plain_pickle(cut)
        except ValueError:
            refused += 1
    assert refused > 1000


# --- values with a header


def test_values_with_a_header(tmp_path):
    source = LMDBSource(headed(tmp_path / "x.lmdb", [1, 0, 3]))
    assert source.labels.tolist() == [1, 0, 3]
    assert source.classes == ("0", "1", "2", "3")
    assert [source.read(place) for place in range(3)] == [image(0), image(1), image(2)]


@pytest.mark.parametrize("label", [0.5, float("nan"), float("inf"), 3e38])
def test_headers_without_a_class(tmp_path, label):
    path = headed(tmp_path / "x.lmdb", [0, label])
    message = complaint(path)
    assert f"{path}, key '00000001': " in message
    assert "whole number" in message or "is no number of a class" in message


# --- other files, damage


def test_other_values_are_refused(tmp_path):
    # The second is a Datum of Caffe: channels, height and width of a protocol buffer.
    path = put(tmp_path / "x.lmdb", {b"1": b"text", b"2": b"\x08\x03\x10\x20\x18\x20" + bytes(50)})
    assert f"{path}, key '1': neither an image file, nor a pickled pair" in complaint(path)


def test_a_first_image_that_is_damaged_does_not_decide(tmp_path):
    path = by_name(tmp_path / "x.lmdb")
    put(path, {b"cat/0.png": b""})
    source = LMDBSource(path)
    assert len(source) == 12
    assert source.read(0) == b""  # the decoder says that it is empty


def test_no_images(tmp_path):
    path = put(tmp_path / "x.lmdb", {b"__len__": pickle.dumps(0)})
    assert complaint(path) == f"{path} holds no images"
    assert "holds no images" in complaint(put(tmp_path / "y.lmdb", {}))


def test_a_damaged_file(tmp_path):
    path = by_name(tmp_path / "x.lmdb")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    message = complaint(path)
    assert message.startswith(f"{path}, byte ")
    assert message.endswith("\nCopy or make it again: flambeau pack writes LMDB files")
    assert "cannot be read: no such file" in complaint(tmp_path / "y.lmdb")
    (tmp_path / "z.lmdb").mkdir()
    assert f"{tmp_path}/z.lmdb/data.mdb cannot be read: no such file" in complaint(
        tmp_path / "z.lmdb"
    )


def test_damage_after_opening_is_one_bad_image(tmp_path):
    path = pickled(tmp_path / "x.lmdb", [(bytes(5000), 0), (bytes(5000), 1)])
    source = LMDBSource(path)
    data = path.read_bytes()
    at = data.index(pickle.dumps((bytes(5000), 1)))
    with path.open("r+b") as file:
        file.seek(at + 11)  # behind PROTO and FRAME
        file.write(b"\xff")
    assert source.read(0) == bytes(5000)
    with pytest.raises(OSError, match="no whole pickle"):
        source.read(1)
    with path.open("r+b") as file:
        file.seek(at - 16)
        file.write(b"\xff")
    with pytest.raises(
        OSError, match=r"x\.lmdb, byte \d+: no value of \d+ bytes starts on this page"
    ):
        source.read(1)


# --- the contracts of a source


@pytest.mark.parametrize("make", [by_name, lambda path: headed(path, [0, 1, 2])])
def test_opening_again_reads_no_value(tmp_path, monkeypatch, make):
    path = make(tmp_path / "x.lmdb")
    first = LMDBSource(path)
    assert {file.name for file in tmp_path.iterdir()} >= {"x.lmdb", "x.lmdb.flambeau-index"}
    monkeypatch.setattr(lmdb_file, "_index", lambda path: pytest.fail("the values are read"))
    again = LMDBSource(path)
    assert (again.names, again.classes, again.fingerprint) == (
        first.names,
        first.classes,
        first.fingerprint,
    )
    assert again.labels.tolist() == first.labels.tolist()
    assert [again.read(n) for n in range(len(again))] == [first.read(n) for n in range(len(first))]


def test_a_file_that_has_been_changed_is_indexed_again(tmp_path):
    path = by_name(tmp_path / "x.lmdb")
    before = LMDBSource(path)
    put(path, {b"eel/1.png": image(7)})
    after = LMDBSource(path)
    assert (len(before), len(after)) == (12, 13)
    assert after.classes == ("cat", "dog", "eel")
    assert after.fingerprint != before.fingerprint


def test_a_fingerprint_belongs_to_the_content(tmp_path):
    path = by_name(tmp_path / "x.lmdb")
    before = LMDBSource(path).fingerprint
    assert len(bytes.fromhex(before)) == 32
    path.rename(tmp_path / "moved.lmdb")
    assert LMDBSource(tmp_path / "moved.lmdb").fingerprint == before
    (tmp_path / "moved.classes.txt").write_text("dog\ncat\n")
    assert LMDBSource(tmp_path / "moved.lmdb").fingerprint != before


@pytest.mark.parametrize(
    "make", [by_name, lambda path: pickled(path, [(image(n), n) for n in range(9)])]
)
def test_forks_pickles_and_threads(tmp_path, make):
    source = LMDBSource(make(tmp_path / "x.lmdb"))
    expected = [source.read(place) for place in range(len(source))]
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.read(place) for place in range(len(copy))] == expected
    assert (copy.names, copy.classes, copy.fingerprint) == (
        source.names,
        source.classes,
        source.fingerprint,
    )
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(source.read, range(len(source)))) == expected
    child = os.fork()
    if not child:
        os._exit([source.read(place) for place in range(len(source))] != expected)
    assert os.waitpid(child, 0)[1] == 0


def test_batches(tmp_path):
    train, val = open_sources(by_name(tmp_path / "x.lmdb"))
    assert (len(train), len(val)) == (10, 2)
    dataset = ImageDataset(train, image_size=8, channels=3, train=True)
    indices = torch.arange(10)
    (images, targets), bad = dataset.batch(indices, sample_seeds(indices, seed=0, epoch=0))
    assert images.shape == (10, 3, 8, 8)
    assert targets.tolist() == [0] * 5 + [1] * 5
    assert not bad
