"""Data sets by name: small files in their true formats, against what torchvision's classes give."""

import bz2
import csv
import gzip
import hashlib
import importlib.util
import json
import os
import pickle
import tarfile
import urllib.error
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets
from PIL import Image

from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.sources import torchvision_sets
from flambeau.data.sources.torchvision_sets import NAMES, open_named
from flambeau.errors import InputError
from flambeau.images.decode import decode
from flambeau.recipes.data.sample_order import sample_seeds

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("socket.create_connection", refuse)


@pytest.fixture(autouse=True)
def _any_number_of_images(monkeypatch):
    for name in NAMES:
        few = torchvision_sets._SETS[name]._replace(num_images=0)
        monkeypatch.setitem(torchvision_sets._SETS, name, few)


def complaint(name, root, **settings) -> str:
    with pytest.raises(InputError) as caught:
        open_named(name, root, **{"download": False, **settings})
    assert len(str(caught.value).splitlines()) == 2
    return str(caught.value)


# --- small files in the true formats


def noise(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def put(path: Path, data: bytes) -> str:
    """Write a file and return its MD5."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return hashlib.md5(data).hexdigest()


def put_image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(noise(9, 12, 3))
    image.save(path, "PNG" if path.suffix == ".png" else "PPM" if path.suffix == ".ppm" else "JPEG")


def idx(array: np.ndarray) -> bytes:
    """LeCun's format; type 8 is uint8, 12 is int32, all big-endian."""
    kind = {"uint8": 8, "int32": 12}[array.dtype.name]
    head = bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def old_pickle(value: object) -> bytes:
    """As NumPy of 2009 wrote it: the flags of a dtype are the numbers 0 and 1."""
    return pickle.dumps(value, protocol=2).replace(b"\x89\x88\x87", b"K\x00K\x01\x87")


def make_cifar(root, monkeypatch, class_name, folder, files, meta, key, label_key, count):
    def batch(number):
        labels = [(number + index) % count for index in range(6)]
        return old_pickle({"data": noise(6, 3072), label_key: labels})

    sums = {name: put(root / folder / name, batch(number)) for number, name in enumerate(files)}
    names = [f"class {number}" for number in range(count)]
    names_sum = put(root / folder / meta, old_pickle({key: names}))
    of_set = getattr(torchvision.datasets, class_name)
    parts = [[name, sums[name]] for name in files]
    monkeypatch.setattr(of_set, "train_list", parts[:-1])
    monkeypatch.setattr(of_set, "test_list", parts[-1:])
    monkeypatch.setattr(of_set, "meta", {"filename": meta, "key": key, "md5": names_sum})


def cifar10(root, monkeypatch):
    files = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    arguments = ("batches.meta", "label_names", "labels", 10)
    make_cifar(root, monkeypatch, "CIFAR10", "cifar-10-batches-py", files, *arguments)


def cifar100(root, monkeypatch):
    arguments = (["train", "test"], "meta", "fine_label_names", "fine_labels", 100)
    make_cifar(root, monkeypatch, "CIFAR100", "cifar-100-python", *arguments)


def make_idx(folder, images, labels, count):
    for name, array in ((images, noise(count, 28, 28)), (labels, noise(count) % 10)):
        put(folder / name, idx(array))


def mnist(root, monkeypatch, class_name="MNIST"):
    for part, count in (("train", 12), ("t10k", 5)):
        names = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
        make_idx(root / class_name / "raw", *names, count)


def fashion_mnist(root, monkeypatch):
    mnist(root, monkeypatch, "FashionMNIST")


def kmnist(root, monkeypatch):
    mnist(root, monkeypatch, "KMNIST")


def emnist(split):
    def make(root, monkeypatch):
        for part in ("train", "test"):
            prefix = f"emnist-{split}-{part}"
            names = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
            make_idx(root / "EMNIST" / "raw", *names, 7)

    return make


def qmnist(root, monkeypatch):
    for part in ("train", "test"):
        folder, columns = root / "QMNIST" / "raw", RANDOM.integers(0, 10, (6, 8), dtype=np.int32)
        put(folder / f"qmnist-{part}-images-idx3-ubyte", idx(noise(6, 28, 28)))
        put(folder / f"qmnist-{part}-labels-idx2-int", idx(columns))


def usps(root, monkeypatch):
    for name in ("usps.bz2", "usps.t.bz2"):
        lines = []
        for label in range(1, 11):  # as libsvm writes: labels from 1, pixels from -1 to 1
            pixels = RANDOM.uniform(-1, 1, 256)
            words = " ".join(f"{place}:{value:.4f}" for place, value in enumerate(pixels, start=1))
            lines.append(f"{label} {words}\n")
        put(root / name, bz2.compress("".join(lines).encode()))


def svhn(root, monkeypatch):
    scipy_io = pytest.importorskip("scipy.io")
    root.mkdir(parents=True)
    parts = {}
    for part in ("train", "test"):
        path = root / f"{part}_32x32.mat"
        labels = np.array([[10], [1], [9], [10]], np.uint8)
        scipy_io.savemat(path, {"X": noise(32, 32, 3, 4), "y": labels}, do_compression=True)
        parts[part] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", parts)


def stl10(root, monkeypatch):
    folder = root / "stl10_binary"
    lists = []
    for part in ("train", "test"):
        x = put(folder / f"{part}_X.bin", noise(4, 3, 96, 96).tobytes())
        y = put(folder / f"{part}_y.bin", bytes([1, 2, 3, 1]))
        lists.append([[f"{part}_X.bin", x], [f"{part}_y.bin", y]])
    lists[0].append(["unlabeled_X.bin", put(folder / "unlabeled_X.bin", b"")])
    put(folder / "class_names.txt", b"airplane\nbird\ncar\n")
    monkeypatch.setattr(torchvision.datasets.STL10, "train_list", lists[0])
    monkeypatch.setattr(torchvision.datasets.STL10, "test_list", lists[1])


def imagenette(folder):
    def make(root, monkeypatch):
        for part in ("train", "val"):
            for wnid in ("n01440764", "n02102040"):
                for number in range(3):
                    put_image(root / folder / part / wnid / f"{wnid}_{number}.JPEG")

    return make


def flowers102(root, monkeypatch):
    scipy_io = pytest.importorskip("scipy.io")
    for number in range(1, 7):
        put_image(root / "flowers-102" / "jpg" / f"image_{number:05}.jpg")
    sums = {}
    for name, content in (
        ("imagelabels", {"labels": np.array([[77, 1, 102, 77, 1, 1]], np.uint8)}),
        ("setid", {"trnid": [[1, 3]], "valid": [[2, 6]], "tstid": [[4, 5]]}),
    ):
        path = root / "flowers-102" / f"{name}.mat"
        scipy_io.savemat(path, content)
        sums[name] = (path.name, hashlib.md5(path.read_bytes()).hexdigest())
    files = {"image": ("", ""), "label": sums["imagelabels"], "setid": sums["setid"]}
    monkeypatch.setattr(torchvision.datasets.Flowers102, "_file_dict", files)


def food101(root, monkeypatch):
    for part, numbers in (("train", "12"), ("test", "34")):
        lists = {name: [f"{name}/{n}" for n in numbers] for name in ("waffles", "apple_pie")}
        put(root / "food-101" / "meta" / f"{part}.json", json.dumps(lists).encode())
        for listed in lists.values():
            for name in listed:
                put_image(root / "food-101" / "images" / f"{name}.jpg")


def dtd(root, monkeypatch):
    for part in ("train", "val"):
        names = [f"{name}/{name}_{part}{n}.jpg" for name in ("banded", "woven") for n in range(2)]
        put(root / "dtd" / "dtd" / "labels" / f"{part}1.txt", "\n".join(names).encode())
        for name in names:
            put_image(root / "dtd" / "dtd" / "images" / name)


def fgvc_aircraft(root, monkeypatch):
    folder = root / "fgvc-aircraft-2013b" / "data"
    put(folder / "variants.txt", b"707-320\nMD-80 X\n")
    for part, first in (("train", 10), ("val", 20)):
        put(folder / f"images_variant_{part}.txt", b"%d MD-80 X\n%d 707-320\n" % (first, first + 1))
        for number in (first, first + 1):
            put_image(folder / "images" / f"{number}.jpg")


def oxford_pets(root, monkeypatch):
    folder = root / "oxford-iiit-pet"
    for part, number in (("trainval", 1), ("test", 2)):
        lines = f"Abyssinian_{number} 1 1 1\ngreat_pyrenees_{number} 2 2 1\n"
        put(folder / "annotations" / f"{part}.txt", lines.encode())
        for name in ("Abyssinian", "great_pyrenees"):
            put_image(folder / "images" / f"{name}_{number}.jpg")


def gtsrb(root, monkeypatch):
    folder = root / "gtsrb"
    for label in range(43):
        put_image(folder / "GTSRB" / "Training" / f"{label:05}" / "00000_00000.ppm")
    with (folder / "GT-final_test.csv").open("w", newline="") as file:
        rows = csv.writer(file, delimiter=";")
        rows.writerow(["Filename", "ClassId"])
        for number, label in enumerate((16, 42)):
            rows.writerow([f"{number:05}.ppm", label])
            put_image(folder / "GTSRB" / "Final_Test" / "Images" / f"{number:05}.ppm")


def class_folders(*folders, ending):
    def make(root, monkeypatch):
        for folder in folders:
            for name in ("negative", "positive"):
                for number in range(2):
                    put_image(root / folder / name / f"{number}{ending}")

    return make


MAKERS = {
    "cifar10": cifar10, "cifar100": cifar100, "mnist": mnist, "fashion-mnist": fashion_mnist,
    "kmnist": kmnist, "qmnist": qmnist, "emnist-balanced": emnist("balanced"),
    "emnist-digits": emnist("digits"), "usps": usps, "svhn": svhn, "stl10": stl10,
    "imagenette": imagenette("imagenette2"), "imagenette-160": imagenette("imagenette2-160"),
    "imagenette-320": imagenette("imagenette2-320"), "flowers102": flowers102, "food101": food101,
    "dtd": dtd, "fgvc-aircraft": fgvc_aircraft, "oxford-pets": oxford_pets, "gtsrb": gtsrb,
    "eurosat": class_folders("eurosat/2750", ending=".jpg"),
    "country211": class_folders("country211/train", "country211/valid", ending=".jpg"),
    "rendered-sst2": class_folders("rendered-sst2/train", "rendered-sst2/valid", ending=".png"),
}  # fmt: skip
# What torchvision's own classes are called with, written out once more.
PEERS = {
    "imagenette": [{"split": "train", "size": "full"}, {"split": "val", "size": "full"}],
    "imagenette-160": [{"split": "train", "size": "160px"}, {"split": "val", "size": "160px"}],
    "imagenette-320": [{"split": "train", "size": "320px"}, {"split": "val", "size": "320px"}],
    "emnist-balanced": [{"split": "balanced", "train": flag} for flag in (True, False)],
    "emnist-digits": [{"split": "digits", "train": flag} for flag in (True, False)],
    "svhn": [{"split": "train"}, {"split": "test"}], "stl10": [{"split": "train"}, {"split": "test"}],
    "flowers102": [{"split": "train"}, {"split": "val"}], "dtd": [{"split": "train"}, {"split": "val"}],
    "food101": [{"split": "train"}, {"split": "test"}],
    "fgvc-aircraft": [{"split": "train"}, {"split": "val"}],
    "oxford-pets": [{"split": "trainval"}, {"split": "test"}],
    "gtsrb": [{"split": "train"}, {"split": "test"}], "eurosat": [{}],
    "country211": [{"split": "train"}, {"split": "valid"}],
    "rendered-sst2": [{"split": "train"}, {"split": "val"}],
}  # fmt: skip


def test_each_name_has_a_maker():
    assert set(MAKERS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:dtype")  # of the peer, which reads old pickles with NumPy 2.4.0
def test_a_set_gives_what_torchvision_gives(tmp_path, monkeypatch, name):
    MAKERS[name](tmp_path / "data", monkeypatch)
    parts = open_named(name, tmp_path / "data", download=False)
    class_name = torchvision_sets._SETS[name].class_name
    settings = PEERS.get(name, [{"train": True}, {"train": False}])
    assert [part is not None for part in parts] == [True, len(settings) == 2]
    for part, arguments in zip(parts, settings, strict=False):
        peer = getattr(torchvision.datasets, class_name)(tmp_path / "data", **arguments)
        assert len(part) == len(peer) > 0
        for index in range(len(peer)):
            image, label = peer[index]
            expected = np.array(image.convert("RGB"))
            if name.startswith("emnist"):
                expected = expected.transpose(1, 0, 2)
            np.testing.assert_array_equal(decode(part.read(index), channels=3), expected)
            assert part.labels[index] == label
    assert parts[1] is None or parts[0].classes == parts[1].classes


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("imagenette-160", ("tench", "English springer")),
        ("fashion-mnist", torchvision.datasets.FashionMNIST.classes),
        ("usps", "0123456789"),
        ("oxford-pets", ("Abyssinian", "Great Pyrenees")),
        ("cifar10", [f"class {number}" for number in range(10)]),
        ("gtsrb", [str(number) for number in range(43)]),
        ("stl10", ("airplane", "bird", "car")),
    ],
)
def test_class_names(tmp_path, monkeypatch, name, classes):
    MAKERS[name](tmp_path / "data", monkeypatch)
    assert open_named(name, tmp_path / "data", download=False)[0].classes == tuple(classes)


def test_a_name_may_be_written_otherwise(tmp_path, monkeypatch):
    fashion_mnist(tmp_path, monkeypatch)
    assert len(open_named("Fashion_MNIST", tmp_path, download=False)[0]) == 12


@pytest.mark.parametrize("name", ["cifar10", "imagenette-160"])
def test_a_set_in_pickles_threads_and_forks(tmp_path, monkeypatch, name):
    MAKERS[name](tmp_path / "data", monkeypatch)
    source, _ = open_named(name, tmp_path / "data", download=False)

    def digest(of, index):
        return hashlib.sha256(np.asarray(of.read(index)).tobytes()).hexdigest()

    expected = [digest(source, index) for index in range(len(source))]
    assert len(set(expected)) == len(source)
    copy = pickle.loads(pickle.dumps(source))
    assert [digest(copy, index) for index in range(len(copy))] == expected
    assert (copy.fingerprint, list(copy.names)) == (source.fingerprint, list(source.names))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda index: digest(source, index), range(len(source)))) == expected
    child = os.fork()
    if not child:
        os._exit([digest(source, index) for index in range(len(source))] != expected)
    assert os.waitpid(child, 0)[1] == 0


def test_a_batch_of_pixels(tmp_path, monkeypatch):
    cifar10(tmp_path, monkeypatch)
    source, _ = open_named("cifar10", tmp_path, download=False)
    dataset = ImageDataset(source, image_size=32, channels=3, train=False)
    indices = source.labels.new_tensor([3, 29])
    (images, targets), bad = dataset.batch(indices, sample_seeds(indices, seed=0, epoch=0))
    assert not bad
    assert targets.tolist() == source.labels[indices].tolist()
    np.testing.assert_array_equal(images[1].permute(1, 2, 0).numpy(), source.read(29))


@pytest.mark.parametrize("name", ["mnist", "food101"])
def test_a_fingerprint_belongs_to_the_content(tmp_path, monkeypatch, name):
    MAKERS[name](tmp_path / "1", monkeypatch)
    MAKERS[name](tmp_path / "2", monkeypatch)

    def fingerprint(root):
        return open_named(name, root, download=False)[0].fingerprint

    before = fingerprint(tmp_path / "1")
    assert len(bytes.fromhex(before)) == 32
    (tmp_path / "1").rename(tmp_path / "3")
    assert fingerprint(tmp_path / "3") == before != fingerprint(tmp_path / "2")


def test_what_an_image_is_called(tmp_path, monkeypatch):
    cifar10(tmp_path, monkeypatch)
    food101(tmp_path, monkeypatch)
    train, test = open_named("cifar10", tmp_path, download=False)
    assert train.describe(7) == "cifar10 train, image 7"
    assert test.describe(0) == "cifar10 test, image 0"
    pies, _ = open_named("food101", tmp_path, download=False)
    assert (
        pies.describe(0) == f"{tmp_path}/food-101/images/{pies.names[0][len('food-101/images/') :]}"
    )
    with pytest.raises(FileNotFoundError):
        (Path(pies.describe(0))).unlink()
        pies.read(0)


def test_warnings_about_old_pickles_are_not_shown(tmp_path, monkeypatch):
    cifar10(tmp_path, monkeypatch)
    load = torchvision.datasets.CIFAR10._load_meta

    def warn(self):
        # The words of NumPy 2.4.0 to 2.4.4.
        message = "dtype(): align should be passed as Python or NumPy boolean but got `align=0`."
        warnings.warn(message, np.exceptions.VisibleDeprecationWarning, stacklevel=2)
        load(self)

    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_load_meta", warn)
    assert len(open_named("cifar10", tmp_path, download=False)[0]) == 30


# --- missing, damaged, downloaded


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # scipy is not reached
    for download in (False, True):
        message = complaint(name, tmp_path, download=download)
        assert message.startswith(f"{name}: {tmp_path / torchvision_sets._SETS[name].files[0]}")
        assert " not found" in message
        assert ("and the download failed: " in message) == download
        archives = ", ".join(torchvision_sets._SETS[name].archives)
        advice = f"Give --download, which fetches {archives}, or put that into {tmp_path} before"
        if download:
            advice = (
                "Look at the connection (behind a proxy, at the variable HTTPS_PROXY) and give the same "
                f"command again, or fetch {archives} elsewhere and put that into {tmp_path}"
            )
        assert message.endswith(f"\n{advice}")


def test_an_archive_that_is_not_the_one_is_said_where_no_other_can_be_fetched(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"cut short")
    message = complaint("cifar10", tmp_path, download=True)
    assert "Give --download" not in message
    assert message.endswith(
        f"\ncifar-10-python.tar.gz lies in {tmp_path}, but is not what its checksum says or could not be "
        "unpacked: put a whole copy there, or remove it where there is a connection, and give the same "
        "command again"
    )


def test_some_files_are_missing(tmp_path, monkeypatch):
    cifar10(tmp_path, monkeypatch)
    for name in ("data_batch_3", "test_batch"):
        (tmp_path / "cifar-10-batches-py" / name).unlink()
    message = complaint("cifar10", tmp_path)
    assert f"cifar10: {tmp_path}/cifar-10-batches-py/data_batch_3 and 1 more not found\n" in message
    fetches = f"which fetches cifar-10-python.tar.gz, or put that into {tmp_path} before"
    assert message.endswith(fetches)
    (tmp_path / "cifar-10-python.tar.gz").touch()
    assert complaint("cifar10", tmp_path).endswith(
        "which unpacks cifar-10-python.tar.gz that lies there"
    )


def test_a_wrong_checksum(tmp_path, monkeypatch):
    cifar10(tmp_path, monkeypatch)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert f"cifar10 in {tmp_path} is damaged: Dataset not found or corru" in complaint(
        "cifar10", tmp_path
    )


@pytest.mark.parametrize("cut", [0, 3, 7, 20, 5000])
@pytest.mark.parametrize("what", ["images-idx3-ubyte", "labels-idx1-ubyte"])
def test_files_without_a_checksum_that_are_cut_short(tmp_path, monkeypatch, cut, what):
    mnist(tmp_path, monkeypatch)
    path = tmp_path / "MNIST" / "raw" / f"train-{what}"
    data = path.read_bytes()
    path.write_bytes(data[: min(cut, len(data) - 1)])
    assert f"mnist in {tmp_path} is damaged: " in complaint("mnist", tmp_path)


def test_a_label_beyond_the_classes(tmp_path, monkeypatch):
    mnist(tmp_path, monkeypatch)
    labels = np.array([0] * 11 + [10], np.uint8)
    put(tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte", idx(labels))
    assert "is damaged: labels 0 to 10 of 10 classes in mnist train" in complaint("mnist", tmp_path)
    put(tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte", idx(labels[:5]))
    assert "is damaged: 12 images and 5 labels in mnist train" in complaint("mnist", tmp_path)


def test_unpacking_that_was_interrupted(tmp_path, monkeypatch):
    MAKERS["imagenette-160"](tmp_path, monkeypatch)
    known = torchvision_sets._SETS["imagenette-160"]._replace(num_images=9469 + 3925)
    monkeypatch.setitem(torchvision_sets._SETS, "imagenette-160", known)
    message = complaint("imagenette-160", tmp_path)
    assert f"imagenette-160 in {tmp_path} has 12 images instead of 13394: unpacking was" in message
    assert "\nRemove it there (imagenette2-160 ...), then give --download, which" in message


def test_archives_that_are_there_are_unpacked_without_a_network(tmp_path, monkeypatch):
    mnist(tmp_path / "made", monkeypatch)
    resources = []
    for path in sorted((tmp_path / "made" / "MNIST" / "raw").iterdir()):
        packed = gzip.compress(path.read_bytes())
        resources.append(
            (f"{path.name}.gz", put(tmp_path / "MNIST" / "raw" / f"{path.name}.gz", packed))
        )
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    assert "train-images-idx3-ubyte and 3 more not found" in complaint("mnist", tmp_path)
    train, _ = open_named("mnist", tmp_path, download=True)
    made, _ = open_named("mnist", tmp_path / "made", download=False)
    assert train.fingerprint == made.fingerprint


def test_a_tar_archive_is_unpacked_without_a_network(tmp_path, monkeypatch):
    cifar10(tmp_path / "made", monkeypatch)
    archive = tmp_path / "data" / "cifar-10-python.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "made" / "cifar-10-batches-py", "cifar-10-batches-py")
    digest = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "tgz_md5", digest)
    assert len(open_named("cifar10", tmp_path / "data", download=True)[0]) == 30


def test_an_unknown_name(tmp_path):
    message = complaint("cifar_1O", tmp_path)
    assert message.startswith(
        "no data set is named 'cifar-1o'; did you mean 'cifar10'?\nThose known: cifar10,"
    )


def test_a_package_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        complaint("svhn", tmp_path) == "svhn needs the package scipy\nInstall it: pip install scipy"
    )
