"""Sources of arrays against the packages that write the formats: numpy, h5py, tensorstore and torch."""

import io
import json
import multiprocessing
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.sources.arrays import hdf5_file
from flambeau.data.sources.arrays.array_roles import labels_beside, names_by_part, role_of
from flambeau.data.sources.arrays.array_source import open_arrays
from flambeau.data.sources.open_data import open_source, open_sources
from flambeau.data.sources.path_format import kind_of
from flambeau.data.sources.source import content_sample
from flambeau.errors import InputError
from flambeau.images.decode import decode

h5py = pytest.importorskip("h5py")

not_our_threads = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

FASHION = Path(__file__).resolve().parents[5] / "shared" / "datasets" / "fashion_mnist.npz"
LABELS = np.arange(24) * 7 % 5


def pixels(*shape, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


GREY = pixels(24, 6, 8)


def complaint(function, *arguments, **settings):
    with pytest.raises(InputError) as caught:
        function(*arguments, **settings)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 2
    return message


def npz(folder, images, labels):
    np.savez(folder / "data.npz", images=images, labels=labels)
    return folder / "data.npz", "npz"


def compressed_npz(folder, images, labels):
    np.savez_compressed(folder / "data.npz", images=images, labels=labels)
    return folder / "data.npz", "npz"


def npy(folder, images, labels):
    np.save(folder / "x_all.npy", images)
    np.save(folder / "y_all.npy", labels)
    return folder / "x_all.npy", "npy"


def column_major_npy(folder, images, labels):
    return npy(folder, np.asfortranarray(images), labels)


def pth(folder, images, labels):
    tensors = {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels)}
    torch.save(tensors, folder / "data.pth")
    return folder / "data.pth", "pth"


def hdf5(folder, images, labels, **settings):
    with h5py.File(folder / "data.h5", "w", userblock_size=settings.pop("userblock", 0)) as file:
        file.create_dataset("images", data=images, **settings)
        file.create_dataset("labels", data=labels, chunks=(7,) if settings else None)
    return folder / "data.h5", "hdf5"


def with_settings(**settings):
    def write(folder, images, labels):
        rest = images.shape[1:]
        chunks = (settings.get("depth", 1), *settings.get("rest", rest)[: len(rest)])
        chunks = (*chunks, *rest[len(chunks) - 1 :])
        others = {key: value for key, value in settings.items() if key not in ("depth", "rest")}
        return hdf5(folder, images, labels, chunks=chunks, **others)

    return write


def n5_attributes(shape, block, dtype, compression):
    """As z5py and zarr write them: the axes of numpy reversed."""
    return {
        "dimensions": list(shape)[::-1], "blockSize": list(block)[::-1],
        "dataType": str(dtype), "compression": {"type": compression},
    }  # fmt: skip


# TensorStore ends each process that is forked after it was used: it writes in a process of its own.
TENSORSTORE = """
import json, sys
import numpy as np, tensorstore
for path, metadata, data, is_reversed in json.load(sys.stdin):
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": path}, "metadata": metadata}
    array = np.load(data)
    store = tensorstore.open(spec, create=True).result()
    store.write(array.T if is_reversed else array).result()
"""


def n5(folder, images, labels):
    """Written by hand after the specification, raw: a block an image, edge blocks cut off."""
    for name, array, block in (
        ("images", images, (1, *images.shape[1:])),
        ("labels", np.asarray(labels), (7,)),
    ):
        root = folder / "data.n5" / name
        root.mkdir(parents=True)
        facts = n5_attributes(array.shape, block, array.dtype, "raw")
        (root / "attributes.json").write_text(json.dumps(facts))
        for at in range(0, len(array), block[0]):
            part = array[at : at + block[0]]
            path = root.joinpath(*["0"] * (array.ndim - 1), str(at // block[0]))
            path.parent.mkdir(parents=True, exist_ok=True)
            head = struct.pack(f">HH{array.ndim}I", 0, array.ndim, *part.shape[::-1])
            path.write_bytes(head + part.astype(array.dtype.newbyteorder(">")).tobytes())
    return folder / "data.n5", "n5"


def zarr(version, separator):
    """Written by hand after the specification, raw: a chunk an image, edge chunks filled up."""

    def write(folder, images, labels):
        root = folder / "data.zarr"
        for name, array, rows in (("images", images, 1), ("labels", np.asarray(labels), 7)):
            chunk = [rows, *array.shape[1:]]
            if version == 2:
                prefix, file = "", ".zarray"
                facts = {
                    "zarr_format": 2, "shape": array.shape, "chunks": chunk, "dtype": array.dtype.str,
                    "compressor": None, "fill_value": 0, "order": "C", "filters": None,
                    "dimension_separator": separator,
                }  # fmt: skip
            else:
                prefix, file = f"c{separator}", "zarr.json"
                key = {"name": "default", "configuration": {"separator": separator}}
                codec = {"name": "bytes", "configuration": {"endian": "little"}}
                facts = {
                    "zarr_format": 3, "node_type": "array", "shape": array.shape,
                    "data_type": str(array.dtype), "fill_value": 0, "chunk_key_encoding": key,
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
                    "codecs": [codec],
                }  # fmt: skip
            (root / name).mkdir(parents=True)
            (root / name / file).write_text(json.dumps(facts))
            for at in range(0, len(array), rows):
                part = np.zeros(chunk, array.dtype)
                part[: len(array[at : at + rows])] = array[at : at + rows]
                place = [str(at // rows), *["0"] * (array.ndim - 1)]
                path = root / name / (prefix + separator.join(place))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(part.tobytes())
        group = {"zarr_format": version} | ({"node_type": "group"} if version == 3 else {})
        (root / (".zgroup" if version == 2 else "zarr.json")).write_text(json.dumps(group))
        return root, "zarr"

    return write


WRITERS = {
    "npz": npz,
    "compressed npz": compressed_npz,
    "npy": npy,
    "column-major npy": column_major_npy,
    "pth": pth,
    "hdf5": hdf5,
    "hdf5, chunks": with_settings(),
    "hdf5, gzip": with_settings(compression="gzip"),
    "hdf5, all filters": with_settings(compression="gzip", shuffle=True, fletcher32=True),
    "hdf5, checksum alone": with_settings(fletcher32=True, depth=5),
    "hdf5, odd chunks": with_settings(compression="gzip", depth=5, rest=(4, 3)),
    "hdf5, lzf": with_settings(compression="lzf"),
    "hdf5, user block": with_settings(userblock=512),
    "n5": n5,
    "zarr 2": zarr(2, "."),
    "zarr 2, folders": zarr(2, "/"),
    "zarr 3": zarr(3, "/"),
    "zarr 3, one folder": zarr(3, "."),
}
everywhere = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def same(source, images, labels):
    assert len(source) == len(images)
    assert source.labels.dtype == torch.int64
    assert source.labels.tolist() == list(labels)
    for index, image in enumerate(images):
        read = source.read(index)
        assert read.dtype == image.dtype.newbyteorder("=")
        np.testing.assert_array_equal(read, image)


@everywhere
@pytest.mark.parametrize(
    "images",
    [GREY, pixels(24, 6, 8, 3), pixels(24, 6, 8, dtype=np.uint16)],
    ids=["HW", "HWC", "16"],
)
def test_every_format_gives_the_arrays_that_its_own_package_wrote(tmp_path, write, images):
    train, val = open_arrays(*write(tmp_path, images, LABELS))
    same(train, images, LABELS)
    assert val is None
    assert train.classes == ("0", "1", "2", "3", "4")
    assert train.names == [str(index) for index in range(24)]
    assert len(train.fingerprint) == 64
    assert train.describe(3).startswith(str(tmp_path))


def test_n5_as_tensorstore_writes_it(tmp_path):
    pytest.importorskip("tensorstore")
    images, jobs, roots = pixels(24, 6, 8, 3, dtype=np.uint16), [], []
    for name, array in (("images", images), ("labels", LABELS)):
        np.save(tmp_path / f"{name}.npy", array)
    for compression in ("raw", "gzip", "bzip2", "xz"):
        for is_reversed in (True, False):
            roots.append(tmp_path / f"{compression}{is_reversed}.n5")
            for name, array, block in (("images", images, (5, 4, 3, 3)), ("labels", LABELS, (7,))):
                facts = n5_attributes(array.shape, block, array.dtype, compression)
                if not is_reversed:
                    facts["dimensions"].reverse()
                    facts["blockSize"].reverse()
                jobs.append((f"{roots[-1]}/{name}", facts, f"{tmp_path}/{name}.npy", is_reversed))
    subprocess.run(
        [sys.executable, "-c", TENSORSTORE], input=json.dumps(jobs), text=True, check=True
    )
    for root in roots:
        same(open_arrays(root, "n5")[0], images, LABELS)


# From the specification (saalfeldlab/n5, README.md): a uint16 block of 1 x 2 x 3 with the values 1 .. 6.
BLOCK = "0000 0003 00000001 00000002 00000003"
SPEC = {
    "raw": "0001 0002 0003 0004 0005 0006",
    "bzip2": """425a6839 31415926 5359023e 0dd20000 0040007f 00200031 0c010d31 a8739433 7c5dc914 e1424008
                f83748""",
    "gzip": "1f8b0800 00000000 00006360 64606260 66606160 65600300 aaea6dbf 0c000000",
    "xz": """fd377a58 5a000004 e6d6b446 02002101 16000000 742fe5a3 01000b00 01000200 03000400 05000600
             0d0309ca 34ec15a7 0001240c a618d8d8 1fb6f37d 01000000 0004595a""",
}


@pytest.mark.parametrize("compression", SPEC)
def test_the_blocks_of_the_n5_specification(tmp_path, compression):
    """Its axes are counted from the fastest one: numpy's shape is (3, 2, 1)."""
    expected = np.array([[[1], [2]], [[3], [4]], [[5], [6]]], np.uint16)
    root, kind = n5(tmp_path, expected, [0, 1, 1])
    facts = n5_attributes(expected.shape, expected.shape, "uint16", compression)
    (root / "images/attributes.json").write_text(json.dumps(facts))
    (root / "images/0/0/0").write_bytes(bytes.fromhex(BLOCK + SPEC[compression]))
    same(open_arrays(root, kind)[0], expected, [0, 1, 1])


def test_n5_blocks_never_written(tmp_path):
    root, kind = n5(tmp_path, GREY, LABELS)
    (root / "images/0/0/4").unlink()
    (root / "labels").rename(tmp_path / "longer")
    (tmp_path / "bytes").mkdir()
    (n5(tmp_path / "bytes", GREY, LABELS.astype(np.uint8))[0] / "labels").rename(root / "labels")
    source, _ = open_arrays(root, kind)  # the last block of these labels has three bytes of data
    assert source.labels.tolist() == LABELS.tolist()
    assert not source.read(4).any()


def read_all(source):
    return [source.read(index) for index in range(len(source))]


def _child(source, queue):
    queue.put([np.asarray(image).tobytes() for image in read_all(source)])


def vlen_hdf5(folder, images, labels):
    with h5py.File(folder / "data.h5", "w") as file:
        store = file.create_dataset("images", (len(images),), h5py.vlen_dtype(np.uint8))
        for index, image in enumerate(images):
            store[index] = np.frombuffer(png(image), np.uint8)
        file["labels"] = labels
    return folder / "data.h5", "hdf5"


def resizable_vlen_hdf5(folder, images, labels):
    with h5py.File(vlen_hdf5(folder, images, labels)[0], "r+") as file:
        rows = file["images"][()]
        del file["images"]
        settings = {"maxshape": (None,), "chunks": (5,), "compression": "gzip", "shuffle": True}
        file.create_dataset("images", data=rows, dtype=h5py.vlen_dtype(np.uint8), **settings)
    return folder / "data.h5", "hdf5"


def png(image):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


@not_our_threads
@pytest.mark.parametrize(
    "write",
    [*WRITERS.values(), vlen_hdf5, resizable_vlen_hdf5],
    ids=[*WRITERS, "vlen", "resizable vlen"],
)
def test_forks_threads_and_pickles_read_what_the_source_reads(tmp_path, write):
    source, _ = open_arrays(*write(tmp_path, GREY, LABELS))
    expected = [np.asarray(image).tobytes() for image in read_all(source)]
    context = multiprocessing.get_context("fork")
    queues = [context.SimpleQueue() for _ in range(2)]
    children = [context.Process(target=_child, args=(source, queue)) for queue in queues]
    for child in children:
        child.start()
    with ThreadPoolExecutor(4) as pool:
        order = random.Random(0).choices(range(24), k=200)
        for index, image in zip(order, pool.map(source.read, order), strict=True):
            assert np.asarray(image).tobytes() == expected[index]
    for queue, child in zip(queues, children, strict=True):
        assert queue.get() == expected
        child.join(60)
        assert child.exitcode == 0
    again = pickle.loads(pickle.dumps(source))
    assert [np.asarray(image).tobytes() for image in read_all(again)] == expected
    assert (again.fingerprint, again.classes) == (source.fingerprint, source.classes)
    assert len(pickle.dumps(source)) < 1000


def test_what_is_stored_raw_is_not_read_before_it_is_asked_for(tmp_path, monkeypatch):
    for write in (npz, npy, pth, hdf5):
        path, kind = write(tmp_path, GREY, LABELS)
        source, _ = open_arrays(path, kind)
        data = path.read_bytes()
        at = data.index(GREY[5].tobytes())
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes(48))
        assert not source.read(5).any(), kind


# Parts, and which array is what ---------------------------------------------------------------------------


def test_names_and_what_they_stand_for():
    table = {
        "x_train": ("train", "images"), "X": ("", "images"), "Y_test": ("test", "labels"),
        "train/images": ("train", "images"), "images/val": ("val", "images"),
        "valid_targets": ("valid", "labels"), "train-data": ("train", "images"),
        "set/Validation/Labels": ("validation", "labels"), "class_names": ("", "classes"),
        "train_set_x": ("train", "images"), "test_set_y": ("test", "labels"),
        "list_classes": ("", "classes"), "label_names": ("", "classes"), "images_offsets": ("", "offsets"),
        "train/images_offsets": ("train", "offsets"), "classes": ("", "classes"),
        "weight": None, "train": None, "fine_labels": None, "": None, "x_train_y": None,
    }  # fmt: skip
    assert {name: role_of(name) for name in table} == table
    with pytest.raises(ValueError, match="both 'data' and 'images' could be the images"):
        names_by_part(["data", "labels", "images"])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("x_train", "y_train", "x_test", "y_test"), ("x_train", "x_test")),
        (("train/x", "train/y", "val/x", "val/y", "test/x", "test/y"), ("train/x", "val/x")),
        (("images", "labels", "valid_images", "valid_labels"), ("images", "valid_images")),
        (
            ("x_train", "y_train", "x_test"),
            ("x_train", None),
        ),  # a contest keeps the labels of its test
        (("x_test", "y_test"), ("x_test", None)),
        (("data", "targets", "ids"), ("data", None)),
    ],
)
def test_parts(tmp_path, names, expected):
    arrays = {name: GREY if re.search("x|images|data", name.split("/")[-1].removesuffix("test"))
              else LABELS for name in names}  # fmt: skip
    np.savez(tmp_path / "a.npz", **arrays)
    nested = {}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
            *groups, last = name.split("/")
            group = nested
            for key in groups:
                group = group.setdefault(key, {})
            group[last] = torch.from_numpy(array)
    torch.save(nested, tmp_path / "a.pth")
    for path, kind in (("a.npz", "npz"), ("a.h5", "hdf5"), ("a.pth", "pth")):
        sources = open_arrays(tmp_path / path, kind)
        found = tuple(s and s.describe(0).split(", ")[-1].removesuffix("[0]") for s in sources)
        assert found == expected
        prints = [source.fingerprint for source in sources if source]
        assert len(set(prints)) == len(prints)


@pytest.mark.skipif(not FASHION.is_file(), reason=f"no {FASHION}")
def test_fashion_mnist_as_it_is_handed_around():
    train, val = open_sources(FASHION)
    with np.load(FASHION) as file:
        assert train.classes == val.classes == tuple(file["classes"])
        assert train.labels.tolist() == file["y_train"].tolist()
        np.testing.assert_array_equal(train.read(59_999), file["x_train"][-1])
        np.testing.assert_array_equal(val.read(77), file["x_test"][77])
    assert (len(train), len(val)) == (60_000, 10_000)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        ("x_train.npy", "y_train.npy"), ("X.npy", "y.npy"), ("X.npy", "Y.npy"), ("a.npy", "a_labels.npy"),
        ("a.npy", "a.labels.txt"), ("a.npy", "labels.npy"), ("images.npy", "targets.txt"),
        ("train_images.npy", "train_labels.npy"), ("shard-003.data.npy", "shard-003.target.npy"),
    ],
)  # fmt: skip
def test_labels_beside_an_npy_file(tmp_path, images, labels):
    assert labels.rpartition(".")[0] in labels_beside(images.removesuffix(".npy"))
    np.save(tmp_path / images, GREY)
    if labels.endswith(".txt"):
        (tmp_path / labels).write_text("".join(f"{label}\n" for label in LABELS))
    else:
        np.save(tmp_path / labels, LABELS)
    same(open_arrays(tmp_path / images, "npy")[0], GREY, LABELS)


def test_npy_files_of_both_parts(tmp_path):
    for name, count in (("train", 24), ("test", 10)):
        np.save(tmp_path / f"x_{name}.npy", GREY[:count])
        np.save(tmp_path / f"y_{name}.npy", LABELS[:count])
    (tmp_path / "x.classes.txt").write_text("a\nb\nc\nd\ne\n")
    train, val = open_sources(tmp_path / "x_train.npy")
    assert (len(train), len(val), val.classes) == (24, 10, tuple("abcde"))


def test_a_folder_of_pth_shards(tmp_path):
    for number in range(3):
        part = slice(8 * number, 8 * number + 8)
        torch.save(
            (torch.from_numpy(GREY[part]), torch.from_numpy(LABELS[part])),
            tmp_path / f"{number}.pth",
        )
    source = open_source(tmp_path, list("01234"))
    same(source, GREY, LABELS)


# Images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [vlen_hdf5, resizable_vlen_hdf5], ids=["whole", "chunks"])
def test_a_size_in_a_heap_that_leads_back_ends(tmp_path, write):
    """The library would walk from the damaged object to itself, for ever."""
    path, kind = write(tmp_path, GREY, LABELS)
    data = bytearray(path.read_bytes())
    first = data.rindex(b"GCOL\1") + 16  # of the heap that was written last
    data[first + 8 : first + 16] = (2**64 - 16).to_bytes(8, "little")
    path.write_bytes(data)
    assert "bytes in the object of 18446744073709551600" in complaint(open_arrays, path, kind)


def test_which_arrays_of_hdf5_are_left_to_the_library(tmp_path):
    expected = [
        (hdf5, "FileRows"), (vlen_hdf5, "HeapRows"), (resizable_vlen_hdf5, "HeapRows"),
        (with_settings(), "HandleRows"),
        (WRITERS["hdf5, user block"], "HandleRows"),
    ]  # fmt: skip
    for number, (write, kind_of_rows) in enumerate(expected):
        folder = tmp_path / str(number)  # HDF5 overwrites no file that it has open
        folder.mkdir()
        source, _ = open_arrays(*write(folder, GREY, LABELS))
        assert type(source._images).__name__ == kind_of_rows


def test_what_hdf5_claims_is_compared_with_the_size_of_the_file(tmp_path):
    for count, message in ((1 << 40, "no file has so many images"), (1 << 26, "bytes of /labels")):
        path = tmp_path / f"{count}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("images", (count, 6, 8), "u1", chunks=(1, 6, 8))
            file.create_dataset("labels", (count,), "i8", chunks=(1024,))
        assert message in complaint(open_arrays, path, "hdf5")
    assert "so many images" in complaint(
        open_arrays, tmp_path / f"{1 << 40}.h5", "hdf5", labelled=False
    )


def test_a_chunk_that_is_larger_than_the_cache_is_unpacked_once(tmp_path, monkeypatch):
    """It was unpacked for each image: a file of a MB with a million images took days."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        images = np.arange(64 * 32 * 32, dtype=np.uint8).reshape(64, 32, 32)
        file.create_dataset("images", data=images, chunks=images.shape, compression="gzip")
        file["labels"] = np.arange(64) % 2
    monkeypatch.setattr(hdf5_file, "_CACHE", 1 << 12)
    rows = hdf5_file.open_hdf5(path)["images"]
    assert all((rows.read(k, k + 1)[0] == images[k]).all() for k in range(64))
    _, _, dataset = rows._opened
    assert dataset.id.get_access_plist().get_chunk_cache()[1] == images.nbytes
    assert dataset.file.id.get_access_plist().get_cache()[2] == 1 << 12


def test_a_chunk_is_no_larger_than_the_file_can_hold(tmp_path):
    """What deflate makes of 256 MiB of zeros, deflated again: 1 kB."""
    rows = zlib.compress(zlib.compress(bytes(1 << 28), 9), 9)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((1 << 18, 32, 32))
    properties.set_deflate(9)
    properties.set_deflate(9)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((1 << 18, 32, 32))
        images = h5py.h5d.create(file.id, b"images", h5py.h5t.STD_U8LE, space, properties)
        images.write_direct_chunk((0, 0, 0), rows)
        file["labels"] = np.zeros(1 << 12, np.uint8)
    assert path.stat().st_size < 20_000
    message = complaint(open_arrays, path, "hdf5")
    assert "images has chunks of 268435456 bytes, the file" in message


def test_links_into_other_files_are_named(tmp_path):
    hdf5(tmp_path, GREY, LABELS)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["labels"] = LABELS
        file["images"] = h5py.ExternalLink("data.h5", "/images")
    message = complaint(open_arrays, tmp_path / "a.h5", "hdf5")
    assert "images is a link into another file, data.h5, which is not followed" in message
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["train/images"], file["train/labels"] = GREY, LABELS
        file["val"] = h5py.ExternalLink("data.h5", "/")
    message = complaint(open_arrays, tmp_path / "b.h5", "hdf5")
    assert "val is a link into another file, data.h5" in message
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["images"], file["labels"] = GREY, LABELS
        file["notes"] = h5py.ExternalLink("data.h5", "/")
    same(open_arrays(tmp_path / "c.h5", "hdf5")[0], GREY, LABELS)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["all"] = h5py.ExternalLink("data.h5", "/")
    message = complaint(open_arrays, tmp_path / "d.h5", "hdf5")
    assert "all is a link into another file, data.h5" in message


def test_soft_links_are_found(tmp_path):
    def opened(**links):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["raw/a"], file["raw/b"] = GREY, LABELS
            for name, target in links.items():
                file[name.replace("__", "/")] = h5py.SoftLink(target)
        return open_arrays(tmp_path / "a.h5", "hdf5")

    same(opened(images="/raw/a", labels="raw/b")[0], GREY, LABELS)
    same(
        opened(images="x", x="y", y="raw//./a", labels="/raw/b")[0], GREY, LABELS
    )  # links to links
    links = {"raw__images": "a", "raw__labels": "b", "train": "/raw", "val": "raw"}
    for source in opened(**links):
        same(source, GREY, LABELS)
    loops = {"images": "/raw/a", "labels": "/raw/b", "raw__up": "/", "all": "/", "self": "/self"}
    same(opened(**loops)[0], GREY, LABELS)
    with pytest.raises(InputError, match=r"images is a link to /none, which is not found\nRepair"):
        opened(images="/none", labels="/raw/b")


def test_soft_links_do_not_open_other_files(tmp_path):
    hdf5(tmp_path, GREY, LABELS)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["other"] = h5py.ExternalLink("data.h5", "/")
        file["images"], file["labels"] = h5py.SoftLink("/other/images"), LABELS
    assert "images is a link to /other/images" in complaint(open_arrays, tmp_path / "a.h5", "hdf5")


def test_a_soft_link_beside_the_name_changes_nothing(tmp_path):
    """Or the part, and with it the fingerprint, would be another one than before soft links were found."""
    prints = []
    for links in ({}, {"train": "/all", "x": "/all/images"}):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["all/images"], file["all/labels"] = GREY, LABELS
            for name, target in links.items():
                file[name] = h5py.SoftLink(target)
        source, val = open_arrays(tmp_path / "a.h5", "hdf5")
        assert val is None
        prints.append(source.describe(0))
    assert prints[0] == prints[1]


@pytest.mark.parametrize("fletcher32", [False, True])
def test_filters_that_a_chunk_leaves_out(tmp_path, fletcher32):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        store = file.create_dataset(
            "images",
            (3, 6, 8),
            "u1",
            chunks=(1, 6, 8),
            compression="gzip",
            fletcher32=fletcher32,
            fillvalue=9,
        )
        store[0] = GREY[0]
        store.id.write_direct_chunk(
            (1, 0, 0), GREY[1].tobytes(), 0b11
        )  # neither deflated nor summed
        file["labels"] = [0, 1, 1]
        expected = [GREY[0], GREY[1], np.full((6, 8), 9, np.uint8)]
    with h5py.File(tmp_path / "a.h5") as file:
        np.testing.assert_array_equal(file["images"], expected)
    same(open_arrays(tmp_path / "a.h5", "hdf5")[0], expected, [0, 1, 1])


def test_a_wrong_checksum_is_an_error(tmp_path):
    path, kind = with_settings(fletcher32=True)(tmp_path, GREY, LABELS)
    data = path.read_bytes()
    path.write_bytes(data.replace(GREY[5].tobytes(), bytes(48)))
    source, _ = open_arrays(path, kind)
    with pytest.raises(OSError, match="filter returned failure"):
        source.read(5)
    np.testing.assert_array_equal(source.read(6), GREY[6])


def test_channels_first_become_channels_last(tmp_path):
    images = pixels(24, 6, 8, 3)
    source, _ = open_arrays(
        *npz(tmp_path, np.ascontiguousarray(np.moveaxis(images, -1, 1)), LABELS)
    )
    same(source, images, LABELS)
    assert source.read(0).flags.c_contiguous


@everywhere
def test_what_is_kept_in_memory_cannot_be_written_to(tmp_path, write):
    source, _ = open_arrays(*write(tmp_path, GREY, LABELS))
    image = source.read(3)
    if image.flags.writeable:
        image.fill(0)
    np.testing.assert_array_equal(source.read(3), GREY[3])


@pytest.mark.parametrize("shape", [(3, 6, 3), (1, 1, 1), (6, 8, 2), (5, 6, 8), (2, 3, 6, 8)])
def test_shapes_that_are_no_images(tmp_path, shape):
    message = complaint(open_arrays, *npz(tmp_path, np.zeros((24, *shape), np.uint8), LABELS))
    assert "data.npz: images of shape" in message


def test_big_endian_pixels(tmp_path):
    images = pixels(24, 6, 8, dtype=np.uint16)
    same(open_arrays(*npz(tmp_path, images.astype(">u2"), LABELS))[0], images, LABELS)
    same(open_arrays(*hdf5(tmp_path, images.astype(">u2"), LABELS))[0], images, LABELS)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floating_point_pixels_of_255_levels_are_exact(tmp_path, dtype):
    levels = np.arange(24 * 256, dtype=np.uint8).reshape(24, 16, 16)
    source, _ = open_arrays(*pth(tmp_path, (levels / np.float32(255)).astype(dtype), LABELS))
    same(source, levels, LABELS)


@pytest.mark.parametrize("spoil", [lambda x: x * 2 - 1, lambda x: x * 255, lambda x: x * np.nan,
                                   lambda x: (x[:, 1:] + x[:, :-1]) / 2])  # fmt: skip
def test_other_floating_point_pixels_are_refused(tmp_path, spoil):
    message = complaint(open_arrays, *npz(tmp_path, spoil(GREY / np.float32(255)), LABELS))
    assert "save uint8" in message


def test_floating_point_pixels_are_looked_at_when_they_are_read(tmp_path):
    images = np.tile(GREY / 255, (4, 1, 1))
    images[1] += 0.001
    source, _ = open_arrays(*npz(tmp_path, images, np.tile(LABELS, 4)))
    with pytest.raises(OSError, match="not all k / 255"):
        source.read(1)
    np.testing.assert_array_equal(source.read(2), GREY[2])


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.bool_, np.uint32, np.complex64])
def test_pixels_of_other_types_are_refused(tmp_path, dtype):
    assert "uint8 or uint16" in complaint(open_arrays, *npz(tmp_path, GREY.astype(dtype), LABELS))
    assert "uint8 or uint16" in complaint(open_arrays, *hdf5(tmp_path, GREY.astype(dtype), LABELS))


def encoded(folder, how):
    """Image files of different sizes in each format that can hold them."""
    files = [png(GREY[k, :, : 3 + k % 5]) for k in range(24)]
    path = folder / how
    if how == "S.npz":
        np.savez(path, images=np.array(files), labels=LABELS)
    elif how == "S.npy":
        np.save(path, np.array(files))
        np.save(folder / "labels.npy", LABELS)
    elif how == "offsets.npz":
        offsets = np.cumsum([0, *map(len, files)])
        np.savez(
            path, images=np.frombuffer(b"".join(files), np.uint8), offsets=offsets, labels=LABELS
        )
    elif how == "list.pth":
        images = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
        torch.save({"images": images, "labels": LABELS.tolist()}, path)
    else:
        with h5py.File(path, "w") as file:
            file["labels"] = LABELS
            if how.startswith("vlen"):
                chunks = {"chunks": (5,), "compression": "gzip"} if how == "vlen, chunks.h5" else {}
                file.create_dataset("images", (24,), h5py.vlen_dtype(np.uint8), **chunks)
                for index, data in enumerate(files):
                    file["images"][index] = np.frombuffer(data, np.uint8)
            elif how == "opaque.h5":
                file["images"] = np.array([np.void(file.ljust(400, b"\0")) for file in files])
            else:
                file["images"] = np.array(files)
    return path


@pytest.mark.parametrize(
    "how",
    [
        "S.npz",
        "S.npy",
        "offsets.npz",
        "list.pth",
        "vlen.h5",
        "vlen, chunks.h5",
        "opaque.h5",
        "S.h5",
    ],
)
def test_image_files_in_arrays(tmp_path, how):
    source, _ = open_sources(encoded(tmp_path, how), holdout=0.01)
    whole = source._source
    assert len(whole) == 24
    for index in range(24):
        data = whole.read(index)
        assert type(data) is bytes
        np.testing.assert_array_equal(
            decode(data, channels=1)[..., 0], GREY[index, :, : 3 + index % 5]
        )


@pytest.mark.parametrize("offsets", [[0, 3, 2, 9], [-1, 3, 9], [0, 3, 99], [0.0, 9.0], []], ids=str)
def test_offsets_that_are_no_places(tmp_path, offsets):
    data = np.zeros(9, np.uint8)
    np.savez(tmp_path / "a.npz", images=data, offsets=np.array(offsets), labels=LABELS[:3])
    assert "the offsets are no places in it" in complaint(open_arrays, tmp_path / "a.npz", "npz")


def test_lists_of_tensors_and_pairs(tmp_path):
    images = [torch.from_numpy(pixels(3, 5 + k, 8)) for k in range(6)]
    labels = [0, 1, 2, 0, 1, 2]
    for number, saved in enumerate(
        [list(zip(images, labels, strict=True)), (images, labels), {"x": images, "y": torch.tensor(labels)},
         [(image, torch.tensor(label)) for image, label in zip(images, labels, strict=True)],
         (images, labels, ["0", "1", "2"]), {"train": (images, labels)}]
    ):  # fmt: skip
        torch.save(saved, tmp_path / f"{number}.pth")
        source, _ = open_arrays(tmp_path / f"{number}.pth", "pth")
        same(source, [np.moveaxis(image.numpy(), 0, -1) for image in images], labels)


# Labels and classes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, ">i8", np.float32, np.uint64])
@pytest.mark.parametrize("shape", [(24,), (24, 1), (24, 1, 1, 1)])
def test_labels_of_any_number_type(tmp_path, dtype, shape):
    same(open_arrays(*npz(tmp_path, GREY, LABELS.astype(dtype).reshape(shape)))[0], GREY, LABELS)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.bool_, np.float16, np.float64])
@pytest.mark.parametrize("write", [npz, npy, pth, hdf5], ids=["npz", "npy", "pth", "hdf5"])
def test_one_hot_labels(tmp_path, write, dtype, monkeypatch):
    monkeypatch.setattr(
        "flambeau.data.sources.arrays.array_source._AT_ONCE", 50
    )  # eight rows at once
    same(open_arrays(*write(tmp_path, GREY, np.eye(6, dtype=dtype)[LABELS]))[0], GREY, LABELS)


def test_words_as_labels(tmp_path):
    words = np.array(["Hund", "Käse", "猫"])[LABELS % 3]
    numbers = (LABELS % 3).tolist()
    assert sorted(set(words)) == ["Hund", "Käse", "猫"]
    text = h5py.string_dtype()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = GREY
        file.create_dataset("labels", data=[str(word) for word in words], dtype=text)
    np.savez(tmp_path / "s.npz", x=GREY, y=np.array([word.encode() for word in words]))
    torch.save((torch.from_numpy(GREY), words.tolist()), tmp_path / "a.pth")
    for path, kind in (npz(tmp_path, GREY, words), (tmp_path / "a.h5", "hdf5"),
                       (tmp_path / "s.npz", "npz"), (tmp_path / "a.pth", "pth")):  # fmt: skip
        source, _ = open_arrays(path, kind)
        assert source.classes == ("Hund", "Käse", "猫")
        same(source, GREY, numbers)


def test_class_names_in_the_file_and_beside_it(tmp_path):
    names = np.array(list("vwxyz"))
    np.savez(
        tmp_path / "a.npz", x_train=GREY, y_train=LABELS, x_test=GREY, y_test=LABELS, classes=names
    )
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"], file["labels"] = GREY, LABELS
        file.attrs["class_names"] = list("vwxyz")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["images"], file["labels"] = GREY, LABELS
        file["labels"].attrs["names"] = list("vwxyz")
    torch.save({"data": torch.from_numpy(GREY), "targets": torch.from_numpy(LABELS),
                "classes": list("vwxyz")}, tmp_path / "a.pth")  # fmt: skip
    root, _ = n5(tmp_path, GREY, LABELS)
    (root / "attributes.json").write_text(json.dumps({"n5": "2.0.0", "classes": list("vwxyz")}))
    for path, kind in (
        ("a.npz", "npz"),
        ("a.h5", "hdf5"),
        ("b.h5", "hdf5"),
        ("a.pth", "pth"),
        ("data.n5", "n5"),
    ):
        for source in open_arrays(tmp_path / path, kind):
            assert source is None or source.classes == tuple("vwxyz"), path
            assert source is None or source.labels.tolist() == LABELS.tolist()
    (tmp_path / "a.classes.txt").write_text("A\nB\nC\nD\nE\n")
    assert open_arrays(tmp_path / "a.npz", "npz")[1].classes == tuple("ABCDE")


def test_labels_of_a_file_of_torch_that_are_no_labels(tmp_path):
    torch.save({"images": torch.from_numpy(GREY), "labels": [1, "a"] * 12}, tmp_path / "a.pth")
    message = complaint(open_arrays, tmp_path / "a.pth", "pth")
    assert "has a list where tensors are expected" in message


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        (LABELS, ["a", "b"], "label 2 is none of the 2 classes"),
        (LABELS - 1, None, "label -1"),
        (LABELS - 1, list("abcde"), "label -1 is none of the 5"),
        (LABELS + 0.5, None, r"labels\[0\] is 0.5"),
        (np.full(24, np.nan), None, "is nan"),
        (LABELS.astype(np.uint64) + (1 << 63), None, "labels has 92233720368547758"),
        (
            np.eye(5, dtype=int)[LABELS] * 2,
            None,
            r"labels\[0\] is no one-hot row: \[2, 0, 0, 0, 0\]",
        ),
        (np.eye(5)[LABELS] + np.eye(5)[0], None, r"labels\[0\] is no one-hot row: \[2.0, 0.0"),
        (np.eye(5)[LABELS] + np.eye(5)[1], None, r"labels\[0\] is no one-hot row: \[1.0, 1.0"),
        (np.zeros((24, 5)), None, r"labels\[0\] is no one-hot row"),
        (np.full((24, 5), np.nan), None, r"labels\[0\] is no one-hot row: \[nan"),
        (np.array([["a", "b"]] * 24), None, r"\(24, 2\); expected one number, word or one-hot row"),
        (LABELS[:23], None, r"has 24 images, labels is of shape \(23,\)"),
        (LABELS + 1j, None, "complex128; expected numbers or words"),
        (LABELS, ["a", "b", "a", "d", "e"], "names class 'a' twice"),
        (np.array(["a", "b"])[LABELS % 2], ["b", "c"], "label 'a' is none of the 2 classes"),
        (np.array([b"\xff"] * 24), None, "is not UTF-8"),
        (np.array(5), None, r"has 24 images, labels is of shape \(\)"),
    ],
)
def test_labels_that_are_refused(tmp_path, labels, names, message):
    names = {} if names is None else {"classes": np.array(names)}
    np.savez(tmp_path / "a.npz", images=GREY, labels=labels, **names)
    assert re.search(message, complaint(open_arrays, tmp_path / "a.npz", "npz"))


# Refused and damaged files --------------------------------------------------------------------------------


def test_names_of_the_images_are_no_class_names(tmp_path):
    names = np.array([f"{index}.png" for index in range(24)])
    np.savez(tmp_path / "a.npz", images=GREY, labels=LABELS, names=names)
    assert open_arrays(tmp_path / "a.npz", "npz")[0].classes == tuple("01234")
    np.savez(tmp_path / "a.npz", images=GREY, labels=LABELS, names=names, classes=list("abcde"))
    assert open_arrays(tmp_path / "a.npz", "npz")[0].classes == tuple("abcde")


def test_a_file_without_known_names_lists_what_is_there(tmp_path):
    np.savez(tmp_path / "a.npz", faces=GREY, ids=LABELS)
    message = complaint(open_arrays, tmp_path / "a.npz", "npz")
    assert "faces (24, 6, 8) uint8, ids (24,) int64" in message
    torch.save({"conv.weight": torch.zeros(3, 3), "conv.bias": torch.zeros(3)}, tmp_path / "a.pth")
    assert "conv.weight (3, 3) float32" in complaint(open_arrays, tmp_path / "a.pth", "pth")
    with h5py.File(tmp_path / "a.h5", "w"):
        pass
    assert "no arrays" in complaint(open_arrays, tmp_path / "a.h5", "hdf5")


def test_images_without_labels_or_pixels(tmp_path):
    np.save(tmp_path / "x_train.npy", GREY)
    message = complaint(open_arrays, tmp_path / "x_train.npy", "npy")
    assert "x_train_labels.npy" in message
    assert "y_train.npy" in message
    np.save(tmp_path / "y_train.npy", LABELS)
    assert "no array of images" in complaint(open_arrays, tmp_path / "y_train.npy", "npy")
    assert "no height and width" in complaint(
        open_arrays, *npz(tmp_path, GREY.reshape(24, 48), LABELS)
    )
    assert "these are no images" in complaint(open_arrays, *npz(tmp_path, LABELS, LABELS))
    for write in (npz, hdf5, pth):
        assert "there are no images in it" in complaint(
            open_arrays, *write(tmp_path, GREY[:0], LABELS[:0])
        )


class Trap:
    def __reduce__(self):
        return os.abort, ()


def test_pickled_objects_are_not_loaded(tmp_path):
    objects = np.empty(24, object)
    objects[:] = [Trap() for _ in range(24)]
    for key in ("images", "labels"):
        arrays = {"images": GREY, "labels": LABELS, key: objects}
        np.savez(tmp_path / "a.npz", **arrays)
        assert f"{key}.npy holds pickled" in complaint(open_arrays, tmp_path / "a.npz", "npz")
        np.save(tmp_path / "x.npy", arrays["images"])
        np.save(tmp_path / "y.npy", arrays["labels"])
        assert "holds pickled" in complaint(open_arrays, tmp_path / "x.npy", "npy")
    np.savez(tmp_path / "a.npz", images=GREY, labels=LABELS, notes=objects)
    same(open_arrays(tmp_path / "a.npz", "npz")[0], GREY, LABELS)
    torch.save({"images": Trap(), "labels": torch.zeros(3)}, tmp_path / "a.pth")
    assert "Python objects that are no tensors" in complaint(open_arrays, tmp_path / "a.pth", "pth")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "m.pth")
    assert "such as a whole model" in complaint(open_arrays, tmp_path / "m.pth", "pth")


def test_pth_files_that_are_refused(tmp_path):
    path = tmp_path / "a.pth"
    torch.save((torch.zeros(3, 4, 5), torch.zeros(3)), path, _use_new_zipfile_serialization=False)
    assert "saved before PyTorch 1.6" in complaint(open_arrays, path, "pth")
    torch.save((torch.zeros(3, 4, 5).bfloat16(), torch.zeros(3)), path)
    assert "has a tensor torch.bfloat16" in complaint(open_arrays, path, "pth")
    torch.save({"images": 3, "labels": torch.zeros(3)}, path)
    assert "int" in complaint(open_arrays, path, "pth")


def test_an_array_larger_than_memory_must_be_readable_in_place(tmp_path):
    path = tmp_path / "a.npz"
    header = io.BytesIO()
    shape = (1 << 26, 1 << 10, 1 << 10)
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": shape}
    )
    np.savez_compressed(path, images=GREY, labels=LABELS)
    data = path.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", header.getvalue())
    assert "has not the" in complaint(open_arrays, path, "npz")
    assert data != path.read_bytes()
    np.save(tmp_path / "y.npy", LABELS)
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": True, "shape": shape}
        )
    assert "GiB of memory" in complaint(open_arrays, tmp_path / "x.npy", "npy")


def test_records_are_no_damage(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros(3, [("a", "u1")]), labels=np.arange(3))
    assert "holds records" in complaint(open_arrays, tmp_path / "a.npz", "npz")


def test_n5_that_is_refused(tmp_path):
    root, kind = n5(tmp_path, GREY, LABELS)
    attributes = root / "images/attributes.json"
    facts = json.loads(attributes.read_text())
    for key, value in [
        ("dimensions", [8, 6]), ("dimensions", [8, 6, "24"]), ("dimensions", [8, 6, 0]), ("dimensions", 3),
        ("blockSize", [1]), ("blockSize", None), ("dataType", "string"), ("dataType", None),
        ("blockSize", [1, 1 << 16, 1 << 17]), ("dimensions", [10**6, 10**6, 24]), ("compression", [1]),
        ("compression", {"type": "lz4"}), ("compression", "blosc"), ("compression", 5),
    ]:  # fmt: skip
        attributes.write_text(json.dumps({**facts, key: value}))
        message = complaint(open_arrays, root, kind)
        assert str(root / "images") in message.replace(": images of", "/images")
    for text in ("{", "[]", "\xff", '{"dimensions": ' + "[" * 100_000):
        attributes.write_bytes(text.encode("latin1"))
        assert "is damaged" in complaint(open_arrays, root, kind)
    (tmp_path / "square").mkdir()
    root, kind = n5(tmp_path / "square", pixels(24, 6, 24), LABELS)
    assert "is not known" in complaint(open_arrays, root, kind)


def test_a_format_whose_package_is_missing(tmp_path, monkeypatch):
    path, kind = hdf5(tmp_path, GREY, LABELS)
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert "pip install 'flambeau[formats]'" in complaint(open_arrays, path, kind)


@pytest.mark.parametrize(
    "write", [npz, npy, pth, hdf5, with_settings()], ids=["npz", "npy", "pth", "hdf5", "settings"]
)
def test_a_file_that_is_cut_while_it_is_used(tmp_path, write):
    images = pixels(24, 64, 64)
    path, kind = write(tmp_path, images, LABELS)
    source, _ = open_arrays(path, kind)
    os.truncate(path, 5000)
    with pytest.raises(OSError, match="the file ends at byte 5000"):
        source.read(23)
    with pytest.raises(InputError):
        pickle.loads(pickle.dumps(source))
    path.unlink()
    assert "cannot be read: no such file" in complaint(pickle.loads, pickle.dumps(source))


def test_a_source_that_has_changed_cannot_be_opened_again(tmp_path):
    source, _ = open_arrays(*npz(tmp_path, GREY, LABELS))
    sent = pickle.dumps(source)
    npz(tmp_path, GREY + np.uint8(1), LABELS)
    assert "has changed since it was opened" in complaint(pickle.loads, sent)


@everywhere
def test_the_fingerprint_is_that_of_the_content(tmp_path, write):
    def both(source):
        return source.fingerprint, content_sample(source)

    def fingerprint(name, images, labels):
        (tmp_path / name).mkdir()
        return both(open_arrays(*write(tmp_path / name, images, labels))[0])

    first = fingerprint("a", GREY, LABELS)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = next((tmp_path / "b").glob("data.*"), tmp_path / "b/x_all.npy")
    assert both(open_arrays(moved, kind_of(moved))[0]) == first
    changed = LABELS.copy()
    changed[3] = (changed[3] + 1) % 5
    assert fingerprint("c", GREY, changed) != first
    assert fingerprint("d", GREY[:23], LABELS[:23]) != first
    # Of a store of chunks, whose sizes tell nothing, by the sample of what is in them.
    assert fingerprint("e", GREY + np.uint8(1), LABELS) != first


FUZZ = """
import random, sys
from pathlib import Path
from flambeau.data.sources.arrays.array_source import open_arrays
from flambeau.errors import InputError

for number, name in enumerate(sys.argv[2:]):
    kind, path = name.split("=")
    path, rng, told = Path(path), random.Random(number), 0
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for turn in range(int(sys.argv[1])):
        file = rng.choice(files)
        good = file.read_bytes()
        bad = bytearray(good)
        if turn % 3 == 0:
            del bad[rng.randrange(len(bad)):]
        else:
            for _ in range(rng.choice([1, 1, 4])):
                bad[rng.randrange(min(len(bad), rng.choice([64, 600, 1 << 30])))] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        try:
            source, _ = open_arrays(path, kind)
            for index in range(len(source)):
                source.read(index)
        except InputError as error:
            assert len(str(error).splitlines()) <= 2 and str(path) in str(error), error
            told += 1
        except OSError:
            told += 1
        source = None  # HDF5 shares what it knows of a file that is open
        file.write_bytes(good)
    print(told)
"""


def test_damage_is_named_whatever_it_hits(tmp_path):
    """In a process of its own: a library that is not up to it kills its process."""
    writers = {"plain": hdf5, "gzip": with_settings(compression="gzip"), "lzf": WRITERS["hdf5, lzf"],
               "vlen": vlen_hdf5, "resizable": resizable_vlen_hdf5,
               "npz": npz, "compressed": compressed_npz, "npy": npy, "pth": pth, "n5": n5,
               "zarr": zarr(3, ".")}  # fmt: skip
    arguments = []
    for name, write in writers.items():
        (tmp_path / name).mkdir()
        path, kind = write(tmp_path / name, GREY, LABELS)
        arguments.append(f"{kind}={path}")
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", FUZZ, "18", *arguments],
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    told = [int(line) for line in result.stdout.split()]
    assert min(told) >= 6, told  # each cut


@pytest.mark.parametrize("classes", [2, {"cat": 0, "dog": 1}])
def test_classes_that_are_no_list_of_names_name_nothing(tmp_path, classes):
    """Their number, or a dict from names to numbers, as torchvision's class_to_idx."""
    images, labels = torch.zeros(4, 6, 6, 3, dtype=torch.uint8), torch.arange(4) % 2
    torch.save((images, labels, classes), tmp_path / "a.pth")
    source = open_source(tmp_path / "a.pth", ("0", "1"))
    assert source.labels.tolist() == [0, 1, 0, 1]
    np.savez(tmp_path / "a.npz", images=images.numpy(), labels=labels.numpy(), classes=2)
    assert open_source(tmp_path / "a.npz", ("0", "1")).labels.tolist() == [0, 1, 0, 1]
