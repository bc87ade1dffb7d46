"""What is found, in which order, under which label; what is held out; and every complaint about bad input."""

import hashlib
import os
import pickle
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from flambeau.data.sources.folder import FolderSource
from flambeau.data.sources.open_data import open_source, open_sources, open_unlabelled
from flambeau.data.sources.path_format import shards_of, whole_name
from flambeau.data.sources.recordio_file import RecordSource
from flambeau.data.sources.source import SubsetSource, hold_out
from flambeau.errors import InputError
from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack


def put(path, content=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def put_all(root, *names):
    for name in names:
        put(root / name, name.encode())


def put_records(path, labels, keys=None, payload=b"image %d"):
    with RecordWriter(path) as writer:
        for number, label in enumerate(labels):
            key = number if keys is None else keys[number]
            writer.write(pack(IRHeader(0, label, key, 0), payload % number), key=key)


def complaint(function, *arguments, **settings):
    """The message of the InputError, checked to be one or two lines."""
    with pytest.raises(InputError) as caught:
        function(*arguments, **settings)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 2
    return message


def two_classes(root, count=10):
    put_all(root, *(f"{name}/{i}.png" for name in ("cat", "dog") for i in range(count)))
    return root


# --- folders


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    names = ["b/2.jpg", "b/10.jpeg", "a/z.PNG", "a/deep/er/y.webp", "a/deep.tif", "a-b/x.ppm"]
    names += ["c d/ü.GIF", "c d/1.bmp", "c d/2.tiff"]
    random.Random(0).shuffle(names)
    put_all(tmp_path, *names)
    put_all(tmp_path, "a/notes.txt", "a/.hidden.png", "a/.cache/x.png", ".git/x.png", "labels.csv")
    source = FolderSource(tmp_path)
    assert source.classes == ("a", "a-b", "b", "c d")
    assert source.names == (
        "a/deep.tif", "a/deep/er/y.webp", "a/z.PNG", "a-b/x.ppm", "b/10.jpeg", "b/2.jpg",
        "c d/1.bmp", "c d/2.tiff", "c d/ü.GIF",
    )  # fmt: skip
    assert source.labels.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3]
    assert source.labels.dtype == torch.int64
    assert len(source) == 9
    assert [source.read(i) for i in range(9)] == [name.encode() for name in source.names]
    assert source.describe(3) == str(tmp_path / "a-b" / "x.ppm")


def test_a_file_is_read_whole_whatever_size_the_system_tells(tmp_path, monkeypatch):
    source = FolderSource(two_classes(tmp_path))
    whole = [source.read(index) for index in range(len(source))]
    assert all(whole)
    for size in (0, 2, 10**6):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", lambda file, size=size: type("Facts", (), {"st_size": size}))
            assert [source.read(index) for index in range(len(source))] == whole
    (tmp_path / source.names[0]).unlink()
    with pytest.raises(FileNotFoundError):
        source.read(0)


def test_the_order_does_not_come_from_the_file_system(tmp_path, monkeypatch):
    two_classes(tmp_path)
    expected = FolderSource(tmp_path).names
    scandir = os.scandir

    class Reversed:
        def __init__(self, path):
            with scandir(path) as entries:
                self.entries = list(entries)[::-1]

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(os, "scandir", Reversed)
    assert FolderSource(tmp_path).names == expected


def test_what_archives_and_pipes_leave_is_skipped(tmp_path):
    put_all(tmp_path, "a/0.png", "b/0.png", "__MACOSX/a/0.png")
    os.mkfifo(tmp_path / "a" / "1.png")
    source = FolderSource(tmp_path)
    assert (source.classes, source.names) == (("a", "b"), ("a/0.png", "b/0.png"))


def test_links_are_followed(tmp_path):
    put_all(tmp_path / "store", "1.png", "more/2.png")
    root = two_classes(tmp_path / "data", count=1)
    (root / "cat" / "link.png").symlink_to(tmp_path / "store" / "1.png")
    (root / "dog" / "folder").symlink_to(tmp_path / "store")
    (root / "eel").symlink_to(tmp_path / "store" / "more")
    (root / "dog" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    source = FolderSource(root)
    assert source.names == (
        "cat/0.png", "cat/link.png", "dog/0.png", "dog/folder/1.png", "dog/folder/more/2.png",
        "dog/gone.png", "eel/2.png",
    )  # fmt: skip
    assert source.read(1) == b"1.png"
    assert len(source.fingerprint) == 64
    with pytest.raises(FileNotFoundError):  # a bad image like any other
        source.read(5)


def test_links_in_a_circle_are_refused(tmp_path):
    root = two_classes(tmp_path / "data")
    (root / "dog" / "all").symlink_to(root)
    assert "is a link back to" in complaint(FolderSource, root)
    (root / "dog" / "all").unlink()
    (root / "dog" / "self").symlink_to("self")
    assert f"{root}/dog/self cannot be read: too many levels" in complaint(FolderSource, root)


def test_names_that_are_not_utf8(tmp_path):
    two_classes(tmp_path)
    strange = os.fsdecode(b"\xff.png")
    put(tmp_path / "cat" / strange)
    source = FolderSource(tmp_path)
    index = source.names.index(f"cat/{strange}")
    assert source.describe(index).encode().endswith(b"\\udcff.png")  # can be printed
    assert source.read(index) == b"x"
    assert len(source.fingerprint) == 64
    assert sum(map(len, hold_out(source, share=0.5, seed=0))) == 21
    put(tmp_path / os.fsdecode(b"\xfe") / "1.png")
    assert "a class name must be UTF-8" in complaint(FolderSource, tmp_path)


def test_a_fingerprint_belongs_to_the_content(tmp_path):
    root = two_classes(tmp_path / "one")
    before = FolderSource(root).fingerprint
    assert len(bytes.fromhex(before)) == 32
    root.rename(tmp_path / "moved")
    assert FolderSource(tmp_path / "moved").fingerprint == before
    copied = shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    assert FolderSource(copied).fingerprint == before
    put(copied / "cat" / "0.png", b"another size")
    changed = FolderSource(copied).fingerprint
    (copied / "cat" / "0.png").rename(copied / "cat" / "00.png")
    renamed = FolderSource(copied).fingerprint
    (copied / "cat" / "00.png").unlink()
    assert len({before, changed, renamed, FolderSource(copied).fingerprint}) == 4


# --- .rec files


def test_a_record_file_is_read_by_its_labels(tmp_path):
    put_records(tmp_path / "x.rec", [2, 0, 2.0, np.float32(1)], keys=[34, 7, 8, 9])
    source = RecordSource(tmp_path / "x.rec")
    assert source.labels.tolist() == [2, 0, 2, 1]
    assert source.labels.dtype == torch.int64
    assert source.classes == ("0", "1", "2")
    assert list(source.names) == ["34", "7", "8", "9"]
    assert source.read(1) == b"image 1"
    assert source.describe(0) == f"{tmp_path}/x.rec, record 0 (key 34)"


def test_a_vector_of_one_label_is_a_label(tmp_path):
    put_records(tmp_path / "x.rec", [[1], [0]])
    assert RecordSource(tmp_path / "x.rec").labels.tolist() == [1, 0]


@pytest.mark.parametrize("name", ["pets.rec", "pets_train.rec", "pets_val.rec"])
def test_class_names_stand_beside_the_record_file(tmp_path, name):
    put_records(tmp_path / name, [1, 0, 1])
    (tmp_path / "pets.classes.txt").write_bytes("\ufeffcat\r\n dog \r\nÜbrige\r\n\n".encode())
    assert RecordSource(tmp_path / name).classes == ("cat", "dog", "Übrige")


def test_a_record_file_has_a_fingerprint(tmp_path):
    put_records(tmp_path / "x.rec", [0, 1, 0])
    before = RecordSource(tmp_path / "x.rec").fingerprint
    (tmp_path / "moved").mkdir()
    for name in ("x.rec", "x.idx"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert RecordSource(tmp_path / "moved" / "x.rec").fingerprint == before
    found = {before}
    for number, labels in enumerate([[0, 1, 1], [0, 1, 0, 0]]):
        put_records(tmp_path / f"{number}.rec", labels)
        found.add(RecordSource(tmp_path / f"{number}.rec").fingerprint)
    (tmp_path / "moved" / "x.classes.txt").write_text("a\nb\n")
    found.add(RecordSource(tmp_path / "moved" / "x.rec").fingerprint)
    assert len(found) == 4


def test_the_fingerprint_of_a_large_record_file_reads_its_ends(tmp_path):
    def make(name, middle, last):
        with RecordWriter(tmp_path / name) as writer:
            for label, byte in enumerate((b"a", middle, last)):
                writer.write(pack(IRHeader(0, label, 0, 0), byte * 2_000_000))
        return RecordSource(tmp_path / name).fingerprint

    assert make("1.rec", b"b", b"c") != make("2.rec", b"b", b"d")
    assert make("3.rec", b"b", b"c") == make("4.rec", b"e", b"c")  # what 'cheap' costs


# --- the embedded data


def test_no_data_named_is_the_embedded_fashion_mnist():
    train, val = open_sources(None)
    assert (len(train), len(val)) == (6000, 1000)
    assert train.classes == val.classes
    assert len(train.classes) == 10
    assert torch.bincount(train.labels).tolist() == [600] * 10
    assert torch.bincount(val.labels).tolist() == [100] * 10


# --- training and validation parts


@pytest.mark.parametrize("val_name", ["val", "valid", "validation", "test", "Val", "testing"])
def test_train_and_val_folders(tmp_path, val_name):
    two_classes(tmp_path / "train")
    put_all(tmp_path / val_name, "dog/1.png", "dog/2.png")  # no cat: still label 1
    train, val = open_sources(tmp_path)
    assert len(train) == 20
    assert val.classes == train.classes == ("cat", "dog")
    assert val.labels.tolist() == [1, 1]
    assert val.describe(0) == f"{tmp_path}/{val_name}/dog/1.png"
    assert val.read(1) == b"dog/2.png"


def test_val_comes_before_test(tmp_path):
    two_classes(tmp_path / "train")
    two_classes(tmp_path / "test", count=3)
    two_classes(tmp_path / "val", count=2)
    assert len(open_sources(tmp_path)[1]) == 4


def test_a_train_folder_alone_is_held_out_from(tmp_path):
    two_classes(tmp_path / "train")
    train, val = open_sources(tmp_path)
    assert train.classes == ("cat", "dog")
    assert (len(train), len(val)) == (18, 2)


def test_a_train_folder_of_images_is_one_class(tmp_path):
    put_all(tmp_path, "train/1.png", "train/2.png")
    assert f"{tmp_path} holds one class only, 'train'" in complaint(open_sources, tmp_path)


def test_a_folder_may_be_named_like_an_image(tmp_path):
    put_all(tmp_path, "old.png/1.png", "new.png/more.jpg/2.png")
    assert FolderSource(tmp_path).names == ("new.png/more.jpg/2.png", "old.png/1.png")


def test_train_may_be_a_class(tmp_path):
    put_all(tmp_path, "train/1.png", "train/2.png", "tram/1.png", "tram/2.png")
    train, val = open_sources(tmp_path)
    assert train.classes == ("train", "tram")
    assert (len(train), len(val)) == (2, 2)


def test_record_files_come_in_pairs(tmp_path):
    put_records(tmp_path / "x_train.rec", [0, 1, 2] * 4)
    assert sum(map(len, open_sources(tmp_path / "x_train.rec"))) == 12  # no sibling: held out
    put_records(tmp_path / "x_val.rec", [1, 0])
    train, val = open_sources(tmp_path / "x_train.rec")
    assert (len(train), len(val)) == (12, 2)
    assert val.classes == ("0", "1", "2")
    assert val.labels.tolist() == [1, 0]


def test_a_val_class_that_train_lacks_is_refused(tmp_path):
    two_classes(tmp_path / "train")
    put_all(tmp_path / "val", "cat/1.png", "dgo/1.png")
    message = complaint(open_sources, tmp_path)
    assert f"{tmp_path}/val/dgo/1.png is of class 'dgo'" in message
    assert "the training part lacks" in message
    assert "'dog'" in message
    put_records(tmp_path / "x_train.rec", [0, 1])
    put_records(tmp_path / "x_val.rec", [0, 2])
    assert "x_val.rec, record 1 (key 1) is of class '2'" in complaint(
        open_sources, tmp_path / "x_train.rec"
    )


# --- hold-out


def test_each_class_gives_its_share_and_no_image_twice(tmp_path):
    put_all(tmp_path, *(f"many/{i}.png" for i in range(100)), *(f"few/{i}.png" for i in range(5)))
    put_all(tmp_path, "two/1.png", "two/2.png", "single/1.png")
    train, val = open_sources(tmp_path)
    assert train.classes == val.classes == ("few", "many", "single", "two")
    assert torch.bincount(train.labels).tolist() == [4, 90, 1, 1]
    assert torch.bincount(val.labels, minlength=4).tolist() == [1, 10, 0, 1]
    whole = FolderSource(tmp_path)
    assert sorted([*train.names, *val.names]) == sorted(whole.names)
    for part in (train, val):
        paths = [part.describe(i) for i in range(len(part))]
        assert paths == [str(tmp_path / name) for name in part.names]
        assert [part.read(i).decode() for i in range(len(part))] == list(part.names)
        of_names = [whole.classes.index(name.split("/")[0]) for name in part.names]
        assert part.labels.tolist() == of_names
    assert len(open_sources(tmp_path, holdout=0.5)[1]) == 50 + 2 + 1
    assert torch.bincount(open_sources(tmp_path, holdout=0.99)[0].labels).tolist() == [1, 1, 1, 1]


def test_the_choice_is_the_smallest_hashes_of_each_class(tmp_path):
    put_all(tmp_path, *(f"{name}/{i}.png" for name in "ab" for i in range(30)))
    _, val = open_sources(tmp_path, seed=7)
    for name in "ab":
        names = [f"{name}/{i}.png" for i in range(30)]
        names.sort(key=lambda name: hashlib.sha256(f"7\n{name}".encode()).hexdigest())
        assert sorted(names[:3]) == [each for each in val.names if each.startswith(name)]


def test_the_choice_depends_on_seed_and_names_alone(tmp_path):
    root = two_classes(tmp_path / "one", count=200)
    first = open_sources(root)
    fingerprints = [part.fingerprint for part in first]
    moved = Path(shutil.move(root, tmp_path / "elsewhere"))
    again = open_sources(moved)
    assert [part.names for part in again] == [part.names for part in first]
    assert [part.fingerprint for part in again] == fingerprints
    assert fingerprints[0] != fingerprints[1]
    other = set(open_sources(moved, seed=1)[1].names)
    assert len(other & set(first[1].names)) < 15  # 4 expected of 40
    for number in range(5):  # 5 more images: of the 40 held out at most 5 change sides
        put(moved / "cat" / f"new{number}.png")
    grown = set(open_sources(moved)[1].names)
    assert len(set(first[1].names) - grown) <= 5
    dogs = {name for name in first[1].names if name.startswith("dog")}
    assert dogs == {name for name in grown if name.startswith("dog")}


def test_records_are_held_out_by_their_keys(tmp_path):
    labels, keys = [0, 1] * 50, list(range(1000, 1100))
    put_records(tmp_path / "x.rec", labels, keys)
    order = list(range(100))
    random.Random(0).shuffle(order)
    put_records(tmp_path / "y.rec", [labels[i] for i in order], [keys[i] for i in order])
    x, y = (open_sources(tmp_path / name)[1] for name in ("x.rec", "y.rec"))
    assert len(x) == 10
    assert set(x.names) == set(y.names)


@pytest.mark.parametrize("share", [0, 1, -0.1, 2])
def test_a_share_out_of_range_is_refused(tmp_path, share):
    with pytest.raises(ValueError, match=f"above 0 and below 1, got {share}"):
        open_sources(two_classes(tmp_path), holdout=share)


# --- evaluation


def test_evaluation_takes_the_classes_of_the_model(tmp_path):
    two_classes(tmp_path / "data", count=2)
    source = open_source(tmp_path / "data", ["eel", "dog", "cat"])
    assert source.classes == ("eel", "dog", "cat")
    assert source.labels.tolist() == [2, 2, 1, 1]
    assert source.describe(3) == f"{tmp_path}/data/dog/1.png"
    same = open_source(tmp_path / "data", ["cat", "dog"])
    assert same.labels.tolist() == [0, 0, 1, 1]
    message = complaint(open_source, tmp_path / "data", ["cats", "bird"])
    assert "is of class 'cat', which the model lacks; the nearest there is 'cats'" in message


def test_evaluation_takes_the_val_folder_unless_it_is_a_class(tmp_path):
    two_classes(tmp_path / "train", count=5)
    two_classes(tmp_path / "val", count=1)
    assert len(open_source(tmp_path, ["cat", "dog"])) == 2
    put_all(tmp_path / "other", "test/1.png", "probe/1.png")
    assert open_source(tmp_path / "other", ["probe", "test"]).labels.tolist() == [0, 1]


def test_evaluation_takes_record_files_and_a_single_class(tmp_path):
    put_records(tmp_path / "x_train.rec", [1, 1])
    (tmp_path / "x.classes.txt").write_text("cat\ndog\n")
    assert open_source(tmp_path / "x_train.rec", ["dog", "cat"]).labels.tolist() == [0, 0]


# --- prediction


def described(opened):
    """Of all images, what they are called and their class."""
    return [
        (source.describe(index), source.classes[label])
        for source, _ in opened
        for index, label in enumerate(source.labels.tolist())
    ]


def test_images_to_predict_on_lie_anywhere_and_keep_the_order_of_training(tmp_path, monkeypatch):
    names = ["a-b/1.png", "a/b/10.png", "a/b/9.PNG", "b/a/1.jpg"]
    put_all(tmp_path / "data", *names, "a/notes.txt", "b/.hidden.png")
    monkeypatch.chdir(tmp_path)
    notes = []
    opened = open_unlabelled([Path("data")], ["b", "c"], say=notes.append)
    expected = [f"data/{name}" for name in FolderSource(Path("data")).names]
    assert described(opened) == list(zip(expected, ["b", "b", "", "b"], strict=True))
    assert notes == ["data: 1 file is left out, by ending: 1 .txt"]
    put_all(tmp_path / "data", "z.png", "x.heic", "c.png/1.png")
    opened = open_unlabelled([Path("data")], [])
    expected = ["data/z.png", *expected, "data/c.png/1.png"]
    assert described(opened) == [(name, "") for name in expected]
    assert opened[0].packed is None


def test_what_to_predict_on_keeps_its_order(tmp_path):
    put_all(tmp_path, "1.png", "2", "cat/1.png")
    put_records(tmp_path / "x_train.rec", [0, 1])
    put_records(tmp_path / "x_val.rec", [1])
    paths = [tmp_path / name for name in ("2", "1.png", "x_train.rec", "cat", "1.png")]
    opened = open_unlabelled(paths, ["0"])
    assert [(len(source), packed) for source, packed in opened] == [
        (2, None), (2, paths[2]), (1, None), (1, None)
    ]  # fmt: skip
    assert [label for _, label in described(opened)] == ["", "", "0", "1", "", ""]
    assert described(opened)[0] == (str(paths[0]), "")


def test_packed_parts_in_folders_are_predicted_as_they_are_evaluated(tmp_path):
    for part, labels in (("train", [0, 1, 1]), ("val", [0, 1])):
        (tmp_path / "data" / part).mkdir(parents=True)
        put_records(tmp_path / "data" / part / "1.rec", labels)
    opened = open_unlabelled([tmp_path / "data"], ["0", "1"])
    expected = open_source(tmp_path / "data", ["0", "1"])
    assert described(opened) == [
        (expected.describe(0), "0"), (expected.describe(1), "1")
    ]  # fmt: skip
    put_all(tmp_path / "data", "train/preview.jpg")
    message = complaint(open_unlabelled, [tmp_path / "data"], [])
    assert "holds images (1, such as train/preview.jpg) and packed files in " in message


@pytest.mark.parametrize(
    ("names", "what", "reason"),
    [
        ([], "", "holds no image\nExpected files that end in .apng"),
        (["a/x.heic", "x.txt", "a/b/y.heic"], "", "holds no image (found: 2 .heic, 1 .txt)"),
        (["photos.tar"], "photo.tar", "photo.tar does not exist; did you mean"),
        ([], "gone/x.png", "does not exist, nor does its folder"),
        (["1.png"], "2.png", "Expected an image, a folder of images, or packed images: .rec"),
    ],
)
def test_nothing_to_predict_on(tmp_path, names, what, reason):
    put_all(tmp_path, *names)
    assert reason in complaint(open_unlabelled, [tmp_path / what], ["a"])


def test_a_subset_refuses_classes_that_it_cannot_number(tmp_path):
    source = FolderSource(two_classes(tmp_path))
    with pytest.raises(ValueError, match="'dog' is not in classes"):
        SubsetSource(source, torch.arange(20), classes=("cat", "eel"))
    cats = SubsetSource(source, torch.arange(10), classes=("eel", "cat"))
    assert cats.labels.tolist() == [1] * 10


# --- processes


def all_kinds(tmp_path):
    put_records(tmp_path / "x.rec", [0, 1] * 10)
    folder, record = FolderSource(two_classes(tmp_path / "data")), RecordSource(tmp_path / "x.rec")
    return [
        folder,
        record,
        SubsetSource(folder, torch.tensor([3, 12])),
        hold_out(record, share=0.2, seed=0)[1],
    ]


def test_sources_survive_pickle(tmp_path):
    for source in all_kinds(tmp_path):
        for early in (True, False):
            fingerprint = source.fingerprint if early else None
            copy = pickle.loads(pickle.dumps(source))
            assert [copy.read(i) for i in range(len(copy))] == [
                source.read(i) for i in range(len(source))
            ]
            assert copy.fingerprint == (fingerprint or source.fingerprint)
            assert copy.classes == source.classes
            assert torch.equal(copy.labels, source.labels)
            assert copy.describe(1) == source.describe(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads of its own
def test_sources_survive_fork_and_threads(tmp_path):
    for source in all_kinds(tmp_path):
        expected = [source.read(i) for i in range(len(source))]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                good = all(
                    source.read(i) == expected[i] for _ in range(20) for i in range(len(source))
                )
                status = 0 if good else 2
            finally:
                os._exit(status)
        wrong = []

        def work(source=source, expected=expected, wrong=wrong):
            for _ in range(20):
                wrong.extend(i for i in range(len(source)) if source.read(i) != expected[i])

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert os.waitpid(child, 0)[1] == 0


# --- bad input


def test_the_name_that_was_packed_leads_to_its_parts(tmp_path):
    """`flambeau pack photos pets.tar --shards 2` of train/ and val/ leaves these."""
    for part in ("train", "val"):
        put_all(tmp_path, *(f"pets_{part}-{k:05}-of-00002.tar" for k in range(2)))
    put_all(tmp_path, "pets.tar.pack.json", "pets.classes.txt", "pets_train.tar.flambeau-shards")
    message = complaint(open_sources, tmp_path / "pets.tar")
    assert f"pets.tar does not exist; did you mean {tmp_path}/pets_train.tar?" in message
    message = complaint(open_sources, tmp_path / "pets_vale.tar")
    assert f"did you mean {tmp_path}/pets_val.tar?" in message


def test_a_missing_path_names_its_nearest_sibling(tmp_path):
    two_classes(tmp_path / "photos")
    message = complaint(open_sources, tmp_path / "phots")
    assert f"{tmp_path}/phots does not exist; did you mean {tmp_path}/photos?" in message
    assert "did you mean" not in complaint(open_sources, tmp_path / "zzz")
    message = complaint(open_sources, tmp_path / "no" / "photos")
    assert f"nor does its folder {tmp_path}/no" in message
    assert "does not exist" in complaint(open_source, tmp_path / "phots", ["a"])


@pytest.mark.parametrize("name", ["photos.7z", "x.idx", "one.png"])
def test_a_file_of_another_type(tmp_path, name):
    put(tmp_path / name)
    message = complaint(open_sources, tmp_path / name)
    assert (
        f"{tmp_path}/{name} is neither a folder nor a file of packed images\nExpected a folder with"
        in message
    )


def test_an_empty_folder(tmp_path):
    assert f"{tmp_path} has no sub-folders; expected one per class" in complaint(
        open_sources, tmp_path
    )


def test_images_outside_the_class_folders(tmp_path):
    put_all(tmp_path, "b.jpg", "a.jpg")
    message = complaint(open_sources, tmp_path)
    assert f"{tmp_path} holds images outside any class folder (2, such as a.jpg)" in message
    assert "Move each into the folder of its class" in message
    two_classes(tmp_path)
    assert "such as a.jpg" in complaint(open_sources, tmp_path)


def test_one_class_only(tmp_path):
    put_all(tmp_path, "cat/1.png", "cat/2.png")
    assert f"{tmp_path} holds one class only, 'cat'; a classifier" in complaint(
        open_sources, tmp_path
    )
    put_records(tmp_path / "x.rec", [3, 3])
    assert "x.rec holds one class only, '3'" in complaint(open_sources, tmp_path / "x.rec")


def test_class_folders_without_images(tmp_path):
    put_all(tmp_path, "cat/1.heic", "cat/2.HEIC", "dog/3.heic", "dog/README")
    message = complaint(open_sources, tmp_path)
    assert "has 2 sub-folders, but no image in them (found: 3 .heic, 1 without ending)" in message
    assert ".jpeg .jpg .mpo" in message
    two_classes(tmp_path)
    (tmp_path / "eel").mkdir()
    message = complaint(open_sources, tmp_path)
    assert f"{tmp_path} has class folders without any image: eel" in message
    assert open_source(tmp_path, ["cat", "dog", "eel"]).labels.unique().tolist() == [0, 1]


def test_a_class_number_without_records_is_fine(tmp_path):
    put_records(tmp_path / "x.rec", [1, 3] * 4)  # counted from 1, or a subset of a larger set
    train, val = open_sources(tmp_path / "x.rec")
    assert train.classes == ("0", "1", "2", "3")
    assert len(val) == 2


def test_nothing_can_be_held_out_of_single_images(tmp_path):
    put_all(tmp_path, "cat/1.png", "dog/1.png")
    assert "no class has two images" in complaint(open_sources, tmp_path)


def test_a_truncated_or_malformed_record_file(tmp_path):
    put_records(tmp_path / "x.rec", [0, 1, 0, 1])
    content = (tmp_path / "x.rec").read_bytes()
    for name, damaged in (("cut", content[:-6]), ("bad", b"zz" + content[2:])):
        for index in (True, False):
            path = tmp_path / f"{name}{index}.rec"
            path.write_bytes(damaged)
            if index:
                shutil.copy(tmp_path / "x.idx", path.with_suffix(".idx"))
            message = complaint(open_sources, path)
            assert str(path) in message
            assert "byte" in message
            assert "The file is damaged" in message
    path = tmp_path / "short.rec"
    with RecordWriter(path) as writer:
        writer.write(b"no header")
    message = complaint(open_sources, path)
    assert f"{path}, record 0 (key 0): an image record has at least 24 bytes" in message
    (tmp_path / "empty.rec").write_bytes(b"")
    assert f"{tmp_path}/empty.rec is empty\n" in complaint(open_sources, tmp_path / "empty.rec")


def test_a_record_that_is_damaged_later_cannot_be_read(tmp_path):
    put_records(tmp_path / "x.rec", [0, 1])
    source = RecordSource(tmp_path / "x.rec")
    with (tmp_path / "x.rec").open("r+b") as file:
        file.write(b"zz")
    with pytest.raises(OSError, match="wrong magic"):
        source.read(0)


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ([1, 2], "2 labels\nA classifier needs one label per record"),
        (0.5, "label 0.5\nA label is the number of a class"),
        (-1, "label -1\n"),
        (float("nan"), "label nan\n"),
        (float("inf"), "label inf\n"),
        (1 << 24, "label 16777216\n"),
        ((1 << 24) - 1, "label 16777215, and only 3 labels are different\n"),
    ],
)
def test_labels_that_are_no_class_numbers(tmp_path, label, reason):
    put_records(tmp_path / "x.rec", [0, label, 1], keys=[5, 6, 7])
    message = complaint(open_sources, tmp_path / "x.rec")
    assert f"{tmp_path}/x.rec, record 1 (key 6): {reason}" in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"cat\n", "{rec}, record 1 (key 1): label 1 is none of the 1 classes that "),
        (b"cat\n\ndog\n", "x.classes.txt, line 2 is empty"),
        (b"cat\ndog\ncat\n", "names class 'cat' twice"),
        (b"cat\n\xff\n", "x.classes.txt is not UTF-8 text"),
        (b"", "is none of the 0 classes that "),
    ],
)
def test_wrong_class_names_of_a_record_file(tmp_path, content, reason):
    put_records(tmp_path / "x.rec", [0, 1])
    (tmp_path / "x.classes.txt").write_bytes(content)
    message = complaint(open_sources, tmp_path / "x.rec")
    assert reason.format(rec=tmp_path / "x.rec") in message


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
def test_what_may_not_be_read(tmp_path, monkeypatch):
    root = two_classes(tmp_path / "data")
    put_records(tmp_path / "x.rec", [0, 1])
    locked = {str(root / "cat"), str(tmp_path / "x.rec")}
    scandir, opening = os.scandir, Path.open

    def refuse(function):  # chmod would not stop root
        def call(path, *arguments, **settings):
            if str(path) in locked:
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *arguments, **settings)

        return call

    monkeypatch.setattr(os, "scandir", refuse(scandir))
    monkeypatch.setattr(Path, "open", refuse(opening))
    assert complaint(open_sources, root) == f"{root}/cat cannot be read: permission denied"
    message = complaint(open_sources, tmp_path / "x.rec")
    assert message == f"{tmp_path}/x.rec cannot be read: permission denied"
    monkeypatch.setattr(Path, "is_dir", refuse(Path.exists))
    message = complaint(open_sources, root / "cat")
    assert f"{root}/cat cannot be read: permission denied" in message


# --- folders of packed files


@pytest.mark.parametrize(
    "pattern", ["{}-{}.rec", "x_{}-0000{}-of-00002.rec", "cifar10-{}.{}.rec", "{}{}.rec"]
)
def test_shards_are_train_or_val_by_a_word_in_their_names(tmp_path, pattern):
    for part, value in (("train", 10), ("val", 20)):
        for number in range(2):
            path = tmp_path / pattern.format(part, number)
            put_records(path, [0, 1, number], payload=b"%d:%%d" % (value + number))
    train, val = open_sources(tmp_path)
    for source, value in ((train, 10), (val, 20)):
        assert source.labels.tolist() == [0, 1, 0, 0, 1, 1]
        assert [source.read(k)[:2] for k in range(6)] == [
            b"%d" % (value + k // 3) for k in range(6)
        ]
        assert len(set(source.names)) == 6
        assert pickle.loads(pickle.dumps(source)).read(5) == source.read(5)
    assert train.describe(4).endswith(".rec, record 1 (key 1)")


def test_shards_without_such_a_word_are_held_out_from(tmp_path):
    for number in range(3):
        put_records(tmp_path / f"part{number}.rec", [0, 1] * 5)
    train, val = open_sources(tmp_path)
    assert (len(train), len(val)) == (26, 4)  # 15 a class: round(1.5) is 2


@pytest.mark.parametrize(
    ("whole", "shard"),
    [("x.rec", "x-0000{}-of-00003.rec"), ("x.tfrecord", "x.tfrecord-0000{}-of-00003")],
)
def test_shards_by_the_name_of_the_whole(tmp_path, whole, shard):
    paths = [tmp_path / shard.format(number) for number in range(3)]
    for path in paths:
        if path.suffix == ".rec":
            put_records(path, [0, 1] * 5)
        else:
            path.touch()
    (tmp_path / f"other-{shard.format(0)}").touch()
    assert shards_of(tmp_path / whole) == paths
    assert all(whole_name(path) == tmp_path / whole for path in paths)
    if whole == "x.rec":
        train, val = open_sources(tmp_path / whole)
        assert (len(train), len(val)) == (26, 4)
        assert open_sources(paths[1])[0].fingerprint != train.fingerprint  # one is still one
    paths[1].unlink()
    message = complaint(open_sources, tmp_path / whole)
    assert (
        f"{tmp_path / whole} is a set of 3 shards, of which 2 are here: {paths[0].name}" in message
    )
    assert shards_of(paths[0]) == []


def test_shards_of_several_formats_are_refused(tmp_path):
    put_records(tmp_path / "a.rec", [0, 1])
    (tmp_path / "b.npy").write_bytes(b"")
    assert "holds files of several formats: npy, rec" in complaint(open_sources, tmp_path)


def test_classes_of_shards_are_united(tmp_path):
    put_records(tmp_path / "a.rec", [0, 1])
    put_records(tmp_path / "b.rec", [0, 11, 2])
    train, val = open_sources(tmp_path)
    assert train.classes == tuple(map(str, range(12)))
    assert sorted(torch.cat([train.labels, val.labels]).tolist()) == [0, 0, 1, 2, 11]
