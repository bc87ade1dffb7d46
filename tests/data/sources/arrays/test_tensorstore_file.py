"""N5 and Zarr stores: written by their own packages, read in every kind of process, damaged, and hostile."""

import contextlib
import gzip
import json
import multiprocessing
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shard_plan import Split
from flambeau.data.pack.verify import verify_file
from flambeau.data.sources.arrays import tensorstore_file
from flambeau.data.sources.arrays.array_source import open_arrays
from flambeau.data.sources.arrays.tensorstore_file import open_store
from flambeau.data.sources.path_format import kind_of
from flambeau.errors import InputError

pytest.importorskip("tensorstore")

LABELS = np.arange(24) % 5
IMAGES = np.random.default_rng(0).integers(0, 40, (24, 6, 8, 3), np.uint16)

# tensorstore ends each process that is forked after it was used: it writes in a process of its own.
WRITE = """
import json, sys
import numpy as np, tensorstore
for driver, path, metadata, data, is_reversed in json.load(sys.stdin):
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": path}, "metadata": metadata}
    array = np.load(data)
    store = tensorstore.open(spec, create=True).result()
    store.write(array.T if is_reversed else array).result()
"""
BLOSC = [
    {"cname": name, "clevel": 5, "shuffle": shuffle}
    for name in ("lz4", "blosclz", "zlib", "zstd")
    for shuffle in (0, 1)
]
N5 = [{"type": name} for name in ("gzip", "bzip2", "xz")]
N5 += [{"type": "zstd", "level": 3}, *({"type": "blosc", **settings} for settings in BLOSC)]
ZARR2 = [None, {"id": "zlib", "level": 1}, {"id": "zstd", "level": 1}, {"id": "bz2", "level": 1}]
ZARR2 += [{"id": "blosc", "blocksize": 0, **settings} for settings in BLOSC[:2]]
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
ZARR3 = [[LITTLE, {"name": "gzip", "configuration": {"level": 1}}], [LITTLE, {"name": "crc32c"}]]
ZARR3 += [[LITTLE, {"name": "zstd", "configuration": {"level": 1}}]]


def metadata(driver, array, chunk, codec):
    if driver == "n5":
        return {
            "dimensions": array.shape[::-1], "blockSize": chunk[::-1],
            "dataType": str(array.dtype), "compression": codec,
        }  # fmt: skip
    if driver == "zarr":
        return {
            "shape": array.shape,
            "chunks": chunk,
            "dtype": array.dtype.str,
            "compressor": codec,
        }
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    facts = {"shape": array.shape, "chunk_grid": grid, "codecs": codec}
    return {**facts, "data_type": str(array.dtype)}


def written(folder, driver, codecs):
    jobs = []
    for name, array in (("images", IMAGES), ("labels", LABELS)):
        np.save(folder / f"{name}.npy", array)
    roots = [folder / f"{number}.{driver.rstrip('3')}" for number in range(len(codecs))]
    for root, codec in zip(roots, codecs, strict=True):
        for name, array, chunk in (("images", IMAGES, (5, 4, 3, 3)), ("labels", LABELS, (7,))):
            facts = metadata(driver, array, chunk, codec)
            jobs.append((driver, f"{root}/{name}", facts, f"{folder}/{name}.npy", driver == "n5"))
    subprocess.run([sys.executable, "-c", WRITE], input=json.dumps(jobs), text=True, check=True)
    return roots


@pytest.mark.parametrize(("driver", "codecs"), [("n5", N5), ("zarr", ZARR2), ("zarr3", ZARR3)])
def test_each_compression_is_read(tmp_path, driver, codecs):
    for root in written(tmp_path, driver, codecs):
        source, _ = open_arrays(root, root.suffix[1:])
        assert source.labels.tolist() == LABELS.tolist()
        for index, image in enumerate(IMAGES):
            np.testing.assert_array_equal(source.read(index), image)


ZARR_PYTHON = """
import json, sys
import numpy as np, zarr
folder, version, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
images, labels = np.load(f"{folder}/images.npy"), np.load(f"{folder}/labels.npy")
if how == "write":
    group = zarr.open_group(f"{folder}/a.zarr", mode="w", zarr_format=version)
    group.attrs["classes"] = list("vwxyz")
    for part in ("train", "val"):
        inner = group.create_group(part)
        inner.create_array("images", data=images, chunks=(1, *images.shape[1:]))
        inner.create_array("labels", data=labels)
else:
    group = zarr.open_group(f"{folder}/p.zarr", mode="r")
    assert np.array_equal(group["images"][:], images) and np.array_equal(group["labels"][:], labels)
"""


def zarr_python(folder, version, how):
    pytest.importorskip("zarr")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ZARR_PYTHON, str(folder), str(version), how],
        check=True,
    )


@pytest.mark.parametrize("version", [2, 3])
def test_what_zarr_itself_writes(tmp_path, version):
    np.save(tmp_path / "images.npy", IMAGES)
    np.save(tmp_path / "labels.npy", LABELS)
    zarr_python(tmp_path, version, "write")
    (tmp_path / "a.zarr").rename(tmp_path / "found_by_its_metadata")
    for source in open_arrays(tmp_path / "found_by_its_metadata", "zarr"):
        assert source.labels.tolist() == LABELS.tolist()
        assert source.classes == tuple("vwxyz")
        np.testing.assert_array_equal(source.read(7), IMAGES[7])
    assert kind_of(tmp_path / "found_by_its_metadata") == "zarr"


def packed(folder, images=300):
    """A store of several shards, made by `flambeau pack` of an .npz file."""
    rows = np.random.default_rng(1).integers(0, 256, (images, 8, 8), np.uint8)
    np.savez(folder / "a.npz", images=rows, labels=np.arange(images) % 3)
    pack(folder / "a.npz", folder / "p.zarr", Conversion("raw"), Split(), workers=2)
    return folder / "p.zarr", rows


def test_what_is_packed_is_read_by_zarr_itself(tmp_path):
    _, rows = packed(tmp_path)
    np.save(tmp_path / "images.npy", rows)
    np.save(tmp_path / "labels.npy", np.arange(300) % 3)
    zarr_python(tmp_path, 3, "read")
    files = [path for path in (tmp_path / "p.zarr").rglob("*") if path.is_file()]
    assert len(files) == 6  # of 300 images


# ---------------------------------------------------------------- processes


class Rows(Dataset):
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return torch.from_numpy(self.source.read(index).astype(np.int64))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_what_their_parent_has_read_before(tmp_path, workers):
    path, rows = packed(tmp_path, 40)
    source, _ = open_arrays(path, "zarr")
    source.read(3)  # tensorstore would end each fork from here on
    loader = DataLoader(Rows(source), batch_size=10, num_workers=workers)
    for _ in range(2):
        assert np.array_equal(torch.cat(list(loader)).numpy(), rows)
        np.testing.assert_array_equal(source.read(5), rows[5])


def test_threads_of_one_process(tmp_path):
    path, rows = packed(tmp_path, 40)
    source, _ = open_arrays(path, "zarr")
    with ThreadPoolExecutor(8) as pool:
        for index, read in enumerate(pool.map(source.read, list(range(40)) * 5)):
            np.testing.assert_array_equal(read, rows[index % 40])


def helper():
    return tensorstore_file._processes[os.getpid()]._running


def test_its_process_is_killed_and_comes_back(tmp_path):
    path, rows = packed(tmp_path, 40)
    source, _ = open_arrays(path, "zarr")
    helper().kill()
    with pytest.raises(OSError, match="the process of tensorstore has ended"):
        for _ in range(2):
            source.read(0)
    np.testing.assert_array_equal(source.read(0), rows[0])


def test_an_interrupted_question_leaves_no_answer_behind(tmp_path):
    path, rows = packed(tmp_path, 40)
    source, _ = open_arrays(path, "zarr")
    os.kill(helper().pid, signal.SIGSTOP)
    main = threading.get_ident()
    threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            source.read(0)
    finally:
        signal.signal(signal.SIGINT, old)
    np.testing.assert_array_equal(source.read(1), rows[1])


OWNER = """
import os, sys
from pathlib import Path
from flambeau.data.sources.arrays import tensorstore_file
from flambeau.data.sources.arrays.array_source import open_arrays
source, _ = open_arrays(Path(sys.argv[1]), "zarr")
print(tensorstore_file._processes[os.getpid()]._running.pid, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
if sys.argv[2] == "fork" and os.fork() == 0:  # holds on to all that is open
    import time
    os.close(1), os.close(2)
    time.sleep(3)
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["ended", "killed", "fork"])
def test_its_process_ends_with_the_one_that_reads(tmp_path, how):
    path, _ = packed(tmp_path, 8)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", OWNER, str(path), how],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (-9 if how == "killed" else 0, "")
    end = time.monotonic() + 20
    while is_alive(int(done.stdout)):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - a process may end at any moment
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---------------------------------------------------------------- damage


def test_a_damaged_chunk_is_named(tmp_path):
    (root,) = written(tmp_path, "n5", N5[4:5])
    source, _ = open_arrays(root, "n5")
    block = root / "images/0/0/0/2"
    block.write_bytes(block.read_bytes()[:-5])
    with pytest.raises(OSError, match=r'Error reading local file ".*0/0/0/2"'):
        source.read(11)
    np.testing.assert_array_equal(source.read(4), IMAGES[4])


def test_verify_names_each_image_of_a_damaged_shard(tmp_path):
    path, rows = packed(tmp_path)
    report = verify_file(path, "zarr")
    assert (report.good, report.damaged) == (300, [])
    (tmp_path / "p.zarr.pack.json").unlink()  # crc32c stands in the store as well
    shard = path / "images/c/0/0/0"
    data = bytearray(shard.read_bytes())
    for index in (5, 77):
        data[data.index(rows[index].tobytes()) + 9] ^= 1
    shard.write_bytes(data)
    report = verify_file(path, "zarr")
    assert report.good == 298
    assert [line.record for line in report.damaged] == ["images[5]", "images[77]"]
    assert all("Digest mismatch" in line.what for line in report.damaged)
    last = path / "images/c/1/0/0"
    last.write_bytes(last.read_bytes()[:-4])  # the index stands at the end
    assert verify_file(path, "zarr").good == 254


BOMB = """
import resource, sys
from pathlib import Path
from flambeau.data.sources.arrays.array_source import open_arrays
try:
    open_arrays(Path(sys.argv[1]), "n5")[0]
except Exception as error:
    print(type(error).__name__, error)
from flambeau.data.sources.arrays import tensorstore_file
from pathlib import Path as P
import os, re
pid = tensorstore_file._processes[os.getpid()]._running.pid
print(re.search("VmHWM:\\\\s+(\\\\d+)", P(f"/proc/{pid}/status").read_text())[1])
"""


def test_a_bomb_is_not_unpacked(tmp_path, run_python):
    root = tmp_path / "a.n5"
    for array, sides in (("images", [8, 8, 1]), ("labels", [1])):
        folder = root.joinpath(array, *["0"] * (len(sides) - 1))
        folder.mkdir(parents=True)
        facts = {"dimensions": sides, "blockSize": sides, "dataType": "uint8"}
        facts["compression"] = {"type": "gzip"}
        (root / array / "attributes.json").write_text(json.dumps(facts))
        head = struct.pack(f">HH{len(sides)}I", 0, len(sides), *sides)
        (folder / "0").write_bytes(head + gzip.compress(bytes(1 << 28), 1))
    done = run_python("-c", BOMB, root)
    message, kib = done.stdout.splitlines()
    assert "DamagedData" in message
    assert int(kib) < 200_000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [1 << 40, 6, 8, 3]), ("shape", [24, 6, 8]), ("shape", [-1, 6, 8, 3]), ("shape", "a"),
        ("shape", [24, 1 << 40, 1 << 40, 3]), ("chunks", [24, 1 << 20, 1 << 20, 3]), ("chunks", [0] * 4),
        ("dtype", "|O"), ("dtype", "<M8[ns]"), ("dtype", 7), ("compressor", {"id": "none such"}),
        ("dimension_separator", "../../"), ("shape", None), ("zarr_format", 9), ("chunks", [1.5] * 4),
    ],
)  # fmt: skip
def test_metadata_that_claim_too_much(tmp_path, key, value):
    (root,) = written(tmp_path, "zarr", ZARR2[:1])
    path = root / "images/.zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    began = time.monotonic()
    with pytest.raises(InputError) as error:
        open_arrays(root, "zarr")
    assert str(root) in str(error.value)
    assert len(str(error.value).splitlines()) <= 2
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("attributes", [[1], "text", None, 5])
def test_attributes_that_are_none(tmp_path, attributes):
    path, _ = packed(tmp_path, 8)
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    (path / "zarr.json").write_text(json.dumps(group))
    with pytest.raises(InputError, match=r"zarr\.json is damaged"):
        open_store(path)


def test_labels_that_would_fill_the_memory(tmp_path):
    for count, shape in ((1 << 40, [1 << 40, 4, 4]), (1 << 34, [1 << 34, 4, 4])):
        root = tmp_path / f"{count}.zarr"
        for name, sides in (("images", shape), ("labels", [count])):
            (root / name).mkdir(parents=True)
            facts = {
                "zarr_format": 2, "shape": sides, "chunks": [1, *sides[1:]], "dtype": "|u1",
                "compressor": None, "fill_value": 0, "order": "C", "filters": None,
            }  # fmt: skip
            (root / name / ".zarray").write_text(json.dumps(facts))
        for labelled in (True, False):
            with pytest.raises(InputError, match="so many images"):
                open_arrays(root, "zarr", labelled=labelled)


def test_shards_of_too_many_chunks_and_metadata_too_large(tmp_path):
    path, _ = packed(tmp_path, 8)
    file = path / "images/zarr.json"
    facts = json.loads(file.read_text())
    grid = facts["chunk_grid"]["configuration"]
    grid["chunk_shape"] = [1 << 30, 8, 8]
    file.write_text(json.dumps(facts))
    with pytest.raises(InputError, match="in a file"):
        open_store(path)
    file.write_bytes(b" " * ((1 << 24) + 1))
    with pytest.raises(InputError, match="bytes of metadata"):
        open_store(path)


@pytest.mark.parametrize("driver", ["n5", "zarr", "zarr3"])
def test_mutated_metadata_end_in_one_kind_of_error(tmp_path, driver):
    codecs = {"n5": N5[:1], "zarr": ZARR2[1:2], "zarr3": ZARR3[:1]}[driver]
    (root,) = written(tmp_path, driver, codecs)
    path = root / "images" / tensorstore_file._METADATA[driver]
    whole, numbers = path.read_bytes(), random.Random(0)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(numbers.randint(1, 3)):
            data[numbers.randrange(len(data))] = numbers.choice(b'0123456789-[]{}",:aeE.')
        path.write_bytes(data)
        with contextlib.suppress(InputError, OSError):
            source, _ = open_arrays(root, root.suffix[1:])
            for index in range(0, min(len(source), 50), 7):
                source.read(index)


def test_a_missing_package(tmp_path, monkeypatch):
    (root,) = written(tmp_path, "n5", N5[:1])
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(InputError, match=r"tensorstore\nInstall it: pip install 'flambeau\[form"):
        open_arrays(root, "n5")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_source_that_is_sent_to_another_process(tmp_path, method):
    path, rows = packed(tmp_path, 8)
    source, _ = open_arrays(path, "zarr")
    np.testing.assert_array_equal(source.read(1), rows[1])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).read(2), rows[2])
    with multiprocessing.get_context(method).Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(source.read, (2,)), rows[2])
