"""Labelled images in TFRecord files: of TFDS, ImageNet's scripts, Kaggle, the package tfrecord; bad ones."""

import gzip
import io
import os
import pickle
import subprocess
import threading
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.sources.open_data import open_source, open_sources
from flambeau.data.sources.path_format import open_path
from flambeau.data.sources.source import hold_out
from flambeau.data.sources.tfrecord_file import TFRecordSource
from flambeau.errors import InputError
from flambeau.images.decode import decode
from flambeau.recipes.data.tf_example import build_example
from flambeau.recipes.data.tfrecord import TFRecordReader, TFRecordWriter

# Python 3.12 warns where a process with threads, such as torch's own, forks.
not_our_threads = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def picture(number, size=(6, 4), kind="PNG"):
    out = io.BytesIO()
    Image.new("RGB", size, (number % 256, 0, 99)).save(out, kind)
    return out.getvalue()


def put(path, *examples):
    path.unlink(missing_ok=True)
    with TFRecordWriter(path) as writer:
        for example in examples:
            writer.write(example if isinstance(example, bytes) else build_example(example))
    return path


def simple(count=6, classes=2):
    return [{"image": picture(i), "label": i % classes} for i in range(count)]


def complaint(function, *arguments, **settings):
    """The message of the InputError, checked to be one or two lines."""
    with pytest.raises(InputError) as caught:
        function(*arguments, **settings)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 2
    return message


# ---- the layouts of others -------------------------------------------------------------------------

LAYOUTS = {
    "imagenet": lambda i, image: {
        "image/height": 4,
        "image/width": 6,
        "image/channels": 3,
        "image/colorspace": b"RGB",
        "image/class/label": i % 2,
        "image/class/synset": b"n0144%d" % (i % 2),
        "image/class/text": b"tench, Tinca tinca",
        "image/object/bbox/label": [1, 2, 3],
        "image/format": b"PNG",
        "image/filename": b"n01440_%d.PNG" % i,
        "image/encoded": image,
    },
    "tfds": lambda i, image: {"id": b"n01440_%d.PNG" % i, "image": image, "label": i % 2},
    "kaggle": lambda i, image: {
        "image_name": b"n01440_%d.PNG" % i,
        "image": image,
        "target": i % 2,
    },
    "sample": lambda i, image: {
        "__key__": b"n01440_%d.PNG" % i,
        "png": image,
        "cls": b"%d" % (i % 2),
    },
    "float label": lambda i, image: {
        "filename": b"n01440_%d.PNG" % i,
        "img": image,
        "label": i % 2 + 0.0,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_of_others(tmp_path, layout):
    examples = [LAYOUTS[layout](i, picture(i)) for i in range(6)]
    source = TFRecordSource(put(tmp_path / "a.tfrecord", *examples))
    assert len(source) == 6
    assert source.classes == ("0", "1")
    assert source.labels.dtype == torch.int64
    assert source.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert source.names == [f"n01440_{i}.PNG" for i in range(6)]
    for i in range(6):
        assert source.read(i) == picture(i)
        assert decode(source.read(i), channels=3)[0, 0].tolist() == [i, 0, 99]


def test_labels_that_are_text(tmp_path):
    words = ["Hund", "Ätna", "cat", "Hund"]
    path = put(
        tmp_path / "a.tfrecord",
        *(
            {"jpg": picture(i, kind="JPEG"), "image/class/text": w.encode()}
            for i, w in enumerate(words)
        ),
    )
    source = TFRecordSource(path)
    assert source.classes == ("Hund", "cat", "Ätna")
    assert source.labels.tolist() == [0, 2, 1, 0]
    assert source.names == ["0", "1", "2", "3"]
    (tmp_path / "a.classes.txt").write_text("cat\nHund\nÄtna\n", encoding="utf-8")
    assert TFRecordSource(path).labels.tolist() == [1, 2, 0, 1]


def test_labels_as_they_stand_and_names_from_the_classes_file(tmp_path):
    examples = [{"image": picture(i), "label": 1 + i % 2} for i in range(4)]
    path = put(tmp_path / "a_train.tfrecord", *examples)
    assert TFRecordSource(path).classes == ("0", "1", "2")  # as in ImageNet's files: 0 is nothing
    (tmp_path / "a.classes.txt").write_text("background\ntench\ngoldfish\n")
    source = TFRecordSource(path)
    assert source.classes == ("background", "tench", "goldfish")
    assert source.labels.tolist() == [1, 2, 1, 2]


def test_a_file_of_the_package_tfrecord(tmp_path):
    pytest.importorskip("tfrecord")
    from tfrecord.writer import TFRecordWriter as PeerWriter

    writer = PeerWriter(str(tmp_path / "peer.tfrecord"))
    for i in range(5):
        writer.write(
            {"image": (picture(i), "byte"), "label": (i % 3, "int"), "score": (0.5, "float")}
        )
    writer.close()
    source = TFRecordSource(tmp_path / "peer.tfrecord")
    assert source.labels.tolist() == [0, 1, 2, 0, 1]
    assert [source.read(i) for i in range(5)] == [picture(i) for i in range(5)]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("said", [True, False])
def test_raw_pixels(tmp_path, channels, said):
    shape = (4, 6, channels)
    pixels = [np.random.default_rng(i).integers(0, 256, shape, np.uint8) for i in range(3)]
    names = (
        ("height", "width", "depth") if said else ("image/height", "image/width", "image/channels")
    )
    examples = []
    for i, image in enumerate(pixels):
        sides = dict(zip(names, shape, strict=True))
        if not said:
            del sides["image/channels"]
        examples.append({"image_raw": image.tobytes(), "label": i, **sides})
    source = TFRecordSource(put(tmp_path / "a.tfrecord", *examples))
    for i, image in enumerate(pixels):
        np.testing.assert_array_equal(source.read(i), image)
    if channels < 4:
        np.testing.assert_array_equal(decode(source.read(0), channels=channels), pixels[0])


def test_image_files_are_no_pixels_whatever_their_length(tmp_path):
    """A PNG that is as long as its pixels would be."""
    image = picture(3, size=(6, 4))
    examples = [
        {"image": image, "label": i, "height": 1, "width": len(image), "channels": 1}
        for i in range(2)
    ]
    assert TFRecordSource(put(tmp_path / "a.tfrecord", *examples)).read(0) == image


def test_images_of_several_sizes_and_kinds_in_one_file(tmp_path):
    raw = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
    path = put(
        tmp_path / "a.tfrecord",
        {"image": picture(0), "label": 0, "image/height": 4, "image/width": 6},
        {"image": raw.tobytes(), "label": 1, "image/height": 4, "image/width": 6},
        {"image": raw[:2].tobytes(), "label": 0, "image/height": 2, "image/width": 6},
        {"image": b"", "label": 1},
    )
    source = TFRecordSource(path)
    assert source.read(0) == picture(0)
    np.testing.assert_array_equal(source.read(1), raw)
    np.testing.assert_array_equal(source.read(2), raw[:2])
    assert source.read(3) == b""


# ---- identity --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        [b"0.png", b"0.png", b"1.png"],  # the same in two classes
        [b"a", b"", b"b"],
        [b"a", b"b\0", b"c"],
        [b"a", [b"b", b"c"], b"d"],
        [b"a", 0.5, b"d"],
    ],
)
def test_names_that_identify_nothing_give_way_to_numbers(tmp_path, names):
    examples = [{"image": picture(i), "label": i, "filename": name} for i, name in enumerate(names)]
    assert TFRecordSource(put(tmp_path / "a.tfrecord", *examples)).names == ["0", "1", "2"]


def test_names_of_other_kinds(tmp_path):
    for names, expected in (
        ([7, -1, 3], ["7", "-1", "3"]),
        ([b"\xff.png", "ü.png".encode(), b"x"], ["\udcff.png", "ü.png", "x"]),
    ):
        examples = [{"image": picture(i), "label": i, "id": name} for i, name in enumerate(names)]
        source = TFRecordSource(put(tmp_path / "a.tfrecord", *examples))
        assert source.names == expected
        hold_out(TFRecordSource(put(tmp_path / "b.tfrecord", *examples * 2)), share=0.5, seed=0)


def test_fingerprints(tmp_path):
    path = put(tmp_path / "a.tfrecord", *simple())
    first = TFRecordSource(path).fingerprint
    assert len(first) == 64
    (tmp_path / "elsewhere").mkdir()
    moved = path.rename(tmp_path / "elsewhere" / "b.tfrecord")
    assert TFRecordSource(moved).fingerprint == first
    (tmp_path / "elsewhere" / "b.classes.txt").write_text("x\ny\n")
    assert TFRecordSource(moved).fingerprint != first
    assert TFRecordSource(put(tmp_path / "a.tfrecord", *simple(7))).fingerprint != first


def test_opening_again_reads_no_records(tmp_path, monkeypatch):
    path = put(tmp_path / "a.tfrecord", *simple())
    first = TFRecordSource(path)
    assert (tmp_path / "a.tfrecord.flambeau-index").is_file()
    reads = []
    original = TFRecordReader._read_some

    def counted(self, start, end):
        reads.append(end - start)
        return original(self, start, end)

    monkeypatch.setattr(TFRecordReader, "_read_some", counted)
    again = TFRecordSource(path)
    assert reads == [12]  # the header of the last record
    assert (again.names, again.classes, again.fingerprint) == (
        first.names,
        first.classes,
        first.fingerprint,
    )
    assert again.labels.equal(first.labels)
    assert [again.read(i) for i in range(6)] == [picture(i) for i in range(6)]

    put(path, *({"image": picture(i), "label": b"only"} for i in range(3)))
    assert TFRecordSource(path).classes == ("only",)  # another file of the same name


def test_describe(tmp_path):
    path = put(tmp_path / "a.tfrecord", *simple())
    size = len(build_example(simple()[0])) + 16
    assert TFRecordSource(path).describe(1) == f"{path}, record 1 (byte {size})"


# ---- threads and processes -------------------------------------------------------------------------


def test_pickle_and_threads(tmp_path):
    path = put(tmp_path / "a.tfrecord", *simple(50))
    source = pickle.loads(pickle.dumps(TFRecordSource(path)))
    assert source.describe(3) == TFRecordSource(path).describe(3)
    assert source.names == list(map(str, range(50)))
    wrong = []

    def read():
        wrong.extend(i for i in list(range(50)) * 4 if source.read(i) != picture(i))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@not_our_threads
def test_fork(tmp_path):
    source = TFRecordSource(put(tmp_path / "a.tfrecord", *simple(50)))
    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                right = all(source.read(i) == picture(i) for i in list(range(50)) * 4)
                os._exit(0 if right else 1)
            finally:
                os._exit(2)
        pids.append(pid)
    assert all(source.read(i) == picture(i) for i in range(50))
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]


# ---- as DATA ---------------------------------------------------------------------------------------


def test_as_data(tmp_path):
    path = put(tmp_path / "a.tfrecord", *simple(40))
    train, val = open_sources(path)
    assert (len(train), len(val)) == (36, 4)
    (images, targets), bad = ImageDataset(train, image_size=4, channels=3, train=True).batch(
        torch.arange(3), torch.arange(3)
    )
    assert (tuple(images.shape), targets.tolist(), bad) == (
        (3, 3, 4, 4),
        train.labels[:3].tolist(),
        [],
    )
    assert len(open_source(path, ("0", "1", "2"))) == 40


def test_shards_in_a_folder(tmp_path):
    for shard in range(3):
        put(tmp_path / f"train.tfrecord-0000{shard}-of-00003", *simple(10))
    put(tmp_path / "val.tfrecord-00000-of-00001", *simple(4))
    for _ in range(2):  # the second time with the indexes beside them
        train, val = open_sources(tmp_path)
        assert (len(train), len(val)) == (30, 4)
        assert train.read(29) == picture(9)


# ---- bad input -------------------------------------------------------------------------------------


def test_records_without_image_or_label(tmp_path):
    path = tmp_path / "a.tfrecord"
    put(path, {"photo": b"abc", "label": 3, "box": [0.5, 1.0]})
    message = complaint(TFRecordSource, path)
    assert message.startswith(
        f"{path}, record 0 (byte 0) has no image that is known; "
        "its features: 'box' (2 float), 'label' (1 int), 'photo' (1 bytes)\n"
        "Expected one value in one of image/encoded, image, image_raw"
    )
    put(path, {"image": picture(0), "klass": 3})
    message = complaint(TFRecordSource, path)
    assert (
        "record 0 (byte 0) has no label that is known; its features: 'image' (1 bytes), " in message
    )
    put(path, {f"f{i}": i for i in range(20)})
    assert "'f18' (1 int), 'f19' (1 int), ...\n" in complaint(TFRecordSource, path)
    put(path, b"")
    assert "its features: none\n" in complaint(TFRecordSource, path)
    put(path, {"image": [0.1, 0.2], "label": 3})  # pixels as floats
    assert "no image that is known; its features: 'image' (2 float)" in complaint(
        TFRecordSource, path
    )
    put(path, {"image": picture(0), "label": [1, 2]})  # several labels
    assert "record 0 (byte 0): 2 labels\nA classifier needs one" in complaint(TFRecordSource, path)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"image": b"x"}, " has 0 labels in label; its features: 'image' (1 bytes)\n"),
        ({"image": b"x", "label": [1, 2]}, " has 2 labels in label; its features: "),
        ({"image": b"x", "label": []}, " has 0 labels in label; its features: "),
        ({"label": 1}, " has no image in image; its features: 'label' (1 int)\n"),
        (
            {"image": [b"x", b"y"], "label": 1},
            " has no image in image; its features: 'image' (2 bytes)",
        ),
        ({"image": 5, "label": 1}, " has no image in image; its features: 'image' (1 int)"),
        ({"image": b"x", "label": 0.5}, ": label 0.5\n"),
        ({"image": b"x", "label": float("nan")}, ": label nan\n"),
        ({"image": b"x", "label": float("inf")}, ": label inf\n"),
        ({"image": b"x", "label": 1e30}, ": label 1e+30\n"),
        ({"image": b"x", "label": -1}, ": label -1\nA label is the number of a class"),
        (
            {"image": b"x", "label": 2**40},
            ": label 1099511627776\nA label is the number of a class",
        ),
        ({"image": b"x", "label": b"cat"}, ": label 'cat', and 0 in the first record\n"),
        ({"image": b"x", "label": b"\xff"}, r": label b'\xff' is not UTF-8 text"),
        ({"image": b"x", "label": b"a\0b"}, r": label 'a\x00b' is no name of a class"),
        ({"image": b"x", "label": b""}, ": label '' is no name of a class"),
        (b"\xff", ": byte 0 of the Example: truncated varint\nExpected a tf.train.Example"),
        (picture(3), ": byte 10 of the Example: no field has the tag 0"),
    ],
    ids=range(18),
)
def test_a_bad_second_record_is_named(tmp_path, second, reason):
    path = put(tmp_path / "a.tfrecord", {"image": b"x", "label": 0}, second)
    size = len(build_example({"image": b"x", "label": 0})) + 16
    assert f"{path}, record 1 (byte {size}){reason}" in complaint(TFRecordSource, path)
    is_number = isinstance(second, dict) and isinstance(second.get("label"), int | float)
    assert not (tmp_path / "a.tfrecord.flambeau-index").exists() or is_number


def test_files_that_are_refused(tmp_path):
    assert "absent.tfrecord cannot be read: no such file" in complaint(
        TFRecordSource, tmp_path / "absent.tfrecord"
    )
    empty = tmp_path / "empty.tfrecord"
    empty.write_bytes(b"")
    assert complaint(TFRecordSource, empty) == f"{empty} holds no images"
    packed = tmp_path / "packed.tfrecord"
    packed.write_bytes(gzip.compress(put(tmp_path / "a.tfrecord", *simple()).read_bytes()))
    for data, what in (
        (packed.read_bytes(), "gzip file"),
        (zlib.compress(gzip.decompress(packed.read_bytes())), "zlib stream"),
    ):  # fmt: skip
        packed.write_bytes(data)
        message = complaint(open_path, packed)
        assert f"{packed} is a {what}: unpack it with `" in message
        subprocess.run(message.split("`")[1], shell=True, check=True, cwd=tmp_path)
        assert len(open_path(tmp_path / "NEW.tfrecord")[0]) == len(simple())
        (tmp_path / "NEW.tfrecord").unlink()
    text = tmp_path / "text.tfrecord"
    text.write_text("0.png,3\n" * 10)
    assert "text.tfrecord, byte 0: the checksum of the record's length" in complaint(
        TFRecordSource, text
    )


def test_each_truncation_and_each_flipped_byte_is_named(tmp_path):
    path = put(tmp_path / "a.tfrecord", *({"image": b"abc", "label": i} for i in range(2)))
    good = path.read_bytes()
    assert len(good) < 150
    for size in range(1, len(good)):
        path.write_bytes(good[:size])
        if size != len(good) // 2:
            assert f"{path}, byte " in complaint(TFRecordSource, path)
    for offset in range(len(good)):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 0x10]) + good[offset + 1 :])
        start = 0 if offset < len(good) // 2 else len(good) // 2
        assert complaint(TFRecordSource, path).startswith(f"{path}, byte {start}: the checksum of ")


def test_damage_behind_the_index_is_an_unreadable_image(tmp_path):
    path = put(tmp_path / "a.tfrecord", *simple(3))
    source = TFRecordSource(path)
    size = path.stat().st_size // 3
    data = bytearray(path.read_bytes())
    data[size + 50] ^= 1
    with path.open("rb+") as file:
        file.write(data)
    assert source.read(0) == picture(0)
    with pytest.raises(OSError, match=rf"a\.tfrecord, byte {size}: the checksum of the \d+ bytes"):
        source.read(1)
    os.truncate(path, 2 * size + 5)
    with pytest.raises(OSError, match=r"the file ends here, it was longer when opened"):
        source.read(2)
